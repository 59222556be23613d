"""Fixtures that tests of exported models share."""

import pytest

TEXTS = ["two dogs run", "a man in a red coat", "who is there", "the dogs sit in the red water", "a tree"]


@pytest.fixture(scope="module")
def tokenizer():
    """A small tokenizer, trained on five texts."""
    from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer

    return train_tokenizer(TEXTS * 3, TokenizerArguments(vocab_size=36))
