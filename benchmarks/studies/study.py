"""Train and score the systems of a study, side by side, and write its table and figures.

    HF_DEEPWIDE_DATA=PATH python benchmarks/studies/study.py benchmarks/studies/multi30k_converged.yaml
    … --systems vanilla mat --jobs 1      only these, in this order, one run at a time
    … --order                             train nothing; print which runs come next
    … --report                            train nothing; write the pages and cards of the runs that are there
    … --adopt runs/tiny-1 runs/tiny-2     score these finished runs on the study's test sets, and keep their records

definition.py describes the file of a study. Each training is a process of its own. `--jobs` trainings run at a time,
each with its share of the cores. When a run ends, its record and its translations are added to
benchmarks/results/STUDY. A run that has a record, from any machine, is not made again. An interrupted run is resumed:
give the same command. To repeat a study from the beginning, give `--results` an empty folder. All trainings use the
code beside this file. A long study should therefore run from a copy of the repository that nobody edits
(`git worktree add ../study`).
"""

import argparse
import concurrent.futures
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from cards import write_cards
from definition import Setting, Stage, Study, System, load_study, recipe_of, run_name
from pages import write_pages
from records import (
    CHOSEN_LAYERS,
    GRADIENT_NORMS,
    PRUNED,
    Record,
    add_record,
    gradient_norms,
    read_records,
    write_records,
)
from selection import best, key_of, seeds_of, settings_of, tried, validation_loss, winner, winners_run
from trainings import train
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide import prune
from hf_deepwide.analysis.layer_utilization import posterior_names
from hf_deepwide.checkpoint_files import read_results
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.durable import sha256_of
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.evaluation.scoring import score_sets, translate_and_score
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.loading import load_model, load_tokenizer
from hf_deepwide.models.configuration_latent_depth import LatentDepthConfig
from hf_deepwide.prune import kept_layers
from hf_deepwide.reading import read_json
from hf_deepwide.runs.facts import machine
from hf_deepwide.runs.recipe import Recipe, differences
from hf_deepwide.runs.translation import Translation, translation_files
from hf_deepwide.training.checkpoints import WEIGHTS, checkpoints
from hf_deepwide.training.faults import NonFiniteError
from hf_deepwide.training.history import load_history

ROOT = Path(__file__).parents[2]


class Run(NamedTuple):
    """One training that a study needs."""

    system: System
    stage: Stage
    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return run_name(self.system, self.stage, self.setting, self.seed)

    @property
    def fields(self) -> Record:
        """The first fields of the run's record."""
        return {
            "run": self.name,
            "system": self.system.name,
            "stage": self.stage.name,
            "setting": self.setting,
            "seed": self.seed,
        }


class Workshop:
    """Makes the runs of a study and keeps their records.

    Args:
        study: the study.
        runs: the folder for the runs' folders.
        results: the folder for the records and pages.
        jobs: trainings at a time.
        pages: the pages that also show the study's tables.
        cards: the folder for the model cards of the families; None writes no cards.
    """

    def __init__(
        self,
        study: Study,
        runs: Path,
        results: Path,
        jobs: int,
        pages: Sequence[Path] = (),
        cards: Path | None = None,
    ) -> None:
        self.study, self.runs, self.results, self.jobs = study, runs, results, jobs
        self.pages, self.cards = pages, cards
        self.threads = max(1, machine()["cores"] // jobs)
        self._writing = threading.Lock()
        self._training: dict[str, threading.Lock] = {}

    def records(self) -> list[Record]:
        """The records that decide which runs are made."""
        return read_records(self.results)

    def make(self, systems: list[System]) -> None:
        """Make all runs that are missing, `jobs` at a time.

        Whenever a run ends, the first missing run is started, in the order of the systems. A study that is stopped at
        any moment has therefore finished its first systems.

        Raises:
            UserError: runs have failed; all runs that do not depend on them were made.
        """
        begun: set[str] = set()
        running: dict[concurrent.futures.Future[None], str] = {}
        failed = []
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            while True:
                for run in self.missing(systems):
                    if len(running) < self.jobs and run.name not in begun:
                        begun.add(run.name)
                        running[pool.submit(self._make, run)] = run.name
                if not running:
                    break
                ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in ended:
                    name = running.pop(future)
                    if isinstance(error := future.exception(), UserError):
                        failed.append(str(error))
                        print(f"failed: {error}", flush=True)
                    else:
                        future.result()
                        print(f"{time.strftime('%H:%M')} {name}: ended", flush=True)
        if failed:
            raise UserError(f"{len(failed)} runs failed: {'; '.join(failed)}")

    def missing(self, systems: list[System]) -> list[Run]:
        """The runs that can be made now."""
        records, first = self.records(), self.study.seeds[0]
        missing = []
        for system in systems:
            stages = self.study.stages(system)
            for number, stage in enumerate(stages):
                settings = settings_of(self.study, system, number, records)
                done = tried(records, system, stage, first)
                runs = [Run(system, stage, setting, first) for setting in settings if key_of(setting) not in done]
                setting = best(records, system, stage, first)
                if not runs and settings and stage is stages[-1] and setting is not None:
                    runs = [
                        Run(system, stage, setting, seed)
                        for seed in seeds_of(self.study, system, records)
                        if key_of(setting) not in tried(records, system, stage, seed)
                    ]
                missing += runs
        return [run for run in missing if not run.system.start or self._start(run, records)]

    def _start(self, run: Run, records: Sequence[Record]) -> str | None:
        """The name of the run that a run starts from, if its system has a `start` and that run has ended."""
        return winners_run(self.study, run.system.start, run.seed, records) if run.system.start else None

    def _recipe_of_record(self, name: str) -> Recipe:
        """The recipe of a run that has a record, to make the run again if its folder is missing."""
        record = next(each for each in self.records() if each["run"] == name)
        system = self.study.system(record["system"])
        stage = next(each for each in self.study.stages(system) if each.name == record["stage"])
        before = self._start(Run(system, stage, record["setting"], record["seed"]), self.records())
        return recipe_of(self.study, system, stage, record["setting"], record["seed"], self.runs, before)

    def order(self, systems: list[System]) -> str:
        """A text that says, system by system, what is done, and which runs come next."""
        records, missing, lines = self.records(), self.missing(systems), []
        for system in systems:
            done = sum(record["system"] == system.name for record in records)
            state = "its search is done" if winner(self.study, system, records) is not None else "it is searched"
            lines.append(f"{system.name}: {done} runs are done, {state}")
            lines += [f"    next: {run.name}" for run in missing if run.system is system]
            if system.start and not settings_of(self.study, system, 0, records):
                lines.append(f"    waits for {system.start}")
        return "\n".join(lines)

    def _make(self, run: Run) -> None:
        """Make one run, after the runs that it starts from, and keep its record."""
        start = self._start(run, self.records())
        recipes = [
            recipe_of(self.study, system, run.stage, run.setting, run.seed, self.runs, start)
            for system in (run.system.base, run.system)
            if system is not None
        ]
        if start is not None:  # its record may be from another machine; then its folder is missing here
            recipes.insert(0, self._recipe_of_record(start))
        recipe = recipes[-1]
        try:
            for each in recipes:
                # Two runs may start from the same run, which is made only once.
                with self._training.setdefault(each.name, threading.Lock()):
                    train(each.values, threads=self.threads)
        except NonFiniteError as error:
            self._keep(diverged(run, recipe, str(error)), {})
            return
        results = read_json(recipe.output_dir / "results.json")
        if not math.isfinite(loss := validation_loss(results)):
            self._keep(diverged(run, recipe, f"the validation loss is {loss}"), {})
            return
        record: Record = run.fields | results | logged_norms(recipe) | chosen_layers(recipe) | weights_of(recipe)
        translations = {}
        if not run.stage.name:
            files = translation_files(recipe.data).values()
            translations[recipe.name] = [line for file in files for line in read_lines(recipe.output_dir / file)]
        if run.system.prune and "test" in results:
            record["pruned"], translations[f"{PRUNED}{recipe.name}"] = score_pruned(recipe)
        self._keep(record, translations)

    def adopt(self, folder: Path) -> None:
        """Score a finished run of this study's recipe, which was made elsewhere, and keep its record.

        The run may have had other test sets. Its validation losses are measured again.

        Raises:
            UserError: the folder holds no finished run, or the run was trained by another recipe.
        """
        earlier = read_results(folder)
        if not earlier:
            raise UserError(f"{folder} is no finished run: it has no results.json")
        seed, (system, *_) = earlier["recipe"]["training"]["seed"], self.study.systems
        run = Run(system, self.study.stages(system)[-1], {}, seed)
        recipe = recipe_of(self.study, system, run.stage, run.setting, seed, folder.parent)
        if "pad_to_multiple_of" in recipe.values["training"]:  # the value used, even if the recipe lacks it
            earlier["recipe"]["training"].setdefault("pad_to_multiple_of", earlier["train"].get("padding", 8))
        apart = {"data.test", "data.root", "training.output_dir", "training.disable_tqdm"}
        changes = [
            change for change in differences(earlier["recipe"], recipe.values) if change.partition(":")[0] not in apart
        ]
        if changes:
            raise UserError(f"{folder} is a run of another recipe: {'; '.join(changes)}")
        args, task = recipe.training_arguments(), Translation(recipe)
        texts, tokenizer = task.read(args, ended=True), load_tokenizer(folder)
        model = load_model(task.auto, folder)
        encoded = task.encode(texts, tokenizer, model)
        results = earlier | task.score(task.trainer(model, args, tokenizer, encoded, texts), encoded, texts)
        (lines,) = task.translations.values()
        own = recipe_of(self.study, system, run.stage, run.setting, seed, self.runs)
        self._keep(run.fields | results | {"recipe": own.values}, {run.name: lines})

    def _keep(self, record: Record, translations: dict[str, list[str]]) -> None:
        """Keep a record, in place of an older record of the run, and write the pages again."""
        with self._writing:
            records = read_records(self.results)
            others = [each for each in records if each["run"] != record["run"]]
            if len(others) < len(records):
                write_records(self.results, others)
            add_record(self.results, record, translations)
            self.report()

    def report(self) -> str:
        """Write the pages and the cards of the runs that are there; return the table."""
        if self.cards:
            write_cards(self.study, self.results, self.cards)
        return write_pages(self.study, self.results, self.pages)


def diverged(run: Run, recipe: Recipe, reason: str) -> Record:
    """The record of a run that diverged, or whose base diverged. Its setting counts as tried; its loss is infinite."""
    history = load_history(recipe.output_dir) if checkpoints(recipe.output_dir) else []
    curve = [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry]
    lost = {"diverged": reason, "train": {"validation_curve": curve}}
    return run.fields | lost | logged_norms(recipe) | {"recipe": recipe.values, "machine": machine()}


def logged_norms(recipe: Recipe) -> Record:
    """The gradient norms in a run's log, if its recipe asks for them and the run has a checkpoint."""
    if not recipe.values["training"].get("gradient_norms") or not checkpoints(recipe.output_dir):
        return {}
    return {GRADIENT_NORMS: gradient_norms(load_history(recipe.output_dir))}


def weights_of(recipe: Recipe) -> Record:
    """The digests of a run's weights and of the weights that it started from: they show which runs belong together."""
    folders = {"weights": recipe.output_dir, "started_from": recipe.init_from and Path(recipe.init_from)}
    files = {name: folder / WEIGHTS for name, folder in folders.items() if folder}
    return {"digests_of_weights": {name: sha256_of(file) for name, file in files.items() if file.is_file()}}


def chosen_layers(recipe: Recipe) -> Record:
    """The layers that each posterior of a trained model of latent depth uses in evaluation, from 0."""
    if recipe.values["model"]["family"] != LatentDepthConfig.model_type:
        return {}
    model = load_model(AutoModelForSeq2SeqLM, recipe.output_dir)
    names = posterior_names(model.config)
    return {CHOSEN_LAYERS: {name: kept_layers(model, index) for index, name in enumerate(names)}}


def score_pruned(recipe: Recipe) -> tuple[dict, list[str]]:
    """Prune a latent-depth model; return its parameters, layers and test scores, and its translations."""
    small = prune(load_model(AutoModelForSeq2SeqLM, recipe.output_dir))
    texts, tokenizer = load_parallel(recipe.data, "test"), load_tokenizer(recipe.output_dir)
    test, by_pair = translate_and_score(
        lambda sources, settings, *languages: translate(small, tokenizer, sources, settings, *languages),
        texts,
        recipe.data,
        recipe.evaluation,
    )
    (translations,) = by_pair.values()  # studies of several pairs prune nothing
    if recipe.data.test_sets:
        test["sets"] = score_sets(translations, texts, recipe.data, recipe.evaluation)
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
    parser.add_argument("--order", action="store_true", help="train nothing; print which runs come next")
    parser.add_argument("--adopt", nargs="+", type=Path, help="finished runs to score and to keep the records of")
    args = parser.parse_args()
    study = load_study(args.study)
    known = [system.name for system in study.systems]
    if unknown := set(args.systems or ()) - set(known):
        raise UserError(f"--systems: {', '.join(sorted(unknown))} not in {args.study}, which has {', '.join(known)}")
    results = args.results or ROOT / "benchmarks" / "results" / study.name
    pages = [] if args.results else [ROOT / "docs" / "results.md", ROOT / "README.md"]
    cards = None if args.results else ROOT / "model_cards"
    workshop = Workshop(study, args.runs / study.name, results, args.jobs, pages, cards)
    torch.set_num_threads(workshop.threads)
    systems = [study.system(name) for name in args.systems or known]
    if args.order:
        print(workshop.order(systems))
        return
    for folder in args.adopt or ():
        workshop.adopt(folder)
    if not (args.report or args.adopt):
        workshop.make(systems)
    print(workshop.report())


if __name__ == "__main__":
    run_script(main)
