"""Translate a file or standard input with any encoder-decoder checkpoint, or with a folder exported to CTranslate2.

    hf-deepwide translate --model runs/quickstart < text.de > text.en
    hf-deepwide translate --model runs/quickstart --input text.de.gz --output text.en
    hf-deepwide translate --model runs/quickstart --num_beams 8 --n_best 8 < text.de > lists.jsonl
    hf-deepwide translate --model runs/quickstart --sample --seed 1 < mono.de > synthetic.en
    hf-deepwide translate --model facebook/nllb-200-1.3B --source_lang deu_Latn --target_lang eng_Latn < text.de

The output has as many lines as the input, in the same order; an empty line stays empty. A text of any length needs
only the memory for a few thousand lines. `--resume` continues after the lines that the output already has. It does not
check which model made these lines.

With `--n_best N` a line of the output is JSON: a list of the N best translations. Each has its `text` and its `score`,
the log-probability divided by length**length_penalty. The list of an empty line is empty.

`--sample` draws each token at random from the model's distribution, as is usual for back-translation. The random
numbers depend only on the seed and the line. Equal lines get equal translations, also in another run, and after
`--resume`.
"""

import argparse

DRAWING = ("temperature", "top_k", "seed")  # options that say how to draw
SEARCHING = ("num_beams", "length_penalty", "max_tokens", "precision")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--model", required=True, help="a folder, an exported one too, or a Hub id")
    parser.add_argument("--input", default="-", help="a UTF-8 file, .gz too; default: standard input")
    parser.add_argument("--output", default="-", help="a file, .gz too; default: standard output")
    parser.add_argument("--source_lang", help="language of the input, as the model or its tokenizer calls it")
    parser.add_argument("--target_lang", help="language to translate into")
    parser.add_argument("--num_beams", type=int, help="beam size; 1 is greedy search (default: the model's own, or 5)")
    parser.add_argument(
        "--length_penalty", type=float, help="larger favours longer outputs (default: the model's own, or 1)"
    )
    parser.add_argument("--n_best", type=int, help="write this many translations of each line, with scores, as JSON")
    parser.add_argument("--sample", action="store_true", help="draw translations at random instead of searching")
    parser.add_argument("--temperature", type=float, help="--sample: a lower value prefers likely tokens (default: 1)")
    parser.add_argument("--top_k", type=int, help="--sample: draw from this many likely tokens; 0 (default): from all")
    parser.add_argument("--seed", type=int, help="--sample: another seed draws other translations (default: 1)")
    parser.add_argument("--max_tokens", type=int, default=4096, help="source tokens in a batch (default: 4096)")
    parser.add_argument("--precision", default="float32", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted output")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--trust_remote_code", action="store_true", help="run model code from the checkpoint")


def run(args: argparse.Namespace) -> None:
    """Load the model, and translate."""
    import json

    from hf_deepwide.errors import UserError
    from hf_deepwide.evaluation.arguments import EvaluationArguments, own_search
    from hf_deepwide.evaluation.checkpoint import device_of, load_any_translator
    from hf_deepwide.evaluation.sampling import SamplingArguments
    from hf_deepwide.evaluation.stream import check_stream, translate_stream
    from hf_deepwide.evaluation.translate import as_line, generate_beams, translate

    drawing = {name: value for name in DRAWING if (value := getattr(args, name)) is not None}
    if drawing and not args.sample:
        raise UserError(f"--{next(iter(drawing))} is for drawing translations at random; add --sample")
    if args.sample and args.num_beams not in (None, 1):
        raise UserError(f"--sample draws one translation, and --num_beams {args.num_beams} searches; give only one")
    if args.sample and args.length_penalty is not None:
        raise UserError("--length_penalty is for searching with beams, and --sample draws at random; give only one")
    if args.sample and args.n_best is not None:
        raise UserError("--n_best lists what a search finds, and --sample draws at random; give only one")
    sampling = SamplingArguments(**drawing) if args.sample else None
    searching = {name: value for name in SEARCHING if (value := getattr(args, name)) is not None}
    EvaluationArguments.from_options(**searching)  # before a model is loaded
    check_stream(args.input, args.output, resume=args.resume, overwrite=args.overwrite)
    device_of(args.device)
    model, tokenizer = load_any_translator(args.model, args.device, args.trust_remote_code)
    settings = own_search(model, **(searching | {"num_beams": 1} if args.sample else searching))
    if args.n_best is not None and not 2 <= args.n_best <= settings.num_beams:
        raise UserError(
            f"--n_best is {args.n_best}; accepted: 2 to the beam size, which is {settings.num_beams} (--num_beams)"
        )
    pair = {"source_lang": args.source_lang, "target_lang": args.target_lang}

    def lists(lines: list[str], first_line: int) -> list[str]:
        found = generate_beams(model, tokenizer, lines, settings, first_line=first_line, **pair)
        return [
            json.dumps(
                [{"text": as_line(tokenizer, each.ids), "score": each.score} for each in beams[: args.n_best]],
                ensure_ascii=False,
            )
            for beams in found
        ]

    def single(lines: list[str], first_line: int) -> list[str]:
        return translate(model, tokenizer, lines, settings, sampling=sampling, first_line=first_line, **pair)

    translate_stream(
        single if args.n_best is None else lists,
        args.input,
        args.output,
        resume=args.resume,
        overwrite=args.overwrite,
    )
