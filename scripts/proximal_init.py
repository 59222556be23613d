"""Start a model from a trained base, as `hf-deepwide init` does; `--help` lists the options."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("init")
