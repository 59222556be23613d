"""Write a folder for the Hub, or upload it, as `hf-deepwide share` does; `--help` lists the options."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("share")
