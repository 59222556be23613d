"""The model card (README.md) of a finished run."""

import copy
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .. import card_text
from ..data.arguments import DataArguments, fill_in, split_pair
from ..durable import write_whole
from ..errors import UserError
from ..families import all_families
from ..hub import is_on_hub
from .recipe import Recipe, check_recipe, used_values
from .yaml_values import to_yaml

# Metric to its display name, and to its name on the Hub. A metric without an entry keeps its own name.
NAMES = {
    "bleu": "sacreBLEU",
    "chrf": "chrF",
    "multi_bleu": "tokenised BLEU",
    "moses_bleu": "Moses-tokenised BLEU",
    "sentence_bleu4": "sentence BLEU-4",
    "valid_python": "valid Python, %",
    "valid_python_line": "valid lines of Python, %",
    "valid_java": "valid Java, %",
}
ON_HUB = {"bleu": "sacrebleu", "multi_bleu": "bleu", "moses_bleu": "bleu"}
PROGRAMMING = {"py": "python", "java": "java"}  # suffix of a corpus of code to the tag of its language


def write_model_card(
    run: Path, recipe: Recipe, results: dict[str, Any], samples: Sequence[tuple[str, str, str]]
) -> Path:
    """Fill the template and save it as `README.md`.

    Args:
        run: the folder of the run.
        recipe: the recipe of the run.
        results: the content of `results.json`.
        samples: a few test sentences as (source, translation, reference).
    """
    path = run / card_text.CARD
    write_whole(path, str(_fill(recipe, results, run, samples)))
    return path


def card_of_results(results: dict[str, Any], name: str | None = None) -> str:
    """Return a run's card from its `results.json` alone, for a place where the run's folder is not available.

    The card holds no sentence of the corpus, and no learning curves. The model's name is `name`, or the folder's name.

    Raises:
        UserError: neither name is known.
    """
    values = results["recipe"]
    folder = values["training"].get("output_dir")
    if name is None and folder is None:
        raise UserError("card_of_results: give a name, as the recipe in the results sets no training.output_dir")
    name = name or Path(folder).name
    recipe = check_recipe(copy.deepcopy(values), name, name)
    return str(_fill(recipe, results, recipe.output_dir))


def _fill(
    recipe: Recipe, results: dict[str, Any], folder: Path, samples: Sequence[tuple[str, str, str]] | None = None
) -> ModelCard:
    """Fill the template. Without `samples`, leave out the samples and the learning curves in the folder."""
    data = recipe.data
    pairs = data.language_pairs
    sources, targets = (list(dict.fromkeys(languages)) for languages in zip(*pairs, strict=True))
    metrics = _metrics(results)
    code = {PROGRAMMING[language] for language in sources + targets if language in PROGRAMMING}
    code |= {metric.removeprefix("valid_") for metric in metrics if metric.startswith("valid_")}
    # Where the run's folder is not available, a name may be a name on the Hub or the name of a folder.
    datasets, base = ([], None) if samples is None else (_datasets(data), recipe.init_from)
    card_data = ModelCardData(
        language=None if code else list(dict.fromkeys(filter(None, map(iso, sources + targets)))) or None,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["translation", "hf_deepwide", recipe.family, *(["code", *sorted(code)] if code else [])],
        base_model=base if base and is_on_hub(base) else None,
        datasets=datasets or None,
        model_name=card_text.plain(recipe.name),
        metrics=[ON_HUB.get(metric, metric) for metric in metrics] or None,
        eval_results=_eval_results(recipe, results) or None,
    )
    return filled_template(
        "model_card_template.md",
        card_data,
        recipe,
        use=card_text.use_of_folder(folder.as_posix()),
        data=data,
        sources=[card_text.text(language) for language in sources],
        targets=[card_text.text(language) for language in targets],
        test_names=[card_text.code(name) for name in _test_names(data)],
        evaluation=recipe.evaluation,
        results=results,
        metrics={metric: NAMES.get(metric, metric) for metric in metrics},
        samples=samples,
        sample_pair=split_pair(data.evaluated_pairs[0]) if data.pairs else None,  # the pair of the first samples
    )


def filled_template(template: str, card_data: ModelCardData, recipe: Recipe, **shown: Any) -> ModelCard:
    """Fill a template of this package with the fields that all cards have, and with the fields in `shown`."""
    family = all_families().get(recipe.family)
    return ModelCard.from_template(
        card_data,
        template_str=(files("hf_deepwide") / template).read_text(encoding="utf-8"),
        name=recipe.name,
        family=recipe.family,
        paper=family and family.paper,
        init_from=portable(recipe.init_from),
        recipe=to_yaml(portable(used_values(recipe.values))).strip(),
        text=card_text.text,
        code=card_text.code,
        block=card_text.block,
        literal=card_text.literal,
        **shown,
    )


def _metrics(results: dict[str, Any]) -> list[str]:
    """The metrics that were computed on the test set."""
    test = results.get("test", {})
    return list(test.get("average") or test.get("signature", {}))


def _eval_results(recipe: Recipe, results: dict[str, Any]) -> list[EvalResult]:
    """The scores of each test set or of each language pair, in the form of the Hub's model index."""
    test, data = results.get("test", {}), recipe.data
    only = f"{data.source_lang}-{data.target_lang}"
    if sets := test.get("sets"):
        by_name = {name: (f"{name} {only}", scores) for name, scores in sets.items()}
    else:
        test_name = ", ".join(_test_names(data))
        by_name = {
            pair: (f"{_of_pair(test_name, pair, data)} {pair}", scores)
            for pair, scores in test.get("pairs", {only: test}).items()
        }
    return [
        EvalResult(
            task_type="translation",
            dataset_type=card_text.plain(_of_pair(portable(data.name), name, data) or data.format),
            dataset_name=card_text.plain(title),
            # The Hub puts scores of one type and config together.
            dataset_config=card_text.plain(name) if len(by_name) > 1 else None,
            metric_type=ON_HUB.get(metric, metric),
            metric_value=round(scores[metric], 2),
            metric_name=NAMES.get(metric, metric),
        )
        for name, (title, scores) in by_name.items()
        for metric in _metrics(results)
    ]


def _of_pair(place: str | None, pair: str, data: DataArguments) -> str | None:
    """A place of the data, with the languages filled in if the run has several language pairs."""
    return place if data.pairs is None else fill_in(place, pair, "data")


def _test_names(data: DataArguments) -> list[str]:
    places = data.test if isinstance(data.test, list) else [data.test]
    return [portable(place) for place in places if place] or ["held-out phrases"]


def _datasets(data: DataArguments) -> list[str]:
    """The Hub's names of the data sets that a run was trained on."""
    if data.format != "datasets":
        return []
    names = [data.for_pair(pair).name for pair in data.pairs] if data.pairs else [data.name]
    return [name for name in dict.fromkeys(names) if is_on_hub(name) and not data.resolve(name).exists()]


def iso(language: str) -> str | None:
    """Return the code of two or three letters that the Hub has for a language: de for de_DE, deu for deu_Latn."""
    match = re.match(r"([a-z]{2,3})(?![a-zA-Z])", language)
    return match and match[1]


def portable(values: Any) -> Any:
    """Values of a recipe, in which an absolute path, or a path that starts at a home, keeps only its last part."""
    if isinstance(values, dict):
        return {key: portable(value) for key, value in values.items()}
    if isinstance(values, list):
        return [portable(value) for value in values]
    if isinstance(values, str) and re.match(r"([/\\~]|[A-Za-z]:[/\\]).", values):
        return "…/" + re.split(r"[/\\]", values.rstrip("/\\"))[-1]
    return values
