"""How often sentences of small language pairs are repeated: temperature sampling without leaving anything out."""

import logging
from collections.abc import Sequence

import numpy as np

logger = logging.getLogger(__name__)


def copies_by_temperature(pairs: Sequence[int], temperature: float, names: Sequence[str] | None = None) -> np.ndarray:
    """How often each sentence is to be seen in an epoch, so that language pairs occur in proportion to n^(1/T).

    A sentence of a pair with n sentences is seen (n / n_max)^(1/T - 1) times: once in the largest pair, more often in
    all others (temperature sampling as in Arivazhagan et al. 2019, where it is p ~ n^(1/T)).

    Args:
        pairs: the language pair of each sentence, as an index.
        temperature: T >= 1, infinity included, at which all pairs weigh the same.
        names: what the language pairs are called in the log.

    Returns:
        `[sentences]`, 1 or more.
    """
    pairs = np.asarray(pairs, dtype=np.int64)
    sizes = np.bincount(pairs)
    copies = (np.maximum(sizes, 1) / sizes.max()) ** (1 / temperature - 1)
    seen = sizes * copies
    for pair in np.flatnonzero(sizes):
        name, share = names[pair] if names else f"pair {pair}", 100 * seen[pair] / seen.sum()
        logger.info("%s: %d sentences, seen %.2f times an epoch: %.1f %%", name, sizes[pair], copies[pair], share)
    return copies[pairs]


class Repeats:
    """Deals out repetitions so that an epoch's shapes never change, but which sentences are repeated does.

    Sentences of one kind (same shape, same number of copies c) are all seen floor(c) times; of the fractional rest
    each kind gets a fixed number of places, which other sentences of the kind fill in each epoch.

    Args:
        shapes: `[sentences, 2]`, rounded source and target lengths.
        copies: `[sentences]`, 1 or more: how often each is seen on average.
    """

    def __init__(self, shapes: np.ndarray, copies: np.ndarray):
        if copies.min() < 1:
            raise ValueError(f"copies must be 1 or more, got {copies.min()}: every sentence is seen once an epoch")
        values, value = np.unique(copies, return_inverse=True)
        _, kind = np.unique(np.column_stack([shapes, value]), axis=0, return_inverse=True)
        kind = kind.reshape(-1)
        by_kind = np.argsort(kind, kind="stable")
        self.members = np.split(by_kind, np.flatnonzero(np.diff(kind[by_kind])) + 1)
        self.often = [int(copies[rows[0]]) for rows in self.members]
        self.extra = [0] * len(self.members)
        for average in values:  # largest remainders, so that the total is right to one sentence
            kinds = [index for index, rows in enumerate(self.members) if copies[rows[0]] == average]
            exact = np.array([len(self.members[index]) * (average - int(average)) for index in kinds])
            shares = np.floor(exact).astype(int)
            shares[np.argsort(shares - exact, kind="stable")[: round(exact.sum()) - shares.sum()]] += 1
            for index, share in zip(kinds, shares.tolist(), strict=True):
                self.extra[index] = share

    def extend(self, order: np.ndarray) -> np.ndarray:
        """An order of the sentences, with the repeated ones beside each other."""
        filled = [self._fill(index, rows) for index, rows in enumerate(self.members)]
        rows, kinds = np.concatenate(filled), np.repeat(np.arange(len(filled)), [len(part) for part in filled])
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        places = np.argsort(rank[rows], kind="stable")
        self._places = [np.flatnonzero(kinds[places] == index) for index in range(len(filled))]
        return rows[places]

    def draw(self, order: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """What `extend` returned, with the extra places dealt out anew."""
        drawn = order.copy()
        for index, (rows, places) in enumerate(zip(self.members, self._places, strict=True)):
            drawn[places] = self._fill(index, random.permutation(rows))
        return drawn

    def _fill(self, index: int, rows: np.ndarray) -> np.ndarray:
        """The rows of a kind as often as it goes, the first of them once more."""
        return np.concatenate([np.tile(rows, self.often[index]), rows[: self.extra[index]]])
