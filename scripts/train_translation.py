"""Train a translation model by a recipe, as `hf-deepwide train` does; `--help` lists the options."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("train")
