"""Score translations that you have: print their log-probability under a model (forced decoding).

    hf-deepwide score --model runs/quickstart --source test.de --target test.en > scores.tsv

A line of the output has the natural log-probability of a target, a tab, and the number of its tokens. This number
includes `</s>`, and the language code with which beam search begins. Beam search ranks translations by
log-probability / tokens ** length_penalty. `hf-deepwide translate --n_best` writes lists of translations, which
another model can score.
"""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--source", required=True, help="file of source sentences, one a line")
    parser.add_argument("--target", required=True, help="file of translations, one a line")
    parser.add_argument("--output", help="a file; default: standard output")
    parser.add_argument("--source_lang", help="language of the source, as the model or its tokenizer calls it")
    parser.add_argument("--target_lang", help="language of the target")
    parser.add_argument("--max_tokens", type=int, default=1024, help="tokens in a batch (default: 1024)")
    parser.add_argument("--precision", default="float32", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--trust_remote_code", action="store_true", help="run model code from the checkpoint")


def run(args: argparse.Namespace) -> None:
    """Read both files, load the model, and score the targets."""
    from pathlib import Path

    from hf_deepwide.data.text_files import read_lines
    from hf_deepwide.durable import check_output_file, write_whole
    from hf_deepwide.evaluation.arguments import EvaluationArguments
    from hf_deepwide.evaluation.checkpoint import device_of, load_translator
    from hf_deepwide.evaluation.forced_decoding import score_targets
    from hf_deepwide.evaluation.metrics import check_parallel

    settings = EvaluationArguments.from_options(max_tokens=args.max_tokens, precision=args.precision)
    device, files = device_of(args.device), [Path(args.source), Path(args.target)]
    if args.output is not None:
        check_output_file(Path(args.output), inputs=files, overwrite=args.overwrite, option="--overwrite")
    sources, targets = (list(read_lines(file)) for file in files)
    check_parallel(targets, sources, (args.target, args.source))  # before a model is loaded
    model, tokenizer = load_translator(args.model, trust_remote_code=args.trust_remote_code)
    scores = score_targets(model.to(device), tokenizer, sources, targets, settings, args.source_lang, args.target_lang)
    text = "".join(f"{score.log_probability:.4f}\t{score.tokens}\n" for score in scores)
    if args.output is None:
        print(text, end="")
    else:
        write_whole(Path(args.output), text)
