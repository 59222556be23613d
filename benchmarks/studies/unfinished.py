"""Keep the learning curves of a study's runs that were stopped, if their models are lost.

    python benchmarks/studies/unfinished.py benchmarks/studies/STUDY.yaml --machine "NVIDIA H200" runs/STUDY/*.log

A machine that is lent for minutes is given back with all the models on it. Only the validation losses in the logs of
the runs remain. These losses are no records: study.py makes the runs again. The report is
benchmarks/results/STUDY/unfinished.json, with a table and a figure beside it.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from definition import load_study, run_name
from reports import markdown_table, write_report

from hf_deepwide.analysis.learning_curves import plot_runs
from hf_deepwide.errors import UserError, run_script

RESULTS = Path(__file__).parents[1] / "results"
VALIDATION = re.compile(r"^step (\d+), epoch ([\d.]+): validation loss ([\d.]+)(?:, BLEU [\d.]+)?$", re.MULTILINE)
TRAINED = " holds the weights of checkpoint-"  # logged when the training has ended, before anything is scored


def read_log(text: str) -> dict[str, Any]:
    """Read the validation curve of a log, a list of `[step, epoch, loss]`, and whether the training was completed."""
    curve = [[int(step), float(epoch), float(loss)] for step, epoch, loss in VALIDATION.findall(text)]
    return {"curve": curve, "trained_to_the_end": TRAINED in text}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    head = ["system", "seed", "least validation loss", "of epoch", "last epoch", "its loss", "training"]
    rows = []
    for run in report["runs"]:
        _, epoch, least = min(run["curve"], key=lambda point: point[2])
        _, last, loss = run["curve"][-1]
        end = "ended by itself" if run["trained_to_the_end"] else "stopped"
        rows.append((run["title"], run["seed"], f"{least:.3f}", f"{epoch:.0f}", f"{last:.0f}", f"{loss:.3f}", end))
    return (
        f"# {report['study']}: runs that were stopped\n\n"
        f"{report['machine']}. Validation loss in nats a token, smoothed as in training. No model was scored. Where "
        "the least loss is that of the last epoch, the loss was still falling.\n\n"
    ) + markdown_table(head, rows)


def main() -> None:
    """Read the logs, write the report and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study, a YAML file")
    parser.add_argument("logs", nargs="+", type=Path, help="logs of its runs; others are left out")
    parser.add_argument("--machine", required=True, help="what the runs were made on")
    args = parser.parse_args()
    study = load_study(args.study)
    logs = {log.stem: read_log(log.read_text(encoding="utf-8")) for log in args.logs}
    runs = [
        {"run": name, "title": system.title, "seed": seed, **logs[name]}
        for system in study.systems
        for seed in [*study.seeds, *study.close_seeds]
        for setting in study.stages(system)[-1].settings
        if (name := run_name(system, study.stages(system)[-1], setting, seed)) in logs and logs[name]["curve"]
    ]
    for left_out in logs.keys() - {run["run"] for run in runs}:
        print(f"{left_out} is left out: it is no run of {args.study}, or has no validation loss")
    if not runs:
        raise UserError(f"{', '.join(map(str, args.logs))}: no validation loss of a run of {args.study}")
    output, report = RESULTS / study.name / "unfinished", {"study": study.name, "machine": args.machine, "runs": runs}
    write_report(output, report, table)
    first: dict[str, dict[str, Any]] = {}  # the first seed of each system
    for run in runs:
        first.setdefault(run["title"], run)
    plot_runs(
        {title: [{"step": s, "eval_loss": loss} for s, _, loss in run["curve"]] for title, run in first.items()},
        output.with_suffix(".png"),
    )
    print(table(report))


if __name__ == "__main__":
    run_script(main)
