"""LoRA in a run: trained and frozen parameters, the contents of a checkpoint, and resuming from a checkpoint."""

import json
import shutil

import pytest
import torch
from coded_languages import make_base, recipe_of, write_corpus
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_run import counted_updates, tiny_corpus, tiny_recipe, tiny_trainer
from torch import nn
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide.checkpoint_files import WEIGHTS
from hf_deepwide.errors import UserError
from hf_deepwide.families import FAMILIES
from hf_deepwide.loading import load_model
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.training.faults import NonFiniteError

ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


def trained(corpus, folder, family="mat", **training):
    """A trainer after two steps of training, and the weights from before the training."""
    trainer = tiny_trainer(corpus, folder, family, max_steps=2, save_steps=2, learning_rate=0.05)
    trainer.args.lora_r = 2
    vars(trainer.args).update(training)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    return trainer, before


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_learn_and_everything_else_stays(family, corpus, tmp_path, caplog):
    """A log message names the parameters that stay although they join or select layers."""
    trainer, before = trained(corpus, tmp_path, family)
    joints = {"latent_depth": "layer_logits", "multipath_transformer": "alpha"}
    assert ("LoRA leaves" in caplog.text) == (family in joints)
    assert joints.get(family, "") in caplog.text
    weights = load_file(tmp_path / "checkpoint-2" / WEIGHTS)
    moved = {name for name in weights if not torch.equal(weights[name], before[name])}
    linear = {f"{name}.weight" for name, module in trainer.model.named_modules() if hasattr(module, "lora_A")}
    assert moved == linear
    assert "lm_head.weight" not in linear
    assert len(linear) > 5
    learns = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name for name in learns)


def test_an_adapted_projection_computes_the_papers_equation(corpus, tmp_path):
    """Section 4.1: h = W0 x + (alpha / r) B A x, here with the bias of the projection."""
    trainer, before = trained(corpus, tmp_path, lora_alpha=3)
    name = next(name for name, _ in trainer.model.named_modules() if name.endswith(".fc1"))
    module = trainer.model.get_submodule(name).double().eval()
    a, b = (getattr(module, f"lora_{letter}")["default"].weight.tolist() for letter in "AB")
    w, bias = before[f"{name}.weight"].double().tolist(), before[f"{name}.bias"].double().tolist()
    x = torch.randn(len(w[0]), dtype=torch.float64).tolist()
    expected = []
    for i, row in enumerate(w):
        total = bias[i] + sum(row[k] * x[k] for k in range(len(x)))
        for j in range(2):
            total += 3 / 2 * b[i][j] * sum(a[j][k] * x[k] for k in range(len(x)))
        expected.append(total)
    torch.testing.assert_close(module(torch.tensor(x).double()).tolist(), expected, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_is_a_whole_model_and_an_adapter_for_peft(corpus, tmp_path):
    trainer, before = trained(corpus, tmp_path / "run", "vanilla_transformer")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    batch = next(iter(trainer.get_eval_dataloader()))
    with torch.no_grad():
        ours = trainer.model.eval()(**batch).logits
        whole = load_model(AutoModelForSeq2SeqLM, checkpoint).eval()(**batch).logits
        plain = type(trainer.model)(trainer.model.config)
        plain.load_state_dict(before, strict=False)
        began = plain.eval()(**batch).logits
        adapted = PeftModel.from_pretrained(plain, checkpoint / "adapter").eval()(**batch).logits
    assert (began - ours).abs().max() > 0.01
    torch.testing.assert_close(whole, ours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(adapted, ours, rtol=1e-5, atol=1e-5)


def tuned(folder, family="m2m_100", **training):
    """A recipe that adapts a small NLLB to two pairs. One pair has a language that is new to the model."""
    make_base("nllb", folder / "base")
    write_corpus(folder)
    pairs = ["eng_Latn-deu_Latn", "eng_Latn-gsw_Latn"]
    recipe = recipe_of(folder, family, {"new_languages": {"gsw_Latn": "deu_Latn"}}, pairs=pairs)
    recipe.values["training"] |= {
        "lora_r": 2, "eval_steps": 1, "save_steps": 1, "bf16": False, "warmup_steps": 0, "learning_rate": 0.05,
        "weight_decay": 0.1, **training,
    }  # fmt: skip
    return check_recipe(recipe.values, "codes", "codes.yaml")


@pytest.mark.parametrize("family", ["m2m_100", "mat"])
def test_a_run_adapts_a_base_and_the_embedding_of_a_new_language(family, tmp_path):
    results, run = run_recipe(tuned(tmp_path, family)), tmp_path / "run"
    table = "model.shared.weight" if family == "m2m_100" else "model.encoder.embed_tokens.weight"
    base, weights = (load_model(AutoModelForSeq2SeqLM, tmp_path / name).state_dict() for name in ("base", "run"))
    old = base["model.shared.weight"]
    new = next(weights[name] for name in (table, "model.decoder.embed_tokens.weight") if name in weights)
    assert torch.equal(new[: len(old)], old)
    assert len(new) == len(old) + 1
    assert not torch.equal(new[-1], old[-1])  # the new embedding began as the embedding of German, the last code
    assert not (run / "adapter").exists()
    assert results["parameters"] == sum(
        parameter.numel() for parameter in load_model(AutoModelForSeq2SeqLM, run).parameters()
    )


@pytest.mark.parametrize(
    "training", [{}, {"average_last": 2, "load_best_model_at_end": False}, {"gradient_checkpointing": True}]
)
def test_an_interrupted_run_ends_with_the_same_weights(training, tmp_path):
    recipe = tuned(tmp_path, max_steps=3, save_total_limit=3, **training)
    results, run = run_recipe(recipe), tmp_path / "run"
    weights = load_file(run / WEIGHTS)
    (run / "results.json").unlink()
    shutil.rmtree(run / "checkpoint-3")
    with counted_updates() as made:
        assert run_recipe(recipe)["test"] == results["test"]
    assert made == [3]
    again = load_file(run / WEIGHTS)
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def interrupted(folder):
    """An unfinished run with only its first checkpoint."""
    recipe, run = tuned(folder), folder / "run"
    run_recipe(recipe)
    (run / "results.json").unlink()
    shutil.rmtree(run / "checkpoint-2")
    return recipe, run


def test_another_base_is_refused(tmp_path):
    recipe, _ = interrupted(tmp_path)
    weights = load_file(tmp_path / "base" / WEIGHTS)
    name = next(name for name in weights if name.endswith("layer_norm.bias"))
    save_file(weights | {name: weights[name] + 1}, tmp_path / "base" / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match="the base is not the one that training began with"):
        run_recipe(recipe)


@pytest.mark.parametrize("file", [ADAPTER, "adapter/new_rows.safetensors"])
def test_a_checkpoint_without_its_adapter_is_set_aside(file, tmp_path, caplog):
    recipe, run = interrupted(tmp_path)
    (run / "checkpoint-1" / file).unlink()
    with counted_updates() as made:
        run_recipe(recipe)
    assert made == [1, 2]
    assert f"{file} is missing" in caplog.text


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"lora_target_modules": ["q_prj"]}, "training.lora_target_modules: "),
        ({"lora_target_modules": ["shared", "embed_tokens"]}, "accepted: linear layers"),
        ({"lora_target_modules": ["lm_head", "q_proj"]}, "lm_head is also that of the embeddings"),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused(training, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run_recipe(tuned(tmp_path, **training))


def test_checkpointing_that_needs_a_gradient_of_the_input_is_refused(tmp_path):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(UserError, match="use_reentrant: true gives LoRA no gradients"):
        run_recipe(tuned(tmp_path, **options))


def test_a_model_that_starts_from_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"training\.lora_r: LoRA adapts a trained model; set model\.init_from"):
        tiny_recipe(tmp_path, lora_r=4)


@pytest.mark.parametrize(
    ("name", "value"), [("lora_alpha", 8), ("lora_dropout", 0.1), ("lora_target_modules", ["q_proj"])]
)
def test_options_of_lora_without_a_rank_are_refused(name, value, tmp_path):
    with pytest.raises(UserError, match=rf"training: {name} is .*; set lora_r to a rank"):
        tiny_recipe(tmp_path, **{name: value}).training_arguments()
    tiny_recipe(tmp_path, lora_alpha=None, lora_dropout=0.0, lora_target_modules="all-linear").training_arguments()


def test_a_fault_holds_a_model_that_loads(corpus, tmp_path):
    trainer = tiny_trainer(corpus, tmp_path, max_steps=2)
    trainer.args.lora_r = 2
    step, made = type(trainer).compute_loss, []

    def broken(*args, **kwargs):
        made.append(None)
        return step(trainer, *args, **kwargs) * (float("nan") if len(made) > 1 else 1)

    trainer.compute_loss = broken
    with pytest.raises(NonFiniteError):
        trainer.train()
    folder = tmp_path / "faults" / "step-2"
    assert json.loads((folder / "fault.json").read_text())["step"] == 2
    assert isinstance(load_model(AutoModelForSeq2SeqLM, folder), nn.Module)


def test_scale_and_dropout_reach_the_adapter(corpus, tmp_path):
    """The default scale is twice the rank."""
    trainer, _ = trained(corpus, tmp_path, lora_dropout=0.1)
    config = trainer.model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (2, 4, 0.1)
