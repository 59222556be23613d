"""Scores of several language pairs summed up, as papers on multilingual translation report them.

`groups` says which pairs are averaged together, `means` averages, and `win_ratio` counts the pairs on which one system
is better than another. An example: all 188 pairs of OPUS-100, and the languages de, zh, br and te. Then the groups are
BLEU₉₄ and BLEU₄ of Zhang et al. 2020 (Improving Massively Multilingual Neural Machine Translation), from English and
into English.
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
    """Name of each group of pairs that has a mean of its own, and its pairs.

    `average` is all pairs. One language, say English, may be on one side of every pair, and on either side of some.
    Then `en-xx` are the pairs from it, and `xx-en` the pairs into it. `en-xx (de te)` are the pairs of such a group
    whose other side is among `languages`. Without such a language, the group of all pairs is divided alike.

    Args:
        pairs: source and target languages, as `en-de`.
        languages: see above.

    Raises:
        UserError: a language that no pair has on its other side.
    """
    sides = {pair: split_pair(pair) for pair in pairs}
    common = set.intersection(*map(set, sides.values())) if len(pairs) > 1 else set()
    hubs = common if len(common) == 1 else set()  # of en-de and de-en each could be the one
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
    """The mean score of each group that `groups` gave; every pair counts the same, whatever its test set's size."""
    return {name: sum(scores[pair] for pair in pairs) / len(pairs) for name, pairs in pairs_by_group.items()}


def group_means(
    scores: Mapping[str, Mapping[str, float]], metrics: Sequence[str], languages: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """`{group: {metric: mean}}` of `{pair: {metric: score}}`, with the groups that `groups` makes of the pairs."""
    pairs_by_group = groups(list(scores), languages)
    by_metric = {
        metric: means({pair: pair_scores[metric] for pair, pair_scores in scores.items()}, pairs_by_group)
        for metric in metrics
    }
    return {name: {metric: by_metric[metric][name] for metric in metrics} for name in pairs_by_group}


def win_ratio(
    ours: Mapping[str, float], theirs: Mapping[str, float], pairs_by_group: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """The share of each group's pairs where our score is higher, in per cent; equal ones are not won.

    Raises:
        UserError: a pair has no score of theirs, or one that is not finite.
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
    """Scores that somebody has reported: `{system: {pair: score}}` of a table in TSV.

    Its header is `pair` and the names of systems; each line below is a pair and its scores. Lines that begin with
    `#` are comments.

    Raises:
        UserError: what is not such a table; names the line.
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
