"""The models compute the papers' equations: logits and gradients against a float64 transcription, term by term."""

import math

import naive_dropout
import pytest
import torch
from model_cases import CASES, build, config_of, leaves, pair, scramble, sentences, tokens
from model_checks import check_equations
from naive_transformer import logits as naive_logits
from naive_transformer import sinusoid
from torch import nn
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from hf_deepwide import MATForConditionalGeneration
from hf_deepwide.models.attention import MultiBranchAttention
from hf_deepwide.models.dropout import Dropout
from hf_deepwide.models.embeddings import SinusoidalPositions, position_ids
from hf_deepwide.models.feed_forward import MultiBranchFeedForward

SMALL = {"encoder_layers": 2, "decoder_layers": 2, "attn_implementation": "sdpa"}


@pytest.fixture
def draws(monkeypatch):
    """A function that records the U's that each sub-layer of a model draws in the next forward pass."""

    def record(model, seed):
        drawn, current = {}, []
        for name, module in model.named_modules():
            if isinstance(module, MultiBranchAttention | MultiBranchFeedForward):
                name = name.removeprefix("model.")
                module.register_forward_pre_hook(lambda *_, name=name: current.append(name))
        generator = torch.Generator().manual_seed(seed)

        def rand(*size, **_):
            name = current[-1]
            if not model.config.join_ffn and name in drawn:
                name += ".fc2"  # un-joined branches drop twice
            assert name not in drawn, "one draw a sub-layer"
            drawn[name] = torch.empty(*size).uniform_(generator=generator)
            return drawn[name]

        monkeypatch.setattr(torch, "rand", rand)
        return drawn

    return record


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_the_equations(case):
    model = build(case, attn_implementation="sdpa").double()
    batch = pair((7, 3), (5, 2))
    weights, got = leaves(model), model(**batch).logits
    expected = [naive_logits(weights, model.config, *each) for each in sentences(batch)]
    if case == "latent-decoder-hard":  # layers that are not chosen have no gradient here; in training all have one
        for row, theirs in enumerate(expected):
            torch.testing.assert_close(got[row, : len(theirs)], theirs, atol=1e-10, rtol=1e-10)
    else:
        check_equations(model, got, weights, expected, tolerance=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_dropout_stands_where_the_papers_have_it(case, monkeypatch):
    """The model and the equations use the same fixed masks: two patterns that repeat every four features."""
    rates = {"dropout": 0.25, "activation_dropout": 0.5}
    patterns = {"dropout": (0.0, 0.5, 1.5, 2.0), "activation_dropout": (1.5, 0.0, 3.0, 0.5)}

    def mask(kind, width):
        return torch.tensor([patterns[kind][feature % 4] for feature in range(width)], dtype=torch.float64)

    def forward(dropout, x):
        (kind,) = [kind for kind, rate in rates.items() if rate == dropout.p]
        return x * mask(kind, x.shape[-1])

    model = build(case, **SMALL, **rates).double()
    batch = pair((4, 3), (3, 2))
    with torch.no_grad():
        without = model(**batch).logits
        monkeypatch.setattr(Dropout, "forward", forward)
        monkeypatch.setattr(naive_dropout, "MASK", mask)
        got = model(**batch).logits
        weights = leaves(model)
        for row, (source, target) in enumerate(sentences(batch)):
            expected = naive_logits(weights, model.config, source, target)
            torch.testing.assert_close(got[row, : len(target)], expected, atol=1e-10, rtol=1e-10)
    assert (got - without).abs().max() > 0.1


@pytest.mark.parametrize(
    ("granularity", "drop_unit", "use_cache"),
    [
        *((granularity, unit, False) for granularity in ("batch", "sentence") for unit in ("branch", "head", "chunk")),
        *(("batch", "branch", True), ("sentence", "head", True), ("batch", "chunk", True)),
    ],
)
@pytest.mark.parametrize("case", ["mat-1", "mat-3", "mat-2-prenorm", "mat-3-two-vocabularies", "mat-3-unjoined"])
def test_training_with_drop_branch_is_the_equations_and_so_are_its_gradients(
    case, granularity, drop_unit, use_cache, draws
):
    """Eq. 5-10 for given U's: the dropped units, the scale of the kept units, and the effect on every gradient.

    A cache must hold all branches, so with a cache the dropped branches are computed and weighed by 0.
    """
    fields = {"drop_branch": 0.5, "drop_unit": drop_unit, "drop_granularity": granularity}
    model = build(case, **{**SMALL, "encoder_layers": 1}, **fields).double().train()
    batch = pair((4, 3), (3, 2))
    drawn = draws(model, seed=4)
    got = model(**batch, use_cache=use_cache).logits
    assert len(drawn) == 2 + 2 * 3 + (0 if model.config.join_ffn else 1 + 2)
    rows = 2 if granularity == "sentence" else 1  # draws in a forward pass
    drawn = {name: u.view(rows, -1) for name, u in drawn.items()}
    if drop_unit != "branch":  # one number for each head of each branch
        heads = {name: 2 if "encoder.layers" in name else 4 for name in drawn if "attn" in name}
        branches = model.config.attention_branches
        drawn |= {name: drawn[name].view(rows, branches, count) for name, count in heads.items()}
    else:
        assert {0, 1} <= {int((u >= 0.5).sum()) for draws in drawn.values() for u in draws}
    assert (rows == 1) == all(torch.equal(u[0], u[-1]) for u in drawn.values())

    weights = leaves(model)
    expected = [
        naive_logits(weights, model.config, *each, {name: u[row % rows] for name, u in drawn.items()}.__getitem__)
        for row, each in enumerate(sentences(batch))
    ]
    check_equations(model, got, weights, expected)


def copy_attention(ours, theirs):
    """Fill `nn.MultiheadAttention` from a one-branch attention."""
    theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias]))
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("case", ["vanilla", "mat-1"])
def test_one_branch_without_dropping_is_the_transformer_of_pytorch(case, norm_first):
    model = build(case, normalize_before=norm_first)
    config = model.config
    batch = pair()
    with torch.no_grad():
        x = model.model.encoder.embeddings(model.model.encoder.embed_tokens(batch["input_ids"]))
        target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        y = model.model.decoder.embeddings(model.model.decoder.embed_tokens(target))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        padding = batch["attention_mask"] == 0
        for ours in model.model.encoder.layers:
            layer = nn.TransformerEncoderLayer(
                16, config.encoder_attention_heads, config.encoder_ffn_dim, **options
            ).eval()
            copy_attention(ours.self_attn, layer.self_attn)
            for theirs, mine in (
                (layer.linear1, ours.feed_forward.fc1),
                (layer.linear2, ours.feed_forward.fc2),
                (layer.norm1, ours.self_attn_layer_norm),
                (layer.norm2, ours.final_layer_norm),
            ):
                theirs.load_state_dict(mine.state_dict())
            x = layer(x, src_key_padding_mask=padding)
        x = model.model.encoder.layer_norm(x)
        causal = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        for ours in model.model.decoder.layers:
            layer = nn.TransformerDecoderLayer(
                16, config.decoder_attention_heads, config.decoder_ffn_dim, **options
            ).eval()
            copy_attention(ours.self_attn, layer.self_attn)
            copy_attention(ours.encoder_attn, layer.multihead_attn)
            for theirs, mine in (
                (layer.linear1, ours.feed_forward.fc1),
                (layer.linear2, ours.feed_forward.fc2),
                (layer.norm1, ours.self_attn_layer_norm),
                (layer.norm2, ours.encoder_attn_layer_norm),
                (layer.norm3, ours.final_layer_norm),
            ):
                theirs.load_state_dict(mine.state_dict())
            y = layer(y, x, tgt_mask=causal, memory_key_padding_mask=padding)
        expected = model.model.decoder.layer_norm(y) @ model.model.shared.weight.T
        got = model(**batch).logits
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_copies_of_a_branch_are_averaged_to_that_branch(copies):
    """In whole models. Proximal initialisation needs it; the released code divides by N again."""
    single = build("mat-1")
    state = single.state_dict()
    for name, weight in state.items():
        if "attn." in name:
            along = 1 if name.endswith("out_proj.weight") else 0
            state[name] = torch.cat([weight] * copies, dim=along)
    several = MATForConditionalGeneration(config_of("mat-1", attention_branches=copies)).eval()
    several.load_state_dict(state)
    batch = pair()
    with torch.no_grad():
        expected = single(**batch).logits
        torch.testing.assert_close(several(**batch).logits, expected, atol=2e-5, rtol=2e-5)

        attention = several.model.encoder.layers[0].self_attn
        x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
        alone = single.model.encoder.layers[0].self_attn(x)[0]
        torch.testing.assert_close(attention(x)[0], alone, atol=1e-6, rtol=1e-5)
        halved = MultiBranchAttention(
            config_of("mat-1", attention_branches=copies, branch_merge="double_mean", attn_implementation="eager"), 2
        ).eval()
        halved.load_state_dict(attention.state_dict())
        torch.testing.assert_close(halved(x)[0], alone / copies, atol=1e-6, rtol=1e-5)


def test_fairseq_sinusoids():
    """Index 2 for the first token, 10000^(-k/(half-1)), sines then cosines: two entries worked out by hand."""
    table = SinusoidalPositions(9, 8, "sinusoidal").table
    assert table[0].tolist() == pytest.approx(
        [math.sin(2 * 10000 ** (-k / 3)) for k in range(4)] + [math.cos(2 * 10000 ** (-k / 3)) for k in range(4)],
        abs=1e-7,
    )
    assert table[0, 0] == pytest.approx(0.9092974)  # sin 2
    assert table[3, 7] == pytest.approx(math.cos(5e-4))
    for position in range(9):
        torch.testing.assert_close(table[position].double(), sinusoid(position, 8, "sinusoidal"), atol=1e-7, rtol=0)


def test_marian_sinusoids_are_those_of_transformers_and_of_vaswani():
    table = SinusoidalPositions(50, 16, "marian").table
    theirs = MarianSinusoidalPositionalEmbedding(50, 16)
    torch.testing.assert_close(table, theirs.create_weight(), atol=1e-6, rtol=0)
    assert table[7, 3] == pytest.approx(math.sin(7 / 10000 ** (6 / 16)))
    assert table[7, 8 + 3] == pytest.approx(math.cos(7 / 10000 ** (6 / 16)))


def test_positions_skip_padding():
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]])
    positions = position_ids(mask, 4, 0, mask.device)
    assert positions[0].tolist() == [0, 1, 2, 3]
    assert positions[1, 2:].tolist() == [0, 1]
    assert positions[2, :2].tolist() == [0, 1]
    assert position_ids(None, 3, 5, mask.device).tolist() == [[5, 6, 7]]
    assert position_ids(mask, 1, 3, mask.device).tolist() == [[3], [1], [1]]


@pytest.mark.parametrize("case", CASES)
def test_where_the_padding_stands_does_not_matter(case):
    """Left and right padding give the same logits, in sources and targets. Fairseq pads sources on the left."""
    model = build(case)
    source, source_mask = tokens((7, 4, 5))
    target, target_mask = tokens((3, 6, 4), seed=2)

    def left(ids, mask):
        order = mask.argsort(dim=1, stable=True)
        return ids.gather(1, order), mask.gather(1, order)

    with torch.no_grad():
        right = model(
            input_ids=source,
            attention_mask=source_mask,
            decoder_input_ids=target,
            decoder_attention_mask=target_mask,
        ).logits
        source, source_mask = left(source, source_mask)
        target, moved_mask = left(target, target_mask)
        moved = model(
            input_ids=source, attention_mask=source_mask, decoder_input_ids=target, decoder_attention_mask=moved_mask
        ).logits
    torch.testing.assert_close(moved[moved_mask == 1], right[target_mask == 1], atol=2e-5, rtol=2e-5)


def test_a_sequence_longer_than_the_table_is_refused():
    model = build("vanilla", max_position_embeddings=6)
    with pytest.raises(ValueError, match=r"7 tokens.*`max_position_embeddings` is 6"):
        model(**pair((7, 4), (3, 2)))
    with pytest.raises(ValueError, match=r"8 tokens.*`max_position_embeddings` is 6"):
        model(**pair((5, 4), (8, 2)))
    scramble(model, 1)
    assert torch.isfinite(model(**pair((6, 4), (6, 2))).loss)
