"""Back-translation and distillation: the whole chain from monolingual text to a model, with exact resuming."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import counted_updates, tiny_values
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_deepwide_cli
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.languages import add_tags
from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.data.tokenizer import TokenizerArguments, load_or_train, training_texts
from hf_deepwide.runs.build import build_model
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.training.translation import TranslationTrainer

REAL, ALONE = 200, 100  # pairs, and further sentences of the target language


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with real pairs, and with further English sentences `mono.en`."""
    folder = tmp_path_factory.mktemp("corpus")
    for split, rows in build_phrases("de", "en", train_size=REAL + ALONE).items():
        for side, language in (("source", "de"), ("target", "en")):
            lines = [f"{text}\n" for text in rows[side]]
            if split == "train":
                (folder / f"mono.{language}").write_text("".join(lines[REAL:]), encoding="utf-8")
                lines = lines[:REAL]
            (folder / f"{split}.{language}").write_text("".join(lines), encoding="utf-8")
    return folder


def recipe_of(corpus: Path, run: Path, data: dict, **options):
    """A tiny recipe of eight steps on the corpus. `data` has further keys of that section."""
    training = {"max_steps": 8, "eval_steps": 4, "save_steps": 4, "max_tokens": 1024, **options}
    values = tiny_values(run, family="vanilla_transformer", **training)
    places = {split: split for split in ("train", "validation", "test")}
    values["data"] = {
        "root": str(corpus),
        "source_lang": "de",
        "target_lang": "en",
        "max_length": 128,
        **places,
        **data,
    }
    values["evaluation"]["metrics"] = ["bleu"]
    return check_recipe(values, "tiny", "tiny.yaml")


def command(monkeypatch, *words) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", *map(str, words)])
    hf_deepwide_cli.main()


@pytest.fixture
def back_translated(corpus, tmp_path, monkeypatch) -> Path:
    """The corpus with `bt.de`, a translation of `mono.en` by a reverse model, and `bt.en`, a copy of `mono.en`."""
    reverse = tmp_path / "reverse"
    run_recipe(recipe_of(corpus, reverse, {"source_lang": "en", "target_lang": "de"}))
    made = corpus / "bt.de"
    words = (
        "translate",
        "--model",
        reverse,
        "--input",
        corpus / "mono.en",
        "--output",
        made,
        "--sample",
        "--overwrite",
    )
    command(monkeypatch, *words, "--overwrite")
    once = made.read_text(encoding="utf-8")
    command(monkeypatch, *words, "--overwrite")
    assert made.read_text(encoding="utf-8") == once
    assert len(once.splitlines()) == ALONE
    shutil.copy(corpus / "mono.en", corpus / "bt.en")
    return corpus


TAGGED = {"synthetic": "bt", "synthetic_tag": "<bt>", "synthetic_rate": 1.0}


def test_back_translation_from_text_to_model(back_translated, tmp_path):
    """Train with dropout. Resuming in the middle gives the same weights bit for bit."""
    run, recipe = tmp_path / "run", recipe_of(back_translated, tmp_path / "run", TAGGED)
    results = run_recipe(recipe)
    assert results["train"]["steps"] == 8
    tokenizer, model = AutoTokenizer.from_pretrained(run), AutoModelForSeq2SeqLM.from_pretrained(run)
    assert model.config.vocab_size == len(tokenizer) == tokenizer.convert_tokens_to_ids("<bt>") + 1
    once = load_file(run / "checkpoint-8" / "model.safetensors")
    shutil.rmtree(run / "checkpoint-8")
    for name in ("results.json", "model.safetensors"):
        (run / name).unlink()
    with counted_updates() as made:
        assert run_recipe(recipe)["test"] == results["test"]
    assert made == [5, 6, 7, 8]
    again = load_file(run / "checkpoint-8" / "model.safetensors")
    assert [name for name in once if not torch.equal(once[name], again[name])] == []
    kept = (run / "recipe.yaml").read_text(encoding="utf-8")
    assert "synthetic_tag: <bt>" in kept
    assert "Another model" in (run / "README.md").read_text(encoding="utf-8")


def test_distillation_from_text_to_model(corpus, tmp_path, monkeypatch):
    """Train on distilled pairs alone, and mixed with the real pairs. The teacher translates with beam search."""
    teacher = tmp_path / "teacher"
    run_recipe(recipe_of(corpus, teacher, {}))
    made = corpus / "distilled.en"
    words = ("--model", teacher, "--input", corpus / "train.de", "--output", made, "--num_beams", "5")
    command(monkeypatch, "translate", *words)
    assert len(made.read_text(encoding="utf-8").splitlines()) == REAL
    shutil.copy(corpus / "train.de", corpus / "distilled.de")
    for name, data in (("alone", {"train": "distilled"}), ("mixed", {"synthetic": "distilled"})):
        run_recipe(recipe_of(corpus, tmp_path / name, data))
        results = json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8"))
        assert results["train"]["steps"] == 8


@pytest.mark.parametrize(("rate", "expected"), [(None, (200, 100)), (1.0, (200, 200)), (0.25, (400, 100))])
def test_an_epoch_of_training_has_both_kinds_at_the_rate(rate, expected, corpus, tmp_path):
    """Count both kinds by the tag in the batches."""
    for language in ("de", "en"):
        shutil.copy(corpus / f"mono.{language}", corpus / f"other.{language}")
    recipe = recipe_of(corpus, tmp_path / "run", {**TAGGED, "synthetic": "other", "synthetic_rate": rate})
    texts = load_parallel(recipe.data, "train")
    tokenizer = load_or_train(TokenizerArguments(vocab_size=200), training_texts(texts), tag="<bt>")
    add_tags(tokenizer, recipe.data)
    args = recipe.training_arguments()
    encoded = encode(texts, tokenizer, recipe.data, filter=True)
    model = build_model(recipe, tokenizer, args)
    trainer = TranslationTrainer(model, args, tokenizer, encoded, encoded.select([0]), data=recipe.data)
    mark = tokenizer.convert_tokens_to_ids("<bt>")
    tagged = [row[0] == mark for batch in trainer.get_train_dataloader() for row in batch["input_ids"].tolist()]
    assert (tagged.count(False), tagged.count(True)) == expected
