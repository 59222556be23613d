"""Attention residuals, hyper-connections and mHC: numbers computed outside the package, start of training, cost.

The tests of all models (`model_cases.CASES`) compare logits with the equations, and check generation, saving and
back-ends.
"""

import pytest
import torch
from hand_made_layers import W, encode, hand_made, position
from model_cases import SIZES, build, leaves, pair, sentences, source
from model_checks import WAYS, check_checkpointing, check_equations, check_learning
from naive_transformer import logits as naive_logits
from torch import nn
from transformers import M2M100Config, M2M100ForConditionalGeneration

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import UserError
from hf_deepwide.models.attention_residuals import AttentionResidualEncoderLayer, Sources, inverse_rms
from hf_deepwide.models.hyper_connections import HyperEncoderLayer, sinkhorn
from hf_deepwide.models.joined_layers import Join
from hf_deepwide.warm_start import logit_difference

KINDS = {
    "attention": {"residual": "attention"},
    "blocks": {"residual": "attention", "attention_block": 1},
    "static": {"residual": "hyper", "dynamic_streams": False},
    "dynamic": {"residual": "hyper"},
    "mhc": {"residual": "mhc"},
}
EVERY = pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)


def new(**fields):
    """A pre-norm model as it starts training."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig(**{**SIZES, "normalize_before": True, **fields})
    return VanillaTransformerForConditionalGeneration(config)


def joins_of(model):
    return [module for module in model.modules() if isinstance(module, Join)]


def fill(join, **values):
    """Set weights of a joint by name."""
    with torch.no_grad():
        for name, value in values.items():
            getattr(join, name).copy_(torch.tensor(value))


# Numbers that were computed outside the package


QUERIES = ((0.5, -0.5, 0.2), (-0.3, 0.4, 0.6), (0.2, 0.1, -0.7), (0.1, 0.3, 0.2))  # w_2, w_3, w_4 and the last


@pytest.mark.parametrize(
    ("block", "weights", "expected"),
    [
        (
            None,
            [
                [0.619376, 0.380624],
                [0.262607, 0.668984, 0.068409],
                [0.229906, 0.096845, 0.214490, 0.458759],
                [0.288963, 0.309991, 0.116793, 0.160825, 0.123427],
            ],
            [0.207169, 0.770502, -0.348844],
        ),
        (1, [None, None, None, [0.501870, 0.299273, 0.198857]], [0.512664, 0.931228, -0.605912]),
    ],
    ids=["full", "blocks"],
)
def test_attention_over_depth_gives_the_numbers_found_elsewhere(block, weights, expected, monkeypatch):
    """The numbers lack the package's factor, the number of sources. The norms after it have another epsilon."""
    model, seen = hand_made(residual="attention", attention_block=block, normalize_before=True), []
    for join, query in zip(joins_of(model.encoder), QUERIES, strict=True):
        fill(join, depth_query=query)
    own = joins_of(model)[0].__class__.weights
    monkeypatch.setattr(joins_of(model)[0].__class__, "weights", lambda *args: seen.append(own(*args)) or seen[-1])
    output = encode(model)
    for got, wanted in zip(seen, weights, strict=True):
        assert wanted is None or got.flatten().tolist() == pytest.approx(wanted, abs=2e-5)
    assert [x / seen[-1].shape[-1] for x in output] == pytest.approx(expected, abs=3e-5)


def test_one_mixture_is_the_number_found_elsewhere():
    (join, *_) = joins_of(hand_made(residual="attention", normalize_before=True))
    fill(join, depth_query=QUERIES[-1])
    first, second = position(), position(W[0][0])
    scales = torch.cat([inverse_rms(first), inverse_rms(second)], dim=-1)
    with torch.no_grad():
        mixed = join(Sources(first, scales, (first, second)), position(W[1][2]))
    assert [x / 3 for x in mixed.mixture.flatten().tolist()] == pytest.approx(
        [0.732607, 0.741044, -0.069227], abs=1e-6
    )
    assert len(mixed.values) == 3


STATIC = (
    ([[1, 1, 0.1], [0.2, 0, 0.9]], [1, 0.5]),
    ([[-0.1, 0.9, -0.2], [1, 0.1, 1]], [0.7, 1]),
    ([[0.8, 1, 0.3], [0.3, -0.1, 1]], [1, 1.2]),
    ([[0.1, 0.8, 0], [0.9, 0.2, 1.1]], [0.9, 1]),
)
STREAMS = torch.tensor([[[[1, 2, -0.5], [1, -0.4, 0.2]]]], dtype=torch.float64)


def streams_of(model, streams=None):
    """The streams after the encoder's layers. For given `streams`: after the self-attention of the first layer."""
    with torch.no_grad():
        if streams is not None:
            layer = model.encoder.layers[0]
            behind = layer.residual(
                streams, layer.self_attn_layer_norm, lambda x: layer.self_attn(x)[0], joint="self_attn"
            )
            return behind.flatten().tolist()
        state = (position(),)
        for layer in model.encoder.layers:
            state = layer(state[0], None, *state[1:])
        return state[1].flatten().tolist()


def test_static_streams_give_the_numbers_found_elsewhere():
    model = hand_made(residual="hyper", dynamic_streams=False, residual_streams=2, normalize_before=True)
    assert encode(model) == pytest.approx([0.990766, 1.578243, -2.257838], abs=1e-6), "the plain stack at first"
    for join, (alpha, beta) in zip(joins_of(model.encoder), STATIC, strict=True):
        fill(join, static_alpha=alpha, static_beta=beta)
    rows = [0.851470, 1.668215, -2.066667, 1.545003, 1.420866, -2.878778]
    assert streams_of(model) == pytest.approx(rows, abs=1e-6)
    assert encode(model) == pytest.approx([x / 2 for x in (2.396473, 3.089082, -4.945445)], abs=1e-6)


def test_a_dynamic_connection_gives_the_numbers_found_elsewhere():
    model = hand_made(residual="hyper", residual_streams=2, normalize_before=True)
    (join, *_) = joins_of(model)
    alpha, beta = STATIC[0]
    maps = {"dynamic_alpha": [[0.1, 0.2, -0.3], [0.5, -0.4, 0.2], [-0.2, 0.3, 0.1]], "dynamic_beta": [0.4, -0.3, 0.2]}
    fill(join, static_alpha=alpha, static_beta=beta, alpha_scale=[0.5], beta_scale=[0.25], **maps)
    with torch.no_grad():
        coefficients, write = join.coefficients(STREAMS)
    expected = [1.343842, 0.664901, 0.124314, -0.002707, 0.297655, 0.621757]
    assert coefficients.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert write.flatten().tolist() == pytest.approx([0.877639, 0.671050], abs=1e-6)
    expected = [0.719763, 1.965334, -0.031124, 0.560430, 0.576894, 0.247073]
    assert streams_of(model, STREAMS) == pytest.approx(expected, abs=1e-6)


def test_manifold_connections_give_the_numbers_found_elsewhere():
    model = hand_made(residual="mhc", residual_streams=2, normalize_before=True)
    phi = [[(((7 * i + 3 * j) % 5) - 2) / 10 for j in range(6)] for i in range(8)]
    bias, scale = [0.5, -0.5, 0, 0.2, 1, -1, -0.5, 0.8], [0.6, 0.4, 0.8]
    for join in joins_of(model.encoder):
        fill(join, coefficient_map=phi, coefficient_bias=bias, coefficient_scale=scale)
    with torch.no_grad():
        (join, *_) = joins_of(model)
        alpha, beta = join.coefficients(STREAMS)
        read, _, _ = join(STREAMS)
    assert alpha[..., 0].flatten().tolist() == pytest.approx([0.650566, 0.296385], abs=2e-6)
    assert beta.flatten().tolist() == pytest.approx([1.092327, 1.107301], abs=1e-6)
    assert alpha[..., 1:].flatten().tolist() == pytest.approx([0.876384, 0.123616, 0.123615, 0.876383], abs=2e-6)
    assert read.flatten().tolist() == pytest.approx([0.946952, 1.182579, -0.266006], abs=2e-6)
    expected = [0.934408, 2.603957, -0.052016, 0.933508, 0.809660, 0.479876]
    assert streams_of(model, STREAMS) == pytest.approx(expected, abs=2e-6)
    expected = [1.008142, 1.556961, -2.327481, 1.008463, 1.489116, -2.456167]
    assert streams_of(model) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize(("iterations", "worst"), [(3, 0.2), (20, 2e-3)])
def test_mixing_matrices_are_nearly_doubly_stochastic(iterations, worst):
    """Columns add up to 1, so equal streams stay equal. Sums of rows come closer to 1 with more iterations."""
    matrices = sinkhorn(torch.randn(2000, 4, 4, generator=torch.Generator().manual_seed(0)), iterations)
    assert matrices.min() > 0
    assert (matrices.sum(-2) - 1).abs().max() < 3e-6
    assert (matrices.sum(-1) - 1).abs().max() < worst


# Equations


@EVERY
def test_gradients_are_those_of_the_equations(fields):
    if fields["residual"] != "attention":
        fields = fields | {"residual_streams": 2}
    if fields["residual"] == "mhc":
        fields = fields | {"sinkhorn_iterations": 3}
    model = build("vanilla", normalize_before=True, attn_implementation="sdpa", **fields).double().train()
    for join in joins_of(model):
        for parameter in join.parameters():
            nn.init.normal_(parameter, std=0.5)
    batch = pair((4, 3), (3, 2))
    weights, got = leaves(model), model(**batch).logits
    expected = [naive_logits(weights, model.config, *each) for each in sentences(batch)]
    check_equations(model, got, weights, expected)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"residual": "attention"}, 15_360),
        ({"residual": "attention", "attention_block": 2}, 15_360),
        ({"residual": "hyper", "dynamic_streams": False}, 720),
        ({"residual": "hyper"}, 92_940),
        ({"residual": "mhc"}, 1_475_370),
        ({"residual": "mhc", "residual_streams": 2}, 30 * ((2**2 + 2 * 2) * (2 * 512 + 1) + 3)),
    ],
)
def test_new_parameters_are_as_many_as_the_formulas_say(fields, count):
    """The base model has 6 + 6 layers, so 30 sub-layers, and width 512."""
    with torch.device("meta"):
        plain, model = (
            VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(normalize_before=True, **more))
            for more in ({}, fields)
        )
    assert model.num_parameters() - plain.num_parameters() == count


# How they start


@EVERY
def test_a_new_model_computes_nearly_what_the_plain_stack_computes(fields):
    """mHC has a small random part. The other kinds equal the plain stack, also in their hidden states."""
    plain, model = new().eval(), new(**fields).eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        expected, got = (each(**pair(), output_hidden_states=True) for each in (plain, model))
    tolerance = 0.05 if fields["residual"] == "mhc" else 1e-5
    torch.testing.assert_close(
        got.logits, expected.logits, rtol=0, atol=tolerance * expected.logits.abs().max().item()
    )
    if fields["residual"] != "mhc":
        for ours, theirs in zip(got.decoder_hidden_states, expected.decoder_hidden_states, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("residual", ["hyper", "mhc"])
@pytest.mark.parametrize("start", ["new", "from a base"])
def test_streams_diverge_in_training(residual, start):
    """Equal streams with equal gradients would stay equal for ever. So sub-layers first read different streams."""
    model = new(residual=residual)
    if start == "from a base":
        model = VanillaTransformerForConditionalGeneration.from_base(new(), residual=residual)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**pair()).loss.backward()
        optimizer.step()
    state, encoder = (torch.randn(1, 5, 16),), model.eval().model.encoder
    with torch.no_grad():
        for layer in encoder.layers:
            state = layer(state[0], None, *state[1:])
    assert state[1].std(2).mean() > 1e-5


@EVERY
def test_a_few_steps_of_training_lower_the_loss(fields):
    check_learning(new(**fields))


# From a trained base


def m2m100():
    sizes = {name: value for name, value in SIZES.items() if name != "drop_branch"}
    sizes |= {"encoder_layerdrop": 0, "decoder_layerdrop": 0, "decoder_start_token_id": 2}
    torch.manual_seed(1)
    return M2M100ForConditionalGeneration(M2M100Config(**sizes, init_std=0.3)).eval()


@EVERY
@pytest.mark.parametrize("make", [lambda: build("vanilla-prenorm"), m2m100], ids=["vanilla", "m2m100"])
def test_a_pre_norm_base_keeps_its_function(make, fields, caplog):
    base = make()
    model = VanillaTransformerForConditionalGeneration.from_base(base, attention_branches=2, **fields)
    difference, largest = logit_difference(base, model)
    assert difference < (1e-3 if fields["residual"] == "mhc" else 1e-5) * largest
    assert "does not compute the function" not in caplog.text
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**pair()).loss.backward()
        optimizer.step()
    still = [name for name, p in model.named_parameters() if ".joins." in name and torch.equal(p, before[name])]
    allowed = ("alpha_scale", "beta_scale", "coefficient_scale")
    assert not [name for name in still if not name.endswith(allowed)], "all that is new learns"


@pytest.mark.parametrize("residual", ["attention", "hyper", "mhc"])
def test_a_post_norm_base_and_a_joined_base_are_refused(residual):
    from_base = VanillaTransformerForConditionalGeneration.from_base
    with pytest.raises(UserError, match=rf"`residual='{residual}'` is a way to join pre-norm"):
        from_base(build("vanilla"), residual=residual)
    with pytest.raises(UserError, match=rf"cannot start from .*`residual` is '{residual}'"):
        from_base(build(f"vanilla-{residual}"))


# Training and precision


@pytest.mark.parametrize("case", ["attention", "attention-blocks", "hyper", "mhc"])
def test_checkpointed_layers_have_the_same_gradients(case):
    check_checkpointing(lambda: build(f"vanilla-{case}", dropout=0.3), *WAYS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["hyper", "mhc"])
def test_autocast_leaves_streams_alone(case, dtype):
    """Errors of half precision in a mixing matrix would multiply over a deep stack."""
    join = build(f"vanilla-{case}").model.encoder.layers[0].joins["self_attn"]
    streams = torch.randn(2, 3, join.streams, 16)
    with torch.no_grad():
        expected = join(streams)
        with torch.autocast("cpu", dtype=dtype):
            got = join(streams)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


def test_autocast_leaves_sources_alone():
    join = build("vanilla-attention").model.encoder.layers[0].joins["self_attn"]
    first, output = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    with torch.no_grad():
        expected = join(Sources(first, inverse_rms(first), (first,)), output)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = join(Sources(first, inverse_rms(first), (first,)), output)
    assert got.mixture.dtype == torch.float32
    assert torch.equal(got.mixture, expected.mixture)


def test_the_memory_of_attention_over_depth_grows_with_the_sources_and_not_with_their_square():
    """Twice the depth keeps about twice the memory for the backward pass, because sources are not copied."""

    def kept(layers):
        seen = {}
        model = new(residual="attention", encoder_layers=layers, decoder_layers=1, d_model=128).train()

        def pack(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(**pair((40, 40, 40), (2, 2, 2))).loss  # kept alive, so that no address is reused
        return sum(seen.values()) if loss.isfinite() else 0

    at_4, at_8, at_16 = kept(4), kept(8), kept(16)
    assert at_16 - at_8 < 2.2 * (at_8 - at_4)


def test_layers_take_a_state_by_position():
    """Reentrant checkpointing needs this. The first layer makes the state."""
    model = build("vanilla-attention")
    layer = model.model.encoder.layers[0]
    assert isinstance(layer, AttentionResidualEncoderLayer)
    first, scales, *values = layer(torch.randn(2, 3, 16), None)
    assert (first.shape, scales.shape, len(values)) == ((2, 3, 16), (2, 3, 3), 3)
    layer = build("vanilla-hyper").model.encoder.layers[1]
    assert isinstance(layer, HyperEncoderLayer)
    mean, streams = layer(torch.randn(2, 3, 16), None, torch.randn(2, 3, 4, 16))
    torch.testing.assert_close(streams.mean(2), mean)


def test_sub_layers_start_on_streams_in_turn():
    homes = [join.home for join in joins_of(new(residual="mhc").model.decoder)]
    assert homes == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    bias = joins_of(new(residual="mhc"))[1].coefficient_bias
    assert bias[:4].tolist() == [-3, 3, -3, -3]


def test_generation_without_the_source_in_the_decoder_runs():
    """Without a source, a decoder skips the attention to the source, its joint and its query."""
    for case in ("vanilla-attention", "vanilla-hyper", "vanilla-mhc"):
        decoder = build(case).model.decoder
        with torch.no_grad():
            assert decoder(source()["input_ids"]).last_hidden_state.isfinite().all()
