"""Figures of the joints between layers: which layers read which, and the gates of a solver over training."""

import json

import pytest
import torch
from latent_runs import build_trainer
from matplotlib.image import imread
from model_cases import build
from tiny_run import tiny_corpus

from hf_deepwide.analysis.layer_joints import (
    draw_layer_weights,
    layer_weights,
    plot_layer_weights,
    plot_solver_gates,
    solver_gates,
)
from hf_deepwide.demo.pictures import pictures
from hf_deepwide.errors import UserError
from hf_deepwide.runs.figures import plot_joints
from hf_deepwide.runs.written_files import LAYER_WEIGHTS, PLOTS, SOLVER_GATES
from hf_deepwide_cli import main


def test_records_the_weights_that_the_sums_use():
    """With period and dilation 2, three decoder layers have only one sum, behind layer 2. It leaves out layer 1."""
    model = build("vanilla-denseformer-sparse")
    weights = model.model.decoder.combination.combination_weights
    used = [[1, 0, 0, 0], [0, 1, 0, 0], [weights[2, 0].item(), 0, weights[2, 2].item(), 0], [0, 0, 0, 1]]
    assert layer_weights(model)["decoder"].tolist() == [pytest.approx(row) for row in used]
    dlcl = build("vanilla-dlcl")
    own = dlcl.model.encoder.combination.combination_weights
    assert torch.equal(layer_weights(dlcl)["encoder"], own.detach().tril())
    assert layer_weights(build("vanilla")) == {}


def test_the_heat_map_shows_each_stack(tmp_path):
    model = build("vanilla-denseformer")
    figure = draw_layer_weights(layer_weights(model), "a $title$")
    encoder, decoder = figure.axes[:2]
    assert (encoder.get_title(), decoder.get_title()) == ("encoder", "decoder")
    assert [label.get_text() for label in decoder.get_xticklabels()] == ["emb.", "1", "2", "3"]
    assert [label.get_text() for label in decoder.get_yticklabels()] == ["1", "2", "3", "end"]
    shown = decoder.images[0].get_array()
    assert shown[3, 1] == pytest.approx(model.model.decoder.combination.combination_weights[3, 1].item())
    assert shown.mask[1, 2]
    first = imread(plot_layer_weights(model, tmp_path / "first.png"))
    model.model.encoder.combination.combination_weights.data.mul_(-3)
    assert (first != imread(plot_layer_weights(model, tmp_path / "second.png"))).any()
    assert "Which layers read which" in pictures(model, None, None)


def test_a_run_of_rk2_logs_gates_that_are_drawn(tmp_path):
    fields = {"encoder_solver": "rk2", "layer_aggregation": "denseformer", "encoder_layers": 2}
    trainer = build_trainer(
        tiny_corpus(), tmp_path / "run", family="vanilla_transformer", model=fields, max_steps=4, logging_steps=2,
        save_steps=4,
    )  # fmt: skip
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps, gates = solver_gates(trainer.state.log_history)
    assert steps == [2, 4]
    assert gates.shape == (2, 2)
    assert gates[1].tolist() == pytest.approx([entries[1][f"solver_gate/{layer}"] for layer in (1, 2)])
    assert ((gates > 0) & (gates < 1)).all()
    drawn = list(plot_joints(tmp_path / "run", None))
    assert drawn == [tmp_path / "run" / "plots" / name for name in ("layer_weights.png", "solver_gates.png")]
    assert {f"plots/{path.name}" for path in drawn} <= {str(plot) for plot in PLOTS}
    assert {LAYER_WEIGHTS.name, SOLVER_GATES.name} == {path.name for path in drawn}
    with pytest.raises(UserError, match="--overwrite"):
        list(plot_joints(tmp_path / "run", None))
    state = tmp_path / "run" / "checkpoint-4" / "trainer_state.json"
    content = json.loads(state.read_text(encoding="utf-8"))
    content["log_history"][0]["solver_gate/1"] = "open"
    state.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match="no Trainer logs"):
        list(plot_joints(state.parent, tmp_path / "new"))


def test_draws_a_gap_for_a_layer_without_values(tmp_path):
    history = [{"step": 1, "solver_gate/2": 0.5}, {"step": 2}, {"step": 3, "solver_gate/1": 0.25, "solver_gate/2": 1}]
    steps, gates = solver_gates(history)
    assert steps == [1, 3]
    torch.testing.assert_close(gates, torch.tensor([[torch.nan, 0.5], [0.25, 1]]), equal_nan=True)
    assert imread(plot_solver_gates(history, tmp_path / "gates.png")).shape[2] == 4


def test_a_model_without_learned_joints_is_refused(tmp_path, monkeypatch, capsys):
    build("vanilla").save_pretrained(tmp_path / "model")
    monkeypatch.setattr("sys.argv", ["hf-deepwide", "plot", "joints", str(tmp_path / "model")])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "there is no figure of how the layers" in capsys.readouterr().err
    assert not (tmp_path / "model" / "plots").exists()
