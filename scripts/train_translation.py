"""Train a translation model by a recipe; the same as `hf-deepwide train`, which `--help` explains."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("train")
