"""Test whether systems differ: finished runs, or files of translations.

    hf-deepwide compare runs/vanilla runs/mat
    hf-deepwide compare runs/vanilla-1,runs/vanilla-2,runs/vanilla-3 runs/mat-1,runs/mat-2,runs/mat-3
    hf-deepwide compare vanilla.de.txt mat.de.txt --reference test.de.gz

The first system is the baseline. A system is the folder of a finished run or a file of translations. Runs of several
seeds are joined by commas: Welch's t-test over the seeds then says whether other trainings would differ. The paired
test over sentences (approximate randomisation) speaks of these trained models alone.
"""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("systems", nargs="+", metavar="SYSTEM", help="runs or files; several seeds joined by commas")
    parser.add_argument("--reference", help="file of references; default: the test set of the runs' recipe")
    parser.add_argument("--metrics", nargs="+", help="of bleu, chrf, multi_bleu; default: bleu chrf")
    parser.add_argument("--lowercase", action="store_true", help="score without regard to case")


def run(args: argparse.Namespace) -> None:
    """Compare, print a table."""
    from hf_deepwide.runs.compare import compare_runs, report

    print(report(compare_runs(args.systems, args.reference, args.metrics or ["bleu", "chrf"], args.lowercase)))
