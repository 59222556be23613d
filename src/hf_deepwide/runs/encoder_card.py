"""The model card (README.md) of a masked language model or a classifier."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from .. import card_text
from ..durable import write_whole
from ..families import all_families
from ..hub import is_on_hub
from .model_card import filled_template, iso, portable
from .recipe import Recipe

METRICS = {"accuracy": "accuracy", "f1": "F1", "matthews": "Matthews' correlation"}
ON_HUB = {"matthews": "matthews_correlation"}  # metrics that the Hub names differently
PERPLEXITY = "perplexity"
TASKS = {"fill-mask": "masked-lm", "text-classification": "classification"}  # pipeline to subcommand of `train`


def write_masked_lm_card(folder: Path, recipe: Recipe, results: dict[str, Any]) -> None:
    """Write the card of a masked language model, with the perplexities of all text and of each language.

    Args:
        folder: the folder of the run.
        recipe: its recipe.
        results: the content of `results.json`.
    """
    data, train = recipe.data, results["train"]
    scored = [split for split in ("validation", "test") if split in results]
    measured = dict.fromkeys(name for split in scored for name in results[split])  # a split may lack a language
    names = [*measured] if len(data.languages) > 1 else [PERPLEXITY]
    _write(
        folder,
        recipe,
        results,
        pipeline="fill-mask",
        kind=f"A masked language model ({', '.join(map(card_text.text, data.languages))})",
        languages=[code for code in map(iso, data.languages) if code],
        columns=[name.replace("_", " ") for name in names],
        rows={
            split: [f"{results[split][name]:.2f}" if name in results[split] else "" for name in names]
            for split in scored
        },
        metrics=[PERPLEXITY],
        scores={},  # the Hub must not rank perplexities, which depend on the vocabulary
        note=f"Perplexity of the masked tokens: {data.mask_probability:.0%} of each text.",
        then=_choice(data.posterior_names),
        training=f"{train['steps']:,} steps, {train['epochs']:.1f} epochs, in {train['minutes']:.1f} minutes",
    )


def write_classifier_card(folder: Path, recipe: Recipe, results: dict[str, Any]) -> None:
    """Write the card of a classifier, with the scores of the model in the folder and the spread over seeds.

    Arguments are as in `write_masked_lm_card`.
    """
    data = recipe.data
    (chosen,) = (result for result in results["seeds"] if result["seed"] == results["chosen_seed"])
    scored = [split for split in ("validation", "test") if split in chosen]
    count = len(results["seeds"])
    rows = {split: [f"{chosen[split][name]:.2f}" for name in METRICS] for split in scored}
    if count > 1:
        for split in scored:
            summaries = [results[split][name] for name in METRICS]
            rows[f"{split}, median of {count} seeds ± standard deviation"] = [
                f"{each['median']:.2f} ± {each['standard_deviation']:.2f}" for each in summaries
            ]
    _write(
        folder,
        recipe,
        results,
        pipeline="text-classification",
        kind=f"A classifier of {'sentences' if data.sentence2 is None else 'pairs of sentences'}",
        languages=[],
        columns=list(METRICS.values()),
        rows=rows,
        metrics=list(METRICS),
        scores={name: chosen["test"][name] for name in METRICS} if "test" in chosen else {},
        note=f"All in per cent. The model is that of seed {results['chosen_seed']}{_why(count)}.",
        training=f"{chosen['steps']:,} steps, {chosen['epochs']:.1f} epochs",
    )


def _choice(posteriors: list[str]) -> str:
    """The code that chooses one of several posteriors, because the pipeline has no argument for it."""
    if len(posteriors) < 2:
        return ""
    numbers = ", ".join(f"{number} is {name}" for number, name in enumerate(posteriors))
    return (
        f"\n\n# the posterior of all texts: {card_text.plain(numbers)}\n"
        "import functools, torch\n"
        "fill_mask.model.forward = functools.partial(fill_mask.model.forward, posteriors=torch.tensor([0]))"
    )


def _why(seeds: int) -> str:
    """Return why the model in the folder was chosen among the models of so many seeds."""
    if seeds == 1:
        return ""
    return f", with the {'median validation score' if seeds % 2 else 'lower of the two middle validation scores'}"


def _write(
    folder: Path,
    recipe: Recipe,
    results: dict[str, Any],
    *,
    pipeline: str,
    languages: list[str],
    metrics: list[str],
    scores: dict[str, float],
    then: str = "",
    **shown: Any,
) -> None:
    data = recipe.data
    place = getattr(data, "name", None)
    card_data = ModelCardData(
        language=languages or None,
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=[pipeline, "hf_deepwide", recipe.family],
        base_model=recipe.init_from if recipe.init_from and is_on_hub(recipe.init_from) else None,
        datasets=[place] if place and is_on_hub(place) and not data.resolve(place).exists() else None,
        model_name=card_text.plain(recipe.name),
        metrics=[ON_HUB.get(metric, metric) for metric in metrics],
        eval_results=[
            EvalResult(
                task_type=pipeline,
                dataset_type=card_text.plain(portable(place) or data.format),
                dataset_name=card_text.plain(portable(data.test)),
                metric_type=ON_HUB.get(metric, metric),
                metric_value=round(score, 2),
                metric_name=METRICS[metric],
            )
            for metric, score in scores.items()
        ]
        or None,
    )
    use = card_text.use_of_folder(folder.as_posix(), pipeline) + then
    if recipe.family not in all_families():  # a class of Transformers needs no `import hf_deepwide`
        use = use.partition("\n")[2]
    card = filled_template(
        "encoder_card_template.md", card_data, recipe, task=TASKS[pipeline], use=use, results=results, **shown
    )
    write_whole(folder / card_text.CARD, str(card))
