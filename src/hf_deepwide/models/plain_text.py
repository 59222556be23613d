"""Encode text as text: no word of a text becomes a control token, and no text is too long to encode.

A tokenizer turns the words `</s>`, `<pad>`, `<2fr>` or `eng_Latn` in a sentence into the control tokens of these
names. Such a sentence would end early, or ask for another language. `TextEncoder` encodes the letters of these words
instead. Control tokens come from the caller, as ids.

The file travels to the Hub with a shared model: it imports torch, transformers and its neighbours alone.
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

MOST_CHARACTERS = 100_000  # of one text that is translated: encoding takes a tenth of a second
MOST_TOKENS = 10_000  # of one source, for a model and a tokenizer without a limit: attention is quadratic
LENGTH_STEP = 8
INVISIBLE = {"Zs", "Zl", "Zp", "Cc", "Cf"}  # spaces, controls, and signs such as a soft hyphen or a zero-width space
PROBE = "x"


class TextEncoder:
    """Encodes texts of one side as `prefix + text + suffix`, with the tokens that the tokenizer puts around a text.

    The tokenizer's languages must be set when the encoder is made.

    Args:
        tokenizer: any tokenizer of Transformers, fast or slow.
        target: encode targets instead of sources.
        never: what `control_ids` gives for the sources, where it is known already.
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
        """Token ids of each text, in full."""
        return [self.frame(body) for body in self.bodies(texts)]

    def bodies(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without the tokens around it."""
        bodies = self._encode(list(texts), frame=False) if texts else []
        return [body if self.never.isdisjoint(body) else self._spelt(body) for body in bodies]

    def frame(self, body: list[int], tag_id: int | None = None, longest: float = math.inf) -> list[int]:
        """A text's ids with the tokens around it, and with a tag before it; of the text only what `longest` allows."""
        before = [*self.prefix, *([] if tag_id is None else [tag_id])]
        room = max(longest - len(before) - len(self.suffix), 0)
        if len(body) > room:
            left = self.tokenizer.truncation_side == "left"
            body = body[len(body) - int(room) :] if left else body[: int(room)]
        return [*before, *body, *self.suffix]

    def _encode(self, texts: list[str], frame: bool) -> list[list[int]]:
        options = {"add_special_tokens": frame, "split_special_tokens": self.splits, "verbose": False}
        with _backend_as_it_was(self.tokenizer):
            if self.is_plain and not frame:  # what comes around a text is all that the two sides differ in
                backend = self.tokenizer.backend_tokenizer
                backend.no_truncation()
                backend.no_padding()
                backend.encode_special_tokens = self.splits
                # Nobody reads the offsets and masks that the tokenizer would make of each text.
                return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
            return self.tokenizer(**{self.side: texts}, return_attention_mask=False, **options)["input_ids"]

    def _spelt(self, body: list[int]) -> list[int]:
        """Letters in place of control tokens, which some vocabularies (Unigram, SentencePiece) find in a text."""
        spelt: list[int] = []
        vocabulary = self.tokenizer.get_vocab() if self.vocabulary is None else self.vocabulary
        names = {token_id: token for token, token_id in vocabulary.items() if token_id in self.never}
        unknown = vocabulary.get(str(self.tokenizer.unk_token))
        for token_id in body:
            if token_id in self.never:
                # M2M100's codes need not be in its vocabulary, and Marian names ids of its target vocabulary alone
                name = names.get(token_id) or self.tokenizer.convert_ids_to_tokens(token_id)
                letters = [vocabulary.get(letter, unknown) for letter in name]
                spelt += [letter for letter in letters if letter is not None and letter not in self.never]
            else:
                spelt.append(token_id)
        return spelt


@contextmanager
def _backend_as_it_was(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Undo what `split_special_tokens` leaves behind in a fast tokenizer's backend."""
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
    length: int  # tokens before it was cut
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
    """Most tokens of a source or a translation that a model has positions for; None without a limit."""
    return getattr(config, "max_position_embeddings", None)


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen."""
    return all(unicodedata.category(character) in INVISIBLE for character in text)


def length_limit(config: Any, source_length: int, search: Any) -> int:
    """Most tokens that a translation may have.

    Args:
        config: of the model; None: positions are no limit.
        source_length: tokens of the source; rounded up to a multiple of 8, so that many sentences share a limit.
        search: has `max_length_factor`, so many tokens for each of the source, and `max_length_offset`, so many more.
    """
    rounded = math.ceil(source_length / LENGTH_STEP) * LENGTH_STEP
    limit = math.ceil(search.max_length_factor * rounded) + search.max_length_offset
    return min(limit, positions(config) or limit)


def source_limit(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Most tokens of a source: what the model takes, or the tokenizer's own limit if it is less."""
    return int(min(positions(config) or math.inf, tokenizer.model_max_length, MOST_TOKENS))


def check_text(text: Any, place: str, accepted: str) -> str:
    """A string as it is.

    Raises:
        ValueError: it is no string, or holds half a character; the message begins with `place`.
    """
    if not isinstance(text, str):
        raise ValueError(f"cannot translate {place}{describe(text)}; {accepted}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"cannot translate {place}half a surrogate pair is no character: {describe(text)}") from error
    return text


def describe(value: Any) -> str:
    """Type and beginning of a value, on one line, for messages."""
    return f"{type(value).__name__} {quote(value)}"


def sorted_batches(
    lengths: Sequence[int], max_tokens: int, max_texts: int | None = None, limits: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """Yield lists of indices of texts, the longest texts first: memory runs out at once or never.

    Args:
        lengths: tokens of each text.
        max_tokens: most tokens of a batch, padding included. A longer text is a batch of its own.
        max_texts: most texts of a batch; None is any number.
        limits: a number for each text; the texts of a batch have one number in common.
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
    """Tokens `[R, 1 + T]` of `generate`, the start first, with padding alone behind the first end of each row.

    Beam search of Transformers fills rows up with an end where padding has the id 0.
    """
    if ends is None:
        return ids
    is_end = torch.isin(ids, torch.as_tensor(ends, device=ids.device))
    is_end[:, 0] = False
    return ids.masked_fill(is_end.cumsum(1) > is_end.int(), pad)
