"""Train and score the systems of a study, side by side, and write its table and figures.

    HF_DEEPWIDE_DATA=PATH python benchmarks/studies/study.py benchmarks/studies/multi30k.yaml
    … --systems vanilla mat --jobs 1      only these, one run at a time
    … --report                            train nothing; write the pages of the runs that are there

definition.py says what a study is. Each training is a process of `scripts/train_translation.py`; `--jobs` of them run
at a time, each with its share of the cores. When a run ends, its record and its translations are added to
benchmarks/results/STUDY. A run that has a record is not made again, on whatever machine it was made, and an
interrupted run is resumed: give the same command. To repeat a study from the beginning, give `--results` an empty
folder.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from definition import Setting, Stage, Study, System, load_study, recipe_of
from pages import write_pages
from records import PRUNED, Record, add_record, read_records
from selection import best, key_of, settings_of, tried
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide import prune
from hf_deepwide.data.corpora import load_parallel, read_lines
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.loading import load_model, load_tokenizer
from hf_deepwide.runs.recipe import Recipe, differences

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "scripts" / "train_translation.py"


class Run(NamedTuple):
    """One training that a study needs."""

    system: System
    stage: Stage
    setting: Setting
    seed: int


class Workshop:
    """Makes the runs of a study and keeps their records.

    Args:
        study: what is studied.
        runs: the folder for the runs' folders.
        results: the folder for the records and pages.
        jobs: trainings at a time.
        pages: where the table, or its short form, is shown, too.
    """

    def __init__(self, study: Study, runs: Path, results: Path, jobs: int, pages: Sequence[Path] = ()) -> None:
        self.study, self.runs, self.results, self.jobs, self.pages = study, runs, results, jobs, pages
        self.threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        self._writing = threading.Lock()

    def make(self, systems: list[System]) -> None:
        """Make all runs that are missing: the search stage by stage, then the other seeds of what it has chosen.

        Raises:
            UserError: runs have failed; what does not depend on them was made.
        """
        while runs := self.missing(systems):
            self._make_all(runs)

    def missing(self, systems: list[System]) -> list[Run]:
        """The runs that can be made now."""
        records, (first, *others) = read_records(self.results), self.study.seeds
        missing = []
        for system in systems:
            stages = self.study.stages(system)
            for number, stage in enumerate(stages):
                settings = settings_of(self.study, system, number, records)
                done = tried(records, system, stage, first)
                runs = [Run(system, stage, setting, first) for setting in settings if key_of(setting) not in done]
                if not runs and settings and stage is stages[-1]:
                    setting = best(records, system, stage, first)
                    runs = [
                        Run(system, stage, setting, seed)
                        for seed in others
                        if key_of(setting) not in tried(records, system, stage, seed)
                    ]
                missing += runs
        return missing

    def _make_all(self, runs: list[Run]) -> None:
        failed, started = [], time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            waiting = [pool.submit(self._make, run) for run in runs]
            for ended, done in enumerate(concurrent.futures.as_completed(waiting), start=1):
                if isinstance(error := done.exception(), UserError):
                    failed.append(str(error))
                    print(f"failed: {error}", flush=True)
                else:
                    done.result()
                minutes = (time.monotonic() - started) / 60 / ended * (len(runs) - ended)
                print(
                    f"{time.strftime('%H:%M')} {ended} of {len(runs)} runs ended, {minutes:.0f} minutes left",
                    flush=True,
                )
        if failed:
            raise UserError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}")

    def _make(self, run: Run) -> None:
        """Make one run, and the run of its base before it, and keep its record."""
        recipes = [
            recipe_of(self.study, system, run.stage, run.setting, run.seed, self.runs)
            for system in (run.system.base, run.system)
            if system is not None
        ]
        for recipe in recipes:
            train(recipe, self.threads)
        recipe = recipes[-1]
        results = json.loads((recipe.output_dir / "results.json").read_text(encoding="utf-8"))
        record: Record = {
            "run": recipe.name,
            "system": run.system.name,
            "stage": run.stage.name,
            "setting": run.setting,
            "seed": run.seed,
            **results,
        }
        translations = {recipe.name: read_lines(recipe.output_dir / "translations.txt")}
        if run.system.prune:
            record["pruned"], translations[f"{PRUNED}{recipe.name}"] = score_pruned(recipe)
        with self._writing:
            add_record(self.results, record, translations)
            write_pages(self.study, self.results, self.pages)


def train(recipe: Recipe, threads: int) -> None:
    """Train and score in a process of its own, unless the same recipe was trained there before.

    Raises:
        UserError: the training failed, or the folder holds a finished run of another recipe.
    """
    run = recipe.output_dir
    finished = run / "results.json"
    if finished.is_file():
        earlier = json.loads(finished.read_text(encoding="utf-8"))["recipe"]
        if changes := differences(earlier, recipe.values):
            raise UserError(f"{run} holds another recipe ({'; '.join(changes)}); move it away, or give another --runs")
        return
    run.parent.mkdir(parents=True, exist_ok=True)
    written, log = (run.parent / f"{run.name}.{suffix}" for suffix in ("yaml", "log"))
    written.write_text(yaml.safe_dump(recipe.values, sort_keys=False), encoding="utf-8")
    print(f"{time.strftime('%H:%M')} {run.name}: training, log in {log}", flush=True)
    with log.open("a", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, TRAIN, written],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise UserError(f"{run.name} has failed: {' '.join(last)}")


def score_pruned(recipe: Recipe) -> tuple[dict, list[str]]:
    """Parameters, layers and test scores of the layers that a latent-depth model has chosen, and the translations."""
    small = prune(load_model(AutoModelForSeq2SeqLM, recipe.output_dir))
    texts = load_parallel(recipe.data, "test")
    translations = translate(small, load_tokenizer(recipe.output_dir), texts["source"][:], recipe.evaluation)
    test = score(
        translations,
        texts["target"][:],
        lowercase=recipe.evaluation.lowercase,
        target_lang=recipe.data.target_lang,
        metrics=recipe.evaluation.metrics,
    )
    layers = {stack: getattr(small.config, f"{stack}_layers") for stack in ("encoder", "decoder")}
    return {"parameters": small.num_parameters(), "layers": layers, "test": test}, translations


def main() -> None:
    """Train what is missing and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study, a YAML file")
    parser.add_argument("--runs", type=Path, default=Path("runs", "studies"), help="folder for the runs")
    parser.add_argument("--results", type=Path, help="folder for the records; default: benchmarks/results/STUDY")
    parser.add_argument("--systems", nargs="+", help="only these; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--report", action="store_true", help="train nothing; write the pages of the runs there are")
    args = parser.parse_args()
    study = load_study(args.study)
    known = [system.name for system in study.systems]
    if unknown := set(args.systems or ()) - set(known):
        raise UserError(f"--systems: {', '.join(sorted(unknown))} not in {args.study}, which has {', '.join(known)}")
    results = args.results or ROOT / "benchmarks" / "results" / study.name
    pages = [] if args.results else [ROOT / "docs" / "results.md", ROOT / "README.md"]
    workshop = Workshop(study, args.runs / study.name, results, args.jobs, pages)
    torch.set_num_threads(workshop.threads)
    if not args.report:
        workshop.make([system for system in study.systems if not args.systems or system.name in args.systems])
    print(write_pages(study, results, pages))


if __name__ == "__main__":
    run_script(main)
