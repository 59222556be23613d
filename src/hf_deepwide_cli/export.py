"""Write a model for another engine: CTranslate2 or ONNX.

    hf-deepwide export runs/multi30k-mat --to ctranslate2 --output exported
    hf-deepwide export runs/multi30k-mat --to ctranslate2 --output exported-int8 --quantization int8
    hf-deepwide export runs/multi30k-lstm --to onnx --output exported-onnx

The model is a folder or a Hub id. CTranslate2 translates without PyTorch. In int8, on one CPU thread, it was 1.5 to 6
times as fast as `generate` in float32; with two threads it often was not faster. CTranslate2 takes most families, and
refuses the others. ONNX takes nearly all models, as an encoder and a decoder with cache.

The folder holds the model, its tokenizer, and a README with code that translates without this package. The result
computes the same function as the model: scores in float32 are compared before the folder is written.
"""

import argparse
from pathlib import Path

FORMS = ("ctranslate2", "onnx")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", help="a folder or Hub id of a model")
    parser.add_argument("--to", required=True, choices=FORMS, help="the engine to write for")
    parser.add_argument("--output", type=Path, required=True, help="folder for the result; the command creates it")
    parser.add_argument("--quantization", help="type of CTranslate2's weights: int8, float16, …; default: float32")
    parser.add_argument("--language", help="name or index of the posterior, if a latent-depth model has several")


def run(args: argparse.Namespace) -> None:
    """Export the model, and print the path of the result."""
    from hf_deepwide import export_ctranslate2, export_onnx
    from hf_deepwide.errors import UserError

    options = {} if args.quantization is None else {"quantization": args.quantization}
    if args.to == "ctranslate2":
        print(export_ctranslate2(args.model, args.output, language=args.language, **options))
    elif options:
        raise UserError("--quantization is for --to ctranslate2; ONNX is written in float32")
    else:
        print(export_onnx(args.model, args.output, language=args.language))
