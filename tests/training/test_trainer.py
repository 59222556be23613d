"""The trainer's parts against plain loops: loss, evaluation, data order, speed, averaging."""

import copy
import io
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from safetensors.torch import load_file
from tiny_run import counted_updates, tiny_recipe, tiny_values
from transformers import (
    AutoConfig,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from watched_generation import watch_generation

from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer, training_texts
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.models.configuration_vanilla_transformer import VanillaTransformerConfig
from hf_deepwide.runs.build import build_model
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.runs.run_folder import RunFolder
from hf_deepwide.runs.translation import Translation
from hf_deepwide.training import memory
from hf_deepwide.training.arguments import TranslationTrainingArguments
from hf_deepwide.training.callbacks import EarlyStoppingCallback, EpochCallback, SeedByRank
from hf_deepwide.training.masked_lm import MaskedLMTrainer
from hf_deepwide.training.memory import keep_memory, peak_memory
from hf_deepwide.training.trainer import TokenBatchTrainer
from hf_deepwide.training.translation import TranslationTrainer

FAMILIES = ["vanilla_transformer", "mat", "marian"]
STILL = {"dropout": 0.0}
HELD = 2**30  # bytes that a fixture holds while it starts another process


@pytest.fixture(scope="module")
def corpus():
    recipe = tiny_recipe(Path("unused"))
    texts = {split: load_parallel(recipe.data, split) for split in ("train", "validation")}
    tokenizer = train_tokenizer(training_texts(texts["train"]), TokenizerArguments(vocab_size=200))
    encoded = {split: encode(rows, tokenizer, recipe.data, filter=split == "train") for split, rows in texts.items()}
    return SimpleNamespace(texts=texts, tokenizer=tokenizer, encoded=encoded)


@pytest.fixture
def make(corpus, tmp_path):
    """A function that makes a trainer on the tiny corpus. Its keywords are training arguments."""

    def make_trainer(family="mat", model=None, **training) -> TranslationTrainer:
        model = {**STILL, **({"drop_branch": 0.0} if family == "mat" else {}), **(model or {})}
        training = {"bf16": False, "eval_strategy": "no", "load_best_model_at_end": False, **training}
        recipe = tiny_recipe(tmp_path / "run", family=family, model=model, **training)
        args = recipe.training_arguments()
        return TranslationTrainer(
            build_model(recipe, corpus.tokenizer, args),
            args,
            corpus.tokenizer,
            train_dataset=corpus.encoded["train"],
            eval_dataset=corpus.encoded["validation"],
            eval_texts=corpus.texts["validation"],
        )

    return make_trainer


def naive_losses(model, rows, start: int, smoothing: float) -> tuple[torch.Tensor, int]:
    """The summed loss and the number of target tokens, by the formula for one sentence at a time."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        labels = torch.tensor(row["labels"])
        decoder_input_ids = torch.tensor([[start, *row["labels"][:-1]]])
        logits = model(input_ids=torch.tensor([row["input_ids"]]), decoder_input_ids=decoder_input_ids).logits[0]
        minus_log_p = -logits.double().log_softmax(-1)
        nll = minus_log_p[torch.arange(len(labels)), labels]
        total = total + ((1 - smoothing) * nll + smoothing * minus_log_p.mean(-1)).sum()
        tokens += len(labels)
    return total, tokens


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_of_accumulated_batches_is_one_step_of_all(family, smoothing, make, corpus):
    """Three batches of unequal size make one step. Its gradient is the gradient of the mean over all their tokens."""
    trainer = make(
        family, gradient_accumulation_steps=3, max_tokens=3000, max_steps=1, label_smoothing_factor=smoothing,
        optim="sgd", learning_rate=1.0, warmup_steps=0, max_grad_norm=0, logging_steps=1,
    )  # fmt: skip
    before = copy.deepcopy(trainer.model).eval()
    batches = list(trainer.get_train_dataloader().batch_sampler)[:3]
    assert len({len(batch) for batch in batches}) > 1, "equal batches would not tell the mean of means apart"
    trainer.train()

    rows = [corpus.encoded["train"][i] for batch in batches for i in batch]
    total, tokens = naive_losses(before, rows, before.config.decoder_start_token_id, smoothing)
    (total / tokens).backward()
    rate = trainer.state.log_history[0]["learning_rate"]
    for (name, old), new in zip(before.named_parameters(), trainer.model.parameters(), strict=True):
        if old.grad is not None:
            torch.testing.assert_close(new, old - rate * old.grad, rtol=1e-4, atol=2e-6, msg=name)
    assert trainer.state.log_history[0]["loss"] == pytest.approx((total / tokens).item(), rel=1e-5)
    assert trainer.throughput.state()["args"]["target_tokens"] == tokens
    norm = math.sqrt(sum(p.grad.double().square().sum() for p in before.parameters() if p.grad is not None))
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("family", ["mat", "marian"])
def test_validation_loss_is_per_token(family, make, corpus):
    trainer = make(family, max_tokens=1500)
    with torch.no_grad():
        rows = corpus.encoded["validation"].select(range(60))
        model = trainer.model.eval()
        total, tokens = naive_losses(model, rows, model.config.decoder_start_token_id, 0.1)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx((total / tokens).item(), rel=1e-5)


def test_no_logits_are_made_by_models_that_compute_the_loss(make):
    trainer = make("mat", max_steps=1)
    seen = []
    trainer.model.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.logits))
    trainer.train()
    trainer.evaluate()
    assert len(seen) > 1
    assert all(logits is None for logits in seen)


def test_validation_bleu_is_that_of_the_translations(make, corpus):
    trainer = make("mat", predict_with_generate=True, generation_num_beams=2)
    trainer.eval_texts = texts = corpus.texts["validation"].select(range(40))
    metrics = trainer.evaluate()
    arguments = EvaluationArguments(num_beams=2)
    translations = translate(trainer.model, corpus.tokenizer, texts["source"][:], arguments)
    assert metrics["eval_bleu"] == score(translations, texts["target"][:], metrics=["bleu"])["bleu"]


@pytest.mark.parametrize("bf16", [False, True])
def test_validation_in_training_decodes_the_fast_way(make, monkeypatch, bf16):
    """Decode the fast way although the trainer has put autocast around the model."""
    counts = watch_generation(monkeypatch)
    make("mat", max_steps=1, bf16=bf16, eval_strategy="steps", eval_steps=1, predict_with_generate=True).train()
    assert counts["twins"] == counts["generate"] > 0


class Record(TrainerCallback):
    """Keeps the batches that the model sees."""

    def __init__(self, trainer):
        self.batches = []
        collate = trainer.data_collator

        def recording(rows):
            batch = collate(rows)
            self.batches.append([tuple(row["input_ids"]) for row in rows])
            return batch

        recording.pad_to_multiple_of = collate.pad_to_multiple_of
        trainer.data_collator = recording


def test_each_epoch_has_every_sentence_once_in_another_order(make, corpus):
    trainer = make("mat", num_train_epochs=2, max_steps=-1, max_tokens=1024)
    record = Record(trainer)
    trainer.train()
    steps = len(record.batches) // 2
    everything = sorted(tuple(row) for row in corpus.encoded["train"]["input_ids"])
    first, second = record.batches[:steps], record.batches[steps:]
    for epoch in (first, second):
        assert sorted(sentence for batch in epoch for sentence in batch) == everything
    assert first != second


def test_passes_worker_settings_to_the_data_loader(make):
    trainer = make("vanilla_transformer", dataloader_num_workers=1, dataloader_prefetch_factor=5)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        assert (loader.num_workers, loader.prefetch_factor) == (1, 5)


@pytest.mark.skipif(
    "activation_checkpointing_kwargs" not in TranslationTrainingArguments.__dataclass_fields__,
    reason="of Transformers 5.23",
)
def test_checkpoints_every_second_layer(make):
    options = {"every_n_layers": 2, "offload": False, "use_reentrant": False}
    on = {"activation_checkpointing": True, "activation_checkpointing_kwargs": options}
    trainer = make(model={"encoder_layers": 4}, max_steps=1, save_strategy="steps", **on)
    trainer.train()
    assert [layer.gradient_checkpointing for layer in trainer.model.model.encoder.layers] == [True, False] * 2
    for options, words in (
        ({"every_n_layers": 0}, "every_n_layers is 0; accepted: 1 or more"),
        ({"offload": "cpu"}, "offload is 'cpu'; accepted: true, false"),
        ({"deep": 1}, r"^tiny.yaml: training: activation_checkpointing_kwargs \(once gradient_.*deep"),
    ):
        with pytest.raises(UserError, match=words):
            make(activation_checkpointing_kwargs=options)


@pytest.mark.parametrize("granularity", ["batch", "sentence"])
def test_evaluation_does_not_change_training(make, granularity):
    """The random numbers of dropout, and so the weights, do not depend on how often the model is evaluated."""
    model = {"dropout": 0.2, "drop_branch": 0.3, "drop_granularity": granularity}
    noisy = {"model": model, "max_steps": 6, "max_tokens": 1024}
    weights = []
    for evaluating in ({}, {"eval_strategy": "steps", "eval_steps": 2, "predict_with_generate": True}):
        trainer = make("mat", **noisy, **evaluating)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_base_of_another_family_is_widened(corpus, tmp_path):
    """Proximal initialisation by recipe: the initial model computes the same outputs as the base."""
    args = tiny_recipe(tmp_path / "run").training_arguments()
    base = build_model(tiny_recipe(tmp_path / "run", family="vanilla_transformer"), corpus.tokenizer, args)
    base.save_pretrained(tmp_path / "base")
    corpus.tokenizer.save_pretrained(tmp_path / "base")

    def start_from(folder, family="mat", **fields):
        values = tiny_values(tmp_path / "run", family)
        values["model"] = {"family": family, "init_from": str(folder), **fields}
        values["tokenizer"] = {"path": str(folder)}
        return build_model(check_recipe(values, "tiny", "tiny.yaml"), corpus.tokenizer, args).eval()

    wide = start_from(tmp_path / "base", attention_branches=3, drop_branch=0.2)
    assert (wide.config.model_type, wide.config.attention_branches, wide.config.d_model) == ("mat", 3, 32)
    assert wide.config._attn_implementation == args.attn_implementation
    batch = {"input_ids": torch.tensor([[5, 6, 7, 2]]), "decoder_input_ids": torch.tensor([[2, 8, 9]])}
    expected = base.eval()(**batch).logits
    torch.testing.assert_close(wide(**batch).logits, expected, rtol=0, atol=1e-5)
    same = start_from(tmp_path / "base", "vanilla_transformer", dropout=0.3)
    assert same.config.dropout == 0.3
    torch.testing.assert_close(same(**batch).logits, expected, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match=r"tiny\.yaml: model\.init_from .*nowhere"):
        start_from(tmp_path / "nowhere")
    with pytest.raises(UserError, match="vanilla_transformer model cannot be made into a marian model"):
        start_from(tmp_path / "base", "marian")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mat", {"encoder_attention_heads": 4}),
        ("mat", {"attention_branches": 6}),
        ("mat", {"normalize_before": True}),
        ("latent_depth", {"scale_embedding": False}),
        ("depthwise_lstm", {"attn_input_norm": False}),
        ("vanilla_transformer", {"encoder_layers": 2}),
        ("vanilla_transformer", {"tie_word_embeddings": False}),
        ("vanilla_transformer", {"residual": "deepnorm"}),
        ("vanilla_transformer", {"pad_token_id": 3}),
        ("marian", {"activation_function": "relu"}),
        ("t5", {"num_layers": 3}),
    ],
)
def test_fields_with_which_a_base_was_trained_are_refused(family, fields, corpus, tmp_path):
    """Refuse them also in the base's own family, where the weights would fit, or some would be drawn at random."""
    sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 16}
    values = tiny_values(tmp_path / "run", family)
    if family == "t5":
        values["model"] = {"family": family, **sizes}
    recipe = check_recipe(values, "tiny", "tiny.yaml")
    args = recipe.training_arguments()
    build_model(recipe, corpus.tokenizer, args).save_pretrained(tmp_path / "base")
    values["model"] |= {"init_from": str(tmp_path / "base")}
    values["tokenizer"] = {"path": str(tmp_path / "base")}
    rate = "dropout_rate" if family == "t5" else "dropout"
    values["model"][rate] = 0.3
    model = build_model(check_recipe(values, "tiny", "tiny.yaml"), corpus.tokenizer, args)
    assert getattr(model.config, rate) == 0.3
    values["model"] |= fields
    (field,) = fields
    with pytest.raises(UserError, match=rf"tiny\.yaml: model\.init_from .*: model\.{field} cannot be .*leave it out"):
        build_model(check_recipe(values, "tiny", "tiny.yaml"), corpus.tokenizer, args)


@pytest.mark.parametrize(
    "fields", [{"residual": "hyper", "residual_streams": 3}, {"layer_aggregation": "denseformer"}, {"residual": "mhc"}]
)
def test_plain_layers_can_be_joined_in_another_way(fields, corpus, tmp_path, caplog):
    """A base of the family whose layers are already joined in this way must keep its joints."""
    values = tiny_values(tmp_path / "run", "vanilla_transformer", {"normalize_before": True})
    args = check_recipe(values, "tiny", "tiny.yaml").training_arguments()

    def start(name, **changed):
        values["model"] |= changed
        model = build_model(check_recipe(values, "tiny", "tiny.yaml"), corpus.tokenizer, args).eval()
        model.save_pretrained(tmp_path / name)
        values["model"]["init_from"] = values["tokenizer"]["path"] = str(tmp_path / name)
        return model

    batch = {"input_ids": torch.tensor([[5, 6, 7, 2]]), "decoder_input_ids": torch.tensor([[2, 8, 9]])}
    plain, joined = (start(name, **changed)(**batch).logits for name, changed in (("a", {}), ("b", fields)))
    torch.testing.assert_close(joined, plain, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match=f"model.{next(iter(fields))} cannot be"):
        start("c", **{field: getattr(VanillaTransformerConfig, field) for field in fields})


@pytest.mark.parametrize(
    ("family", "message"),
    [("m2m_100", "a mat model cannot be made into a m2m_100 model"), ("mat", "model.attention_branches cannot be 4")],
)
def test_a_base_is_refused_before_the_corpus_is_read(family, message, corpus, tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path / "run", model={"attention_branches": 2})
    build_model(recipe, corpus.tokenizer, recipe.training_arguments()).save_pretrained(tmp_path / "base")
    values = tiny_values(tmp_path / "run", family)
    values["model"] = {"family": family, "init_from": str(tmp_path / "base")}
    values["tokenizer"] = {"path": str(tmp_path / "base")}
    if family == "mat":
        values["model"]["attention_branches"] = 4
    monkeypatch.setattr(Translation, "read", lambda *_: pytest.fail("the corpus is read"))
    with pytest.raises(UserError, match=message):
        run_recipe(check_recipe(values, "tiny", "tiny.yaml"))


@pytest.mark.parametrize(
    ("fields", "selection"),
    [
        ({}, "tempered"),
        ({"final_temperature": 0.5}, "hard"),
        ({"soft_selection_steps": 5, "inference_selection": "soft"}, "soft"),
    ],
)
def test_layers_are_chosen_as_the_recipe_draws_them_and_not_as_its_base_did(fields, selection, corpus, tmp_path):
    recipe = tiny_recipe(tmp_path / "run", family="latent_depth")
    base = build_model(recipe, corpus.tokenizer, recipe.training_arguments())
    base.save_pretrained(tmp_path / "base")
    corpus.tokenizer.save_pretrained(tmp_path / "base")
    values = tiny_values(tmp_path / "run")
    values["model"] = {"family": "latent_depth", "init_from": str(tmp_path / "base"), **fields}
    values["tokenizer"] = {"path": str(tmp_path / "base")}
    recipe = check_recipe(values, "tiny", "tiny.yaml")
    model = build_model(recipe, corpus.tokenizer, recipe.training_arguments())
    assert model.config.inference_selection == selection


@pytest.mark.parametrize("family", ["vanilla_transformer", "mat"])
def test_a_base_in_half_precision_is_trained_in_float32(family, corpus, tmp_path):
    """The base is used unchanged, or widened. In bfloat16 a small update would be lost to rounding."""
    recipe = tiny_recipe(tmp_path / "run", family="vanilla_transformer")
    base = build_model(recipe, corpus.tokenizer, recipe.training_arguments()).bfloat16()
    base.save_pretrained(tmp_path / "base")
    corpus.tokenizer.save_pretrained(tmp_path / "base")
    values = tiny_values(tmp_path / "run", family, max_steps=1, logging_steps=1)
    values["model"] = {"family": family, "init_from": str(tmp_path / "base")}
    values["tokenizer"] = {"path": str(tmp_path / "base")}
    recipe = check_recipe(values, "tiny", "tiny.yaml")
    args = recipe.training_arguments()
    start = build_model(recipe, corpus.tokenizer, args)
    assert {parameter.dtype for parameter in start.parameters()} == {torch.float32}
    TranslationTrainer(start, args, corpus.tokenizer, corpus.encoded["train"], corpus.encoded["validation"]).train()
    saved = load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert start.config.dtype == "float32", "as who loads the checkpoint will find it"


def test_early_stopping_and_the_best_checkpoint(tmp_path, capsys):
    """The learning rate ruins the model, so the first evaluation stays the best one."""
    recipe = tiny_recipe(
        tmp_path / "run", early_stopping_patience=2, learning_rate=3.0, warmup_steps=2, max_steps=40, max_grad_norm=0,
        eval_steps=2, save_steps=2, report_to="tensorboard",
    )  # fmt: skip
    results = run_recipe(recipe)
    assert list((tmp_path / "run" / "runs").rglob("events.*"))
    assert results["train"]["steps"] < 40
    best = int(results["train"]["weights"].split("step ")[1].split(",")[0])
    assert best == (ended := results["train"]["steps"]) - 4
    assert f"step {ended}: training ends early" in (told := capsys.readouterr().err)
    assert f"it was best at step {best}" in told
    kept = load_file(tmp_path / "run" / f"checkpoint-{best}" / "model.safetensors")
    final = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(kept[name], final[name]) for name in kept)


def test_a_run_that_ends_as_planned_did_not_end_early(tmp_path, capsys):
    run_recipe(tiny_recipe(tmp_path / "run", early_stopping_patience=9, max_steps=8))
    assert "training ends early" not in capsys.readouterr().err


def test_a_save_at_the_end_of_an_epoch_follows_the_evaluation(tmp_path):
    """The checkpoint of that step contains the evaluation, and so do the results."""
    every = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": False}
    run = tmp_path / "run"
    results = run_recipe(tiny_recipe(run, max_steps=12, **every))
    state = json.loads((run / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8"))
    (first,) = [entry["step"] for entry in state["log_history"] if "eval_loss" in entry]
    assert first == state["global_step"] == 6, "epochs of six steps"
    assert [step for step, _ in results["train"]["validation_curve"]] == [6, 12]


def test_a_resumed_run_does_not_evaluate_as_at_its_start(make, tmp_path):
    often = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    make("mat", max_steps=4, **often).train()
    again = make("mat", max_steps=4, **often)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert [entry["step"] for entry in again.state.log_history if "eval_loss" in entry] == [0, 2, 4]


def test_a_stream_is_trained_on_and_resumed(tmp_path):
    """A local `datasets` folder, streamed: several passes, and the same weights after an interruption."""
    values = tiny_values(tmp_path, model={"dropout": 0.1}, max_steps=12, max_tokens=1024, bf16=False)
    texts = {split: load_parallel(tiny_recipe(tmp_path).data, split) for split in ("train", "validation", "test")}
    for split, rows in texts.items():
        renamed = Dataset.from_dict({"de": rows["source"][:200], "en": rows["target"][:200]})
        renamed.to_json(tmp_path / "corpus" / f"{split}.jsonl")
    values["data"] = {
        "format": "datasets", "name": str(tmp_path / "corpus"), "streaming": True, "source_lang": "de",
        "target_lang": "en", "train": "train", "validation": "validation", "test": "test", "max_length": 100,
    }  # fmt: skip
    finals = []
    for name in ("whole", "cut"):
        values["training"]["output_dir"] = str(tmp_path / name)
        recipe = check_recipe(values, "tiny", "tiny.yaml")
        train = run_recipe(recipe)["train"]
        words = sum(len(text.split()) for text in texts["train"]["target"][:200])
        assert 1 < train["epochs"] <= train["target_tokens"] / words, "passes, and not the steps' share of all"
        if name == "cut":
            (tmp_path / name / "results.json").unlink()
            (tmp_path / name / "checkpoint-12").rename(tmp_path / "aside")
            with counted_updates() as made:
                run_recipe(recipe)
            assert 1 < made[0] <= made[-1] == 12
        finals.append(load_file(tmp_path / name / "checkpoint-12" / "model.safetensors"))
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    epochs = {"eval_strategy": "epoch", "save_strategy": "epoch", "eval_steps": None, "save_steps": 500}
    values["training"] |= {**epochs, "output_dir": str(tmp_path / "other")}
    with pytest.raises(UserError, match=r"data\.streaming.*eval_strategy: steps"):
        run_recipe(check_recipe(values, "tiny", "tiny.yaml"))


def test_ranks_draw_different_numbers():
    draws = []
    for rank in (0, 1, 0):
        SeedByRank().on_train_begin(SimpleNamespace(seed=5, process_index=rank), None, None)
        draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_the_model_knows_how_many_steps_were_made(make, tmp_path):
    """In each forward pass, the model and its stacks have the step number, also after accumulation and resuming."""
    args = {"max_steps": 3, "gradient_accumulation_steps": 2, "max_tokens": 1024, "save_steps": 2}
    for resume, expected in ((False, [0, 0, 1, 1, 2, 2]), (True, [2, 2])):
        trainer = make("vanilla_transformer", **args)
        seen = []
        for module in (trainer.model, trainer.model.model.decoder):
            module.register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module.training_step))
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2") if resume else None)
        assert seen == [step for step in expected for _ in range(2)]
    assert "training_step" not in trainer.model.state_dict()
    assert "training_step" not in trainer.model.config.to_dict()


@pytest.mark.parametrize(("trainer", "parents"), [(TranslationTrainer, (Seq2SeqTrainer,)), (MaskedLMTrainer, ())])
def test_one_class_overrides_the_hooks(trainer, parents):
    """The order of the actions at a hook is then in one place, and no task is a special case of another task."""
    assert trainer.__mro__ == (trainer, TokenBatchTrainer, *parents, Trainer, object)
    assert {name for name in vars(trainer) if hasattr(Trainer, name) and not name.startswith("__")} == set()


def test_a_checkpoint_names_its_callbacks_as_ever(make, tmp_path):
    """A run of an earlier version must resume: the Trainer finds a callback's saved counts by its class name."""
    make(
        "mat",
        max_steps=2,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        early_stopping_patience=3,
        load_best_model_at_end=True,
    ).train()
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8"))
    names = {"Throughput", "EarlyStoppingCallback", "TrainerControl", "LargestBatch"}
    assert state["stateful_callbacks"].keys() == names
    assert state["stateful_callbacks"]["Throughput"]["args"].keys() == {
        "target_tokens", "seconds", "data_seconds", "minutes", "peak_memory_bytes",
        "processor_minutes",
    }  # fmt: skip


@pytest.mark.parametrize(("epoch", "expected"), [(0, 0), (0.5, 0), (0.9999999999, 1), (3.0, 3), (3.25, 3)])
def test_the_epoch_reaches_the_sampler(epoch, expected):
    calls = []
    EpochCallback(SimpleNamespace(set_epoch=calls.append)).on_epoch_begin(None, SimpleNamespace(epoch=epoch), None)
    assert calls == [expected]


def test_the_progress_bar_shows_speed_and_evaluations(make, monkeypatch, capsys):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    trainer = make("mat", max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2, disable_tqdm=False)
    trainer.train()
    assert re.search(
        r"4/4 \[\d\d:\d\d<00:00, .*epoch \d\.\d, loss \d\.\d+, [\d,]+ target tokens/s\]", screen.getvalue()
    )
    assert "step 2, epoch 0." in capsys.readouterr().out


# Averaging


def test_memory_can_be_kept():
    assert keep_memory() is (sys.platform == "linux")


@pytest.fixture(scope="module")
def another_process() -> list[float]:
    """The peak memory of a child process in bytes, and the bytes that bfloat16 kernels of 200 shapes add to it.

    A new process is necessary, because the first matrix product fixes the size of the caches.
    """
    code = """if True:
        import torch
        from hf_deepwide.training.memory import bound_kernel_caches, peak_memory
        print(peak_memory())
        torch.set_num_threads(1)
        bound_kernel_caches()
        inputs, weight = torch.randn(1000, 512).bfloat16(), torch.randn(512, 512).bfloat16()
        inputs @ weight
        before = peak_memory()
        for rows in range(1, 201):
            torch.nn.functional.linear(inputs[:rows], weight)
        print(peak_memory() - before)
        """
    environment = {key: value for key, value in os.environ.items() if not key.endswith("CACHE_CAPACITY")}
    held = b"x" * HELD
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    del held
    return [float(line) for line in ran.stdout.split()]


def test_kernels_of_shapes_that_are_not_used_again_are_forgotten(another_process):
    """Kernels of 400 shapes took 270 MiB when none were forgotten, on processors with bfloat16 kernels."""
    assert another_process[1] < 100 * 2**20


def test_a_run_keeps_few_kernels_unless_told(tmp_path, monkeypatch):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")  # so that monkeypatch restores the variable afterwards
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    recipe = tiny_recipe(tmp_path / "run")
    with RunFolder(recipe.output_dir).opened(
        recipe, recipe.training_arguments(), overwrite=False, process=PartialState()
    ):
        pass
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "32"


def test_peak_memory_is_the_most_that_was_held():
    """At least the memory at some moment, and at most the value of `getrusage`, which includes the parent process."""
    most = psutil.Process().memory_info().rss
    held = b"x" * 2**28
    most = max(most, psutil.Process().memory_info().rss)
    del held
    assert 0.99 * most < peak_memory() < 1.01 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("status", ["Name: python\n", None])
def test_peak_memory_where_the_kernel_does_not_say(status, monkeypatch):
    """Some sandboxes do not have the line with the peak, and systems other than Linux do not have the file."""
    if status is None:
        monkeypatch.setattr(memory.sys, "platform", "freebsd")
    else:
        monkeypatch.setattr(memory.Path, "read_text", lambda *_, **__: status)
    assert peak_memory() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_peak_memory_is_of_this_process_alone(another_process):
    """Leave out the parent process, which `getrusage` on Linux includes."""
    assert another_process[0] < HELD


def test_best_weights_that_were_damaged_are_not_loaded(make):
    class Damage(TrainerCallback):
        def on_save(self, args, state, control, **_):
            if state.global_step == 2:
                path = Path(state.best_model_checkpoint, "model.safetensors")
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)

    every = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    trainer = make("mat", max_steps=2, **every)
    trainer.add_callback(Damage())
    with pytest.raises(UserError, match="the final model is made of this checkpoint"):
        trainer.train()


def test_only_the_validation_in_training_counts_in_early_stopping(capsys, caplog):
    callback = EarlyStoppingCallback(1)
    callback.early_stopping_patience_counter = 1
    args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
    callback.on_evaluate(args, TrainerState(is_world_process_zero=True), TrainerControl(), {"test_loss": 1.0})
    assert "ends early" not in capsys.readouterr().err
    assert not caplog.messages


def test_rotation_keeps_the_best_checkpoint_of_a_training(make, tmp_path):
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    trainer, losses = make("mat", max_steps=4, save_total_limit=2, **every), iter((1.0, 2.0, 3.0, 4.0))
    trainer.validate = lambda dataloader, prefix: {f"{prefix}_loss": next(losses)}
    trainer.train()
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-4"}


def test_a_checkpoint_uses_its_cache_though_training_does_not(make, tmp_path):
    make("mat", max_steps=1, save_steps=1).train()
    config = AutoConfig.from_pretrained(tmp_path / "run" / "checkpoint-1")
    assert config.use_cache is True


def test_validation_translates_at_every_second_evaluation(make):
    steps = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4, "warmup_steps": 1}
    trainer = make(predict_with_generate=True, generation_every=2, **steps)
    trainer.train()
    for name, expected in (("eval_loss", [1, 2, 3, 4]), ("eval_bleu", [2, 4])):
        assert [entry["step"] for entry in trainer.state.log_history if name in entry] == expected
    options = {"load_best_model_at_end": True, "metric_for_best_model": "bleu", "eval_strategy": "steps"}
    with pytest.raises(UserError, match="generation_every"):
        make(predict_with_generate=True, generation_every=2, **options)


def test_the_order_of_batches_follows_from_its_own_seed(make):
    def order(**seeds):
        return list(make(**seeds).get_train_dataloader().batch_sampler)

    assert order(seed=3, data_seed=5) == order(seed=4, data_seed=5) != order(seed=3, data_seed=6)
