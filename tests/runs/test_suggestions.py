"""Settings that follow from the size of a corpus, such as a long enough training with a short warm-up."""

import pytest

from hf_deepwide.runs.suggestions import CorpusSize, measure, suggest_settings

SIZES = (100, 3_000, 30_000, 1_000_000)


@pytest.mark.parametrize("length", [6, 16, 60])
@pytest.mark.parametrize("pairs", SIZES)
def test_training_is_long_enough_for_its_warmup(pairs, length):
    suggested = suggest_settings(CorpusSize(pairs, length))
    updates = suggested.num_train_epochs * pairs * length / suggested.max_tokens  # for full batches
    assert 1 <= suggested.warmup_steps <= updates / 5
    assert suggested.num_train_epochs <= 40
    assert updates >= (1_900 if pairs * length >= 40_000 else 45), "a model that starts from nothing needs many"
    assert suggested.max_tokens >= 2 * length, "several sentences in a batch"


@pytest.mark.parametrize("pairs", SIZES)
def test_vocabulary_is_small_enough(pairs):
    """Each subword is seen ten times on average, if each side of a pair has about five subwords."""
    suggested = suggest_settings(CorpusSize(pairs, alphabet=0))
    assert suggested.vocab_size <= min(pairs + 100, 32_000)


def test_settings_grow_with_the_corpus():
    small, *larger = [suggest_settings(CorpusSize(pairs)) for pairs in SIZES]
    for suggested in larger:
        assert suggested.vocab_size > small.vocab_size
        assert suggested.max_tokens >= small.max_tokens
        assert suggested.updates > small.updates
        assert suggested.num_train_epochs <= small.num_train_epochs
        small = suggested


def test_a_batch_that_must_be_larger_makes_epochs_longer():
    """The number of updates stays the same, if the limits on the epochs allow it."""
    size = CorpusSize(pairs=30_000, length=16, alphabet=60)
    free, bound = suggest_settings(size), suggest_settings(size, least_tokens=2 * suggest_settings(size).max_tokens)
    assert bound.max_tokens == 2 * free.max_tokens
    assert bound.num_train_epochs > free.num_train_epochs
    assert bound.updates == pytest.approx(free.updates, rel=0.1)


def test_every_character_has_room_in_the_vocabulary():
    assert suggest_settings(CorpusSize(1_000, alphabet=4_000)).vocab_size > 4_004


def test_small_corpora_come_with_an_expectation():
    expectations = [suggest_settings(CorpusSize(pairs)).expectation for pairs in SIZES]
    assert len({*expectations[:3]}) == 3
    assert all(expectations[:3])
    assert expectations[3] is None


def test_measure_looks_at_the_longer_side():
    size = measure(["abc", "ab"], ["abcdef", "x"])
    assert (size.pairs, size.alphabet) == (2, 7)
    assert size.length == (6 + 2) / 2 / 3 + 1
