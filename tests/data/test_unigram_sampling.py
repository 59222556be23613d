"""Subword regularisation, against the probabilities of all segmentations, written out naively."""

import math
import random
from collections import Counter

import pytest
from coded_languages import KINDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_deepwide.data.subword_collator import SubwordCollator
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.data.unigram_sampling import UnigramSampling
from hf_deepwide.errors import UserError

TEXTS = ["the lowest new water is wider than the lower one", "newer rivers, 40 of them, widen", "Ob er enters?"]
PIECES = {"▁": -1.2, "▁a": -1.7, "a": -1.1, "b": -2.3, "ab": -1.9, "ba": -2.5, "aba": -4.0, "▁ab": -3.1, "bab": -5.0}


def fast(backend):
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    return fast(backend)


def segmentations(text, pieces):
    """All ways to write a text as pieces."""
    if not text:
        return [[]]
    return [
        [piece, *rest]
        for piece in pieces
        if text.startswith(piece)
        for rest in segmentations(text[len(piece) :], pieces)
    ]


@pytest.mark.parametrize("alpha", [0.1, 0.7, 1.0])
def test_segmentations_are_as_frequent_as_the_paper_says(alpha):
    """Section 3.2, with l = ∞: the probability of a segmentation, to the power of alpha and normalised."""
    vocabulary = [("<unk>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), *PIECES.items()]
    tokenizer = fast(Tokenizer(models.Unigram(vocabulary, unk_id=0)))
    weights = {}
    for pieces in segmentations("▁ababa", PIECES):
        weights[tuple(pieces)] = math.prod(math.exp(PIECES[piece]) ** alpha for piece in pieces)
    total = sum(weights.values())
    sampling, draws, number = UnigramSampling(tokenizer, alpha), random.Random(0), 20_000
    ids = tokenizer("ababa")["input_ids"]
    found = Counter(tuple(tokenizer.convert_ids_to_tokens(sampling(ids, draws))) for _ in range(number))
    assert set(found) <= set(weights)
    assert len(weights) > 20
    for pieces, weight in weights.items():
        chance = weight / total
        assert abs(found[pieces] / number - chance) < 5 * (chance * (1 - chance) / number) ** 0.5 + 1e-9


def test_other_pieces_of_the_same_words(tokenizer):
    draws, sampling = random.Random(1), UnigramSampling(tokenizer, 0.2)
    for text in TEXTS:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        found = [sampling(ids, draws) for _ in range(20)]
        assert len(set(map(tuple, found))) > 1
        assert {tokenizer.decode(pieces) for pieces in found} == {tokenizer.decode(ids)}
        assert all(pieces[-1] == tokenizer.eos_token_id for pieces in found)


def test_codes_and_unknown_letters_stay(tmp_path):
    tokenizer = KINDS["mbart50"][0](tmp_path)
    tokenizer.src_lang = "de_DE"
    ids = tokenizer("ab xcd dd")["input_ids"]
    cut = UnigramSampling(tokenizer, 0.1)(ids, random.Random(0))
    assert tokenizer.unk_token_id in ids
    assert (cut[0], cut[-1]) == (ids[0], ids[-1])
    assert Counter(cut)[tokenizer.unk_token_id] == Counter(ids)[tokenizer.unk_token_id]
    assert tokenizer.decode(cut) == tokenizer.decode(ids)


def test_a_batch_is_cut_by_its_seed_and_epoch(tokenizer):
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    rows = [{"input_ids": one, "labels": other} for one, other in zip(ids, reversed(ids), strict=True)]

    def batch(seed=1, epoch=0, max_length=100):
        cut = UnigramSampling(tokenizer, 0.2)  # a new object: texts seen before make no difference
        collator = SubwordCollator(tokenizer, 0, 1, cut=cut, seed=seed, max_length=max_length)
        collator.set_epoch(epoch)
        made = collator(rows)
        return {name: made[name].tolist() for name in made}

    assert batch() == batch()
    assert batch() != batch(epoch=1)
    assert batch() != batch(seed=2)
    assert batch(max_length=1)["input_ids"][0] == ids[0]


def test_tokenizers_and_values_that_do_not_fit_are_refused():
    bpe = train_tokenizer(TEXTS, TokenizerArguments(vocab_size=90, min_frequency=1))
    with pytest.raises(UserError, match="accepted: Unigram tokenizers"):
        UnigramSampling(bpe, 0.1)
    for fields, message in (
        ({"unigram_alpha": 0.1}, "a new tokenizer is a BPE"),
        ({"unigram_alpha": 0.1, "path": "x", "bpe_dropout": 0.1}, "are both set"),
        ({"unigram_alpha": 0, "path": "x"}, r"unigram_alpha is 0; accepted: more than 0"),
    ):
        with pytest.raises(UserError, match=message):
            TokenizerArguments(**fields)


def test_pieces_that_mark_no_word_are_refused():
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    with pytest.raises(UserError, match=r"tokenizer\.unigram_alpha: no piece of the tokenizer"):
        UnigramSampling(plain, 0.1)


def test_sentences_without_spaces_are_not_kept():
    """Each such sentence would keep kilobytes in the cache, and hardly ever occurs again."""
    vocabulary = [("<unk>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), *PIECES.items()]
    tokenizer = fast(Tokenizer(models.Unigram(vocabulary, unk_id=0)))
    sampling, draws = UnigramSampling(tokenizer, 1.0), random.Random(0)
    for text in ("ababa", "ab" * 30):
        pieces = sampling(tokenizer(text)["input_ids"], draws)
        assert "".join(tokenizer.convert_ids_to_tokens(pieces)) == f"▁{text}"
    assert list(sampling._lattices) == ["▁ababa"]
