"""The weights with which sub-layers read sources and streams, measured and drawn."""

import pytest
import torch
from latent_runs import build_trainer
from matplotlib.image import imread
from model_cases import build
from tiny_run import counted_updates, tiny_corpus

from hf_deepwide.analysis.joint_weights import (
    draw_joint_weights,
    joined_stacks,
    joint_weights,
    plot_joint_weights,
    random_tokens,
)
from hf_deepwide.demo.pictures import pictures
from hf_deepwide.models.joined_layers import Join
from hf_deepwide.runs.figures import plot_joints
from hf_deepwide.runs.written_files import PLOTS


def test_queries_of_zero_read_all_sources_alike():
    model = build("vanilla-attention")
    for module in model.modules():
        if isinstance(module, Join):
            torch.nn.init.zeros_(module.depth_query)
    table = joint_weights(model)["decoder"]
    assert table.shape == (9, 10)
    for row, weights in enumerate(table):
        read, rest = weights[: row + 2], weights[row + 2 :]
        torch.testing.assert_close(read, torch.full_like(read, 1 / (row + 2)))
        assert rest.isnan().all()


def test_query_weighs_similar_sources_most():
    """With blocks of two layers, three decoder layers have three sources: the embeddings and two sums."""
    model = build("vanilla-attention-blocks")
    assert joint_weights(model)["decoder"].shape == (9, 3)
    last, seen = joined_stacks(model)["decoder"][-1], []
    last.register_forward_hook(lambda join, args, output: seen.append(join.weights(output.values, output.scales)))
    with torch.no_grad():
        model(**random_tokens(model))
    torch.testing.assert_close(joint_weights(model)["decoder"][-1], seen[0].mean((0, 1)))


def test_static_weights_of_streams_are_the_parameters():
    model = build("vanilla-hyper", dynamic_streams=False, residual_streams=3)
    for stack, joins in joined_stacks(model).items():
        for join, table in zip(joins, joint_weights(model)[stack], strict=True):
            torch.testing.assert_close(table, torch.cat([join.static_alpha, join.static_beta[:, None]], 1).detach())


def test_mixing_matrices_of_mhc_are_doubly_stochastic_in_the_figure():
    model = build("vanilla-mhc", sinkhorn_iterations=20)
    mixed = joint_weights(model)["encoder"][..., 1:-1]
    torch.testing.assert_close(mixed.sum(1), torch.ones(4, 3), rtol=0, atol=1e-4)
    torch.testing.assert_close(mixed.sum(2), torch.ones(4, 3), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("case", "labels"),
    [
        ("vanilla-attention", ["emb.", *map(str, range(1, 10))]),
        ("vanilla-attention-blocks", ["emb.", "1", "2"]),
        ("vanilla-hyper", ["read", "to 1", "to 2", "to 3", "to 4", "write"]),
        ("vanilla-mhc", ["read", "to 1", "to 2", "to 3", "write"]),
    ],
)
def test_the_heat_map_shows_each_stack(case, labels, tmp_path):
    model = build(case)
    weights = joint_weights(model)
    figure = draw_joint_weights(weights, "a $title$")
    encoder, decoder = figure.axes[:2]
    assert (encoder.get_title(), decoder.get_title()) == ("encoder", "decoder")
    assert [label.get_text() for label in decoder.get_xticklabels()] == labels
    shown = decoder.images[0].get_array()
    if case == "vanilla-mhc":  # the weights that sub-layer 2 reads with; the part of stream 3 in stream 1
        assert shown[1, :3].tolist() == pytest.approx(weights["decoder"][1, :, 0].tolist())
        assert shown[1, 5] == pytest.approx(weights["decoder"][1, 2, 1].item())
    assert "What each sub-layer reads" in pictures(model, None, None)
    model.save_pretrained(tmp_path / "run")
    (path,) = plot_joints(tmp_path / "run", None)
    assert (imread(path) == imread(plot_joint_weights(model, tmp_path / "again.png", "run"))).all()


def test_a_plain_model_has_no_such_figure(tmp_path):
    assert joined_stacks(build("vanilla")) == {}
    with pytest.raises(ValueError, match="neither sources nor streams"):
        plot_joint_weights(build("vanilla"), tmp_path / "x.png")


@pytest.mark.parametrize(
    ("case", "name", "change", "expected"),
    [
        ("vanilla-attention", "query_length", {"depth_query": 0.5}, 0.5 * 16**0.5),
        ("vanilla-hyper", "stream_gain", {"static_alpha": 1.0}, 4.0**4),  # each of 4 sub-layers adds up 4 streams
        ("vanilla-mhc", "coefficient_scale", {"coefficient_scale": -0.3}, 0.3),
    ],
)
def test_logs_what_joints_have_learned(case, name, change, expected):
    model = build(case)
    for join in joined_stacks(model)["encoder"]:
        for parameter, value in change.items():
            torch.nn.init.constant_(getattr(join, parameter), value)
    logs = model.training_logs()
    assert logs.keys() == {f"{name}/encoder", f"{name}/decoder"}
    assert logs[f"{name}/encoder"] == pytest.approx(expected)


def test_a_new_model_has_no_gain():
    config = build("vanilla-hyper").config
    model = type(build("vanilla-hyper"))(config)
    assert model.training_logs() == {"stream_gain/encoder": 1.0, "stream_gain/decoder": 1.0}


@pytest.mark.parametrize(("residual", "logged"), [("attention", "query_length"), ("mhc", "coefficient_scale")])
def test_a_run_logs_its_joints_and_resumes_exactly(residual, logged, tmp_path):
    fields = {"residual": residual, "normalize_before": True, "encoder_layers": 1, "decoder_layers": 1}
    training = {"family": "vanilla_transformer", "model": fields, "max_steps": 4, "logging_steps": 2, "save_steps": 2}
    trainer = build_trainer(tiny_corpus(), tmp_path / "run", **training)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(f"{logged}/{stack}" in entry for entry in entries for stack in ("encoder", "decoder"))
    resumed = build_trainer(tiny_corpus(), tmp_path / "run", **training)
    with counted_updates() as made:
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert made == [3, 4]
    for ours, theirs in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    (path,) = plot_joints(tmp_path / "run", None)
    assert f"plots/{path.name}" in {str(plot) for plot in PLOTS}
