"""Start a model from a trained base; the same as `hf-deepwide init`, which `--help` explains."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("init")
