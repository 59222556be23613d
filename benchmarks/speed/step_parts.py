"""Measure the share of each kind of operation in the time of a training step, for our model and Marian.

    python benchmarks/speed/step_parts.py
    python benchmarks/speed/step_parts.py --threads 1 --output benchmarks/results/step_parts_amd.json

PyTorch's profiler times each operation. An operation's name and the names of the operations around it decide its kind
(see `kind_of`). Only its own work counts, without the operations that it calls. Numbers are medians over steps.
"""

import statistics
from collections import Counter
from typing import Any

from harness import options, parsed
from questions import size
from reports import markdown_table, measured_on, write_report
from speed import build
from tasks import Training
from torch.profiler import ProfilerActivity, profile
from transformers import MarianConfig

from hf_deepwide import VanillaTransformerConfig
from hf_deepwide.errors import run_script

SIZES = {"d 256": size(6, 256, 4, 1024), "d 128": size(6, 128, 4, 512)}
PRECISIONS = ("float32", "bfloat16")
LOSS = "projection to the vocabulary, and loss"
AROUND = {  # checked first: the name of the operation, or of any operation around it, contains one of these parts
    "optimizer and clipping": ("Optimizer.", "clip_grad", "_foreach", "linalg_vector_norm"),
    LOSS: ("LinearCrossEntropy", "cross_entropy", "log_softmax", "nll_loss", "lm_head"),
}
NAMED = {  # checked last: the innermost operation whose name contains one of these parts decides
    "attention": ("scaled_dot_product", "softmax", "bmm", "baddbmm"),
    "matrix products": ("addmm", "mm", "linear", "matmul", "mkldnn"),
    "norms": ("layer_norm", "LayerNorm"),
    "dropout": ("dropout", "bernoulli", "Dropout", "random_", "aten::ge", "aten::mul", "MulBackward"),
    "casts": ("_to_copy", "ToCopy", "aten::to"),
}
REST = "the rest: residuals, activations, copies, Python"
KINDS = (*NAMED, *AROUND, REST)


def kind_of(event: Any, vocabulary: int) -> str:
    """The kind of an operation, by its name and the names of the operations around it.

    A matrix product belongs to the loss if the vocabulary's size is in one of its shapes.
    """
    names, is_product, has_vocabulary = [], False, False
    while event is not None:
        names.append(event.name)
        is_product |= "mm" in event.name or "linear" in event.name
        has_vocabulary |= any(vocabulary in shape for shape in event.input_shapes or () if isinstance(shape, list))
        event = event.cpu_parent
    for kind, parts in AROUND.items():
        if any(part in name for name in names for part in parts):
            return kind
    if is_product and has_vocabulary:
        return LOSS
    for name in names:
        for kind, parts in NAMED.items():
            if any(part in name for part in parts):
                return kind
    return REST


def parts_of(configs: dict[str, Any], precision: str, steps: int) -> dict[str, dict[str, float]]:
    """Profile the systems in turns; return the milliseconds of a step by system and kind."""
    task = Training(precision)
    step_of = {name: task.step(build(config, task, "cpu"), "cpu") for name, config in configs.items()}
    times: dict[str, list[Counter[str]]] = {name: [] for name in configs}
    for turn in range(3 + steps):
        for name, step in step_of.items():
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
                step()
            found: Counter[str] = Counter()
            for event in profiled.events():
                found[kind_of(event, configs[name].vocab_size)] += event.self_cpu_time_total / 1000
            if turn >= 3:  # the first three turns are warm-up
                times[name].append(found)
    return {
        name: {kind: round(statistics.median(each[kind] for each in own), 2) for kind in KINDS}
        for name, own in times.items()
    }


def table(report: dict) -> str:
    """The report as Markdown."""
    columns = {
        f"{setting}, {name}": parts for setting, rows in report["parts"].items() for name, parts in rows.items()
    }
    totals = {name: sum(parts.values()) for name, parts in columns.items()}
    rows = (
        (kind, *(f"{parts[kind]:.0f} ({parts[kind] / totals[name]:.0%})" for name, parts in columns.items()))
        for kind in KINDS
    )
    return (
        "# Where does a training step go?\n\n"
        f"Milliseconds of a step of {Training().tokens} target tokens, and their share. Each system has the attention "
        "that is faster with the precision. Multiplications by masks count as dropout. "
        f"{report['machine']}, {report['threads']} threads, torch {report['torch']}.\n\n"
    ) + markdown_table(["", *columns], [*rows, ("all", *(f"{total:.0f}" for total in totals.values()))])


def main() -> None:
    """Profile, print, write."""
    args = parsed(options(__doc__, rounds=5))
    report: dict[str, Any] = {**measured_on(), "steps": args.rounds, "parts": {}}
    for name, fields in SIZES.items():
        for precision in PRECISIONS:
            configs = {
                "ours": VanillaTransformerConfig(**fields),
                "Marian": MarianConfig(**fields, forced_eos_token_id=None),
            }
            report["parts"][f"{name}, {precision}"] = parts_of(configs, precision, args.rounds)
    print(table(report))
    if args.output:
        write_report(args.output, report, table)


if __name__ == "__main__":
    run_script(main)
