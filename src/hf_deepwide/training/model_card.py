"""The model card (README.md) of a finished run."""

import copy
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..data.arguments import split_pair
from ..durable import write_whole
from ..errors import UserError
from .recipe import Recipe, check_recipe
from .yaml_values import to_yaml

PAPERS = {
    "vanilla_transformer": ("Vaswani et al. 2017, Attention Is All You Need", "1706.03762"),
    "mat": ("Fan et al. 2020, Multi-branch Attentive Transformer", "2006.10270"),
    "multipath_transformer": ("Lin et al. 2023, Multi-Path Transformer is Better", "2305.05948"),
    "latent_depth": ("Li et al. 2020, Deep Transformers with Latent Depth", "2009.13102"),
    "depthwise_lstm": ("Xu et al. 2024, Rewiring the Transformer with Depth-Wise LSTMs", "2007.06257"),
}


def write_model_card(
    run: Path, recipe: Recipe, results: dict[str, Any], samples: Sequence[tuple[str, str, str]]
) -> Path:
    """Fill the template and save it as `README.md`.

    Args:
        run: the folder of the run.
        recipe: its recipe.
        results: what `results.json` holds.
        samples: a few test sentences as (source, translation, reference).
    """
    path = run / "README.md"
    write_whole(path, str(_fill(recipe, results, run, samples)))
    return path


def card_of_results(results: dict[str, Any], name: str | None = None) -> str:
    """A run's card from its `results.json` alone, for a place where its folder is not.

    It holds no sentence of the corpus, and no learning curves. The model is called `name`, or as its folder.

    Raises:
        UserError: neither is known.
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
    """The template with what it asks for; without `samples` neither these nor the curves that lie in the folder."""
    data = recipe.data
    pairs = data.language_pairs
    card_data = ModelCardData(
        language=list(dict.fromkeys([source for source, _ in pairs] + [target for _, target in pairs])),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["translation", "hf_deepwide", recipe.family],
        model_name=recipe.name,
        metrics=["sacrebleu", "chrf"],
        eval_results=_eval_results(recipe, results) or None,
    )
    template = files("hf_deepwide") / "model_card_template.md"
    with as_file(template) as path:
        return ModelCard.from_template(
            card_data,
            template_path=str(path),
            name=recipe.name,
            folder=folder.as_posix(),
            family=recipe.family,
            paper=PAPERS.get(recipe.family),
            data=data,
            sources=list(dict.fromkeys(source for source, _ in pairs)),
            targets=list(dict.fromkeys(target for _, target in pairs)),
            test_name=data.test or "held-out phrases",
            init_from=recipe.init_from,
            evaluation=recipe.evaluation,
            results=results,
            samples=samples,
            sample_pair=split_pair(data.evaluated_pairs[0]) if data.pairs else None,  # `samples` begin with it
            recipe=to_yaml(recipe.values).strip(),
        )


def _eval_results(recipe: Recipe, results: dict[str, Any]) -> list[EvalResult]:
    """The scores in the form of the Hub's model index."""
    test, data = results.get("test", {}), recipe.data
    by_pair = test.get("pairs", {f"{data.source_lang}-{data.target_lang}": test})
    return [
        EvalResult(
            task_type="translation",
            dataset_type=data.name or data.format,
            dataset_name=f"{data.test or 'held-out phrases'} {pair}",
            metric_type={"bleu": "sacrebleu", "chrf": "chrf"}[metric],
            metric_value=round(scores[metric], 2),
            metric_name={"bleu": "sacreBLEU", "chrf": "chrF"}[metric],
        )
        for pair, scores in by_pair.items()
        for metric in ("bleu", "chrf")
        if metric in scores
    ]
