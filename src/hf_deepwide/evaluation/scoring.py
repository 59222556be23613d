"""Translate and score a split: one language pair, or each of several pairs and their average."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset

from ..data.arguments import DataArguments, split_pair
from .arguments import EvaluationArguments
from .averages import ALL, group_means
from .metrics import score

Translate = Callable[[list[str], EvaluationArguments, str, str], list[str]]  # sources, settings, languages


def translate_and_score(
    translate: Translate, texts: Dataset, data: DataArguments, evaluation: EvaluationArguments
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Translate `texts` pair by pair, and score the translations.

    Args:
        translate: a function that returns the translations of sources, in order.
        texts: the columns `source` and `target`, and `pair` if `data` has several pairs.
        data: the language pairs.
        evaluation: the settings for translating and scoring.

    Returns:
        The scores, and the translations by pair. For one pair the scores are those of `evaluation.metrics.score`. For
        several pairs they are `{"sentences", "average": {metric: mean over the pairs}, "groups": {group: {metric:
        mean}}, "pairs": {pair: its scores}}`. `groups` (`evaluation.averages`) is left out if there is no group beside
        the group of all pairs.
    """
    scores, translations = {}, {}
    for pair, part in by_pair(texts, data).items():
        source_lang, target_lang = split_pair(pair) if data.pairs else data.language_pairs[0]
        translations[pair] = translate(part["source"][:], evaluation, source_lang, target_lang)
        scores[pair] = score(translations[pair], part["target"][:], **evaluation.scoring(target_lang))
    if data.pairs is None:
        (only,) = scores.values()
        return only, translations
    return average(scores, evaluation), translations


def score_sets(
    translations: list[str], texts: Dataset, data: DataArguments, evaluation: EvaluationArguments
) -> dict[str, dict[str, Any]]:
    """Return the scores of each test set, as `{name: result of evaluation.metrics.score}`."""
    test_set_by_row, scores = texts["test_set"][:], {}
    for index, name in enumerate(data.test_sets):
        rows = [row for row, test_set in enumerate(test_set_by_row) if test_set == index]
        own = [translations[row] for row in rows]
        scores[name] = score(own, texts.select(rows)["target"][:], **evaluation.scoring(data.target_lang))
    return scores


def by_pair(texts: Dataset, data: DataArguments) -> dict[str, Dataset]:
    """Return the rows of each language pair, in their order."""
    if data.pairs is None:
        return {f"{data.source_lang}-{data.target_lang}": texts}
    pairs = texts["pair"][:]
    rows: dict[str, list[int]] = {pair: [] for pair in data.evaluated_pairs}
    for row, pair in enumerate(pairs):
        rows[data.pairs[pair]].append(row)
    return {pair: texts.select(pair_rows) for pair, pair_rows in rows.items()}


def average(scores: dict[str, dict[str, Any]], evaluation: EvaluationArguments) -> dict[str, Any]:
    """Return the scores of several pairs together with their means; see `translate_and_score`."""
    by_group = group_means(scores, evaluation.metrics, evaluation.average_languages)
    sentences = sum(pair_scores["sentences"] for pair_scores in scores.values())
    mean = by_group.pop(ALL)
    return {"sentences": sentences, "average": mean, **({"groups": by_group} if by_group else {}), "pairs": scores}
