"""Score a checkpoint or translations, as `hf-deepwide evaluate` does; `--help` lists the options."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("evaluate")
