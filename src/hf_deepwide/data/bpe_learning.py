"""Learn subword merges as subword-nmt does, ties included (Sennrich et al. 2016, algorithm 1).

The trainer of the library `tokenizers` breaks ties between equally frequent pairs in another way, and so finds other
merges. Published segmentations come from subword-nmt. On the control's corpus (`docs/results.md`), this module finds
exactly the published merges.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from sys import intern

from tqdm import tqdm

from ..errors import UserError
from ..progress import shows_bars
from .bpe_codes import END_OF_WORD, VERSION

LEAST = 2  # a pair that occurs only once is not merged
Merge = tuple[str, str]


class _Greatest(tuple):
    """A pair of pieces with inverted order: a heap returns the greatest pair first."""

    def __lt__(self, other: tuple) -> bool:
        return tuple.__gt__(self, other)


def learn_merges(texts: Iterable[str], number: int) -> list[Merge]:
    """Learn at most `number` merges from tokenised text, most frequent first.

    If pairs are equally frequent, the greatest pair in the order of characters comes first.

    Raises:
        UserError: there is no text.
    """
    counts = Counter(word for text in texts for word in text.split(" ") if word)
    if not counts:
        raise UserError("there is no text to learn merges from")
    words = [[*map(intern, word[:-1]), intern(word[-1] + END_OF_WORD)] for word in counts]
    occurrences = list(counts.values())
    frequency: Counter[Merge] = Counter()
    places: defaultdict[Merge, set[int]] = defaultdict(set)  # pair: words that contain it or did before
    for place, (word, count) in enumerate(zip(words, occurrences, strict=True)):
        for pair in pairwise(word):
            frequency[pair] += count
            places[pair].add(place)
    heap = [(-count, _Greatest(pair)) for pair, count in frequency.items()]
    heapq.heapify(heap)
    merges: list[Merge] = []
    with tqdm(total=number, desc="learn merges", leave=False, delay=1, disable=not shows_bars()) as bar:
        while heap and len(merges) < number:
            count, greatest = heapq.heappop(heap)
            pair = (greatest[0], greatest[1])
            if -count != frequency[pair]:
                continue  # an outdated count: the heap also has an entry with the present count
            if -count < LEAST:
                break
            merges.append(pair)
            bar.update()
            changed: Counter[Merge] = Counter()
            for place in places.pop(pair):
                before, after = words[place], merged(words[place], pair)
                if len(before) == len(after):
                    continue
                words[place] = after
                for old in pairwise(before):
                    changed[old] -= occurrences[place]
                for new in pairwise(after):
                    changed[new] += occurrences[place]
                    places[new].add(place)
            for other, difference in changed.items():
                if difference:
                    frequency[other] += difference
                    heapq.heappush(heap, (-frequency[other], _Greatest(other)))
    return merges


def merged(pieces: Sequence[str], pair: Merge) -> list[str]:
    """Return the pieces of a word after a merge, applied from left to right."""
    (left, right), whole = pair, intern("".join(pair))
    result: list[str] = []
    place = 0
    while place < len(pieces):
        together = pieces[place] == left and place + 1 < len(pieces) and pieces[place + 1] == right
        result.append(whole if together else pieces[place])
        place += 2 if together else 1
    return result


def codes_text(merges: Iterable[Merge]) -> str:
    """Return the merges in the file format of subword-nmt, which `tokenizer.codes` reads."""
    return "\n".join([VERSION, *map(" ".join, merges)]) + "\n"
