"""Checks that systems can be compared: scores on one test set by one method, and losses on one validation set."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

from ..checkpoint_files import read_results
from ..data.arguments import DataArguments, Split
from ..data.corpora import load_whole, local_files
from ..data.digest import text_digest
from ..data.text_files import read_lines
from ..errors import UserError, quote
from ..evaluation.arguments import SEARCH, settings_apart
from ..evaluation.metrics import build_metrics
from ..training.arguments import TranslationTrainingArguments
from .averaging import training_of, vocabulary
from .recipe import NO_DIFFERENCE, RECIPE, Recipe, differences, load_recipe
from .run_folder import RESULTS, SHOWN
from .written_files import TRANSLATIONS

logger = logging.getLogger(__name__)

LOSSES = {"loss": "validation loss", "nll": "without smoothing"}  # losses in nats per token, to their names in a table
COMPARED: tuple[Split, ...] = ("validation", "test")
METRICS = ("bleu", "chrf")  # if neither the caller nor a recipe names metrics
# Keys that decide which lines a split has. Keys such as `max_length` act only on training.
PLACE = ("format", "root", "source_lang", "target_lang", "pairs", "name", "config", "source_field", "target_field",
         "seed", "train_size")  # fmt: skip


@dataclass(frozen=True)
class Scoring:
    """How all systems are scored; see `evaluation.metrics.score`."""

    metrics: Sequence[str]
    lowercase: bool = False
    tokenize: str = "13a"
    target_lang: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of `score`, except the metrics."""
        return {"lowercase": self.lowercase, "tokenize": self.tokenize, "target_lang": self.target_lang}


def check_distinct(systems: Sequence[str]) -> dict[str, list[Path]]:
    """Return the runs of each system. Commas join the runs of one system.

    Raises:
        UserError: fewer than two systems; an empty name; or a run is named twice, and would count as two trainings.
    """
    if len(systems) < 2:
        raise UserError("name two systems or more; the first is the baseline")
    for system in systems:
        if not all(name.strip() for name in system.split(",")):
            raise UserError(f"{quote(system)}: a comma joins runs of one system, and a name beside it is empty")
    runs = {system: [Path(name) for name in system.split(",")] for system in systems}
    places = [path.resolve() for system in systems for path in runs[system]]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise UserError(f"{twice} is named twice; each run counts once, in one system")
    return runs


def check_seeds(runs: Mapping[str, Sequence[Path]], recipes: Mapping[Path, Recipe]) -> None:
    """Check that the runs of each system are trainings of one recipe with different seeds.

    The log warns of runs that differ in more than their seed, and of runs with the same seed.

    Raises:
        UserError: two runs of a system are copies of one training, which would count twice.
    """
    for paths in runs.values():
        trainings: dict[str, Path] = {}
        for path in (path for path in paths if path.is_dir()):
            training = training_of(path)
            if training is not None and training in trainings:
                raise UserError(
                    f"{trainings[training]} and {path} hold one training; each training counts once in a system"
                )
            trainings[training or str(path)] = path
        first, *others = [path for path in paths if path in recipes] or [None]
        for other in others:
            mine, theirs = recipes[first].values, recipes[other].values
            apart = differences(mine, theirs, {*NO_DIFFERENCE, "seed"})
            if apart:
                logger.warning(
                    "%s and %s count as one system, and differ in more than their seed: %s",
                    first, other, "; ".join(apart[:SHOWN]),
                )  # fmt: skip
            elif mine["training"].get("seed") == theirs["training"].get("seed"):
                logger.warning("%s and %s were trained with one seed; they count as two trainings", first, other)


def warn_of_searches(recipes: Mapping[Path, Recipe]) -> None:
    """Warn if two runs were translated with different settings, because the settings change the scores, too."""
    (first, ours), *others = [(path, recipe.evaluation) for path, recipe in recipes.items()] or [(None, None)]
    for path, theirs in others:
        if apart := settings_apart(vars(ours), vars(theirs), (*SEARCH, "precision")):
            logger.warning("%s and %s were translated with different settings: %s", first, path, ", ".join(apart))


def inputs_of(systems: Sequence[str], reference: str | None) -> set[Path]:
    """The files that a comparison reads, and that no output may overwrite."""
    runs = check_distinct(systems)
    recipes = recipes_of(runs)
    given = {path for paths in runs.values() for path in paths}
    run_files = {file for path in given if path.is_dir() for file in path.iterdir()}
    sets = {file for recipe in recipes.values() for split in COMPARED for file in _files(recipe.data, split)}
    return given | run_files | sets | ({Path(reference)} if reference is not None else set())


def _files(data: DataArguments, split: Split) -> list[Path]:
    """The files of a split; [] if they are not there, because nothing can overwrite missing files."""
    try:
        return local_files(data, split) if getattr(data, split) is not None else []
    except UserError:
        return []


def recipes_of(runs: Mapping[str, Sequence[Path]]) -> dict[Path, Recipe]:
    """The recipes of those systems that are folders of runs.

    Raises:
        UserError: a recipe cannot be read, or is not for translation.
    """
    paths = [path for paths in runs.values() for path in paths]
    return {path: load_recipe(path / RECIPE) for path in paths if (path / RECIPE).is_file()}


def scoring_of(
    recipes: Mapping[Path, Recipe],
    metrics: Sequence[str] | None,
    lowercase: bool | None,
    tokenize: str | None,
    target_lang: str | None = None,
) -> Scoring:
    """Return how to score: by the given values, or, for each None, by the value in the recipes.

    A recipe without the key `lowercase` or `tokenize` counts with the default. A recipe that names no metrics is
    scored by the metrics of the other recipes. Target languages are compared only if they choose sacreBLEU's
    tokenizer. Two codes may choose the same tokenizer.

    Raises:
        UserError: the recipes do not agree.
    """
    sections = {path: recipe.evaluation for path, recipe in recipes.items()}
    languages = {path: target_lang or recipe.data.target_lang for path, recipe in recipes.items()}
    if metrics is None:
        naming = [path for path, recipe in recipes.items() if "metrics" in recipe.values["evaluation"]]
        named = {path: sorted(sections[path].metrics) for path in naming}
        metrics = _agreed("evaluation.metrics", named, "--metrics") or METRICS
    if lowercase is None:
        values = {path: each.lowercase for path, each in sections.items()}
        lowercase = _agreed("evaluation.lowercase", values, "--lowercase or --no-lowercase") or False
    if tokenize is None:
        values = {path: each.tokenize for path, each in sections.items()}
        tokenize = _agreed("evaluation.tokenize", values, "--tokenize") or "13a"
    if tokenize == "auto":
        chosen = {path: _automatic(language) for path, language in languages.items()}
        _agreed("sacreBLEU's tokenizer for data.target_lang", chosen, "--tokenize")
    return Scoring(metrics, lowercase, tokenize, next(iter(languages.values()), target_lang))


def _automatic(language: str) -> str:
    """The tokenizer that sacreBLEU chooses for a language."""
    metric: Any = build_metrics(("bleu",), tokenize="auto", target_lang=language)["bleu"]
    return metric.tokenizer.signature()


def _agreed(key: str, values: Mapping[Path, Any], option: str) -> Any:
    """The value that all runs have; None without runs."""
    (first, value), *others = values.items() or [(None, None)]
    for path, other in others:
        if other != value:
            raise UserError(
                f"{key} is {quote(value)} in {first} and {quote(other)} in {path}; choose one with {option}"
            )
    return value


class Tested(NamedTuple):
    """The reference translations of a run's test sets, and the indices of those that are compared (None: all)."""

    lines: list[str]
    rows: list[int] | None = None

    def part(self, lines: list[str]) -> list[str]:
        """Return the compared lines out of `lines`, which are parallel to the references."""
        return lines if self.rows is None else [lines[row] for row in self.rows]


@dataclass(frozen=True)
class References:
    """Reference translations.

    Args:
        usual: references of all systems that have no entry in `by_run`.
        by_run: references of each run if one test set is chosen. Each run may have further test sets.
    """

    usual: Tested
    by_run: Mapping[Path, Tested]

    def of(self, path: Path) -> Tested:
        """The references for the translations in a system's run or file."""
        return self.by_run.get(path, self.usual)


def references_of(recipes: Mapping[Path, Recipe], reference: str | None, test_set: str | None = None) -> References:
    """Return the references: the lines of a file, of the test set that all recipes name, or of one of several sets.

    Raises:
        UserError: there is neither a file nor a run; the runs were tested on different sets; a run has no such test
            set, or several language pairs; or a test set cannot be read, or has changed.
    """
    if reference is not None:
        if test_set is not None:
            raise UserError(f"--test_set {test_set}: a file of references is compared as a whole; give only one")
        return References(Tested(list(read_lines(Path(reference)))), {})
    if not recipes:
        raise UserError("none of the systems is the folder of a run, so name the file of references: --reference FILE")
    for path, recipe in recipes.items():
        if recipe.data.pairs is not None:
            raise UserError(f"{path} translates several language pairs; compare its files translations.PAIR.txt")
    compared = {path: _compared(path, recipe.data, test_set) for path, recipe in recipes.items()}
    (first, ours), *others = compared.items()
    for path, theirs in others:
        with _reading_tests(path):
            same = _same_lines(ours, theirs, "test")
        if not same:
            named = (f"{each.test}, {each.source_lang}-{each.target_lang}" for each in (theirs, ours))
            raise UserError(
                f"{path} was tested on other sentences than {first} ({' and '.join(named)}); compare runs with one "
                "test set, or name a file of references: --reference FILE"
            )
    if test_set is None:
        with _reading_tests(first):
            loaded = load_whole(ours, "test")
        for path, recipe in recipes.items():
            _check_unchanged(path, recipe.data, loaded)
        return References(Tested(loaded["target"][:]), {})
    tested = {path: _tested(path, recipe.data, test_set) for path, recipe in recipes.items()}
    return References(tested[first], tested)


@contextmanager
def _reading_tests(path: Path) -> Iterator[None]:
    """Name in an error the run whose test set cannot be read, and explain how to compare without the test set."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"the test set of {path} cannot be read: {error}. Go to the folder in which the run was trained, or name "
            "a file of references: --reference FILE"
        ) from error


def _check_unchanged(path: Path, data: DataArguments, loaded: Dataset) -> None:
    """Check that a test set still holds what a run was tested on. Runs of older versions have no digest to check.

    Raises:
        UserError: the test set has changed, and the run's translations would be compared with other references.
    """
    digest = text_digest(loaded)
    if read_results(path).get("digests", {}).get("test", digest) != digest:
        raise UserError(
            f"{path} was tested on other sentences than data.test {quote(data.test)} holds now; bring the old ones "
            "back, or name a file with the old references: --reference FILE"
        )


def _compared(path: Path, data: DataArguments, test_set: str | None) -> DataArguments:
    """Return the section `data` of a run with only the test set that is compared; None: with all test sets."""
    if test_set is None:
        return data
    if data.format == "phrases":
        raise UserError(f"--test_set {test_set}: {path} was tested on phrases, which are one test set; leave it out")
    with _reading_tests(path):
        data.location("test")
    sets = _test_sets(data)
    if test_set not in sets:
        raise UserError(f"--test_set {test_set}: {path} was tested on {', '.join(sets)}")
    return sets[test_set]


def _test_sets(data: DataArguments) -> dict[str, DataArguments]:
    """Return `DataArguments.test_sets`. A single test set that is not in a list has a name here, too."""
    return data.test_sets or replace(data, test=[data.test]).test_sets


def _tested(path: Path, data: DataArguments, test_set: str) -> Tested:
    """The references of a run, and the indices of those that belong to the test set."""
    with _reading_tests(path):
        loaded, sets = load_whole(data, "test"), list(_test_sets(data))
    _check_unchanged(path, data, loaded)
    lines = loaded["target"][:]
    if len(sets) == 1:
        return Tested(lines)
    return Tested(lines, [row for row, index in enumerate(loaded["test_set"][:]) if index == sets.index(test_set)])


def translations_of(path: Path) -> list[str]:
    """The translations in a file, or in the folder of a finished run.

    Raises:
        UserError: there is no such file.
    """
    file = path / TRANSLATIONS if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no file {file}; give a file of translations, or the folder of a finished run")
    return list(read_lines(file))


def validation_losses(
    runs: Mapping[str, Sequence[Path]], recipes: Mapping[Path, Recipe]
) -> dict[str, dict[str, list[float]]]:
    """Map each comparable loss (`loss`, `nll`) to the systems, and each system to its runs' values in nats per token.

    `loss` is smoothed as in training, `nll` is not smoothed. A loss is left out unless all systems are folders of
    finished runs that hold it, with one tokenizer and one validation set. `loss` also requires the same smoothing.
    The log gives the reason, unless no system is a finished run.
    """
    folders = [path for paths in runs.values() for path in paths]
    finished = [path for path in folders if (path / RESULTS).is_file()]
    if finished != folders:
        if finished:
            logger.warning("validation losses are left out: not every system is the folder of a finished run")
        return {}
    first_one, *other_ones = [vocabulary(path) for path in folders]
    if not first_one or any(each != first_one for each in other_ones):
        logger.warning("validation losses are left out: the runs have different tokenizers, or none")
        return {}
    results = {path: read_results(path) for path in folders}
    losses = {path: _losses(results[path]) for path in folders}
    if not all(losses.values()):
        logger.warning("validation losses are left out: not every run has measured one")
        return {}
    if infinite := [path for path in folders if not all(map(math.isfinite, losses[path].values()))]:
        logger.warning("validation losses are left out: %s has one that is not finite", infinite[0])
        return {}
    if not _same_validation_set(folders, recipes, results):
        logger.warning("validation losses are left out: the runs have different validation sets")
        return {}
    usual = TranslationTrainingArguments.label_smoothing_factor
    smoothing = {each["recipe"]["training"].get("label_smoothing_factor", usual) for each in results.values()}
    known = [name for name in LOSSES if all(name in each for each in losses.values())]
    if len(smoothing) > 1 and "loss" in known:
        logger.warning("the smoothed validation loss is left out: the runs have different label_smoothing_factor")
        known.remove("loss")
    return {name: {system: [losses[path][name] for path in paths] for system, paths in runs.items()} for name in known}


def _same_validation_set(
    folders: Sequence[Path], recipes: Mapping[Path, Recipe], results: Mapping[Path, Mapping[str, Any]]
) -> bool:
    """Return whether all runs were validated on one set, by their digests; without digests, by their recipes."""
    digests = [results[path].get("digests", {}).get("validation") for path in folders]
    if all(digests):
        return len(set(digests)) == 1
    first, *others = [recipes[path].data for path in folders if path in recipes] or [None]
    return all(_same_lines(first, other, "validation") for other in others)


def _losses(results: Mapping[str, Any]) -> dict[str, float]:
    """The losses of the final model; if the run did not measure them, the lowest loss of its validation curve."""
    if "validation" in results:
        return results["validation"]
    train = results.get("train", {})
    return {"loss": train["best_validation_loss"]} if "best_validation_loss" in train else {}


def _same_lines(one: DataArguments, other: DataArguments, split: Split) -> bool:
    """Return whether a split has the same pairs in two recipes. Files are read only if the recipes' keys differ."""
    if all(getattr(one, field) == getattr(other, field) for field in (*PLACE, split)):
        return True
    mine, theirs = (load_whole(data, split) for data in (one, other))
    return all(mine[side][:] == theirs[side][:] for side in ("source", "target"))
