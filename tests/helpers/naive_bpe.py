"""A slow byte-pair encoding, as in Sennrich et al. 2016 (algorithm 1), for tests to compare with."""

from itertools import pairwise

WORDS = ["low", "lower", "lowest", "newer", "newest", "wider", "new", "widen", "weir", "enter"]


def learn(words: list[str], number: int) -> list[tuple[str, str]]:
    """Merge the most frequent pair `number` times (Sennrich et al. 2016, algorithm 1), and return the merged pairs."""
    pieces = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges = []
    for _ in range(number):
        pairs = [pair for word in pieces for pair in pairwise(word)]
        best = max(sorted(set(pairs)), key=pairs.count)
        merges.append(best)
        pieces = [merge(word, best) for word in pieces]
    return merges


def merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in word:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def segment(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Split a word into pieces: apply the merges in the order in which they were learnt."""
    pieces = [*word[:-1], word[-1] + "</w>"]
    for pair in merges:
        pieces = merge(pieces, pair)
    return pieces
