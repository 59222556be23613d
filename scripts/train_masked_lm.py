"""Train a masked language model by a recipe, as `hf-deepwide train masked-lm` does; `--help` lists the options."""

import sys

from hf_deepwide_cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "masked-lm")
    main("train")
