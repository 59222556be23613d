"""Compute a faulty step again, as `hf-deepwide replay` does; `--help` lists the options."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("replay")
