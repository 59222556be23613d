"""Write a folder for the Hugging Face Hub that works without this package, or upload it.

    hf-deepwide share runs/multi30k-mat to-upload
    hf-deepwide share runs/multi30k-mat --repo_id me/multi30k-mat --private
    hf-deepwide share runs/multi30k-mat --space --repo_id me/multi30k-mat-demo
    hf-deepwide share runs/multi30k-deep to-upload --as m2m_100

Without the package, the folder or repository loads through `AutoModelForSeq2SeqLM.from_pretrained` and
`pipeline("translation", model=…)` with `trust_remote_code=True`. Log in once by `hf auth login`, or set HF_TOKEN.

`--space` writes a Hugging Face Space instead: the page of `hf-deepwide demo` with this model.

`--as` writes the model as a class of Transformers, which needs no code of ours: m2m_100 (pre-norm, sinusoids), marian
(post-norm, Marian's sinusoids), bart (post-norm, learned positions) or mbart (pre-norm, learned positions). A model is
refused if it would not compute exactly the same function in this class.
"""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", help="folder of a finished run, or a checkpoint; for a Space also a Hub id")
    parser.add_argument("folder", nargs="?", help="folder to write; may be left out with --repo_id")
    parser.add_argument("--repo_id", help="repository on the Hub to upload to, e.g. me/multi30k-mat")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--license", help="the Hub's name of the model's licence, for the card, e.g. apache-2.0")
    parser.add_argument("--commit_message", help="message of the commit on the Hub")
    parser.add_argument("--overwrite", action="store_true", help="replace the files that an earlier share wrote")
    parser.add_argument("--space", action="store_true", help="write a Space that shows the model on a page")
    parser.add_argument("--as", dest="as_", metavar="CLASS", help="m2m_100, marian, bart or mbart")
    parser.add_argument("--no_verify", dest="verify", action="store_false", help="do not try the result out")


def run(args: argparse.Namespace) -> None:
    """Share the model, and print the place of the result."""
    from hf_deepwide.sharing.share import share

    print(share(**vars(args)))
