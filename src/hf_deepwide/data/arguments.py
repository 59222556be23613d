"""The section `data` of a recipe."""

import copy
import dataclasses
import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import UserError, quote
from ..limits import Range, check_numbers
from ..reading import home_expanded, what_is

Format = Literal["text", "tsv", "jsonl", "datasets", "phrases"]
Split = Literal["train", "validation", "test"]
LanguageTag = Literal["source", "decoder", "none"]
PosteriorsBy = Literal["target", "source", "pair", "none"]

ROOT_VARIABLE = "HF_DEEPWIDE_DATA"
PAIRS = 10_000  # most language pairs of a run: from a hundred languages into a hundred
TOKENS, COUNT = 10**9, 10**12  # limits that no corpus comes near
RANGES = {
    "sampling_temperature": Range(1, math.inf),
    "shuffle_buffer": Range(1, COUNT),
    "seed": Range(0, 2**32, excludes_most=True),
    "train_size": Range(1, 1_000_000),
    "max_length": Range(2, TOKENS),  # a word and </s>
    "max_length_ratio": Range(1, TOKENS),
    "synthetic_rate": Range(0.001, 1000),  # beyond it, pairs of one kind could be seen 1000 times an epoch
}
ALONE: dict[str, Any] = {  # keys for several language pairs, with the values that a run of a single pair has
    "language_tag": "source",
    "posteriors": "none",
    "sampling_temperature": 1.0,
    "train_only_pairs": [],
}
FILES = ("text", "tsv", "jsonl", "datasets")
READ_BY = {  # each key with the formats that read it; all other formats refuse the key
    **dict.fromkeys(("root", "train", "validation", "test", "streaming", "drop_duplicates", "synthetic"), FILES),
    **dict.fromkeys(("source_field", "target_field"), FILES[1:]),
    **dict.fromkeys(("name", "config"), FILES[3:]),
    **dict.fromkeys(("seed", "train_size"), ("phrases",)),
}
TAG = re.compile(r"<(?!/?s>|pad>|unk>|mask>|2\w+>)[^<>\s]+>")  # neither a control token nor a tag of a language


class Places:
    """The fields `root`, `train`, `validation` and `test` of a section `data`."""

    root: str | None = None

    def resolve(self, path: str) -> Path:
        """Return `path` if absolute, else the path under `root`, `$HF_DEEPWIDE_DATA` or the working directory."""
        place = home_expanded(path, "data")
        if self.root:
            return home_expanded(self.root, "data.root") / place
        return home_expanded(os.environ.get(ROOT_VARIABLE) or ".", f"${ROOT_VARIABLE}") / place

    def location(self, split: Split) -> str:
        """Return the place of `split` that the recipe gives.

        Raises:
            UserError: the recipe does not give the split.
        """
        value = getattr(self, split)
        if value is None:
            raise UserError(f"data.{split} is not set: the recipe names no {split} split")
        return value


@dataclass
class DataArguments(Places):
    """The section `data` of a recipe: where the pairs come from, and which pairs are used for training.

    `train`, `validation` and `test` give the place of a split: a prefix (format text: `{prefix}.{lang}`, else
    `{prefix}.{lang}.gz`), a file (tsv, jsonl; `.gz` too), the name of a split (datasets), nothing (phrases).
    Relative paths start at `root`, else at `$HF_DEEPWIDE_DATA`, else at the working directory. `test` may be a list:
    then each test set is scored alone, and all sentences together.

    A TSV file has no quoting. It has two columns, source and target, or a header that contains both fields. JSONL rows
    and `datasets` columns hold the fields themselves, or hold them within a dict `translation`. A field name that is
    None is replaced by the language code.

    With `streaming`, training pairs are read during training, and are never all in memory. A buffer holds
    `shuffle_buffer` pairs at a time. Within the buffer, pairs are sorted by length into batches, and shuffled: a
    larger buffer improves both. Shuffle a file beforehand if its beginning differs from its end.

    With a tokenizer that has its own language codes (NLLB, mBART, M2M100), the languages are given by these codes.

    A format refuses keys that it does not read, such as `train` beside the format phrases.

    Four filters act on the training split only:

    - `max_length`: tokens of either side, `</s>` included;
    - `max_length_ratio`: tokens of the longer side divided by the tokens of the shorter side;
    - `drop_duplicates`: equal pairs;
    - an empty side, always.

    `pairs` trains several language pairs in one run: `[en-de, en-fr]`. It replaces `source_lang` and `target_lang`
    (default: en and de). The places of the data are then read once for each pair. In them `{pair}`, `{source_lang}`
    and `{target_lang}` are replaced by the pair's values: `ted8/{pair}/train`. `{sorted_pair}` is the two languages in
    alphabetical order, for collections that hold one corpus for both directions. `train_only_pairs` lists the pairs
    without a validation and test set.

    `language_tag` chooses how the model receives the target language. "source" puts a tag `<2de>` before the source.
    "decoder" makes the tag the decoder's first token. "none" adds no tag, which is enough where each source language
    has only one target language. `posteriors` gives a latent-depth model one posterior per target language, source
    language or pair. A language-aware model gets its norms in the same way.

    `sampling_temperature` T: a pair with n sentences is seen in proportion to n^(1/T). At T = 1 each sentence is seen
    once an epoch. Above 1 the largest pair is still seen once, and smaller pairs more often. At infinity (`.inf`) all
    pairs have the same weight.

    `synthetic` is the place of pairs that a model generated, as `train` is the place of the real pairs.
    Back-translation generates the sources, distillation the targets. `synthetic_tag`, such as `<bt>`, is put before
    synthetic sources (Caswell et al. 2019). `synthetic_rate` is the number of synthetic pairs that are seen for each
    real pair. No pair is left out: one kind of pairs is seen once an epoch. The other kind is seen once or more, as
    often as the rate requires. Without a rate each pair is seen once.
    """

    format: Format = "text"
    root: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    pairs: list[str] | None = None
    train_only_pairs: list[str] = field(default_factory=list)
    language_tag: LanguageTag = "source"
    posteriors: PosteriorsBy = "none"
    sampling_temperature: float = 1.0
    train: str | None = None
    validation: str | None = None
    test: str | list[str] | None = None
    name: str | None = None
    config: str | None = None
    streaming: bool = False
    shuffle_buffer: int = 20_000  # pairs, about 3 KB each, per process
    source_field: str | None = None
    target_field: str | None = None
    max_length: int = 256
    max_length_ratio: float | None = None
    drop_duplicates: bool = False
    seed: int = field(default=1, metadata={"help": "phrases: another seed is another corpus"})
    train_size: int = 25_000  # phrases: pairs to train on; 500 more are held out for each of validation and test
    synthetic: str | None = None
    synthetic_tag: str | None = None
    synthetic_rate: float | None = None

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise UserError(f"data.format is {quote(self.format)}; accepted: {', '.join(get_args(Format))}")
        check_numbers(self, RANGES, "data.")
        self._check_unread()
        self._check_tests()
        self._check_languages()
        if self.format == "datasets" and self.name is None:
            raise UserError("data.format is 'datasets' but data.name is not set: a Hub name or a local directory")
        buffer = DataArguments.shuffle_buffer
        if self.shuffle_buffer != buffer and not self.streaming:
            raise UserError(
                f"data.shuffle_buffer is {self.shuffle_buffer}, and only streams have a buffer. Set data.streaming: "
                "true, or leave data.shuffle_buffer out. If the recipe that is extended sets data.shuffle_buffer, set "
                f"it to {buffer}, the default"
            )
        if self.streaming and self.drop_duplicates:
            raise UserError(
                "data.drop_duplicates does not work with data.streaming, because the whole stream would have to stay "
                "in memory; set one of these two keys to false"
            )
        self._check_synthetic()

    def _check_synthetic(self) -> None:
        if self.synthetic is None:
            for name in ("synthetic_tag", "synthetic_rate"):
                if (value := getattr(self, name)) is not None:
                    raise UserError(
                        f"data.{name} is {quote(value)} but there are no synthetic pairs: set data.synthetic"
                    )
            return
        if self.pairs is not None:
            raise UserError("data.synthetic: accepted with one language pair; leave out data.pairs")
        if self.streaming:
            raise UserError(
                "data.synthetic: streams have no size, by which both kinds of pairs could be mixed. Turn "
                "data.streaming off, or mix the files yourself and name them in data.train"
            )
        if self.synthetic == self.train:
            raise UserError(
                f"data.synthetic and data.train are both {quote(self.train)}; a text is either synthetic or real"
            )
        if self.synthetic_tag is not None and not TAG.fullmatch(self.synthetic_tag):
            raise UserError(
                f"data.synthetic_tag is {quote(self.synthetic_tag)}; accepted: a word in angle brackets that is no "
                "control token and no language's tag, such as <bt>"
            )

    @property
    def kinds(self) -> list["DataArguments"]:
        """A copy of the section for each kind of training pairs: real pairs, and synthetic pairs if there are any."""
        neither: dict[str, Any] = {"synthetic": None, "synthetic_tag": None, "synthetic_rate": None}
        places = [self.train, *([] if self.synthetic is None else [self.synthetic])]
        return [dataclasses.replace(self, **neither, train=place) for place in places]

    def _check_languages(self) -> None:
        for name, accepted in (("language_tag", LanguageTag), ("posteriors", PosteriorsBy)):
            if getattr(self, name) not in get_args(accepted):
                value = quote(getattr(self, name))
                raise UserError(f"data.{name} is {value}; accepted: {', '.join(get_args(accepted))}")
        if self.pairs is not None:
            self._check_pairs()
            return
        for name, alone in ALONE.items():
            if getattr(self, name) != alone:
                raise UserError(
                    f"data.{name} is {quote(getattr(self, name))} but there is one language pair: set data.pairs"
                )
        self.source_lang = self.source_lang or "en"
        self.target_lang = self.target_lang or "de"
        for name in ("source_lang", "target_lang"):
            if not re.fullmatch(r"\w[\w.@-]*", getattr(self, name)):
                raise UserError(
                    f"data.{name} is {quote(getattr(self, name))}; accepted: a language code, such as de or zh-CN"
                )
        if self.source_lang == self.target_lang and self.format in ("text", "phrases"):
            raise UserError(f"data.source_lang and data.target_lang are both {quote(self.source_lang)}")
        if self.source_name == self.target_name:
            raise UserError(
                f"source and target are both {quote(self.source_name)}; set data.source_lang and data.target_lang, or "
                "data.source_field and data.target_field, to two names"
            )

    def _check_unread(self) -> None:
        for name, formats in READ_BY.items():
            value, default = getattr(self, name), getattr(DataArguments, name)
            if value != default and self.format not in formats:
                raise UserError(
                    f"data.{name} is {quote(value)}, and the format {self.format} does not read it; leave it out, set "
                    f"it to {json.dumps(default)}, or set data.format (accepted: {', '.join(formats)})"
                )

    def _check_tests(self) -> None:
        if not isinstance(self.test, list):
            return
        if self.pairs is not None:
            raise UserError("data.test names several test sets, and data.pairs several languages; give only one")
        if not self.test or len(set(self.test)) < len(self.test):
            raise UserError(f"data.test is {quote(self.test)}; name each test set once, or leave data.test out")

    @property
    def test_sets(self) -> dict[str, "DataArguments"]:
        """The name of each test set, with a copy of the section for this test set alone; {} where `test` is no list.

        A name is the last part of the place. If two last parts are equal, all names are whole places.
        """
        places = self.test if isinstance(self.test, list) else []
        short = [re.split(r"[/\\]", place)[-1] for place in places]
        names = short if len(set(short)) == len(short) else places
        return {name: dataclasses.replace(self, test=place) for name, place in zip(names, places, strict=True)}

    def _check_pairs(self) -> None:
        if self.source_lang or self.target_lang:
            raise UserError(
                "data.pairs names the languages; leave out data.source_lang and data.target_lang, or set them to null"
            )
        if not self.pairs:
            raise UserError("data.pairs is empty; name the language pairs, as in [en-de, en-fr], or leave it out")
        if len(self.pairs) > PAIRS:
            raise UserError(f"data.pairs names {len(self.pairs):,} language pairs; accepted: {PAIRS:,} at most")
        counts = Counter(self.pairs)
        for pair in self.pairs:
            if not re.fullmatch(r"\w+-\w+", pair):
                raise UserError(
                    f"data.pairs: {quote(pair)} is no language pair; write source and target, as in en-de. A code has "
                    "letters, digits and _, such as pt_BR"
                )
            if len(set(pair.split("-"))) == 1:
                raise UserError(
                    f"data.pairs: {quote(pair)} names one language twice; write two languages, as in en-de"
                )
            if counts[pair] > 1:
                raise UserError(
                    f"data.pairs: {quote(pair)} is named twice; name each pair once. To see small pairs more often, "
                    "raise data.sampling_temperature"
                )
        for pair in self.train_only_pairs:
            if pair not in counts:
                raise UserError(
                    f"data.train_only_pairs: {quote(pair)} is not in data.pairs, which names all that is trained on"
                )
        if not self.evaluated_pairs:
            raise UserError("data.train_only_pairs names all of data.pairs: there would be nothing to evaluate on")
        sources = [pair.split("-")[0] for pair in self.pairs]
        if self.language_tag == "none" and len(set(sources)) < len(sources):
            raise UserError(
                "data.language_tag is none, but there are several targets of one source: nothing would tell the model "
                "which is wanted; accepted: source, decoder"
            )
        if self.streaming and len(self.pairs) > 1 and self.sampling_temperature != float("inf"):
            raise UserError(
                "data.streaming: the sizes of streams are unknown, so several language pairs can only have equal "
                "weights; set data.sampling_temperature .inf"
            )
        for pair in self.pairs:
            self.for_pair(pair)

    def for_pair(self, pair: str) -> "DataArguments":
        """Return a copy of the section for a single one of the `pairs`."""
        source_lang, target_lang = split_pair(pair)
        places: dict[str, Any] = {
            place: fill_in(getattr(self, place), pair, f"data.{place}")
            for place in ("train", "validation", "test", "name", "config", "source_field", "target_field")
        }
        languages: dict[str, Any] = {"pairs": None, "source_lang": source_lang, "target_lang": target_lang}
        return dataclasses.replace(self, **copy.deepcopy(ALONE), **places, **languages)

    @property
    def evaluated_pairs(self) -> list[str]:
        """The pairs that have a validation and a test set."""
        trained_only = set(self.train_only_pairs)
        return [pair for pair in self.pairs or [] if pair not in trained_only]

    @property
    def language_pairs(self) -> list[tuple[str, str]]:
        """Source and target language of each pair, also of a single pair."""
        if self.pairs is None:
            return [(str(self.source_lang), str(self.target_lang))]
        return [split_pair(pair) for pair in self.pairs]

    @property
    def posterior_names(self) -> list[str]:
        """The language or pair of each posterior of a latent-depth model, in the order of the indices; [] for none."""
        of = {"target": lambda pair: pair[1], "source": lambda pair: pair[0], "pair": "-".join}.get(self.posteriors)
        return list(dict.fromkeys(map(of, self.language_pairs))) if of else []

    @property
    def source_name(self) -> str:
        """The field of the source text."""
        return self.source_field or str(self.source_lang)

    @property
    def target_name(self) -> str:
        """The field of the target text."""
        return self.target_field or str(self.target_lang)


def split_pair(pair: str) -> tuple[str, str]:
    """Return the source and the target language of a pair: en and zh-CN for `en-zh-CN`."""
    source_lang, _, target_lang = pair.partition("-")
    return source_lang, target_lang


def fill_in(text: str | None, pair: str, where: str) -> str | None:
    """Replace `{pair}`, `{source_lang}`, `{target_lang}` and `{sorted_pair}` in a text by a pair's values.

    Raises:
        UserError: another name is in braces. The message begins with `where`.
    """
    source_lang, target_lang = split_pair(pair)
    names = {"pair": pair, "source_lang": source_lang, "target_lang": target_lang}
    names["sorted_pair"] = "-".join(sorted((source_lang, target_lang)))
    # not `str.format`, which would also look up attributes, and pad to any width
    unknown = [found for found in re.findall(r"\{(.*?)\}", text or "") if found not in names]
    if unknown:
        accepted = ", ".join(f"{{{name}}}" for name in names)
        raise UserError(f"{where}: {quote(text)} cannot be filled in ({quote(unknown[0])}); accepted: {accepted}")
    return text and re.sub(r"\{(\w+)\}", lambda found: names[found[1]], text)


def where_paths_start() -> str:
    """Return the last sentence of each message about a file that was not found."""
    variable = os.environ.get(ROOT_VARIABLE)
    root = "not set"
    if variable:
        found = what_is(Path(variable).expanduser())
        root = quote(variable) if found == "a folder" else f"{quote(variable)}, which is {found or 'nowhere'}"
    return f"Relative paths start at data.root, else at ${ROOT_VARIABLE} ({root}), else in the working directory"
