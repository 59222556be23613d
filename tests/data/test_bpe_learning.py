"""Learning of merges, against the algorithm written out naively, and against published merges."""

import random
from itertools import chain, pairwise

import pytest

from hf_deepwide.data.arguments import Places
from hf_deepwide.data.bpe_codes import read_codes
from hf_deepwide.data.bpe_learning import codes_text, learn_merges
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.errors import UserError

CONTROL = Places().resolve("multi30k_lowercased_tokenised")


def learn(text: str, number: int) -> list[tuple[str, str]]:
    """Sennrich et al. 2016, algorithm 1, counting all pairs anew for each merge. Of equal pairs, the greatest wins."""
    words = [[*word[:-1], word[-1] + "</w>"] for word in text.split()]
    merges = []
    for _ in range(number):
        counts: dict[tuple[str, str], int] = {}
        for pair in chain.from_iterable(map(pairwise, words)):
            counts[pair] = counts.get(pair, 0) + 1
        if not counts or max(counts.values()) < 2:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for word in words:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == best:
                    word[place : place + 2] = ["".join(best)]
                place += 1
    return merges


@pytest.mark.parametrize("letters", ["ab", "aab</w>", "lowernidst", "äб李a"])
def test_learns_as_the_algorithm(letters):
    draw = random.Random(letters)
    for _ in range(20):
        words = ["".join(draw.choices(letters, k=draw.randint(1, 8))) for _ in range(draw.randint(1, 60))]
        lines = [" ".join(words[:20]), "  ".join(words[20:])]
        number = draw.choice([1, 5, 1000])
        assert learn_merges(lines, number) == learn(" ".join(lines), number)


@pytest.mark.skipif(not CONTROL.is_dir(), reason="the control's corpus is not at $HF_DEEPWIDE_DATA")
def test_finds_the_published_merges():
    """Compare with the first 1,000 of the 10,000 merges that were published with the control's corpus."""
    lines = chain.from_iterable(read_lines(CONTROL / f"train.{lang}.gz") for lang in ("en", "de"))
    assert learn_merges(lines, 1_000) == read_codes(CONTROL / "bpe10k.codes.gz")[:1_000]


def test_the_file_is_read_back(tmp_path):
    merges = learn_merges(["low lower lowest"] * 3, 4)
    (tmp_path / "codes").write_text(codes_text(merges), encoding="utf-8")
    assert read_codes(tmp_path / "codes") == merges
    assert merges[0] == ("l", "o")


def test_refuses_an_empty_text():
    with pytest.raises(UserError, match="no text"):
        learn_merges(["", "  "], 3)
