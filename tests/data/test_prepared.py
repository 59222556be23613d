"""The corpora of the papers, prepared from small folders of the same shape and from a small Hub."""

import dataclasses
import gzip
import hashlib
import json
import re
import shlex
import shutil
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from datasets import DatasetDict, load_dataset, load_from_disk
from released_corpora import RELEASES, SmallArchive, SmallHub, sentences, write
from sacrebleu.dataset import DATASETS
from sacremoses import MosesPunctNormalizer

import hf_deepwide_cli
from hf_deepwide import durable
from hf_deepwide.data.arguments import Places
from hf_deepwide.data.bpe_codes import read_codes
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.prepared import prepare, sources
from hf_deepwide.data.prepared.catalogue import CORPORA
from hf_deepwide.data.prepared.cleaning import NORMALIZED, TOKENIZED
from hf_deepwide.data.prepared.code import CODE_CORPORA
from hf_deepwide.data.prepared.corpus import SacreBleuSet, pair_of
from hf_deepwide.data.prepared.prepare import Preparation, cleaned
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.errors import UserError
from hf_deepwide.runs.recipe import load_recipe
from hf_deepwide_cli import packaged

CONTROL = Places().resolve("multi30k_lowercased_tokenised")
ON_HUB = [name for name, corpus in CORPORA.items() if corpus.hub is not None]
LANGUAGES = {"wmt17": ["lv"], "ted8": ["aze", "por"], "opus100": ["af"]}  # the languages in the small folders


@pytest.fixture(autouse=True)
def no_root(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_DEEPWIDE_DATA", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


TEST_SETS = {
    place.name
    for name in ON_HUB
    for origin in CORPORA[name].hub(CORPORA[name].groups[0]).values()
    for place in origin.places
    if isinstance(place, SacreBleuSet)
}


YEARS = {"wmt09", "wmt10", "wmt11", "wmt12"}  # the page names these test sets as a range


@pytest.fixture
def archives(monkeypatch, tmp_path):
    """Test sets of sacreBLEU, by name."""
    small = {name: SmallArchive(name, tmp_path / "sacrebleu") for name in sorted(TEST_SETS)}
    for archive in small.values():
        archive.put(monkeypatch)
    return small


@pytest.fixture
def hub(monkeypatch, archives):
    small = SmallHub()
    monkeypatch.setattr(sources, "load_dataset", small.load)
    return small


def released(name: str, folder: Path) -> Path:
    RELEASES[name](folder / "released")
    return folder / "released"


def call(monkeypatch, *words) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "data", *map(str, words)])
    hf_deepwide_cli.main()


def error_of(monkeypatch, capsys, *words) -> str:
    """Return the error message of the command, which must be one line."""
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, *words)
    assert ended.value.code == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    return told[0]


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def texts(path: Path, lang: str) -> list[str]:
    return [json.loads(line)["translation"][lang] for line in lines(path)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_recipe_reads(command: str) -> None:
    """Check that the recipe in the command reads all splits of the prepared corpus."""
    recipe, *overrides = shlex.split(command)
    data = load_recipe(recipe, overrides).data
    for split in ("train", "validation", "test"):
        assert len(load_parallel(data, split)) > 0


def printed(told: str) -> str:
    """Return the arguments of `hf-deepwide train` in the last line that is printed."""
    start, found, command = told.strip().splitlines()[-1].partition("train: hf-deepwide train ")
    assert (start, found) == ("", "train: hf-deepwide train ")
    return command


@pytest.mark.parametrize("name", [name for name, corpus in CORPORA.items() if corpus.files is not None])
def test_prepares_what_recipes_read_from_files(name, tmp_path, monkeypatch, capsys):
    source = released(name, tmp_path)
    call(
        monkeypatch, name, "--source", source, "--output", tmp_path, "--unchecked",
        *(["--languages", *LANGUAGES[name]] if name in LANGUAGES else []),
    )  # fmt: skip
    told = capsys.readouterr().out
    assert CORPORA[name].licence in told
    assert str(source) in told
    assert f"--data.root {tmp_path}" in told
    assert_recipe_reads(printed(told))


@pytest.mark.parametrize("name", ON_HUB)
def test_prepares_what_recipes_read_from_the_hub(name, tmp_path, hub):
    preparation = Preparation(CORPORA[name], tmp_path, languages=LANGUAGES.get(name), unchecked=True)
    preparation.run()
    assert_recipe_reads(f"{preparation.example} --data.root {tmp_path}")


@pytest.mark.parametrize(
    ("name", "languages", "pairs"),
    [
        ("ted8", ["por"], ["eng-por"]),
        ("ted8", ["aze", "por"], ["eng-aze", "eng-por"]),
        ("opus100", ["af", "fr"], ["af-en", "en-af", "fr-en", "en-fr"]),
        ("opus100", ["an", "af"], ["af-en", "en-af", "an-en", "en-an"]),  # `an` has no held-out pairs
    ],
)
def test_the_printed_command_names_only_what_was_prepared(name, languages, pairs, tmp_path, hub, monkeypatch, capsys):
    call(monkeypatch, name, "--languages", *languages, "--output", tmp_path, "--unchecked")
    command = printed(capsys.readouterr().out)
    assert_recipe_reads(command)
    recipe, *overrides = shlex.split(command)
    assert load_recipe(recipe, overrides).data.pairs == pairs


def test_the_corpus_of_the_control_is_made_of_the_tokenised_captions(tmp_path, monkeypatch, capsys):
    source, corpus = released("multi30k-tokenised", tmp_path), "multi30k-tokenised"
    (source / "data" / "images.jsonl").write_text("{}\n")  # not taken for a data set: the Hub lacks this corpus
    call(monkeypatch, corpus, "--source", source, "--output", tmp_path, "--unchecked", "--bpe")
    command = printed(capsys.readouterr().out)
    codes = tmp_path / "multi30k_lowercased_tokenised" / "bpe10k.codes.gz"
    recipe = load_recipe("multi30k_en_de_transformer_tiny", [f"--data.root={tmp_path}"])
    assert recipe.data.resolve(recipe.tokenizer.codes) == codes
    assert "--tokenizer.codes multi30k_lowercased_tokenised/bpe10k.codes.gz" in command
    assert_recipe_reads(command)
    assert lines(codes.with_name("val.de")) == [f"das Haus , nr. {number} !" for number in range(3)]
    assert read_codes(codes)
    written = contents(tmp_path)
    call(monkeypatch, corpus, "--source", source, "--output", tmp_path, "--unchecked", "--bpe")
    assert contents(tmp_path) == written


@pytest.mark.skipif(not CONTROL.is_dir(), reason="needs the corpus of the control")
def test_the_corpus_of_the_control_has_the_published_text(tmp_path):
    for split, file in CORPORA["multi30k-tokenised"].files(("en", "de")).items():
        for lang in ("en", "de"):
            (tmp_path / "released").mkdir(exist_ok=True)
            name = file.places[0].replace("{lang}", lang)
            (tmp_path / "released" / f"{name}.gz").symlink_to(CONTROL / f"{split}.{lang}.gz")
    Preparation(CORPORA["multi30k-tokenised"], tmp_path, tmp_path / "released").run()


def test_the_printed_command_names_another_language(tmp_path, monkeypatch, capsys):
    source = released("multi30k", tmp_path)
    words = ("--source", source, "--output", tmp_path, "--unchecked", "--languages", "fr", "cs")
    call(monkeypatch, "multi30k", *words)
    command = printed(capsys.readouterr().out)
    assert "--data.target_lang fr" in command
    assert_recipe_reads(command)


def test_languages_without_a_validation_set_have_no_command(tmp_path, hub, monkeypatch, capsys):
    call(monkeypatch, "opus100", "--languages", "an", "--output", tmp_path, "--unchecked")
    last = capsys.readouterr().out.splitlines()[-1]
    assert "no validation set" in last
    assert "hf-deepwide train" not in last


def test_iwslt14_is_cleaned_as_the_script_does(tmp_path):
    """Of the 61 pairs that are left, the 23rd and the 46th are held out. The other pairs are for training."""
    Preparation(CORPORA["iwslt14-de-en"], tmp_path, released("iwslt14-de-en", tmp_path), unchecked=True).run()
    folder = tmp_path / "iwslt14"
    for lang, word in (("de", "haus"), ("en", "house")):
        kept = ["titel", *(f"das {word} , nr. {number} ( {lang} ) !" for number in range(60))]
        assert lines(folder / f"train.{lang}") == [text for place, text in enumerate(kept, 1) if place % 23]
        assert lines(folder / f"valid.{lang}") == [kept[22], kept[45]]
        apostrophe = "&apos;"
        assert lines(folder / f"test.{lang}")[:2] == [
            f"das {word} , nr. 1000 ( {lang} ) !",
            f"it {apostrophe}s 0 ." if lang == "en" else f"it {apostrophe} s 0 .",
        ]
        assert len(lines(folder / f"test.{lang}")) == 10
    left_out = json.loads((folder / "manifest.json").read_text())["files"]["train.de"]["left_out"]
    assert sorted(left_out.values()) == [1, 2]  # by the ratio: 1; by length: an empty pair and a pair of 176 words


def test_wmt14_is_cleaned_as_the_script_does_and_keeps_its_order(tmp_path):
    """Training text has its punctuation normalised, test sets only apostrophes. Dashes in words are always split."""
    Preparation(CORPORA["wmt14-en-de"], tmp_path, released("wmt14-en-de", tmp_path), unchecked=True).run()
    folder = tmp_path / "wmt14-en-de" / "de-en"
    first, second = ([f"Das house , Nr. {n} ( en ) !" for n in numbers] for numbers in (range(20), range(100, 109)))
    third = [f"Das house , Nr. {number} ( en ) !" for number in range(200, 210)]
    normal = "It &apos;s &quot; well @-@ known &quot;"
    assert texts(folder / "train.jsonl", "en") == [*first, normal, *second, *third]
    assert texts(folder / "validation.jsonl", "de")[0] == "Das Haus , Nr. 300 ( de ) !"
    assert texts(folder / "test.jsonl", "en")[0] == "It &apos;s “ well @-@ known ”"
    assert len(texts(folder / "test.jsonl", "de")) == 3


@pytest.mark.parametrize(
    ("lang", "text", "expected"),
    [
        ("en", "tab\there soft\u00adhyphen", "tab here soft hyphen"),
        ("en", "the players’ house", 'the players" house'),
        ("fr", "il dit\u00a0«\u00a0oui\u00a0»\u00a0et part", 'il dit "oui" et part'),
    ],
)
def test_punctuation_is_normalised_as_by_the_scripts_of_moses(lang, text, expected):
    """Compare with the output of normalize-punctuation.perl, followed by remove-non-printing-char.perl."""
    assert NORMALIZED.made_for([lang])((text,)) == (expected,)


def test_the_sides_of_wmt15_have_the_names_of_its_archive(tmp_path):
    Preparation(CORPORA["wmt15-cs-en"], tmp_path, released("wmt15-cs-en", tmp_path), unchecked=True).run()
    folder = tmp_path / "wmt15-cs-en" / "cs-en"
    assert [texts(folder / "test.jsonl", language)[0] for language in ("cs", "en")] == [
        "Das dům , Nr . 400 ( cs ) !", "Das house , Nr. 400 ( en ) !"
    ]  # fmt: skip


def test_wmt14_is_cleaned_alike_from_the_hub_and_from_files():
    on_hub, as_files = CORPORA["wmt14-en-de"].hub(("de", "en")), CORPORA["wmt14-en-de"].files(("de", "en"))
    assert {split: origin.steps for split, origin in on_hub.items()} == {
        split: origin.steps for split, origin in as_files.items()
    }


def test_test_sets_come_from_sacrebleu(tmp_path, hub, archives):
    """In WMT test sets before 2014 all languages have the same text, so that both sides are read as sources."""
    for _ in range(2):
        Preparation(CORPORA["wmt14-en-de"], tmp_path, unchecked=True).run()
    folder = tmp_path / "wmt14-en-de" / "de-en"
    assert texts(folder / "newstest2012.jsonl", "de") == [
        f"newstest2012 @-@ src.de.sgm {number}" for number in range(3)
    ]
    assert texts(folder / "newstest2012.jsonl", "en") == [
        f"newstest2012 @-@ src.en.sgm {number}" for number in range(3)
    ]
    both = ["--data.name", "wmt14-en-de", "--data.root", str(tmp_path), "--data.validation", "newstest2012+validation"]
    assert len(load_parallel(load_recipe("wmt14_en_de_dwlstm", both).data, "validation")) == 3 + 4
    assert archives["wmt12"].downloads == 2  # once for each direction, although the preparation ran twice


def test_wmt19_has_six_test_sets_to_validate_on(tmp_path, hub):
    Preparation(CORPORA["wmt19-de-fr"], tmp_path, unchecked=True).run()
    folder = tmp_path / "wmt19_de_fr"
    years = range(2008, 2014)
    assert lines(folder / "valid.fr") == [
        f"newstest{year}-src.fr.sgm {number}" for year in years for number in range(3)
    ]
    assert lines(folder / "newstest2019.de") == [f"newstest2019-defr-src.de.sgm {number}" for number in range(3)]
    assert lines(folder / "newstest2019.fr") == [f"newstest2019-defr-ref.fr.sgm {number}" for number in range(3)]


def test_wmt19_is_tested_into_german(tmp_path, hub):
    Preparation(CORPORA["wmt19-en-de"], tmp_path, unchecked=True).run()
    folder = tmp_path / "wmt19_en_de"
    assert lines(folder / "newstest2018.en") == [f"newstest2018-ende-src.en.sgm {number}" for number in range(3)]
    assert lines(folder / "newstest2018.de") == [f"newstest2018-ende-ref.de.sgm {number}" for number in range(3)]


def test_a_test_set_that_cannot_be_fetched_ends_in_one_line(tmp_path, hub, monkeypatch, capsys):
    def offline():
        raise OSError("no route to host")

    monkeypatch.setattr(DATASETS["wmt13"], "maybe_download", offline)
    told = error_of(monkeypatch, capsys, "wmt15-cs-en", "--output", tmp_path, "--unchecked")
    assert "wmt13 of sacreBLEU (cs-en/src, en-cs/src) could not be fetched: no route to host" in told
    assert "sacrebleu -t wmt13 -l cs-en" in told


def test_wmt17_joins_the_development_sets_of_earlier_years(tmp_path, hub):
    Preparation(CORPORA["wmt17"], tmp_path, languages=["fi", "de"], unchecked=True).run()
    folder = tmp_path / "wmt17"
    origins = [
        re.search(r"wmt\d\d \w+", text.replace(" / ", "/"))[0]
        for text in texts(folder / "fi-en" / "validation.jsonl", "fi")
    ]
    assert origins == 4 * ["wmt15 validation"] + 4 * ["wmt15 test"] + 4 * ["wmt17 validation"]
    assert len(texts(folder / "de-en" / "validation.jsonl", "de")) == 12
    assert (folder / "README.md").read_text().count("config_name") == 2


def test_a_part_may_be_the_first_rows(hub):
    part = CORPORA["wmt17"].hub(("fi", "en"))["test"].places[0]
    assert part.first == 3_002
    assert len(sources.open_part(dataclasses.replace(part, first=2), None)) == 2


def test_ted8_leaves_out_what_is_not_translated(tmp_path, hub):
    source = released("ted8", tmp_path)
    Preparation(CORPORA["ted8"], tmp_path / "files", source, ["aze", "por"], unchecked=True).run()
    Preparation(CORPORA["ted8"], tmp_path / "hub", None, ["aze"], unchecked=True).run()
    folder = tmp_path / "files" / "ted8"
    assert lines(folder / "eng-aze" / "valid.eng") == ["en 0 .", "en 1 .", "en 3 ."]
    assert lines(folder / "eng-aze" / "valid.aze") == ["az 0 .", "az 1 .", "az 3 ."]
    assert lines(folder / "eng-por" / "test.por")[2] == "pt-br 2 ."  # Brazilian is the larger corpus, as in the paper
    assert lines(tmp_path / "hub" / "ted8" / "eng-aze" / "test.aze") == [f"az {number} ." for number in range(4)]


def test_opus100_has_no_held_out_pairs_of_five_languages():
    recipe = load_recipe("opus100_m2m_dwlstm").data
    corpus = CORPORA["opus100"]
    small = {pair_of(group) for group in corpus.groups if set(corpus.hub(group)) == {"train"}}
    assert {"-".join(sorted(pair.split("-"))) for pair in recipe.train_only_pairs} == small
    assert {"-".join(sorted(pair.split("-"))) for pair in recipe.pairs} == set(map(pair_of, corpus.groups))


def test_the_hub_is_asked_for_tables_of_scripts_at_their_revision(tmp_path, hub):
    Preparation(CORPORA["iwslt14-de-en"], tmp_path, unchecked=True).run()
    assert hub.asked[0] == (
        "bbaaaa/iwslt14-de-en-preprocess None validation refs/convert/parquet de-en/validation/*.parquet"
    )


MULTI30K = Places().resolve("multi30k")  # before the fixture hides it
CONTROL = Places().resolve("multi30k_lowercased_tokenised")


@pytest.mark.skipif(not (MULTI30K / "train.cs.gz").is_file(), reason="Multi30k is not at $HF_DEEPWIDE_DATA")
def test_multi30k_equals_the_files(tmp_path):
    """Counts and digests are checked, too."""
    Preparation(CORPORA["multi30k"], tmp_path, MULTI30K).run()
    for file in MULTI30K.glob("*.gz"):
        assert (tmp_path / "multi30k" / file.stem).read_bytes() == gzip.decompress(file.read_bytes())


@pytest.mark.skipif(not (CONTROL / "val.de.gz").is_file(), reason="the control's corpus is not at $HF_DEEPWIDE_DATA")
@pytest.mark.parametrize("lang", ["en", "de"])
def test_tokenises_as_the_published_text_of_the_control(lang):
    """The control's authors also unified quotation marks; no step here does so. One line in a thousand may differ."""
    alike = MosesPunctNormalizer(lang).normalize
    raw = [(alike(text.lower()),) for text in read_lines(MULTI30K / f"val.{lang}.gz")]
    tokenized = cleaned(raw, [TOKENIZED], (lang,), Counter())
    published = list(read_lines(CONTROL / f"val.{lang}.gz"))
    different = sum(row != (text,) for row, text in zip(tokenized, published, strict=True))
    assert different <= len(published) / 1000


def test_copies_of_data_sets_are_read_in_place_of_the_hub(tmp_path, hub, monkeypatch):
    Preparation(CORPORA["wmt14-en-de"], tmp_path / "first", unchecked=True).run()
    clone = tmp_path / "copies" / "wmt" / "wmt14"
    shutil.copytree(tmp_path / "first" / "wmt14-en-de", clone)  # the card of this copy names configs, as on the Hub
    monkeypatch.setattr(sources, "load_dataset", load_dataset)
    Preparation(CORPORA["wmt14-en-de"], tmp_path / "second", tmp_path / "copies", unchecked=True).run()
    name = "wmt14-en-de/de-en/test.jsonl"
    assert len(lines(tmp_path / "second" / name)) == len(lines(tmp_path / "first" / name)) == 4


def test_saved_data_sets_are_read(tmp_path, hub):
    splits = {split: hub.load("bentrevett/multi30k", split=split) for split in ("train", "validation", "test")}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    Preparation(CORPORA["multi30k"], tmp_path, tmp_path / "saved", ["de"], unchecked=True).run()
    assert lines(tmp_path / "multi30k" / "val.de") == [f"de: validation, Nr. {number}!" for number in range(4)]


def test_clones_of_the_tables_of_scripts_are_read(tmp_path, hub, monkeypatch):
    """Each split has a folder of tables, and no dataset card names the tables."""
    for split in ("train", "validation", "test"):
        folder = tmp_path / "clone" / "de-en" / split
        folder.mkdir(parents=True)
        hub.load("bbaaaa/iwslt14-de-en-preprocess", split=split).to_parquet(folder / "0000.parquet")
    monkeypatch.setattr(sources, "load_dataset", load_dataset)
    Preparation(CORPORA["iwslt14-de-en"], tmp_path, tmp_path / "clone", unchecked=True).run()
    assert lines(tmp_path / "iwslt14" / "valid.en") == [f"en: validation, Nr. {number}!" for number in range(4)]


def test_the_commit_of_the_hub_is_kept(tmp_path, hub):
    commit = "0123456789abcdef0123456789abcdef01234567"
    for folder, found in ((commit, commit), (commit + 24 * "0", None)):  # a digest of local files is longer
        hub.load("wmt/wmt14", "de-en", split="test").save_to_disk(tmp_path / "wmt___wmt14" / folder)
        assert sources.commit_of(load_from_disk(tmp_path / "wmt___wmt14" / folder)) == found


# --- A second start.


def test_a_second_start_makes_nothing_again(tmp_path, hub):
    Preparation(CORPORA["wmt14-en-de"], tmp_path, unchecked=True).run()
    before, asked = contents(tmp_path), len(hub.asked)
    Preparation(CORPORA["wmt14-en-de"], tmp_path, unchecked=True).run()
    assert contents(tmp_path) == before
    assert len(hub.asked) == asked == 3  # test sets of sacreBLEU do not come from the Hub


@pytest.mark.parametrize("stop", ["reading", "naming"])
def test_an_interrupted_start_is_made_whole(stop, tmp_path, hub, monkeypatch):
    """The first start stops among the training pairs, or when only one of two files has its final name."""
    whole = tmp_path / "whole"
    Preparation(CORPORA["multi30k"], whole, unchecked=True).run()
    hub.asked.clear()

    def interrupted(dataset, part, *others):
        for number, row in enumerate(sources.rows_of(dataset, part, *others)):
            if part.split == "train" and number == 17:
                raise KeyboardInterrupt
            yield row

    def named_once(draft, final, publish=durable.publish):
        if final.name == "train.en":
            raise KeyboardInterrupt
        publish(draft, final)

    resumed = Preparation(CORPORA["multi30k"], tmp_path / "resumed", unchecked=True)
    with monkeypatch.context() as patch:
        if stop == "reading":
            patch.setattr(prepare, "rows_of", interrupted)
        else:
            patch.setattr(durable, "publish", named_once)
        with pytest.raises(KeyboardInterrupt):
            resumed.run()
    left = set(contents(tmp_path / "resumed" / "multi30k"))
    assert left & {"train.de", "train.en"} == (set() if stop == "reading" else {"train.de"})
    assert {"val.en", "val.de", "manifest.json"} < left
    Preparation(CORPORA["multi30k"], tmp_path / "resumed", unchecked=True).run()
    assert contents(tmp_path / "resumed") == contents(whole)
    assert [asked.split()[2] for asked in hub.asked] == ["validation", "test", "train", "train"]


@pytest.mark.parametrize("spoil", ["changed", "foreign", "otherwise", "broken", "another"])
def test_what_is_there_is_never_lost(spoil, tmp_path, hub, monkeypatch, capsys):
    folder, source = tmp_path / "out" / "multi30k", []
    if spoil == "foreign":
        write(folder / "val.de", ["mine"])
    else:
        Preparation(CORPORA["multi30k"], tmp_path / "out", unchecked=True).run()
    if spoil == "changed":
        write(folder / "val.de", ["mine"])
    elif spoil == "otherwise":
        source = ["--source", released("multi30k", tmp_path)]
    elif spoil == "broken":
        (folder / "manifest.json").write_text("{")
    elif spoil == "another":
        (folder / "manifest.json").write_text('{"corpus": "ted8", "files": {}}')
    before = contents(folder)
    told = error_of(monkeypatch, capsys, "multi30k", "--output", tmp_path / "out", "--unchecked", *source)
    expected = {
        "changed": "val.de was changed since it was made",
        "foreign": "val.de is there, but was not made by this command",
        "otherwise": "in another way than asked for now",
        "broken": "manifest.json is damaged",
        "another": "manifest.json belongs to another corpus than multi30k",
    }
    assert expected[spoil] in told
    assert contents(folder) == before


def test_files_stay_beside_those_that_they_are_aligned_with(tmp_path, monkeypatch, capsys):
    """All pairs share the English text: another release of it for one pair would misalign the other pairs."""
    source, folder = released("multi30k", tmp_path), tmp_path / "out" / "multi30k"
    command = ("multi30k", "--source", source, "--output", tmp_path / "out", "--unchecked", "--languages")
    call(monkeypatch, *command, "de")
    before = {name: text for name, text in contents(folder).items() if name != "manifest.json"}
    (english,) = source.rglob("train.en.gz")
    whole = gzip.decompress(english.read_bytes())
    english.write_bytes(gzip.compress(whole.replace(b"1", b"one")))
    assert "train.en was made of other text" in error_of(monkeypatch, capsys, *command, "fr")
    assert contents(folder).items() >= before.items()
    assert not (folder / "train.fr").exists()
    english.write_bytes(gzip.compress(whole))
    call(monkeypatch, *command, "fr")
    assert contents(folder).items() >= before.items()
    assert (folder / "train.fr").is_file()


@pytest.mark.parametrize(
    "text",
    ['<seg id="1">one</seg> <seg id="2">two</seg>', '<seg id="1">one\ntwo</seg>'],
    ids=["two on a line", "one on two lines"],
)
def test_no_segment_is_lost(text, tmp_path):
    write(tmp_path / "test.xml", ["<doc>", text, "</doc>"])
    with pytest.raises(UserError, match=r"test\.xml, line 2: .*on a line of its own"):
        list(sources.rows_of_files([tmp_path / "test.xml"] * 2, ("de", "en"), {}))


@pytest.mark.parametrize("name", ["README.md", "de-en/bpe.codes"])
def test_files_of_others_stay(name, tmp_path, hub, monkeypatch, capsys):
    write(tmp_path / "wmt14-en-de" / name, ["mine"])
    told = error_of(monkeypatch, capsys, "wmt14-en-de", "--output", tmp_path, "--unchecked", "--bpe", "5")
    assert f"{name} is there, but was not made by this command" in told
    assert contents(tmp_path) == {f"wmt14-en-de/{name}": b"mine\n"}


@pytest.mark.parametrize("manifest", ["of today", "without the card"])
def test_a_finished_data_set_is_verified_and_not_written(manifest, tmp_path, hub, monkeypatch, caplog):
    Preparation(CORPORA["wmt14-en-de"], tmp_path, unchecked=True).run()
    folder = tmp_path / "wmt14-en-de"
    if manifest == "without the card":
        content = json.loads((folder / "manifest.json").read_text())
        del content["files"]["README.md"]
        (folder / "manifest.json").write_text(json.dumps(content))
    monkeypatch.setattr(prepare, "locked", lambda *_: pytest.fail("the folder may be read-only"))
    before = contents(tmp_path)
    Preparation(CORPORA["wmt14-en-de"], tmp_path, unchecked=True).run()
    assert contents(tmp_path) == before
    assert "README.md" not in caplog.text
    (folder / "README.md").write_text("mine")
    Preparation(CORPORA["wmt14-en-de"], tmp_path, unchecked=True).run()
    assert caplog.text.count("README.md was changed and stays") == 1


def test_the_card_names_new_configs_unless_it_was_changed(tmp_path, hub, caplog):
    def configs(*languages):
        Preparation(CORPORA["wmt17"], tmp_path, languages=languages, unchecked=True).run()
        return card.read_text().count("config_name")

    card = tmp_path / "wmt17" / "README.md"
    assert [configs("fi"), configs("lv")] == [1, 2]
    card.write_text(f"{card.read_text()}My notes.\n")
    assert configs("de") == 2
    assert card.read_text().endswith("My notes.\n")
    assert "README.md was changed and stays; remove it to have it written anew" in caplog.text
    card.unlink()
    assert configs("de") == 3


# --- Counts and digests of the published corpora are checked.


def test_without_output_a_corpus_goes_where_recipes_look(tmp_path, hub, monkeypatch):
    monkeypatch.setenv("HF_DEEPWIDE_DATA", str(tmp_path))
    call(monkeypatch, "multi30k", "--unchecked")
    assert len(load_parallel(load_recipe("multi30k_en_de_vanilla").data, "train")) == 40


def test_counts_are_checked(tmp_path, hub, monkeypatch, capsys):
    told = error_of(monkeypatch, capsys, "multi30k", "--output", tmp_path)
    assert "multi30k, en-de, val: 4 rows; published: 1,014" in told
    assert "--unchecked" in told
    assert contents(tmp_path) == {}
    call(monkeypatch, "multi30k", "--output", tmp_path, "--unchecked")
    told = error_of(monkeypatch, capsys, "multi30k", "--output", tmp_path)
    assert "val: 4 rows; published: 1,014. It was prepared with --unchecked before; remove val.en and val.de" in told


@pytest.mark.parametrize(("published", "fits"), [(400, True), (401, False)])
def test_counts_are_exact_where_nothing_is_left_out(published, fits, tmp_path, hub):
    hub.rows = 400
    corpus = dataclasses.replace(CORPORA["opus100"], counts={"af-en/train": published})
    if fits:
        Preparation(corpus, tmp_path, languages=["af"]).run()
        return
    with pytest.raises(UserError, match="400 rows; published: 401"):
        Preparation(corpus, tmp_path, languages=["af"]).run()


@pytest.mark.parametrize(("published", "fits"), [(404, True), (405, False), (395, False)])
def test_counts_may_differ_by_a_hundredth_where_steps_leave_rows_out(published, fits, tmp_path, hub):
    hub.rows = 400
    corpus = dataclasses.replace(CORPORA["wmt14-en-de"], counts={"train": published})
    if fits:
        Preparation(corpus, tmp_path).run()
        return
    with pytest.raises(UserError, match="400 rows; published"):
        Preparation(corpus, tmp_path).run()


def test_digests_are_checked(tmp_path, monkeypatch, capsys):
    source = released("multi30k", tmp_path)
    stripped = "".join(f"{text}\n" for text in sentences("de", 3)).encode()
    known = {"val.de": hashlib.sha256(stripped).hexdigest()}
    corpus = dataclasses.replace(CORPORA["multi30k"], counts={}, digests=known)
    monkeypatch.setitem(CORPORA, "multi30k", corpus)
    call(monkeypatch, "multi30k", "--source", source, "--output", tmp_path / "right")
    assert lines(tmp_path / "right" / "multi30k" / "val.de") == [f"{text} " for text in sentences("de", 3)]
    write(source / "data" / "task1" / "raw" / "val.de.gz", ["one", "two", "three"])
    told = error_of(monkeypatch, capsys, "multi30k", "--source", source, "--output", tmp_path / "wrong")
    assert "val.de is not the published one" in told
    call(monkeypatch, "multi30k", "--source", source, "--output", tmp_path / "wrong", "--unchecked")
    told = error_of(monkeypatch, capsys, "multi30k", "--source", source, "--output", tmp_path / "wrong")
    assert "val.de is not the published one" in told
    call(monkeypatch, "multi30k", "--source", source, "--output", tmp_path / "right")  # finished and checked before


# --- Mistakes end in one line.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["wmt41"], "there is no corpus 'wmt41'; accepted: iwslt14-de-en"),
        (["multi30k", "--source", "nowhere"], "--source nowhere: there is no such folder"),
        (["multi30k", "--source", "empty"], "neither a file val.en or val.en.gz"),
        (["wmt19-de-fr", "--source", "empty"], "wmt19-de-fr is made of tables of the Hub"),
        (["multi30k-tokenised"], "multi30k-tokenised is not on the Hub; name a folder with the same captions"),
        (["multi30k", "--languages", "xx"], "--languages 'xx'; multi30k has en, de, fr, cs"),
        (["multi30k", "--languages", "fr"], "the Hub has en, de of multi30k"),
        (["opus100", "--languages", "en"], "name a language beside en; opus100 has"),
        (["wmt19-de-fr", "--languages", "de"], "name a language beside de; wmt19-de-fr has de, fr"),
        (["ted8", "--bpe"], "no merges go with ted8"),
        (["wmt14-en-de", "--bpe", "-1"], "accepted: 1 to 1,000,000, or nothing for 32,000"),
        (["wmt14-en-de", "--bpe", "0"], "--bpe 0; accepted: 1 to 1,000,000, or nothing for 32,000"),
        (["iwslt14-de-en", "--source", "tables"], "such as IWSLT14.TED.dev2010.de-en.de.xml, name a folder without"),
        (["multi30k", "--source", "tables"], "such as val.en, name a folder without"),
        (["multi30k", "--source", "empty", "--output", "empty"], "would lie in --source"),
        (["multi30k", "--source", "twice"], "could be meant"),
        (["multi30k", "--source", "uneven", "--unchecked"], "unequal line counts"),
        (["ted8", "--source", "table", "--languages", "aze", "--unchecked"], "no column 'az' in the header"),
        (["ted8", "--source", "cells", "--languages", "aze", "--unchecked"], "line 2: 1 tab-separated columns"),
    ],
)
def test_mistakes_end_in_one_line(words, said, tmp_path, hub, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "tables" in words:
        monkeypatch.setattr(sources, "load_dataset", load_dataset)
    write(tmp_path / "tables" / "x.jsonl", ['{"de": "a", "en": "b"}'])
    (tmp_path / "empty").mkdir()
    for lang in ("en", "de", "fr", "cs"):
        for split in ("val", "test_2016_flickr", "train"):
            write(tmp_path / "uneven" / f"{split}.{lang}", sentences("de", 3 if lang == "fr" else 2))
            write(tmp_path / "twice" / "a" / f"{split}.{lang}", ["x"])
    write(tmp_path / "twice" / "b" / "val.en.gz", ["x"])
    for split in ("dev", "test", "train"):
        write(tmp_path / "table" / f"all_talks_{split}.tsv", ["en\tbe", "x\ty"])
        write(tmp_path / "cells" / f"all_talks_{split}.tsv", ["en\taz", "x"])
    (tmp_path / "cache").mkdir()  # the cache of `datasets`
    before = contents(tmp_path), sorted(tmp_path.iterdir())
    assert said in error_of(monkeypatch, capsys, *words)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    assert (contents(tmp_path), sorted(tmp_path.iterdir())) == before, "no empty folder is left"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"de": "a"}, "row 2: no text in en; there is de"),
        ({"de": "a", "en": 3}, "row 2: en is 3; accepted: text"),
        ({"translation": {"de": "a", "en": ["b"]}}, r"row 2: en is \['b'\]; accepted: text"),
    ],
)
def test_a_row_that_is_no_text_is_named(row, said):
    part = sources.Part("owner/name", "train")
    rows = sources.rows_of([{"de": "x", "en": None}, row], part, ("de", "en"), {})
    assert next(rows) == ("x", "")
    with pytest.raises(UserError, match=said):
        next(rows)


def test_a_hub_out_of_reach_ends_in_one_line(tmp_path, hub, monkeypatch, capsys):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(sources, "load_dataset", unreachable)
    told = error_of(monkeypatch, capsys, "wmt14-en-de", "--output", tmp_path)
    assert "wmt/wmt14 (de-en, validation) could not be loaded from the Hub: Couldn't reach the Hub" in told
    assert "--source and a folder" in told


def test_sacremoses_may_be_missing(tmp_path, hub, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    told = error_of(monkeypatch, capsys, "wmt14-en-de", "--output", tmp_path)
    assert "pip install 'hf_deepwide[corpora]'" in told


def test_a_dry_run_fetches_and_writes_nothing(tmp_path, hub, monkeypatch, capsys):
    call(monkeypatch, "ted8", "--output", tmp_path, "--dry-run")
    told = capsys.readouterr().out
    assert "neulab/ted_multi" in told
    assert "CC BY-NC-ND" in told
    assert (hub.asked, contents(tmp_path)) == ([], {})


def test_all_corpora_are_listed(monkeypatch, capsys):
    call(monkeypatch)
    told = capsys.readouterr().out
    listed = " ".join(import_module("hf_deepwide_cli.data").__doc__.split())
    for corpora in (CORPORA, CODE_CORPORA):
        assert all(f"{name}: {corpus.what}" in told for name, corpus in corpora.items())
        assert ", ".join(corpora) in listed
        assert all(corpus.example.split()[0] in packaged.names() for corpus in corpora.values())


def test_memory_does_not_grow_with_the_corpus(tmp_path, hub, monkeypatch):
    """A row is written before the next one is read."""
    held = []

    def counted(dataset, part, *others):
        for number, row in enumerate(sources.rows_of(dataset, part, *others)):
            held.append(number - written[0])
            yield row

    written = [0]

    def add(self, row, write=prepare.Writer.add):
        write(self, row)
        written[0] = self.rows

    monkeypatch.setattr(prepare, "rows_of", counted)
    monkeypatch.setattr(prepare.Writer, "add", add)
    Preparation(CORPORA["wmt14-en-de"], tmp_path, unchecked=True).run()
    assert max(held) <= 1


# --- Merges, and training on a prepared corpus.


def test_merges_are_learnt_from_both_sides_and_trained_with(tmp_path, monkeypatch, capsys):
    """Train two updates of the paper's recipe, made small, with the overrides that the command prints."""
    source = released("iwslt14-de-en", tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ("iwslt14-de-en", "--source", source, "--output", "out", "--unchecked", "--bpe", "30")
    call(monkeypatch, *command)
    told = capsys.readouterr().out
    codes = Path("out/iwslt14/bpe.codes")
    merges = read_codes(codes)
    assert len(merges) == 30
    assert {"haus</w>", "house</w>"} <= {"".join(merge) for merge in merges}
    before = codes.stat().st_mtime_ns
    call(monkeypatch, *command)
    assert codes.stat().st_mtime_ns == before
    assert "in another way" in error_of(monkeypatch, capsys, *command[:-1], "31")
    for file in Path("out/iwslt14").glob("[tv]*i*.*"):  # train and valid
        file.unlink()
    call(monkeypatch, *command)
    assert codes.stat().st_mtime_ns == before, "the same text has the same merges"

    words = told.rpartition("train: hf-deepwide train ")[2].split()
    tiny = (
        "--model.d_model 16 --model.encoder_layers 1 --model.decoder_layers 1 --model.encoder_ffn_dim 16 "
        "--model.decoder_ffn_dim 16 --training.max_steps 2 --training.warmup_steps 1 --training.eval_strategy steps "
        "--training.save_strategy steps --training.eval_steps 2 --training.save_steps 2 --training.output_dir run "
        "--training.early_stopping_patience 0 --evaluation.num_beams 1 --evaluation.max_length_factor 0"
    )
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "train", *words, *tiny.split()])
    hf_deepwide_cli.main()
    assert json.loads(Path("run/results.json").read_text())["train"]["steps"] == 2


@pytest.mark.parametrize("changed", [False, True])
def test_merges_are_learnt_again_where_their_text_has_changed(changed, tmp_path, monkeypatch, capsys):
    """Also if the command that makes the text again has no `--bpe`. Merges that a user has changed stay."""
    source = released("iwslt14-de-en", tmp_path)
    command = ("iwslt14-de-en", "--source", source, "--output", tmp_path, "--unchecked")
    call(monkeypatch, *command, "--bpe", "30")
    codes = tmp_path / "iwslt14" / "bpe.codes"
    before = codes.read_text()
    for split in ("train", "valid"):
        for lang in ("de", "en"):
            (tmp_path / "iwslt14" / f"{split}.{lang}").unlink()
    for lang in ("de", "en"):
        (file,) = source.rglob(f"train.tags.de-en.{lang}*")
        file.write_text(file.read_text().replace("ou", "uo"))
    if changed:
        codes.write_text("mine")
    call(monkeypatch, *command)
    if changed:
        assert codes.read_text() == "mine"
        assert "bpe.codes is there, but was not made" in error_of(monkeypatch, capsys, *command, "--bpe", "30")
        return
    assert not codes.exists()
    call(monkeypatch, *command, "--bpe", "30")
    assert codes.read_text() != before
    assert any("uo" in "".join(merge) for merge in read_codes(codes))


def test_merges_of_a_data_set_lie_beside_its_training_pairs(tmp_path, hub):
    preparation = Preparation(CORPORA["wmt14-en-de"], tmp_path, merges=5, unchecked=True)
    preparation.run()
    assert preparation.example == (
        "wmt14_en_de_mat --data.name wmt14-en-de --tokenizer.codes wmt14-en-de/de-en/bpe.codes"
    )
    assert len(read_codes(tmp_path / "wmt14-en-de" / "de-en" / "bpe.codes")) == 5
    assert Preparation(CORPORA["wmt14-en-de"], tmp_path / "other", merges=True).merges == 32_000


def test_the_page_has_a_row_for_each_corpus():
    """The rows name all places on the Hub, and the released files."""
    page = (Path(__file__).parents[2] / "docs" / "corpora.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page, flags=re.MULTILINE)
    on_hubs, as_files = dict(rows[: len(CORPORA)]), dict(rows[len(CORPORA) :])
    assert list(on_hubs) == list(CORPORA)
    assert list(as_files) == [name for name, corpus in CORPORA.items() if corpus.files is not None]
    for name, on_hub in on_hubs.items():
        corpus = CORPORA[name]
        assert corpus.licence.split(":")[0].split(";")[0] in on_hub or "each part" in on_hub
        for group in corpus.groups if corpus.hub is not None else ():
            for origin in corpus.hub(group).values():
                assert all(f"`{part.name}`" in on_hub for part in origin.places if part.name not in YEARS)
    for name, files in as_files.items():
        languages = CORPORA[name].groups[0]
        assert (
            f"`{next(iter(CORPORA[name].files(languages)['train'].places))}`".replace("{lang}", languages[0]) in files
        )
