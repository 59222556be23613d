"""From text to token ids: encode each pair, mark its languages, and keep it or leave it out by its length.

The names of special tokens in a text (`</s>`) are encoded like any other text.
"""

import logging
import math
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..models.language_pairs import Choice, Languages, added_codes, language_ids, speaking, targets_of_pairs
from ..models.plain_text import TextEncoder, positions
from ..progress import bars_where_shown
from .arguments import DataArguments
from .batches import round_up
from .encoded_cache import kept_or_made
from .languages import synthetic_tag_id, translation_pairs

logger = logging.getLogger(__name__)

ENCODED = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "source_length": Value("int32"),
        "target_length": Value("int32"),
    }
)


def encode(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    args: DataArguments,
    filter: bool,
    languages: Languages | None = None,
) -> Dataset | IterableDataset:
    """Turn `source` and `target` into `input_ids` and `labels`, which end with `</s>`, and their lengths.

    `PairEncoder` describes the other columns. `filter` (for training) leaves out pairs that exceed `args.max_length`
    or `args.max_length_ratio`, and the log counts them by reason. Without `filter` all pairs stay, and the log warns
    of long pairs. `languages` describes the languages of the model. With it, the sources of a single language pair
    begin with the same tag or words that translation with this model will put there.

    Raises:
        UserError: no pair is left, or none of one kind (see `check_shares`), or the model does not support the
            languages.
    """
    mixed = isinstance(dataset, Dataset) and "synthetic" in dataset.column_names
    encoder, keep = PairEncoder(tokenizer, args, mixed, languages), LengthFilter(args)
    if isinstance(dataset, IterableDataset):
        stream = dataset.map(encoder, batched=True, remove_columns=["source", "target"], features=encoder.features)
        return stream.filter(keep, with_indices=True) if filter else stream

    def encode_all() -> Dataset:
        with bars_where_shown():
            return dataset.map(
                encoder, batched=True, remove_columns=dataset.column_names, features=encoder.features, desc="encode"
            )

    encoded = kept_or_made(dataset, tokenizer, encoder.settings, encode_all)
    columns = encoded.with_format("numpy")
    source, target = columns["source_length"][:], columns["target_length"][:]
    if not filter:
        long = np.count_nonzero(np.maximum(source, target) > args.max_length)
        if long:
            logger.warning("%d pairs are longer than max_length %d; they are kept", long, args.max_length)
        return encoded
    kept = np.flatnonzero(keep.accepts(source, target))
    keep.log()
    if not len(kept):
        raise UserError(
            f"none of the {len(encoded)} training pairs passes the length filters: {keep}; raise data.max_length or "
            "data.max_length_ratio"
        )
    if args.pairs is not None and len(args.pairs) > 1:
        check_shares(encoded["pair"][:], kept, args.pairs)
    elif mixed:
        check_shares(encoded["synthetic"][:], kept, ["data.train", "data.synthetic"])
    return encoded if len(kept) == len(encoded) else encoded.select(kept)


def check_shares(kinds: list[int], kept: np.ndarray, names: list[str]) -> None:
    """Log for each kind how many sentence pairs the length filters kept, and check that each kind has some.

    Args:
        kinds: the kind of each sentence pair as an index into `names`: its language pair, or real and synthetic.
        kept: the indices of the sentence pairs that stay.
        names: the names of the kinds.

    Raises:
        UserError: a kind has no sentence pair left.
    """
    before = np.bincount(kinds, minlength=len(names))
    after = np.bincount(np.asarray(kinds)[kept], minlength=len(names))
    for name, found, stays in zip(names, before, after, strict=True):
        logger.info("length filters, %s: %d pairs kept, %d left out", name, stays, found - stays)
        if not stays:
            raise UserError(
                f"{name}: none of its {found} training pairs passes the length filters; raise data.max_length or "
                f"data.max_length_ratio, or leave {name} out"
            )


class PairEncoder:
    """Encode rows with `source` and `target` and, with several language pairs, `pair`.

    A tokenizer with its own language codes marks each side with the code of its language. With any other tokenizer,
    the sources of several language pairs begin with a tag, if `args` puts tags before sources. The columns `pair` and,
    if the model needs them, `decoder_start` (a token id) and `posterior` (an index) are added. With `mixed`, synthetic
    sources begin with the tag of synthetic pairs, and the column `synthetic` stays. With a single language pair,
    sources of Marian begin with the tag of the target language. Sources of T5 begin with the words for the pair.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        args: DataArguments,
        mixed: bool = False,
        languages: Languages | None = None,
    ) -> None:
        self.tokenizer, self.mixed = tokenizer, mixed
        self.mark = None if languages is None or args.pairs is not None else source_mark(languages, args)
        pairs: list[dict[str, Any]] = list(translation_pairs(args, tokenizer).values())
        self.languages: list[tuple[str | None, str | None]] = [(None, None)]  # the tokenizer has its languages already
        if args.pairs is not None and language_ids(tokenizer):
            pairs, self.languages = targets_of_pairs(tokenizer, args.language_pairs), [*args.language_pairs]
        elif args.source_lang in added_codes(tokenizer):  # a tokenizer cannot keep such a source language
            self.languages = [(args.source_lang, None)]
        vocabulary = tokenizer.get_vocab()
        self.tags = [vocabulary[pair["tag"]] if "tag" in pair else None for pair in pairs]
        self.kinds = [None, synthetic_tag_id(tokenizer, args)] if mixed else []
        self.columns = {"pair": list(range(len(pairs)))} if pairs else {}  # the values of each pair
        for column, key in (("decoder_start", "decoder_start_token_id"), ("posterior", "posterior")):
            if any(key in pair for pair in pairs):
                self.columns[column] = [pair[key] for pair in pairs]
        self.encoders = []
        for both in self.languages:
            with speaking(tokenizer, *both):
                source = TextEncoder(tokenizer)
                self.encoders.append((source, TextEncoder(tokenizer, target=True, never=source.never)))

    @property
    def features(self) -> Features:
        """The columns that a call returns."""
        more = [*self.columns, *(["synthetic"] if self.mixed else [])]
        return Features({**ENCODED, **dict.fromkeys(more, Value("int32"))})

    @property
    def settings(self) -> dict[str, Any]:
        """All settings on which the ids depend, besides the tokenizer and the text."""
        first, *others = self.encoders
        sides = {
            name: [side.prefix, side.suffix, sorted(side.never)]
            for name, side in zip(("source", "target"), first, strict=True)
        }
        frames = [[side.prefix, side.suffix] for sides in others for side in sides]
        return {
            **sides,
            **({"frames": frames} if frames else {}),
            "tags": self.tags,
            "columns": self.columns,
            **({"kinds": self.kinds} if self.mixed else {}),
            **({"mark": [self.mark.choice.tag_id, self.mark.choice.prefix]} if self.mark is not None else {}),
        }

    def __call__(self, rows: dict[str, list]) -> dict[str, list]:
        """Encode a batch of rows."""
        pairs = rows["pair"] if self.columns else [0] * len(rows["source"])
        if self.mixed:
            tags = [self.kinds[kind] for kind in rows["synthetic"]]
        else:
            tags = [self.tags[pair] for pair in pairs] if self.tags else [None] * len(pairs)
        encoders = [self.encoders[pair] for pair in pairs] if len(self.encoders) > 1 else self.encoders * len(pairs)
        sources, targets = self.encoders[0]  # bodies of texts do not depend on the language
        texts = rows["source"]
        if self.mark is not None:
            languages, choice = self.mark
            found, texts = zip(*(languages.tag_and_text(choice, text) for text in texts), strict=True)
            tags = [tag if mark is None else mark for tag, mark in zip(tags, found, strict=True)]  # at most one is set
            texts = [choice.prefix + text for text in texts]
        with speaking(self.tokenizer, *self.languages[0]):
            bodies = sources.bodies(texts), targets.bodies(rows["target"])
        source = [side.frame(body, tag) for (side, _), body, tag in zip(encoders, bodies[0], tags, strict=True)]
        target = [side.frame(body) for (_, side), body in zip(encoders, bodies[1], strict=True)]
        return {
            "input_ids": source,
            "labels": target,
            "source_length": [len(ids) for ids in source],
            "target_length": [len(ids) for ids in target],
            **{column: [values[pair] for pair in pairs] for column, values in self.columns.items()},
            **({"synthetic": rows["synthetic"]} if self.mixed else {}),
        }


class SourceMark(NamedTuple):
    """The tag or words before each source of a single language pair, and `languages`, to find tags in texts."""

    languages: Languages
    choice: Choice


def source_mark(languages: Languages, args: DataArguments) -> SourceMark | None:
    """Return the tag or words that translation puts before sources of the run's language pair; None: nothing.

    Raises:
        UserError: the model does not support the languages, or synthetic pairs would need two tags.
    """
    if not (languages.tags or languages.tasks):
        return None
    try:
        choice = languages.choose(args.source_lang, args.target_lang)
    except ValueError as error:
        raise UserError(f"data.source_lang, data.target_lang: {error}") from error
    if args.synthetic_tag is not None and languages.tags:
        raise UserError(
            "data.synthetic_tag: the sources of this model begin with the tag of their target language, and no second "
            "tag can stand there; leave data.synthetic_tag out"
        )
    return SourceMark(languages, choice)


class LengthFilter:
    """Accept pairs by their lengths in tokens (`</s>` included), and count the refused pairs by reason."""

    def __init__(self, args: DataArguments) -> None:
        self.max_length = args.max_length
        self.max_length_ratio = args.max_length_ratio
        self.kept = 0
        self.too_long = 0
        self.ratio = 0

    def __str__(self) -> str:
        left_out = f"{self.too_long} longer than max_length {self.max_length}"
        if self.max_length_ratio is not None:
            left_out += f" and {self.ratio} beyond max_length_ratio {self.max_length_ratio}"
        return f"{self.kept} pairs kept, {left_out} left out"

    def accepts(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return whether pairs of these lengths stay, one bool for each pair; kept and refused pairs are counted."""
        longer, shorter = np.maximum(source, target), np.minimum(source, target)
        ratio = math.inf if self.max_length_ratio is None else self.max_length_ratio
        fits, even = longer <= self.max_length, longer <= ratio * shorter
        self.too_long += np.count_nonzero(~fits)
        self.ratio += np.count_nonzero(fits & ~even)
        self.kept += np.count_nonzero(fits & even)
        return fits & even

    def __call__(self, row: dict, index: int) -> bool:
        """Apply `accepts` in `IterableDataset.filter`. Each pass has its own counts, logged during the pass."""
        if index == 0:
            self.kept = self.too_long = self.ratio = 0
        stays = bool(self.accepts(np.asarray(row["source_length"]), np.asarray(row["target_length"])))
        refused = self.too_long + self.ratio
        if not stays and refused & (refused - 1) == 0:  # 1, 2, 4, 8, …
            self.log()
        return stays

    def log(self) -> None:
        """Log how many pairs were kept and left out."""
        logger.info("length filters: %s", self)


def check_lengths(
    encoded: Dataset | IterableDataset, split: str, config: Any, args: Any, pad_to_multiple_of: int = 1
) -> None:
    """Check that a model has positions for the longest sentence with its padding.

    For a stream, this is the longest sentence that `args` allows.

    Raises:
        UserError: the model has fewer positions.
    """
    most = positions(config)
    if most is None:
        return
    longest = args.max_length
    if isinstance(encoded, Dataset):
        longest = max(max(encoded["source_length"][:]), max(encoded["target_length"][:]))
    width = round_up(longest, pad_to_multiple_of)
    if width > most:
        padded = f", {width} when padded to training.pad_to_multiple_of {pad_to_multiple_of}" * (width > longest)
        lower = "lower data.max_length" if split == "train" else f"split the long sentences of the {split} set"
        if longest <= most:
            lower += ", or set training.pad_to_multiple_of: 1"
        raise UserError(
            f"a {split} sentence can have {longest} tokens{padded}, and the model takes {most}: raise "
            f"model.max_position_embeddings, or {lower}"
        )
