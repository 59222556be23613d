"""Interrupt runs at many moments in many circumstances, start them again, and compare with uninterrupted runs.

    python benchmarks/resume_matrix.py [--only TEXT] [--output benchmarks/results/resume_matrix]

Each row is a run of 20 steps: a MAT with dropout and dropped branches, evaluated by generation, saved every 4 steps.
SIGKILL, SIGTERM, SIGINT or a full disk interrupts it at a named moment (see `tests/helpers/interruptions.py`), or
SIGKILL at a random moment. The same command then starts it again. Compared bit for bit are the kept checkpoints
(weights, optimizer, scheduler, random generators), the history of the run, the final model, and the translations.
"""

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import local
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from interruptions import FULL, MOMENTS, Blow, Runs, difference, write_case
from reports import markdown_table, write_report

from hf_deepwide.training.checkpoints import checkpoints, problem

AT_ONCE = 3  # runs side by side
TERM, INT = signal.SIGTERM, signal.SIGINT

# The options of `write_case` in each circumstance.
CIRCUMSTANCES = {
    "one process": {},
    "2 workers": {"dataloader_num_workers": 2},
    "2 processes": {"processes": 2, "bf16": False, "max_tokens": 1024},
    "2 processes, 2 workers": {"processes": 2, "bf16": False, "max_tokens": 1024, "dataloader_num_workers": 2},
    "stream": {"data": {"streaming": True, "shuffle_buffer": 100}},
    "stream, 2 processes": {
        "processes": 2,
        "bf16": False,
        "max_tokens": 1024,
        "data": {"streaming": True, "shuffle_buffer": 100},
    },
    "by epochs": {"eval_strategy": "epoch", "save_strategy": "epoch"},
    "average of 3": {"average_last": 3, "save_total_limit": 4},
}
# The run is interrupted when its moment comes for the n-th time. By then, if possible, there are several checkpoints.
COUNTS = {
    "in a step": 10,
    "in evaluation": 3,
    "in generation": 3,
    "between epochs": 3,
    "weights half written": 3,
    "optimizer half written": 7,
    "checkpoint not yet named": 3,
    "checkpoint just named": 3,
    "old checkpoint half deleted": 2,
    "mark not yet named": 1,
    "recipe not yet named": 1,
    "tokenizer not yet named": 1,
    "checksums not yet named": 3,
    "results not yet named": 1,
    "final model not yet named": 1,
    "test set translated": 1,
    "model card half written": 1,
    "tokenizer half written": 1,
}


@dataclass
class Case:
    """A row: the circumstance, what happens, and when."""

    circumstance: str
    blow: Blow | None
    after: float | None = None  # in place of a blow: SIGKILL so many seconds after the run was opened

    @property
    def name(self) -> str:
        """The interruption in words."""
        if self.blow is None:
            return f"SIGKILL after {self.after:.1f} s"
        what = "disk full" if self.blow.number == FULL else signal.Signals(self.blow.number).name
        where = f"{what} {self.blow.moment}, time {self.blow.count}"
        where += f", process {self.blow.rank}" if "processes" in CIRCUMSTANCES[self.circumstance] else ""
        return where + (", workers too" if self.blow.to_group else "")


def cases(seed: int) -> list[Case]:
    """All rows of the matrix; `seed` is for the random moments."""
    rows = [Case("one process", Blow(moment, COUNTS[moment])) for moment in MOMENTS]
    # 10: in the middle; 8: before an evaluation; 6: at the end of an epoch; 12: at both; 20: at the last step
    rows += [Case("one process", Blow("in a step", count, number=TERM)) for count in (10, 8, 6, 12, 20)]
    rows += [Case("one process", Blow("in generation", 3, number=number)) for number in (TERM, INT)]
    rows += [Case("one process", Blow("in a step", 10, number=FULL))]
    draw = random.Random(seed)
    rows += [Case("one process", None, after=draw.uniform(0, 20)) for _ in range(6)]
    rows += [Case("2 workers", Blow(moment, COUNTS[moment])) for moment in ("in a step", "in generation")]
    rows += [Case("2 workers", Blow("between epochs", 3)), Case("2 workers", Blow("optimizer half written", 8))]
    rows += [Case("2 workers", Blow("in a step", count, number=TERM, to_group=True)) for count in (10, 6)]
    for circumstance in ("2 processes", "2 processes, 2 workers"):
        rows += [
            Case(circumstance, Blow("in a step", 10, rank=1)),
            Case(circumstance, Blow("in generation", 3, rank=0)),
        ]
        rows += [Case(circumstance, Blow("optimizer half written", 7)), Case(circumstance, Blow("between epochs", 3))]
        rows += [Case(circumstance, Blow("in a step", count, rank=1, number=TERM)) for count in (10, 6)]
    rows += [
        Case("2 processes", Blow("checkpoint just named", 2)),
        Case("2 processes", Blow("in a step", 10, number=FULL)),
    ]
    for circumstance in ("stream", "stream, 2 processes"):
        rows += [Case(circumstance, Blow("in a step", 15)), Case(circumstance, Blow("optimizer half written", 7))]
        rows += [Case(circumstance, Blow("in a step", 10, number=TERM))]
    rows += [Case("by epochs", Blow("in a step", 10)), Case("by epochs", Blow("between epochs", 3))]
    rows += [Case("by epochs", Blow("in a step", count, number=TERM)) for count in (9, 12)]
    rows += [Case("average of 3", Blow("in a step", count, number=TERM)) for count in (14, 20)]
    return rows


def examine(case: Case, number: int, runs: Runs, folder: Path, reference: Path) -> dict[str, Any]:
    """Interrupt a run, start it again, and compare it with the uninterrupted run `reference`."""
    options = CIRCUMSTANCES[case.circumstance]
    processes = options.get("processes", 1)
    recipe, run = write_case(folder, f"run{number}", **options)
    codes, output = runs.run(recipe, processes=processes, blow=case.blow, after=case.after)
    parts = [path.name for path in checkpoints(run, "checkpoint", "interrupted") if problem(path)]
    again, restarted = runs.run(recipe, processes=processes)
    if "holds a finished run" in restarted:
        again = [0]
    came = any(codes)
    unlike = difference(run, reference) if set(again) == {0} else [f"restart ended with {again}: {restarted[-300:]}"]
    if not came:
        unlike.append("nothing happened: there is no such moment")
    return {
        "circumstance": case.circumstance,
        "what": case.name,
        "exit": codes,
        "half checkpoints": parts,
        "went on": _went_on(restarted),
        "set aside": re.findall(r"\S+ was being saved when", restarted),
        "error": re.findall(r"^error: (.*)", output, re.MULTILINE)[:1],
        "unlike": [each for each in unlike if ": loss of step" not in each],
        "first loss after it": "of fewer steps" if any(": loss of step" in each for each in unlike) else "same",
    }


def _went_on(output: str) -> str:
    found = re.search(r"resuming from (\S+)|training had ended at (\S+)|holds a finished run", output)
    return "afresh" if found is None else found[1] or (f"{found[2]}, trained" if found[2] else "was finished")


def table(rows: list[dict[str, Any]], planned: int) -> str:
    """The rows as a table in Markdown."""
    bad = [row for row in rows if row["unlike"] or row["half checkpoints"]]
    cells = []
    for row in rows:
        same = "yes" if row not in bad else "**no**: " + "; ".join([*row["unlike"], *row["half checkpoints"]])
        same += "" if row["first loss after it"] == "same" else ", but the loss logged first is of fewer steps"
        cells.append((row["circumstance"], row["what"], ", ".join(map(str, row["exit"])), row["went on"], same))
    return (
        f"`benchmarks/resume_matrix.py` plans {planned} interruptions; {len(rows)} were made. "
        f"{len(rows) - len(bad)} changed no bit of weights, states or translations.\n\n"
    ) + markdown_table(["run", "what happened", "exit status", "went on from", "bit for bit as if left alone"], cells)


def main() -> None:
    """Run all, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose text has this in it")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/resume_matrix"))
    arguments = parser.parse_args()
    chosen = [case for case in cases(arguments.seed) if arguments.only in f"{case.circumstance}: {case.name}"]
    start, mine, servers, done = time.monotonic(), local(), [], {}

    def server() -> Runs:
        if not hasattr(mine, "runs"):
            mine.runs = Runs().__enter__()
            servers.append(mine.runs)
        return mine.runs

    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(root)

        def left_alone(name: str) -> Path:
            options = CIRCUMSTANCES[name]
            recipe, run = write_case(folder, "reference " + name, **options)
            codes, output = server().run(recipe, processes=options.get("processes", 1))
            if set(codes) != {0}:
                raise RuntimeError(output)
            return run

        write_case(folder, "corpus")
        names = list(dict.fromkeys(case.circumstance for case in chosen))
        references = dict(zip(names, pool.map(left_alone, names), strict=True))

        def row(numbered: tuple[int, Case]) -> dict[str, Any]:
            number, case = numbered
            result = examine(case, number, server(), folder, references[case.circumstance])
            print(f"{time.monotonic() - start:5.0f} s  {json.dumps(result)}", flush=True)
            done[number] = result
            # after every row, so that the report is there if this script itself is interrupted
            write_report(arguments.output, [done[each] for each in sorted(done)], partial(table, planned=len(chosen)))
            return result

        rows = list(pool.map(row, enumerate(chosen)))
        for each in servers:
            each.__exit__()
    sys.exit(any(row["unlike"] or row["half checkpoints"] for row in rows))


if __name__ == "__main__":
    main()
