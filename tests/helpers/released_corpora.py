"""Small folders with the layout of the papers' released corpora, and a stand-in for the Hub with a few rows."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets.exceptions import DatasetNotFoundError
from sacrebleu.dataset import DATASETS

WORDS = {
    "de": "Haus",
    "en": "house",
    "fr": "maison",
    "cs": "dům",
    "lv": "māja",
    "fi": "talo",
    "ru": "дом",
    "af": "huis",
}


def sentences(lang: str, count: int, first: int = 0) -> list[str]:
    """Sentences that differ by a number, with punctuation that a tokenizer must split off."""
    return [f"Das {WORDS[lang]}, Nr. {number} ({lang})!" for number in range(first, first + count)]


def write(path: Path, lines: Iterable[str]) -> None:
    """Write lines to a file, compressed if its name ends with `.gz`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def segments(texts: Iterable[str]) -> list[str]:
    """The lines of a WMT test set in SGML, with these sentences."""
    return ["<srcset>", *(f'<seg id="{number}">{text}</seg>' for number, text in enumerate(texts, 1)), "</srcset>"]


def release_iwslt14(folder: Path) -> None:
    """Write WIT3's archive: training files have tags between the talks, test files have segments."""
    for lang in ("de", "en"):
        lines = ["<url>http://x</url>", "<keywords>a, b</keywords>", "<talkid>1</talkid>", "<title>Titel</title>"]
        lines += [" " + text for text in sentences(lang, 60)]
        lines += ["viel zu kurz" if lang == "de" else "much too long for the other one", "", "Wort " * 176]
        write(folder / "de-en" / f"train.tags.de-en.{lang}", lines)
        for number, test in enumerate(("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")):
            text = sentences(lang, 1, 1000 + number)[0]
            segments = ["<doc>", f'<seg id="1"> {text} </seg>', f'<seg id="2">It’s {number}.</seg>', "</doc>"]
            write(folder / "de-en" / f"IWSLT14.{test}.de-en.{lang}.xml", segments)


def release_wmt14(folder: Path) -> None:
    """Write the files of WMT 2014, in the folders of its archives."""
    for lang in ("de", "en"):
        write(
            folder / "training" / f"europarl-v7.de-en.{lang}.gz", [*sentences(lang, 20), "" if lang == "de" else "x"]
        )
        write(folder / f"commoncrawl.de-en.{lang}", ["It’s “well-known”\x07", *sentences(lang, 9, 100)])
        write(folder / "training" / f"news-commentary-v9.de-en.{lang}", sentences(lang, 10, 200))
        write(folder / "dev" / f"newstest2013.{lang}", sentences(lang, 3, 300))
        write(folder / "dev" / f"newstest2012.{lang}", sentences(lang, 4, 500))
        write(
            folder / "test-full" / f"newstest2014-deen-src.{lang}.sgm",
            segments(["It’s “well-known”", *sentences(lang, 2, 400)]),
        )


def release_wmt14_french(folder: Path) -> None:
    """Write the files of WMT 2014 for English and French."""
    for lang in ("fr", "en"):
        for first, part in enumerate(("europarl-v7", "commoncrawl", "undoc.2000", "news-commentary-v9")):
            write(folder / "training" / f"{part}.fr-en.{lang}", sentences(lang, 10, 10 * first))
        write(folder / f"giga-fren.release2.fixed.{lang}.gz", sentences(lang, 10, 40))
        for year, first in (("2012", 500), ("2013", 300)):
            write(folder / "dev" / f"newstest{year}.{lang}", sentences(lang, 3, first))
        write(folder / f"newstest2014-fren-src.{lang}.sgm", segments(sentences(lang, 3, 400)))


def release_wmt15(folder: Path) -> None:
    """Write the files of WMT 2015 for Czech and English."""
    for lang, side in (("cs", "src"), ("en", "ref")):
        for first, part in enumerate(("europarl-v7", "commoncrawl", "news-commentary-v10")):
            write(folder / f"{part}.cs-en.{lang}", sentences(lang, 10, 10 * first))
        write(folder / "dev" / f"newstest2013.{lang}", sentences(lang, 3, 300))
        write(folder / f"newstest2015-csen-{side}.{lang}.sgm", segments(sentences(lang, 3, 400)))


def release_wmt17(folder: Path) -> None:
    """Write the preprocessed release of WMT 2017 for Latvian."""
    for lang in ("lv", "en"):
        write(folder / "lv-en" / f"corpus.tc.{lang}.gz", sentences(lang, 30))
        write(folder / "lv-en" / f"newsdev2017.tc.{lang}", sentences(lang, 3, 300))
        write(folder / "lv-en" / f"newstest2017.tc.{lang}", sentences(lang, 3, 400))


def release_ted8(folder: Path) -> None:
    """Write the tables of TED talks: one column per language, and `__NULL__` where a translation is missing."""
    header = ["talk_name", "en", "az", "be", "pt-br", "pt"]
    for split, count in (("train", 30), ("dev", 4), ("test", 4)):
        rows = [header]
        for number in range(count):
            texts = [f"{code} {number} ." for code in header[1:]]
            if number % 3 == 2:
                texts[1] = "__NULL__"
            rows.append(["talk", *texts])
        write(folder / f"all_talks_{split}.tsv", ["\t".join(row) for row in rows])


def release_opus100(folder: Path) -> None:
    """Write OPUS-100's folders for Afrikaans."""
    for split, count in (("train", 30), ("dev", 3), ("test", 3)):
        for lang in ("af", "en"):
            write(folder / "supervised" / "af-en" / f"opus.af-en-{split}.{lang}", sentences(lang, count))


def release_multi30k(folder: Path) -> None:
    """Write task 1 of multi30k/dataset."""
    for split, count in (("train", 30), ("val", 3), ("test_2016_flickr", 3)):
        for lang in ("en", "de", "fr", "cs"):
            lines = [f"{text} " for text in sentences(lang, count)]  # corpora keep white space at the end of a line
            write(folder / "data" / "task1" / "raw" / f"{split}.{lang}.gz", lines)


def release_multi30k_tokenised(folder: Path) -> None:
    """Write Multi30k's captions as its authors tokenised them."""
    for split in ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco"):
        for lang in ("en", "de"):
            lines = [f"das  {WORDS[lang]} , nr. {number} !" for number in range(30 if split == "train" else 3)]
            write(folder / "data" / "task1" / "tok" / f"{split}.lc.norm.tok.{lang}", lines)


RELEASES = {
    "iwslt14-de-en": release_iwslt14,
    "wmt14-en-de": release_wmt14,
    "wmt14-en-fr": release_wmt14_french,
    "wmt15-cs-en": release_wmt15,
    "wmt17": release_wmt17,
    "ted8": release_ted8,
    "opus100": release_opus100,
    "multi30k": release_multi30k,
    "multi30k-tokenised": release_multi30k_tokenised,
}


class SmallArchive:
    """A stand-in for sacreBLEU's download of one test set: three segments in each raw file."""

    def __init__(self, name: str, folder: Path) -> None:
        self.dataset, self.folder, self.downloads = DATASETS[name], folder / name, 0

    def put(self, monkeypatch: Any) -> None:
        """Make sacreBLEU keep the test set in the folder, and call `download` instead of the internet."""
        monkeypatch.setattr(self.dataset, "_outdir", str(self.folder))
        monkeypatch.setattr(self.dataset, "_rawdir", str(self.folder / "raw"))
        monkeypatch.setattr(self.dataset, "maybe_download", self.download)

    def download(self) -> None:
        """Write the raw files, in place of sacreBLEU's download."""
        self.downloads += 1
        for file in {file for files in self.dataset.langpairs.values() for file in files}:
            texts = [f"{Path(file).name} {number}" for number in range(3)]
            write(self.folder / "raw" / file, segments(texts))


class SmallHub:
    """A stand-in for the Hub: its rows depend on the data set's name, config and split.

    Attributes:
        asked: the requests so far, in order: name, config, split, revision and data files.
        rows: number of training pairs of a data set.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.rows = 40

    def load(self, name: str, config: str | None = None, *, split: str, revision=None, data_files=None) -> Dataset:
        """Record a request and return its rows, in place of `load_dataset`."""
        self.asked.append(f"{name} {config} {split} {revision} {(data_files or {}).get(split)}")
        count = self.rows if split == "train" else 4
        if name.startswith("wmt/") or name == "Helsinki-NLP/opus-100":
            return Dataset.from_list([{"translation": row} for row in self._pairs(config, count, f"{name} {split}")])
        if name == "bbaaaa/iwslt14-de-en-preprocess":
            return Dataset.from_list([{"translation": row} for row in self._pairs("de-en", count, split)])
        if name == "neulab/ted_multi":
            codes = ["en", "az", "pt-br"]
            talks = [{"language": codes, "translation": [f"{code} {row} ." for code in codes]} for row in range(count)]
            talks.append({"language": ["en", "pt-br"], "translation": ["not in az", "x"]})
            return Dataset.from_list([{"translations": talk, "talk_name": "x"} for talk in talks])
        if name == "bentrevett/multi30k":
            return Dataset.from_list(list(self._pairs("en-de", count, split)))
        raise DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")

    def _pairs(self, config: str | None, count: int, origin: str) -> Iterable[dict[str, Any]]:
        for number in range(count):
            yield {lang: f"{lang}: {origin}, Nr. {number}!" for lang in str(config).split("-")}
