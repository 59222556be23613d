"""Draw runs side by side, as `hf-deepwide plot curves` does; `--help` lists the options."""

import sys

from hf_deepwide_cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "curves")
    main("plot")
