"""Prepare a corpus as the papers did, from the Hugging Face Hub or from files that you have.

    hf-deepwide data                                  list the corpora, and on what terms they may be used
    hf-deepwide data iwslt14-de-en --dry-run          show what would be fetched, and what becomes of it
    hf-deepwide data iwslt14-de-en                    prepare it
    hf-deepwide data wmt14-en-de --output corpora --bpe
    hf-deepwide data multi30k --source clone-of-multi30k --languages de fr
    hf-deepwide data conala --source PATH --output runs/code

Corpora: iwslt14-de-en, wmt14-en-de, wmt14-en-fr, wmt15-cs-en, wmt17, wmt19-de-fr, wmt19-en-de, ted8, opus100,
multi30k, multi30k-tokenised; of code, conala, django. The last line that is printed names a recipe that reads the
prepared corpus.

--source is a folder with the files as released (.gz or not), or with copies of the Hub's data sets. Tokenising needs
`pip install 'hf_deepwide[corpora]'`.

Files are written in full or not at all. A manifest beside them has their digests. A second start of the command checks
the existing files by it, and makes only the missing files. Counts and digests are compared with the published ones;
--unchecked accepts others, to prepare a part of a corpus.
"""

import argparse
import shlex
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the corpus; without a name, all corpora are listed")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder in which the corpus is made (default: $HF_DEEPWIDE_DATA, or the working directory)",
    )
    parser.add_argument("--source", type=Path, metavar="DIR", help="a folder to read instead of the Hub")
    parser.add_argument("--languages", nargs="+", metavar="CODE", help="only pairs with these languages")
    parser.add_argument(
        "--bpe",
        type=int,
        nargs="?",
        const=True,
        metavar="N",
        help="learn N merges of subword-nmt, or as many as the paper",
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="accept other counts and texts than the published ones"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and end")


def run(args: argparse.Namespace) -> None:
    """List the corpora; or describe the preparation of one, and carry it out."""
    from hf_deepwide.data.arguments import Places
    from hf_deepwide.data.prepared.catalogue import CORPORA
    from hf_deepwide.data.prepared.code import CODE_CORPORA, CodeCorpus
    from hf_deepwide.data.prepared.corpus import Corpus
    from hf_deepwide.data.prepared.prepare import Preparation
    from hf_deepwide.errors import UserError, quote
    from hf_deepwide.reading import home_expanded

    if args.name is None:
        catalogue: list[Corpus | CodeCorpus] = [*CORPORA.values(), *CODE_CORPORA.values()]
        for corpus in catalogue:
            print(f"{corpus.name}: {corpus.what}\n  licence: {corpus.licence}")
        return
    if args.name not in {**CORPORA, **CODE_CORPORA}:
        raise UserError(f"there is no corpus {quote(args.name)}; accepted: {', '.join((*CORPORA, *CODE_CORPORA))}")
    output = Places().resolve(".") if args.output is None else home_expanded(args.output, "--output")
    source = args.source and home_expanded(args.source, "--source")
    if args.name in CODE_CORPORA:
        _prepare_code(args, source, output)
        return
    preparation = Preparation(
        CORPORA[args.name],
        output,
        source,
        args.languages,
        args.bpe,
        args.unchecked,
    )
    print(preparation.describe(), flush=True)
    if args.dry_run:
        return
    preparation.run()
    root = "" if args.output is None else f" --data.root {shlex.quote(str(args.output))}"
    if preparation.example is None:
        print("no recipe trains on these languages alone, as they have no validation set; prepare another one, too")
    else:
        print(f"train: hf-deepwide train {preparation.example}{root}")


def _prepare_code(args: argparse.Namespace, source: Path | None, output: Path) -> None:
    """Write a corpus of code from its published files."""
    from hf_deepwide.data.prepared.code import CODE_CORPORA
    from hf_deepwide.errors import UserError, one_line

    corpus = CODE_CORPORA[args.name]
    without = [flag for flag in ("languages", "bpe", "unchecked", "dry_run") if getattr(args, flag)]
    if without:
        raise UserError(f"--{without[0].replace('_', '-')}: {corpus.name}, a corpus of code, has no such option")
    if source is None:
        raise UserError(f"--source: {corpus.name} is not fetched; name a folder with its published files")
    if not source.is_dir():
        raise UserError(f"--source {one_line(source)}: there is no such folder")
    counts = corpus.prepare(source, output)
    print(", ".join(f"{split}: {count:,} pairs" for split, count in counts.items()))
    print(f"train: hf-deepwide train {corpus.example} --data.root {shlex.quote(str(output))}")
