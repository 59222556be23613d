"""Figure 7 of the Multi-Path paper: the numbers, the image, the script."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from model_cases import build

from hf_deepwide.analysis.path_weights import path_weights, plot_path_weights, spread

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_path_weights.py"


def script(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize(("one", "two"), [(0.5, 0.5), (0.7, 0.2), (-0.1, 0.4), (1.0, 0.0)])
def test_spread_of_two_paths_follows_the_paper(one, two):
    assert spread([one, two]) == pytest.approx(abs(one - two) / abs(one + two))


def test_spread_of_many_paths_is_deviation_over_mean():
    alphas = [0.1, 0.2, 0.6, 0.5]
    expected = torch.tensor(alphas).std(unbiased=False) / torch.tensor(alphas).mean()
    assert spread(alphas) == pytest.approx(expected.item())


def test_weights_are_told_apart_by_layer_and_sublayer():
    model = build("multipath-3-more")
    layers = model.model.encoder.layers
    assert path_weights(model) == {
        "attention": [layer.self_attn_paths.alpha.tolist() for layer in layers],
        "FFN": [layer.feed_forward_paths.alpha.tolist() for layer in layers],
    }
    assert path_weights(build("vanilla")) == {}


@pytest.mark.parametrize("case", ["multipath-2", "multipath-3-more"])
def test_the_script_draws_a_checkpoint(case, tmp_path, monkeypatch, capsys):
    model = build(case)
    model.save_pretrained(tmp_path / "model")
    script(monkeypatch, tmp_path / "model", "--output", tmp_path / "new")
    printed = capsys.readouterr().out
    assert f"layer 2 FFN       spread {spread(path_weights(model)['FFN'][1]):.3f}" in printed
    image = imread(tmp_path / "new" / "path_weights.png")
    assert image[..., :3].std() > 0.05  # something was drawn
    first = image.copy()
    with torch.no_grad():
        model.model.encoder.layers[0].self_attn_paths.alpha.mul_(torch.arange(len(path_weights(model)["FFN"][0])))
    second = imread(plot_path_weights(model, tmp_path / "second.png", "model"))
    assert first.shape != second.shape or (first != second).any()


def test_a_model_without_weights_is_refused(tmp_path, monkeypatch, capsys):
    build("vanilla").save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        script(monkeypatch, tmp_path / "model", "--output", tmp_path / "new")
    assert stop.value.code == 2
    assert "a vanilla_transformer model without learnable path weights" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
