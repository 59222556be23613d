"""The quality study: train and score systems of equal parameters, and write one table.

    HF_DEEPWIDE_DATA=PATH python benchmarks/quality/study.py benchmarks/quality/multi30k.yaml
    HF_DEEPWIDE_DATA=PATH python benchmarks/quality/study.py benchmarks/quality/multi30k.yaml \
        --systems vanilla mat --seeds 4 --jobs 1

A study is a YAML file: a recipe, what all systems have in common, the systems, the search that each gets, the seeds.
Every system is trained with the first seed and each setting of the search, one setting after the other; the setting
with the best validation loss is trained with the other seeds. Each training is one run of
`scripts/train_translation.py`, `--jobs` of them at a time, with the cores shared among them. As runs end, their
results and translations go to benchmarks/quality/results/STUDY, with table and figure, model cards to model_cards/,
and the short table to README.md. A run whose results are there is not made again, on whatever machine it was made,
and one that was interrupted is resumed: give the same command. To make the study from the beginning, give `--results`
an empty folder; pages and cards then go there. Seeds that are not the study's, of the second command, repeat rows of
the table: they are told below it and change none of its numbers.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from cards import write_cards
from kept_runs import PRUNED, best_setting, load_results
from report import report, write_overview
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide import prune
from hf_deepwide.data.corpora import load_parallel, read_lines
from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.loading import load_model, load_tokenizer
from hf_deepwide.training.recipe import Recipe, check_recipe, differences, parse_yaml

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TRAIN = ROOT / "scripts" / "train_translation.py"


@dataclass(frozen=True)
class System:
    """One row of the table: `model` and `overrides` are what it has beside what all systems have."""

    name: str
    title: str
    model: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    base: "System | None" = None
    prune: bool = False


@dataclass(frozen=True)
class Study:
    """What a study's file says. A setting gives a value to some keys of the recipe; `corpus` is for model cards.

    `grid` names two keys of the model: the scores are then shown as a table of one by the other, too.
    """

    name: str
    recipe: dict[str, dict[str, Any]]
    model: dict[str, Any]
    overrides: dict[str, Any]
    search: list[dict[str, Any]]
    seeds: list[int]
    baseline: str
    systems: list[System]
    metric: str = "bleu"
    corpus: str | None = None
    grid: tuple[str, str] | None = None


@dataclass(frozen=True)
class Folders:
    """Where a study's runs, results and model cards lie, the threads of a run, and the README that is to be told."""

    runs: Path
    results: Path
    cards: Path
    threads: int
    readme: Path | None = None


def load_study(path: Path) -> Study:
    """Read and check a study; every run's recipe is checked before one starts."""
    if not path.is_file():
        raise UserError(f"there is no study {path}")
    try:
        study = read_study(path)
    except (KeyError, TypeError, AttributeError) as error:  # no such key, one too many, or not a mapping
        raise UserError(f"{path} is no study as those beside it are: {error}") from error
    if study.baseline not in [system.name for system in study.systems]:
        raise UserError(f"{path}: baseline: {study.baseline!r} is not among the systems")
    for system in study.systems:
        for setting in study.search:
            recipe_of(study, system, setting, study.seeds[0], Path("runs"))
    return study


def read_study(path: Path) -> Study:
    """A study as it is written."""
    values = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    recipe = parse_yaml((path.parent / values["recipe"]).read_text(encoding="utf-8"), values["recipe"])
    systems = []
    for name, of_system in values["systems"].items():
        base = of_system.pop("base", None)
        base = System(f"{name}_base", "", **base) if base is not None else None
        systems.append(System(name, base=base, **of_system))
    common = {key: value for key, value in values.items() if key not in ("recipe", "systems")}
    return Study(path.stem, recipe, systems=systems, **common)


def run_name(system: System, setting: dict[str, Any], seed: int) -> str:
    """A run's folder: the system, the setting and the seed."""
    values = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in setting.items())
    return f"{system.name}_{values}_seed-{seed}"


def recipe_of(study: Study, system: System, setting: dict[str, Any], seed: int, runs: Path) -> Recipe:
    """The recipe of one run."""
    values = {section: dict(keys) for section, keys in study.recipe.items()}
    values["model"] = {**study.model, **system.model}
    name = run_name(system, setting, seed)
    overrides = {**study.overrides, **system.overrides, **setting, "training.seed": seed}
    overrides["training.output_dir"] = str(runs / name)
    if system.base is not None:
        base = str(runs / run_name(system.base, setting, seed))
        values["tokenizer"] = {}
        overrides |= {"model.init_from": base, "tokenizer.path": base}
    for key, value in overrides.items():
        section, _, name_of_key = key.partition(".")
        if section not in values:
            raise UserError(f"{study.name}, {system.name}: {key} is in no section of a recipe")
        values[section][name_of_key] = value
    return check_recipe(values, name, f"{study.name}, {name}")


def has_ended(results: Path, recipe: Recipe) -> bool:
    """Whether there are results of a run.

    Raises:
        UserError: they are of another recipe.
    """
    if not results.is_file():
        return False
    earlier = json.loads(results.read_text(encoding="utf-8"))["recipe"]
    if changes := differences(earlier, recipe.values):
        raise UserError(
            f"{results} is of another recipe ({'; '.join(changes)}); move it away, or give other --runs and --results"
        )
    return True


def train(recipe: Recipe, threads: int) -> None:
    """Train and score in a process of its own, unless that was done before by the same recipe."""
    run = recipe.output_dir
    if has_ended(run / "results.json", recipe):
        return
    run.parent.mkdir(parents=True, exist_ok=True)
    written, log = (run.parent / f"{run.name}.{suffix}" for suffix in ("yaml", "log"))
    written.write_text(yaml.safe_dump(recipe.values, sort_keys=False), encoding="utf-8")
    print(f"{time.strftime('%H:%M')} {run.name}: training, log in {log}", flush=True)
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, TRAIN, written],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise UserError(f"{run.name} has failed: {' '.join(last)}")


def kept_files(system: System, recipe: Recipe, folders: Folders) -> tuple[Path, Path]:
    """Where the results of a run are kept, and those of what is left of it when it is pruned."""
    folder = folders.results / system.name
    return folder / f"{recipe.name}.json", folder / f"{PRUNED}{recipe.name}.json"


def is_kept(study: Study, system: System, setting: dict[str, Any], seed: int, folders: Folders) -> bool:
    """Whether all that the table needs of a run is kept."""
    recipe = recipe_of(study, system, setting, seed, folders.runs)
    kept, pruned = kept_files(system, recipe, folders)
    return has_ended(kept, recipe) and (pruned.is_file() or not system.prune)


def make_run(study: Study, system: System, setting: dict[str, Any], seed: int, folders: Folders) -> None:
    """Make one run, and that of its base before it, and keep what the table is made of."""
    recipes = [recipe_of(study, each, setting, seed, folders.runs) for each in (system.base, system) if each]
    resumed = any(recipe.output_dir.exists() for recipe in recipes)
    started = time.monotonic()
    for recipe in recipes:
        train(recipe, folders.threads)
    recipe = recipes[-1]
    kept, pruned = kept_files(system, recipe, folders)
    kept.parent.mkdir(parents=True, exist_ok=True)
    if system.prune:
        keep(pruned, *score_pruned(recipe))
    results = json.loads((recipe.output_dir / "results.json").read_text(encoding="utf-8"))
    if not resumed:  # else nobody has seen all of it
        results["wall_minutes"] = (time.monotonic() - started) / 60  # base, translation and pruning included
    keep(kept, results, read_lines(recipe.output_dir / "translations.txt"))


def keep(file: Path, results: dict[str, Any], translations: Iterable[str]) -> None:
    """Write results, and beside them the translations: whole or not at all, as another run's report may be reading."""
    write_whole(file.with_suffix(".txt"), "".join(f"{line}\n" for line in translations))
    write_whole(file, json.dumps(results, indent=2) + "\n")


def score_pruned(recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    """Parameters and test scores of the layers that a latent-depth model has chosen, and the translations."""
    model = load_model(AutoModelForSeq2SeqLM, recipe.output_dir)
    small = prune(model)
    texts = load_parallel(recipe.data, "test")
    tokenizer = load_tokenizer(recipe.output_dir)
    translations = translate(small, tokenizer, texts["source"][:], recipe.evaluation)
    layers = {stack: getattr(small.config, f"{stack}_layers") for stack in ("encoder", "decoder")}
    lowercase = recipe.evaluation.lowercase
    test = score(translations, texts["target"][:], lowercase=lowercase, target_lang=recipe.data.target_lang)
    return {"parameters": small.num_parameters(), "layers": layers, "test": test}, translations


def main() -> None:
    """Train what is missing, keep the results, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study, a YAML file")
    parser.add_argument("--runs", type=Path, default=Path("runs", "quality"), help="folder for the runs")
    parser.add_argument("--results", type=Path, help="folder for the results; default: results/STUDY beside this file")
    parser.add_argument("--systems", nargs="+", help="only these; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, help="other seeds, for the setting that the search has chosen")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--report", action="store_true", help="train nothing; write what is made of the results")
    args = parser.parse_args()
    study = load_study(args.study)
    known = [system.name for system in study.systems]
    if unknown := set(args.systems or ()) - set(known):
        raise UserError(f"--systems: {', '.join(sorted(unknown))} not in {args.study}, which has {', '.join(known)}")
    systems = [system for system in study.systems if not args.systems or system.name in args.systems]
    results = args.results or HERE / "results" / study.name
    results.mkdir(parents=True, exist_ok=True)
    cards = results / "model_cards" if args.results else ROOT / "model_cards"
    threads = max(1, len(os.sched_getaffinity(0)) // args.jobs)
    readme = None if args.results else ROOT / "README.md"
    folders = Folders(args.runs / study.name, results, cards, threads, readme)
    torch.set_num_threads(folders.threads)
    if not args.report:
        make_study(study, systems, args.seeds, args.jobs, folders)
    print(write_pages(study, folders))


def make_study(study: Study, systems: list[System], seeds: list[int] | None, jobs: int, folders: Folders) -> None:
    """Train what is missing of some systems: the search, and then the best setting with the other seeds.

    Raises:
        UserError: runs have failed. What does not depend on them has been made.
    """
    first, others = study.seeds[0], seeds or study.seeds[1:]

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:

        def make(runs: list[tuple[System, dict[str, Any], int]]) -> None:
            failed, started = [], time.monotonic()
            missing = [run for run in runs if not is_kept(study, *run, folders)]
            waiting = [pool.submit(make_run, study, *run, folders) for run in missing]
            for ended, done in enumerate(concurrent.futures.as_completed(waiting), start=1):
                if isinstance(error := done.exception(), UserError):
                    failed.append(str(error))
                    print(f"failed: {error}", flush=True)
                else:
                    done.result()
                    write_pages(study, folders)
                minutes = (time.monotonic() - started) / 60 / ended * (len(missing) - ended)
                left = f", about {minutes:.0f} minutes left" * (ended < len(missing))
                print(f"{time.strftime('%H:%M')} {ended} of {len(missing)} runs have ended{left}", flush=True)
            if failed:
                raise UserError(f"{len(failed)} of {len(missing)} runs: {'; '.join(failed)}")

        make([(system, setting, first) for setting in study.search for system in systems])
        best = best_setting(study, load_results(study, folders.results), study.search)
        make([(system, best[system.name], seed) for seed in others for system in systems])


def write_pages(study: Study, folders: Folders) -> str:
    """What is made of the results: comparison, summary, table, figure, cards, README; returns the table."""
    text = report(study, folders.results)
    write_cards(study, folders.results, folders.cards)
    if folders.readme is not None:
        write_overview(study, folders.results, folders.readme)
    return text


if __name__ == "__main__":
    run_script(main)
