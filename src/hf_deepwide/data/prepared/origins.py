"""The origins of each corpus's splits: tables of the Hub, test sets of sacreBLEU, or original files.

`…_hub` and `…_files` take the languages of a group, and return the origin of each split. `…_keys` take several groups,
and return the overrides with which a recipe reads these groups.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from .cleaning import (
    DASHES_SPLIT,
    LOWERED,
    NORMALIZED,
    ONE_SPACE,
    STRAIGHT_APOSTROPHES,
    TOKENIZED,
    WITHOUT_EMPTY,
    WITHOUT_NULL,
    between,
    ratio_at_most,
)
from .corpus import Languages, Origin, Part, SacreBleuSet, pair_of

CONVERTED = "refs/convert/parquet"  # where the Hub keeps the tables of data sets that were loaded by scripts
# The steps of fairseq's scripts for WMT'14, which MAT's authors name. The scripts keep most punctuation of test sets.
WMT14_TRAIN = (NORMALIZED, DASHES_SPLIT, WITHOUT_EMPTY)
WMT14_HELD_OUT = (STRAIGHT_APOSTROPHES, DASHES_SPLIT)
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
TED8 = {  # code in the papers: (code in the corpus, thousands of training pairs), from Wang et al. 2020
    "aze": ("az", 5.94), "bel": ("be", 4.51), "glg": ("gl", 10.0), "slk": ("sk", 61.5),
    "tur": ("tr", 182), "rus": ("ru", 208), "por": ("pt-br", 185), "ces": ("cs", 103),
    "bos": ("bs", 5.64), "mar": ("mr", 9.84), "hin": ("hi", 18.79), "mkd": ("mk", 25.33),
    "ell": ("el", 134), "bul": ("bg", 174), "fra": ("fr", 192), "kor": ("ko", 205),
}  # fmt: skip


def _converted(name: str, folder: str, **splits: str) -> dict[str, Origin]:
    """Origins in a data set whose tables are at `CONVERTED`; `splits` maps our names of splits to those of the Hub."""
    return {
        ours: Origin((Part(name, theirs, revision=CONVERTED, data_files=f"{folder}/{theirs}/*.parquet"),))
        for ours, theirs in splits.items()
    }


def _newstest(name: str, languages: Languages) -> SacreBleuSet:
    """A test set of WMT before 2014: all languages have the same text, so that each side is read as a source."""
    other = languages[0]
    return SacreBleuSet(name, (f"{other}-en/src", f"en-{other}/src"))


def iwslt14_hub(languages: Languages) -> dict[str, Origin]:
    """The pairs of IWSLT 2014, as prepared by the script of fairseq."""
    name = "bbaaaa/iwslt14-de-en-preprocess"
    return _converted(name, "de-en", valid="validation", test="test", train="train")


def iwslt14_files(languages: Languages) -> dict[str, Origin]:
    """The files released by IWSLT, with the cleaning steps of fairseq's script."""
    tests = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
    return {
        "test": Origin(
            tuple(f"IWSLT14.{test}.de-en.{{lang}}.xml" for test in tests), (STRAIGHT_APOSTROPHES, TOKENIZED, LOWERED)
        ),
        "train": Origin(
            ("train.tags.de-en.{lang}",), (TOKENIZED, between(1, 175), ratio_at_most(1.5), LOWERED), held_out=23
        ),
    }


def wmt14_hub(languages: Languages) -> dict[str, Origin]:
    """The German pairs of WMT 2014, and newstest2012 from sacreBLEU."""
    return {
        "validation": Origin((Part("wmt/wmt14", "validation", "de-en"),), WMT14_HELD_OUT),
        "newstest2012": Origin((_newstest("wmt12", languages),), WMT14_HELD_OUT),
        "test": Origin((Part("wmt/wmt14", "test", "de-en"),), WMT14_HELD_OUT),
        "train": Origin((Part("wmt/wmt14", "train", "de-en"),), WMT14_TRAIN),
    }


def wmt14_files(languages: Languages) -> dict[str, Origin]:
    """The files that WMT 2014 offers for German."""
    train = ("europarl-v7.de-en.{lang}", "commoncrawl.de-en.{lang}", "news-commentary-v9.de-en.{lang}")
    return {
        "validation": Origin(("newstest2013.{lang}",), WMT14_HELD_OUT),
        "newstest2012": Origin(("newstest2012.{lang}",), WMT14_HELD_OUT),
        "test": Origin(("newstest2014-deen-src.{lang}.sgm",), WMT14_HELD_OUT),
        "train": Origin(train, WMT14_TRAIN),
    }


def wmt14_french_hub(languages: Languages) -> dict[str, Origin]:
    """The French pairs of WMT 2014.

    Both papers validate on newstest2012 and newstest2013 together. They name no cleaning step except the tokenizer, or
    not even this step.
    """
    earlier = (_newstest("wmt12", languages), Part("wmt/wmt14", "validation", "fr-en"))
    return {
        "validation": Origin(earlier, (TOKENIZED,)),
        "test": Origin((Part("wmt/wmt14", "test", "fr-en"),), (TOKENIZED,)),
        "train": Origin((Part("wmt/wmt14", "train", "fr-en"),), (TOKENIZED, WITHOUT_EMPTY)),
    }


def wmt14_french_files(languages: Languages) -> dict[str, Origin]:
    """The files that WMT 2014 offers for French."""
    parts = ("europarl-v7", "commoncrawl", "undoc.2000", "news-commentary-v9")
    train = (*(f"{part}.fr-en.{{lang}}" for part in parts), "giga-fren.release2.fixed.{lang}")
    return {
        "validation": Origin(("newstest2012.{lang}", "newstest2013.{lang}"), (TOKENIZED,)),
        "test": Origin(("newstest2014-fren-src.{lang}.sgm",), (TOKENIZED,)),
        "train": Origin(train, (TOKENIZED, WITHOUT_EMPTY)),
    }


def wmt15_hub(languages: Languages) -> dict[str, Origin]:
    """The Czech pairs of WMT 2015; newstest2013 is the validation set."""
    return {
        "validation": Origin((_newstest("wmt13", languages),), (TOKENIZED,)),
        "test": Origin((Part("wmt/wmt15", "test", "cs-en"),), (TOKENIZED,)),
        "train": Origin((Part("wmt/wmt15", "train", "cs-en"),), (TOKENIZED, WITHOUT_EMPTY)),
    }


def wmt15_files(languages: Languages) -> dict[str, Origin]:
    """The files that WMT 2015 offers for Czech."""
    train = ("europarl-v7.cs-en.{lang}", "commoncrawl.cs-en.{lang}", "news-commentary-v10.cs-en.{lang}")
    return {
        "validation": Origin(("newstest2013.{lang}",), (TOKENIZED,)),
        "test": Origin(("newstest2015-csen-{side}.{lang}.sgm",), (TOKENIZED,)),
        "train": Origin(train, (TOKENIZED, WITHOUT_EMPTY)),
    }


def wmt19_french_hub(languages: Languages) -> dict[str, Origin]:
    """The French-German pairs of WMT 2019.

    The test sets of 2008 to 2013 have the same text in all languages. So they give German-French pairs, which are the
    validation set.
    """
    years = tuple(SacreBleuSet(f"wmt{year:02}", ("de-en/src", "fr-en/src")) for year in range(8, 14))
    return {
        "valid": Origin(years),
        "newstest2019": Origin((SacreBleuSet("wmt19", ("de-fr/src", "de-fr/ref")),)),
        "train": Origin((Part("wmt/wmt19", "train", "fr-de"),), (WITHOUT_EMPTY,)),
    }


def wmt19_hub(languages: Languages) -> dict[str, Origin]:
    """The German-English pairs of WMT 2019, and the test sets of four years."""
    tests = {"newstest2014": "wmt14/full", "newstest2018": "wmt18", "newstest2019": "wmt19"}
    return {
        "newstest2013": Origin((_newstest("wmt13", languages),)),
        **{ours: Origin((SacreBleuSet(theirs, ("en-de/ref", "en-de/src")),)) for ours, theirs in tests.items()},
        "train": Origin((Part("wmt/wmt19", "train", "de-en"),), (WITHOUT_EMPTY,)),
    }


def wmt17_hub(languages: Languages) -> dict[str, Origin]:
    """The pairs of WMT 2017. All its development sets together are the validation set.

    Most development sets are the test sets of earlier years, and are read from the data sets of those years.
    """
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


def wmt17_files(languages: Languages) -> dict[str, Origin]:
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


def wmt17_keys(groups: Sequence[Languages]) -> dict[str, str]:
    """The overrides for the first of the groups.

    The paper shares a vocabulary only between German and English. Here each pair has a joint vocabulary, and the pairs
    without German have separate embeddings instead.
    """
    apart = ("model.share_encoder_decoder_embeddings", "model.tie_word_embeddings")
    own = {} if groups[0] == ("de", "en") else dict.fromkeys(apart, "false")
    return {"data.config": pair_of(groups[0]), "data.target_lang": groups[0][0]} | own


def ted8_hub(languages: Languages) -> dict[str, Origin]:
    """The talks on the Hub, without the sentences that are missing in a language."""
    splits = _converted("neulab/ted_multi", "plain_text", valid="validation", test="test", train="train")
    return {split: Origin(origin.places, (WITHOUT_NULL,)) for split, origin in splits.items()}


def ted8_files(languages: Languages) -> dict[str, Origin]:
    """The released tables, without the sentences that are missing in a language."""
    files = {"valid": "dev", "test": "test", "train": "train"}
    return {split: Origin((f"all_talks_{file}.tsv",), (WITHOUT_NULL,)) for split, file in files.items()}


def ted8_keys(groups: Sequence[Languages]) -> dict[str, str]:
    """The override that lists the pairs; empty if all pairs are read."""
    return {} if len(groups) == len(TED8) else {"data.pairs": _listed(map(pair_of, groups))}


def _opus100_splits(languages: Languages, origin: Callable[[str], Origin]) -> dict[str, Origin]:
    splits = ("train",) if TRAIN_ONLY & set(languages) else ("validation", "test", "train")
    return {split: origin(split) for split in splits}


def opus100_hub(languages: Languages) -> dict[str, Origin]:
    """The splits of a pair; some languages have training pairs only."""
    pair = pair_of(languages)
    return _opus100_splits(languages, lambda split: Origin((Part("Helsinki-NLP/opus-100", split, pair),)))


def opus100_files(languages: Languages) -> dict[str, Origin]:
    """The released files of a pair; some languages have training pairs only."""
    pair, names = pair_of(languages), {"validation": "dev"}
    return _opus100_splits(languages, lambda split: Origin((f"opus.{pair}-{names.get(split, split)}.{{lang}}",)))


def opus100_keys(groups: Sequence[Languages]) -> dict[str, str]:
    """The overrides that list both directions of each pair; empty if all pairs are read."""
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
    """Return a list in the form that an override takes."""
    return f"[{', '.join(names)}]"


def multi30k_hub(languages: Languages) -> dict[str, Origin]:
    """The English and German splits on the Hub; their test set is that of 2016."""
    splits = {"val": "validation", "test_2016_flickr": "test", "train": "train"}
    return {ours: Origin((Part("bentrevett/multi30k", theirs),)) for ours, theirs in splits.items()}


def multi30k_files(languages: Languages) -> dict[str, Origin]:
    """The released files of task 1."""
    return {split: Origin((f"{split}.{{lang}}",)) for split in ("val", "test_2016_flickr", "train")}


def multi30k_tokenised_files(languages: Languages) -> dict[str, Origin]:
    """The tokenised files of task 1, with single spaces."""
    splits = ("val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco", "train")
    return {split: Origin((f"{split}.lc.norm.tok.{{lang}}",), (ONE_SPACE,)) for split in splits}


def multi30k_keys(groups: Sequence[Languages]) -> dict[str, str]:
    """The override of the target language; empty if German is among the languages."""
    (languages,) = groups
    return {} if "de" in languages else {"data.target_lang": languages[1]}
