"""The depth-wise LSTM: its cell, every form of its layers and every way of sharing weights, against the equations."""

import itertools
import math

import pytest
import torch
from model_cases import CASES, SIZES, build, leaves, pair, scramble, sentences, tokens
from model_checks import WAYS, check_checkpointing, check_equations, check_learning
from naive_depthwise_lstm import step_in_depth
from naive_transformer import logits as naive_logits
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide import (
    DepthwiseLSTMConfig,
    DepthwiseLSTMForConditionalGeneration,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_deepwide.models.modeling_depthwise_lstm import DepthwiseLSTM, GateNorm

LSTM_CASES = [case for case in CASES if case.startswith("lstm")]
TINY = {**SIZES, "d_model": 8, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
MODES = ("none", "stack", "global")

# Each name gives the difference from the defaults.
FORMS = {
    "defaults": {},
    "concat": {"decoder_merge": "concat"},
    "two LSTMs": {"decoder_merge": "two_lstms"},
    "Eq. 5": {"lstm_hidden": "single"},
    "Eq. 5 in the decoder": {"decoder_lstm_hidden": "single"},
    "RNN": {"cell": "rnn"},
    "RNN, concat": {"cell": "rnn", "decoder_merge": "concat"},
    "RNN, two": {"cell": "rnn", "decoder_merge": "two_lstms"},
    "biases": {"lstm_bias": True, "attention_bias": True},
    "pure attention": {"attn_input_norm": False},
    "residual query": {"cross_query": "residual"},
    "previous query": {"cross_query": "previous"},
    "previous query, concat": {"cross_query": "previous", "decoder_merge": "concat"},
    "final norm": {"final_layer_norm": True},
    "branches": {"attention_branches": 3},
}


def config_of(**fields):
    return DepthwiseLSTMConfig(**{**TINY, "attn_implementation": "sdpa", **fields})


def model_of(**fields):
    """A scrambled model in float64, in evaluation mode."""
    torch.manual_seed(0)
    return scramble(DepthwiseLSTMForConditionalGeneration(config_of(**fields))).double().eval()


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def compare_with_equations(model):
    """Compare the logits, and every gradient of a random weighted sum of them, in float64."""
    batch = pair((3, 2), (3, 2))
    weights = leaves(model)
    expected = [naive_logits(weights, model.config, *each) for each in sentences(batch)]
    check_equations(model, model(**batch).logits, weights, expected)
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-6 or name.endswith("k_proj.bias"), f"{name} does not matter"


# The equations


@pytest.mark.parametrize("merged", [1, 2], ids=["", "concat"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", ["glu", "single"])
@pytest.mark.parametrize("cell", ["lstm", "rnn"])
def test_the_cell_and_its_gradients_are_those_of_the_equations(cell, kind, bias, merged):
    config = config_of(cell=cell, lstm_hidden=kind, lstm_bias=bias, share_gates="none")
    layer = scramble(DepthwiseLSTM(config, "decoder", merged=merged).double())
    x, output, memory = random(2, 3, 8 * merged, seed=1), random(2, 3, 8, seed=2), random(2, 3, 8, seed=3)
    got = layer(output, memory, x.split(8, -1))
    expected = []
    weights = {f"decoder.layers.0.lstm.{n}": p.detach().requires_grad_() for n, p in layer.named_parameters()}
    for row in range(2):
        expected.append(step_in_depth(weights, config, "decoder", 0, "lstm", x[row], output[row], memory[row]))
    expected = [torch.stack(rows) for rows in zip(*expected, strict=True)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)

    directions = random(2, 3, 8, seed=4), random(2, 3, 8, seed=5)
    sources = [x, output, memory, *layer.parameters()]
    grads = torch.autograd.grad(sum((a * d).sum() for a, d in zip(got, directions, strict=True)), sources)
    sources = [x, output, memory, *weights.values()]
    again = torch.autograd.grad(sum((a * d).sum() for a, d in zip(expected, directions, strict=True)), sources)
    for a, b in zip(grads, again, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_a_cell_by_hand():
    """Width 2. With zero matrices LN gives its bias: gates sigmoid(0), h = GeLU(1), c' = (3 + h)/2, o' = c'/2."""
    config = config_of(d_model=2, encoder_attention_heads=1, decoder_attention_heads=1, lstm_hidden="single")
    cell = DepthwiseLSTM(config, "encoder", owned=("none", "stack"))
    torch.nn.init.zeros_(cell.gates.fc.weight)
    torch.nn.init.zeros_(cell.hidden.fc1.weight)
    torch.nn.init.ones_(cell.hidden.layer_norm.bias)
    output, memory = cell(torch.rand(1, 1, 2), torch.full((1, 1, 2), 3.0), (torch.rand(1, 1, 2),))
    h = 0.5 * (1 + math.erf(2**-0.5))
    assert memory.flatten().tolist() == pytest.approx([(3 + h) / 2] * 2)
    assert output.flatten().tolist() == pytest.approx([(3 + h) / 4] * 2)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_layer_and_its_gradients_are_those_of_the_equations(form):
    compare_with_equations(model_of(**FORMS[form]))


@pytest.mark.parametrize("merge", ["add", "two_lstms"])
@pytest.mark.parametrize(("gates", "hidden"), itertools.product(MODES, MODES))
def test_shared_weights_get_the_gradients_of_all_their_uses(gates, hidden, merge, tmp_path):
    """Shared weights also have one owner, one name and one place in a file, and are loaded from there."""
    model = model_of(share_gates=gates, share_hidden=hidden, decoder_merge=merge, encoder_layers=1)
    compare_with_equations(model)

    layers, two = {"encoder": 1, "decoder": 2}, merge == "two_lstms"
    owners = {part: set() for part in ("gates", "hidden")}
    for name in model.state_dict():
        for part in owners:
            if f".{part}." in name:
                owners[part].add(name.partition(f".{part}.")[0].removeprefix("model."))
    for part, mode in (("gates", gates), ("hidden", hidden)):
        expected = {
            "none": {f"{stack}.layers.{i}.lstm" for stack, n in layers.items() for i in range(n)},
            "stack": {"encoder.lstm", "decoder.lstm"},
            "global": {"encoder.lstm"},
        }[mode]
        if two:
            expected |= {f"decoder.layers.{i}.encoder_attn_lstm" for i in range(2)} if mode == "none" else set()
            expected |= {"decoder.encoder_attn_lstm"} if mode != "none" else set()
        assert owners[part] == expected, part

    aliased = [name for name, _ in model.named_parameters(remove_duplicate=False) if "lstm" in name]
    assert len(aliased) == len([name for name, _ in model.named_parameters() if "lstm" in name])
    model.resize_token_embeddings(50, mean_resizing=False)
    model.save_pretrained(tmp_path)
    again, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(again(**pair()).logits, model(**pair()).logits, atol=1e-12, rtol=0)


@pytest.mark.parametrize("case", LSTM_CASES)
def test_padding_changes_nothing_for_real_tokens(case):
    """Padded places of source and target may contain any token."""
    model, batch = build(case).double(), pair()
    target, mask = model.prepare_decoder_input_ids_from_labels(batch.pop("labels")), tokens((3, 6, 4), 101)[1]
    with torch.no_grad():
        expected = model(**batch, decoder_input_ids=target).logits
        noisy = batch["input_ids"].where(batch["attention_mask"] == 1, 9)
        target = target.where(mask == 1, 11)
        got = model(input_ids=noisy, attention_mask=batch["attention_mask"], decoder_input_ids=target).logits
    torch.testing.assert_close(got[mask == 1], expected[mask == 1], atol=1e-12, rtol=1e-12)


# How it is computed


@pytest.mark.parametrize(
    ("fields", "encoder", "decoder"),
    [
        ({}, 20, 24),
        ({"lstm_hidden": "single"}, 12, 16),
        ({"encoder_ffn_dim": 96, "decoder_ffn_dim": 96}, 17.5, 21.5),
        ({"decoder_merge": "concat"}, 20, 31),
        ({"decoder_merge": "two_lstms"}, 20, 40),
        ({"cell": "rnn"}, 14, 18),
    ],
)
@pytest.mark.parametrize("sharing", MODES[:2])
def test_the_cost_of_a_layer_is_that_of_the_equations(fields, encoder, decoder, sharing):
    """Multiply-adds per token in units of D^2, with F = 4D (specification, section 6). Vanilla layers: 12 and 16."""
    d, length = 32, 5
    wide = {"d_model": d, "encoder_ffn_dim": 4 * d, "decoder_ffn_dim": 4 * d, "attn_implementation": "eager"}
    config = config_of(**{**wide, **fields, "share_gates": sharing, "share_hidden": sharing})
    model = DepthwiseLSTMForConditionalGeneration(config).eval()
    for stack, attentions, expected in (("encoder", 1, encoder), ("decoder", 2, decoder)):
        layers = getattr(model.model, stack)
        x = torch.randn(2, length, d)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            layers.run_layers(x, None, *([x, None] if stack == "decoder" else []))
        per_token = counter.get_total_flops() / 2 / (2 * length) / len(layers.layers)
        assert per_token - attentions * 2 * length * d == expected * d * d


def test_a_cell_is_three_products():
    cell = DepthwiseLSTM(config_of(share_gates="none"), "encoder")
    x = torch.randn(2, 3, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cell(x, x, (x,))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::linear"] == 3
    assert counts["aten::native_layer_norm"] == 2


def test_the_forget_gate_starts_where_it_is_told(tmp_path):
    """Only the forget gate gets `forget_bias_init`. Loading a model does not reset a trained bias."""
    model = DepthwiseLSTMForConditionalGeneration(config_of(forget_bias_init=2.0))
    closed = DepthwiseLSTMForConditionalGeneration(config_of(forget_bias_init=0))
    x = torch.randn(2, 3, 16)
    gates = model.model.encoder.lstm.gates
    closed.model.encoder.lstm.gates.fc.load_state_dict(gates.fc.state_dict())
    for number, (ours, theirs) in enumerate(zip(gates(x), closed.model.encoder.lstm.gates(x), strict=True)):
        torch.testing.assert_close(ours.logit() - theirs.logit(), torch.full_like(ours, 2.0 * (number == 1)))
    with torch.no_grad():
        gates.layer_norm.bias.fill_(0.5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.encoder.lstm.gates.layer_norm.bias, gates.layer_norm.bias)


@pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
def test_statistics_of_norms_are_float32(autocast):
    """The bfloat16 values are far from zero. Bfloat16 could not hold their mean and variance."""
    norm = GateNorm(64)
    scramble(norm)
    x = (100 + torch.randn(4, 3 * 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = x.double().unflatten(-1, (3, 64))
    exact = (exact - exact.mean(-1, keepdim=True)) / (exact.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    exact = exact * norm.weight.double().view(3, 64) + norm.bias.double().view(3, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        got = norm(x) if autocast else norm.bfloat16()(x)
    torch.testing.assert_close(got.double(), exact, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("case", LSTM_CASES)
def test_gradient_checkpointing_changes_no_gradient(case):
    """The cell passes through checkpointed layers, and weights that layers share get all their gradients."""
    rates = {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1}
    check_checkpointing(lambda: build(case, **rates), *WAYS)


def test_dropout_is_on_attention_and_hidden_state_and_never_on_the_cell():
    """Where the hidden state is dropped, only the forget gate changes the cell."""
    config = config_of(share_gates="none", dropout=0.9, activation_dropout=0.5)
    cell = DepthwiseLSTM(config, "encoder").train()
    torch.nn.init.zeros_(cell.gates.fc.weight)
    memory = torch.full((50, 4, 8), 2.0)
    torch.manual_seed(0)
    _, new = cell(torch.randn(50, 4, 8), memory, (torch.randn(50, 4, 8),))
    assert (new == 1).float().mean().item() == pytest.approx(0.9, abs=0.05)


# What surrounds it


@pytest.mark.parametrize("loaded", [False, True])
def test_the_cell_starts_as_glorot_has_it(loaded):
    """Each gate has its own fan-in and fan-out. Norms start at 1 and 0, except the forget gate, which starts open.

    The same holds if a loaded checkpoint lacks the cell. Then the cell is built on the meta device and filled later.
    """
    torch.manual_seed(0)
    d, f = 32, 96
    sizes = {"d_model": d, "encoder_ffn_dim": f, "share_gates": "stack", "share_hidden": "stack", "lstm_bias": True}
    config = config_of(**sizes)
    if loaded:
        model = DepthwiseLSTMForConditionalGeneration.from_pretrained(None, config=config, state_dict={})
    else:
        model = DepthwiseLSTMForConditionalGeneration(config)
    lstm = model.model.encoder.lstm
    fans = {lstm.gates.fc: 2 * d + d, lstm.hidden.fc1: 2 * d + f, lstm.hidden.fc2: f // 2 + d}
    for linear, fan in fans.items():
        bound = (6 / fan) ** 0.5
        assert linear.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert linear.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert (linear.bias == 0).all()
    for norm in (lstm.gates.layer_norm, lstm.hidden.layer_norm):
        assert (norm.weight == 1).all()
    assert lstm.gates.layer_norm.bias.view(3, -1).unique(dim=1).flatten().tolist() == [0, 1, 0]
    assert (lstm.hidden.layer_norm.bias == 0).all()


@pytest.mark.parametrize("final_norm", [False, True])
@pytest.mark.parametrize("depth", [6, 24])
def test_deep_stacks_start_near_the_uniform_distribution(depth, final_norm):
    """Loss at the start close to ln V, and a gradient in every layer."""
    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 200}
    model = DepthwiseLSTMForConditionalGeneration(
        config_of(**sizes, encoder_layers=depth, decoder_layers=depth, final_layer_norm=final_norm)
    )
    loss = model(**pair()).loss
    assert loss.item() == pytest.approx(math.log(200), abs=1.0 if final_norm else 0.3)
    loss.backward()
    norms = [layer.self_attn.out_proj.weight.grad.norm() for layer in model.model.encoder.layers]
    assert min(norms) > 0
    assert max(norms) / min(norms) < 100


def test_a_decoder_without_a_source_attends_to_nothing():
    model = build("lstm").double()
    decoder, target = model.model.decoder, tokens((5,))[0]
    with torch.no_grad():
        alone = decoder(target).last_hidden_state
        for layer in decoder.layers:
            layer.encoder_attn.out_proj.weight.zero_()
        states = random(1, 4, 16)
        torch.testing.assert_close(decoder(target, encoder_hidden_states=states).last_hidden_state, alone)


def test_a_decoder_that_shares_with_the_encoder_says_so_when_it_is_called_alone():
    body = build("lstm-two").model
    states, target = torch.randn(1, 4, 16), tokens((5,))[0]
    with pytest.raises(ValueError, match=r"shares weights with the encoder.*encoder_lstm=model.encoder.lstm.parts"):
        body.decoder(target, encoder_hidden_states=states)
    body.decoder(target, encoder_hidden_states=states, encoder_lstm=body.encoder.lstm.parts())


def test_a_few_steps_of_training_lower_the_loss():
    torch.manual_seed(0)
    check_learning(DepthwiseLSTMForConditionalGeneration(config_of(d_model=16)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_merge": "mean"}, "`decoder_merge` must be one of add, concat, two_lstms, got 'mean'"),
        ({"lstm_hidden": "ffn"}, "`lstm_hidden` must be one of glu, single, got 'ffn'"),
        ({"decoder_lstm_hidden": "ffn"}, "`decoder_lstm_hidden` must be one of glu, single, None, got 'ffn'"),
        ({"share_gates": "all"}, "`share_gates` must be one of none, stack, global, got 'all'"),
        ({"share_hidden": "all"}, "`share_hidden` must be one of none, stack, global, got 'all'"),
        ({"cell": "gru"}, "`cell` must be one of lstm, rnn, got 'gru'"),
        ({"cross_query": "prev"}, "`cross_query` must be one of self, residual, previous, got 'prev'"),
        ({"encoder_ffn_dim": 25}, "`encoder_ffn_dim` must be even, because the GLU halves it, got 25"),
        ({"decoder_ffn_dim": 25}, "`decoder_ffn_dim` must be even, because the GLU halves it, got 25"),
        ({"decoder_merge": "concat", "share_gates": "global"}, "`share_gates='global'` needs LSTMs of one width"),
        ({"decoder_merge": "concat", "share_hidden": "global"}, "`share_hidden='global'` needs LSTMs of one width"),
        ({"share_hidden": "global", "decoder_lstm_hidden": "single"}, "to be equal, got 'glu' and 'single'"),
        ({"share_hidden": "global", "decoder_ffn_dim": 20}, "to be equal, got 24 and 20"),
        ({"decoder_merge": "two_lstms", "cross_query": "residual"}, "`cross_query` must be 'self'"),
        ({"normalize_before": False}, "`normalize_before` must be True"),
        ({"ffn_drop_branch": 0.1}, "`ffn_drop_branch` must be None: there is no feed-forward sub-layer, got 0.1"),
        ({"ffn_branches": 2}, "`ffn_branches` must be 1: there is no feed-forward sub-layer, got 2"),
        ({"join_ffn": False}, "`join_ffn` must be True: there is no feed-forward sub-layer, got False"),
        (
            {"activation_function": "relu"},
            "`activation_function` is 'relu', but has no effect while `decoder_lstm_hidden`",
        ),
        ({"cell": "rnn", "forget_bias_init": 0.5}, "`forget_bias_init` is 0.5, but has no effect while `cell`"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(**fields)


def test_accepts_unfit_sizes_of_unused_parts():
    """An odd width without a GLU, unequal widths that no network uses, and shared gates of an RNN, which has none."""
    config_of(lstm_hidden="single", encoder_ffn_dim=25, decoder_ffn_dim=21, share_hidden="global")
    config_of(cell="rnn", decoder_merge="concat", share_gates="global")
    for stack in ("lstm_hidden", "decoder_lstm_hidden"):
        config_of(**{"decoder_lstm_hidden": "glu", stack: "single"}, activation_function="relu")


# Warm start


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_a_base_lends_embeddings_and_attentions(norm_first, caplog):
    sizes = {**SIZES, "normalize_before": norm_first, "lm_head_bias": True}
    base = scramble(VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes))).eval()
    model = DepthwiseLSTMForConditionalGeneration.from_base(base, decoder_merge="two_lstms", encoder_ffn_dim=30)
    assert "does not compute the function of the VanillaTransformer" in caplog.text
    config = model.config
    assert (config.activation_function, config.encoder_ffn_dim, config.decoder_ffn_dim) == ("gelu", 30, 20)
    assert config.attention_bias  # the base has biases
    theirs, copied = base.state_dict(), set()
    for name, tensor in model.state_dict().items():
        if name in theirs and torch.equal(tensor, theirs[name]):
            assert tensor.data_ptr() != theirs[name].data_ptr()
            copied.add(name)
    expected = {
        name for name in theirs if "_attn." in name or "embed" in name or "shared" in name or "lm_head" in name
    }
    if norm_first:
        expected |= {name for name in theirs if "attn_layer_norm" in name}
    assert copied == expected
    fresh = model.state_dict().keys() - copied
    assert all(".lstm." in name or "_lstm." in name or "_attn_layer_norm" in name for name in fresh)
    assert (model.model.decoder.layers[0].lstm.hidden.layer_norm.weight == 1).all()
    assert model(**pair()).loss.isfinite()


def test_attention_branches_are_copies_of_the_bases():
    base = build("vanilla-prenorm")
    model = DepthwiseLSTMForConditionalGeneration.from_base(base, attention_branches=2, final_layer_norm=True)
    theirs, ours = base.model.decoder, model.model.decoder
    for i, layer in enumerate(ours.layers):
        one = theirs.layers[i].encoder_attn.k_proj.weight
        assert torch.equal(layer.encoder_attn.k_proj.weight, torch.cat([one, one]))
    assert torch.equal(ours.layer_norm.weight, theirs.layer_norm.weight)  # the base's norm at the same place
