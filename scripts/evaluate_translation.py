"""Score a checkpoint or translations; the same as `hf-deepwide evaluate`, which `--help` explains."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("evaluate")
