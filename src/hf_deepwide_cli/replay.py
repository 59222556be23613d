"""Repeat a training step in which a loss or gradient was NaN or infinite, and show where the fault begins.

    hf-deepwide replay runs/wmt14_en_de_mat/faults/step-8123
    hf-deepwide replay runs/wmt14_en_de_mat/faults/step-8123 --rank 1 --device cuda

A run writes the folder when it stops at such a step, or skips it (training.on_nonfinite). The folder holds the
batches, the states of the random generators before each batch, and the model before the step. The command changes
nothing in it.
"""

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, help="a folder faults/step-… of a run")
    parser.add_argument("--rank", type=int, default=0, help="number of the process, of several (default: 0)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")


def run(args: argparse.Namespace) -> None:
    """Replay the step, and print the results."""
    import torch

    from hf_deepwide.errors import UserError
    from hf_deepwide.training.replay import read_fault, replay

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU; accepted here: cpu")
    report = read_fault(args.folder)
    print(f"step {report['step']} of the run: {report['what']}")
    result = replay(args.folder, args.rank, args.device)
    for number, loss in enumerate(result.losses, start=1):
        print(f"batch {number}: loss {loss:g}")
    print(f"first output that is not finite: {result.module or 'none'}")
    print(f"gradients that are not finite: {', '.join(result.parameters) or 'none'}")
    batches = [batch for batch in report["batches"] if batch["rank"] == args.rank]
    for number, row in result.sentences:
        pair = batches[number]["sentences"][row]
        print(f"not finite on its own: {pair['source']!r} -> {pair['target']!r}")
