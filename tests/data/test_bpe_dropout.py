"""BPE-dropout, against the probabilities of all possible segmentations, computed naively."""

import json
import random
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_deepwide.data.bpe_codes import tokenizer_from_codes
from hf_deepwide.data.bpe_dropout import BPEDropout
from hf_deepwide.data.subword_collator import SubwordCollator
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError

TEXTS = ["the lowest new water is wider than the lower one", "newer rivers, 40 of them, widen <2de>", "Ob er enters?"]


def subword_nmt(folder: Path) -> PreTrainedTokenizerFast:
    merges = ["l o", "lo w", "e r</w>", "low er</w>", "n e", "ne w", "t h", "th e</w>", "w i", "wi d"]
    (folder / "codes").write_text("\n".join(["#version: 0.2", *merges]))
    return tokenizer_from_codes(folder / "codes", TEXTS)


def byte_level(folder: Path) -> PreTrainedTokenizerFast:
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(TEXTS, vocab_size=300, min_frequency=1, special_tokens=["<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, pad_token="<pad>")


def metaspace(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(TEXTS, TokenizerArguments(vocab_size=90, min_frequency=1))
    tokenizer.add_tokens(["<2de>"])
    return tokenizer


@pytest.fixture(scope="module", params=[subword_nmt, byte_level, metaspace], ids=lambda make: make.__name__)
def tokenizer(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("tokenizer"))


def test_other_pieces_of_the_same_words(tokenizer):
    draws, dropout = random.Random(1), BPEDropout(tokenizer, 0.3)
    never, always = BPEDropout(tokenizer, 0), BPEDropout(tokenizer, 1)
    merged = {tuple(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]}
    whole = {"".join(merge) for merge in merged}
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert never(ids, draws) == ids
        found = {tuple(dropout(ids, draws)) for _ in range(20)}
        assert len(found) > 1
        assert {tokenizer.decode(pieces) for pieces in (*found, always(ids, draws))} == {tokenizer.decode(ids)}
        assert not whole & set(tokenizer.convert_ids_to_tokens(always(ids, draws)))


def probabilities(pieces: tuple[str, ...], merges: list[tuple[str, str]], rate: float) -> dict[tuple[str, ...], float]:
    """The probability of each outcome of algorithm 1.

    Each step tries all ways to leave out possible merges, and applies the first merge that remains.
    """
    places = [i for i, pair in enumerate(pairwise(pieces)) if pair in merges]
    outcomes: dict[tuple[str, ...], float] = defaultdict(float)
    for choice in range(2 ** len(places)):
        left = [place for number, place in enumerate(places) if choice >> number & 1]
        chance = (1 - rate) ** len(left) * rate ** (len(places) - len(left))
        if not left:
            outcomes[pieces] += chance
            continue
        place = min(left, key=lambda i: (merges.index(pieces[i : i + 2]), i))
        merged = (*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2 :])
        for outcome, further in probabilities(merged, merges, rate).items():
            outcomes[outcome] += chance * further
    return outcomes


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_pieces_are_as_frequent_as_algorithm_1_says(rate):
    merges = [("a", "b"), ("ab", "a"), ("b", "a"), ("aba", "b"), ("c", "a"), ("ab", "ab")]
    pieces = ["a", "b", "c", "▁", *dict.fromkeys("".join(merge) for merge in merges)]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    dropout, draws, number = BPEDropout(tokenizer, rate), random.Random(0), 20_000
    ids = tokenizer("ababca")["input_ids"]
    found = Counter(tuple(tokenizer.convert_ids_to_tokens(dropout(ids, draws))) for _ in range(number))
    expected = probabilities(tuple("ababca"), merges, rate)
    assert sum(expected.values()) == pytest.approx(1)
    assert set(found) <= set(expected)
    for outcome, chance in expected.items():
        assert abs(found[outcome] / number - chance) < 5 * (chance * (1 - chance) / number) ** 0.5 + 1e-9


def test_a_batch_is_cut_by_its_seed_and_epoch(tokenizer):
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    rows = [{"input_ids": one, "labels": other} for one, other in zip(ids, reversed(ids), strict=True)]

    def batch(seed=1, epoch=0, rate=0.3, max_length=100):
        cut = BPEDropout(tokenizer, rate)
        collator = SubwordCollator(tokenizer, 0, 1, cut=cut, seed=seed, max_length=max_length)
        collator.set_epoch(epoch)
        made = collator(rows)
        return {name: made[name].tolist() for name in made}

    assert batch() == batch()
    assert batch() != batch(epoch=1)
    assert batch() != batch(seed=2)
    assert batch()["input_ids"] != batch(rate=0)["input_ids"]
    assert batch()["labels"] != batch(rate=0)["labels"]
    assert batch(max_length=1, rate=1) == batch(rate=0)  # new pieces are not used if they exceed max_length


def test_refuses_a_tokenizer_without_merges():
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    with pytest.raises(UserError, match="has no merges to leave out; accepted: BPE tokenizers"):
        BPEDropout(PreTrainedTokenizerFast(tokenizer_object=unigram), 0.1)
    with pytest.raises(UserError, match=r"tokenizer\.bpe_dropout is 2"):
        TokenizerArguments(bpe_dropout=2)


def test_pieces_that_mark_no_word_are_refused(tmp_path):
    """Without such marks a sentence would be one word, and pieces would merge across spaces."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=60, special_tokens=["<pad>", "<unk>"]))
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    with pytest.raises(UserError, match=r"tokenizer\.bpe_dropout: no piece of the tokenizer"):
        BPEDropout(plain, 0.1)
