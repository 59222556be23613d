"""Test whether systems differ: finished runs, or files of translations.

    hf-deepwide compare runs/vanilla runs/mat
    hf-deepwide compare runs/vanilla-1,runs/vanilla-2,runs/vanilla-3 runs/mat-1,runs/mat-2,runs/mat-3
    hf-deepwide compare vanilla.de.txt mat.de.txt --reference test.de.gz

    hf-deepwide compare … --equivalence bleu=0.5 loss=0.02 --output comparison.json

The first system is the baseline. A system is the folder of a finished run, or a file of translations. Commas join the
runs of several seeds into one system. Welch's t-test over the seeds then tests whether new trainings would differ,
too. Holm's adjustment corrects for the number of systems. --equivalence tests whether a difference is within a margin.
The paired test over sentences (approximate randomisation) is about these trained models only. Validation losses are
shown first, if all systems are runs with the same tokenizer and validation set.

Several test sets are compared together; --test_set chooses one of them by its name in the recipes.

Runs are scored by the section `evaluation` of their recipes, if these sections agree. All runs must have the same test
set. A warning is printed if runs were translated with different beams, or if a system's runs have different recipes.

With two or three runs of a system, believe Welch's test rather than the interval, which is then too narrow.
"""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("systems", nargs="+", metavar="SYSTEM", help="runs or files; several seeds joined by commas")
    parser.add_argument("--reference", help="file of references; default: the test set of the runs' recipe")
    parser.add_argument("--test_set", help="one of the test sets of the runs' recipes (default: all together)")
    accepted = (
        "of bleu, chrf, multi_bleu, moses_bleu; for code: sentence_bleu4, valid_python, valid_python_line, valid_java"
    )
    parser.add_argument("--metrics", nargs="+", help=f"{accepted} (default: the recipes', or bleu chrf)")
    parser.add_argument(
        "--lowercase",
        action=argparse.BooleanOptionalAction,
        help="score without regard to case (default: as the recipes say)",
    )
    parser.add_argument("--tokenize", help="sacreBLEU's tokenizer (default: the recipes', or 13a)")
    parser.add_argument("--target_lang", help="language for moses_bleu and --tokenize auto (default: the recipes')")
    parser.add_argument(
        "--equivalence", nargs="+", metavar="METRIC=MARGIN", help="test for differences within these margins"
    )
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")


def run(args: argparse.Namespace) -> None:
    """Compare the systems, print a table, and write it as JSON."""
    from pathlib import Path

    from hf_deepwide.durable import check_output_file, write_whole
    from hf_deepwide.runs.comparable import inputs_of
    from hf_deepwide.runs.compare import compare_runs, parse_margins, report, to_json

    if args.output:
        inputs = inputs_of(args.systems, args.reference)
        check_output_file(Path(args.output), inputs=inputs, overwrite=args.overwrite, option="--overwrite")
    margins = parse_margins(args.equivalence or [])
    compared = compare_runs(
        args.systems,
        args.reference,
        args.metrics,
        args.lowercase,
        args.tokenize,
        margins,
        args.test_set,
        args.target_lang,
    )
    print(report(compared))
    if args.output:
        write_whole(Path(args.output), to_json(compared))
