"""Write a folder for the Hugging Face Hub that works without this package, or upload it.

    python scripts/share.py runs/multi30k-mat to-upload
    python scripts/share.py runs/multi30k-mat --repo-id me/multi30k-mat --private

Without the package, the folder or repository loads through `AutoModelForSeq2SeqLM.from_pretrained` and
`pipeline("translation", model=…)` with `trust_remote_code=True`. Log in once by `hf auth login`, or set HF_TOKEN.
"""

import logging

from hf_deepwide.errors import run_script
from hf_deepwide.export import share
from hf_deepwide_cli.parser import Parser


def main() -> None:
    """Share; print where the result is."""
    parser = Parser(description=__doc__)
    parser.add_argument("model", help="folder of a finished run, or a checkpoint")
    parser.add_argument("folder", nargs="?", help="folder to write; may be left out with --repo-id")
    parser.add_argument("--repo-id", "--repo_id", help="repository on the Hub to upload to, e.g. me/multi30k-mat")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--license", help="the Hub's name of the model's licence, for the card, e.g. apache-2.0")
    parser.add_argument("--commit-message", help="of the upload")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier share in the folder, and nothing else"
    )
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not try the result out")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    print(share(**vars(parser.parse_args())))


if __name__ == "__main__":
    run_script(main)
