"""A look inside a model in one pass: attention of each branch, gates of depth-wise LSTMs, layers that ran."""

import xml.etree.ElementTree

import pytest
import torch
from demo_models import TEXTS, build
from word_models import tiny_model

from hf_deepwide.analysis.figures import as_svg
from hf_deepwide.analysis.inside import draw_attention, draw_lstm_gates, draw_selection, look_inside
from hf_deepwide.analysis.path_weights import draw_path_weights

TARGET = [2, 7, 9, 5, 8]
SVG = "{http://www.w3.org/2000/svg}"


def texts(figure):
    """All text of a figure, as a browser reads it."""
    return ["".join(text.itertext()) for text in xml.etree.ElementTree.fromstring(as_svg(figure)).iter(f"{SVG}text")]


def naive_branches(attention, queries, memory):
    """The attention of each branch `[N, T, S]`: the mean over its heads, by loops over branches and heads."""
    width = attention.head_dim
    q, k = attention.q_proj(queries), attention.k_proj(memory)
    branches = []
    for branch in range(attention.branches):
        total = 0
        for head in range(attention.num_heads):
            place = slice(
                (branch * attention.num_heads + head) * width, (branch * attention.num_heads + head + 1) * width
            )
            total = total + (q[..., place] @ k[..., place].T / width**0.5).softmax(-1)
        branches.append(total / attention.num_heads)
    return torch.stack(branches)


def test_each_branch_has_its_own_attention():
    model, tokenizer = build("mat", attention_branches=3)
    source = tokenizer(TEXTS[1])["input_ids"]
    given = []
    attention = model.model.decoder.layers[1].encoder_attn
    handle = attention.register_forward_pre_hook(lambda module, args: given.append((args[0][0], args[2][0])))
    implementation = model.config._attn_implementation
    inside = look_inside(model, source, TARGET)
    handle.remove()
    assert sorted(inside.attention) == [1, 2]
    assert inside.attention[2].shape == (3, len(TARGET) - 1, len(source))
    torch.testing.assert_close(inside.attention[2], naive_branches(attention, *given[0]).detach())
    assert (inside.attention[2][0] - inside.attention[2][1]).abs().max() > 0.01
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_of_transformers_has_one_branch():
    model = tiny_model()
    inside = look_inside(model, [4, 5, 6, 2], TARGET)
    model.set_attn_implementation("eager")
    outputs = model(
        input_ids=torch.tensor([[4, 5, 6, 2]]), decoder_input_ids=torch.tensor([TARGET[:-1]]), output_attentions=True
    )
    torch.testing.assert_close(inside.attention[1][0], outputs.cross_attentions[0][0].mean(0).detach())


def test_skipped_layers_attend_to_nothing():
    model, tokenizer = build("latent_depth", inference_selection="hard", latent_encoder=False)
    with torch.no_grad():
        model.layer_selections["decoder"].layer_logits.copy_(torch.tensor([[-2.0, 3.0]]))
    inside = look_inside(model, tokenizer(TEXTS[0])["input_ids"], TARGET)
    assert list(inside.attention) == [2]
    assert "decoder: 1 of 2 layers used" in texts(draw_selection(model))


@pytest.mark.parametrize("share", ["stack", "global"])
def test_records_the_gates_of_each_cell(share):
    model, tokenizer = build(
        "depthwise_lstm", encoder_layers=2, decoder_layers=2, forget_bias_init=30.0, share_gates=share
    )
    inside = look_inside(model, tokenizer(TEXTS[0])["input_ids"], TARGET)
    assert {stack: cells.shape for stack, cells in inside.gates.items()} == {"encoder": (2, 3), "decoder": (2, 3)}
    for cells in inside.gates.values():
        assert cells[:, 1].min() > 0.99, "the forget gate, by its bias"
        assert 0.2 < cells[:, [0, 2]].min() <= cells[:, [0, 2]].max() < 0.8
    assert {"input", "forget", "output"} <= set(texts(draw_lstm_gates(inside.gates)))


def test_tokens_are_shown_as_they_are():
    tokens = ["$x^2$", "<b>", "&", "東京", "مرحبا"]
    shown = texts(draw_attention(torch.rand(2, 5, 5), tokens, tokens))
    assert all(shown.count(token) == 3 for token in tokens), "below two panels, and beside the first"
    assert {"branch 1", "branch 2"} <= set(shown)


def test_path_weights_are_a_table():
    model, _ = build("multipath_transformer", encoder_paths=3)
    with torch.no_grad():
        model.model.encoder.layers[0].feed_forward_paths.alpha.copy_(torch.tensor([0.1, 0.2, -0.3, 4.0, 5.0, 6.0]))
    shown = texts(draw_path_weights(model))
    assert {"attention", "FFN", "path 1", "path 3", "all but 1", "all but 3"} <= set(shown)
    assert {"0.10", "0.20", "-0.30", "4.00", "6.00"} <= set(shown)
