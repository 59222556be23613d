"""A run with a vocabulary of words for each side: trained, scored, translated, shared."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import tiny_values
from transformers import pipeline

from hf_deepwide import share
from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.demo.systems import words
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.checkpoint import load_translator
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.exporting.onnx_folder import export_onnx
from hf_deepwide.models.word_tokenizer import WordTokenizer
from hf_deepwide.runs.averaging import average_checkpoints
from hf_deepwide.runs.recipe import Recipe, check_recipe
from hf_deepwide.runs.run import run_recipe

INDENTED = {"if": "    if  x :", "return": "DCNL DCSP return", "loop": "  for  x in  y :"}


def recipe_of(folder: Path, **sections) -> Recipe:
    """A recipe whose corpus repeats three lines of code, one for each source line."""
    sources, targets = zip(*(list(INDENTED.items()) * 20), strict=True)
    for suffix, lines in (("nl", sources), ("py", targets)):
        (folder / f"all.{suffix}").write_text("".join(f"{line}\n" for line in lines))
    steps = {"max_steps": 40, "eval_steps": 40, "save_steps": 40}
    values = tiny_values(folder / "run", "mat", {"dropout": 0.0, "drop_branch": 0.0}, learning_rate=1e-2, **steps)
    values["data"] = {
        "format": "text", "root": str(folder), "source_lang": "nl", "target_lang": "py",
        "train": "all", "validation": "all", "test": "all", "max_length": 64,
    }  # fmt: skip
    values["tokenizer"] = {"words": True, "normalization": "none"}
    values["evaluation"] |= {"max_length_offset": 16, "metrics": ["sentence_bleu4", "valid_python_line"]}
    for section, fields in sections.items():
        values[section] = {**values[section], **fields}
    return check_recipe(values, "words", "words.yaml")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    return folder / "run", run_recipe(recipe_of(folder))


def test_run_writes_code_as_it_was_read(trained):
    run, results = trained
    lines = (run / "translations.txt").read_text().split("\n")[:-1]
    assert lines == list(INDENTED.values()) * 20
    assert results["test"]["valid_python_line"] == pytest.approx(100)


def test_model_has_a_vocabulary_for_each_side(trained):
    run, _ = trained
    config = json.loads((run / "config.json").read_text())
    target_words = {word for line in INDENTED.values() for word in line.split(" ")}
    assert config["vocab_size"] == 4 + len(INDENTED)
    assert config["decoder_vocab_size"] == 4 + len(target_words)
    assert config["share_encoder_decoder_embeddings"] is False


def test_every_door_gives_the_same_code(trained):
    run, _ = trained
    model, tokenizer = load_translator(run)
    assert type(tokenizer) is WordTokenizer
    args = EvaluationArguments(num_beams=1, metrics=["sentence_bleu4"])
    assert translate(model, tokenizer, list(INDENTED), args) == list(INDENTED.values())
    outputs = pipeline("translation", model=str(run), num_beams=1)(list(INDENTED))
    assert [output["translation_text"] for output in outputs] == list(INDENTED.values())


def test_shared_folder_needs_no_package(trained, tmp_path, used_in_a_fork):
    run, _ = trained
    share(run, tmp_path / "shared")  # loads the model and translates, in a process without the package
    assert (tmp_path / "shared" / "word_tokenizer.py").is_file()
    _, tokenizer = load_translator(str(tmp_path / "shared"))
    assert type(tokenizer) is WordTokenizer


def test_mean_of_checkpoints_has_both_vocabularies(trained, tmp_path):
    run, _ = trained
    average_checkpoints([run, shutil.copytree(run, tmp_path / "equal")], tmp_path / "mean")
    model, tokenizer = load_translator(str(tmp_path / "mean"))
    args = EvaluationArguments(num_beams=1, metrics=["sentence_bleu4"])
    assert translate(model, tokenizer, list(INDENTED), args) == list(INDENTED.values())


def test_demo_shows_the_words_of_each_side(trained):
    run, _ = trained
    _, tokenizer = load_translator(str(run))
    both = tokenizer("loop nothing", text_target=INDENTED["if"])
    assert words(tokenizer, both["input_ids"], is_source=True) == ["loop", "<unk>", "</s>"]
    assert words(tokenizer, both["labels"]) == [" ", " ", " ", " ", "if", " ", "x", ":", "</s>"]


def test_engines_and_classes_of_transformers_are_refused(trained, tmp_path):
    run, _ = trained
    with pytest.raises(UserError, match="vocabulary of words for each side"):
        export_onnx(run, tmp_path / "exported")
    with pytest.raises(UserError, match="the tokenizer of words does"):
        share(run, tmp_path / "shared", as_="marian")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"model": {"share_encoder_decoder_embeddings": True}}, ["share_encoder_decoder_embeddings", "tokenizer"]),
        (
            {"model": {"decoder_vocab_size": 5, "share_encoder_decoder_embeddings": False}},
            ["decoder_vocab_size: 5", "contradicts the tokenizer"],
        ),
        (
            {"data": {"source_lang": None, "target_lang": None, "pairs": ["nl-py"]}},
            ["data.pairs", "vocabularies of words"],
        ),
        ({"data": {"synthetic": "made", "synthetic_tag": "<bt>"}}, ["data.synthetic_tag", "take no tag"]),
    ],
)
def test_contradicting_recipes_are_refused(trained, tmp_path, sections, told):
    """Refuse both with counted words and with the tokenizer of an earlier run."""
    saved = {"words": False, "path": str(trained[0])}
    for suffix in ("nl", "py"):
        (tmp_path / f"made.{suffix}").write_text("x = 1\n")
    for tokenizer in ({}, saved):
        with pytest.raises(UserError) as error:
            run_recipe(recipe_of(tmp_path, tokenizer=tokenizer, **sections))
        assert all(word in str(error.value) for word in told)


def test_a_run_goes_on_from_a_run_with_its_words(trained, tmp_path, caplog):
    """Each word must keep its id, in the target vocabulary, too."""
    run, _ = trained
    saved = {"words": False, "normalization": "nfkc", "path": str(run)}
    run_recipe(recipe_of(tmp_path, tokenizer=saved, model={"init_from": str(run)}))
    assert "lacks letters" not in caplog.text
    other = shutil.copytree(run, tmp_path / "other")
    file = other / "vocab_target.json"
    words = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(words[::-1]), encoding="utf-8")
    recipe = recipe_of(tmp_path, tokenizer={**saved, "path": str(other)}, model={"init_from": str(run)})
    with pytest.raises(UserError, match="is not the tokenizer of the base"):
        run_recipe(recipe, overwrite=True)


def test_family_with_one_vocabulary_is_refused(tmp_path):
    recipe = recipe_of(tmp_path)
    values = {**recipe.values, "model": {"family": "bart", "d_model": 16}}
    with pytest.raises(UserError, match="a bart model has one for both sides"):
        run_recipe(check_recipe(values, "words", "words.yaml"))


def test_order_of_reading_is_kept(tmp_path):
    data = DataArguments(root=str(tmp_path), source_lang="nl", target_lang="py", train="all")
    recipe_of(tmp_path)
    assert load_parallel(data, "train")["target"][:3] == list(INDENTED.values())
