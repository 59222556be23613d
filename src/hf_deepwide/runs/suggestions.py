"""Suggested settings for a user's own corpus: length of the training, size of a batch, and pieces of words."""

from collections.abc import Sequence
from dataclasses import dataclass

UPDATES = 2_000  # after so many updates, a small model has learnt most of what a small corpus teaches
EPOCHS = (3, 40)  # a large corpus is worth more than one epoch; after 40, a model has memorised a small corpus
TOKENS = (512, 4096)  # in a batch: small ones make many updates of few sentences, large ones keep a processor busy
BATCHES = 100  # in an epoch, if the limits of a batch allow it
WARMUP_SHARE, WARMUP = 10, 4_000  # a tenth of the training, and at most the papers' value for millions of pairs
PIECES = 32_000  # the papers' vocabularies for millions of pairs
CHARACTERS = 3  # in a piece of a word, with a small vocabulary

# Number of pairs, and what to expect with fewer pairs from a model that is trained from scratch.
EXPECTATIONS = (
    (1_000, "enough to try the tools out; the model will learn a few words, and no translation will be of use"),
    (
        10_000,
        "enough for frequent words and short phrases; most sentences will come out wrong, and BLEU will be low unless "
        "they are much alike. Expect usable translations from some 30,000 pairs of one domain on",
    ),
    (
        100_000,
        "enough for sentences like those in the corpus, if it is of one domain; names and rare words will come out "
        "wrong",
    ),
)
ADVICE = "Fine-tuning a model that is trained already (model.init_from) needs far less text"


@dataclass(frozen=True)
class CorpusSize:
    """The properties of a corpus that decide the settings.

    Args:
        pairs: sentence pairs to train on.
        length: approximate mean number of tokens in the longer side of a pair.
        alphabet: different characters. Each needs an entry in the vocabulary.
    """

    pairs: int
    length: float = 16
    alphabet: int = 100


@dataclass(frozen=True)
class Suggestion:
    """Settings of the sections `tokenizer` and `training`, the approximate number of updates, and what to expect."""

    vocab_size: int
    max_tokens: int
    num_train_epochs: int
    warmup_steps: int
    updates: int
    expectation: str | None


def measure(sources: Sequence[str], targets: Sequence[str]) -> CorpusSize:
    """Estimate the size of a corpus that is not cut into tokens yet."""
    longer = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    alphabet = set().union(*sources, *targets)
    return CorpusSize(len(longer), sum(longer) / max(1, len(longer)) / CHARACTERS + 1, len(alphabet))


def suggest_settings(size: CorpusSize, least_tokens: int = 0) -> Suggestion:
    """Suggest settings of a small model for a corpus of this size. A batch holds at least `least_tokens` tokens.

    - The vocabulary grows with the square root of the number of pairs, as the number of frequent words does. It has
      1,100 pieces of words for 3,000 pairs, 20,000 for a million, and also an entry for each character.
    - A batch holds about a hundredth of the corpus, within limits. A small corpus in large batches would make few
      updates, and a model learns by updates.
    - The number of epochs follows from the wanted number of updates. One epoch too many does no harm: the checkpoint
      with the best validation loss is kept.
    - The learning rate rises for a tenth of the training, at most 4,000 updates. A short training would end before a
      longer warm-up does.
    """
    tokens = size.pairs * size.length
    max_tokens = max(least_tokens, 8 * round(_within(tokens / BATCHES, TOKENS) / 8))
    steps = max(1, -(-round(tokens) // max_tokens))  # an epoch
    epochs = round(_within(UPDATES / steps, EPOCHS))
    updates = steps * epochs
    return Suggestion(
        vocab_size=size.alphabet + min(PIECES, max(100, round(20 * size.pairs**0.5))),
        max_tokens=max_tokens,
        num_train_epochs=epochs,
        warmup_steps=max(1, min(WARMUP, updates // WARMUP_SHARE)),
        updates=updates,
        expectation=next((f"{text}. {ADVICE}" for limit, text in EXPECTATIONS if size.pairs < limit), None),
    )


def _within(value: float, limits: tuple[int, int]) -> float:
    return min(max(value, limits[0]), limits[1])
