"""The corpora of the papers: where each comes from, on what terms, how it is cleaned, and what recipes expect.

Counts are published: by the papers, or on the card of the data set. `Corpus.digests` are of the published text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Literal

from .cleaning import (
    DASHES_SPLIT,
    LOWERED,
    NORMALIZED,
    ONE_SPACE,
    STRAIGHT_APOSTROPHES,
    TOKENIZED,
    WITHOUT_EMPTY,
    WITHOUT_NULL,
    Step,
    between,
    ratio_at_most,
)

Languages = tuple[str, ...]
CONVERTED = "refs/convert/parquet"  # where the Hub keeps tables of data sets that were scripts once
# WMT'14 as fairseq's scripts clean it, which MAT's authors name; they leave most punctuation of test sets as it is.
WMT14_TRAIN = (NORMALIZED, DASHES_SPLIT, WITHOUT_EMPTY)
WMT14_HELD_OUT = (STRAIGHT_APOSTROPHES, DASHES_SPLIT)


@dataclass(frozen=True)
class Part:
    """A split of a data set on the Hub.

    Args:
        name: the data set.
        split: its split.
        config: its config.
        first: only so many rows of the split.
        revision: its revision; None is the newest.
        data_files: the files of the split, where the revision has no configs.
    """

    name: str
    split: str
    config: str | None = None
    first: int | None = None
    revision: str | None = None
    data_files: str | None = None

    def __str__(self) -> str:
        rows = f"the first {self.first:,} rows" if self.first else None
        place = ", ".join(filter(None, (self.config, self.split, rows)))
        return f"{self.name} ({place})" + (f" at {self.revision}" if self.revision else "")


@dataclass(frozen=True)
class SacreBleuSet:
    """A test set that sacreBLEU fetches.

    Args:
        name: its name there, such as wmt12.
        sides: of each language, a direction and its side in that direction, such as `de-en/src`.
    """

    name: str
    sides: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} of sacreBLEU ({', '.join(self.sides)})"


@dataclass(frozen=True)
class Origin:
    """What a split is made of, one place after the other, and the steps that clean it.

    Args:
        places: parts of data sets on the Hub, and test sets; or names of files, with `{lang}` for the language where
            each language has its own file, else tables with a column for each language. `{side}` is `src` in the
            file of the first language and `ref` in that of the second.
        steps: what is done to each row.
        held_out: every so many rows one goes to the split `valid` instead.
    """

    places: tuple[Part | SacreBleuSet, ...] | tuple[str, ...]
    steps: tuple[Step, ...] = ()
    held_out: int | None = None


Origins = Callable[[Languages], Mapping[str, Origin]]


@dataclass(frozen=True)
class Corpus:
    """One corpus.

    Args:
        name: how the command line calls it.
        what: a description.
        licence: on what terms it may be used.
        folder: where it goes, below the place that relative paths of recipes start at.
        file: the name of a split's file in the folder, with `{pair}` and `{split}`. Text has a file for each `{lang}`;
            `.jsonl` is a data set that `data.name` names.
        groups: languages whose files are aligned with each other.
        hub: origins of the splits on the Hub, for a group; None: the Hub does not have them.
        files: origins of the splits in original files, for a group; None: only tables of the Hub are read.
        example: a recipe, and the overrides by which it reads the corpus.
        keys: the further overrides by which it reads no other groups than the given ones.
        counts: rows of the splits, by `split`, or by `pair/split` where there are several groups.
        digests: SHA-256 of published text, by file; white space at the ends of lines does not count.
        merges: merges of subword-nmt in the papers; None where one vocabulary serves many languages.
        codes: the file of the merges, beside the training files.
        on_hub: languages that the Hub has; None: all.
        columns: what the original data call a language, where that is not its code.
    """

    name: str
    what: str
    licence: str
    folder: str
    file: str
    groups: tuple[Languages, ...]
    hub: Origins | None
    files: Origins | None
    example: str
    keys: Callable[[Sequence[Languages]], Mapping[str, str]] = lambda groups: {}
    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    digests: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    merges: int | None = None
    codes: str = "bpe.codes"
    on_hub: Languages | None = None
    columns: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def form(self) -> Literal["text", "jsonl"]:
        """Files of text, or a data set."""
        return "jsonl" if self.file.endswith(".jsonl") else "text"


def pair_of(languages: Languages) -> str:
    """The name of a group of languages, such as de-en."""
    return "-".join(languages)


def _converted(name: str, folder: str, **splits: str) -> dict[str, Origin]:
    """Splits of a data set whose tables the Hub keeps at another revision; ours are named after theirs."""
    return {
        ours: Origin((Part(name, theirs, revision=CONVERTED, data_files=f"{folder}/{theirs}/*.parquet"),))
        for ours, theirs in splits.items()
    }


def _newstest(name: str, languages: Languages) -> SacreBleuSet:
    """A test set of WMT before 2014, whose sides are sources both: the same text in all languages."""
    other = languages[0]
    return SacreBleuSet(name, (f"{other}-en/src", f"en-{other}/src"))


def _iwslt14_files(languages: Languages) -> dict[str, Origin]:
    tests = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
    return {
        "test": Origin(
            tuple(f"IWSLT14.{test}.de-en.{{lang}}.xml" for test in tests), (STRAIGHT_APOSTROPHES, TOKENIZED, LOWERED)
        ),
        "train": Origin(
            ("train.tags.de-en.{lang}",), (TOKENIZED, between(1, 175), ratio_at_most(1.5), LOWERED), held_out=23
        ),
    }


def _wmt14_hub(languages: Languages) -> dict[str, Origin]:
    return {
        "validation": Origin((Part("wmt/wmt14", "validation", "de-en"),), WMT14_HELD_OUT),
        "newstest2012": Origin((_newstest("wmt12", languages),), WMT14_HELD_OUT),
        "test": Origin((Part("wmt/wmt14", "test", "de-en"),), WMT14_HELD_OUT),
        "train": Origin((Part("wmt/wmt14", "train", "de-en"),), WMT14_TRAIN),
    }


def _wmt14_files(languages: Languages) -> dict[str, Origin]:
    train = ("europarl-v7.de-en.{lang}", "commoncrawl.de-en.{lang}", "news-commentary-v9.de-en.{lang}")
    return {
        "validation": Origin(("newstest2013.{lang}",), WMT14_HELD_OUT),
        "newstest2012": Origin(("newstest2012.{lang}",), WMT14_HELD_OUT),
        "test": Origin(("newstest2014-deen-src.{lang}.sgm",), WMT14_HELD_OUT),
        "train": Origin(train, WMT14_TRAIN),
    }


def _wmt14_french_hub(languages: Languages) -> dict[str, Origin]:
    """Both papers validate on newstest2012 and newstest2013 together."""
    earlier = (_newstest("wmt12", languages), Part("wmt/wmt14", "validation", "fr-en"))
    return {
        "validation": Origin(earlier, WMT14_HELD_OUT),
        "test": Origin((Part("wmt/wmt14", "test", "fr-en"),), WMT14_HELD_OUT),
        "train": Origin((Part("wmt/wmt14", "train", "fr-en"),), WMT14_TRAIN),
    }


def _wmt14_french_files(languages: Languages) -> dict[str, Origin]:
    parts = ("europarl-v7", "commoncrawl", "undoc.2000", "news-commentary-v9")
    train = (*(f"{part}.fr-en.{{lang}}" for part in parts), "giga-fren.release2.fixed.{lang}")
    return {
        "validation": Origin(("newstest2012.{lang}", "newstest2013.{lang}"), WMT14_HELD_OUT),
        "test": Origin(("newstest2014-fren-src.{lang}.sgm",), WMT14_HELD_OUT),
        "train": Origin(train, WMT14_TRAIN),
    }


def _wmt15_hub(languages: Languages) -> dict[str, Origin]:
    return {
        "validation": Origin((_newstest("wmt13", languages),), (TOKENIZED,)),
        "test": Origin((Part("wmt/wmt15", "test", "cs-en"),), (TOKENIZED,)),
        "train": Origin((Part("wmt/wmt15", "train", "cs-en"),), (TOKENIZED, WITHOUT_EMPTY)),
    }


def _wmt15_files(languages: Languages) -> dict[str, Origin]:
    train = ("europarl-v7.cs-en.{lang}", "commoncrawl.cs-en.{lang}", "news-commentary-v10.cs-en.{lang}")
    return {
        "validation": Origin(("newstest2013.{lang}",), (TOKENIZED,)),
        "test": Origin(("newstest2015-csen-{side}.{lang}.sgm",), (TOKENIZED,)),
        "train": Origin(train, (TOKENIZED, WITHOUT_EMPTY)),
    }


def _wmt19_french_hub(languages: Languages) -> dict[str, Origin]:
    """From 2008 to 2013 the test sets of all languages were one text."""
    years = tuple(SacreBleuSet(f"wmt{year:02}", ("de-en/src", "fr-en/src")) for year in range(8, 14))
    return {
        "valid": Origin(years),
        "newstest2019": Origin((SacreBleuSet("wmt19", ("de-fr/src", "de-fr/ref")),)),
        "train": Origin((Part("wmt/wmt19", "train", "fr-de"),), (WITHOUT_EMPTY,)),
    }


def _wmt19_hub(languages: Languages) -> dict[str, Origin]:
    tests = {"newstest2014": "wmt14/full", "newstest2018": "wmt18", "newstest2019": "wmt19"}
    return {
        "newstest2013": Origin((_newstest("wmt13", languages),)),
        **{ours: Origin((SacreBleuSet(theirs, ("en-de/ref", "en-de/src")),)) for ours, theirs in tests.items()},
        "train": Origin((Part("wmt/wmt19", "train", "de-en"),), (WITHOUT_EMPTY,)),
    }


def _wmt17_hub(languages: Languages) -> dict[str, Origin]:
    """All development sets of WMT 2017: the test sets of earlier years, which the Hub has as such."""
    pair = pair_of(languages)
    earlier = {
        "de-en": [("wmt/wmt14", "test"), ("wmt/wmt15", "test"), ("wmt/wmt16", "test")],
        "fi-en": [("wmt/wmt15", "validation"), ("wmt/wmt15", "test"), ("wmt/wmt17", "validation")],
        "lv-en": [("wmt/wmt17", "validation")],
        "ru-en": [("wmt/wmt14", "test"), ("wmt/wmt15", "test"), ("wmt/wmt16", "test")],
    }[pair]
    first = 3_002 if pair == "fi-en" else None  # a second translation of the same sentences follows
    return {
        "validation": Origin(tuple(Part(name, split, pair) for name, split in earlier), (TOKENIZED,)),
        "test": Origin((Part("wmt/wmt17", "test", pair, first),), (TOKENIZED,)),
        "train": Origin((Part("wmt/wmt17", "train", pair),), (TOKENIZED, WITHOUT_EMPTY)),
    }


def _wmt17_files(languages: Languages) -> dict[str, Origin]:
    """WMT's own preprocessed release, which is tokenised and truecased."""
    pair = pair_of(languages)
    sets = {
        "de-en": ("newstest2014", "newstest2015", "newstest2016"),
        "fi-en": ("newsdev2015", "newstest2015", "newstest2016", "newstestB2016"),
        "lv-en": ("newsdev2017",),
        "ru-en": ("newstest2014", "newstest2015", "newstest2016"),
    }[pair]
    return {
        "validation": Origin(tuple(f"{pair}/{name}.tc.{{lang}}" for name in sets)),
        "test": Origin((f"{pair}/newstest2017.tc.{{lang}}",)),
        "train": Origin((f"{pair}/corpus.tc.{{lang}}",), (WITHOUT_EMPTY,)),
    }


def _wmt17_keys(groups: Sequence[Languages]) -> dict[str, str]:
    """The paper shares the vocabulary of German and English only; here it is joint, and the embeddings are not."""
    apart = ("model.share_encoder_decoder_embeddings", "model.tie_word_embeddings")
    own = {} if groups[0] == ("de", "en") else dict.fromkeys(apart, "false")
    return {"data.config": pair_of(groups[0]), "data.target_lang": groups[0][0]} | own


def _ted8_hub(languages: Languages) -> dict[str, Origin]:
    splits = _converted("neulab/ted_multi", "plain_text", valid="validation", test="test", train="train")
    return {split: Origin(origin.places, (WITHOUT_NULL,)) for split, origin in splits.items()}


def _ted8_files(languages: Languages) -> dict[str, Origin]:
    files = {"valid": "dev", "test": "test", "train": "train"}
    return {split: Origin((f"all_talks_{file}.tsv",), (WITHOUT_NULL,)) for split, file in files.items()}


def _ted8_keys(groups: Sequence[Languages]) -> dict[str, str]:
    return {} if len(groups) == len(TED8) else {"data.pairs": _listed(map(pair_of, groups))}


def _opus100_splits(languages: Languages, origin: Callable[[str], Origin]) -> dict[str, Origin]:
    splits = ("train",) if TRAIN_ONLY & set(languages) else ("validation", "test", "train")
    return {split: origin(split) for split in splits}


def _opus100_hub(languages: Languages) -> dict[str, Origin]:
    pair = pair_of(languages)
    return _opus100_splits(languages, lambda split: Origin((Part("Helsinki-NLP/opus-100", split, pair),)))


def _opus100_files(languages: Languages) -> dict[str, Origin]:
    pair, names = pair_of(languages), {"validation": "dev"}
    return _opus100_splits(languages, lambda split: Origin((f"opus.{pair}-{names.get(split, split)}.{{lang}}",)))


def _opus100_keys(groups: Sequence[Languages]) -> dict[str, str]:
    """Both directions of each pair."""
    if len(groups) == len(OPUS100):
        return {}
    others = [language for group in groups for language in group if language != "en"]
    pairs = {language: (f"{language}-en", f"en-{language}") for language in others}
    return {
        "data.pairs": _listed(chain.from_iterable(pairs.values())),
        "data.train_only_pairs": _listed(chain.from_iterable(pairs[other] for other in others if other in TRAIN_ONLY)),
        "evaluation.average_languages": "[]",
    }


def _listed(names: Iterable[str]) -> str:
    """A list, as an override has it."""
    return f"[{', '.join(names)}]"


def _multi30k_hub(languages: Languages) -> dict[str, Origin]:
    splits = {"val": "validation", "test_2016_flickr": "test", "train": "train"}
    return {ours: Origin((Part("bentrevett/multi30k", theirs),)) for ours, theirs in splits.items()}


def _multi30k_files(languages: Languages) -> dict[str, Origin]:
    return {split: Origin((f"{split}.{{lang}}",)) for split in ("val", "test_2016_flickr", "train")}


def _multi30k_tokenised_files(languages: Languages) -> dict[str, Origin]:
    splits = ("val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco", "train")
    return {split: Origin((f"{split}.lc.norm.tok.{{lang}}",), (ONE_SPACE,)) for split in splits}


def _multi30k_keys(groups: Sequence[Languages]) -> dict[str, str]:
    (languages,) = groups
    return {} if "de" in languages else {"data.target_lang": languages[1]}


TRAIN_ONLY = {"an", "dz", "hy", "mn", "yo"}  # languages of OPUS-100 without held-out pairs
OPUS100 = (
    "af", "am", "an", "ar", "as", "az", "be", "bg", "bn", "br", "bs", "ca", "cs", "cy", "da",
    "de", "dz", "el", "eo", "es", "et", "eu", "fa", "fi", "fr", "fy", "ga", "gd", "gl", "gu",
    "ha", "he", "hi", "hr", "hu", "hy", "id", "ig", "is", "it", "ja", "ka", "kk", "km", "kn",
    "ko", "ku", "ky", "li", "lt", "lv", "mg", "mk", "ml", "mn", "mr", "ms", "mt", "my", "nb",
    "ne", "nl", "nn", "no", "oc", "or", "pa", "pl", "ps", "pt", "ro", "ru", "rw", "se", "sh",
    "si", "sk", "sl", "sq", "sr", "sv", "ta", "te", "tg", "th", "tk", "tr", "tt", "ug", "uk",
    "ur", "uz", "vi", "wa", "xh", "yi", "yo", "zh", "zu",
)  # fmt: skip
TED8 = {  # code in the papers, to that of the corpus and the training pairs in thousands (Wang et al. 2020)
    "aze": ("az", 5.94), "bel": ("be", 4.51), "glg": ("gl", 10.0), "slk": ("sk", 61.5),
    "tur": ("tr", 182), "rus": ("ru", 208), "por": ("pt-br", 185), "ces": ("cs", 103),
    "bos": ("bs", 5.64), "mar": ("mr", 9.84), "hin": ("hi", 18.79), "mkd": ("mk", 25.33),
    "ell": ("el", 134), "bul": ("bg", 174), "fra": ("fr", 192), "kor": ("ko", 205),
}  # fmt: skip
MULTI30K = {  # of multi30k/dataset, task 1
    "test_2016_flickr.cs": "45adb85f688de8407fddcbe1b36dca15d12aab868149b337e2576f2d6d2ff8d8",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2016_flickr.fr": "57a705a12ffb81f3da3539798bdaaaa8f2df5824de3a84e0f4ea378dab959b62",
    "train.cs": "2be68b38c8d586ff4f54eb13cc6e1baaaa053695b3f070d3038303a47f2268da",
    "train.de": "67aa53ff412b6af1f47c604a623e112e2c28c61519aa7cf8a5348af21722b67a",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "train.fr": "b47e97734763b5252a979d767955c270f2c93e9e79f8ef063f71088a26e3c5a9",
    "val.cs": "d53827e469b0a1ca8d57e9e26b2b64c4bc4b33f5479c7b03ae87ae5c882c3e33",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "val.fr": "05f2ed05aa5bf06567b3d7ad3121f6346ebd909265383dc79dbe08ef707b7bc2",
}
MULTI30K_TOKENISED = {  # of its version 7bee46bc, with single spaces: the text of github.com/LividWo/Revisit-MMT
    "test_2016_flickr.de": "c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4",
    "test_2016_flickr.en": "5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2",
    "test_2017_flickr.de": "02067e4a9402786a4fcb8c1b6f4307e4a5073ced64800abead5273b54f5f31f6",
    "test_2017_flickr.en": "c9d1dfd7a26add989382e534af235af9f0f658b2a30e7eb0efdaf142496ee54f",
    "test_2017_mscoco.de": "e2825990b8a4e5289d2cdba801d57c187810bab9b4f5d87a30c35800a0d871b6",
    "test_2017_mscoco.en": "fe69ae004d71c42ead0301e70c57de5b1b6b5fb7f52210d42b22801e98e656f3",
    "train.de": "cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505",
    "train.en": "4f7b25e9bbfc6be6ef66ea2cedd35e2c11c6fa1831979a054fba52e8d5b27c9d",
    "val.de": "97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00",
    "val.en": "46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec",
}
WMT17 = {
    "de-en/train": 5_906_184, "de-en/validation": 8_171, "de-en/test": 3_004,
    "fi-en/train": 2_656_542, "fi-en/validation": 8_870, "fi-en/test": 3_002,
    "lv-en/validation": 2_003, "lv-en/test": 2_001,  # the Hub has fewer training pairs than the paper
    "ru-en/train": 24_782_720, "ru-en/validation": 8_819, "ru-en/test": 3_001,
}  # fmt: skip
WMT = "not stated as one; each part (Europarl, Common Crawl, …) has terms of its own, and WMT asks to cite it"

CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            name="iwslt14-de-en",
            what="TED talks, German and English, lower-cased and tokenised",
            licence="CC BY-NC-ND 4.0: no commercial use, and changed copies may not be passed on",
            folder="iwslt14",
            file="{split}.{lang}",
            groups=(("de", "en"),),
            hub=lambda languages: _converted(
                "bbaaaa/iwslt14-de-en-preprocess", "de-en", valid="validation", test="test", train="train"
            ),
            files=_iwslt14_files,
            example="iwslt14_de_en_mat",
            counts={"train": 160_239, "valid": 7_283, "test": 6_750},
            merges=10_000,
        ),
        Corpus(
            name="wmt14-en-de",
            what="news, parliament and web text, English and German, tokenised",
            licence=WMT,
            folder="wmt14-en-de",
            file="{pair}/{split}.jsonl",
            groups=(("de", "en"),),
            hub=_wmt14_hub,
            files=_wmt14_files,
            example="wmt14_en_de_mat --data.name wmt14-en-de",
            counts={"train": 4_508_785, "validation": 3_000, "newstest2012": 3_003, "test": 3_003},
            merges=32_000,
        ),
        Corpus(
            name="wmt14-en-fr",
            what="news, parliament and web text, English and French, tokenised",
            licence=WMT,
            folder="wmt14-en-fr",
            file="{pair}/{split}.jsonl",
            groups=(("fr", "en"),),
            hub=_wmt14_french_hub,
            files=_wmt14_french_files,
            example="wmt14_en_fr_dwlstm --data.name wmt14-en-fr",
            counts={"train": 40_836_715, "validation": 6_003, "test": 3_003},
            merges=32_000,
        ),
        Corpus(
            name="wmt15-cs-en",
            what="news, parliament and web text, Czech and English, tokenised",
            licence=WMT,
            folder="wmt15-cs-en",
            file="{pair}/{split}.jsonl",
            groups=(("cs", "en"),),
            hub=_wmt15_hub,
            files=_wmt15_files,
            example="wmt15_cs_en_dwlstm_12 --data.name wmt15-cs-en",
            counts={"train": 959_768, "validation": 3_000, "test": 2_656},
            merges=32_000,
        ),
        Corpus(
            name="wmt17",
            what="news, parliament and web text, English with German, Finnish, Latvian and Russian, tokenised",
            licence=WMT,
            folder="wmt17",
            file="{pair}/{split}.jsonl",
            groups=(("de", "en"), ("fi", "en"), ("lv", "en"), ("ru", "en")),
            hub=_wmt17_hub,
            files=_wmt17_files,
            example="wmt14_en_de_multipath_6x6 --data.name wmt17",
            keys=_wmt17_keys,
            counts=WMT17,
            merges=32_000,
        ),
        Corpus(
            name="wmt19-de-fr",
            what="news, parliament and web text, German and French",
            licence=WMT,
            folder="wmt19_de_fr",
            file="{split}.{lang}",
            groups=(("de", "fr"),),
            hub=_wmt19_french_hub,
            files=None,
            example="wmt19_de_fr_mat",
            counts={"train": 9_824_476, "valid": 16_071},
        ),
        Corpus(
            name="wmt19-en-de",
            what="news, parliament and web text, English and German",
            licence=WMT,
            folder="wmt19_en_de",
            file="{split}.{lang}",
            groups=(("de", "en"),),
            hub=_wmt19_hub,
            files=None,
            example="wmt19_en_de_mat",
            counts={
                "train": 34_782_245,
                "newstest2013": 3_000,
                "newstest2014": 3_003,
                "newstest2018": 2_998,
                "newstest2019": 1_997,
            },
        ),
        Corpus(
            name="ted8",
            what="TED talks, English with eight related and eight diverse languages, tokenised as released",
            licence="CC BY-NC-ND 4.0: no commercial use, and changed copies may not be passed on",
            folder="ted8",
            file="{pair}/{split}.{lang}",
            groups=tuple(("eng", language) for language in TED8),
            hub=_ted8_hub,
            files=_ted8_files,
            example="ted8_related_o2m_latent_depth",
            keys=_ted8_keys,
            counts={f"eng-{language}/train": round(1000 * count) for language, (_, count) in TED8.items()},
            columns={"eng": "en", **{language: column for language, (column, _) in TED8.items()}},
        ),
        Corpus(
            name="opus100",
            what="OPUS-100, English with 99 languages, as released",
            licence="not stated; OPUS gathers corpora that each have terms of their own",
            folder="opus100",
            file="{pair}/{split}.jsonl",
            groups=tuple(tuple(sorted((language, "en"))) for language in OPUS100),
            hub=_opus100_hub,
            files=_opus100_files,
            example="opus100_m2m_dwlstm --data.name opus100",
            keys=_opus100_keys,
        ),
        Corpus(
            name="multi30k",
            what="captions of pictures in English, German, French and Czech, as released",
            licence="not stated; its authors ask to cite Elliott et al. 2016",
            folder="multi30k",
            file="{split}.{lang}",
            groups=(("en", "de", "fr", "cs"),),
            hub=_multi30k_hub,
            files=_multi30k_files,
            example="multi30k_en_de_vanilla",
            keys=_multi30k_keys,
            counts={"train": 29_000, "val": 1_014, "test_2016_flickr": 1_000},
            digests=MULTI30K,
            on_hub=("en", "de"),
        ),
        Corpus(
            name="multi30k-tokenised",
            what="the same captions in English and German, lower-cased and tokenised: data/task1/tok of "
            "https://github.com/multi30k/dataset",
            licence="not stated; its authors ask to cite Elliott et al. 2016",
            folder="multi30k_lowercased_tokenised",
            file="{split}.{lang}",
            groups=(("en", "de"),),
            hub=None,
            files=_multi30k_tokenised_files,
            example="multi30k_en_de_transformer_tiny",
            counts={
                "train": 29_000,
                "val": 1_014,
                "test_2016_flickr": 1_000,
                "test_2017_flickr": 1_000,
                "test_2017_mscoco": 461,
            },
            digests=MULTI30K_TOKENISED,
            merges=10_000,
            codes="bpe10k.codes.gz",
        ),
    )
}
