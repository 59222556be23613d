"""Reading parallel text: exact alignment, and one clear message or one counted filter for each fault."""

import gzip
import json
import logging

import pytest
from datasets import Dataset, DatasetDict, IterableDataset, Value

from hf_deepwide.data.corpora import CHUNK, DataArguments, load_parallel
from hf_deepwide.errors import UserError
from hf_deepwide.models.plain_text import is_blank


def write(path, lines, end="\n"):
    data = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def corpus(tmp_path):
    """Text pairs of two languages: `train` plain, `valid` compressed."""
    write(tmp_path / "train.en", ["a dog", "a cat", "a bird"])
    write(tmp_path / "train.de", ["ein Hund", "eine Katze", "ein Vogel"])
    write(tmp_path / "valid.en.gz", ["hello"])
    write(tmp_path / "valid.de.gz", ["hallo"])
    return tmp_path


def text(directory, **fields):
    return DataArguments(
        **{"root": str(directory), "train": "train", "validation": "valid", "test": "valid", **fields}
    )


def pairs(dataset):
    return [(row["source"], row["target"]) for row in dataset]


def message(args, split="train"):
    with pytest.raises(UserError) as error:
        load_parallel(args, split)
    return str(error.value)


def test_text_pairs_plain_and_compressed(corpus):
    assert pairs(load_parallel(text(corpus), "train")) == [
        ("a dog", "ein Hund"),
        ("a cat", "eine Katze"),
        ("a bird", "ein Vogel"),
    ]
    assert pairs(load_parallel(text(corpus, source_lang="de", target_lang="en"), "validation")) == [("hallo", "hello")]


def test_root_is_the_environment_variable_unless_given(corpus, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_DEEPWIDE_DATA", str(corpus))
    assert len(load_parallel(text(corpus, root=None), "train")) == 3
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert str(elsewhere) in message(text(elsewhere))
    assert len(load_parallel(text(elsewhere, train=str(corpus / "train")), "train")) == 3  # an absolute path


@pytest.mark.parametrize("odd", ["\u2028", "\x0b", "\x0c", "\x1c", "\x85", "\r"])
def test_only_newline_ends_a_line(tmp_path, odd):
    write(tmp_path / "train.en", [f"one{odd}two", "three"])
    write(tmp_path / "train.de", ["eins zwei", "drei"])
    assert pairs(load_parallel(text(tmp_path), "train")) == [(f"one{odd}two", "eins zwei"), ("three", "drei")]


def test_windows_line_ends_and_byte_order_mark_are_no_text(tmp_path):
    write(tmp_path / "train.en", ["\ufeffone", "two"], end="\r\n")
    (tmp_path / "train.de").write_text("eins\nzwei")  # no newline at the end
    assert pairs(load_parallel(text(tmp_path), "train")) == [("one", "eins"), ("two", "zwei")]


@pytest.mark.parametrize(("english", "german"), [(5, 3), (3, 5)])
def test_unequal_line_counts(tmp_path, english, german):
    write(tmp_path / "train.en", ["x"] * english)
    write(tmp_path / "train.de", ["y"] * german)
    said = message(text(tmp_path))
    assert "train.en" in said
    assert "train.de" in said
    assert "has 5 lines" in said
    assert "has 3, so line 4" in said


def test_bytes_that_are_not_utf8(corpus):
    (corpus / "train.de").write_bytes("ein Hund\nein Bär\n".encode("latin-1"))
    said = message(text(corpus))
    assert "train.de, line 2: byte 6 (0xe4) is not UTF-8" in said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"plain text\n", "not a complete gzip file"),
        (gzip.compress(b"text\n" * 1000)[:-12], "not a complete gzip file"),
        (b"", "empty"),
        (gzip.compress(b""), "empty"),
        (gzip.compress("eins\nzwei\ndrei\n".encode("utf-16-le")), "line 1: a zero byte"),
    ],
    # gzip writes the time into its bytes: ids made of them differ between pytest's processes, and no test would run
    ids=["not gzip", "cut off", "no bytes", "gzip of no bytes", "gzip of UTF-16"],
)
def test_broken_files(corpus, content, expected):
    (corpus / "train.de").unlink()
    (corpus / "train.de.gz").write_bytes(content)
    said = message(text(corpus))
    assert "train.de.gz" in said
    assert expected in said


def test_a_pattern_is_a_name_like_any_other(corpus):
    said = message(text(corpus, train="train**"))
    assert "train**.en" in said
    assert "languages found" not in said


def test_missing_language_names_those_that_exist(corpus):
    said = message(text(corpus, target_lang="fr"))
    assert "train.fr" in said
    assert "languages found for this prefix: de, en" in said
    assert "HF_DEEPWIDE_DATA" in said


def test_missing_file_and_missing_split(corpus):
    assert "nowhere.en" in message(text(corpus, train="nowhere"))
    assert "data.train" in message(text(corpus, train=None))


@pytest.mark.parametrize("text", ["", " ", "\u200b", "\ufeff", "\u200e \u00ad", "\u00a0"])
def test_a_line_in_which_nothing_can_be_seen_is_empty(text):
    assert is_blank(text)
    assert not is_blank(f"{text}\u1794\u200b")


def test_empty_sides_are_counted_in_training_and_an_error_elsewhere(tmp_path, caplog):
    write(tmp_path / "train.en", ["one", "", "three", "four"])
    write(tmp_path / "train.de", ["eins", "zwei", " \t", "vier"])
    with caplog.at_level(logging.INFO):
        kept = load_parallel(text(tmp_path), "train")
    assert pairs(kept) == [("one", "eins"), ("four", "vier")]
    assert "2 pairs kept, 2 with an empty side" in caplog.text
    said = message(text(tmp_path, test="train"), "test")
    assert "train.en, line 2: empty source in the test split" in said


def test_duplicates_go_only_if_asked_and_only_from_training(tmp_path, caplog):
    write(tmp_path / "train.en", ["one", "one", "one", "two"])
    write(tmp_path / "train.de", ["eins", "eins", "ein", "zwei"])
    assert len(load_parallel(text(tmp_path), "train")) == 4
    with caplog.at_level(logging.INFO):
        args = text(tmp_path, drop_duplicates=True, validation="train")
        assert pairs(load_parallel(args, "train")) == [("one", "eins"), ("one", "ein"), ("two", "zwei")]
    assert "1 repeated pairs left out" in caplog.text
    assert len(load_parallel(args, "validation")) == 4


def test_refuses_a_corpus_without_pairs(tmp_path):
    write(tmp_path / "train.en", ["", " "])
    write(tmp_path / "train.de", ["eins", "zwei"])
    assert "no pair of the train split is left" in message(text(tmp_path))


def test_more_pairs_than_a_chunk_keep_their_order(tmp_path):
    count = CHUNK + 3
    write(tmp_path / "train.en", [str(number) for number in range(count)])
    write(tmp_path / "train.de", [f"n{number}" for number in range(count)])
    dataset = load_parallel(text(tmp_path), "train")
    assert dataset["source"][:] == [str(number) for number in range(count)]
    assert dataset[count - 1] == {"source": str(count - 1), "target": f"n{count - 1}"}


def tsv(tmp_path, lines, **fields):
    write(tmp_path / "train.tsv.gz", lines)
    return DataArguments(format="tsv", root=str(tmp_path), train="train.tsv", **fields)


def test_tsv_without_header_is_source_then_target_and_quotes_are_text(tmp_path):
    args = tsv(tmp_path, ['"a dog\tein "Hund"', "a cat\teine Katze"])
    assert pairs(load_parallel(args, "train")) == [('"a dog', 'ein "Hund"'), ("a cat", "eine Katze")]


def test_tsv_header_by_language_or_field(tmp_path):
    args = tsv(tmp_path, ["id\tde\ten", "1\tein Hund\ta dog"])
    assert pairs(load_parallel(args, "train")) == [("a dog", "ein Hund")]
    args = tsv(tmp_path, ["id\tquery\tcode", "1\topen it\topen()"], source_field="query", target_field="code")
    assert pairs(load_parallel(args, "train")) == [("open it", "open()")]
    args = tsv(tmp_path, ["id\tquery\tcode", "1\topen it\topen()"], source_field="question")
    assert "line 1: no columns ['question', 'de'] in the header ['id', 'query', 'code']" in message(args)


@pytest.mark.parametrize(
    "header",
    [
        "source\ttarget",
        "English\tGerman",
        "src_text\ttgt_text",
        "DE\tEN",
        '"en"\t"de"',
        "en\tgerman",
        "English\tYoruba",
    ],
)
def test_a_header_that_names_other_columns_is_no_pair(tmp_path, header):
    args = tsv(tmp_path, [header, "a dog\tein Hund"])
    assert "looks like a header" in message(args)
    with pytest.raises(UserError, match="source and target are both 'english'"):
        tsv(tmp_path, ["english\tgerman", "a\tb"], source_field="english", target_field="english")
    args = tsv(tmp_path, ["source of the river\tQuelle", "a dog\tein Hund"])
    assert len(load_parallel(args, "train")) == 2


def test_which_column_is_which_is_said_where_no_header_says_it(tmp_path, caplog):
    caplog.set_level("INFO", "hf_deepwide")
    load_parallel(tsv(tmp_path, ["a dog\tein Hund"]), "train")
    assert "column 1 is en and column 2 is de, as in line 1: 'a dog → ein Hund'" in caplog.text


def test_tsv_line_with_another_number_of_columns(tmp_path):
    assert "train.tsv.gz, line 2: 1 tab-separated columns instead of 2" in message(tsv(tmp_path, ["a\tb", "c"]))


def jsonl(tmp_path, rows, **fields):
    write(tmp_path / "train.jsonl", [row if isinstance(row, str) else json.dumps(row) for row in rows])
    return DataArguments(format="jsonl", root=str(tmp_path), train="train.jsonl", **fields)


def test_jsonl_flat_and_nested(tmp_path):
    rows = [{"en": "a\ttab", "de": "ein\u2028Ende"}, {"translation": {"en": "a cat", "de": "eine Katze"}, "id": 7}]
    assert pairs(load_parallel(jsonl(tmp_path, rows), "train")) == [
        ("a\ttab", "ein\u2028Ende"),
        ("a cat", "eine Katze"),
    ]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"en": "x", "translation": {"fr": "y"}}, "line 2: no field 'de'; available: en, translation.fr"),
        ('{"en": "x"', "line 2: not JSON"),
        ("[1, 2]", "line 2: a JSON list"),
        ({"en": "x", "de": ["y"]}, "line 2: field 'de' holds list, not text"),
        ('{"en": "x", "de": "\\ud800"}', "line 2: half a surrogate pair"),
    ],
)
def test_jsonl_mistakes(tmp_path, row, expected):
    assert expected in message(jsonl(tmp_path, [{"en": "a", "de": "b"}, row]))


def test_jsonl_null_is_an_empty_side(tmp_path):
    args = jsonl(tmp_path, [{"en": "a", "de": None}, {"en": "a", "de": "b"}], validation="train.jsonl")
    assert pairs(load_parallel(args, "train")) == [("a", "b")]
    assert "line 1: empty target" in message(args, "validation")


ROWS = [{"translation": {"en": "a dog", "de": "ein Hund"}}, {"translation": {"en": "", "de": "leer"}}]


@pytest.fixture
def saved(tmp_path):
    """A local dataset as `save_to_disk` writes it."""
    DatasetDict({"train": Dataset.from_list(ROWS), "dev": Dataset.from_list(ROWS[:1])}).save_to_disk(
        tmp_path / "saved"
    )
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    """A local dataset as a folder of data files; its fields have the names that the package uses itself."""
    directory = tmp_path / "folder"
    directory.mkdir()
    rows = [{"source": "a dog", "target": "ein Hund", "id": 1}, {"source": "", "target": "leer", "id": 2}]
    write(directory / "train.jsonl", [json.dumps(row) for row in rows])
    return tmp_path


def local(root, name, **fields):
    return DataArguments(format="datasets", root=str(root), name=name, **{"train": "train", **fields})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["saved", "folder"])
def test_local_datasets(name, streaming, request, caplog, monkeypatch, tmp_path_factory):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    root = request.getfixturevalue(name)
    fields = {"source_field": "source", "target_field": "target"} if name == "folder" else {}
    with caplog.at_level(logging.INFO):
        dataset = load_parallel(local(root, name, streaming=streaming, **fields), "train")
        assert isinstance(dataset, IterableDataset) == streaming
        assert [dict(row) for row in dataset] == [{"source": "a dog", "target": "ein Hund"}]
    assert "1 with an empty side" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_words_for_what_is_missing_are_words(streaming, tmp_path, monkeypatch, tmp_path_factory):
    """Pandas reads such words in a table as nulls, so that their pairs would be left out as empty."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    (tmp_path / "folder").mkdir()
    rows = [("None", "Keine"), ("NA", "NA"), ("null", "null"), ("nan", "Oma"), ("a", "b"), ("", "leer")]
    write(tmp_path / "folder" / "train.csv", ["en,de", *map(",".join, rows)])
    found = load_parallel(local(tmp_path, "folder", streaming=streaming), "train")
    assert [(row["source"], row["target"]) for row in found] == rows[:-1]


def test_each_pass_over_a_stream_is_counted_on_its_own(tmp_path, caplog):
    rows = [{"en": text, "de": "x"} for text in ("", "a b", "a", "c", "d" * 20_001)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    caplog.set_level(logging.INFO)
    stream = load_parallel(local(tmp_path, "saved", streaming=True), "train")
    assert next(iter(stream))["source"] == "a b"
    begun = iter(stream)
    next(begun), next(begun)
    resumed = load_parallel(local(tmp_path, "saved", streaming=True), "train")
    resumed.load_state_dict(stream.state_dict())
    for again in (stream, resumed):
        assert [row["source"] for row in again][-1] == "c", (
            "a run that has begun could not go on with a file that was mended"
        )
    assert caplog.text.count("1 with a word of more than 20,000 characters left out, up to row 5") == 2
    with pytest.raises(UserError, match="line 5: a word of 20,001"):
        load_parallel(local(tmp_path, "saved"), "train")
    assert caplog.text.count("0 pairs kept, 1 with an empty side left out, up to row 1") == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_mistakes(saved, streaming):
    assert "no split 'validation'; available: train, dev" in message(
        local(saved, "saved", train="validation", streaming=streaming)
    )
    said = message(local(saved, "saved", target_lang="fr", streaming=streaming))
    assert "no field 'fr'; available: translation.en, translation.de" in said
    empty_side = local(saved, "saved", test="train", streaming=streaming)
    with pytest.raises(UserError, match="empty source in the test split"):
        list(load_parallel(empty_side, "test"))


def test_columns_of_a_translation_feature(tmp_path):
    dataset = Dataset.from_list(ROWS)
    assert dataset.features["translation"]["en"] == Value("string")
    dataset.save_to_disk(tmp_path / "plain")  # a Dataset rather than a DatasetDict
    assert pairs(load_parallel(local(tmp_path, "plain"), "train")) == [("a dog", "ein Hund")]


def test_a_single_split_is_not_every_split(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "plain")
    args = local(tmp_path, "plain", validation="validation", test="test")
    assert pairs(load_parallel(args, "train")) == [("a dog", "ein Hund")]
    for split in ("validation", "test"):
        assert f"holds a single split, 'train', and not '{split}'" in message(args, split)


@pytest.mark.parametrize("streaming", [False, True])
def test_dataset_that_cannot_be_loaded(tmp_path, streaming):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"en": ')
    said = message(local(tmp_path, "broken", streaming=streaming))
    assert "data.name 'broken'" in said
    assert "could not be loaded" in said


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"format": "csv"}, "data.format is 'csv'; accepted: text"),
        ({"source_lang": "de", "target_lang": "de"}, "both 'de'"),
        ({"format": "datasets"}, "data.name"),
        ({"format": "phrases", "streaming": True}, "data.streaming"),
        ({"format": "datasets", "name": "x", "streaming": True, "drop_duplicates": True}, "data.drop_duplicates"),
        ({"format": "phrases", "validation": "val"}, r"phrases does not read it; .*text, tsv, jsonl, datasets\)"),
        ({"format": "phrases", "drop_duplicates": True}, "data.drop_duplicates is True, .* set it to false"),
        ({"source_field": "src"}, r"the format text does not read it; .*accepted: tsv, jsonl, datasets\)"),
        ({"format": "tsv", "config": "de-en"}, r"data.config is 'de-en', .*accepted: datasets\)"),
        ({"train_size": 30}, r"data.train_size is 30, .*set it to 25000, .*accepted: phrases\)"),
        ({"max_length": 1}, "data.max_length is 1"),
        ({"max_length_ratio": 0.5}, "data.max_length_ratio is 0.5"),
    ],
)
def test_wrong_arguments_are_named(fields, named):
    with pytest.raises(UserError, match=named):
        DataArguments(**fields)


def test_an_inherited_key_that_a_format_does_not_read_can_be_reset():
    assert DataArguments(format="phrases", train=None, test=None).format == "phrases"
    assert DataArguments(format="text", seed=1, train_size=25_000, name=None).format == "text"
