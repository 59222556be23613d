"""The definition of a study: a YAML file that names a recipe, systems, a search and seeds.

    recipe:     a packaged recipe, or a file: data, tokenizer, training and evaluation of all runs
    overrides:  keys of the recipe by their dotted names, for all runs
    model:      the section `model` of all systems, where they do not say otherwise
    search:     stages, one after the other; a stage tries its settings around the best of the stage before
    seeds:      the first is for the search; the winner is trained with the others, too
    close_seeds: more seeds of the baseline, and of a system within two standard errors of its validation loss
    baseline:   the system that the others are compared with; a system may have a `baseline` of its own
    comparisons: further pairs of systems, [one, the other], that are compared in a table of their own
    systems:    name to {title, model, overrides, search, base, start, start_rate, prune, baseline}
    metric:     the score of the table; default: bleu
    beside:     a second score, shown beside it; default: chrf
    summary:    the systems in the short table of README, if it has one
    cards:      the systems that model_cards/ shows, one a family
    corpus:     a description of the corpus, for the cards
    costs:      true shows the time of an update and the peak of memory
    margin:     the largest difference in validation loss that does not matter, for the test of equivalence
    published:  {title, scores: {test set: score}}, which the scores of the only system are shown beside

A setting gives values to dotted keys of the recipe. A stage has `settings`, and may have a `name`, `overrides` (such
as fewer epochs) and `extend: true`. With `extend`, the search tries one more value beyond the best value, as long as
the best value is the largest or the smallest. A system with a `base` starts from a model that is trained before it,
with the same setting and seed. A system with a `start` starts from the winner of another system: from its run with the
same seed, with its setting, and with its learning rate times `start_rate`.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_deepwide.errors import UserError
from hf_deepwide.runs.recipe import Recipe, check_recipe, find_recipe, parse_yaml, read_values

sys.path.insert(0, str(Path(__file__).parents[1]))  # importers of this file find reports and trainings

Setting = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One step of a search. The last stage has no name: its runs are the rows of the table."""

    settings: list[Setting]
    name: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    extend: bool = False


@dataclass(frozen=True)
class System:
    """One row of the table. `model` and `overrides` are added to the values that all systems have."""

    name: str
    title: str
    model: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    search: list[Stage] | None = None
    base: "System | None" = None
    start: str | None = None
    start_rate: float = 1.0
    prune: bool = False
    baseline: str | None = None


@dataclass(frozen=True)
class Study:
    """The content of a study's file."""

    name: str
    recipe: dict[str, dict[str, Any]]
    search: list[Stage]
    seeds: list[int]
    baseline: str
    systems: list[System]
    model: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    metric: str = "bleu"
    beside: str = "chrf"
    summary: list[str] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)
    corpus: str = ""
    close_seeds: list[int] = field(default_factory=list)
    costs: bool = False
    comparisons: list[list[str]] = field(default_factory=list)
    margin: float | None = None
    published: dict[str, Any] = field(default_factory=dict)

    def system(self, name: str) -> System:
        """A system by its name."""
        return next(system for system in self.systems if system.name == name)

    def baseline_of(self, system: System) -> str | None:
        """The name of the system that a system is compared with; None for the baseline of the study."""
        return None if system.name == self.baseline else system.baseline or self.baseline

    def are_paired(self, one: str, other: str) -> bool:
        """True if runs of two systems with the same seed come from the same trained model."""
        first, second = ({name, self.system(name).start} - {None} for name in (one, other))
        return bool(first & second)

    def stages(self, system: System) -> list[Stage]:
        """The stages of a system's search."""
        return system.search or self.search


def load_study(path: Path) -> Study:
    """Read and check a study; every recipe of the search is checked before a run starts.

    Raises:
        UserError: there is no such file, or something in it is wrong.
    """
    if not path.is_file():
        raise UserError(f"there is no study {path}")
    values = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    try:
        recipe = read_values(find_recipe(values["recipe"]))
        systems = [_system(name, **fields) for name, fields in values["systems"].items()]
        common = {key: value for key, value in values.items() if key not in ("recipe", "systems", "search")}
        stages = [Stage(**stage) for stage in values["search"]]
        study = Study(path.stem, recipe, systems=systems, search=stages, **common)
    except (KeyError, TypeError, AttributeError) as error:  # a missing or an unknown key, or no mapping
        raise UserError(f"{path} is no study as definition.py describes it: {error}") from error
    names = [system.name for system in study.systems]
    for baseline in (study.baseline, *(system.baseline for system in study.systems)):
        if baseline is not None and baseline not in names:
            raise UserError(f"{path}: baseline: {baseline!r} is not among the systems")
    if any(len(pair) != 2 for pair in study.comparisons):
        raise UserError(f"{path}: comparisons: a comparison is of two systems, [one, the other]")
    compared = [name for pair in study.comparisons for name in pair]
    for key, listed in (("summary", study.summary), ("cards", study.cards), ("comparisons", compared)):
        if unknown := set(listed) - set(names):
            raise UserError(f"{path}: {key}: {', '.join(sorted(unknown))} not among the systems")
    if study.cards and not study.corpus:
        raise UserError(f"{path}: cards: a card describes its corpus; give `corpus`, too")
    for number, system in enumerate(study.systems):
        if system.start and system.start not in names[:number]:
            raise UserError(f"{path}: {system.name}: start: {system.start!r} is not a system before it")
        start: Setting = {}
        for stage in study.stages(system):
            if not stage.settings:
                raise UserError(f"{path}: {system.name}: a stage of the search has no settings")
            keys = {key for setting in stage.settings for key in setting}
            values = [value for setting in stage.settings for value in setting.values()]
            if stage.extend and (len(values) < 2 or len(keys) != 1 or min(values) <= 0):
                raise UserError(
                    f"{path}: {system.name}: extend: a stage that is extended has several values above 0 of one key"
                )
            for setting in stage.settings:
                recipe_of(study, system, stage, start | setting, study.seeds[0], Path("runs"))
            start |= stage.settings[0]
    return study


def _system(name: str, base: dict[str, Any] | None = None, search: list | None = None, **fields: Any) -> System:
    start = System(f"{name}_base", "", **base) if base is not None else None
    return System(name, base=start, search=[Stage(**stage) for stage in search] if search else None, **fields)


def run_name(system: System, stage: Stage, setting: Setting, seed: int) -> str:
    """The name of a run's folder: system, stage, setting and seed."""
    values = [f"{key.rpartition('.')[2]}-{value}" for key, value in setting.items()]
    return "_".join([system.name, *([stage.name] if stage.name else []), *values, f"seed-{seed}"])


def recipe_of(
    study: Study, system: System, stage: Stage, setting: Setting, seed: int, runs: Path, start: str | None = None
) -> Recipe:
    """The recipe of one run; if the system has a `start`, the argument `start` names the run that it starts from."""
    values = {section: dict(keys) for section, keys in study.recipe.items()}
    values["model"] = {**study.model, **system.model}
    name = run_name(system, stage, setting, seed)
    overrides = {**study.overrides, **system.overrides, **stage.overrides, **setting, "training.seed": seed}
    overrides["training.output_dir"] = str(runs / name)
    if system.base is not None or system.start is not None:
        base = str(runs / (run_name(system.base, stage, setting, seed) if system.base else start or system.start))
        values["tokenizer"] = {}
        overrides.pop("tokenizer.codes", None)  # the tokenizer of the base is used
        overrides |= {"model.init_from": base, "tokenizer.path": base}
    for key, value in overrides.items():
        section, _, field_name = key.partition(".")
        if section not in values:
            raise UserError(f"{study.name}, {system.name}: {key} is in no section of a recipe")
        values[section][field_name] = value
    return check_recipe(values, name, f"{study.name}, {name}")
