"""Pictures of what a model did with a line, as HTML with embedded images."""

import base64
import html
from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from ..analysis.figures import as_svg
from ..analysis.inside import draw_attention, draw_lstm_gates, draw_selection
from ..analysis.joint_weights import draw_joint_weights, joined_stacks, joint_weights
from ..analysis.layer_joints import draw_layer_weights, layer_weights
from ..analysis.layer_utilization import layer_selections, posterior_names
from ..analysis.path_weights import draw_path_weights, path_weights
from .systems import Seen

MOST_TOKENS = 80  # most tokens on an axis of a heat map; more could not be read


def pictures(model: Any, seen: Seen | None, layer: int | None) -> str:
    """Return all pictures of one model for one line, as HTML.

    Args:
        model: the model; None for a system without one (CTranslate2).
        seen: the result of `System.look`; None if the system does not show its attention.
        layer: the decoder layer whose attention is drawn. None, or a layer that did not run: the last layer that ran.
    """
    drawn = [*_attention_figures(seen, layer), *_architecture_figures(model, seen)]
    if not drawn:
        return "<p>This system does not show what it does inside.</p>"
    return "".join(_embed(figure, caption) for figure, caption in drawn)


def _attention_figures(seen: Seen | None, layer: int | None) -> Iterator[tuple[Figure, str]]:
    if seen is None or not seen.inside.attention:
        return
    attention = seen.inside.attention
    layer = layer if layer in attention else max(attention)
    weights = attention[layer][:, :MOST_TOKENS, :MOST_TOKENS]
    branches = len(weights)
    heads = "the mean of its heads" if branches == 1 else f"{branches} branches, each the mean of its heads"
    heads = heads if layer else "the heads that the engine reports"
    where = f"decoder layer {layer}" if layer else "the last decoder layer"
    cut = f"; the first {MOST_TOKENS} tokens" if max(attention[layer].shape) > MOST_TOKENS else ""
    yield (
        draw_attention(weights, seen.source[:MOST_TOKENS], seen.target[:MOST_TOKENS]),
        f"Attention to the source in {where}: {heads}{cut}. A row is a token of the translation, a column a token "
        "of the source.",
    )


def _architecture_figures(model: Any, seen: Seen | None) -> Iterator[tuple[Figure, str]]:
    """Yield the figures that only some families have, each with its caption."""
    if model is not None and layer_selections(model):
        posterior = seen.posterior if seen else 0
        language = f" for {posterior_names(model.config)[posterior]}" if model.config.num_posteriors > 1 else ""
        yield draw_selection(model, posterior), f"Layers that latent depth uses{language}. Grey layers are skipped."
    if model is not None and (weights := layer_weights(model)):
        yield draw_layer_weights(weights), "Which layers read which: learned weights of all outputs so far."
    if model is not None and joined_stacks(model):
        yield (
            draw_joint_weights(joint_weights(model)),
            "What each sub-layer reads of those before it: mean weights over random tokens.",
        )
    if model is not None and path_weights(model):
        yield draw_path_weights(model), "Weights that the encoder has learnt for its paths, for any sentence."
    if seen and seen.inside.gates:
        yield (
            draw_lstm_gates(seen.inside.gates),
            "How far the gates of the depth-wise LSTMs were open for this sentence.",
        )


def _embed(figure: Figure, caption: str) -> str:
    """Return a figure and its caption as HTML. The image is embedded as data, so its text cannot act as HTML."""
    width = figure.get_size_inches()[0]
    data = base64.b64encode(as_svg(figure).encode()).decode()
    text = html.escape(caption)
    return (
        f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{text}" style="width: {width:.1f}in">'
        f"<figcaption>{text}</figcaption></figure>"
    )
