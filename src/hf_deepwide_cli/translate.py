"""Translate a file or standard input with any encoder-decoder checkpoint.

    hf-deepwide translate --model runs/quickstart < text.de > text.en
    hf-deepwide translate --model runs/quickstart --input text.de.gz --output text.en
    hf-deepwide translate --model facebook/nllb-200-1.3B --source_lang deu_Latn --target_lang eng_Latn < text.de

The output has as many lines as the input, in the same order; an empty line stays empty. A text of any length needs
the memory of a few thousand lines. `--resume` continues after the lines that the output already has.
"""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--input", default="-", help="a UTF-8 file, .gz too; default: standard input")
    parser.add_argument("--output", default="-", help="a file, .gz too; default: standard output")
    parser.add_argument("--source_lang", help="language of the input, as the model or its tokenizer calls it")
    parser.add_argument("--target_lang", help="language to translate into")
    parser.add_argument("--num_beams", type=int, default=5, help="beam size; 1 is greedy search (default: 5)")
    parser.add_argument("--length_penalty", type=float, default=1.0, help="larger favours longer outputs (default: 1)")
    parser.add_argument("--max_tokens", type=int, default=4096, help="source tokens in a batch (default: 4096)")
    parser.add_argument("--precision", default="float32", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted output")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--trust_remote_code", action="store_true", help="run model code from the checkpoint")


def run(args: argparse.Namespace) -> None:
    """Load the model, translate."""
    from hf_deepwide.evaluation.checkpoint import device_of, load_translator
    from hf_deepwide.evaluation.stream import translate_stream
    from hf_deepwide.evaluation.translate import EvaluationArguments, translate

    settings = EvaluationArguments(
        num_beams=args.num_beams,
        length_penalty=args.length_penalty,
        max_tokens=args.max_tokens,
        precision=args.precision,
    )
    device = device_of(args.device)
    model, tokenizer = load_translator(args.model, trust_remote_code=args.trust_remote_code)
    model.to(device)
    translate_stream(
        lambda lines: translate(
            model, tokenizer, lines, settings, source_lang=args.source_lang, target_lang=args.target_lang
        ),
        args.input,
        args.output,
        resume=args.resume,
        overwrite=args.overwrite,
    )
