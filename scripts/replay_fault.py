"""Compute a faulty step again; the same as `hf-deepwide replay`, which `--help` explains."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("replay")
