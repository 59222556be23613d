"""Encode text as plain text: no word of a text becomes a control token, and no text is too long to encode.

A tokenizer turns the words `</s>`, `<pad>`, `<2fr>` or `eng_Latn` in a sentence into the control tokens with these
names. Such a sentence would end early, or request another language. `TextEncoder` encodes the letters of these words
instead. Control tokens come from the caller, as ids.

This file is uploaded to the Hub with a shared model. So it imports only torch, transformers and the modules beside it.
"""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .language_pairs import Choice, Languages, control_ids, speaking, target_vocabulary
from .quoting import quote

MOST_CHARACTERS = 100_000  # of one text to translate; encoding it takes a tenth of a second
MOST_TOKENS = 10_000  # of one source, also if model and tokenizer allow more: attention is quadratic
LENGTH_STEP = 8
INVISIBLE = {"Zs", "Zl", "Zp", "Cc", "Cf"}  # spaces, controls, and signs such as a soft hyphen or a zero-width space
PROBE = "x"


class TextEncoder:
    """An encoder of sources or of targets as `prefix + text + suffix`.

    Prefix and suffix are the tokens that the tokenizer puts around a text. The tokenizer's languages must be set
    before the encoder is made.

    Args:
        tokenizer: any tokenizer of Transformers, fast or slow.
        target: encode targets instead of sources.
        never: the result of `control_ids` for sources, if it is known already.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, target: bool = False, never: set[int] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.side = "text_target" if target else "text"
        self.vocabulary = target_vocabulary(tokenizer) if target else None
        known = never is not None and self.vocabulary is None
        self.never = never if known else control_ids(tokenizer, target)
        # A slow tokenizer that splits special tokens splits the words that a user has added, too.
        self.splits = tokenizer.is_fast or all(token.special for token in tokenizer.added_tokens_decoder.values())
        self.is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
            getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
            for name in ("__call__", "_encode_plus")
        )
        (whole,), (body,) = self._encode([PROBE], frame=True), self._encode([PROBE], frame=False)
        start = next((i for i in range(len(whole) + 1) if whole[i : i + len(body)] == body), None)
        if start is None:
            raise ValueError(f"the {type(tokenizer).__name__} encodes a text otherwise without its special tokens")
        self.prefix, self.suffix = whole[:start], whole[start + len(body) :]

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, with prefix and suffix."""
        return [self.frame(body) for body in self.bodies(texts)]

    def bodies(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without prefix and suffix."""
        bodies = self._encode(list(texts), frame=False) if texts else []
        return [body if self.never.isdisjoint(body) else self._spelt(body) for body in bodies]

    def frame(self, body: list[int], tag_id: int | None = None, longest: float = math.inf) -> list[int]:
        """Put prefix, tag and suffix around a text's ids. The text is cut, so that there are at most `longest` ids."""
        before = [*self.prefix, *([] if tag_id is None else [tag_id])]
        room = max(longest - len(before) - len(self.suffix), 0)
        if len(body) > room:
            left = self.tokenizer.truncation_side == "left"
            body = body[len(body) - int(room) :] if left else body[: int(room)]
        return [*before, *body, *self.suffix]

    def _encode(self, texts: list[str], frame: bool) -> list[list[int]]:
        options = {"add_special_tokens": frame, "split_special_tokens": self.splits, "verbose": False}
        with _backend_as_it_was(self.tokenizer):
            if self.is_plain and not frame:  # the two sides differ only in the tokens around a text
                backend = self.tokenizer.backend_tokenizer
                backend.no_truncation()
                backend.no_padding()
                backend.encode_special_tokens = self.splits
                # This skips the offsets and masks of each text, which are not needed here.
                return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
            return self.tokenizer(**{self.side: texts}, return_attention_mask=False, **options)["input_ids"]

    def _spelt(self, body: list[int]) -> list[int]:
        """Replace the control tokens that some vocabularies (Unigram, SentencePiece) find in a text by letters."""
        spelt: list[int] = []
        vocabulary = self.tokenizer.get_vocab() if self.vocabulary is None else self.vocabulary
        names = {token_id: token for token, token_id in vocabulary.items() if token_id in self.never}
        unknown = vocabulary.get(str(self.tokenizer.unk_token))
        for token_id in body:
            if token_id in self.never:
                # M2M100's vocabulary may lack its codes; Marian's method converts only ids of the target vocabulary
                name = names.get(token_id) or self.tokenizer.convert_ids_to_tokens(token_id)
                letters = [vocabulary.get(letter, unknown) for letter in name]
                spelt += [letter for letter in letters if letter is not None and letter not in self.never]
            else:
                spelt.append(token_id)
        return spelt


@contextmanager
def _backend_as_it_was(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Restore the setting of a fast tokenizer's backend that `split_special_tokens` changes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    before = getattr(backend, "encode_special_tokens", None)
    try:
        yield
    finally:
        if before is not None:
            backend.encode_special_tokens = before


class Source(NamedTuple):
    """A source as the model reads it."""

    ids: list[int]
    length: int  # tokens before the source was cut
    is_empty: bool


def encode_sources(languages: Languages, choice: Choice, texts: Sequence[str], longest: int) -> list[Source]:
    """Encode sources for a language pair, each cut to `longest` tokens.

    A text of more than `MOST_CHARACTERS` is cut before it is encoded, and counts as longer than `longest`.
    """
    with speaking(languages.tokenizer, choice.source_lang, choice.target_lang):
        encoder = TextEncoder(languages.tokenizer, never=languages.control_ids)
    tagged = [languages.tag_and_text(choice, text[:MOST_CHARACTERS]) for text in texts]
    bodies = encoder.bodies([choice.prefix + text for _, text in tagged])
    sources = []
    for whole, (tag_id, text), body in zip(texts, tagged, bodies, strict=True):
        length = len(encoder.frame(body, tag_id))
        if len(whole) > MOST_CHARACTERS:
            length = max(length, longest + 1)
        sources.append(Source(encoder.frame(body, tag_id, longest), length, not body or is_blank(text)))
    return sources


def positions(config: Any) -> int | None:
    """Return the number of a model's positions, the limit of a source or a translation; None without a limit."""
    return getattr(config, "max_position_embeddings", None)


def is_blank(text: str) -> bool:
    """Return whether a text has only invisible characters."""
    return all(unicodedata.category(character) in INVISIBLE for character in text)


def length_limit(config: Any, source_length: int, search: Any) -> int:
    """Return the most tokens that a translation may have.

    Args:
        config: the model's config; None: positions are no limit.
        source_length: tokens of the source; rounded up to a multiple of 8, so that many sentences share a limit.
        search: an object with `max_length_factor`, the tokens per source token, and `max_length_offset`, which is
            added.
    """
    rounded = math.ceil(source_length / LENGTH_STEP) * LENGTH_STEP
    limit = math.ceil(search.max_length_factor * rounded) + search.max_length_offset
    return min(limit, positions(config) or limit)


def source_limit(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens of a source: the least of the model's and the tokenizer's limits and `MOST_TOKENS`."""
    return int(min(positions(config) or math.inf, tokenizer.model_max_length, MOST_TOKENS))


def check_text(text: Any, place: str, accepted: str) -> str:
    """Return a string unchanged.

    Raises:
        ValueError: `text` is not a string, or contains half a surrogate pair; the message contains `place`.
    """
    if not isinstance(text, str):
        raise ValueError(f"cannot translate {place}{describe(text)}; {accepted}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"cannot translate {place}half a surrogate pair is no character: {describe(text)}") from error
    return text


def describe(value: Any) -> str:
    """Return the type and the beginning of a value, on one line, for messages."""
    return f"{type(value).__name__} {quote(value)}"


def sorted_batches(
    lengths: Sequence[int], max_tokens: int, max_texts: int | None = None, limits: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """Yield batches of text indices, the longest texts first: memory runs out in the first batch or never.

    Args:
        lengths: tokens of each text.
        max_tokens: most tokens of a batch, padding included. A longer text is a batch of its own.
        max_texts: most texts of a batch; None: any number.
        limits: a number for each text; all texts of a batch have the same number.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        is_full = (len(batch) + 1) * lengths[batch[0] if batch else i] > max_tokens or len(batch) == max_texts
        if batch and (is_full or (limits is not None and limits[i] != limits[batch[0]])):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def padded_behind_end(ids: torch.Tensor, ends: int | Sequence[int] | None, pad: int) -> torch.Tensor:
    """Replace all tokens after the first end token of each row by padding.

    The rows `[R, 1 + T]` come from `generate`, and begin with the start token. If the padding id is 0, Transformers'
    beam search fills rows up with end tokens instead of padding.
    """
    if ends is None:
        return ids
    is_end = torch.isin(ids, torch.as_tensor(ends, device=ids.device))
    is_end[:, 0] = False
    return ids.masked_fill(is_end.cumsum(1) > is_end.int(), pad)
