"""Make one row of a study's table again, and compare the new row with the committed row.

    HF_DEEPWIDE_DATA=PATH python benchmarks/studies/again.py benchmarks/studies/multi30k_converged.yaml vanilla_wide

The search is not repeated: the runs have the setting that the committed search has chosen, and the committed seeds. A
result is the same bit for bit only on an equal machine with equal versions. On another machine the two rows should
agree within their standard errors over seeds. The comparison is written to `--results`. The new records are there,
too, so an interrupted row is continued with the same `--results`.
"""

import argparse
import math
import statistics
from pathlib import Path

import torch
from definition import Study, System, load_study
from pages import TITLES, with_error
from records import Record, read_records, scores_of
from reports import markdown
from selection import chosen_rows, validation_loss
from study import ROOT, Run, Workshop

from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.evaluation.seeds import standard_error

PAGE = "again.md"


class Again(Workshop):
    """Makes the runs of one row again, although they have committed records.

    Args:
        study: the study.
        system: the system of the row.
        committed: the committed records of the study, which chose the row's setting.
        runs: the folder for the runs' folders.
        results: the folder for the new records, and for the comparison.
        jobs: trainings at a time.
    """

    def __init__(
        self, study: Study, system: System, committed: list[Record], runs: Path, results: Path, jobs: int
    ) -> None:
        super().__init__(study, runs, results, jobs)
        rows = chosen_rows(study, committed)
        if system.name not in rows:
            raise UserError(f"{study.name} has no row of {system.name} yet; its rows: {', '.join(rows) or 'none'}")
        self.system, self.row = system, rows[system.name]
        self._others = [each for each in committed if each not in self.row.values()]

    def records(self) -> list[Record]:
        """The new records, and the study's committed records except the records of the row."""
        return [*self._others, *self.made()]

    def made(self) -> list[Record]:
        """The new records."""
        return read_records(self.results)

    def missing(self, systems: list[System]) -> list[Run]:
        """The row's runs that have not been made again."""
        made, stage = {record["run"] for record in self.made()}, self.study.stages(self.system)[-1]
        return [
            Run(self.system, stage, record["setting"], seed)
            for seed, record in self.row.items()
            if record["run"] not in made
        ]

    def report(self) -> str:
        """Write the comparison of the two rows, and return it; empty if there is no new record."""
        rows = {"committed": list(self.row.values()), "made again": self.made()}
        if not rows["made again"]:
            return ""
        text = beside(self.study, self.system, rows)
        write_whole(self.results / PAGE, text)
        return text


def beside(study: Study, system: System, rows: dict[str, list[Record]]) -> str:
    """The two rows as a table, and the distance between their mean losses in standard errors."""
    measures = {
        "validation loss": (validation_loss, 3),
        TITLES[study.metric]: (lambda record: scores_of(record)[study.metric], 2),
    }
    cells = [
        {
            "row": name,
            **{title: with_error(list(map(of, runs)), digits=digits) for title, (of, digits) in measures.items()},
            "seeds": ", ".join(str(run["seed"]) for run in runs),
            "machine": ", ".join(dict.fromkeys(run["machine"]["processor"] for run in runs)),
        }
        for name, runs in rows.items()
    ]
    losses = [list(map(validation_loss, runs)) for runs in rows.values()]
    theirs, ours = map(statistics.mean, losses)
    error = math.hypot(*(standard_error(each) or 0 for each in losses))
    distance = ours - theirs
    apart = f"The new mean loss is {distance:+.4f} away" + (
        f", {abs(distance) / error:.1f} standard errors of the difference" if error else ""
    )
    return f"{system.title}:\n\n{markdown(cells)}\n{apart}. ± is a standard error over seeds.\n"


def main() -> None:
    """Train the row's runs that are missing, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study, a YAML file")
    parser.add_argument("system", help="the row")
    parser.add_argument("--runs", type=Path, default=Path("runs", "again"), help="folder for the runs")
    parser.add_argument("--results", type=Path, help="folder for records and comparison; default: in --runs")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    args = parser.parse_args()
    study = load_study(args.study)
    known = [system.name for system in study.systems]
    if args.system not in known:
        raise UserError(f"{args.system} is not in {args.study}, which has {', '.join(known)}")
    committed = read_records(ROOT / "benchmarks" / "results" / study.name)
    results = args.results or args.runs / study.name / f"results_{args.system}"
    row = Again(study, study.system(args.system), committed, args.runs / study.name, results, args.jobs)
    torch.set_num_threads(row.threads)
    row.make([row.system])
    print(row.report())


if __name__ == "__main__":
    run_script(main)
