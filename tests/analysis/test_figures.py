"""Figures: text from users is shown unchanged, and a figure file is complete or does not exist."""

import errno
import re
from functools import partial
from html import unescape

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure

from hf_deepwide.analysis.figures import new_figure, save
from hf_deepwide.analysis.gradient_norms import plot_gradient_norms
from hf_deepwide.analysis.layer_utilization import plot_layer_utilization, plot_selection_samples
from hf_deepwide.analysis.learning_curves import plot_learning_curves, plot_runs
from hf_deepwide.errors import UserError

ODD = r"from $5 \frac{ to $6"  # Matplotlib takes this text for a formula, and the formula is invalid
HISTORY = [
    {"step": step, "loss": 5 / step, "grad_norm": 10.0**step, "gradient_norms": {"encoder": [0.01, 1, 100]},
     "layer_utilization": {"decoder": [[0.1, 0.9], [0.2, 0.8]]}}
    for step in (1, 2, 3)
]  # fmt: skip
FIGURES = {
    "learning curves": partial(plot_learning_curves, HISTORY, title=ODD),
    "learning curves of runs": partial(plot_runs, {ODD: HISTORY, "b": HISTORY}),
    "gradient norms": partial(plot_gradient_norms, {ODD: HISTORY}),
    "layer utilisation": partial(plot_layer_utilization, HISTORY, names=[ODD, "b"]),
    "samples of layers": partial(plot_selection_samples, {"a": {"decoder": torch.rand(2, 3)}}, names=[ODD, "b"]),
}


@pytest.mark.parametrize("name", FIGURES)
def test_dollar_signs_are_shown(name, tmp_path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        image = FIGURES[name](path=tmp_path / "figure.svg").read_text(encoding="utf-8")
    shown = unescape(re.sub(r"<!--.*?-->", "", image))
    assert ODD in shown
    assert "mathdefault" not in shown, "powers of ten are formulas, and are shown as such"
    FIGURES[name](path=tmp_path / "figure.png")


@pytest.fixture
def drawn(monkeypatch):
    """A list that receives each figure that is saved."""
    figures = []
    plain = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **o: (figures.append(figure), plain(figure, *a, **o))[1])
    return figures


def test_every_run_is_named_and_looks_like_no_other(drawn, tmp_path):
    """Also a run that was validated before it logged its training loss."""
    histories = {f"run {number}": HISTORY for number in range(12)}
    plot_runs({**histories, "short": [{"step": 1, "eval_loss": 2.0}]}, tmp_path / "runs.png")
    (figure,) = drawn
    (legend,) = [axis.get_legend() for axis in figure.axes if axis.get_legend() is not None]
    assert {text.get_text() for text in legend.get_texts()} == {*histories, "short"}
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].get_lines()}
    assert len(looks) == len(histories)


def test_a_curve_of_one_point_is_seen(drawn, tmp_path):
    one = [{"step": 1, "loss": 2.0, "grad_norm": 1.0, "gradient_norms": {"decoder": [0.5]}}]
    plot_learning_curves(one, tmp_path / "one.png", title="")
    plot_runs({"a": one}, tmp_path / "runs.png")
    plot_gradient_norms({"a": one}, tmp_path / "norms.png")
    assert len(drawn) == 3
    assert all(line.get_marker() == "." for figure in drawn for axis in figure.axes for line in axis.get_lines())


def test_the_loss_of_a_run_is_that_which_validation_has(drawn, tmp_path):
    """The training loss is `reconstruction`, without the further terms of latent depth."""
    history = [{"step": 1, "loss": 9.0, "reconstruction": 2.0}, {"step": 1, "eval_loss": 2.1}]
    plot_learning_curves(history, tmp_path / "curves.png", title="")
    training, validation = drawn[0].axes[0].get_lines()
    assert (list(training.get_ydata()), list(validation.get_ydata())) == ([2.0], [2.1])


def test_gradient_norms_are_of_the_first_and_the_last_moment(drawn, tmp_path):
    history = [{"step": step, "gradient_norms": {"encoder": [1.0, 2.0]}} for step in range(50, 5001, 50)]
    plot_gradient_norms({"a": history}, tmp_path / "norms.png")
    labels = [line.get_label() for line in drawn[0].axes[0].get_lines()]
    assert (labels[0], labels[-1], len(labels)) == ("step 50", "step 5000", 6)


def test_an_image_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    figure, _ = new_figure(1, 1, (1, 1))
    path = save(figure, tmp_path / "plots" / "figure")
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")

    def full(figure, path, **options):
        path.write_bytes(before[:10])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space left"):
        save(figure, path)
    assert [file.name for file in path.parent.iterdir()] == ["figure.png"]
    assert path.read_bytes() == before


def test_an_ending_that_is_no_image_is_refused(tmp_path):
    figure, _ = new_figure(1, 1, (1, 1))
    with pytest.raises(UserError, match=r"'\.docx' is no kind of image; accepted: .*png"):
        save(figure, tmp_path / "figure.docx")


def test_learning_curves_omit_missing_values(tmp_path):
    history = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "eval_loss": 2.5}]
    assert plot_learning_curves([], tmp_path / "plots" / "empty.png", "a run of one step").is_file()
    small = plot_learning_curves(history, tmp_path / "plots" / "a.png", "a").stat().st_size
    full = [*history, {"step": 2, "eval_bleu": 20.0}, {"step": 2, "learning_rate": 1e-3, "grad_norm": 1.0}]
    assert plot_learning_curves(full, tmp_path / "b.png", "b").stat().st_size > 1.5 * small
