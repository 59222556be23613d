"""Translations and scores of a split: of its language pair, or of each of several and on average."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset

from ..data.arguments import DataArguments, split_pair
from .arguments import EvaluationArguments
from .averages import ALL, group_means
from .metrics import score

Translate = Callable[[list[str], EvaluationArguments, str, str], list[str]]  # sources, settings, from, into


def translate_and_score(
    translate: Translate, texts: Dataset, data: DataArguments, evaluation: EvaluationArguments
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Translate `texts` pair by pair, and score.

    Args:
        translate: gives the translations of sources, in order.
        texts: columns `source` and `target`, and `pair` where `data` names several.
        data: the languages.
        evaluation: how to translate and score.

    Returns:
        The scores, and the translations by pair. Of one pair the scores are those of `evaluation.metrics.score`. Of
        several pairs they are `{"sentences", "average": {metric: mean over the pairs}, "groups": {group: {metric:
        mean}}, "pairs": {pair: its scores}}`. `groups` (`evaluation.averages`) is left out if its one group
        is all pairs.
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
    """The scores of each of several test sets: its name to what `evaluation.metrics.score` says."""
    test_set_by_row, scores = texts["test_set"][:], {}
    for index, name in enumerate(data.test_sets):
        rows = [row for row, test_set in enumerate(test_set_by_row) if test_set == index]
        own = [translations[row] for row in rows]
        scores[name] = score(own, texts.select(rows)["target"][:], **evaluation.scoring(data.target_lang))
    return scores


def by_pair(texts: Dataset, data: DataArguments) -> dict[str, Dataset]:
    """The rows of each language pair, in their order."""
    if data.pairs is None:
        return {f"{data.source_lang}-{data.target_lang}": texts}
    pairs = texts["pair"][:]
    rows: dict[str, list[int]] = {pair: [] for pair in data.evaluated_pairs}
    for row, pair in enumerate(pairs):
        rows[data.pairs[pair]].append(row)
    return {pair: texts.select(pair_rows) for pair, pair_rows in rows.items()}


def average(scores: dict[str, dict[str, Any]], evaluation: EvaluationArguments) -> dict[str, Any]:
    """Scores of several pairs with their means; see `translate_and_score`."""
    by_group = group_means(scores, evaluation.metrics, evaluation.average_languages)
    sentences = sum(pair_scores["sentences"] for pair_scores in scores.values())
    mean = by_group.pop(ALL)
    return {"sentences": sentences, "average": mean, **({"groups": by_group} if by_group else {}), "pairs": scores}
