"""Logs and figures of deep models: layer utilisation, gradient norms, samples, runs side by side."""

import copy
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from latent_runs import LATENT, build_trainer, first_batches
from matplotlib.image import imread
from tiny_run import SCRIPT, run_script_here, tiny_corpus

from hf_deepwide.analysis import gradient_norms, layer_utilization
from hf_deepwide.analysis.figures import run_labels
from hf_deepwide.analysis.learning_curves import plot_runs
from hf_deepwide.errors import UserError

NAMES = ["de", "fr", "cs"]


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A finished run of six steps with one posterior, logged every second step, and its trainer."""
    folder = tmp_path_factory.mktemp("run") / "latent"
    trainer = build_trainer(
        corpus, folder, gradient_norms=True, max_steps=6, logging_steps=2, save_steps=2, posterior_learning_rate=5.0
    )
    trainer.train()
    return folder, trainer


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_utilisation_is_logged(run):
    folder, trainer = run
    entries = logged(trainer)
    assert len(entries) == 3
    for entry in entries:
        tables = entry["layer_utilization"]
        assert {stack: (len(rows), len(rows[0])) for stack, rows in tables.items()} == {
            "encoder": (1, 2),
            "decoder": (1, 3),
        }
    for stack in ("encoder", "decoder"):
        logits = trainer.model.get_submodule(f"model.{stack}.layer_selection").layer_logits
        expected = [[1 / (1 + math.exp(-a)) for a in row] for row in logits.tolist()]
        assert entries[-1]["layer_utilization"][stack] == [pytest.approx(row, abs=6e-5) for row in expected]
        assert entries[0]["layer_utilization"][stack] != entries[-1]["layer_utilization"][stack]
    state = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8"))
    assert [e["layer_utilization"] for e in state["log_history"] if "loss" in e] == [
        e["layer_utilization"] for e in entries
    ]


def test_logs_utilisation_after_a_resume(run, corpus):
    folder, trainer = run
    resumed = build_trainer(
        corpus, folder, gradient_norms=True, max_steps=6, logging_steps=2, save_steps=2, posterior_learning_rate=5.0
    )
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    for key in ("layer_utilization", "gradient_norms"):
        assert [len(entry[key]) for entry in logged(resumed)] == [2, 2, 2]
    assert logged(resumed)[1]["layer_utilization"] == logged(trainer)[1]["layer_utilization"]


@pytest.mark.parametrize("family", ["latent_depth", "vanilla_transformer", "marian"])
def test_gradient_norms_are_those_of_all_parameters_of_a_layer_before_clipping(family, corpus, tmp_path, monkeypatch):
    """Compare the norms of a whole step, accumulated over two batches, with sums of squares."""
    model_fields = LATENT if family == "latent_depth" else {"dropout": 0.0, "decoder_layers": 2}
    trainer = build_trainer(
        corpus, tmp_path, family=family, model=model_fields, gradient_norms=True, gradient_accumulation_steps=2,
        max_grad_norm=1e-3,
    )  # fmt: skip
    model = copy.deepcopy(trainer.model).train()
    if family == "latent_depth":
        noise = iter(torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
        drawn = {}

        def draw(logits):  # the trainer's forward passes get the same noise as the passes below
            index = drawn.setdefault("count", 0)
            drawn["count"] += 1
            if index < 4:
                drawn[index] = next(noise)[: logits.shape[1]].expand_as(logits)
            return drawn[index % 4]

        monkeypatch.setattr("hf_deepwide.models.layer_selection.gumbel_difference", draw)
    batches, _ = first_batches(trainer, 2)
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    for batch in batches:
        if family == "marian":
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.flatten(0, 1)
            options = {"label_smoothing": 0.1, "reduction": "sum"}
            loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), **options) / tokens
        else:
            loss = model(**batch, label_smoothing=0.1, num_items_in_batch=tokens).loss
        loss.backward()
    trainer.train()
    norms = trainer.state.log_history[0]["gradient_norms"]
    for stack in ("encoder", "decoder"):
        layers = getattr(model.model, stack).layers
        squares = [sum((p.grad**2).sum().item() for p in layer.parameters() if p.grad is not None) for layer in layers]
        assert norms[stack] == pytest.approx([math.sqrt(square) for square in squares], rel=1e-4)


def test_a_scaled_loss_has_the_norms_of_the_loss_itself_from_the_first_step(corpus, tmp_path):
    """The loss is scaled as in fp16."""
    norms = []
    for scale in (None, 16.0):
        options = {"gradient_norms": True, "max_grad_norm": 0, "logging_steps": 4, "logging_first_step": True}
        trainer = build_trainer(
            corpus, tmp_path / str(scale), family="vanilla_transformer", model={"dropout": 0.0}, **options
        )
        if scale is not None:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.train()
        norms.append(trainer.state.log_history[0]["gradient_norms"])
    for stack in norms[0]:
        assert norms[1][stack] == pytest.approx(norms[0][stack], rel=1e-5)


def test_measures_no_gradient_norms_unless_asked(corpus, tmp_path):
    trainer = build_trainer(corpus, tmp_path, family="vanilla_transformer", model=None)
    trainer.train()
    assert not {"gradient_norms", "layer_utilization"} & trainer.state.log_history[0].keys()
    assert not (tmp_path / "plots").exists()


def test_norms_of_a_layer_without_gradient_and_of_a_scaled_loss(corpus, tmp_path):
    model = build_trainer(corpus, tmp_path, family="vanilla_transformer", model={"decoder_layers": 2}).model
    model.model.decoder.layers[1].feed_forward.fc1.bias.grad = torch.full_like(
        model.model.decoder.layers[1].feed_forward.fc1.bias, 8.0
    )
    norms = gradient_norms.layer_gradient_norms(model, scale=4.0)
    assert norms == {"encoder": [0.0], "decoder": [0.0, pytest.approx(2.0 * math.sqrt(32))]}


def history(steps, posteriors, stacks=(("encoder", 4), ("decoder", 6))):
    """A log as the callbacks write it."""
    generator = torch.Generator().manual_seed(0)
    entries = []
    for step in range(1, steps + 1):
        tables = {stack: torch.rand(posteriors, layers, generator=generator).tolist() for stack, layers in stacks}
        norms = {stack: (torch.rand(layers, generator=generator) * 10.0**-step).tolist() for stack, layers in stacks}
        entry = {"step": 10 * step, "loss": 1 / step, "layer_utilization": tables, "gradient_norms": norms}
        entries += [entry, {"step": 10 * step, "eval_loss": 1.1 / step}]
    return entries


@pytest.mark.parametrize("posteriors", [1, 3])
@pytest.mark.parametrize("steps", [1, 9])
def test_utilisation_has_a_panel_for_each_language_and_the_mean(steps, posteriors, tmp_path):
    names = NAMES[:posteriors]
    image = layer_utilization.plot_layer_utilization(history(steps, posteriors), tmp_path / "a" / "b.png", names, "t")
    height, width, _ = imread(image).shape
    panels = posteriors + (posteriors > 1)
    assert width == pytest.approx(120 * (1.2 + 2.4 * panels), abs=2)
    assert height == pytest.approx(120 * (0.6 + 2.4 * 2), abs=2)


def test_refuses_runs_without_data_to_draw(tmp_path):
    plain = [{"step": 1, "loss": 2.0}]
    with pytest.raises(ValueError, match="no layer utilisation"):
        layer_utilization.plot_layer_utilization(plain, tmp_path / "a.png", NAMES)
    with pytest.raises(ValueError, match="gradient_norms: true"):
        gradient_norms.plot_gradient_norms({"a": plain}, tmp_path / "a.png")
    with pytest.raises(ValueError, match="nothing was logged"):
        plot_runs({"a": [{"step": 1}]}, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_samples_are_those_of_eq_5_with_the_same_noise_for_all(run, tmp_path):
    _, trainer = run
    model = copy.deepcopy(trainer.model)
    state = torch.get_rng_state()
    soft = layer_utilization.selection_samples(model, seed=4)
    hard = layer_utilization.selection_samples(model, seed=4, hard=True)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        for selection in model.layer_selections.values():
            selection.layer_logits += 1.0
    shifted = layer_utilization.selection_samples(model, seed=4)
    for stack, z in soft.items():
        odds = torch.logit(z) * 5.0  # tau
        assert torch.equal(hard[stack], (odds > 0).float())
        torch.testing.assert_close(torch.logit(shifted[stack]) * 5.0, odds + 1.0, atol=1e-4, rtol=1e-4)
    file = layer_utilization.plot_selection_samples(
        {"a": soft, "b": {"decoder": hard["decoder"]}}, tmp_path / "a.png", ["x"]
    )
    assert imread(file).shape[2] == 4


def test_plots_runs_side_by_side(tmp_path):
    diverged = [{"step": 10, "loss": 5.0}, {"step": 20, "loss": math.nan}, {"step": 20, "eval_loss": math.inf}]
    latent = [{"step": 10, "loss": 9.0, "reconstruction": 4.0}, {"step": 10, "eval_bleu": 3.0}]
    width = imread(plot_runs({"static": diverged, "latent": latent}, tmp_path / "a.png")).shape[1]
    assert width == pytest.approx(120 * (1.2 + 4.2 * 3), abs=2)
    both = {"static": history(3, 1), "latent": history(40, 1), "without": diverged}
    height = imread(gradient_norms.plot_gradient_norms(both, tmp_path / "b.png")).shape[0]
    assert height == pytest.approx(120 * (0.6 + 2.6 * 2), abs=2)


def test_the_scripts(run, tmp_path, capsys):
    folder, trainer = run
    scripts = SCRIPT.parent
    arguments = [str(folder), str(folder / "checkpoint-2"), "--output", str(tmp_path / "plots")]
    run_script_here(scripts / "plot_layer_utilization.py", *arguments, "--hard")
    run_script_here(scripts / "compare_runs.py", *arguments)
    printed = capsys.readouterr().out
    chosen = [i + 1 for i, a in enumerate(trainer.model.model.decoder.layer_selection.layer_logits[0]) if a > 0]
    assert f"  decoder, posterior 0: {len(chosen)} of 3 layers: {chosen}\n" in printed
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {
        "latent_layer_utilization.png",
        "latent_checkpoint-2_layer_utilization.png",
        "selection_samples.png",
        "learning_curves.png",
        "gradient_norms.png",
    }


def test_labels_distinguish_runs_with_one_name(run, tmp_path, capsys):
    folder, _ = run
    for seed in ("seed1", "seed2"):
        shutil.copytree(folder / "checkpoint-2", tmp_path / seed / "latent")
    runs = [str(tmp_path / seed / "latent") for seed in ("seed1", "seed2")]
    run_script_here(SCRIPT.parent / "plot_layer_utilization.py", *runs, "--output", str(tmp_path / "plots"))
    assert re.findall(r"^(\S+):$", capsys.readouterr().out, re.MULTILINE) == ["seed1/latent", "seed2/latent"]
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {f"{seed}_latent_layer_utilization.png" for seed in ("seed1", "seed2")} | {"selection_samples.png"}


@pytest.mark.parametrize(
    ("folders", "labels"),
    [
        (["a/latent", "a/static"], ["latent", "static"]),
        (["s1/latent", "s2/latent", "s2/static"], ["s1/latent", "s2/latent", "s2/static"]),
        (["a/latent", "a/latent/checkpoint-2"], ["latent", "latent/checkpoint-2"]),
        (["s1/latent/checkpoint-2", "s2/latent/checkpoint-2"], ["s1/latent/checkpoint-2", "s2/latent/checkpoint-2"]),
    ],
)
def test_labels_of_runs(folders, labels):
    assert run_labels([Path("runs", folder) for folder in folders]) == labels
    with pytest.raises(UserError, match=f"{folders[0]} is given twice"):
        run_labels([Path(folders[0]), Path(folders[0], "..", Path(folders[0]).name)])


@pytest.mark.parametrize("script", ["plot_layer_utilization.py", "compare_runs.py"])
def test_refuses_a_folder_that_holds_no_run(script, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run_script_here(SCRIPT.parent / script, str(tmp_path), "--output", str(tmp_path / "x"))
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} holds no trainer_state.json")
    assert not Path(tmp_path / "x").exists()
