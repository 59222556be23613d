"""Write a folder for the Hub, or upload it; the same as `hf-deepwide share`, which `--help` explains."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("share")
