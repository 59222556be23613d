"""Checkpoints, Auto classes and vocabularies of another size: what is stored, tied and kept."""

import copy
import re

import pytest
import torch
from model_cases import CASES, build, config_of, pair
from safetensors import safe_open
from transformers import AutoModel, AutoModelForSeq2SeqLM, set_seed

from hf_deepwide.families import FAMILIES

UNTIED = {
    "shared and tied": {},
    "shared": {"tie_word_embeddings": False},
    "tied": {"share_encoder_decoder_embeddings": False},
    "three tables": {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
    "two vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37},
    "two vocabularies, untied": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 37,
        "tie_word_embeddings": False,
        "lm_head_bias": True,
    },
}


def logits(model):
    with torch.no_grad():
        return model(**pair()).logits


def tables(model):
    """Source, target and output table."""
    return model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_is_the_same_model(case, tmp_path):
    model = build(case)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert not again.training
    assert torch.equal(logits(again), logits(model))
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in model.named_parameters()}

    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is FAMILIES[CASES[case].family].model
    batch = pair()
    target = model.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
    with torch.no_grad():
        states = body(**batch, decoder_input_ids=target).last_hidden_state
    torch.testing.assert_close(again.lm_head(states), logits(model), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("options", UNTIED.values(), ids=UNTIED)
def test_each_matrix_is_stored_once_and_comes_back_tied_as_it_was(options, tmp_path):
    model = build("mat-3", **options)
    source, target, output = tables(model)
    shared = options.get("share_encoder_decoder_embeddings", True)
    tied = options.get("tie_word_embeddings", True)
    assert (source is target) == shared
    assert (output is target) == tied
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    stored = {name for name in names if "layers." not in name}
    two_tables = {f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")}
    expected = {"model.shared.weight"} if shared else two_tables
    expected |= set() if tied else {"lm_head.weight"}
    expected |= {"lm_head.bias"} if "lm_head_bias" in options else set()
    assert stored == expected
    assert names == {name for name, _ in model.named_parameters()}

    again, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    source, target, output = tables(again)
    assert (source is target) == shared
    assert (output is target) == tied
    assert torch.equal(logits(again), logits(model))
    if not tied:
        assert not torch.equal(output, target)


@pytest.mark.parametrize("size", [50, 30])
@pytest.mark.parametrize("options", UNTIED.values(), ids=UNTIED)
def test_resized_vocabularies_keep_what_they_had(options, size, tmp_path):
    """A joint vocabulary changes in all tables, two vocabularies only in the source's. Ties and old logits stay."""
    model = build("mat-3", **options)
    two = "decoder_vocab_size" in options
    batch = {name: tensor.clamp(max=29) for name, tensor in pair().items()}
    with torch.no_grad():
        before = model(**batch).logits
    ties = [a is b for a, b in zip(tables(model), tables(model)[1:], strict=False)]
    set_seed(0)
    returned = model.resize_token_embeddings(size)
    assert returned is model.get_input_embeddings()
    assert returned.num_embeddings == size
    expected = [size, 37, 37] if two else [size] * 3
    assert [len(table) for table in tables(model)] == expected
    assert [a is b for a, b in zip(tables(model), tables(model)[1:], strict=False)] == ties
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == tuple(expected[:2])
    assert model.lm_head.out_features == expected[2]
    with torch.no_grad():
        after = model(**batch).logits
    assert after.shape[-1] == expected[2]
    common = min(41, expected[2], before.shape[-1])
    torch.testing.assert_close(after[..., :common], before[..., :common], atol=1e-6, rtol=1e-6)
    assert torch.isfinite(model(**batch).loss)

    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model)) if size == 50 else len(tables(again)[0]) == 30


@pytest.mark.parametrize("options", UNTIED.values(), ids=UNTIED)
def test_the_headless_model_can_be_resized_and_saved_too(options, tmp_path):
    body = FAMILIES["mat"].model(config_of("mat-3", **options))
    body.resize_token_embeddings(50, mean_resizing=False)
    body.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    sizes = [len(stack.embed_tokens.weight) for stack in (again.encoder, again.decoder)]
    assert sizes == ([50, 37] if "decoder_vocab_size" in options else [50, 50])


def test_resizing_pads_to_a_multiple():
    model = build("mat-2-prenorm")
    model.resize_token_embeddings(45, pad_to_multiple_of=16)
    assert [len(table) for table in tables(model)] == [48] * 3
    assert model.lm_head.bias.shape == (48,)


@pytest.mark.parametrize("case", CASES)
def test_initialisation_is_that_of_the_papers(case):
    """Embeddings N(0, 1/D) with a zero row for padding; Xavier for each branch alone; q, k, v as one fused matrix."""
    torch.manual_seed(0)
    family, d = CASES[case].family, 64
    config = config_of(case, d_model=d, encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=400)
    if not config.share_encoder_decoder_embeddings:
        config = config_of(
            case, d_model=d, encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=400, decoder_vocab_size=300
        )
    model = FAMILIES[family].lm(config)
    table = model.model.encoder.embed_tokens.weight
    assert (table[1] == 0).all()
    assert table[2:].std().item() == pytest.approx(d**-0.5, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(d**-0.5, rel=0.05)
    layer = model.model.decoder.layers[0]
    attention = layer.encoder_attn
    is_branched = getattr(config, "layer_form", "transformer") == "weighted"  # a network behind each head
    branches = config.decoder_attention_heads if is_branched else 1
    inputs = getattr(attention, "unpack", attention)
    inputs = [projection for projection in (inputs.q_proj, inputs.k_proj, inputs.v_proj) if projection is not None]
    output_bound = (6 / (d / branches + d)) ** 0.5
    bounds = {**dict.fromkeys(inputs, (6 / (4 * d)) ** 0.5), attention.out_proj: output_bound}
    if family != "depthwise_lstm":  # it has no feed-forward sub-layer; test_depthwise_lstm.py tests its LSTM
        network = attention if is_branched else layer.feed_forward
        bounds |= dict.fromkeys((network.fc1, network.fc2), (6 / (d + 96 / branches)) ** 0.5)
    gains = {module: joined_gain(config, name.rpartition(".")[2]) for name, module in layer.named_modules()}
    for projection, bound in bounds.items():
        bound = bound * gains[projection]
        assert projection.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert projection.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert projection.bias is None or (projection.bias == 0).all()
    assert all((norm.weight == 1).all() for norm in model.modules() if isinstance(norm, torch.nn.LayerNorm))
    normal = FAMILIES[family].lm(config_of(case, d_model=d, encoder_ffn_dim=96, decoder_ffn_dim=96, init_std=0.02))
    for name, parameter in normal.model.decoder.layers[0].named_parameters():
        few = "^joins|relative_keys|kernel_proj|depthwise|language_"  # too few numbers for a deviation, or norms
        if parameter.dim() > 1 and not re.search(few, name):
            assert parameter.std().item() == pytest.approx(0.02 * joined_gain(config, name.split(".")[-2]), rel=0.05)


def joined_gain(config, projection):
    """The factor of a projection's first weights in a decoder of three layers. It depends on `residual`."""
    residual = getattr(config, "residual", "add")
    smaller = residual == "b2t" or (residual == "deepnorm" and projection not in ("q_proj", "k_proj"))
    return {"deepnorm": (12 * 3) ** -0.25, "b2t": 3**-0.5}[residual] if smaller else 1.0


def test_weights_that_a_checkpoint_lacks_are_initialised_and_tables_rebuilt(tmp_path):
    """Loading builds the model on the meta device, so no weight may stay uninitialised."""
    model = build("mat-2-prenorm")
    state = {k: v for k, v in model.state_dict().items() if "encoder.layers.1" not in k and "lm_head" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.model.encoder.embeddings.positions.table, model.model.encoder.embeddings.positions.table)
    layer = again.model.encoder.layers[1]
    assert layer.self_attn.q_proj.weight.abs().max().item() == pytest.approx((6 / 64) ** 0.5, rel=0.02)
    assert (layer.final_layer_norm.weight == 1).all()
    assert torch.equal(again.model.encoder.layers[0].feed_forward.fc1.weight, state_of(model, "encoder.layers.0"))
    assert torch.isfinite(logits(again)).all()


def state_of(model, layer):
    return model.get_submodule(f"model.{layer}.feed_forward.fc1").weight


@pytest.mark.parametrize("case", ["vanilla-prenorm", "mat-3", "mat-3-two-vocabularies"])
def test_copies_and_half_precision_checkpoints(case, tmp_path):
    model = build(case)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(again), logits(model))
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32
