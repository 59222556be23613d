"""Make a plain model of chosen layers; the same as `hf-deepwide prune`, which `--help` explains."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("prune")
