"""The vanilla family's ways to train deep stacks, each against its own paper's formula.

Logits, generation, saving and back-ends are tested together with all other models (`model_cases.CASES`, against
`naive_transformer`). This file tests what is particular to each way.
"""

import pytest
import torch
from model_cases import build, leaves, pair, sentences
from model_checks import check_checkpointing, check_equations, check_learning
from naive_transformer import logits as naive_logits
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import UserError
from hf_deepwide.models.layer_combination import LayerCombination

SIZES = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 4,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
}


def new(**fields):
    """A model as it starts training."""
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**SIZES, **fields}))


# LayerDrop


def without(weights, config, encoder, decoder):
    """Weights and config of the model that has only these layers."""
    kept = {"encoder": encoder, "decoder": decoder}
    rest = {name: tensor for name, tensor in weights.items() if ".layers." not in name}
    for name, tensor in weights.items():
        if ".layers." in name:
            stack, _, index, inner = name.split(".", 3)
            if int(index) in kept[stack]:
                rest[f"{stack}.layers.{kept[stack].index(int(index))}.{inner}"] = tensor
    fields = config.to_dict() | {"encoder_layers": len(encoder), "decoder_layers": len(decoder)}
    return rest, type("Config", (), fields)


@pytest.mark.parametrize("case", ["vanilla", "vanilla-prenorm", "vanilla-hyper", "vanilla-mhc"])
@pytest.mark.parametrize(
    ("u_encoder", "u_decoder"),
    [((0.9, 0.1), (0.4, 0.5, 0.41)), ((0.2, 0.3), (0.0, 0.4, 0.7)), ((0.9, 0.9), (0.1, 0.1, 0.1))],
)
def test_a_layer_is_skipped_where_u_is_at_most_p(case, u_encoder, u_decoder, monkeypatch):
    """Then training computes and trains the model without that layer. The other layers are not rescaled."""
    model = build(case, layer_drop=0.4, attn_implementation="sdpa").double().train()
    draws = iter((u_encoder, u_decoder))
    monkeypatch.setattr(torch, "rand", lambda n, device: torch.tensor(next(draws)))
    batch = pair((5, 3), (4, 2))
    got = model(**batch).logits
    weights = leaves(model)
    kept = [[i for i, u in enumerate(us) if u > 0.4] for us in (u_encoder, u_decoder)]
    rest, config = without(weights, model.config, *kept)
    check_equations(model, got, weights, [naive_logits(rest, config, *each) for each in sentences(batch)])


def test_layers_are_skipped_as_often_as_asked_and_only_in_training():
    model = build("vanilla", layer_drop=0.3)
    batch, calls = pair(), []
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.register_forward_hook(lambda layer, *_: calls.append(layer))
    with torch.no_grad():
        expected = build("vanilla")(**batch).logits
        assert torch.equal(model(**batch).logits, expected)
        assert len(calls) == 5
        model.train()
        rounds = 300
        calls.clear()
        for _ in range(rounds):
            model(**batch)
        assert len(calls) / (5 * rounds) == pytest.approx(0.7, abs=0.04)
        calls.clear()
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        model(**batch, past_key_values=cache)
        assert len([layer for layer in calls if layer in set(model.model.decoder.layers)]) == 3


def test_a_decoder_skips_layers_in_training_without_labels_too():
    """The config sets `use_cache`, but in training no cache is made."""
    model, inputs = build("vanilla", layer_drop=0.3).train(), pair()
    inputs["decoder_input_ids"] = inputs.pop("labels").clamp(min=0)
    assert model.config.use_cache
    calls, rounds = [], 300
    for layer in model.model.decoder.layers:
        layer.register_forward_hook(lambda layer, *_: calls.append(layer))
    with torch.no_grad():
        outputs = [model(**inputs) for _ in range(rounds)]
    assert len(calls) / (3 * rounds) == pytest.approx(0.7, abs=0.06)
    assert outputs[0].past_key_values is None
    assert model.eval()(**inputs).past_key_values is not None


def test_layer_drop_takes_checkpointing():
    """The backward pass recomputes exactly the layers that ran in the forward pass."""
    check_checkpointing(lambda: build("vanilla-prenorm", layer_drop=0.5), None)


# ReZero


def test_rezero_starts_as_the_identity_and_without_norms():
    model = new(residual="rezero")
    assert not [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    batch = pair()
    with torch.no_grad():
        for stack, ids in (
            (model.model.encoder, batch["input_ids"]),
            (model.model.decoder, model.prepare_decoder_input_ids_from_labels(batch["labels"])),
        ):
            embedded = stack.embeddings(stack.embed_tokens(ids))
            inputs = {"encoder_hidden_states": torch.randn(3, 5, 32)} if stack is model.model.decoder else {}
            assert torch.equal(stack(ids, **inputs).last_hidden_state, embedded)


def test_rezero_has_one_weight_a_layer_and_it_learns():
    """At the start only these weights and the embeddings have gradients. After a step, all parameters have."""
    model = new(residual="rezero").train()
    weights = {name: p for name, p in model.named_parameters() if name.endswith("residual_weight")}
    assert len(weights) == 3 + 4
    assert all(p.shape == (1,) and p.item() == 0 for p in weights.values())
    model(**pair()).loss.backward()
    assert all(p.grad.abs() > 0 for name, p in weights.items() if "decoder" in name)
    assert model.model.decoder.layers[0].feed_forward.fc1.weight.grad.abs().max() == 0
    with torch.no_grad():
        for p in weights.values():
            p -= 0.1 * torch.sign(p.grad) + 0.01
    model(**pair()).loss.backward()
    assert model.model.decoder.layers[0].feed_forward.fc1.weight.grad.abs().max() > 0
    assert model.model.encoder.layers[0].feed_forward.fc1.weight.grad.abs().max() > 0


# DLCL


@pytest.mark.parametrize("before", [False, True], ids=["post-norm", "pre-norm"])
def test_dlcl_starts_as_the_mean_and_adds_one_norm_a_layer(before):
    plain, model = new(normalize_before=before), new(layer_aggregation="dlcl", normalize_before=before)
    expected = {3: [[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 3] * 3 + [0], [1 / 4] * 4]}
    weights = model.model.encoder.combination.combination_weights
    torch.testing.assert_close(weights, torch.tensor(expected[3], dtype=torch.float32), rtol=0, atol=1e-7)
    added = model.num_parameters() - plain.num_parameters()
    assert added == (3 + 4) * 2 * 32 + 4 * 4 + 5 * 5


def test_dlcl_with_unit_weights_is_the_plain_stack():
    """Post-norm with W_lk = 1 where k = l, and without DLCL's own norms: each layer reads the layer before it."""
    plain, model = build("vanilla"), build("vanilla-dlcl")
    state = plain.state_dict()
    for name, tensor in model.state_dict().items():
        if "combination" in name:
            state[name] = torch.eye(len(tensor)) if name.endswith("weights") else tensor
    model.load_state_dict(state)
    for stack in (model.model.encoder, model.model.decoder):
        stack.combination.layer_norms = nn.ModuleList(nn.Identity() for _ in stack.layers)
    with torch.no_grad():
        torch.testing.assert_close(model(**pair()).logits, plain(**pair()).logits)


def test_never_uses_weights_above_the_diagonal():
    model = build("vanilla-dlcl-prenorm")
    for stack in (model.model.encoder, model.model.decoder):
        weights = stack.combination.combination_weights
        weights.data[torch.ones_like(weights).triu(1).bool()] = float("nan")
    loss = model(**pair()).loss
    assert torch.isfinite(loss)


def test_the_combination_of_a_hand_made_history():
    """Two outputs of width 2: LN of (1, 3) is (-1, 1), and W's second row is (0.5, 2)."""
    config = VanillaTransformerConfig(
        d_model=2, encoder_attention_heads=1, decoder_attention_heads=1, normalize_before=True
    )
    combination = LayerCombination(config, 1)
    with torch.no_grad():
        combination.combination_weights[1] = torch.tensor([0.5, 2.0])
        first, term = combination([], torch.tensor([[[4.0, 8.0]]]))
        second, _ = combination([term], torch.tensor([[[1.0, 3.0]]]))
    assert first.tolist() == [[[4, 8]]]
    torch.testing.assert_close(second, torch.tensor([[[0.5 * 4 - 2.0, 0.5 * 8 + 2.0]]]), atol=2e-5, rtol=0)


# All ways


@pytest.mark.parametrize("fields", [{"residual": "rezero"}, {"layer_aggregation": "dlcl"}, {"layer_drop": 0.5}])
def test_a_few_steps_of_training_lower_the_loss(fields):
    check_learning(new(**fields))


def test_weights_of_the_plain_model_keep_their_names():
    """Checkpoints of the vanilla family that are older than these options still load."""
    names = set(build("vanilla", layer_drop=0.2).state_dict())
    assert not [name for name in names if "combination" in name or "residual_weight" in name]
    assert {name.rpartition("decoder.layers.0.")[2] for name in names if "decoder.layers.0." in name} == {
        f"{part}.{kind}"
        for part in (
            *(
                f"{attn}.{p}"
                for attn in ("self_attn", "encoder_attn")
                for p in ("q_proj", "k_proj", "v_proj", "out_proj")
            ),
            "feed_forward.fc1",
            "feed_forward.fc2",
            "self_attn_layer_norm",
            "encoder_attn_layer_norm",
            "final_layer_norm",
        )
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize(("field", "value"), [("residual", "rezero"), ("layer_aggregation", "dlcl")])
def test_a_trained_base_keeps_its_way_of_joining_layers(field, value, caplog):
    with pytest.raises(UserError, match=rf"`{field}` cannot be '{value}': .* it was trained for that one"):
        VanillaTransformerForConditionalGeneration.from_base(build("vanilla"), **{field: value})
    base = build("vanilla", layer_drop=0.3)
    assert VanillaTransformerForConditionalGeneration.from_base(base, layer_drop=0.1).config.layer_drop == 0.1
    assert not caplog.text
    assert VanillaTransformerForConditionalGeneration.from_base(base).config.layer_drop == 0
    assert "`layer_drop` 0.3; the result never drops layers" in caplog.text


@pytest.mark.parametrize(("layers", "millions"), [(36, 224.1), (48, 287.2)])
def test_dlcl_of_the_latent_depth_papers_table_1(layers, millions):
    """The table prints 224 twice: at 48 layers it copies the value of 36 (specs). LayerNorms and W add 0.1."""
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(
            VanillaTransformerConfig(
                vocab_size=34040, encoder_ffn_dim=1024, decoder_ffn_dim=1024, encoder_layers=layers,
                decoder_layers=layers, normalize_before=True, layer_aggregation="dlcl",
                share_encoder_decoder_embeddings=False,
            )
        )  # fmt: skip
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.15)
