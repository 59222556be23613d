"""Average the weights of checkpoints; the same as `hf-deepwide average`, which `--help` explains."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("average")
