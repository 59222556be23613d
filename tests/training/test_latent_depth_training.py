"""Two-level optimisation, and the loss terms in the Trainer, against plain loops."""

import copy

import pytest
import torch
from datasets import Dataset
from latent_runs import LATENT, build_trainer, constant_noise, first_batches
from tiny_run import tiny_corpus, tiny_recipe
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_deepwide import LatentDepthCallback
from hf_deepwide.errors import UserError
from hf_deepwide.models import modeling_latent_depth
from hf_deepwide.training.faults import NonFiniteError


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


def split(model):
    """Two dictionaries of parameters by name: the posteriors, and all others."""
    named = dict(model.named_parameters())
    posteriors = {name: p for name, p in named.items() if name.endswith("layer_logits")}
    return posteriors, {name: p for name, p in named.items() if name not in posteriors}


@pytest.mark.parametrize(("inner_steps", "rate"), [(1, None), (3, 2.0)])
def test_algorithm_1(inner_steps, rate, corpus, tmp_path, monkeypatch):
    """Seven steps of the Trainer equal the plain algorithm. Resuming after four steps changes nothing."""
    constant_noise(monkeypatch)
    training = {"inner_steps": inner_steps, "posterior_learning_rate": rate, "save_steps": 4, "max_steps": 7}
    trainer = build_trainer(corpus, tmp_path, **training)
    model = copy.deepcopy(trainer.model).train()
    batches, _ = first_batches(trainer, 7)
    posteriors, weights = split(model)
    assert len(posteriors) == 2
    for t, batch in enumerate(batches, start=1):
        model.zero_grad()
        model(**batch, label_smoothing=0.1).loss.backward()
        with torch.no_grad():
            for parameter in weights.values():
                parameter -= 0.5 * parameter.grad
            if t % inner_steps == 0:
                for parameter in posteriors.values():
                    parameter -= (rate or 0.5) * parameter.grad

    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter, dict(model.named_parameters())[name], rtol=1e-8, atol=1e-10, msg=name)
    resumed = build_trainer(corpus, tmp_path, **training)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for ours, theirs in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_posteriors_are_a_group_of_their_own_and_do_not_decay(corpus, tmp_path):
    trainer = build_trainer(
        corpus,
        tmp_path,
        optim="adamw_torch",
        weight_decay=0.1,
        posterior_learning_rate=0.01,
        inner_steps=2,
        max_steps=5,
    )
    posteriors, weights = split(trainer.model)
    trainer.train()
    group = trainer.optimizer.param_groups[-1]
    assert {id(p) for p in group["params"]} == {id(p) for p in posteriors.values()}
    assert (group["initial_lr"], group["weight_decay"]) == (0.01, 0.0)
    rest = [p for group in trainer.optimizer.param_groups[:-1] for p in group["params"]]
    assert {id(p) for p in rest} == {id(p) for p in weights.values()}
    assert len(rest) == len(weights)
    state = trainer.optimizer.state
    assert {int(state[p]["step"]) for p in posteriors.values()} == {2}, "in steps 2 and 4"
    assert {int(state[p]["step"]) for p in weights.values()} == {5}


@pytest.mark.parametrize(
    ("fields", "exempt"),
    [
        ({"residual": "rezero"}, ("residual_weight",)),
        ({"layer_aggregation": "dlcl"}, ("combination_weights",)),
        ({"residual": "attention", "normalize_before": True}, ("depth_query",)),
        (
            {"residual": "hyper", "normalize_before": True},
            ("static_alpha", "static_beta", "alpha_scale", "beta_scale"),
        ),
        ({"residual": "mhc", "normalize_before": True}, ("coefficient_bias", "coefficient_scale")),
        ({"layer_aggregation": "denseformer"}, ("combination_weights",)),
        ({"encoder_solver": "rk2"}, ("solver_weight", "solver_bias")),
    ],
)
def test_weights_of_layers_do_not_decay(fields, exempt, corpus, tmp_path):
    """Weight decay would pull layers towards being unused."""
    trainer = build_trainer(corpus, tmp_path, family="vanilla_transformer", model=fields)
    decaying = trainer.get_decay_parameter_names(trainer.model)
    names = [name for name, _ in trainer.model.named_parameters()]
    assert all(any(name.endswith(each) for name in names) for each in exempt)
    assert not [name for name in decaying if name.endswith(exempt)]
    maps = ("dynamic_alpha", "dynamic_beta", "coefficient_map")
    assert {name for name in names if name.endswith(maps)} <= set(decaying), "what depends on the position decays"
    assert "model.encoder.layers.0.feed_forward.fc1.weight" in decaying


def test_a_step_without_posteriors_is_not_clipped_by_them(corpus, tmp_path, monkeypatch):
    """The norm for the log and for clipping covers only the gradients that the step uses."""
    constant_noise(monkeypatch)
    norms = []
    for inner_steps in (1, 2):
        trainer = build_trainer(corpus, tmp_path, inner_steps=inner_steps, max_grad_norm=100.0)
        model = copy.deepcopy(trainer.model).train()
        (batch,), _ = first_batches(trainer, 1)
        model(**batch, label_smoothing=0.1).loss.backward()
        posteriors, weights = split(model)
        used = [*weights.values(), *(posteriors.values() if inner_steps == 1 else ())]
        trainer.train()
        norm = torch.stack([p.grad.norm() for p in used]).norm().item()
        assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)
        norms.append(norm)
    assert norms[0] > 1.001 * norms[1]


def test_only_gradients_that_the_optimizer_gets_are_faults(corpus, tmp_path):
    """In the first of two steps, the gradients of the posteriors are removed before the check for finite values."""
    trainer = build_trainer(corpus, tmp_path, inner_steps=2, max_steps=2)
    (posterior, *_) = trainer.latent.posterior_parameters
    posterior.register_hook(lambda gradient: gradient + torch.inf)
    with pytest.raises(NonFiniteError, match=r"^step 2 .*: 1 of \d+ parameters have a gradient"):
        trainer.train()


@pytest.mark.parametrize(("name", "value"), [("inner_steps", 2), ("posterior_learning_rate", 0.1)])
def test_models_without_posteriors_refuse(name, value, corpus, tmp_path):
    with pytest.raises(UserError, match=rf"training\.{name}: VanillaTransformerForConditionalGeneration has no post"):
        build_trainer(corpus, tmp_path, family="vanilla_transformer", model=None, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("inner_steps", 0), ("posterior_learning_rate", 0.0)])
def test_values_out_of_range(name, value, tmp_path):
    with pytest.raises(UserError, match=rf"{name} is {value}; accepted"):
        tiny_recipe(tmp_path, **{name: value}).training_arguments()


# One step, however its sentences are cut


def test_the_loss_is_the_same_for_accumulation_and_one_large_batch(corpus, tmp_path, monkeypatch):
    """Cover reconstruction, KL, target depth and label smoothing. For two processes, see `test_scale_processes.py`."""
    constant_noise(monkeypatch)
    trainer = build_trainer(corpus, tmp_path, gradient_accumulation_steps=2)
    batches, large = first_batches(trainer, 2)
    tokens = [int((batch["labels"] != -100).sum()) for batch in batches]
    assert tokens[0] != tokens[1], "equal batches would not tell the mean of means apart"
    model = copy.deepcopy(trainer.model).train()
    loss = model(**large, label_smoothing=0.1).loss
    loss.backward()
    plain = model.eval()(**large, label_smoothing=0.1).loss
    assert abs(loss - plain) > 0.05, "the terms must matter"
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    trained = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        expected = parameter - 0.5 * parameter.grad
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-6, msg=name)


def test_logged_terms_are_means_over_the_steps_and_add_up_to_the_loss(corpus, tmp_path, monkeypatch):
    constant_noise(monkeypatch)
    trainer = build_trainer(corpus, tmp_path, gradient_accumulation_steps=2, max_steps=3)
    trainer.train()
    for log in trainer.state.log_history[:3]:
        # both batches of a step draw the same z, so the mean of a term equals the term
        total = log["reconstruction"] + 0.3 * log["kl"] + 0.2 * log["target_depth"]
        assert log["loss"] == pytest.approx(total, abs=2e-4)
        assert log["kl"] > 0
        assert 0 <= log["effective_depth_decoder"] <= 3


def test_validation_is_scored_by_the_reconstruction_alone(corpus, tmp_path):
    trainer = build_trainer(corpus, tmp_path)
    rows = Dataset.from_dict(corpus.encoded[:8])
    batch = trainer.data_collator(list(rows))
    with torch.no_grad():
        model = trainer.model.eval()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
        expected = torch.nn.functional.cross_entropy(
            logits.logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1
        )
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)


# A Trainer of Transformers

SCHEDULES = {
    **LATENT,
    "kl_anneal_steps": 2,
    "target_depth_anneal_steps": 3,
    "final_temperature": 0.5,
    "temperature_anneal_steps": 4,
    "soft_selection_steps": 2,
}


def plain_trainer(model, batches, folder, callbacks=(), **arguments):
    """`Seq2SeqTrainer`, with the batches and the optimizer of `SGD`."""
    arguments = {"gradient_accumulation_steps": 2, "max_steps": len(batches) // 2, "save_steps": 3, **arguments}
    args = Seq2SeqTrainingArguments(
        str(folder), optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0, logging_steps=1,
        report_to="none", disable_tqdm=True, use_cpu=True, **arguments,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(model, args, train_dataset=batches, callbacks=list(callbacks))
    trainer.get_train_dataloader = lambda: DataLoader(batches, collate_fn=lambda rows: rows[0])
    return trainer


@pytest.fixture
def started(corpus, tmp_path, monkeypatch):
    """Our trainer with all terms that change during training, its batches, and the list of the model's warnings."""
    constant_noise(monkeypatch)
    warnings = []
    monkeypatch.setattr(modeling_latent_depth.logger, "warning_once", warnings.append)
    options = {"gradient_accumulation_steps": 2, "max_steps": 6, "pad_to_multiple_of": 8}  # 8: twelve batches an epoch
    trainer = build_trainer(corpus, tmp_path / "ours", model=SCHEDULES, **options)
    return trainer, first_batches(trainer, 12)[0], warnings


def losses(trainer):
    """The logged loss of each step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_any_trainer_with_the_callback_trains_the_same_loss(started, tmp_path):
    """Every loss and weight is the same, with label smoothing and accumulation, and also after resuming."""
    ours, batches, warnings = started
    model, resumed_model = copy.deepcopy(ours.model), copy.deepcopy(ours.model)
    ours.train()
    plain = plain_trainer(model, batches, tmp_path / "plain", [LatentDepthCallback(label_smoothing=0.1)])
    plain.train()
    assert losses(plain) == pytest.approx(losses(ours), rel=1e-9)
    assert len(losses(plain)) == 6
    trained = dict(ours.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, trained[name], rtol=1e-8, atol=1e-10, msg=name)
    callback = resumed_model.training_callback(label_smoothing=0.1)
    resumed = plain_trainer(resumed_model, batches, tmp_path / "again", [callback])
    resumed.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-3"))
    for ours_, theirs in zip(resumed_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours_, theirs)
    assert warnings == []


def test_a_trainer_without_the_callback_is_warned_of_it(started, tmp_path):
    ours, batches, warnings = started
    plain_trainer(ours.model, batches[:2], tmp_path).train()
    assert all("training_callback" in warning and "`training_step`" in warning for warning in warnings)
    assert len(set(warnings)) == 1
    ours.model.config.update({"kl_weight": 0.0, "target_depth_weight": 0.0, "soft_selection_steps": None})
    ours.model.config.update({"final_temperature": None, "temperature_anneal_steps": 0})
    warnings.clear()
    plain_trainer(ours.model, batches[:2], tmp_path).train()
    assert warnings == [], "a loss that does not change over training needs no steps"


def test_the_label_smoothing_of_a_trainer_is_warned_of_or_refused(started, tmp_path):
    """The Trainer's label smoothing removes the labels from the inputs, and so KL and target depth."""
    ours, batches, warnings = started
    batches = [
        {**batch, "decoder_input_ids": ours.model.prepare_decoder_input_ids_from_labels(batch["labels"])}
        for batch in batches[:2]
    ]
    refusing = plain_trainer(ours.model, batches, tmp_path, [LatentDepthCallback()], label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"`label_smoothing_factor` is 0.1.*LatentDepthCallback\(label_smoothing=0.1"):
        refusing.train()
    assert warnings == []
    plain_trainer(ours.model, batches, tmp_path, label_smoothing_factor=0.1).train()
    assert len(set(warnings)) == 1
    assert "`label_smoothing_factor`" in warnings[0]
    for wrong in (1.5, "0.1", None):
        with pytest.raises(ValueError, match=rf"`label_smoothing` must be in \[0, 1\), got '{wrong}'"):
            ours.model.training_callback(wrong)


def test_a_temperature_that_will_not_fall_to_its_end_is_told(corpus, tmp_path, caplog):
    fields = {**LATENT, "gumbel_temperature": 4.0, "final_temperature": 0.25, "temperature_anneal_steps": 4}
    build_trainer(corpus, tmp_path / "short", model=fields, max_steps=2).train()
    assert "the temperature ends at 1.00, and not at final_temperature 0.25" in caplog.text
    caplog.clear()
    build_trainer(corpus, tmp_path / "long", model=fields, max_steps=4).train()
    assert "final_temperature" not in caplog.text
