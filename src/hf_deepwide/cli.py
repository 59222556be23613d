"""The command `hf-deepwide` as a module, for launchers: `accelerate launch -m hf_deepwide.cli train RECIPE`."""

from hf_deepwide_cli import main

if __name__ == "__main__":
    main()
