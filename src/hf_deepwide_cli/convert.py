"""Convert a checkpoint of fairseq: a Transformer, a model of the MAT fork, or a model of examples/latent_depth.

    hf-deepwide convert checkpoint_best.pt runs/mine --dict dict.en.txt --codes bpecodes
    hf-deepwide convert checkpoint_best.pt runs/mine --dict dict.de.txt dict.en.txt --codes bpecodes
    hf-deepwide convert checkpoint_best.pt runs/mine --no_tokenizer

No code in the file is run: the file may hold only tensors, plain values and an argparse.Namespace. --dict names one
dictionary for both languages, or two, of the source and the target. --codes names the merges of subword-nmt or
fastBPE; without them, each symbol is a word. The tokenizer splits text at white space, so text must be tokenised as it
was for fairseq. The output is a checkpoint for `from_pretrained`, `pipeline`, `hf-deepwide init` and `init_from` of a
recipe. The command loads the output again, as a check.
"""

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("checkpoint", type=Path, help="a file of fairseq, such as checkpoint_best.pt")
    parser.add_argument("output", type=Path, help="folder for the result; the command creates it")
    parser.add_argument("--dict", nargs="+", type=Path, help="dict.LANG.txt, or the source's and the target's")
    parser.add_argument("--codes", type=Path, help="merges of subword-nmt or fastBPE that cut the words")
    parser.add_argument("--no_tokenizer", action="store_true", help="convert the model alone")


def run(args: argparse.Namespace) -> None:
    """Read, convert, save and read back."""
    from transformers import AutoModelForSeq2SeqLM

    from hf_deepwide import from_fairseq
    from hf_deepwide.durable import check_output, saving, whole_folder
    from hf_deepwide.errors import UserError
    from hf_deepwide.loading import load_model, load_tokenizer

    check_output(args.output, inputs=[args.checkpoint])
    if not args.checkpoint.is_file():
        raise UserError(f"{args.checkpoint}: there is no such file; give a checkpoint of fairseq")
    if args.dict is not None and args.no_tokenizer:
        raise UserError("--dict makes a tokenizer and --no_tokenizer makes none: give one of the two")
    if args.dict is None and not args.no_tokenizer:
        raise UserError("give the dictionary by --dict, or --no_tokenizer to convert the model alone")
    if args.codes is not None and args.dict is None:
        raise UserError("--codes belongs to a tokenizer; give the dictionary by --dict, too")
    model, tokenizer = from_fairseq(args.checkpoint, args.dict, args.codes)
    with whole_folder(args.output) as draft:
        with saving(args.output):
            model.save_pretrained(draft)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
        load_model(AutoModelForSeq2SeqLM, draft)
        if tokenizer is not None:
            load_tokenizer(draft)
    entries = "no tokenizer" if tokenizer is None else f"{len(tokenizer):,} tokens"
    print(f"{args.output}: {model.config.model_type}, {model.num_parameters():,} parameters, {entries}")
