"""Draw the path weights of a Multi-Path model; the same as `hf-deepwide plot paths`, which `--help` explains."""

import sys

from hf_deepwide_cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "paths")
    main("plot")
