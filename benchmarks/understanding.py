"""Measure what drop-branch does to language understanding, as in MAT's Tables 9 and 10, but with a small model.

    HF_DEEPWIDE_DATA=PATH python benchmarks/understanding.py                  pre-train, fine-tune, write the report
    HF_DEEPWIDE_DATA=PATH python benchmarks/understanding.py --tasks mrpc     one task only
    HF_DEEPWIDE_DATA=PATH python benchmarks/understanding.py --report         train nothing; report the runs there are

No RoBERTa is downloaded. A small RoBERTa is pre-trained on the English text at hand. It is then fine-tuned on each
task: plainly, and as MAT with two copies of each attention. Every training is a process of `hf-deepwide train`. A
finished run is not made again, and an interrupted run is resumed: give the same command.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reports import markdown_table, write_report
from trainings import train

from hf_deepwide.analysis.figures import new_figure, save
from hf_deepwide.checkpoint_files import read_results
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.evaluation.seeds import holm, welch
from hf_deepwide.runs.compare import p_value

ROOT = Path(__file__).parents[1]
SEEDS = [1, 2, 3, 4, 5]
RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # of drop-branch, as in Table 10
PLAIN = "plain"
SYSTEMS = {PLAIN: {"attention_branches": 1, "drop_branch": 0.0}} | {
    f"MAT, drop-branch {rate}": {"attention_branches": 2, "drop_branch": rate} for rate in RATES
}
TEXTS = ("multi30k/train.en.gz", "tatoeba_deen/train.en.gz", "sst2/train.tsv.gz", "mrpc/msr_paraphrase_train.txt.gz")
HELD_OUT = 500  # one line in so many is for the validation in pre-training
SIZE = {
    "family": "mat_roberta", "d_model": 256, "encoder_layers": 4, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 1024, "max_position_embeddings": 130, "dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
PRETRAINING = {
    "seed": 1, "max_tokens": 8192, "num_train_epochs": 4, "learning_rate": 1e-3, "lr_scheduler_type": "linear",
    "warmup_steps": 500, "adam_beta2": 0.98, "max_grad_norm": 1.0, "eval_strategy": "epoch",
    "save_strategy": "epoch", "load_best_model_at_end": False, "logging_steps": 50,
}  # fmt: skip
FINE_TUNING = {
    "seeds": SEEDS, "per_device_train_batch_size": 32, "learning_rate": 2e-4, "warmup_steps": 0.1,
    "lr_scheduler_type": "linear", "weight_decay": 0.1, "adam_beta2": 0.98, "adam_epsilon": 1e-6,
    "per_device_eval_batch_size": 128, "metric_for_best_model": "accuracy", "bf16": True,
    "attn_implementation": "eager", "use_cpu": True,
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "mrpc": {
        "title": "MRPC, paraphrases",
        "epochs": 6,
        "data": {
            "train": "mrpc/msr_paraphrase_train.txt.gz", "test": "mrpc/msr_paraphrase_test.txt.gz",
            "validation_size": 408, "sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality",
        },
    },
    "sst2": {
        "title": "SST-2, sentiment",
        "epochs": 2,
        "data": {
            "train": "sst2/train.tsv.gz", "validation": "sst2/dev.tsv.gz", "test": "sst2/test.tsv.gz",
            "sentence1": "sentence", "label": "label",
        },
    },
}  # fmt: skip


def sentences(file: Path) -> Iterator[str]:
    """Yield the sentences of a text file, or of the table of a task."""
    lines = iter(read_lines(file))
    if ".tsv" not in file.name and "mrpc" not in file.parts:
        yield from lines
        return
    columns = next(lines).split("\t")
    chosen = [number for number, name in enumerate(columns) if name in ("sentence", "#1 String", "#2 String")]
    for line in lines:
        cells = line.split("\t")
        yield from (cells[number] for number in chosen)


def write_text(data: Path, folder: Path) -> None:
    """Write the text to pre-train on, and every 500th of its lines to validate on."""
    if (folder / "train.en").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    kept = [line.strip() for name in TEXTS for line in sentences(data / name) if line.strip()]
    write_whole(folder / "validation.en", "\n".join(kept[::HELD_OUT]) + "\n")
    del kept[::HELD_OUT]
    write_whole(folder / "train.en", "\n".join(kept) + "\n")


def pretraining(runs: Path) -> dict[str, Any]:
    """The recipe of the small RoBERTa."""
    text = (runs / "text").resolve()
    return {
        "model": {**SIZE, "attention_branches": 1, "drop_branch": 0.0},
        "data": {"languages": ["en"], "train": str(text / "train"), "validation": str(text / "validation")},
        "tokenizer": {"vocab_size": 8000, "lowercase": True},
        "training": {**PRETRAINING, "output_dir": str(runs / "pretrained")},
    }


def fine_tuning(runs: Path, task: str, system: str) -> dict[str, Any]:
    """The recipe of one system on one task, for all seeds."""
    base, name = str(runs / "pretrained"), system.replace(", ", "_").replace(" ", "-")
    return {
        "model": {**SIZE, **SYSTEMS[system], "init_from": base},
        "data": {"format": "tsv", "labels": ["0", "1"], "max_length": 128, **TASKS[task]["data"]},
        "tokenizer": {"path": base},
        "training": {
            **FINE_TUNING,
            "num_train_epochs": TASKS[task]["epochs"],
            "output_dir": str(runs / task / name),
        },
    }


def most_frequent(data: Path, task: str) -> dict[str, float]:
    """The test scores, in per cent, of always giving the most frequent label of training; F1 is for the label 1."""
    fields = TASKS[task]["data"]
    labels = {}
    for split in ("train", "test"):
        head, *lines = read_lines(data / fields[split])
        column = head.split("\t").index(fields["label"])
        labels[split] = [line.split("\t")[column] for line in lines]
    answer = statistics.mode(labels["train"])
    right = labels["test"].count(answer) / len(labels["test"])
    return {"accuracy": 100 * right, "f1": 100 * 2 * right / (1 + right) if answer == "1" else 0.0}


def gather(runs: Path, tasks: list[str], data: Path) -> dict[str, Any]:
    """Collect the validation and test scores of all finished runs by seed, and scores of the most frequent label."""
    report: dict[str, Any] = {"size": SIZE, "pretraining": PRETRAINING, "fine_tuning": FINE_TUNING}
    report |= {"tasks": {}, "most_frequent": {}}
    for task in tasks:
        rows = {}
        for system in SYSTEMS:
            if read := read_results(Path(fine_tuning(runs, task, system)["training"]["output_dir"])):
                rows[system] = {
                    "parameters": read["parameters"],
                    **{
                        f"{split}_{metric}": [seed[split][metric] for seed in read["seeds"]]
                        for split in ("validation", "test")
                        for metric in ("accuracy", "f1")
                    },
                }
                report["machine"], report["versions"] = read["machine"], read["versions"]
        if rows:
            report["tasks"][task] = rows
            report["most_frequent"][task] = most_frequent(data, task)
    return report


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    text = (
        "# What does drop-branch do to language understanding?\n\n"
        "A small RoBERTa is pre-trained on English text of the corpora at hand. It is then fine-tuned plainly, and as "
        f"MAT with two copies of each attention. {len(SEEDS)} seeds; per cent on the test set; ± is a standard "
        "deviation over seeds. p comes from Welch's t-test against plain fine-tuning, with the seed as the unit, "
        "adjusted by Holm for the number of systems.\n"
    )
    head = ["system", "parameters", "median accuracy", "mean accuracy", "mean F1", "validation accuracy", "p"]
    for task, rows in report["tasks"].items():
        least = report["most_frequent"][task]
        accuracy = f"{least['accuracy']:.2f}"
        cells = [("the most frequent label", "", accuracy, accuracy, f"{least['f1']:.2f}", "", "")]
        others = [name for name in rows if name != PLAIN and PLAIN in rows]
        tested = [welch(rows[name]["test_accuracy"], rows[PLAIN]["test_accuracy"]) for name in others]
        p_of = dict(zip(others, holm(tested), strict=True))
        for name, row in rows.items():
            size, median = f"{row['parameters'] / 1e6:.2f} M", f"{statistics.median(row['test_accuracy']):.2f}"
            spreads = (spread(row[key]) for key in ("test_accuracy", "test_f1", "validation_accuracy"))
            cells.append((name, size, median, *spreads, p_value(p_of.get(name))))
        text += f"\n## {TASKS[task]['title']}\n\n{markdown_table(head, cells)}"
    return text


def spread(values: list[float]) -> str:
    """The mean and the standard deviation, as text."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Plot accuracy against the rate of drop-branch, a point for each seed; the band covers plain fine-tuning."""
    figure, panels = new_figure(1, len(report["tasks"]), (4.2, 3.2))
    for axes, (task, rows) in zip(panels.flat, report["tasks"].items(), strict=True):
        if PLAIN in rows:
            plain = rows[PLAIN]["test_accuracy"]
            axes.axhspan(min(plain), max(plain), color="0.85", label="plain, all seeds")
            axes.axhline(statistics.mean(plain), color="0.4", label="plain, mean")
        rates = [rate for rate in RATES if f"MAT, drop-branch {rate}" in rows]
        scores = [rows[f"MAT, drop-branch {rate}"]["test_accuracy"] for rate in rates]
        for rate, values in zip(rates, scores, strict=True):
            axes.plot([rate] * len(values), values, ".", color="C0", alpha=0.5)
        axes.axhline(report["most_frequent"][task]["accuracy"], color="C3", linestyle=":", label="most frequent label")
        axes.plot(rates, list(map(statistics.mean, scores)), "o-", color="C0", label="MAT, mean")
        axes.set(title=TASKS[task]["title"], xlabel="drop-branch", ylabel="accuracy on the test set, %")
        axes.legend(fontsize="small")
    save(figure, path)


def main() -> None:
    """Train what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs", "understanding"), help="folder for the runs")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "understanding")
    args = parser.parse_args()
    data = Path(os.environ.get("HF_DEEPWIDE_DATA", "."))
    if not args.report:
        write_text(data, args.runs / "text")
        train(pretraining(args.runs), "masked-lm")
        for task in args.tasks:
            for system in SYSTEMS:
                train(fine_tuning(args.runs, task, system), "classification")
    report = gather(args.runs, list(TASKS), data)
    if not report["tasks"]:
        raise UserError(f"{args.runs} has no finished run of fine-tuning")
    write_report(args.output, report, table)
    draw(report, args.output.with_suffix(".png"))
    print(table(report))


if __name__ == "__main__":
    run_script(main)
