"""Batches by tokens: encode pairs, put pairs of similar length together, pad.

Shape legend: [sentences, source] and [sentences, target], lengths in tokens with `</s>`.

Lengths are rounded up to a multiple: 8 where tensor cores want it, 1 or 2 on processors, where padding costs more than
it saves. `training.arguments` chooses. The number of sentences in a batch is rounded down to the same multiple.
"""

import heapq
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..models.language_pairs import added_codes, language_codes, speaking, targets_of_pairs
from ..models.plain_text import TextEncoder
from ..progress import bars_where_shown
from .arguments import DataArguments
from .encoded_cache import kept_or_made
from .languages import synthetic_tag_id, translation_pairs
from .sampling import Repeats

logger = logging.getLogger(__name__)

BatchBy = Literal["padded", "real"]
ENCODED = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "source_length": Value("int32"),
        "target_length": Value("int32"),
    }
)


def encode(
    dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments, filter: bool
) -> Dataset | IterableDataset:
    """Turn `source` and `target` into `input_ids` and `labels`, which end with `</s>`, and their lengths.

    Special tokens in a text (`</s>`) are text as any other.
    A tokenizer with language codes of its own marks each side with the codes of its pair. With several language pairs
    of any other, sources begin with their tags where `args` puts the tags there. The columns `pair` and, where they
    are used, `decoder_start` (a token id) and `posterior` (an index) are added. Sources of synthetic pairs begin with
    their tag, and the column `synthetic` stays.

    `filter` (for training) leaves out pairs that exceed `args.max_length` or `args.max_length_ratio`; the log counts
    them by reason. Without `filter` every pair stays, whatever its length; the log warns of long pairs.

    Raises:
        UserError: no pair is left.
    """

    settings: list[dict[str, Any]] = list(translation_pairs(args, tokenizer).values())
    languages: list[tuple[str | None, str | None]] = [(None, None)]  # those that the tokenizer was told already
    if args.pairs is not None and language_codes(tokenizer) is not None:
        settings, languages = targets_of_pairs(tokenizer, args.language_pairs), [*args.language_pairs]
    elif args.source_lang in added_codes(tokenizer):  # which it could not be told for good
        languages = [(args.source_lang, None)]
    of_pairs = {"pair": list(range(len(settings)))} if settings else {}  # column: what it is of each pair
    for column, key in (("decoder_start", "decoder_start_token_id"), ("posterior", "posterior")):
        if any(key in of_pair for of_pair in settings):
            of_pairs[column] = [of_pair[key] for of_pair in settings]
    mixed = isinstance(dataset, Dataset) and "synthetic" in dataset.column_names
    features = Features({**ENCODED, **dict.fromkeys([*of_pairs, *(["synthetic"] if mixed else [])], Value("int32"))})

    tags = [tokenizer.get_vocab()[of_pair["tag"]] if "tag" in of_pair else None for of_pair in settings]
    kinds = [None, synthetic_tag_id(tokenizer, args)] if mixed else []
    encoders = []
    for pair in languages:
        with speaking(tokenizer, *pair):
            source = TextEncoder(tokenizer)
            encoders.append((source, TextEncoder(tokenizer, target=True, never=source.never)))
    sources, targets = encoders[0]  # bodies are the same in all languages

    def tokenize(rows: dict) -> dict:
        pairs = rows["pair"] if settings else []
        tag_ids = [tags[pair] for pair in pairs] if settings else [None] * len(rows["source"])
        if mixed:
            tag_ids = [kinds[kind] for kind in rows["synthetic"]]
        of_rows = [encoders[pair] for pair in pairs] if len(encoders) > 1 else [encoders[0]] * len(rows["source"])
        with speaking(tokenizer, *languages[0]):
            bodies = sources.bodies(rows["source"]), targets.bodies(rows["target"])
        source = [encoders[0].frame(*of) for encoders, *of in zip(of_rows, bodies[0], tag_ids, strict=True)]
        target = [encoders[1].frame(body) for encoders, body in zip(of_rows, bodies[1], strict=True)]
        return {
            "input_ids": source,
            "labels": target,
            "source_length": [len(ids) for ids in source],
            "target_length": [len(ids) for ids in target],
            **{column: [values[pair] for pair in pairs] for column, values in of_pairs.items()},
            **({"synthetic": rows["synthetic"]} if mixed else {}),
        }

    keep = LengthFilter(args)
    if isinstance(dataset, IterableDataset):
        stream = dataset.map(tokenize, batched=True, remove_columns=["source", "target"], features=features)
        return stream.filter(keep, with_indices=True) if filter else stream

    def encode_all() -> Dataset:
        with bars_where_shown():
            return dataset.map(
                tokenize, batched=True, remove_columns=dataset.column_names, features=features, desc="encode"
            )

    sides = {
        name: [side.prefix, side.suffix, sorted(side.never), side.splits]
        for name, side in (("source", sources), ("target", targets))
    }
    frames = [[side.prefix, side.suffix] for both in encoders[1:] for side in both]
    settings_used = {
        **sides,
        **({"frames": frames} if frames else {}),
        "tags": tags,
        "columns": of_pairs,
        **({"kinds": kinds} if mixed else {}),
    }
    encoded = kept_or_made(dataset, tokenizer, settings_used, encode_all)
    lengths = list(zip(encoded["source_length"][:], encoded["target_length"][:], strict=True))
    if not filter:
        long = sum(max(pair) > args.max_length for pair in lengths)
        if long:
            logger.warning("%d pairs are longer than max_length %d; they are kept", long, args.max_length)
        return encoded
    kept = [row for row, (source, target) in enumerate(lengths) if keep.accepts(source, target)]
    keep.log()
    if not kept:
        raise UserError(f"none of the {len(encoded)} training pairs passes the length filters: {keep}")
    return encoded if len(kept) == len(encoded) else encoded.select(kept)


def check_lengths(
    encoded: Dataset | IterableDataset, split: str, config: Any, args: Any, pad_to_multiple_of: int = 1
) -> None:
    """See that a model takes the longest sentence with its padding; of a stream, the longest that `args` lets through.

    Raises:
        UserError: it has fewer positions.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return
    longest = args.max_length
    if isinstance(encoded, Dataset):
        longest = max(max(encoded["source_length"][:]), max(encoded["target_length"][:]))
    width = round_up(longest, pad_to_multiple_of)
    if width > positions:
        padded = f", {width} when padded to training.pad_to_multiple_of {pad_to_multiple_of}" * (width > longest)
        lower = "lower data.max_length" if split == "train" else f"split the long sentences of the {split} set"
        if longest <= positions:
            lower += ", or set training.pad_to_multiple_of: 1"
        raise UserError(
            f"a {split} sentence can have {longest} tokens{padded}, and the model takes {positions}: raise "
            f"model.max_position_embeddings, or {lower}"
        )


class LengthFilter:
    """Accepts pairs by their lengths in tokens (`</s>` included) and counts what it refuses, by reason."""

    def __init__(self, args: DataArguments) -> None:
        self.max_length = args.max_length
        self.max_length_ratio = args.max_length_ratio
        self.kept = 0
        self.too_long = 0
        self.ratio = 0

    def __str__(self) -> str:
        return (
            f"{self.kept} pairs kept, {self.too_long} longer than max_length {self.max_length} and "
            f"{self.ratio} beyond max_length_ratio {self.max_length_ratio} left out"
        )

    def accepts(self, source: int, target: int) -> bool:
        """True if a pair of these lengths stays; counts it either way."""
        if max(source, target) > self.max_length:
            self.too_long += 1
            return False
        if self.max_length_ratio is not None and max(source, target) > self.max_length_ratio * min(source, target):
            self.ratio += 1
            return False
        self.kept += 1
        return True

    def __call__(self, row: dict, index: int) -> bool:
        """`accepts` for `IterableDataset.filter`; counts each pass on its own, and logs as it goes."""
        if index == 0:
            self.kept = self.too_long = self.ratio = 0
        stays = self.accepts(row["source_length"], row["target_length"])
        refused = self.too_long + self.ratio
        if not stays and refused & (refused - 1) == 0:  # 1, 2, 4, 8, …
            self.log()
        return stays

    def log(self) -> None:
        """Say in the log how many pairs were kept and left out."""
        logger.info("length filters: %s", self)


class TokenBatchSampler:
    """Batches of pairs of similar length with at most `max_tokens` tokens, for `DataLoader(batch_sampler=…)`.

    As the papers count, a batch has sentences × max(longest source, longest target) tokens, padding included. With
    `batch_by="real"` padding does not count: neither all sources nor all targets of a batch exceed `max_tokens`.
    Every pair occurs exactly once an epoch, unless `copies` asks for more.

    Pairs are sorted once, longest first, and cut into batches as large as fit. In each epoch a pair changes places
    only with pairs of the same lengths, as they are counted. So `set_epoch` changes which pairs share a batch, and the
    order of batches. It never changes the number of batches or their shapes. All of it follows from `seed` and the
    epoch, and is the same on every rank; accelerate deals the batches out to the ranks.

    Args:
        source_lengths, target_lengths: tokens of each pair, `</s>` included.
        max_tokens: upper bound of a batch.
        seed: of the shuffling.
        batch_multiple: the number of batches is a multiple of it (ranks × accumulation steps), so that every
            optimizer step has the same number. The largest batches are halved until it is: nothing is
            repeated or dropped.
        length_multiple: lengths are rounded up to it, as `TranslationCollator` pads.
        batch_by: what `max_tokens` counts: "padded" or "real" tokens.
        shuffle: False gives the same batches each epoch, longest first.
        copies: how often each pair is seen in an epoch on average, 1 or more; None: once. Of 1.3, all pairs are seen
            once, and three in ten, others each epoch, once more.

    Raises:
        UserError: a pair alone exceeds `max_tokens`, or there are too few pairs for a multiple of `batch_multiple`.
    """

    batch_size = None  # what accelerate looks at: sizes vary, and it must not even out or drop anything
    drop_last = False

    def __init__(
        self,
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
        max_tokens: int,
        *,
        seed: int,
        batch_multiple: int = 1,
        length_multiple: int = 8,
        batch_by: BatchBy = "padded",
        shuffle: bool = True,
        copies: Sequence[float] | None = None,
    ) -> None:
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        multiple = counted_multiple(length_multiple, batch_by)
        source = round_up(np.asarray(source_lengths, dtype=np.int64), multiple)
        target = round_up(np.asarray(target_lengths, dtype=np.int64), multiple)
        width = np.maximum(source, target)
        if width.max() > max_tokens:
            row = int(width.argmax())
            longest = max(source_lengths[row], target_lengths[row])
            padded = f", {width[row]} when padded to a multiple of {multiple}" if width[row] > longest else ""
            raise UserError(
                f"the longest pair has {source_lengths[row]} source and {target_lengths[row]} target tokens{padded}: "
                f"more than training.max_tokens {max_tokens}. Raise max_tokens or lower data.max_length"
            )
        # Longest first, and within one width along the line from long source to long target, so that
        # neighbours differ in one side at a time and few batches mix lengths.
        self._order = np.lexsort((target - source, -width))
        self._repeats = None
        if copies is not None:
            self._repeats = Repeats(np.stack([source, target], axis=1), np.asarray(copies, dtype=np.float64))
            self._order = self._repeats.extend(self._order)
        source, target = source[self._order], target[self._order]
        self._cells = _runs(np.stack([source, target], axis=1))
        full = _full_by_padded if batch_by == "padded" else _full_by_real
        self._batches = _cut(full(source, target, max_tokens), batch_multiple, length_multiple)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        if not self.shuffle:
            yield from (self._order[start:end].tolist() for start, end in self._batches)
            return
        random = np.random.default_rng([self.seed, self.epoch])
        order = self._order.copy() if self._repeats is None else self._repeats.draw(self._order, random)
        for start, end in self._cells:
            random.shuffle(order[start:end])
        for batch in random.permutation(len(self._batches)):
            start, end = self._batches[batch]
            yield order[start:end].tolist()


def round_up(lengths: np.ndarray | int, multiple: int) -> np.ndarray | int:
    """Lengths as they are padded."""
    return -(-lengths // multiple) * multiple


def counted_multiple(length_multiple: int, batch_by: BatchBy) -> int:
    """The multiple that lengths are rounded up to before they are counted."""
    return length_multiple if batch_by == "padded" else 1


def _full_by_padded(source: np.ndarray, target: np.ndarray, max_tokens: int) -> np.ndarray:
    """Where a full batch ends that begins at each pair; of falling max(source, target)."""
    return np.arange(len(source)) + max_tokens // np.maximum(source, target)


def _full_by_real(source: np.ndarray, target: np.ndarray, max_tokens: int) -> np.ndarray:
    """The same where padding does not count: the first pair with which one side exceeds `max_tokens`.

    Behind the last pair the shortest sentences are thought to go on.
    """
    ends = []
    for lengths in (source, target):
        sums = np.cumsum(lengths)
        end = np.searchsorted(sums, sums - lengths + max_tokens, side="right")
        room = sums - lengths + max_tokens - sums[-1]
        ends.append(end + np.maximum(room, 0) // lengths[-1])
    return np.minimum(*ends)


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of each run of equal rows."""
    cuts = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
    bounds = [0, *cuts.tolist(), len(rows)]
    return list(pairwise(bounds))


def _cut(full: np.ndarray, batch_multiple: int, sentence_multiple: int) -> list[tuple[int, int]]:
    """Cut pairs into stretches (start, end), given where a full one ends; see the class for the rest."""
    pairs, batches, start = len(full), [], 0
    while start < pairs:
        end = min(start + _round_down(int(full[start]) - start, sentence_multiple), pairs)
        batches.append((start, end))
        start = end
    missing = -len(batches) % batch_multiple
    if len(batches) + missing > pairs:
        raise UserError(
            f"{pairs} pair{'s' * (pairs > 1)} cannot make a multiple of {batch_multiple} batches, one for "
            "each process and accumulation step; give more data, or use fewer of these"
        )
    heap = [(start - end, start, end) for start, end in batches]  # the largest first, then the longest sentences
    heapq.heapify(heap)
    for _ in range(missing):
        _, start, end = heapq.heappop(heap)
        middle = start + _round_down((end - start) // 2, sentence_multiple)
        heapq.heappush(heap, (start - middle, start, middle))
        heapq.heappush(heap, (middle - end, middle, end))
    return sorted((start, end) for _, start, end in heap)


def _round_down(sentences: int, multiple: int) -> int:
    """Round down to a multiple, except below it."""
    return sentences - sentences % multiple if sentences > multiple else sentences


class TranslationCollator:
    """Pads encoded pairs on the right and adds the decoder's input.

    Returns `input_ids` and `attention_mask` [sentences, source]. Rows with labels also give `labels` and
    `decoder_input_ids` [sentences, target]. `labels` are padded with -100, which the loss ignores. `decoder_input_ids`
    are the labels one place to the right, behind the row's `decoder_start`, else behind `decoder_start_token_id`.
    Rows with a `posterior` give `posteriors` [sentences]. Other fields are left out.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, decoder_start_token_id: int, pad_to_multiple_of: int = 8
    ) -> None:
        self.pad_token_id = tokenizer.pad_token_id
        self.decoder_start_token_id = decoder_start_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[dict]) -> dict[str, torch.Tensor]:
        """Collate the rows of a batch."""
        sources = [row["input_ids"] for row in rows]
        lengths = torch.tensor([len(ids) for ids in sources])
        input_ids = self._pad(sources, self.pad_token_id)
        batch = {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
        }
        if "labels" in rows[0]:
            targets = [row["labels"] for row in rows]
            starts = [row.get("decoder_start", self.decoder_start_token_id) for row in rows]
            shifted = [[start, *ids[:-1]] for start, ids in zip(starts, targets, strict=True)]
            batch["labels"] = self._pad(targets, -100)
            batch["decoder_input_ids"] = self._pad(shifted, self.pad_token_id)
        if "posterior" in rows[0]:
            batch["posteriors"] = torch.tensor([row["posterior"] for row in rows])
        return batch

    def _pad(self, lists: list[list[int]], value: int) -> torch.Tensor:
        width = round_up(max(map(len, lists)), self.pad_to_multiple_of)
        return torch.tensor([[*ids, *[value] * (width - len(ids))] for ids in lists])
