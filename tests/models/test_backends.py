"""Ways to compute the same model: attention back-ends, compilation, half precision. Also its reported states."""

from itertools import pairwise

import pytest
import torch
from model_cases import CASES, build, config_of, pair, scramble, source, tokens
from transformers import modeling_flash_attention_utils as utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_deepwide.models.attention import MultiBranchAttention

EVERY = pytest.mark.parametrize("case", CASES)


def results(model, seed=0, **inputs):
    """Logits, loss and the gradient of every parameter."""
    model.zero_grad()
    torch.manual_seed(seed)  # some families draw numbers in training
    out = model(**inputs)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None] == []
    return out.logits.detach(), out.loss.detach(), {name: grad.clone() for name, grad in grads.items()}


def test_no_other_back_end_runs_here():
    """The tests below cover all back-ends: flash by an exact function. "paged" serves only decoder-only models."""
    usable = {name for name in ALL_ATTENTION_FUNCTIONS if "flash" not in name and "paged" not in name}
    assert usable == {"sdpa", "flex_attention"}


@EVERY
def test_eager_and_sdpa_attention_agree_on_logits_and_gradients(case):
    model = build(case).double().train()  # in float32 gradients of some joints differ by their rounding
    model.set_attn_implementation("eager")
    expected = results(model, **pair())
    model.set_attn_implementation("sdpa")
    assert model.model.decoder.config._attn_implementation == "sdpa"
    torch.testing.assert_close(results(model, **pair()), expected, rtol=1e-3, atol=1e-4)


def test_flex_attention_agrees():
    """Forward only: PyTorch has no backward pass of flex attention on CPUs. The heads must be at least 16 wide."""
    batch = pair()
    model = build("mat-3", d_model=32, encoder_attention_heads=2, decoder_attention_heads=2)
    with torch.no_grad():
        expected = model(**batch).logits
        model.set_attn_implementation("flex_attention")
        real = batch["labels"] != -100
        with torch.compiler.set_stance("force_eager"):  # compiling its kernel takes a minute
            torch.testing.assert_close(model(**batch).logits[real], expected[real], rtol=1e-3, atol=1e-3)


def naive_flash(query, key, value, softmax_scale, causal):
    """Exact attention of one sentence, `[T, heads, H]` to `[S, heads, H]`, in the layout of flash attention."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * softmax_scale
    if causal:
        behind = torch.arange(len(key))[None] > torch.arange(len(query))[:, None] + len(key) - len(query)
        scores = scores.masked_fill(behind, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.fixture
def flash(monkeypatch):
    """Replace the kernels of flash attention by an exact function. Transformers' code around them removes padding."""

    def dense(query, key, value, softmax_scale=None, causal=False, **_):
        sentences = zip(query, key, value, strict=True)
        return torch.stack([naive_flash(*each, softmax_scale, causal) for each in sentences])

    def packed(query, key, value, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False, **_):
        spans = zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True)
        return torch.cat(
            [
                naive_flash(query[q[0] : q[1]], key[k[0] : k[1]], value[k[0] : k[1]], softmax_scale, causal)
                for q, k in spans
            ]
        )

    def arguments(query_length=None, is_causal=False, softmax_scale=None, **_):
        return {"causal": is_causal and query_length != 1, "softmax_scale": softmax_scale}

    functions = (dense, packed, None, utils._pad_input, utils._unpad_input), (arguments, arguments)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_, **__: functions)


@pytest.mark.parametrize("lengths", [(3, 6, 4), (7, 4, 5), (9, 2, 8)], ids=["shorter", "equal", "longer"])
@pytest.mark.parametrize("case", ["vanilla", "mat-3", "lstm"])
def test_flash_attention_agrees_on_padded_sentences(case, lengths, flash):
    model, batch = build(case), pair((7, 4, 5), lengths)
    real = batch["labels"] != -100
    with torch.no_grad():
        expected = model(**batch).logits
        for part in (model, model.model.encoder, model.model.decoder):
            part.config._attn_implementation_internal = "flash_attention_2"  # the property's setter requires a GPU
        torch.testing.assert_close(model(**batch).logits[real], expected[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["mat-2-prenorm", "multipath-2", "vanilla-luna"])
def test_weights_that_are_asked_for_do_not_overflow_in_half_precision(case):
    """Each row of weights adds up to 1. The sum over all rows is larger than 65,504, the largest float16."""
    model = build(case, attn_implementation="eager").half()
    with torch.no_grad():
        outputs = model(**pair((4,) * 8_400, (4,) * 8_400), output_attentions=True)
    assert outputs.cross_attentions[0].sum(dtype=torch.float32) > 65_504
    assert outputs.logits.isfinite().all()


COMPILED = ["mat-3", "mat-2-prenorm", "latent-both", "latent-decoder-hard", "lstm-two"]
WITH_CACHE = ["vanilla", "vanilla-luna", "lstm"]
JOINED = ["vanilla-deepnorm", "vanilla-b2t", "vanilla-rk2-prenorm"]
JOINED += ["vanilla-attention-blocks", "vanilla-hyper", "vanilla-mhc"]


@pytest.mark.parametrize("case", COMPILED)
def test_the_forward_pass_compiles_as_one_graph(case):
    model = build(case, encoder_layers=1, decoder_layers=1)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for batch in (pair(), pair(seed=2)):
            torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", WITH_CACHE)
def test_the_forward_pass_with_a_cache_of_its_own_compiles_as_one_graph(case):
    """Without labels a model makes its own cache, with the shape in the config."""
    model, batch = build(case, encoder_layers=1, decoder_layers=1), pair()
    batch["decoder_input_ids"] = batch.pop("labels").clamp(min=1)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", JOINED)
def test_training_compiles_as_one_graph(case):
    """Forward and backward; nothing is drawn at random here."""
    more = {"layer_aggregation": "denseformer"} if case == "vanilla-deepnorm" else {}
    model = build(case, encoder_layers=2, decoder_layers=1, **more).train()
    expected = results(model, 0, **pair())
    model.zero_grad()
    torch.compiler.reset()
    out = torch.compile(model, backend="eager", fullgraph=True)(**pair())
    out.loss.backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close((out.logits, out.loss, got), expected, rtol=1e-4, atol=1e-5)


def test_training_with_dropping_compiles():
    """Each call of the compiled model draws the dropped branches anew, and draws the same as eager code."""
    model = build("mat-3", drop_branch=0.4, encoder_layers=1, decoder_layers=1).train()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    losses = set()
    for seed in range(3):
        expected = results(model, seed, **pair())
        torch.manual_seed(seed)
        model.zero_grad()
        out = compiled(**pair())
        out.loss.backward()
        got = {name: p.grad for name, p in model.named_parameters()}
        torch.testing.assert_close((out.logits, out.loss, got), expected, rtol=1e-4, atol=1e-5)
        losses.add(out.loss.item())
    assert len(losses) == 3


def test_attention_that_drops_heads_compiles():
    """Only attentions drop heads. The tests above compile the other parts of a model."""
    layer = scramble(MultiBranchAttention(config_of("mat-3", drop_branch=0.4, drop_unit="head"), 2)).train()
    torch.compiler.reset()
    compiled, x = torch.compile(layer, backend="eager"), torch.randn(3, 5, 16)
    found = []
    for seed in range(3):
        outputs = []
        for attention in (layer, compiled):
            torch.manual_seed(seed)
            layer.zero_grad()
            output = attention(x)[0]
            output.square().sum().backward()
            outputs.append((output.detach(), {name: p.grad.clone() for name, p in layer.named_parameters()}))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
        found.append(outputs[1][0])
    assert not any(torch.equal(one, two) for one, two in pairwise([*found, found[0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EVERY
def test_half_precision_is_finite_and_near(case, dtype):
    model = build(case)
    with torch.no_grad():
        expected = model(**pair()).logits
        with torch.autocast("cpu", dtype=dtype):
            autocast = model(**pair())
        half = model.to(dtype)(**pair())
    assert half.logits.dtype == dtype
    near = 0.4 if "em-routing" in case else 0.1  # the last digit can decide with which capsule a layer agrees
    for out in (half, autocast):
        assert out.loss.isfinite()
        assert (out.logits - expected).abs().mean() < near * expected.abs().mean()


@EVERY
def test_every_parameter_learns(case):
    """Every gradient differs from zero, except those of the keys' biases, which never change a softmax."""
    model = build(case).train()
    is_luna = getattr(model.config, "layer_form", "") == "luna"  # in its causal attention the keys' biases do matter
    tied = is_luna and model.config.luna_tie_kv
    _, _, grads = results(model, **pair())
    for name, grad in grads.items():
        largest = grad.abs().max()
        if name.endswith("k_proj.bias") and not tied and not (is_luna and ".decoder." in name and "self_attn" in name):
            assert largest < 1e-5, name
        else:
            assert largest > 1e-4, name


@EVERY
def test_reported_attentions_and_hidden_states(case):
    """Reported attentions are distributions over visible keys, averaged over branches. Reporting changes no logits.

    The weights of a window that reaches past its sentence add up to less than 1.
    """
    model, batch = build(case, attn_implementation="eager"), pair()
    with torch.no_grad():
        plain = model(**batch)
        out = model(**batch, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(out.logits, plain.logits)
    assert plain.encoder_attentions is None
    assert plain.decoder_hidden_states is None
    config = model.config
    assert [h.shape for h in out.encoder_hidden_states] == [(3, 7, 16)] * 3
    assert [h.shape for h in out.decoder_hidden_states] == [(3, 6, 16)] * 4
    assert [a.shape for a in out.encoder_attentions] == [(3, config.encoder_attention_heads, 7, 7)] * 2
    assert [a.shape for a in out.decoder_attentions] == [(3, config.decoder_attention_heads, 6, 6)] * 3
    assert [a.shape for a in out.cross_attentions] == [(3, config.decoder_attention_heads, 6, 7)] * 3
    for weights in (*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions):
        sums = weights.sum(-1)
        is_window = "dynamic" in case and not any(weights is other for other in out.cross_attentions)
        torch.testing.assert_close(sums, sums.clamp(max=1) if is_window else torch.ones_like(sums))
    hidden = batch["attention_mask"][:, None, None] == 0
    for weights in (*out.encoder_attentions, *out.cross_attentions):
        assert (weights.masked_select(hidden.expand_as(weights)) == 0).all()
    for weights in out.decoder_attentions:
        assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(model.lm_head(out.decoder_hidden_states[-1]), out.logits)


@EVERY
def test_outputs_as_tuples_and_reused_encoder_outputs(case):
    model = build(case)
    target = tokens((5, 5, 5), seed=3)[0]
    with torch.no_grad():
        expected = model(**source(), decoder_input_ids=target).logits
        assert torch.equal(model(**source(), decoder_input_ids=target, return_dict=False)[0], expected)
        memory = model.get_encoder()(**source())
        for encoder_outputs in (memory, memory.to_tuple()):
            again = model(
                encoder_outputs=encoder_outputs,
                attention_mask=source()["attention_mask"],
                decoder_input_ids=target,
            )
            assert torch.equal(again.logits, expected)


def test_reported_attention_is_the_mean_over_the_branches_of_each_head():
    """Weights of branch m and head h stand at m * heads + h; a report has one table for each head."""
    model, batch, raw = build("mat-3", attn_implementation="eager"), pair(), []
    module = model.model.decoder.layers[0].encoder_attn
    with torch.no_grad():
        handle = module.register_forward_hook(lambda _, __, output: raw.append(output[1]))
        model(**batch)
        handle.remove()
        (reported, *_) = model(**batch, output_attentions=True).cross_attentions
    heads, (weights,) = module.num_heads, raw
    assert (module.branches, weights.shape[1], reported.shape[1]) == (3, 3 * heads, heads)
    assert heads > 1
    for head in range(heads):
        expected = sum(weights[:, branch * heads + head] for branch in range(3)) / 3
        torch.testing.assert_close(reported[:, head], expected)
