"""Show a web page that translates with one or several models, and draws how each model computed its translation.

    hf-deepwide demo runs/quickstart
    hf-deepwide demo runs/vanilla runs/mat exported-int8 --port 8000

A model is the folder of a run, a checkpoint, a folder that was exported to CTranslate2, or a Hub id. The page shows
translations, all beams with their scores, times, and figures: attention of each branch, layers that latent depth
uses, weights of paths, gates of depth-wise LSTMs. Only this machine can open the page, unless --host allows others.
"""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a folder or a Hub id")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=int, help="default: the first free port from 7860 on")


def run(args: argparse.Namespace) -> None:
    """Load the models, and serve the page until it is interrupted."""
    from hf_deepwide.demo import serve

    serve(args.models, args.host, args.port)
