"""Average the weights of checkpoints, as `hf-deepwide average` does; `--help` lists the options."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("average")
