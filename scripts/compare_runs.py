"""Draw runs side by side; the same as `hf-deepwide plot curves`, which `--help` explains."""

import sys

from hf_deepwide_cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "curves")
    main("plot")
