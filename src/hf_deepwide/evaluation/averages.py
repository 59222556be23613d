"""Mean scores over language pairs, and win ratios, as papers on multilingual translation report them.

`groups` forms groups of pairs, and `means` averages the scores of each group. `win_ratio` counts the pairs on which
one system is better than another. Example: take all 188 pairs of OPUS-100, and the languages de, zh, br and te. Then
the groups give BLEU₉₄ and BLEU₄, from English and into English, of Zhang et al. 2020 (Improving Massively Multilingual
Neural Machine Translation).
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..data.arguments import split_pair
from ..data.text_files import read_lines
from ..errors import UserError, quote

ALL = "average"  # the group of all pairs


def groups(pairs: Sequence[str], languages: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the groups of pairs that are averaged: the name of each group, and its pairs.

    The group `average` has all pairs. A common language, such as English, is in every pair: the source of some pairs
    and the target of others. Then `en-xx` has the pairs from English, and `xx-en` the pairs into English.

    `en-xx (de te)` has the pairs of `en-xx` whose other language is among `languages`, and `xx-en (de te)` those of
    `xx-en`. Without a common language, `average (de te)` has the pairs with one of the `languages`.

    Args:
        pairs: source and target languages, as `en-de`.
        languages: the languages whose pairs are also averaged on their own.

    Raises:
        UserError: no pair has one of the `languages` (the common language does not count).
    """
    sides = {pair: split_pair(pair) for pair in pairs}
    common = set.intersection(*map(set, sides.values())) if len(pairs) > 1 else set()
    hubs = common if len(common) == 1 else set()  # with only en-de and de-en, both languages are common
    named = {ALL: list(pairs)}
    for hub in hubs:
        out_of, into = ([pair for pair in pairs if sides[pair][place] == hub] for place in (0, 1))
        if out_of and into:
            named |= {f"{hub}-xx": out_of, f"xx-{hub}": into}
    others = {pair: set(both) - hubs for pair, both in sides.items()}
    unknown = sorted(set(languages) - set().union(*others.values()))
    if unknown:
        known = ", ".join(sorted(set().union(*others.values())))
        raise UserError(f"average_languages: no language pair has {', '.join(unknown)}; accepted: {known}")
    chosen = {}
    for name, members in named.items():
        if languages and (name != ALL or len(named) == 1):
            chosen[f"{name} ({' '.join(languages)})"] = [pair for pair in members if others[pair] & set(languages)]
    return {name: members for name, members in (named | chosen).items() if members}


def means(scores: Mapping[str, float], pairs_by_group: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return the mean score of each group of pairs. Every pair counts the same, whatever the size of its test set."""
    return {name: sum(scores[pair] for pair in pairs) / len(pairs) for name, pairs in pairs_by_group.items()}


def group_means(
    scores: Mapping[str, Mapping[str, float]], metrics: Sequence[str], languages: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """Average `{pair: {metric: score}}` by the groups that `groups` forms, and return `{group: {metric: mean}}`."""
    pairs_by_group = groups(list(scores), languages)
    by_metric = {
        metric: means({pair: pair_scores[metric] for pair, pair_scores in scores.items()}, pairs_by_group)
        for metric in metrics
    }
    return {name: {metric: by_metric[metric][name] for metric in metrics} for name in pairs_by_group}


def win_ratio(
    ours: Mapping[str, float], theirs: Mapping[str, float], pairs_by_group: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return the percentage of each group's pairs on which the score in `ours` is higher. A tie is not a win.

    Raises:
        UserError: `theirs` has no score for a pair, or a score is not finite.
    """
    missing = [pair for pair in ours if pair not in theirs]
    if missing:
        raise UserError(
            f"win ratio: the other system has no score of {', '.join(missing[:5])}"
            + (f" and {len(missing) - 5} other pairs" if len(missing) > 5 else "")
        )
    for pair, score in ours.items():
        if not (math.isfinite(score) and math.isfinite(theirs[pair])):
            raise UserError(
                f"win ratio: the scores of {pair} are {score} and {theirs[pair]}, which cannot be compared"
            )
    won = {pair: 100.0 * (score > theirs[pair]) for pair, score in ours.items()}
    return means(won, pairs_by_group)


def read_scores(path: Path) -> dict[str, dict[str, float]]:
    """Read reported scores from a TSV table, as `{system: {pair: score}}`.

    The header is `pair` and the names of systems. Each line below is a pair and its scores. Lines that begin with `#`
    are comments.

    Raises:
        UserError: the file is no such table. The message names the line.
    """
    systems: list[str] = []
    scores: dict[str, dict[str, float]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        if line.startswith("#"):
            continue
        first, *cells = line.split("\t")
        if not systems:
            if first != "pair" or not cells or len(set(cells)) < len(cells):
                raise UserError(
                    f"{path}, line {number}: the header is `pair` and the names of systems, tabs between them"
                )
            systems, scores = cells, {system: {} for system in cells}
            continue
        if len(cells) != len(systems):
            raise UserError(f"{path}, line {number}: {len(cells)} scores of {len(systems)} systems")
        if first in scores[systems[0]]:
            raise UserError(f"{path}, line {number}: the pair {first} is there twice")
        for system, cell in zip(systems, cells, strict=True):
            if not re.fullmatch(r"\d+(\.\d+)?", cell):
                raise UserError(
                    f"{path}, line {number}: {quote(cell)} is no score; accepted: a number from 0 up, as 23.4"
                )
            scores[system][first] = float(cell)
    if not systems:
        raise UserError(f"{path}: there is no header, `pair` and the names of systems")
    return scores
