"""Classification: what is read, how it is scored, what a run of several seeds leaves behind."""

import gzip
import json
import math
import random

import numpy as np
import pytest
import torch
from model_cases import scramble
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    TrainerCallback,
    pipeline,
)

from hf_deepwide import MATRobertaForSequenceClassification
from hf_deepwide.data.classification import ClassificationArguments, class_names, read_splits
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.classification import classification_scores
from hf_deepwide.runs import classification
from hf_deepwide.runs.classification import ClassificationRecipe, run_classification
from hf_deepwide.runs.recipe import check_recipe, load_recipe, packaged_recipes

NOUNS = ("dog", "tree", "house", "river", "bird", "coat")
RECIPES = [name for name in packaged_recipes() if name.startswith("classification/")]


def rows(count, seed):
    """Pairs of sentences; the class says whether both name the same thing."""
    draw = random.Random(seed)
    for _ in range(count):
        one, other = draw.choice(NOUNS), draw.choice(NOUNS)
        other = one if draw.random() < 0.5 else other
        yield f"there is a {one}", f'we saw "the {other}', "same" if one == other else "other"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files with a header, one of them packed; a quotation mark that nothing closes is part of a sentence."""
    folder = tmp_path_factory.mktemp("data")
    for seed, (split, count) in enumerate({"train": 96, "dev": 40, "test": 32}.items()):
        lines = ["id\tfirst\tsecond\tclass", *("\t".join(["7", *row]) for row in rows(count, seed))]
        with gzip.open(folder / f"{split}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A RoBERTa with random weights, and a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    texts = [f"{one} {other}" for one, other, _ in rows(200, 9)]
    tokenizer = train_tokenizer(texts, TokenizerArguments(vocab_size=80))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = RobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=66, type_vocab_size=1, pad_token_id=tokenizer.pad_token_id,
        layer_norm_eps=1e-5, **sizes,
    )  # fmt: skip
    scramble(RobertaForMaskedLM(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe_of(data, base, run, **training):
    values = {
        "model": {"family": "mat_roberta", "init_from": str(base), "attention_branches": 2, "drop_branch": 0.2},
        "data": {
            "root": str(data), "train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv",
            "sentence1": "first", "sentence2": "second", "label": "class", "labels": ["other", "same"],
        },
        "tokenizer": {"path": str(base)},
        "training": {
            "output_dir": str(run), "seeds": [1, 2], "num_train_epochs": 3, "per_device_train_batch_size": 16,
            "learning_rate": 3e-3, "use_cpu": True, "disable_tqdm": True, **training,
        },
    }  # fmt: skip
    return check_recipe(values, "tiny", "tiny.yaml", ClassificationRecipe)


@pytest.fixture(scope="module")
def finished(data, base, tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    return run, run_classification(recipe_of(data, base, run))


def test_each_seed_is_scored_and_the_median_reported(finished):
    run, results = finished
    assert json.loads((run / "results.json").read_text()) == results
    one, two = (result["validation"]["accuracy"] for result in results["seeds"])
    summary = results["validation"]["accuracy"]
    assert summary["median"] == pytest.approx((one + two) / 2)
    assert summary["standard_deviation"] == pytest.approx(abs(one - two) / math.sqrt(2))
    assert results["chosen_seed"] == (1 if one <= two else 2)
    assert [result["epochs"] for result in results["seeds"]] == [3, 3]
    assert all(len(result["curve"]) == 3 for result in results["seeds"])
    assert not list(run.glob("seed-*/checkpoint-*"))


def test_the_model_is_the_chosen_seeds_and_is_used_as_any(finished, data):
    run, results = finished
    chosen = run / f"seed-{results['chosen_seed']}"
    assert (run / "model.safetensors").read_bytes() == (chosen / "model.safetensors").read_bytes()
    assert type(AutoModelForSequenceClassification.from_pretrained(run)) is MATRobertaForSequenceClassification
    classify = pipeline("text-classification", model=str(run), device="cpu")
    right = 0
    lines = gzip.decompress((data / "test.tsv.gz").read_bytes()).decode().splitlines()[1:]
    for line in lines:
        _, first, second, label = line.split("\t")
        right += classify({"text": first, "text_pair": second})["label"] == label
    of_seed = results["seeds"][results["chosen_seed"] - 1]
    assert of_seed["test"]["accuracy"] == pytest.approx(100 * right / len(lines))


def test_an_interrupted_run_ends_as_if_it_had_not_been(finished, data, base, tmp_path, monkeypatch):
    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if args.seed == 2 and state.global_step == 9:
                raise KeyboardInterrupt

    plain = classification.Trainer
    recipe = recipe_of(data, base, tmp_path / "run")
    monkeypatch.setattr(classification, "Trainer", lambda *args, **rest: plain(*args, **rest, callbacks=[Kill()]))
    with pytest.raises(KeyboardInterrupt):
        run_classification(recipe)
    monkeypatch.undo()
    assert (tmp_path / "run" / "seed-1" / "results.json").is_file()
    assert (tmp_path / "run" / "seed-2" / "checkpoint-6").is_dir()
    with pytest.raises(UserError, match="another recipe"):
        run_classification(recipe_of(data, base, tmp_path / "run", learning_rate=1e-3))
    results = run_classification(recipe)
    for seed in (1, 2):
        ours, theirs = (
            load_file(run / f"seed-{seed}" / "model.safetensors") for run in (tmp_path / "run", finished[0])
        )
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert results["validation"] == finished[1]["validation"]
    with pytest.raises(UserError, match="finished run"):
        run_classification(recipe)
    again = run_classification(recipe_of(data, base, tmp_path / "run", seeds=[2]), overwrite=True)
    assert [result["seed"] for result in again["seeds"]] == [2]
    assert not (tmp_path / "run" / "seed-1").exists()


def test_other_models_are_fine_tuned_plainly(data, base, tmp_path):
    recipe = recipe_of(data, base, tmp_path / "run", seeds=[1], max_steps=2, eval_strategy="steps", eval_steps=2,
                       save_strategy="steps", save_steps=2)  # fmt: skip
    recipe.values["model"] = {"family": "roberta", "init_from": str(base)}
    run_classification(recipe)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").config.model_type == "roberta"


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_are_those_of_the_definitions(classes):
    draw = np.random.default_rng(classes)
    expected, predicted = draw.integers(classes, size=(2, 60))
    found = classification_scores(predicted, expected, classes)
    pairs = list(zip(expected.tolist(), predicted.tolist(), strict=True))
    assert found["accuracy"] == pytest.approx(100 * sum(a == b for a, b in pairs) / 60)
    f1 = []
    for positive in range(classes):
        precision_of = [a == positive for a, b in pairs if b == positive]
        recall_of = [b == positive for a, b in pairs if a == positive]
        precision, recall = sum(precision_of) / len(precision_of), sum(recall_of) / len(recall_of)
        f1.append(2 * precision * recall / (precision + recall))
    assert found["f1"] == pytest.approx(100 * (f1[1] if classes == 2 else sum(f1) / 3))
    if classes == 2:
        assert found["matthews"] == pytest.approx(100 * np.corrcoef(expected, predicted)[0, 1])
    else:  # of indicator vectors, summed over the classes
        a, b = (np.eye(3)[each] for each in (expected, predicted))
        covariance = [((x - x.mean(0)) * (y - y.mean(0))).sum() for x, y in ((a, b), (a, a), (b, b))]
        assert found["matthews"] == pytest.approx(100 * covariance[0] / math.sqrt(covariance[1] * covariance[2]))
    assert classification_scores(np.zeros(4, int), np.zeros(4, int), 2)["matthews"] == 0


def test_rows_are_read_as_they_are(data):
    args = ClassificationArguments(
        root=str(data), train="train.tsv", validation_size=10, sentence1="first", sentence2="second", label="class"
    )
    splits = read_splits(args)
    assert (splits["train"].num_rows, splits["validation"].num_rows) == (86, 10)
    assert splits["train"][0]["pair"].startswith('we saw "the ')
    assert read_splits(args)["validation"][:] == splits["validation"][:]
    assert class_names(args, splits) == ["other", "same"]


def test_a_file_may_hold_objects_or_quoted_columns(tmp_path):
    expected = [("a, b", "1"), ("NA", "0"), ("null", "1")]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"sentence": t, "label": int(n)}) + "\n" for t, n in expected)
    )
    (tmp_path / "a.csv").write_text("sentence,label\n" + "".join(f'"{t}",{n}\n' for t, n in expected))
    for kind in ("jsonl", "csv"):
        args = ClassificationArguments(format=kind, root=str(tmp_path), train=f"a.{kind}", validation=f"a.{kind}")
        found = read_splits(args)["train"]
        assert list(zip(found["text"], found["label"], strict=True)) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"train": None}, "data.train is not set"),
        ({"validation": None}, "validation_size: give exactly one"),
        ({"sentence1": "frist"}, "data.sentence1: there is no column 'frist'; the columns are id, first"),
        ({"train": "nothing.tsv"}, "no file"),
        ({"labels": ["same"]}, "two or more classes"),
        ({"labels": ["same", "different"]}, "the class 'other' is not one of same, different"),
        ({"format": "datasets"}, "data.name"),
        ({"validation": None, "validation_size": 500}, "only 96 rows"),
    ],
)
def test_mistakes_in_data_are_named(fields, words, data):
    usual = {"root": str(data), "train": "train.tsv", "validation": "dev.tsv", "sentence1": "first", "label": "class"}

    def read():
        args = ClassificationArguments(**{**usual, **fields})
        return class_names(args, read_splits(args))

    with pytest.raises(UserError, match=words):
        read()


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"seeds": [1, 1]}, "each once"),
        ({"metric_for_best_model": "bleu"}, "accepted: accuracy, f1, matthews"),
        ({"seed": 3}, "set training.seeds"),
        ({"learning_rat": 1}, "nearest is 'learning_rate'"),
    ],
)
def test_mistakes_in_training_are_named(training, words, data, base, tmp_path):
    with pytest.raises(UserError, match=words):
        recipe_of(data, base, tmp_path / "run", **training).training_arguments()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_packaged_recipes_load(name):
    recipe = load_recipe(name, kind=ClassificationRecipe)
    assert recipe.training_arguments().learning_rate == 1e-5
    assert len(RECIPES) == 4
