"""Proximal initialisation: a result is compared with what its base computes."""

import copy
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from model_cases import needs_fitting_peft
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    BartModel,
    BertConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PreTrainedModel,
)

from hf_deepwide import (
    LatentDepthForConditionalGeneration,
    MATConfig,
    MATForConditionalGeneration,
    MultiPathForConditionalGeneration,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    checkpoint_files,
)
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.loading import load_model
from hf_deepwide.warm_start import logit_difference

SCRIPT = Path(__file__).parents[2] / "scripts" / "proximal_init.py"

VOCAB, TARGET_VOCAB, LENGTH = 50, 37, 20
SIZES = {  # the stacks differ, so that a mix-up of their sizes fails
    "vocab_size": VOCAB,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": LENGTH,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
MARIAN = {"pad_token_id": 36, "decoder_start_token_id": 36, "eos_token_id": 0, "forced_eos_token_id": 0}
NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": TARGET_VOCAB}
VANILLA = (VanillaTransformerConfig, VanillaTransformerForConditionalGeneration)
BASES = {
    "marian": (MarianConfig, MarianMTModel, {**MARIAN, "scale_embedding": True, "activation_function": "swish"}),
    "marian separate": (MarianConfig, MarianMTModel, {**MARIAN, **SEPARATE}),
    "marian untied": (MarianConfig, MarianMTModel, {**MARIAN, **SEPARATE, "tie_word_embeddings": False}),
    "bart": (BartConfig, BartForConditionalGeneration, {}),
    "bart untied": (BartConfig, BartForConditionalGeneration, {"tie_word_embeddings": False}),
    "mbart": (
        MBartConfig,
        MBartForConditionalGeneration,
        {"scale_embedding": True, "decoder_start_token_id": 2, "activation_function": "relu"},
    ),
    "m2m100": (M2M100Config, M2M100ForConditionalGeneration, NO_LAYERDROP),
    "vanilla": (*VANILLA, {}),
    "vanilla pre-norm": (*VANILLA, {"normalize_before": True, "lm_head_bias": True}),
    "vanilla learned": (*VANILLA, {"position_embedding_type": "learned", "scale_embedding": False}),
    "vanilla relative": (*VANILLA, {"max_relative_position": 2}),
    "vanilla untied": (*VANILLA, {"tie_word_embeddings": False, "layernorm_embedding": True}),
    "vanilla separate": (*VANILLA, {**SEPARATE, "position_embedding_type": "marian"}),
    "vanilla no bias": (*VANILLA, {"attention_bias": False, "activation_function": "gelu"}),
    "mat": (MATConfig, MATForConditionalGeneration, {"attention_branches": 2, "ffn_branches": 2, "drop_branch": 0.0}),
}


def make(name: str, **fields) -> PreTrainedModel:
    """A base with random weights, so that every weight matters: also norms, biases and final logits biases."""
    config_class, model_class, own = BASES[name]
    model = model_class(config_class(**{**SIZES, **own, **fields}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, tensor in model.state_dict(keep_vars=True).items():
            if "embed_positions" in key and "marian" in name:  # sinusoids
                continue
            tensor.normal_(1 if "norm.weight" in key else 0, 0.3, generator=generator)
    return model.eval()


def batch(name: str) -> dict[str, torch.Tensor]:
    """Padded sources and targets."""
    pad = 36 if "marian" in name else 1
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(2, 36, (3, 15), generator=generator)
    target = torch.randint(2, 36, (3, 11), generator=generator)
    mask = (torch.arange(15) < torch.tensor([15, 9, 4])[:, None]).long()
    return {
        "input_ids": source.masked_fill(mask == 0, pad),
        "attention_mask": mask,
        "decoder_input_ids": target,
    }


def off(model: PreTrainedModel, **fields) -> PreTrainedModel:
    """`MATForConditionalGeneration.from_base` without dropping."""
    return MATForConditionalGeneration.from_base(model, drop_branch=0.0, **fields)


@pytest.mark.parametrize("branches", [3, 4])
@pytest.mark.parametrize("name", [name for name in BASES if name != "mat"])
def test_logits_are_the_bases(name, branches):
    base, inputs = make(name), batch(name)
    wide = off(base, attention_branches=branches, ffn_branches=5 - branches)
    assert wide.config.attention_branches == branches
    assert wide.config.encoder_attention_heads == 2
    assert not wide.training
    for training in (False, True):
        with torch.no_grad():
            expected = base.train(training)(**inputs).logits
            actual = wide.train(training)(**inputs).logits
        assert expected.std() > 0.3
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    difference, largest = logit_difference(base, wide)
    assert difference < 1e-5 < 0.3 < largest


@pytest.mark.parametrize("name", ["marian", "marian separate", "bart", "m2m100", "vanilla pre-norm"])
def test_the_vanilla_family_takes_a_base_as_it_is(name):
    base, inputs = make(name), batch(name)
    plain = VanillaTransformerForConditionalGeneration.from_base(base)
    assert plain.config.model_type == "vanilla_transformer"
    assert (plain.config.attention_branches, plain.config.drop_branch) == (1, 0.0)
    with torch.no_grad():
        torch.testing.assert_close(plain(**inputs).logits, base(**inputs).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("marian", {"bad_words_ids": [[36]]}),
        ("bart", {"forced_bos_token_id": 7, "no_repeat_ngram_size": 2}),
        ("mbart", {"forced_bos_token_id": 9}),
        ("m2m100", {"forced_bos_token_id": 11}),
        ("vanilla", {}),
    ],
)
def test_beam_search_finds_what_the_base_finds(name, generation):
    base = make(name)
    base.generation_config.update(num_beams=3, max_length=12, length_penalty=0.6, **generation)
    wide = MATForConditionalGeneration.from_base(base, attention_branches=3)
    assert wide.generation_config is not base.generation_config
    assert wide.generation_config.to_dict() == base.generation_config.to_dict()
    inputs = batch(name)
    del inputs["decoder_input_ids"]
    found = [
        model.generate(**inputs, return_dict_in_generate=True, output_scores=True, num_return_sequences=3)
        for model in (base, wide)
    ]
    assert len(set(map(tuple, found[0].sequences.tolist()))) > 3
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[0].sequences_scores, found[1].sequences_scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["marian", "vanilla pre-norm"])
def test_branches_are_equal_independent_copies(name):
    base = make(name)
    before = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    settings = copy.deepcopy((base.config.to_dict(), base.generation_config.to_dict()))
    wide = MATForConditionalGeneration.from_base(base, attention_branches=3, ffn_branches=2)

    layer, source = wide.model.decoder.layers[1], base.model.decoder.layers[1]
    for own, theirs in ((layer.self_attn, source.self_attn), (layer.encoder_attn, source.encoder_attn)):
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            wide_one, base_one = getattr(own, projection), getattr(theirs, projection)
            columns = int(projection == "out_proj")
            assert all(torch.equal(block, base_one.weight) for block in wide_one.weight.chunk(3, columns))
            assert all(torch.equal(block, base_one.bias) for block in wide_one.bias.chunk(3))
    feed_forward = source if name == "marian" else source.feed_forward
    assert all(torch.equal(block, feed_forward.fc1.weight) for block in layer.feed_forward.fc1.weight.chunk(2, 0))
    assert all(torch.equal(block, feed_forward.fc2.weight) for block in layer.feed_forward.fc2.weight.chunk(2, 1))

    plain = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(
            **{**SIZES, "pad_token_id": 36},
            normalize_before=wide.config.normalize_before,
            lm_head_bias=wide.config.lm_head_bias,
        )
    )
    assert wide.state_dict().keys() == plain.state_dict().keys()
    assert wide.lm_head.weight is wide.model.shared.weight is wide.model.encoder.embed_tokens.weight
    attention = 4 * (24 * 24 + 24)
    feed_forwards = 2 * (2 * 24 * 40 + 40 + 24) + 3 * (2 * 24 * 32 + 32 + 24)
    assert wide.num_parameters() == plain.num_parameters() + 2 * (2 + 2 * 3) * attention + feed_forwards

    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.fill_(0.0)
    assert all(torch.equal(tensor, before[key]) for key, tensor in base.state_dict().items())
    assert settings == (base.config.to_dict(), base.generation_config.to_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["marian", "vanilla learned"])
def test_dtype_is_the_bases_and_folders_are_read(name, dtype, tmp_path):
    base = make(name).to(dtype)
    base.save_pretrained(tmp_path / "base")
    for given in (base, tmp_path / "base", str(tmp_path / "base")):
        wide = MATForConditionalGeneration.from_base(given, attention_branches=2)
        assert {parameter.dtype for parameter in wide.parameters()} == {dtype}
        query = "model.encoder.layers.0.self_attn.q_proj.weight"
        assert torch.equal(wide.state_dict()[query], base.state_dict()[query].repeat(2, 1))
    wide.save_pretrained(tmp_path / "wide")
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "wide")
    assert type(saved) is MATForConditionalGeneration
    rounded = name == "marian" and dtype == torch.bfloat16  # the base's table of sinusoids, which is not copied
    assert logit_difference(base.float(), saved.float())[0] < (2e-2 if rounded else 1e-5)


def test_double_mean_divides_each_sublayer_by_n_and_says_so(caplog):
    base, inputs = make("vanilla"), batch("vanilla")
    wide = off(base, attention_branches=3, ffn_branches=2, branch_merge="double_mean")
    assert "does not compute the function" in caplog.text
    assert (
        "`attention_branches` 3, `branch_merge` 'double_mean' multiplies the output of these sub-layers by 0.333"
        in caplog.text
    )
    assert (
        "`ffn_branches` 2, `branch_merge` 'double_mean' multiplies the output of these sub-layers by 0.5"
        in caplog.text
    )
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))
    own, theirs = wide.model.encoder.layers[0], base.model.encoder.layers[0]
    with torch.no_grad():
        torch.testing.assert_close(own.self_attn(x)[0], theirs.self_attn(x)[0] / 3)
        torch.testing.assert_close(own.feed_forward(x), theirs.feed_forward(x) / 2)
        assert (wide(**inputs).logits - base(**inputs).logits).abs().max() > 0.1
    caplog.clear()
    off(base, attention_branches=3)
    off(base, attention_branches=1, branch_merge="double_mean")
    assert "does not compute the function" not in caplog.text


def test_unjoined_copies_of_a_network_are_that_network(caplog):
    """A mean over the copies is taken before the activation and after it. All copies are equal in both means."""
    base, inputs = make("vanilla"), batch("vanilla")
    wide = off(base, attention_branches=2, ffn_branches=3, join_ffn=False)
    with torch.no_grad():
        torch.testing.assert_close(wide(**inputs).logits, base(**inputs).logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            off(wide, ffn_branches=6)(**inputs).logits, base(**inputs).logits, atol=1e-5, rtol=0
        )
    assert "does not compute" not in caplog.text
    halved = off(base, ffn_branches=2, join_ffn=False, branch_merge="double_mean")
    assert "multiplies the output of these sub-layers, and the input of their activation, by 0.5" in caplog.text
    x, own = torch.randn(2, 5, 24), halved.model.encoder.layers[0].feed_forward
    theirs = base.model.encoder.layers[0].feed_forward
    with torch.no_grad():
        torch.testing.assert_close(own(x), theirs.fc2(theirs.activation(theirs.fc1(x) / 2)) / 2)
    for trained, asked in ((wide, True), (off(base, ffn_branches=2), False)):
        with pytest.raises(UserError, match=rf"`join_ffn` cannot be {asked}: .* has {not asked}, and it was trained"):
            off(trained, join_ffn=asked)


def test_a_mat_is_a_base_whose_branches_are_copied_equally_often():
    base, inputs = make("mat"), batch("mat")
    assert off(base).config.attention_branches == MATForConditionalGeneration.from_base(base).config.ffn_branches == 2
    base.config.drop_branch = 0.3
    with torch.no_grad():
        expected = base(**inputs).logits
        for cls, overrides in (
            (MATForConditionalGeneration, {"attention_branches": 4, "ffn_branches": 6}),
            (MATForConditionalGeneration, {}),
            (VanillaTransformerForConditionalGeneration, {}),
        ):
            wide = cls.from_base(base, **overrides)
            torch.testing.assert_close(wide(**inputs).logits, expected, atol=1e-5, rtol=0)
            assert wide.config.attention_branches == overrides.get("attention_branches", 2)
            assert wide.config.drop_branch == 0.3
    with pytest.raises(UserError, match=r"`attention_branches` cannot be 3: .* has 2, .* give a multiple of 2"):
        off(base, attention_branches=3)


def test_without_dropping_copies_learn_alike_and_with_it_they_part():
    """MAT specs, quirk Q6: equal branches receive equal gradients (here up to rounding); dropping tells them apart."""
    base, inputs = make("vanilla"), batch("vanilla")
    for rate, alike in ((0.0, True), (0.5, False)):
        torch.manual_seed(4)
        wide = MATForConditionalGeneration.from_base(base, attention_branches=2, drop_branch=rate).double().train()
        wide(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()
        first, second = torch.cat(
            [torch.stack(p.grad.chunk(2)).flatten(1) for name, p in wide.named_parameters() if "v_proj" in name], 1
        )
        assert first.abs().max() > 1e-3
        assert torch.allclose(first, second, rtol=1e-9, atol=1e-12) == alike


def test_overrides_that_leave_the_function_alone():
    base, inputs = make("marian"), batch("marian")
    base.config.use_cache = False  # as Trainer saves a config
    wide = off(
        base,
        attention_branches=2,
        dropout=0.3,
        drop_unit="head",
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=False,
        d_model=24,
        decoder_start_token_id=5,
    )
    assert wide.config.dropout == 0.3
    assert wide.config.use_cache
    assert wide.generation_config.decoder_start_token_id == 5
    assert base.generation_config.decoder_start_token_id == 36
    with torch.no_grad():
        torch.testing.assert_close(wide(**inputs).logits, base(**inputs).logits, atol=1e-5, rtol=0)
        assert wide(input_ids=torch.ones(1, 2 * LENGTH).long(), decoder_input_ids=torch.ones(1, 1).long())
    tables = (wide.model.encoder.embed_tokens, wide.model.decoder.embed_tokens, wide.lm_head)
    assert len({table.weight.data_ptr() for table in tables}) == 3
    assert MATForConditionalGeneration.from_base(base).config.attention_branches == MATConfig().attention_branches


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("vanilla", {"attention_branch": 3}, "MATConfig has no field 'attention_branch'; .* 'attention_branches'"),
        ("vanilla", {"d_model": 48}, "`d_model` cannot be 48: .* has 24, and its weights"),
        ("marian", {"encoder_layers": 6}, "`encoder_layers` cannot be 6: the MarianMTModel has 2"),
        ("marian", {"encoder_attention_heads": 4}, "`encoder_attention_heads` cannot be 4: .* has 2, and it was"),
        ("bart", {"normalize_before": True}, "`normalize_before` cannot be True: .* has False"),
        ("marian", {"activation_function": "relu"}, "`activation_function` cannot be 'relu': .* has 'swish'"),
        ("marian", {"position_embedding_type": "sinusoidal"}, "cannot be 'sinusoidal': .* has 'marian'"),
        ("bart", {"max_position_embeddings": 512}, "`max_position_embeddings` cannot be 512: .* has 20"),
        ("vanilla untied", {"tie_word_embeddings": True}, "`tie_word_embeddings` cannot be True: .* has False"),
        ("vanilla", {"vocab_size": 60}, "`vocab_size` cannot be 60"),
        ("vanilla", {"pad_token_id": 3}, "`pad_token_id` cannot be 3"),
        ("vanilla", {"drop_branch": 1.5}, r"`drop_branch` must be in \[0, 1\), got 1.5"),
        ("vanilla", {"attention_branches": 0}, "`attention_branches` must be at least 1, got 0"),
    ],
)
def test_overrides_that_are_refused(name, overrides, message):
    with pytest.raises(UserError, match=message):
        MATForConditionalGeneration.from_base(make(name), **overrides)


def test_a_post_norm_base_for_a_pre_norm_family_is_refused_once():
    """The family requires `normalize_before=True`, but setting it does not help: the weights are post-norm."""
    with pytest.raises(UserError, match=r"post-norm, and a latent_depth .* train a base"):
        LatentDepthForConditionalGeneration.from_base(make("bart"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"initialization": "lipschitz"}, "has 'xavier', and its weights are copied, so that no rule starts them"),
        ({"luna_length": 3}, "`luna_length` is 3, but has no effect while `layer_form` is"),
        ({"routing_iterations": 2}, "`routing_iterations` is 2, but has no effect while `layer_aggregation`"),
        ({"dynamic_streams": False}, "`dynamic_streams` is False, but has no effect while `residual` is 'add'"),
        ({"num_posteriors": 2}, "set `language_aware=True`"),
        ({"typo_field": 1}, r"no field 'typo_field'; `help\(VanillaTransformerConfig\)` lists all"),
    ],
)
def test_overrides_of_a_vanilla_model_are_refused_for_the_true_reason(overrides, message):
    with pytest.raises(UserError, match=message):
        VanillaTransformerForConditionalGeneration.from_base(make("vanilla"), **overrides)


def test_several_posteriors_start_from_a_base_without_any():
    fields = {"num_posteriors": 2, "posterior_names": ["de", "fr"], "soft_selection_steps": 0}
    model = LatentDepthForConditionalGeneration.from_base(make("vanilla pre-norm"), **fields)
    assert model.layer_selections["decoder"].layer_logits.shape == (2, model.config.decoder_layers)
    assert model.config.posterior_names == ["de", "fr"]


def test_the_result_names_the_languages_of_the_base():
    base, pairs = make("vanilla"), {"en-de": {"tag": "<2de>"}}
    base.config.source_lang, base.config.target_lang = "en", "de"
    config = MATForConditionalGeneration.from_base(base, attention_branches=2).config
    assert (config.source_lang, config.target_lang) == ("en", "de")
    base.config.update({"source_lang": None, "target_lang": None, "translation_pairs": pairs})
    assert MATForConditionalGeneration.from_base(base).config.translation_pairs == pairs


def quantized() -> PreTrainedModel:
    model = make("marian")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return model


def adapted() -> PreTrainedModel:
    needs_fitting_peft()
    model = make("vanilla")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def other_positions() -> PreTrainedModel:
    model = make("marian")
    model.model.decoder.embed_positions.weight.data += 0.1
    return model


def pruned() -> PreTrainedModel:
    model = make("bart")
    model.model.encoder.layers[0].fc1 = torch.nn.Linear(24, 8)
    return model


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda: BartModel(BartConfig(**SIZES)), "BartModel: it lacks .* language-model head; load it with"),
        (lambda: BartForCausalLM(BartConfig(**SIZES)), "it is a decoder alone"),
        (lambda: make("m2m100", pad_token_id=3), "counts positions .* `pad_token_id` is 3 and must be 1"),
        (quantized, "its weights are quantised"),
        (adapted, r"weights that its config does not ask for: .*lora.*; merge"),
        (lambda: make("m2m100", decoder_start_token_id=1), "its decoder begins with padding"),
        (other_positions, "the positions of its decoder are not Marian's"),
        (pruned, r"layers.0.feed_forward.fc1.weight has the shape \[8, 24\], .* for \[40, 24\]"),
        (lambda: torch.nn.Linear(2, 2), "cannot start from a Linear: a base is a folder, a Hub id, or"),
        (lambda: "/there/is/no/folder", "cannot start from '/there/is/no/folder': there is no such folder"),
    ],
)
def test_bases_that_are_refused(base, message):
    with pytest.raises(UserError, match=message) as refusal:
        MATForConditionalGeneration.from_base(base())
    assert "\n" not in str(refusal.value)


def test_checkpoints_that_are_refused(tmp_path):
    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message) as refusal:
            MATForConditionalGeneration.from_base(tmp_path)
        assert "\n" not in str(refusal.value)

    refused("cannot start from")
    BertConfig().save_pretrained(tmp_path)
    refused("its model type is 'bert'; accepted are vanilla_transformer, mat, marian, bart, mbart, m2m_100")
    make("bart").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = [key for key in weights if re.search(r"decoder.layers.1.encoder_attn.[qk]_proj.bias", key)]
    save_file(
        {key: weights[key] for key in weights if key not in lost}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    refused(f"it has no weights for {lost[0]}, {lost[1]}, which")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    refused("cannot start from")


def with_leftovers(name: str, folder: Path, *keys: str) -> PreTrainedModel:
    """Save a model whose file has additional matrices. They differ from the matrix that the config ties them to."""
    base = make(name)
    base.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    source = "model.shared.weight" if "model.shared.weight" in weights else "model.decoder.embed_tokens.weight"
    for offset, key in enumerate(keys, 1):
        weights[key] = weights[source] + offset
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return base


LEFTOVERS = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")


@pytest.mark.parametrize(
    ("name", "keys"),
    [("marian", LEFTOVERS[:1]), ("marian", LEFTOVERS[1:]), ("marian", LEFTOVERS), ("marian separate", LEFTOVERS[:1])],
)
def test_a_marian_whose_file_holds_two_matrices_for_one_is_tied_again(name, keys, tmp_path, caplog):
    """transformers#45005: Transformers 4 tied such matrices, and Transformers 5 does not."""
    base, inputs = with_leftovers(name, tmp_path, *keys), batch(name)
    apart = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = base(**inputs).logits
        assert (apart(**inputs).logits - expected).abs().max() > 1, "the file would give another model"
        for cls in (MATForConditionalGeneration, VanillaTransformerForConditionalGeneration):
            model = cls.from_base(tmp_path)
            torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=0)
            assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
        loaded = load_model(AutoModelForSeq2SeqLM, tmp_path)
        torch.testing.assert_close(loaded(**inputs).logits, expected)
        loaded.save_pretrained(tmp_path / "again")
        again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
        torch.testing.assert_close(again(**inputs).logits, expected)
    assert "tied again" in caplog.text
    with pytest.raises(UserError, match=r"its config ties .* and they differ"):
        MATForConditionalGeneration.from_base(apart)
    apart.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(off(apart)(**inputs).logits, expected, atol=1e-5, rtol=0)


def test_it_is_tied_again_where_the_hub_converts_the_file(tmp_path, monkeypatch):
    """Transformers then loads a converted copy. The repository itself has no file from which to read tensor names."""
    base, inputs = with_leftovers("marian", tmp_path, *LEFTOVERS[:1]), batch("marian")
    monkeypatch.setattr(checkpoint_files, "shapes", lambda name: None)
    with torch.no_grad():
        loaded = load_model(AutoModelForSeq2SeqLM, tmp_path)
        torch.testing.assert_close(loaded(**inputs).logits, base(**inputs).logits)


@pytest.mark.parametrize("name", ["bart", "mbart", "m2m100", "vanilla", "vanilla separate"])
def test_other_models_whose_file_holds_two_matrices_for_one_are_refused(name, tmp_path):
    with_leftovers(name, tmp_path, "lm_head.weight")
    with pytest.raises(UserError, match=r"lm_head.weight differs from .*, but the config ties them"):
        MATForConditionalGeneration.from_base(tmp_path)


def test_logs_what_the_base_loses(caplog):
    MATForConditionalGeneration.from_base(make("m2m100", encoder_layerdrop=0.05))
    assert "`encoder_layerdrop` 0.05" in caplog.text
    assert "decoder_layerdrop" not in caplog.text
    MATForConditionalGeneration.from_base(make("mbart", decoder_start_token_id=None))
    assert "no `decoder_start_token_id`" in caplog.text
    caplog.clear()
    MATForConditionalGeneration.from_base(make("mbart", decoder_start_token_id=None), decoder_start_token_id=7)
    assert not caplog.text


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_script_writes_a_checkpoint_and_compares_it(tmp_path, monkeypatch, capsys):
    base, output = tmp_path / "base", tmp_path / "wide"
    tokenizer = train_tokenizer(["a dog runs", "ein Hund rennt"], TokenizerArguments(vocab_size=45))
    make("vanilla").save_pretrained(base)
    for arguments, message in (
        ((base, output), "no tokenizer could be loaded"),
        ((base, output, "--no_tokenizer", "--attention_branchs", 2), "the nearest is 'attention_branches'"),
        ((base, base, "--no_tokenizer"), "exists already"),
    ):
        with pytest.raises(SystemExit) as end:
            run(monkeypatch, *arguments)
        assert end.value.code == 2
        printed = capsys.readouterr().err.strip().splitlines()[-1]
        assert printed.startswith("error: ")
        assert message in printed
        assert not output.exists()
    tokenizer.save_pretrained(base)
    run(monkeypatch, base, output, "--attention_branches", 3, "--drop_branch=0.1", "--ffn_branches", 2)
    printed = capsys.readouterr().out
    assert float(re.search(r"largest difference of logits from the base's: (\S+)", printed)[1]) < 1e-5
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert isinstance(model, MATForConditionalGeneration)
    assert (model.config.attention_branches, model.config.ffn_branches, model.config.drop_branch) == (3, 2, 0.1)
    assert AutoTokenizer.from_pretrained(output)("ein Hund runs") == tokenizer("ein Hund runs")
    assert {path.name for path in output.iterdir()} >= {"model.safetensors", "generation_config.json"}


@pytest.mark.parametrize(
    "arguments",
    [("--max_position_embeddings", 9), ("--family", "latent_depth", "--num_posteriors", 2)],
)
def test_script_compares_shorter_models_and_models_of_several_posteriors(arguments, tmp_path, monkeypatch, capsys):
    make("vanilla pre-norm").save_pretrained(tmp_path / "base")
    run(monkeypatch, tmp_path / "base", tmp_path / "new", "--no_tokenizer", *arguments)
    assert "largest difference of logits from the base's: " in capsys.readouterr().out
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new").config
    assert getattr(config, arguments[-2].removeprefix("--")) == arguments[-1]


# Multi-Path: paths of the encoder are copies, as branches are

AVERAGE = {"path_norm": False, "learnable_path_weights": False, "more_features": False}


@pytest.mark.parametrize("paths", [1, 3])
@pytest.mark.parametrize(
    "fields",
    [AVERAGE, AVERAGE | {"learnable_path_weights": True}, AVERAGE | {"more_features": True}],
    ids=["fixed", "learnable", "more features"],
)
@pytest.mark.parametrize("name", ["marian", "bart", "vanilla", "vanilla pre-norm", "vanilla no bias"])
def test_a_multi_path_encoder_of_copies_computes_the_bases_function(name, fields, paths):
    base, inputs = make(name), batch(name)
    model = MultiPathForConditionalGeneration.from_base(base, encoder_paths=paths, **fields)
    assert model.config.encoder_paths == paths
    assert model.config.normalize_before == getattr(base.config, "normalize_before", False)  # Marian: post-norm
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, base(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_initialises_new_weights_as_the_paper_says():
    model = MultiPathForConditionalGeneration.from_base(make("vanilla pre-norm"), encoder_paths=3)
    joint = model.model.encoder.layers[1].feed_forward_paths
    assert joint.alpha.tolist() == pytest.approx([6**-0.5] * 6)
    assert joint.beta.tolist() == [1]
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in joint.path_norms)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "joined by norms that the base does not have"),
        ({"encoder_paths": 1}, "joined by norms that the base does not have"),
        (AVERAGE | {"path_weight_init": 1.0}, "joined by weights that add up to 2"),
        (AVERAGE, "`attention_dropout` is 0: nothing makes the copied attentions of a layer differ"),
        (AVERAGE, "`activation_dropout` is 0: nothing makes the copied feed-forward networks of a layer differ"),
    ],
)
def test_multi_path_copies_that_are_not_the_base_or_stay_equal_are_told_of(fields, message, caplog):
    MultiPathForConditionalGeneration.from_base(make("vanilla pre-norm"), **{"encoder_paths": 2} | fields)
    assert message in caplog.text


@pytest.mark.parametrize(
    ("fields", "zero"),
    [
        ({"drop_branch": 0.0}, ["`drop_branch` and `attention_dropout` are 0: nothing makes the copied attentions"]),
        (
            {"ffn_branches": 2, "ffn_drop_branch": 0.0},
            ["`ffn_drop_branch` and `activation_dropout` are 0: nothing makes the copied feed-forward networks"],
        ),
        ({"drop_branch": 0.0, "attention_dropout": 0.1}, []),
        ({"drop_branch": 0.2}, []),
        ({"drop_branch": 0.0, "attention_branches": 1}, []),
    ],
)
def test_branches_that_nothing_makes_differ_are_told_of(fields, zero, caplog):
    MATForConditionalGeneration.from_base(make("vanilla"), **{"attention_branches": 2} | fields)
    told = [line for line in caplog.messages if "nothing makes" in line]
    assert len(told) == len(zero)
    assert all(start in line for start, line in zip(zero, told, strict=True))


def test_branches_that_already_differ_need_no_dropping(caplog):
    base = MATForConditionalGeneration.from_base(make("vanilla"), attention_branches=2, drop_branch=0.2)
    caplog.clear()
    MATForConditionalGeneration.from_base(base, drop_branch=0.0)
    assert "nothing makes" not in caplog.text


def test_multi_path_has_no_branches_to_start_with():
    with pytest.raises(UserError, match="`attention_branches` must be 1: the width here is `encoder_paths`"):
        MultiPathForConditionalGeneration.from_base(make("vanilla"), attention_branches=2)
