"""Draw which layers latent-depth models use; the same as `hf-deepwide plot layers`, which `--help` explains."""

import sys

from hf_deepwide_cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "layers")
    main("plot")
