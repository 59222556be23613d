"""Warnings before the training about odd data, and no warnings about normal data."""

import pytest
from datasets import Dataset
from digit_corpus import write_digits
from tiny_run import tiny_values

from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.runs.data_warnings import count_overlap
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.runs.run import run_recipe


def run(folder, test="one", validation=None, **tokenizer):
    values = tiny_values(
        folder / "run", "vanilla_transformer", max_steps=2, warmup_steps=1,
        eval_strategy="no" if validation is None else "epoch", load_best_model_at_end=False,
    )  # fmt: skip
    values["data"] = {"root": str(folder), "train": "train", "validation": validation, "test": test}
    values["tokenizer"] = {"vocab_size": 60, **tokenizer}
    return run_recipe(check_recipe(values, "tiny", "tiny.yaml"))


def test_pairs_that_are_trained_on_and_tested_on_are_counted(tmp_path, caplog):
    folder = write_digits(tmp_path)
    run(folder)
    assert "also in the training set" not in caplog.text
    for language in ("en", "de"):
        train = (folder / f"train.{language}").read_text(encoding="utf-8").splitlines()
        test = (folder / f"one.{language}").read_text(encoding="utf-8").splitlines()
        (folder / f"mixed.{language}").write_text("".join(f"{line}\n" for line in [*test, *train[:3]]))
    (folder / "run").rename(folder / "before")
    run(folder, test="mixed")
    assert "3 of 8 pairs of the test split are also in the training set" in caplog.text


def test_pairs_that_choose_the_model_and_test_it_are_counted(tmp_path, caplog):
    run(write_digits(tmp_path), validation="one")
    assert "5 of 5 pairs of the test split are also in the validation set" in caplog.text


def test_only_whole_pairs_count_as_overlap():
    train = Dataset.from_dict({"source": ["a", "b", "a", "c"], "target": ["1", "2", "3", "4"]})
    held_out = Dataset.from_dict({"source": ["a", "a", "b", "d"], "target": ["1", "2", "2", "4"]})
    assert count_overlap(train, held_out) == 2
    assert count_overlap(train.select([1, 3]), held_out) == 1
    assert count_overlap(train, held_out.select([1, 3])) == 0


def test_of_several_language_pairs_reversed_sentences_overlap():
    train = Dataset.from_dict({"source": ["a", "b", "c"], "target": ["1", "2", "3"]})
    held_out = Dataset.from_dict({"source": ["1", "2", "c"], "target": ["a", "b", "4"]})
    assert count_overlap(train, held_out) == 0
    assert count_overlap(train.add_column("pair", [0, 0, 1]), held_out) == 2


def test_overlap_is_of_text_as_tokenizers_read_it():
    """Sentences that differ only in Unicode normalization or in spaces are the same."""
    train = Dataset.from_dict({"source": ["o\u0323mo\u0323", "a  b "], "target": ["child", "c"]})
    held_out = Dataset.from_dict({"source": ["\u1ecdm\u1ecd", "a\u00a0b", "a b"], "target": ["child", " c", "d"]})
    assert count_overlap(train, held_out) == 2


@pytest.mark.parametrize("lacks", [False, True])
def test_letters_that_the_tokenizer_lacks_are_named(lacks, tmp_path, caplog):
    folder = write_digits(tmp_path)
    texts = [line for name in ("en", "de") for line in (folder / f"train.{name}").read_text().splitlines()]
    letters = max({*"".join(texts)} - {" "}, key="".join(texts).count) if lacks else ""
    known = [text.replace(letters, "") for text in texts] if lacks else texts
    train_tokenizer(known, TokenizerArguments(vocab_size=60)).save_pretrained(tmp_path / "tokenizer")
    run(folder, path=str(tmp_path / "tokenizer"))
    assert ("the tokenizer lacks letters" in caplog.text) is lacks
    if lacks:
        assert f"such as {letters}" in caplog.text


@pytest.mark.parametrize(("lowercase", "told"), [(False, True), (True, False)])
def test_translations_without_capitals_are_pointed_out(lowercase, told, tmp_path, caplog):
    values = tiny_values(
        tmp_path / "run", max_steps=2, warmup_steps=1, eval_strategy="no", load_best_model_at_end=False
    )
    values["tokenizer"]["lowercase"] = True
    values["evaluation"]["lowercase"] = lowercase
    run_recipe(check_recipe(values, "run", "recipe.yaml"))
    assert ("set evaluation.lowercase: true" in caplog.text) is told
