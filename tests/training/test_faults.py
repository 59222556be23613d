"""Losses and gradients that are not finite: caught in their step, reported, saved, replayed, and perhaps skipped."""

import copy
import json
import math
import re
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import SCRIPT, run_script_here, tiny_corpus, tiny_recipe, tiny_trainer

from hf_deepwide.errors import UserError, run_script
from hf_deepwide.runs.recipe import differences
from hf_deepwide.training.faults import FAULTS, KEPT, NonFiniteError
from hf_deepwide.training.replay import replay
from hf_deepwide.training.translation import TranslationTrainer


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


@pytest.fixture
def make(corpus, tmp_path):
    """A function that makes a trainer on the tiny corpus, with dropout. Its keywords are training arguments."""
    return partial(tiny_trainer, corpus, tmp_path / "run")


def spoil(trainer: TranslationTrainer, calls: set[int], value: float = math.nan, layer: str = "decoder") -> list[dict]:
    """Multiply the output of the feed-forward network in a stack's first layer by `value` in some forward passes.

    Args:
        calls: the numbers of these forward passes, counted from 1.

    Returns:
        A list to which each forward pass appends the weights before it, and its inputs.
    """
    seen: list[dict] = []
    network = getattr(trainer.model.model, layer).layers[0].feed_forward

    def record(model, args, kwargs):
        seen.append({"weights": copy.deepcopy(model.state_dict()), "inputs": kwargs})

    def poison(module, inputs, output):
        return output * value if len(seen) in calls else output

    trainer.model.register_forward_pre_hook(record, with_kwargs=True)
    network.register_forward_hook(poison)
    return seen


def spoil_gradient(trainer: TranslationTrainer, steps: set[int], value: float = math.inf) -> str:
    """Add `value` to the gradient of one parameter in some steps. Return the name of the parameter."""
    name = "model.encoder.layers.0.feed_forward.fc1.weight"
    counter = iter(range(1, 1000))
    parameter = trainer.model.get_parameter(name)
    parameter.register_hook(lambda gradient: gradient + value if next(counter) in steps else gradient)
    return name


def losses(trainer: TranslationTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_script_tells_divergence_from_a_mistake_by_its_exit_status(capsys):
    def diverge():
        raise NonFiniteError("step 3: the loss is nan")

    def err():
        raise UserError("no such recipe")

    for main, status in ((diverge, 3), (err, 2)):
        with pytest.raises(SystemExit) as end:
            run_script(main)
        assert end.value.code == status
    assert capsys.readouterr().err == "error: step 3: the loss is nan\nerror: no such recipe\n"


def test_the_step_the_parameters_and_the_sentences_are_named(make, corpus, tmp_path):
    trainer = make(gradient_accumulation_steps=2)
    seen = spoil(trainer, {6})  # the second batch of step 3
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    message, folder = str(error.value), tmp_path / "run" / FAULTS / "step-3"
    assert "\n" not in message
    assert re.match(r"step 3 \(epoch 0\.\d\d\): the loss is nan in batch 2 of 2; \d+ of \d+ parameters ", message)
    assert f"hf-deepwide replay {folder}" in message
    assert "on_nonfinite: skip" in message
    assert trainer.state.global_step == 2
    assert all(math.isfinite(loss) for loss in losses(trainer))
    report = json.loads((folder / "fault.json").read_text(encoding="utf-8"))
    assert "model.decoder.layers.0.feed_forward.fc2.weight" in report["parameters"]
    sentences = [pair for batch in report["batches"] for pair in batch["sentences"]]
    assert f"({len(sentences)} sentence pairs)" in message
    for batch, call in zip(report["batches"], seen[4:6], strict=True):
        expected = corpus.tokenizer.batch_decode(call["inputs"]["input_ids"], skip_special_tokens=True)
        assert [pair["source"] for pair in batch["sentences"]] == expected
    assert all(pair["target"] for pair in sentences)
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], seen[4]["weights"][name]) for name in saved)
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, seen[4]["weights"][name]), "the optimizer did not see it"


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30], ids=["inf", "nan", "norm"])
def test_catches_a_gradient_that_is_not_finite(value, make, tmp_path):
    """Catch also finite gradients whose norm is not finite, because clipping would divide by the norm."""
    trainer = make()
    name = spoil_gradient(trainer, {2}, value)
    with pytest.raises(NonFiniteError, match=rf"^step 2 .*: 1 of \d+ parameters have a gradient .*: {name}\. "):
        trainer.train()
    assert json.loads((tmp_path / "run" / FAULTS / "step-2" / "fault.json").read_text())["parameters"] == [name]


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_skipping_a_step_changes_nothing(clip, make):
    """The weights stay the same bit for bit, and the optimizer's moments and step counts do not change."""
    trainer = make(on_nonfinite="skip", gradient_accumulation_steps=2, max_grad_norm=clip, logging_steps=4)
    seen = spoil(trainer, {5})
    trainer.train()
    assert trainer.state.global_step == 8
    before, after, later = (seen[i]["weights"] for i in (4, 6, 8))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(after[name], later[name]) for name in before)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {7}
    first, second = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert first["skipped_steps"] == 1
    assert "skipped_steps" not in second


def test_the_logged_loss_is_the_mean_of_the_steps_that_were_made(make):
    """Compare with a run that logs every step."""
    each = make(on_nonfinite="skip", gradient_accumulation_steps=2)
    spoil(each, {3})
    each.train()
    together = make(on_nonfinite="skip", gradient_accumulation_steps=2, logging_steps=4)
    spoil(together, {3})
    together.train()
    single = losses(each)
    assert math.isnan(single[1])
    assert losses(together)[0] == pytest.approx((single[0] + single[2] + single[3]) / 3, rel=1e-5)
    assert losses(together)[1] == pytest.approx(sum(single[4:]) / 4, rel=1e-5)
    of_all = together.state.log_history[-1]["train_loss"]
    assert of_all == pytest.approx((single[0] + single[2] + sum(single[3:])) / 7, rel=1e-5)
    counted_by_sentences = ("steps_per_second", "train_samples_per_second", "total_flos")
    last = [name for name in together.state.log_history[-1] if name != "train_steps_per_second"]
    assert not [name for name in last if name.endswith(counted_by_sentences)]


def test_what_the_model_reports_leaves_skipped_steps_out(make):
    """Compare with a run that logs every step."""
    logs = {}
    for every in (1, 4):
        trainer = make("latent_depth", on_nonfinite="skip", logging_steps=every, max_steps=4)
        spoil(trainer, {2})
        trainer.train()
        logs[every] = [entry["reconstruction"] for entry in trainer.state.log_history if "loss" in entry]
    assert math.isnan(logs[1][1]), "nothing was finite"
    made = [logs[1][0], *logs[1][2:]]
    assert [min(made) <= mean <= max(made) for mean in logs[4]] == [True]


def test_too_many_skips_in_a_row_stop(make, tmp_path):
    trainer = make(on_nonfinite="skip", max_skipped=2, max_steps=20)
    spoil(trainer, {1, 3, 4, 6, 7, 8, 9})
    with pytest.raises(NonFiniteError, match=r"^step 8 .* That makes 3 steps in a row; training\.max_skipped is 2"):
        trainer.train()
    kept = sorted(path.name for path in (tmp_path / "run" / FAULTS).iterdir())
    assert KEPT == 5
    assert kept == ["step-1", "step-3", "step-4", "step-6", "step-7", "step-8"], "the last one is always saved"


@pytest.mark.parametrize("family", ["mat", "latent_depth", "marian"])
def test_a_replay_computes_what_was_computed(family, make, tmp_path):
    """The losses are the same, with dropout, other random draws, and terms that depend on the step number.

    The test injects the fault from outside, so the replay does not contain it.
    """
    model = {"layer_selection_init": 2.0, "kl_anneal_steps": 4} if family == "latent_depth" else None
    trainer = make(family, model=model, gradient_accumulation_steps=2)
    made = []
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: made.append(compute(*args, **kwargs)) or made[-1]
    parameter = trainer.model.get_parameter("model.decoder.layers.0.self_attn.k_proj.weight")
    parameter.register_hook(lambda gradient: gradient * math.nan if len(made) == 6 else gradient)
    with pytest.raises(NonFiniteError):
        trainer.train()
    result = replay(tmp_path / "run" / FAULTS / "step-3")
    assert result.losses == [loss.item() for loss in made[4:]]
    assert (result.parameters, result.module, result.sentences) == ([], None, [])


def test_a_replay_finds_module_and_sentence(make, corpus, tmp_path, capsys):
    """Find a token with an infinite source embedding, from the saved folder alone. The replay does not change it."""
    seen_in = Counter(token for ids in corpus.encoded["input_ids"] for token in set(ids))
    poison = min(token for token, sentences in seen_in.items() if 20 < sentences < 60)
    trainer = make(model={"share_encoder_decoder_embeddings": False})
    with torch.no_grad():
        trainer.model.model.encoder.embed_tokens.weight[poison] = math.inf
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    (folder,) = (tmp_path / "run" / FAULTS).iterdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = replay(folder)
    assert result.module == "model.encoder.embed_tokens"
    report = json.loads((folder / "fault.json").read_text(encoding="utf-8"))
    assert result.parameters == report["parameters"] != []
    ids = load_file(folder / "rank-0.safetensors")["0.inputs.input_ids"]
    guilty = [(0, row) for row in range(len(ids)) if poison in ids[row]]
    assert result.sentences == guilty
    assert 0 < len(guilty) < len(ids)
    run_script_here(SCRIPT.with_name("replay_fault.py"), str(folder))
    shown = capsys.readouterr().out
    assert f"first output that is not finite: {result.module}" in shown
    for _, row in guilty:
        assert f"not finite on its own: {report['batches'][0]['sentences'][row]['source']!r} -> " in shown
    assert shown.count("not finite on its own: ") == len(guilty)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert str(folder) in str(error.value)


def test_a_replay_says_what_is_missing(tmp_path, make, capsys):
    trainer = make()
    spoil_gradient(trainer, {1})
    with pytest.raises(NonFiniteError):
        trainer.train()
    folder = tmp_path / "run" / FAULTS / "step-1"
    capsys.readouterr()
    with pytest.raises(UserError, match=r"nothing of process 3; accepted: 0"):
        replay(folder, rank=3)
    with pytest.raises(SystemExit) as end:
        run_script_here(SCRIPT.with_name("replay_fault.py"), str(tmp_path))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path) in line
    assert "fault.json" in line
    saved = folder / "rank-0.safetensors"
    saved.write_bytes(saved.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"rank-0\.safetensors is damaged"):
        replay(folder)


def test_what_cannot_be_saved_does_not_hide_the_fault(make, tmp_path):
    trainer = make()
    spoil_gradient(trainer, {1})
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / FAULTS).write_text("in the way")
    with pytest.raises(NonFiniteError, match=r"^step 1 .*could not be saved to .*step-1"):
        trainer.train()


def test_a_full_disk_does_not_hide_the_fault(make, monkeypatch):
    """The library `tokenizers` raises a plain `Exception`, and not an `OSError`."""
    trainer = make()
    spoil_gradient(trainer, {1})
    full = Mock(side_effect=Exception("No space left on device (os error 28)"))
    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(NonFiniteError, match=r"^step 1 .*could not be saved to .*No space left"):
        trainer.train()


def test_a_fault_is_not_written_through_links(make, tmp_path):
    trainer, mine = make(), tmp_path / "mine"
    spoil_gradient(trainer, {1})
    mine.mkdir()
    (mine / "fault.json").write_text("mine", encoding="utf-8")
    (tmp_path / "run" / FAULTS).mkdir(parents=True)
    (tmp_path / "run" / FAULTS / "step-1").symlink_to(mine)
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert [path.name for path in mine.iterdir()] == ["fault.json"]
    assert (mine / "fault.json").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "run" / FAULTS / "step-1" / "rank-0.safetensors").is_file()


# fp16


def with_scaler(trainer: TranslationTrainer, scale: float) -> torch.amp.GradScaler:
    """Set up fp16's loss scaling with a scaler for the CPU, because accelerate sets it up on GPUs only."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer.accelerator.scaler = scaler
    return scaler


def test_overflows_of_a_scaled_loss_are_no_fault(make, tmp_path):
    """The scale of the fp16 gradients is far too large at first. The scaler skips steps until they fit."""
    trainer = make(max_grad_norm=0)
    scaler = with_scaler(trainer, 2.0**22)
    forward = trainer.model.forward
    trainer.model.forward = torch.autocast("cpu", torch.float16)(forward)
    trainer.train()
    assert 1 <= scaler.get_scale() < 2.0**22
    assert not (tmp_path / "run" / FAULTS).exists()
    made = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert made == {8 - round(math.log2(2.0**22 / scaler.get_scale()))}


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_collapsed_loss_scale_is_told_as_such(action, make, tmp_path):
    trainer = make(max_steps=40, on_nonfinite=action, max_grad_norm=0)
    scaler = with_scaler(trainer, 16.0)
    name = spoil_gradient(trainer, set(range(3, 40)))
    with pytest.raises(NonFiniteError, match=r"^step 8 .*: the loss scale collapsed to 0\.5: .*bf16: true.*pre-norm"):
        trainer.train()
    assert scaler.get_scale() == 0.5
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}
    assert json.loads((tmp_path / "run" / FAULTS / "step-8" / "fault.json").read_text())["parameters"] == [name]


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_a_loss_that_is_not_finite_is_a_fault_under_a_scaler_too(action, make):
    """Another loss scale cannot make such a loss finite."""
    trainer = make(on_nonfinite=action, max_grad_norm=0)
    with_scaler(trainer, 16.0)
    spoil(trainer, {3}, math.inf)
    if action == "stop":
        with pytest.raises(NonFiniteError, match=r"^step 3 .*the loss is (nan|inf) in batch 1 of 1"):
            trainer.train()
        return
    trainer.train()
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {7}
    assert math.isnan(losses(trainer)[2])


# Several processes, and arguments


@pytest.mark.parametrize(("key", "value"), [("on_nonfinite", "ignore"), ("max_skipped", 0)])
def test_refuses_a_wrong_on_nonfinite(key, value, tmp_path):
    with pytest.raises(UserError, match=rf"{key} is {value!r}; accepted: "):
        tiny_recipe(tmp_path / "run", **{key: value}).training_arguments()


def test_resumes_with_another_on_nonfinite():
    assert differences({"training": {"seed": 1}}, {"training": {"seed": 1, "on_nonfinite": "skip"}}) == []
    with pytest.raises(UserError, match=r"logging_nan_inf_filter is not accepted here: .*on_nonfinite"):
        tiny_recipe(Path("unused"), logging_nan_inf_filter=True)
