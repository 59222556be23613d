"""Text in several languages for masked language models: read, encode and mask it.

Each line is one sequence. Shape legend: [sentences, length], lengths in tokens with `</s>`.
"""

import logging
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from pathlib import Path
from typing import Literal, get_args

import torch
from datasets import Dataset, concatenate_datasets
from tokenizers import AddedToken, normalizers
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.pre_tokenizers import Sequence as Sequential
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import UserError, quote
from ..limits import Range, check_numbers
from ..models.plain_text import TextEncoder, is_blank
from .arguments import PAIRS, RANGES, Places, Split
from .batches import TranslationCollator
from .corpora import CHUNK
from .pair_filter import check_words
from .text_files import find_file, read_lines

logger = logging.getLogger(__name__)

# As in RoBERTa, the mask includes the space before it, because it replaces a piece that begins with this space.
MASK = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
PosteriorsBy = Literal["language", "none"]
NUMBERS = {
    "max_length": RANGES["max_length"],
    "sampling_temperature": RANGES["sampling_temperature"],
    "mask_probability": Range(0, 1, excludes_least=True, excludes_most=True),
}


def add_mask(tokenizer: PreTrainedTokenizerFast, is_new: bool) -> None:
    """Give a tokenizer the token `<mask>`.

    The text around a mask should have the same pieces as the text around a word. So a new tokenizer, which no model
    uses yet, is changed: letters after a mask begin a word only after a space. Spaces at the end of a text are
    removed.
    """
    tokenizer.add_special_tokens({"mask_token": MASK})
    if not is_new:
        return
    backend = tokenizer.backend_tokenizer
    steps = backend.pre_tokenizer if isinstance(backend.pre_tokenizer, Sequential) else [backend.pre_tokenizer]
    for step in steps:
        if isinstance(step, Metaspace):
            step.prepend_scheme = "first"
    forms = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([*forms, normalizers.Strip(left=False)])


@dataclass
class MonolingualArguments(Places):
    """The section `data` of a recipe for a masked language model.

    `train`, `validation` and `test` are prefixes: text in the language `de` is in `{prefix}.de`, else in
    `{prefix}.de.gz`, a sequence a line. Relative paths start at `root`, else at `$HF_DEEPWIDE_DATA`, else at the
    working directory. Empty lines are left out. Lines of more than `max_length` tokens (`</s>` included) are left out
    of the training split, and are cut in the other splits.

    `posteriors: language` gives a latent-depth model one posterior per language. `sampling_temperature` T: a language
    with n lines is seen in proportion to n^(1/T), as in translation. `mask_probability` is the share of the tokens
    that the model predicts. Of them 80 % are replaced by `<mask>`, 10 % by a random token, and 10 % stay (BERT). In
    training, each epoch has other masks. Validation and test splits are masked once, when they are encoded.
    """

    languages: list[str] = field(default_factory=list, metadata={"help": "endings of the files, one a language"})
    train: str | None = field(
        default=None, metadata={"help": "text to train on: corpus/train.en and corpus/train.de, or .gz"}
    )
    validation: str | None = field(default=None, metadata={"help": "held-out text, scored during training"})
    test: str | None = field(default=None, metadata={"help": "held-out text, scored at the end"})
    root: str | None = field(
        default=None, metadata={"help": "folder that relative paths start at; else $HF_DEEPWIDE_DATA"}
    )
    max_length: int = field(
        default=256, metadata={"help": "longer sequences are left out of training, and cut elsewhere"}
    )
    posteriors: PosteriorsBy = field(
        default="none", metadata={"help": "latent depth: language gives each language its own posterior"}
    )
    sampling_temperature: float = field(
        default=1.0, metadata={"help": "T: a language of n lines is seen in proportion to n^(1/T)"}
    )
    mask_probability: float = field(default=0.15, metadata={"help": "share of the tokens that are to be predicted"})

    def __post_init__(self) -> None:
        for name in ("train", "validation"):
            if getattr(self, name) is None:
                raise UserError(f"data.{name} is not set; name files without the language, as in wikipedia/{name}")
        if not self.languages or len(set(self.languages)) < len(self.languages):
            raise UserError(f"data.languages is {quote(self.languages)}; name each language once, as in [en, de]")
        if len(self.languages) > PAIRS:
            raise UserError(f"data.languages names {len(self.languages):,} languages; accepted: {PAIRS:,} at most")
        for language in self.languages:
            if not re.fullmatch(r"\w[\w.@-]*", language):
                raise UserError(f"data.languages: {quote(language)} is no language code, such as de or zh-CN")
        if self.posteriors not in get_args(PosteriorsBy):
            raise UserError(
                f"data.posteriors is {quote(self.posteriors)}; accepted: {', '.join(get_args(PosteriorsBy))}"
            )
        check_numbers(self, NUMBERS, "data.")

    @property
    def pairs(self) -> list[str]:
        """The languages, under the name that the trainer uses for groups of sentences."""
        return self.languages

    @property
    def posterior_names(self) -> list[str]:
        """The language of each posterior of a latent-depth model; [] without `posteriors`."""
        return self.languages if self.posteriors == "language" else []

    def file(self, split: Split, language: str) -> Path:
        """Return the file of a split in a language.

        Raises:
            UserError: the recipe does not name the split, or the file does not exist.
        """
        return find_file(self.resolve(f"{self.location(split)}.{language}"))


def read_texts(args: MonolingualArguments, split: Split) -> Iterator[tuple[int, str]]:
    """Yield the index of the language and the text of each line that is not empty, one language after the other."""
    for index, language in enumerate(args.languages):
        file = args.file(split, language)
        for number, line in enumerate(read_lines(file), start=1):
            check_words(line, f"{file}, line {number}")
            if not is_blank(line):
                yield index, line


def encode_texts(args: MonolingualArguments, split: Split, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Encode a split as rows with `input_ids`, the two lengths for batches, `pair` (the language) and `labels`.

    Only validation and test rows are masked, and only they have `labels`. With `posteriors: language`, rows also have
    `posterior`.

    Raises:
        UserError: no line is left, a language has no line to train on, or a language has no token to predict.
    """
    encoder, lines = TextEncoder(tokenizer), read_texts(args, split)
    collator = None if split == "train" else MaskingCollator(tokenizer, args.mask_probability)
    parts, read, long = [], 0, 0
    kept, predicted = dict.fromkeys(args.languages, 0), dict.fromkeys(args.languages, 0)
    while chunk := list(islice(lines, CHUNK)):  # all other lines are in Arrow, as in `corpora`
        languages, texts = zip(*chunk, strict=True)
        bodies = encoder.bodies(texts)
        rows = [encoder.frame(body) for body in bodies]
        fits = [len(row) <= args.max_length for row in rows]
        read, long = read + len(rows), long + fits.count(False)
        if collator is None:
            rows, languages = list(compress(rows, fits)), list(compress(languages, fits))
        elif not all(fits):
            rows = [encoder.frame(body, longest=args.max_length) for body in bodies]
        for language in languages:
            kept[args.languages[language]] += 1
        lengths = [len(row) for row in rows]
        columns = {"input_ids": rows, "source_length": lengths, "target_length": lengths, "pair": languages}
        if args.posterior_names:
            columns["posterior"] = languages
        if collator is not None:
            masked = [collator.mask(torch.tensor([row])) for row in rows]
            columns["input_ids"] = [ids[0].tolist() for ids, _ in masked]
            columns["labels"] = [labels[0].tolist() for _, labels in masked]
            for language, labels in zip(languages, columns["labels"], strict=True):
                predicted[args.languages[language]] += sum(label != -100 for label in labels)
        if rows:
            parts.append(Dataset.from_dict(columns))
    if not read:
        raise UserError(f"data.{split}: all lines of {', '.join(args.languages)} are empty")
    what = "left out" if collator is None else "cut"
    logger.info("%s: %d sequences read; %d of more than %d tokens %s", split, read, long, args.max_length, what)
    if not parts:
        raise UserError(f"data.{split}: no sequence of at most {args.max_length} tokens is left")
    if none := [language for language, count in kept.items() if collator is None and not count]:
        raise UserError(
            f"data.{split}: no sequence in {', '.join(none)} has at most {args.max_length} tokens; raise "
            "data.max_length, or leave the language out"
        )
    if none := [language for language, count in kept.items() if collator and count and not predicted[language]]:
        raise UserError(
            f"data.{split}: no token in {', '.join(none)} was drawn to be predicted, so it has no loss; give more "
            "text, or a larger data.mask_probability"
        )
    return concatenate_datasets(parts)


class MaskingCollator(TranslationCollator):
    """Pad sequences, and mask them if they are not masked yet.

    Returns `input_ids`, `attention_mask` and `labels` [sentences, length]. Labels are -100 where nothing is to be
    predicted. Rows with a `posterior` also give `posteriors` [sentences].

    The masks depend only on the batch, the seed and the epoch, and not on earlier random numbers. So a resumed run has
    the same masks.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, mask_probability: float, seed: int = 0, pad_to_multiple_of: int = 8
    ) -> None:
        super().__init__(tokenizer, None, pad_to_multiple_of)
        self.masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=mask_probability)
        self.special_ids = torch.tensor(tokenizer.all_special_ids)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; each epoch has other masks."""
        self.epoch = epoch

    def __call__(self, rows: Sequence[dict]) -> dict[str, torch.Tensor]:
        """Collate the rows of a batch."""
        batch = super().__call__([{key: row[key] for key in row if key != "labels"} for row in rows])
        if "labels" in rows[0]:
            batch["labels"] = self._pad([row["labels"] for row in rows], -100)
        else:
            batch["input_ids"], batch["labels"] = self.mask(batch["input_ids"])
        return batch

    def mask(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask some tokens of `[sentences, length]`, and return ids and labels; special tokens are never masked.

        Labels are -100 for all tokens that are not to be predicted.
        """
        draw = zlib.crc32(ids.numpy().tobytes(), zlib.crc32(f"{self.seed} {self.epoch}".encode()))
        self.masking.generator = torch.Generator().manual_seed(draw)
        return self.masking.torch_mask_tokens(ids.clone(), special_tokens_mask=torch.isin(ids, self.special_ids))
