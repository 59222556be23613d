"""Draw the path weights of a Multi-Path model, as `hf-deepwide plot paths` does; `--help` lists the options."""

import sys

from hf_deepwide_cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "paths")
    main("plot")
