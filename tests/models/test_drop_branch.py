"""Drop-branch in one sub-layer: the values of its output, their frequencies and mean, and the computed branches."""

from collections import Counter

import pytest
import torch
from model_cases import build, config_of, pair, scramble
from model_checks import WAYS, check_checkpointing
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_deepwide.models import branches
from hf_deepwide.models.attention import MultiBranchAttention
from hf_deepwide.models.feed_forward import MultiBranchFeedForward

MERGES = {"mean": 1, "double_mean": 2}  # how often the sum is divided by N


def attention_layer(**fields):
    """A self-attention in training mode, D 8 and M 2."""
    config = config_of("mat-3", **{"d_model": 8, "attn_implementation": "eager", **fields})
    return scramble(MultiBranchAttention(config, 2)).train()


def feed_forward_layer(**fields):
    return scramble(MultiBranchFeedForward(config_of("mat-3", **{"d_model": 8, **fields}), 12)).train()


def keeping(monkeypatch, kept):
    """Let exactly the branches `kept` survive."""
    monkeypatch.setattr(branches, "draw_branches", lambda units, rate: list(kept))


def inputs(seed=0, shape=(3, 5, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_draw_keeps_each_branch_at_its_rate():
    torch.manual_seed(0)
    draws = 20_000
    counts = Counter(tuple(branches.draw_branches(2, 0.3)) for _ in range(draws))
    for kept, probability in {(): 0.09, (0,): 0.21, (1,): 0.21, (0, 1): 0.49}.items():
        assert counts[kept] / draws == pytest.approx(probability, abs=0.012)  # 3 standard errors


@pytest.mark.parametrize("merge", MERGES)
def test_two_constant_branches_have_four_outcomes(merge, monkeypatch):
    """Branches that always give 1 and 2, N = 2, rho = .3: {0, 1, 2, 3} / .7, divided by N or N^2."""
    layer = attention_layer(attention_branches=2, drop_branch=0.3, branch_merge=merge)
    with torch.no_grad():
        layer.out_proj.weight.zero_()
        layer.out_proj.bias[:8], layer.out_proj.bias[8:] = 1, 2
    for kept, total in (([], 0), ([0], 1), ([1], 2), ([0, 1], 3)):
        keeping(monkeypatch, kept)
        # one draw for all sentences and positions
        torch.testing.assert_close(layer(inputs())[0], torch.full((3, 5, 8), total / 0.7 / 2 ** MERGES[merge]))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_dropout_drops_weights_and_keeps_their_mean(attention):
    layer = attention_layer(attention_branches=1, attention_dropout=0.5, attn_implementation=attention)
    x, draws = inputs(shape=(1, 4, 8)), 4_000
    torch.manual_seed(0)
    with torch.no_grad():
        samples = layer(x.expand(draws, -1, -1))[0]
        expected = layer.eval()(x)[0][0]
        assert torch.equal(layer(x)[0][0], expected)
    spread = samples.std(0)
    assert spread.min() > 0.01
    assert ((samples.mean(0) - expected) / (spread / draws**0.5)).abs().max() < 4


@pytest.mark.parametrize("granularity", ["batch", "sentence"])
@pytest.mark.parametrize("drop_unit", ["branch", "head", "chunk"])
def test_the_mean_over_draws_is_the_undropped_output(drop_unit, granularity):
    """Eq. 5-6 and 9 are unbiased, biases included: training sees on average what inference computes."""
    layer = attention_layer(drop_branch=0.4, drop_unit=drop_unit, drop_granularity=granularity)
    x, draws = inputs(shape=(1, 2, 8)), 2_000
    torch.manual_seed(1)
    with torch.no_grad():
        if granularity == "sentence":
            samples = layer(x.expand(draws, -1, -1))[0][:, None]
        else:
            samples = torch.stack([layer(x)[0] for _ in range(draws)])
        expected = layer.eval()(x)[0]
    error = (samples.mean(0) - expected) / (samples.std(0) / draws**0.5)
    assert error.abs().max() < 4


def test_a_joined_feed_forward_is_there_or_not():
    """Eq. 7: FFN(x) / (1 - rho) or nothing at all, its output bias included."""
    layer = feed_forward_layer(drop_branch=0.25)
    x = inputs()
    torch.manual_seed(0)
    with torch.no_grad():
        samples = [layer(x) for _ in range(400)]
        full = layer.eval()(x) / 0.75
    dropped = [sample for sample in samples if (sample == 0).all()]
    assert len(dropped) / 400 == pytest.approx(0.25, abs=0.08)
    for sample in samples:
        if not (sample == 0).all():
            torch.testing.assert_close(sample, full)


def test_feed_forward_branches_are_dropped_one_by_one():
    """Eq. 8: with two branches, four outcomes."""
    layer = feed_forward_layer(drop_branch=0.3, ffn_branches=2)
    x = inputs()
    torch.manual_seed(0)
    with torch.no_grad():
        samples = [layer(x) for _ in range(200)]
        b = layer.fc2.bias.view(2, 8)
        inner = layer.activation(layer.fc1(x)).split(12, dim=-1)
        one, two = (inner[i] @ layer.fc2.weight[:, 12 * i : 12 * i + 12].T + b[i] for i in range(2))
    outcomes = [torch.zeros_like(one), one / 1.4, two / 1.4, (one + two) / 1.4]
    counts = [sum(torch.allclose(s, o, atol=1e-5) for s in samples) for o in outcomes]
    assert sum(counts) == 200
    assert min(counts) > 0
    assert counts[3] == max(counts)


def test_an_unjoined_feed_forward_has_three_outcomes():
    """Probability (1 - rho)^2: both projections. rho (1 - rho): only the bias of the second. rho: nothing."""
    rho, draws = 0.3, 2000
    layer, x = feed_forward_layer(drop_branch=rho, join_ffn=False), inputs()
    torch.manual_seed(0)
    with torch.no_grad():
        samples = [layer(x) for _ in range(draws)]
        inner = layer.activation(layer.fc1(x) / (1 - rho))
        outcomes = {
            "both": (layer.fc2(inner) / (1 - rho), (1 - rho) ** 2),
            "the second": ((layer.fc2.bias / (1 - rho)).expand_as(x), rho * (1 - rho)),
            "none": (torch.zeros_like(x), rho),
        }
    counts = {name: sum(torch.allclose(s, o, atol=1e-5) for s in samples) for name, (o, _) in outcomes.items()}
    assert sum(counts.values()) == draws
    for name, (_, probability) in outcomes.items():
        assert counts[name] / draws == pytest.approx(probability, abs=0.04), name


def test_unjoined_feed_forwards_draw_for_each_projection_by_itself():
    """Two branches have 16 pairs of draws. The four pairs that drop both second projections give the same output."""
    fields = {"drop_branch": 0.5, "ffn_branches": 2, "join_ffn": False, "drop_granularity": "sentence"}
    layer, x = feed_forward_layer(**fields), inputs(shape=(1, 4, 8)).expand(1600, -1, -1)
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = layer(x)
    kinds = Counter(tuple(row.tolist()) for row in outputs.flatten(1).round(decimals=3))
    assert len(kinds) == 4 * 3 + 1
    assert kinds[(0.0,) * 32] / 1600 == pytest.approx(1 / 4, abs=0.05)
    assert all(40 < count < 170 for kind, count in kinds.items() if any(kind))


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("merge", MERGES)
def test_unjoined_branches_are_one_network_in_evaluation(merge, branches):
    layer = feed_forward_layer(ffn_branches=branches, join_ffn=False, branch_merge=merge, drop_branch=0.3).eval()
    (inner, inner_bias), (outer, outer_bias) = layer.averaged()
    with torch.no_grad():
        expected = torch.relu(inputs() @ inner.T + inner_bias) @ outer.T + outer_bias
        torch.testing.assert_close(layer(inputs()), expected, atol=1e-5, rtol=1e-5)
    assert inner.shape == (12, 8)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("kept", [[0], [2], [0, 2], [1, 2]])
def test_a_dropped_branch_takes_its_output_bias_with_it(kept, merge, monkeypatch):
    """If some of three branches are dropped, the layer equals a module of only the kept branches, rescaled."""
    layer = attention_layer(drop_branch=0.2, branch_merge=merge)
    keeping(monkeypatch, kept)
    smaller = attention_layer(attention_branches=len(kept), drop_branch=0.0)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            for kind in ("weight", "bias"):
                blocks = getattr(getattr(layer, name), kind).chunk(3)
                getattr(getattr(smaller, name), kind).copy_(torch.cat([blocks[i] for i in kept]))
        columns, biases = layer.out_proj.weight.chunk(3, dim=1), layer.out_proj.bias.chunk(3)
        smaller.out_proj.weight.copy_(torch.cat([columns[i] for i in kept], dim=1))
        smaller.out_proj.bias.copy_(torch.cat([biases[i] for i in kept]))
        x, memory = inputs(), inputs(1, (3, 7, 8))
        factor = len(kept) / 3 ** MERGES[merge] / 0.8
        for keys in (None, memory):
            expected = smaller(x, encoder_hidden_states=keys)[0] * factor
            torch.testing.assert_close(layer(x, encoder_hidden_states=keys)[0], expected, atol=1e-6, rtol=1e-5)


def test_heads_are_zeroed_before_they_are_mixed():
    """With the identity as output projection, dropped heads are runs of D/M zeros, drawn for each branch and head."""
    layer = attention_layer(attention_branches=1, drop_branch=0.5, drop_unit="head", attention_bias=False)
    layer.out_proj.weight.data = torch.eye(8)
    x, patterns = inputs(), Counter()
    torch.manual_seed(0)
    with torch.no_grad():
        full = layer.eval()(x)[0]
        layer.train()
        for _ in range(200):
            output = layer(x)[0].unflatten(-1, (2, 4))
            zero = (output == 0).all(-1)
            assert (zero == zero[0, 0]).all()
            alive = ~zero[0, 0]
            torch.testing.assert_close(output, full.unflatten(-1, (2, 4)) / 0.5 * alive[:, None])
            patterns[tuple(alive.tolist())] += 1
    assert len(patterns) == 4
    assert all(30 <= count <= 70 for count in patterns.values())


def test_chunks_are_zeroed_behind_the_output_projection():
    """The released code drops heads like this: runs of D/M zeros for any projection, including its bias."""
    layer = attention_layer(attention_branches=1, drop_branch=0.5, drop_unit="chunk")
    x, patterns = inputs(), Counter()
    torch.manual_seed(0)
    with torch.no_grad():
        full = layer.eval()(x)[0].unflatten(-1, (2, 4))
        layer.train()
        for _ in range(200):
            output = layer(x)[0].unflatten(-1, (2, 4))
            alive = (output != 0).any(-1)[0, 0]
            torch.testing.assert_close(output, full / 0.5 * alive[:, None])
            patterns[tuple(alive.tolist())] += 1
    assert len(patterns) == 4
    assert all(30 <= count <= 70 for count in patterns.values())


@pytest.mark.parametrize("fields", [{}, {"drop_unit": "chunk", "ffn_branches": 2, "join_ffn": False}], ids=str)
@pytest.mark.parametrize("normalize_before", [False, True], ids=["post-norm", "pre-norm"])
def test_passes_only_the_residual_when_all_branches_drop(normalize_before, fields, monkeypatch):
    """Every parameter has a gradient, also in pre-norms and the encoder: DistributedDataParallel waits for it."""
    model = build("mat-3", drop_branch=0.5, normalize_before=normalize_before, **fields).train()
    keeping(monkeypatch, [])
    layer = model.model.decoder.layers[1]
    x, memory = inputs(shape=(2, 4, 16)), inputs(1, (2, 5, 16))
    expected = x
    if not normalize_before:
        for norm in (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm):
            expected = norm(expected)
    torch.testing.assert_close(layer(x, None, memory), expected)

    model(**pair()).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    for name, parameter in model.named_parameters():
        if "_proj" in name or ".fc" in name:
            assert (parameter.grad == 0).all(), name


def flops(layer, *arguments, backward=False):
    with FlopCounterMode(display=False) as counter:
        output = layer(*arguments)
        output = output[0] if isinstance(output, tuple) else output
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_dropped_branch_is_not_computed(implementation, monkeypatch):
    """The cost of forward and backward is proportional to the number of kept branches."""
    layer = attention_layer(drop_branch=0.5, attn_implementation=implementation)
    ffn = feed_forward_layer(drop_branch=0.5, ffn_branches=3)
    x, memory = inputs().requires_grad_(), inputs(1, (3, 7, 8)).requires_grad_()
    for call in ((layer, x), (layer, x, None, memory), (ffn, x)):
        costs = []
        for kept in ([], [1], [0, 2], [0, 1, 2]):
            keeping(monkeypatch, kept)
            costs.append(flops(*call, backward=True))
        assert costs[0] == 0
        assert costs[1] > 0
        assert costs == [costs[1] * n for n in range(4)]


@pytest.mark.parametrize("ffn_branches", [1, 3])
def test_each_sentence_has_branches_of_its_own(ffn_branches):
    """In a batch of equal sentences, each output is the sum of some branches, and every subset of branches occurs."""
    torch.manual_seed(0)
    fields = {"drop_branch": 0.5, "drop_granularity": "sentence", "ffn_branches": ffn_branches}
    ffn, x = feed_forward_layer(**fields), inputs(shape=(1, 4, 8)).expand(300, -1, -1)
    with torch.no_grad():
        outputs = ffn(x)
        blocks = ffn.fc2.weight.split(12, dim=1), ffn.fc2.bias.split(8)
        inner = ffn.activation(ffn.fc1(x[0])).split(12, dim=-1)
        branches = [inner[i] @ w.T + b for i, (w, b) in enumerate(zip(*blocks, strict=True))]
    patterns = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * ffn_branches).view(-1, ffn_branches)
    counts = []
    for pattern in patterns:
        expected = sum(gate * branch for gate, branch in zip(pattern, branches, strict=True)) / ffn_branches / 0.5
        counts.append(sum(torch.allclose(output, expected, atol=1e-5) for output in outputs))
    assert sum(counts) == 300
    assert min(counts) > 0.7 * 300 / len(patterns) - 10


def test_feed_forward_branches_have_a_rate_of_their_own():
    """Rate 0: only attention drops branches, the ablation of section 4.2. None: the rate of attention."""
    torch.manual_seed(0)
    alone = feed_forward_layer(drop_branch=0.9, ffn_drop_branch=0.0)
    x = inputs()
    with torch.no_grad():
        assert torch.equal(alone(x), alone.eval()(x))
        quarter = feed_forward_layer(drop_branch=0.0, ffn_drop_branch=0.25)
        dropped = sum(bool((quarter(x) == 0).all()) for _ in range(400))
    assert dropped / 400 == pytest.approx(0.25, abs=0.08)
    assert feed_forward_layer(drop_branch=0.4).drop_branch == 0.4
    layer = attention_layer(drop_branch=0.0, ffn_drop_branch=0.9)
    with torch.no_grad():
        assert torch.equal(layer(x)[0], layer(x)[0])


def test_sentences_keep_the_type_of_autocast():
    layer = attention_layer(drop_branch=0.5, drop_granularity="sentence", attn_implementation="sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = layer(inputs())
    assert output.dtype == torch.bfloat16


def test_evaluation_and_rate_zero_draw_nothing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("drew a random number")

    monkeypatch.setattr(torch, "rand", refuse)
    layer = attention_layer(drop_branch=0.5, drop_unit="head")
    with pytest.raises(AssertionError, match="drew a random number"):
        layer.train()(inputs())
    layer.eval()(inputs())
    attention_layer(drop_branch=0.5, drop_granularity="sentence").eval()(inputs())
    feed_forward_layer(drop_branch=0.5, join_ffn=False).eval()(inputs())
    attention_layer(drop_branch=0.0)(inputs())
    feed_forward_layer(drop_branch=0.5).eval()(inputs())
    feed_forward_layer(drop_branch=0.0)(inputs())


@pytest.mark.parametrize("granularity", ["batch", "sentence"])
def test_gradient_checkpointing_drops_the_same_branches_again(granularity):
    rates = {"drop_branch": 0.4, "dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1}
    check_checkpointing(lambda: build("mat-3", drop_granularity=granularity, ffn_branches=2, **rates), *WAYS)


@pytest.mark.parametrize("granularity", ["batch", "sentence"])
def test_dropping_differs_between_calls_and_repeats_with_the_seed(granularity):
    model = build("mat-3", drop_branch=0.5, drop_granularity=granularity).train()
    with torch.no_grad():
        torch.manual_seed(0)
        one, two = model(**pair()).loss, model(**pair()).loss
        torch.manual_seed(0)
        again = model(**pair()).loss
    assert one != two
    assert one == again


def test_dropout_keeps_its_rate_and_mean():
    """The package's faster CPU dropout: rate, scale, mean, independence of neighbours, and gradient."""
    dropout = build("mat-3", dropout=0.3).model.encoder.layers[0].dropout.train()
    assert isinstance(dropout, nn.Dropout)
    torch.manual_seed(0)
    x = torch.full((300, 1001), 2.0, requires_grad=True)
    y = dropout(x)
    kept = y != 0
    assert kept.float().mean() == pytest.approx(0.7, abs=0.005)
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 2 / 0.7), atol=1e-3, rtol=1e-3)
    assert y.mean().item() == pytest.approx(2, abs=0.01)
    for lag in (1, 2, 3, 4, 1001):  # neighbours are dropped independently
        flat = kept.flatten().float()
        together = (flat[:-lag] * flat[lag:]).mean()
        assert together == pytest.approx(0.49, abs=0.005)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach() / 2)
    assert torch.equal(dropout.eval()(x), x)


def test_compiled_sub_layers_draw_without_a_break_and_are_compiled_once():
    """Each output of compiled code is one of the outputs of eager code."""
    torch._dynamo.reset()
    x, compilations = inputs(), []

    def backend(graph, _):
        compilations.append(graph)
        return graph

    for layer in (attention_layer(drop_branch=0.5), feed_forward_layer(drop_branch=0.5)):
        compilations.clear()
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        call = compiled if isinstance(layer, MultiBranchFeedForward) else lambda x, call=compiled: call(x)[0]
        torch.manual_seed(0)
        seen = [call(x) for _ in range(24)]
        assert len(compilations) == 1
        torch.manual_seed(1)
        with torch.no_grad():
            first = layer(x)
            eager = [layer(x) for _ in range(100)]
        outcomes = [each if isinstance(first, torch.Tensor) else each[0] for each in eager]
        for output in seen:
            assert min((output - each).abs().max() for each in outcomes) < 1e-5
        assert max((output - seen[0]).abs().max() for output in seen) > 0.01, "they differ"
        output.sum().backward()
    torch._dynamo.reset()
