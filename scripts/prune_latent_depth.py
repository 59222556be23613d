"""Make a plain model of chosen layers, as `hf-deepwide prune` does; `--help` lists the options."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("prune")
