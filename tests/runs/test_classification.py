"""Classification: reading the data, the scores, and the files that a run of several seeds leaves behind."""

import gzip
import json
import math
import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets.arrow_dataset import Column
from huggingface_hub import ModelCard
from model_cases import scramble
from safetensors.torch import load_file
from tiny_run import counted_updates, tiny_recipe
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainerCallback,
    pipeline,
)

from hf_deepwide import MATRobertaForSequenceClassification, share
from hf_deepwide.checkpoint_files import read_results
from hf_deepwide.data.classification import ClassificationArguments, class_names, encode_rows, hold_out, read_splits
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.classification import classification_scores
from hf_deepwide.runs import figures
from hf_deepwide.runs.classification import ClassificationRecipe, run_classification
from hf_deepwide.runs.recipe import check_recipe, load_recipe, packaged_recipes
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.runs.run_folder import has_begun
from hf_deepwide.runs.schema import recipe_schema
from hf_deepwide.runs.seeds_folder import SeedsFolder
from hf_deepwide.training.classification import ClassificationTrainer

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
    """Gzipped files with a header. A quotation mark without a closing one is part of a sentence."""
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


@pytest.mark.parametrize("family", ["roberta", "mat_roberta"])
def test_a_trained_head_keeps_its_labels(family, data, base, tmp_path):
    """The base has the recipe's labels in another order. At the start, each model predicts as the base does."""
    names = {0: "same", 1: "other"}  # the recipe has `other` first
    labels = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    trained = scramble(AutoModelForSequenceClassification.from_pretrained(base, **labels)).eval()
    trained.save_pretrained(tmp_path / "base")
    usual = recipe_of(data, base, tmp_path / "run", seeds=[1], max_steps=1, learning_rate=1e-12).values
    more = {"attention_branches": 2} if family == "mat_roberta" else {}
    model = {"family": family, "init_from": str(tmp_path / "base"), **more}
    recipe = check_recipe({**usual, "model": model}, "tiny", "tiny.yaml", ClassificationRecipe)
    run_classification(recipe)
    ours = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").eval()
    assert ours.config.id2label == {0: "other", 1: "same"}
    tokens = torch.tensor([[0, 7, 9, 11, 2]])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, trained(tokens).logits.flip(-1), rtol=1e-4, atol=1e-5)


def test_a_base_whose_sentences_have_no_end_token(data, tmp_path):
    """BERT and DistilBERT have such tokenizers: they use separators."""
    base, words = tmp_path / "base", sorted({word for row in rows(200, 9) for word in " ".join(row[:2]).split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = DistilBertTokenizerFast(vocab={word: number for number, word in enumerate([*special, *words])})
    assert tokenizer.eos_token is None
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 66}
    DistilBertForMaskedLM(DistilBertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    values = recipe_of(data, base, tmp_path / "run", seeds=[1], num_train_epochs=1).values
    values = {**values, "model": {"family": "distilbert", "init_from": str(base)}}
    recipe = check_recipe(values, "tiny", "tiny.yaml", ClassificationRecipe)
    assert run_classification(recipe)["test"]["accuracy"]["median"] > 0


@pytest.mark.parametrize("family", ["roberta", "mat_roberta"])
def test_accumulation_changes_no_gradient(family, data, base, tmp_path):
    """Two batches of 8 train as one batch of 16, also for classes whose `forward` takes any keyword."""
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = {"roberta": plain, "mat_roberta": {"dropout": 0.0, "attention_dropout": 0.0, "attention_branches": 2}}
    model["mat_roberta"] |= {"drop_branch": 0.0}
    for size, accumulation in ((16, 1), (8, 2)):
        run = tmp_path / f"{size}"
        recipe = recipe_of(
            data, base, run, seeds=[1], max_steps=4, per_device_train_batch_size=size, max_grad_norm=0,
            gradient_accumulation_steps=accumulation, optim="sgd", learning_rate=0.1, load_best_model_at_end=False,
            lr_scheduler_type="constant",
        )  # fmt: skip
        values = {**recipe.values, "model": {"family": family, "init_from": str(base), **model[family]}}
        run_classification(check_recipe(values, "tiny", "tiny.yaml", ClassificationRecipe))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("16", "8"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)


def test_a_run_does_not_go_on_with_other_data(data, base, tmp_path, monkeypatch):
    """The seeds of the run would be trained and scored on different rows."""
    corpus = tmp_path / "corpus"
    shutil.copytree(data, corpus)
    with monkeypatch.context() as patch:
        kill_at(patch, seed=2, step=2)
        with pytest.raises(KeyboardInterrupt):
            run_classification(recipe_of(corpus, base, tmp_path / "run"))
    shutil.copy(data / "dev.tsv.gz", corpus / "test.tsv.gz")
    with pytest.raises(UserError, match="the test data have changed since the run began"):
        run_classification(recipe_of(corpus, base, tmp_path / "run"))
    shutil.copy(data / "test.tsv.gz", corpus / "test.tsv.gz")
    assert len(run_classification(recipe_of(corpus, base, tmp_path / "run"))["seeds"]) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type cosine_with_min_lr cannot be made"),
        ({"report_to": "foo"}, "report_to"),
        ({"log_level": "foo"}, "log_level is 'foo'"),
        ({"torch_compile_backend": "foo"}, "torch_compile_backend is 'foo'"),
        ({"fsdp": "full_shard"}, "fsdp spreads weights over several processes"),
    ],
)
def test_names_in_training_are_checked_before_anything_is_read(fields, words, base, tmp_path):
    with pytest.raises(UserError, match=words):
        run_classification(recipe_of(tmp_path / "nowhere", base, tmp_path / "run", **fields))


def after_steps(monkeypatch, act):
    """Call a function with the arguments and the state after each step of a training."""

    class Call(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            act(args, state)

    plain = Trainer.__init__
    monkeypatch.setattr(
        Trainer, "__init__", lambda self, *args, **rest: plain(self, *args, **rest, callbacks=[Call()])
    )


def kill_at(monkeypatch, seed, step):
    def act(args, state):
        if (args.seed, state.global_step) == (seed, step):
            raise KeyboardInterrupt

    after_steps(monkeypatch, act)


def same_weights(ours, theirs):
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


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


def test_the_card_has_the_scores_of_the_model_and_of_all_seeds(finished, tmp_path, used_in_a_fork):
    run, results = finished
    card = ModelCard.load(run / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    of_seed = results["seeds"][results["chosen_seed"] - 1]["test"]
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    names = {"accuracy": "accuracy", "f1": "f1", "matthews": "matthews_correlation"}
    assert scores == {theirs: round(of_seed[ours], 2) for ours, theirs in names.items()}
    told = results["test"]["accuracy"]
    assert f"± standard deviation | {told['median']:.2f} ± {told['standard_deviation']:.2f} |" in card.text
    assert "lower of the two" in card.text, "of two seeds neither has the median score"
    share(run, tmp_path / "shared")
    shared = (tmp_path / "shared" / "README.md").read_text()
    assert "trust_remote_code=True" in shared
    assert "import hf_deepwide  #" not in shared


def test_its_figure_has_the_curve_of_each_seed(finished, tmp_path, monkeypatch):
    run, results = finished
    assert (run / "plots" / "learning_curves.png").is_file()
    shown = {}
    monkeypatch.setattr(figures, "plot_runs", lambda histories, path: shown.update(histories))
    list(figures.plot_curves([run], tmp_path / "plots"))
    assert list(shown) == ["run, seed 1", "run, seed 2"]
    step, loss, accuracy, *_ = results["seeds"][1]["curve"][2]
    assert (
        shown["run, seed 2"][2] | {"step": step, "eval_loss": loss, "eval_accuracy": accuracy}
        == (shown["run, seed 2"][2])
    )


def test_a_run_may_do_without_validation_on_its_way(data, base, tmp_path):
    plain = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "max_steps": 2}
    results = run_classification(recipe_of(data, base, tmp_path / "run", seeds=[1], **plain))
    assert results["seeds"][0]["curve"] == []
    assert (tmp_path / "run" / "results.json").is_file()
    assert not (tmp_path / "run" / "plots").exists()


def test_sizes_of_the_base_may_be_repeated(base):
    values = {"model": {"family": "mat_roberta", "init_from": str(base), "d_model": 16}, "tokenizer": {"path": "a"},
              "data": {"train": "a", "validation_size": 1}, "training": {"output_dir": "b"}}  # fmt: skip
    assert check_recipe(values, "tiny", "tiny.yaml", ClassificationRecipe).model_fields == {"d_model": 16}
    values["model"]["d_model"] = -16
    with pytest.raises(UserError, match="d_model"):
        check_recipe(values, "tiny", "tiny.yaml", ClassificationRecipe)


def test_a_long_text_can_be_cut_to_what_the_model_takes(finished):
    classify = pipeline("text-classification", model=str(finished[0]), device="cpu")
    assert classify.tokenizer.model_max_length == 64  # RoBERTa's positions start after the padding id
    assert classify("there is a dog " * 100, truncation=True)


def test_the_tokenizer_is_the_bases(data, base, tmp_path):
    """With another tokenizer, a token would get the wrong embedding or none. The refused start leaves no folder."""
    other = train_tokenizer(["another text altogether"] * 9, TokenizerArguments(vocab_size=40))
    other.save_pretrained(tmp_path / "other")
    longer = AutoTokenizer.from_pretrained(base)
    longer.add_tokens(["<new>"])
    longer.save_pretrained(tmp_path / "longer")
    for name, told in (("other", "is not the tokenizer of the base"), ("longer", "has embeddings for")):
        recipe = recipe_of(data, base, tmp_path / "run")
        recipe.tokenizer.path = str(tmp_path / name)
        with pytest.raises(UserError, match=told):
            run_classification(recipe)
    assert not (tmp_path / "run").exists()


def test_a_start_that_trained_nothing_may_be_corrected(data, base, tmp_path, monkeypatch):
    kill_at(monkeypatch, seed=1, step=1)
    with pytest.raises(KeyboardInterrupt):
        run_classification(recipe_of(data, base, tmp_path / "run", seeds=[1]))
    monkeypatch.undo()
    results = run_classification(recipe_of(data, base, tmp_path / "run", seeds=[1], max_steps=2))
    assert [result["steps"] for result in results["seeds"]] == [2]


def test_an_interrupted_run_ends_as_if_it_had_not_been(finished, data, base, tmp_path, monkeypatch):
    recipe = recipe_of(data, base, tmp_path / "run")
    kill_at(monkeypatch, seed=2, step=9)
    with pytest.raises(KeyboardInterrupt):
        run_classification(recipe)
    monkeypatch.undo()
    assert (tmp_path / "run" / "seed-1" / "results.json").is_file()
    assert (tmp_path / "run" / "seed-2" / "checkpoint-6").is_dir()
    with pytest.raises(UserError, match="another recipe"):
        run_classification(recipe_of(data, base, tmp_path / "run", learning_rate=1e-3))
    first = (tmp_path / "run" / "seed-1" / "model.safetensors").stat().st_mtime_ns
    with counted_updates() as made:
        results = run_classification(recipe)
    assert made == list(range(7, 19)), "of the second seed, from its checkpoint on"
    assert (tmp_path / "run" / "seed-1" / "model.safetensors").stat().st_mtime_ns == first
    for seed in (1, 2):
        assert same_weights(tmp_path / "run" / f"seed-{seed}", finished[0] / f"seed-{seed}")
    assert results["validation"] == finished[1]["validation"]
    with pytest.raises(UserError, match="finished run"):
        run_classification(recipe)
    again = run_classification(recipe_of(data, base, tmp_path / "run", seeds=[2]), overwrite=True)
    assert [result["seed"] for result in again["seeds"]] == [2]
    assert not (tmp_path / "run" / "seed-1").exists()


def test_runs_of_another_kind_stay(data, base, tmp_path, monkeypatch):
    """A translation model and a classifier look for their files in different places."""
    recipe = recipe_of(data, base, tmp_path / "run", seeds=[1, 2])
    kill_at(monkeypatch, seed=2, step=9)
    with pytest.raises(KeyboardInterrupt):
        run_classification(recipe)
    monkeypatch.undo()
    kept = (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="unfinished run of another kind"):
        run_recipe(tiny_recipe(tmp_path / "run"))
    assert (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8") == kept

    translation = tiny_recipe(tmp_path / "other", max_steps=8)
    run_recipe(translation)
    (tmp_path / "other" / "results.json").unlink()  # as if interrupted
    kept = (tmp_path / "other" / "recipe.yaml").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="unfinished run of another kind"):
        run_classification(recipe_of(data, base, tmp_path / "other"))
    assert (tmp_path / "other" / "recipe.yaml").read_text(encoding="utf-8") == kept


def test_a_run_of_another_kind_takes_the_place_of_all_that_was_written(finished, data, base, tmp_path):
    run, ours = tmp_path / "run", {"run.json", "recipe.yaml", "results.json", "README.md", "model.safetensors"}
    shutil.copytree(finished[0], run)
    (run / "seed-notes").mkdir()
    run_recipe(tiny_recipe(run, max_steps=8), overwrite=True)
    assert not list(run.glob("seed-[0-9]*")), "nothing of the classifier is left"
    assert (run / "seed-notes").is_dir()
    assert read_results(run)["recipe"]["training"]["max_steps"] == 8

    (run / "seed-1").mkdir()  # in a run of a translation model, this is not the folder of a seed
    (run / "seed-1" / "notes.txt").touch()
    run_recipe(tiny_recipe(run, max_steps=8), overwrite=True)
    assert (run / "seed-1" / "notes.txt").is_file()
    shutil.rmtree(run / "seed-1")

    run_classification(recipe_of(data, base, run, seeds=[1]), overwrite=True)
    tokenizer = {path.name for path in (run / "seed-1").iterdir()}
    left = {path.name for path in run.iterdir()} - ours - tokenizer
    assert left == {"seed-1", "seed-notes", "plots"}, "no checkpoints, translations or logs"


def test_a_half_written_checkpoint_is_set_aside(finished, data, base, tmp_path, monkeypatch):
    recipe = recipe_of(data, base, tmp_path / "run", seeds=[1])
    kill_at(monkeypatch, seed=1, step=13)
    with pytest.raises(KeyboardInterrupt):
        run_classification(recipe)
    monkeypatch.undo()
    seed = tmp_path / "run" / "seed-1"
    (seed / "checkpoint-12" / "trainer_state.json").unlink()
    shutil.copytree(seed / "checkpoint-6" if (seed / "checkpoint-6").is_dir() else seed / "checkpoint-12",
                    seed / "checkpoint-11")  # fmt: skip
    with counted_updates() as made:
        run_classification(recipe)
    assert made == list(range(7, 19))
    assert same_weights(seed, finished[0] / "seed-1")
    assert not list(seed.glob("*checkpoint-*"))


def test_a_signal_saves_the_step_and_the_same_command_goes_on(finished, data, base, tmp_path, monkeypatch, caplog):
    """Transformers alone would keep only the best checkpoint, which may not be the checkpoint of this step."""
    recipe = recipe_of(data, base, tmp_path / "run", seeds=[1])
    after_steps(monkeypatch, lambda args, state: state.global_step == 8 and os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as exit:
        run_classification(recipe)
    monkeypatch.undo()
    assert exit.value.code == 128 + signal.SIGTERM
    assert "Give the same command again" in caplog.text
    seed = tmp_path / "run" / "seed-1"
    assert {path.name for path in seed.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-8"}
    with counted_updates() as made:
        run_classification(recipe)
    assert made == list(range(9, 19))
    assert same_weights(seed, finished[0] / "seed-1")


def test_a_training_that_had_ended_is_not_continued(data, base, tmp_path, monkeypatch):
    """If the last step is within an epoch, a Trainer would make one more step."""
    steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 4, "save_steps": 4, "max_steps": 8}
    recipes = [
        recipe_of(data, base, tmp_path / name, seeds=[1], save_total_limit=5, **steps) for name in ("whole", "killed")
    ]
    expected = run_classification(recipes[0])
    plain = Trainer.evaluate

    def kill(self, *args, metric_key_prefix="eval", **rest):
        if metric_key_prefix == "validation":
            raise KeyboardInterrupt
        return plain(self, *args, metric_key_prefix=metric_key_prefix, **rest)

    monkeypatch.setattr(Trainer, "evaluate", kill)
    with pytest.raises(KeyboardInterrupt):
        run_classification(recipes[1])
    monkeypatch.undo()
    (tmp_path / "killed").rename(tmp_path / "moved")
    moved = recipe_of(data, base, tmp_path / "moved", seeds=[1], save_total_limit=5, **steps)
    with counted_updates() as made:
        assert run_classification(moved)["seeds"] == expected["seeds"]
    assert made == []
    assert same_weights(tmp_path / "moved", tmp_path / "whole")


def test_an_older_run_stays_until_the_first_seed_of_the_new_one_is_trained(
    finished, data, base, tmp_path, monkeypatch
):
    """Files that the run did not write stay, whatever their names."""
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    (run / "seed-notes.txt").write_text("mine")
    (run / "seed-comparison").mkdir()
    (run / "seed-comparison" / "table.txt").write_text("mine")
    before = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    new = recipe_of(data, base, run, seeds=[2, 3], learning_rate=1e-3)
    for step in (2, 8):  # before the first checkpoint, and after it
        kill_at(monkeypatch, seed=2, step=step)
        with pytest.raises(KeyboardInterrupt):
            run_classification(new, overwrite=True)
        monkeypatch.undo()
        files = [path for path in run.rglob("*") if path.is_file() and ".new" not in path.relative_to(run).parts]
        assert {path.relative_to(run): path.read_bytes() for path in files} == before
        assert (run / ".new").exists() is (step == 8)
    with pytest.raises(UserError, match="holds a finished run"):
        run_classification(recipe_of(data, base, run, seeds=[2, 3], learning_rate=2e-3))
    assert all((run / path).read_bytes() == content for path, content in before.items())
    kill_at(monkeypatch, seed=3, step=1)
    with pytest.raises(KeyboardInterrupt):
        run_classification(new)
    monkeypatch.undo()
    mine = {"seed-notes.txt", "seed-comparison"}
    assert {path.name for path in run.iterdir()} == {"run.json", "recipe.yaml", "seed-2", "seed-3", *mine}
    assert (run / "seed-comparison" / "table.txt").read_text() == "mine"
    results = run_classification(new)
    alone = run_classification(recipe_of(data, base, tmp_path / "alone", seeds=[2, 3], learning_rate=1e-3))
    assert results["seeds"] == alone["seeds"]
    assert same_weights(run, tmp_path / "alone")


@pytest.mark.parametrize(
    ("max_steps", "words"), [(6, "seed 1, step 2: the training loss is"), (1, "seed 1, step 1: weights are not")]
)
def test_a_training_that_diverges_is_no_result(max_steps, words, data, base, tmp_path, monkeypatch):
    plain = torch.optim.AdamW.step

    def diverge(self, *args, **rest):
        plain(self, *args, **rest)
        self.param_groups[0]["params"][0].data.fill_(math.inf)

    monkeypatch.setattr(torch.optim.AdamW, "step", diverge)
    recipe = recipe_of(data, base, tmp_path / "run", seeds=[1], max_steps=max_steps)
    with pytest.raises(UserError, match=words):
        run_classification(recipe)
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert not list((tmp_path / "run").rglob("results.json"))


@pytest.mark.parametrize(
    ("training", "advice"),
    [
        (True, r"per_device_train_batch_size and double training.gradient_accumulation_steps, or lower data.max_len"),
        (False, r"per_device_eval_batch_size, or lower data.max_length"),
    ],
)
def test_what_to_do_where_memory_runs_out(training, advice, data, base, tmp_path, monkeypatch):
    def compute_loss(self, model, *args, **kwargs):
        if model.training == training:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Trainer.compute_loss(self, model, *args, **kwargs)

    monkeypatch.setattr(ClassificationTrainer, "compute_loss", compute_loss)
    with pytest.raises(UserError, match=rf"seed 1, step \d+: memory ran out on a batch of \d+ rows. Halve .*{advice}"):
        run_classification(recipe_of(data, base, tmp_path / "run", seeds=[1]))


def test_long_sentences_are_cut_to_the_positions_of_the_base(data, base, tmp_path):
    (tmp_path / "long.tsv").write_text("sentence\tlabel\n" + f"{'a dog ' * 100}\tyes\na tree\tno\n" * 4)
    recipe = recipe_of(data, base, tmp_path / "run", seeds=[1], num_train_epochs=1)
    place = str(tmp_path / "long.tsv")
    recipe.data = ClassificationArguments(train=place, validation=place, max_length=500)
    recipe.values["model"] = {"family": "roberta", "init_from": str(base)}
    run_classification(recipe)
    assert recipe.data.max_length == 64


def test_other_models_are_fine_tuned_plainly(data, base, tmp_path):
    recipe = recipe_of(data, base, tmp_path / "run", seeds=[1], max_steps=2, eval_strategy="steps", eval_steps=2,
                       save_strategy="steps", save_steps=2)  # fmt: skip
    recipe.values["model"] = {"family": "roberta", "init_from": str(base)}
    run_classification(recipe)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").config.model_type == "roberta"


def test_an_encoder_decoder_model_is_scored_by_its_logits(data, base, tmp_path):
    """The output of such a model also holds the encoder's states."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = BartConfig(vocab_size=len(tokenizer), d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16,
                        max_position_embeddings=66, decoder_start_token_id=2, **ids, **layers, **heads)  # fmt: skip
    BartModel(config).save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    recipe = recipe_of(data, tmp_path / "bart", tmp_path / "run", seeds=[1], max_steps=2, eval_strategy="steps",
                       eval_steps=2, save_strategy="steps", save_steps=2)  # fmt: skip
    recipe.values["model"] = {"family": "bart", "init_from": str(tmp_path / "bart")}
    results = run_classification(recipe)
    assert 0 <= results["seeds"][0]["validation"]["accuracy"] <= 100


def test_a_warm_up_that_is_longer_than_the_training_is_refused(data, base, tmp_path):
    recipe = recipe_of(data, base, tmp_path / "run", seeds=[1], max_steps=2, warmup_steps=9)
    with pytest.raises(UserError, match="warmup_steps is 9, and the whole training has 2 steps"):
        run_classification(recipe)


@pytest.mark.parametrize(
    ("key", "value"),
    [("problem_type", "regression"), ("num_labels", 2), ("id2label", {0: "a"}), ("label2id", {"a": 0})],
)
@pytest.mark.parametrize("family", ["mat_roberta", "roberta"])
def test_labels_are_not_keys_of_the_model(family, key, value, data, base, tmp_path):
    values = recipe_of(data, base, tmp_path / "run").values
    values["model"] = {"family": family, "init_from": str(base), key: value}
    with pytest.raises(UserError, match=rf"model\.{key} is not accepted here"):
        check_recipe(values, "tiny", "tiny.yaml", ClassificationRecipe)
    assert key not in recipe_schema(ClassificationRecipe)["properties"]["model"]["properties"]


def test_a_base_is_refused_before_the_sentences_are_read(data, base, tmp_path):
    recipe = recipe_of(data, base, tmp_path / "run")
    recipe.data = ClassificationArguments(train="nowhere", validation="nowhere")
    for model, told in (
        ({"family": "roberta", "num_attention_heads": 1}, "model.num_attention_heads cannot be 1"),
        ({"family": "bert"}, "is a roberta; model.family says bert"),
    ):
        recipe.values["model"] = {**model, "init_from": str(base)}
        with pytest.raises(UserError, match=told):
            run_classification(recipe)


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
    else:  # the correlation of indicator vectors, summed over the classes
        a, b = (np.eye(3)[each] for each in (expected, predicted))
        covariance = [((x - x.mean(0)) * (y - y.mean(0))).sum() for x, y in ((a, b), (a, a), (b, b))]
        assert found["matthews"] == pytest.approx(100 * covariance[0] / math.sqrt(covariance[1] * covariance[2]))
    assert classification_scores(np.zeros(4, int), np.zeros(4, int), 2)["matthews"] == 0


def test_rows_are_read_as_they_are(data):
    args = ClassificationArguments(
        root=str(data), train="train.tsv", validation_size=10, sentence1="first", sentence2="second", label="class"
    )
    splits = hold_out(args, read_splits(args))
    assert (splits["train"].num_rows, splits["validation"].num_rows) == (86, 10)
    assert splits["train"][0]["pair"].startswith('we saw "the ')
    assert hold_out(args, read_splits(args))["validation"][:] == splits["validation"][:]
    assert class_names(args, splits) == ["other", "same"]


def test_a_file_may_hold_objects_or_quoted_columns(tmp_path):
    expected = [("a, b", "1"), ("NA", "0"), ("null", "1")]
    names = [("12", "01"), ("1.0", "02")]  # must stay text, and not become numbers
    (tmp_path / "b.csv").write_text("sentence,label\n" + "".join(f"{t},{n}\n" for t, n in names))
    found = read_splits(ClassificationArguments("csv", "b.csv", "b.csv", root=str(tmp_path)))["train"]
    assert list(zip(found["text"], found["label"], strict=True)) == names
    dates = [("2020-01-01", "a"), ("2020-01-02", "1.50")]  # must stay text, and not become dates
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"sentence": t, "label": n}) + "\n" for t, n in dates))
    found = read_splits(ClassificationArguments("jsonl", "b.jsonl", "b.jsonl", root=str(tmp_path)))["train"]
    assert list(zip(found["text"], found["label"], strict=True)) == dates
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"sentence": t, "label": int(n)}) + "\n" for t, n in expected)
    )
    (tmp_path / "a.csv").write_text("sentence,label\n" + "".join(f'"{t}",{n}\n' for t, n in expected))
    for kind in ("jsonl", "csv"):
        args = ClassificationArguments(format=kind, root=str(tmp_path), train=f"a.{kind}", validation=f"a.{kind}")
        found = read_splits(args)["train"]
        assert list(zip(found["text"], found["label"], strict=True)) == expected


def test_a_folder_that_datasets_reads_lies_below_the_root(tmp_path, monkeypatch, tmp_path_factory):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    (tmp_path / "folder").mkdir()
    rows = [("NA", "none"), ("null", "some"), ("a", "none")]
    (tmp_path / "folder" / "train.csv").write_text("sentence,label\n" + "".join(f"{t},{n}\n" for t, n in rows))
    args = ClassificationArguments("datasets", "train", "train", name="folder", root=str(tmp_path))
    found = read_splits(args)["train"]
    assert list(zip(found["text"], found["label"], strict=True)) == rows


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"train": None}, "data.train is not set"),
        ({"validation": None}, "validation_size: give exactly one"),
        (
            {"sentence1": "frist"},
            "train.tsv.gz, line 1: data.sentence1: there is no column 'frist'; the columns are id, first",
        ),
        ({"train": "nothing.tsv"}, "no file"),
        ({"labels": ["same"]}, "two or more classes"),
        ({"label": "id"}, "^data.label: the column 'id' of the training split has only the class '7'; name"),
        ({"labels": ["same", "different"]}, "the class 'other' is not one of same, different"),
        ({"format": "datasets"}, "data.name"),
        ({"validation": None, "validation_size": 500}, "only 96 rows"),
    ],
)
def test_mistakes_in_data_are_named(fields, words, data):
    usual = {"root": str(data), "train": "train.tsv", "validation": "dev.tsv", "sentence1": "first", "label": "class"}

    def read():
        args = ClassificationArguments(**{**usual, **fields})
        splits = read_splits(args)
        return class_names(args, splits), hold_out(args, splits)

    with pytest.raises(UserError, match=words):
        read()


def test_a_class_may_lie_in_the_rows_that_are_held_out(base, tmp_path):
    """Such a class is still one of the model's classes."""
    rows = [
        "first\tclass",
        *(f"the dog sleeps {number}\t{number % 2}" for number in range(20)),
        "the cat sleeps\trare",
    ]
    (tmp_path / "train.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    columns = {"train": "train.tsv", "sentence1": "first", "label": "class"}
    args = ClassificationArguments(root=str(tmp_path), validation_size=18, **columns)
    assert "rare" not in hold_out(args, read_splits(args))["train"]["label"][:]
    usual = recipe_of(tmp_path, base, tmp_path / "run", seeds=[1], max_steps=2).values
    data = {"root": str(tmp_path), **columns, "validation_size": 18}
    recipe = check_recipe({**usual, "data": data}, "tiny", "tiny.yaml", ClassificationRecipe)
    assert run_classification(recipe)["labels"] == ["0", "1", "rare"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"sentence": "b"}', "line 2: data.label: there is no column 'label'"),
        ('{"sentence": ["b"], "label": 1}', "line 2: 'sentence' holds a list; accepted: text or a number"),
        ('{"sentence": "b", "label": NaN}', "row 2: the column 'label' is empty"),
        ('{"sentence": "\\ud800", "label": 1}', "line 2: half a surrogate pair"),
        ('{"sentence": ', "line 2: not JSON"),
    ],
)
def test_a_wrong_object_is_named(line, words, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"sentence": "a", "label": 0}\n' + line + "\n")
    with pytest.raises(UserError, match=words):
        read_splits(ClassificationArguments("jsonl", "a.jsonl", "a.jsonl", root=str(tmp_path)))


@pytest.mark.parametrize(
    ("texts", "labels", "words"),
    [
        (["a", "b"], [0, None], "row 2: the column 'label' is empty"),
        ([["a"], ["b", "c"]], [0, 1], "'sentence' holds a list; accepted: text or a number"),
    ],
)
def test_a_wrong_column_of_a_data_set_is_named(texts, labels, words, tmp_path):
    split = Dataset.from_dict({"sentence": texts, "label": labels}).cast_column("label", ClassLabel(names=["n", "p"]))
    DatasetDict({"train": split}).save_to_disk(tmp_path / "set")
    args = ClassificationArguments("datasets", "train", "train", name="set", root=str(tmp_path))
    with pytest.raises(UserError, match=words):
        read_splits(args)


def test_numbers_to_be_learnt_are_refused_unless_they_are_listed(tmp_path):
    (tmp_path / "a.tsv").write_text("sentence\tlabel\na\t0.5\nb\t1\n")
    usual = {"train": "a.tsv", "validation": "a.tsv", "root": str(tmp_path)}
    args = ClassificationArguments(**usual)
    with pytest.raises(UserError, match=r"numbers such as 0\.5, .* data\.labels"):
        class_names(args, read_splits(args))
    args = ClassificationArguments(**usual, labels=["0.5", "1"])
    assert class_names(args, read_splits(args)) == ["0.5", "1"]


def test_columns_are_read_whole(data, monkeypatch):
    """Row by row, a column takes a thousand times as long."""
    monkeypatch.setattr(Column, "__iter__", lambda column: pytest.fail("row by row"))
    args = ClassificationArguments(
        root=str(data), train="train.tsv", validation="dev.tsv", sentence1="first", label="class"
    )
    assert class_names(args, read_splits(args)) == ["other", "same"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"sentence,label\na,1\nb,2,3,4\n", "a.csv, line 3: 4 columns; the header has 2"),
        (b"sentence,label\na,1,x\nb,2,y\n", "a.csv, line 2: 3 columns; the header has 2"),
        (b'sentence,label\n"a\nb",1\nb\n', "a.csv, line 4: 1 columns; the header has 2"),
        (b'sentence,label\na,1\n"b,2\n', "a.csv, line 3: unexpected end of data"),
        (b"sentence\na\n", r"data\.label: there is no column 'label'; the columns are sentence \(a split without"),
        ("sentence,label\nGr\u00fc\u00dfe,1\n".encode("latin-1"), "a.csv, line 2: byte 3 .0xfc. is not UTF-8"),
        (b"", "a.csv is empty"),
        (None, r"no file .*a.csv or a.csv.gz\. Relative paths start at \S+, else at \S+ \([^)]*\), else in the "
         r"working directory$"),
    ],
)  # fmt: skip
def test_a_broken_file_is_reported_with_its_fault(content, words, tmp_path):
    if content is not None:
        (tmp_path / "a.csv").write_bytes(content)
    args = ClassificationArguments(format="csv", root=str(tmp_path), train="a.csv", validation="a.csv")
    with pytest.raises(UserError, match=words) as error:
        read_splits(args)
    assert str(error.value).count("Relative paths") == (content is None)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"learning_rate": -1}, "learning_rate is -1; accepted: 0 or more"),
        ({"max_steps": 0}, "max_steps is 0; accepted: 1 or more"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0; accepted: 1 or more"),
        ({"seeds": [-1]}, "seeds: -1 is not accepted; accepted: 0 or more"),
        ({"seeds": [99999999999]}, "seeds: 99999999999 is not accepted"),
        ({"save_only_model": True}, "a run is resumed from its checkpoints"),
        ({"prediction_loss_only": True}, "training.prediction_loss_only is not accepted here: scores are of all"),
        ({"batch_eval_metrics": True}, "scores are of all predictions"),
        ({"eval_do_concat_batches": False}, "scores are of all predictions"),
        ({"label_names": ["foo"]}, "labels are always called labels"),
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


def test_a_resumed_training_does_not_evaluate_as_at_its_start(data, base, tmp_path, monkeypatch):
    recipe = recipe_of(data, base, tmp_path / "run", seeds=[2], eval_on_start=True)
    with monkeypatch.context() as patch:
        kill_at(patch, seed=2, step=9)
        with pytest.raises(KeyboardInterrupt):
            run_classification(recipe)
    results = run_classification(recipe)
    assert [step for step, *_ in results["seeds"][0]["curve"]] == [0, 6, 12, 18]


def test_a_link_is_no_seed(tmp_path):
    """The target of the link belongs to somebody else, and names no files of the run."""
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    for folder in (run, theirs):
        folder.mkdir()
    (run / "notes.txt").write_text("mine")
    (theirs / "notes.txt").write_text("theirs")
    (theirs / "results.json").write_text("{}")
    (run / "seed-1").symlink_to(theirs)
    assert not has_begun(run)
    SeedsFolder(run).clear()
    assert (run / "notes.txt").read_text() == "mine"
    assert (run / "seed-1").is_symlink()


def test_classes_are_in_the_order_that_a_data_set_declares(tmp_path):
    """F1 is computed for the second class. In GLUE's paraphrase data, this is `equivalent`."""
    names = ["not_equivalent", "equivalent"]
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=names)})
    rows = Dataset.from_dict({"sentence": ["a", "b", "c"], "label": [1, 0, 1]}, features)
    DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    args = ClassificationArguments("datasets", "train", "train", name="saved", root=str(tmp_path))
    splits = read_splits(args)
    assert splits["train"]["label"][:] == ["equivalent", "not_equivalent", "equivalent"]
    assert class_names(args, splits) == names
    args.labels = names[::-1]
    assert class_names(args, splits) == names[::-1]


def test_rows_that_are_cut_are_counted(caplog):
    args = ClassificationArguments("tsv", "train", "train", max_length=8)
    tokenizer = train_tokenizer(["a dog sees a cat"] * 4, TokenizerArguments(vocab_size=40))
    rows = Dataset.from_dict({"text": ["a dog", "a dog " * 20], "label": ["no", "yes"]})
    encoded = encode_rows(args, rows, ["no", "yes"], tokenizer)
    assert max(map(len, encoded["input_ids"][:])) == 8
    assert "1 of 2 rows have more than data.max_length 8 tokens, and are cut" in caplog.text
