"""Repeat sentences so that each kind of sentences gets its share of an epoch, and no sentence is left out.

The kinds are language pairs (temperature sampling), or real and synthetic pairs (a rate).
"""

import logging
from collections.abc import Sequence

import numpy as np

from ..errors import UserError, number_of

logger = logging.getLogger(__name__)


def copies_by_temperature(pairs: Sequence[int], temperature: float, names: Sequence[str] | None = None) -> np.ndarray:
    """Return how often each sentence is seen in an epoch, so that language pairs occur in proportion to n^(1/T).

    A sentence of a pair with n sentences is seen (n / n_max)^(1/T - 1) times. This is once in the largest pair, and
    more often in all other pairs. It is the temperature sampling of Arivazhagan et al. 2019, p ~ n^(1/T), but leaves
    out no sentence.

    Args:
        pairs: the language pair of each sentence, as an index.
        temperature: T >= 1. Infinity is allowed; all pairs then have the same weight.
        names: names of the language pairs in the log.

    Returns:
        `[sentences]`, 1 or more.
    """
    pairs = np.asarray(pairs, dtype=np.int64)
    sizes = np.bincount(pairs)
    copies = (np.maximum(sizes, 1) / sizes.max()) ** (1 / temperature - 1)
    seen = sizes * copies
    for pair in np.flatnonzero(sizes):
        name, share = names[pair] if names else f"pair {pair}", 100 * seen[pair] / seen.sum()
        size = number_of(sizes[pair], "sentence")
        logger.info("%s: %s, each seen %.2f times an epoch; %.1f %% of the training", name, size, copies[pair], share)
    return copies[pairs]


def copies_by_rate(synthetic: Sequence[int], rate: float) -> np.ndarray:
    """Return how often each pair is seen in an epoch, so that `rate` synthetic pairs are seen for each real pair.

    One kind of pairs is seen once. The other kind is seen as often as the rate requires, which is once or more.

    Args:
        synthetic: 1 for each synthetic pair, 0 for each real pair.
        rate: number of synthetic pairs for each real pair.

    Returns:
        `[pairs]`, 1 or more.

    Raises:
        UserError: one kind has no pairs.
    """
    kinds = np.asarray(synthetic, dtype=np.int64)
    real, made = np.bincount(kinds, minlength=2)
    if not (real and made):
        raise UserError(
            f"data.synthetic_rate is {rate:g}, and after the length filters {real} real and {made} synthetic pairs "
            "are left; there must be some of both kinds"
        )
    times = rate * real / made  # how often a synthetic pair is seen for each time that a real pair is seen
    copies = np.array([max(1 / times, 1.0), max(times, 1.0)])
    for kind, name in enumerate(("real", "synthetic")):
        logger.info("%s: %d pairs, seen %.2f times an epoch", name, (real, made)[kind], copies[kind])
    return copies[kinds]


class Repeats:
    """Repeat other sentences in each epoch, while the shapes in an epoch never change.

    Sentences of one kind have the same shape and the same number of copies c. All are seen floor(c) times. For the
    fractional rest each kind has a fixed number of extra places, which other sentences of the kind fill in each epoch.

    Example: four sentences of one shape, each to be seen 1.5 times, have 6 places. Two sentences are seen twice, at
    first the sentences 0 and 1:

        repeats = Repeats(np.full((4, 2), 8), np.full(4, 1.5))
        order = repeats.extend(np.array([3, 1, 0, 2]))           # [3, 1, 1, 0, 0, 2]
        repeats.draw(order, np.random.default_rng(0))            # [2, 0, 1, 3, 2, 0]: in this epoch 2 and 0

    A fifth sentence of another shape, seen twice, adds two places, which no other sentence fills.

    Args:
        shapes: `[sentences, 2]`, rounded source and target lengths.
        copies: `[sentences]`, 1 or more: how often each sentence is seen in an epoch on average.
    """

    def __init__(self, shapes: np.ndarray, copies: np.ndarray) -> None:
        if copies.min() < 1:
            raise ValueError(f"copies must be 1 or more, got {copies.min()}: every sentence is seen once an epoch")
        values, value = np.unique(copies, return_inverse=True)
        _, kind = np.unique(np.column_stack([shapes, value]), axis=0, return_inverse=True)
        self.members = _indices_by(kind.reshape(-1))  # the sentences of each kind
        firsts = [rows[0] for rows in self.members]
        self.often = [int(copies[row]) for row in firsts]  # how often all members of a kind are seen
        self.extra = np.zeros(len(self.members), dtype=np.int64)  # number of members that are seen once more
        sizes = np.array([len(rows) for rows in self.members])
        for average, kinds in zip(values, _indices_by(value[firsts]), strict=True):
            exact = sizes[kinds] * (average - int(average))
            shares = np.floor(exact).astype(np.int64)
            left = round(exact.sum()) - shares.sum()  # for the largest remainders: the total is exact to one sentence
            shares[np.argsort(shares - exact, kind="stable")[:left]] += 1
            self.extra[kinds] = shares

    def extend(self, order: np.ndarray) -> np.ndarray:
        """Return an order of the sentences in which the copies of a sentence follow the sentence."""
        filled = [self._fill(kind, rows) for kind, rows in enumerate(self.members)]
        rows, kinds = np.concatenate(filled), np.repeat(np.arange(len(filled)), [len(part) for part in filled])
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        places = np.argsort(rank[rows], kind="stable")
        self._places = _indices_by(kinds[places])  # the places of each kind
        return rows[places]

    def draw(self, order: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return the order from `extend` with other sentences in the extra places."""
        drawn = order.copy()
        for kind, (rows, places) in enumerate(zip(self.members, self._places, strict=True)):
            drawn[places] = self._fill(kind, random.permutation(rows))
        return drawn

    def _fill(self, kind: int, rows: np.ndarray) -> np.ndarray:
        """Repeat all rows of a kind `often` times, and the first `extra` of them once more."""
        return np.concatenate([np.tile(rows, self.often[kind]), rows[: self.extra[kind]]])


def _indices_by(group: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each group, groups and indices in rising order, with a single sort for all groups."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
