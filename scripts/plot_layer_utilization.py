"""Draw which layers latent-depth models use, as `hf-deepwide plot layers` does; `--help` lists the options."""

import sys

from hf_deepwide_cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "layers")
    main("plot")
