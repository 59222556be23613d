"""The cache of encoded corpora: used if nothing has changed, made again otherwise, and never a cause of errors."""

import os
import shutil
from types import SimpleNamespace

import datasets
import pytest
from datasets import Dataset
from transformers import NllbTokenizer

from hf_deepwide.data import encoded_cache
from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.digest import data_digest
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.languages import add_tags
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.models.language_pairs import Languages
from hf_deepwide.models.plain_text import TextEncoder
from hf_deepwide.models.word_tokenizer import WordTokenizer

ROWS = {"source": ["a red dog", "a cat", "a dog"], "target": ["b rot", "é", "b b"]}


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The folder of the cache, which here takes corpora of any size."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(encoded_cache, "LEAST_PAIRS", 1)
    return encoded_cache.cache_folder()


@pytest.fixture
def encodings(monkeypatch):
    """A list that receives the size of each batch of text that is encoded."""
    counted, original = [], TextEncoder.bodies

    def bodies(encoder, texts):
        counted.append(len(texts))
        return original(encoder, texts)

    monkeypatch.setattr(TextEncoder, "bodies", bodies)
    return counted


def tokenizer_of(size=40):
    return train_tokenizer([*ROWS["source"], *ROWS["target"]] * 3, TokenizerArguments(vocab_size=size))


def encoded(rows=ROWS, tokenizer=None, **fields):
    return encode(Dataset.from_dict(rows), tokenizer or tokenizer_of(), DataArguments(**fields), filter=True)


def test_take_from_the_cache_what_was_encoded_before(encodings, kept, caplog):
    first = encoded()
    assert encodings
    encodings.clear()
    with caplog.at_level("INFO"):
        second = encoded()
    assert encodings == []
    assert str(kept) in caplog.text
    assert second.to_list() == first.to_list()
    assert second.features == first.features
    assert data_digest(second) == data_digest(first), "so that a run resumes with either"


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": {**ROWS, "source": ["a red dog", "a cat", "a do g"]}},
        {"rows": {"source": ["a red do", "ga cat", "a dog"], "target": ROWS["target"]}},
        {"rows": {"source": ROWS["target"], "target": ROWS["source"]}},
        {"tokenizer": tokenizer_of(25)},
    ],
    ids=["text", "line ends", "sides", "tokenizer"],
)
def test_encode_again_what_has_changed(changed, encodings):
    encoded()
    encodings.clear()
    encoded(**changed)
    assert encodings


def test_encode_again_with_other_tags(encodings):
    tokenizer, rows = tokenizer_of(), {**ROWS, "pair": [0, 1, 1]}
    pairs = ["en-de", "en-fr"]
    add_tags(tokenizer, DataArguments(pairs=pairs))
    by_source, by_decoder = (encoded(rows, tokenizer, pairs=pairs, language_tag=tag) for tag in ("source", "decoder"))
    assert "decoder_start" in by_decoder.column_names
    assert by_source["input_ids"] != by_decoder["input_ids"]


def test_filters_act_on_what_is_taken_from_the_cache(encodings):
    longest = max(encoded()["source_length"])
    encodings.clear()
    assert len(encoded(max_length=longest - 1)) < len(ROWS["source"])
    assert encodings == []


def test_encode_again_what_is_damaged(encodings, kept, caplog):
    first = encoded().to_list()
    (file,) = kept.glob("*/*.arrow")
    content = bytearray(file.read_bytes())
    at = content.rindex(bytes([2, 0, 0, 0]))  # the id of an </s>
    content[at] = 3
    file.write_bytes(bytes(content))
    encodings.clear()
    assert encoded().to_list() == first
    assert encodings
    assert "damaged" in caplog.text
    encodings.clear()
    assert encoded().to_list() == first
    assert encodings == []


def test_keep_what_was_used_last_within_the_limit(kept, monkeypatch):
    encoded()
    (first,) = kept.iterdir()
    size = sum(file.stat().st_size for file in first.iterdir())
    monkeypatch.setattr(encoded_cache, "MOST_BYTES", 2 * size)
    encoded(tokenizer=tokenizer_of(25))
    encoded()  # used again
    encoded(tokenizer=tokenizer_of(30))
    assert first.is_dir()
    assert len(list(kept.iterdir())) == 2


def test_what_a_killed_process_has_left_counts_and_goes(kept, monkeypatch):
    encoded()
    (first,) = kept.iterdir()
    size = sum(file.stat().st_size for file in first.iterdir())
    draft = kept / f".{first.name}-x" / first.name
    shutil.copytree(first, draft)
    os.utime(draft.parent, (1, 1))
    monkeypatch.setattr(encoded_cache, "MOST_BYTES", 2 * size)
    encoded(tokenizer=tokenizer_of(25))
    assert not draft.parent.exists()
    assert first.is_dir()
    assert len(list(kept.iterdir())) == 2


def test_read_what_somebody_else_keeps(encodings, kept, monkeypatch, caplog):
    """Only the owner of a folder may set its time of use. Only the owner of the parent folder may remove it."""

    def refuse(*_):
        raise PermissionError("not yours")

    expected = encoded().to_list()
    encodings.clear()
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(encoded_cache, "discard", refuse)
    assert encoded().to_list() == expected
    assert encodings == []
    (file,) = kept.glob("*/digest.txt")
    file.write_text("another")
    assert encoded().to_list() == expected
    assert encodings
    assert "damaged" in caplog.text


def test_keep_nothing_larger_than_the_limit(kept, monkeypatch, caplog):
    encoded()
    (first,) = kept.iterdir()
    monkeypatch.setattr(encoded_cache, "MOST_BYTES", 10)
    with caplog.at_level("INFO"):
        encoded(tokenizer=tokenizer_of(25))
    assert list(kept.iterdir()) == [first], "nothing is removed for what is not kept"
    assert "larger than all that is kept" in caplog.text


def test_encode_without_a_cache_where_nothing_can_be_written(kept, caplog):
    kept.parent.write_text("a file in the place of a folder")
    with caplog.at_level("INFO"):
        assert len(encoded()) == 3
    assert "not kept" in caplog.text


def test_keep_nothing_of_a_tokenizer_that_draws_random_numbers(kept):
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.model.dropout = 0.1
    encoded(tokenizer=tokenizer)
    assert not kept.exists()


def test_keep_nothing_of_a_small_corpus(kept, monkeypatch):
    monkeypatch.setattr(encoded_cache, "LEAST_PAIRS", 4)
    encoded()
    assert not kept.exists()


def test_sources_are_encoded_again_where_other_words_stand_before_them(kept):
    tokenizer = tokenizer_of()
    tasks = {f"translation_en_to_{target}": {"prefix": f"{word} "} for target, word in (("de", "cat"), ("fr", "dog"))}
    languages = Languages(SimpleNamespace(task_specific_params=tasks), SimpleNamespace(), tokenizer)

    def marked(target):
        args = DataArguments(source_lang="en", target_lang=target)
        return encode(Dataset.from_dict(ROWS), tokenizer, args, filter=True, languages=languages)

    assert marked("de")["input_ids"][:] != marked("fr")["input_ids"][:]
    assert len(list(kept.iterdir())) == 2


def test_pairs_are_encoded_again_for_another_source_language_of_one_pair():
    """The tokenizer has language codes. The first pair and all targets stay the same."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdegorté"]
    codes = ["eng_Latn", "deu_Latn", "fra_Latn", "spa_Latn"]
    tokenizer = NllbTokenizer({word: i for i, word in enumerate(words)}, merges=[], extra_special_tokens=codes)
    rows = {**ROWS, "pair": [0, 1, 1]}
    first, second = (
        encoded(rows, tokenizer, pairs=["eng_Latn-deu_Latn", f"{source}-deu_Latn"])["input_ids"][:]
        for source in ("fra_Latn", "spa_Latn")
    )
    assert first[0] == second[0]
    assert first[1:] != second[1:]


def test_pairs_are_encoded_again_for_another_vocabulary_of_targets():
    """The tokens of the tokenizer are words, with a vocabulary for each side."""
    sources, targets = ["a", "red", "dog", "cat"], ["b", "rot", "é"]
    ids = [encoded(tokenizer=WordTokenizer(sources, order))["labels"][:] for order in (targets, targets[::-1])]
    assert ids == [[[4, 5, 2], [6, 2], [4, 4, 2]], [[6, 5, 2], [4, 2], [6, 6, 2]]]


def test_pairs_are_encoded_again_for_other_posteriors():
    tokenizer, rows, pairs = tokenizer_of(), {**ROWS, "pair": [0, 1, 1]}, ["en-de", "en-fr"]
    add_tags(tokenizer, DataArguments(pairs=pairs))
    found = [encoded(rows, tokenizer, pairs=pairs, posteriors=by)["posterior"][:] for by in ("source", "target")]
    assert found == [[0, 0, 0], [0, 1, 1]]


def test_pairs_are_encoded_again_for_the_tag_of_synthetic_pairs():
    tokenizer, rows = tokenizer_of(), {**ROWS, "synthetic": [0, 0, 1]}
    add_tags(tokenizer, DataArguments(synthetic="x", synthetic_tag="<bt>"))
    plain, tagged = (encoded(rows, tokenizer, synthetic="x", synthetic_tag=t)["input_ids"][:] for t in (None, "<bt>"))
    assert tagged[:2] == plain[:2]
    assert tagged[2] == [tokenizer.convert_tokens_to_ids("<bt>"), *plain[2]]


def test_pairs_are_encoded_again_by_another_version_of_the_tokenizers(encodings, monkeypatch):
    encoded()
    encodings.clear()
    monkeypatch.setattr(encoded_cache.tokenizers, "__version__", "another")
    encoded()
    assert encodings


def test_keep_nothing_that_needs_more_than_a_tenth_of_the_room(kept, monkeypatch, caplog):
    monkeypatch.setattr(encoded_cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with caplog.at_level("INFO"):
        encoded()
    assert not kept.exists()
    assert "room" in caplog.text
