"""Configurations: refused fields and their messages, and that accepted fields survive saving and loading."""

import json

import pytest
from model_cases import CASES, SIZES, config_of
from transformers import AutoConfig

from hf_deepwide import MATConfig, MATForConditionalGeneration, VanillaTransformerConfig
from hf_deepwide.models.configuration_vanilla_transformer import USED_WITH

REFUSED = [
    # a type
    ({"d_model": "512"}, ["d_model", "int", "'512'"]),
    ({"encoder_layers": 6.0}, ["encoder_layers", "int", "6.0"]),
    ({"dropout": "0.1"}, ["dropout", "float", "'0.1'"]),
    ({"normalize_before": "yes"}, ["normalize_before", "bool", "'yes'"]),
    ({"branch_merge": 1}, ["`branch_merge`", "mean, double_mean", "got 1"]),
    ({"decoder_vocab_size": "x"}, ["decoder_vocab_size", "int", "'x'"]),
    ({"is_encoder_decoder": False}, ["`is_encoder_decoder` must be True for", "got False"]),
    # a size
    *(
        ({name: 0}, [f"`{name}`", "at least 1", "got 0"])
        for name in (
            "vocab_size",
            "d_model",
            "encoder_layers",
            "decoder_layers",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "max_position_embeddings",
            "attention_branches",
            "ffn_branches",
        )
    ),
    ({"attention_branches": -2}, ["`attention_branches`", "at least 1", "got -2"]),
    ({"encoder_attention_heads": 7}, ["`encoder_attention_heads`", "divide", "512", "got 7"]),
    ({"decoder_attention_heads": 3}, ["`decoder_attention_heads`", "divide", "512", "got 3"]),
    (
        {"d_model": 15, "encoder_attention_heads": 3, "decoder_attention_heads": 3},
        ["`d_model`", "even", "sinusoidal", "got 15"],
    ),
    # a rate
    *(
        ({name: value}, [f"`{name}`", "[0, 1)", f"got {value}"])
        for name in ("dropout", "attention_dropout", "activation_dropout", "drop_branch", "ffn_drop_branch")
        for value in (-0.1, 1, 1.5, float("nan"))
    ),
    ({"init_std": -0.02}, ["`init_std`", "at least 0", "got -0.02"]),
    # a name
    ({"position_embedding_type": "rotary"}, ["`position_embedding_type`", "sinusoidal, marian, learned", "'rotary'"]),
    ({"drop_unit": "layer"}, ["`drop_unit`", "branch, head, chunk", "'layer'"]),
    ({"join_ffn": "no"}, ["join_ffn", "bool", "'no'"]),
    ({"drop_granularity": "token"}, ["`drop_granularity`", "batch, sentence", "'token'"]),
    ({"branch_merge": "sum"}, ["`branch_merge`", "mean, double_mean", "'sum'"]),
    ({"activation_function": "reluu"}, ["`activation_function`", "relu", "'reluu'"]),
    # a vocabulary
    (
        {"decoder_vocab_size": 99},
        ["`share_encoder_decoder_embeddings=True`", "32768", "99", "`share_encoder_decoder_embeddings=False`"],
    ),
    ({"pad_token_id": None}, ["`pad_token_id`", "required", "None"]),
    ({"pad_token_id": 40000}, ["`pad_token_id`", "0 to 32767", "got 40000"]),
    ({"decoder_start_token_id": -1}, ["`decoder_start_token_id`", "0 to 32767", "got -1"]),
]


@pytest.mark.parametrize("config_class", [MATConfig, VanillaTransformerConfig])
@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[json.dumps(fields) for fields, _ in REFUSED])
def test_a_wrong_field_is_named_with_its_value_and_what_is_accepted(fields, words, config_class):
    with pytest.raises(ValueError, match="^" + config_class.__name__) as error:
        config_class(**fields)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_drop": 1}, ["`layer_drop`", "[0, 1)", "got 1"]),
        ({"layer_drop": -0.1}, ["`layer_drop`", "[0, 1)", "got -0.1"]),
        ({"residual": "highway"}, ["`residual`", "add, rezero, deepnorm, b2t", "'highway'"]),
        (
            {"layer_aggregation": "none"},
            ["`layer_aggregation`", "denseformer, transparent, iterative, hierarchical, em_routing, None", "'none'"],
        ),
        ({"layer_aggregation": "hierarchical", "residual": "rezero"}, ["rezero", "hierarchical", "choose one"]),
        ({"routing_capsules": 8}, ["`routing_capsules`", "em_routing", "None"]),
        ({"routing_capsules": 7, "layer_aggregation": "em_routing"}, ["`routing_capsules`", "divide", "512", "got 7"]),
        ({"routing_iterations": 0, "layer_aggregation": "em_routing"}, ["`routing_iterations`", "at least 1"]),
        ({"residual": "rezero", "normalize_before": True}, ["rezero", "`normalize_before=False`"]),
        ({"residual": "deepnorm", "normalize_before": True}, ["deepnorm", "post-norm", "`normalize_before=False`"]),
        ({"residual": "b2t", "normalize_before": True}, ["b2t", "post-norm", "`normalize_before=False`"]),
        ({"residual": "rezero", "layer_aggregation": "dlcl"}, ["rezero", "dlcl", "one of them"]),
        ({"aggregation_dilation": 2}, ["`aggregation_dilation`", "`layer_aggregation='denseformer'`"]),
        ({"layer_aggregation": "dlcl", "aggregation_period": 2}, ["`aggregation_period`", "'denseformer'"]),
        ({"layer_aggregation": "denseformer", "aggregation_period": 7}, ["`aggregation_period`", "at most 6"]),
        ({"layer_aggregation": "denseformer", "aggregation_dilation": 0}, ["`aggregation_dilation`", "at least 1"]),
        ({"encoder_solver": "euler"}, ["`encoder_solver`", "rk2, None", "'euler'"]),
        ({"encoder_solver": "rk2", "residual": "b2t"}, ["rk2", "b2t", "`residual='add'`"]),
        *(({"residual": kind}, [kind, "`normalize_before=True`"]) for kind in ("attention", "hyper", "mhc")),
        (
            {"residual": "mhc", "normalize_before": True, "layer_aggregation": "dlcl"},
            ["mhc", "dlcl", "one of them"],
        ),
        ({"residual": "attention", "normalize_before": True, "layer_drop": 0.1}, ["attention", "`layer_drop=0`"]),
        ({"residual": "hyper", "normalize_before": True, "attention_block": 2}, ["`attention_block`", "'hyper'"]),
        ({"residual": "attention", "normalize_before": True, "attention_block": 0}, ["`attention_block`", "least 1"]),
        ({"residual": "hyper", "normalize_before": True, "residual_streams": 0}, ["`residual_streams`", "least 1"]),
        ({"residual": "mhc", "normalize_before": True, "residual_streams": 1}, ["`residual_streams`", "least 2"]),
        ({"residual": "mhc", "normalize_before": True, "residual_streams": 9000}, ["parameters"]),
        (
            {"residual": "mhc", "normalize_before": True, "sinkhorn_iterations": 0},
            ["`sinkhorn_iterations`", "at least 1"],
        ),
        ({"initialization": "he"}, ["`initialization`", "xavier, lipschitz, depth_scaled", "'he'"]),
        ({"initialization": "lipschitz", "init_std": 0.02}, ["`initialization", "`init_std=None`"]),
    ],
)
def test_names_a_wrong_depth_and_what_is_accepted(fields, words):
    test_a_wrong_field_is_named_with_its_value_and_what_is_accepted(fields, words, VanillaTransformerConfig)


UNUSED = [
    ({"residual_streams": 3}, "`residual_streams` is 3, .* set `residual='hyper'` or `residual='mhc'`, or .*=4`"),
    ({"dynamic_streams": False}, "`dynamic_streams` is False, .* set `residual='hyper'`, or `dynamic_streams=True`"),
    ({"residual": "mhc", "normalize_before": True, "dynamic_streams": False}, "`dynamic_streams` .* is 'mhc'"),
    ({"sinkhorn_iterations": 9}, "`sinkhorn_iterations` is 9, .* set `residual='mhc'`, or .*=20`"),
    ({"residual": "hyper", "normalize_before": True, "sinkhorn_iterations": 9}, "`sinkhorn_iterations` .* is 'hyper'"),
    ({"luna_length": 16}, "`luna_length` is 16, .* `layer_form` is 'transformer'; set `layer_form='luna'`"),
    ({"layer_form": "weighted", "ffn_drop_branch": 0.2}, "`ffn_drop_branch` is an option .*`ffn_drop_branch=None`"),
    ({"layer_form": "luna", "join_ffn": False}, "`join_ffn` is an option of Transformer layers.*`join_ffn=True`"),
    ({"layer_form": "weighted", "luna_length": 16}, "`luna_length` is 16, .* is 'weighted'"),
    ({"routing_iterations": 2}, "`routing_iterations` is 2, .* is None; set `layer_aggregation='em_routing'`"),
    ({"layer_aggregation": "dlcl", "routing_iterations": 2}, "`routing_iterations` is 2, .* is 'dlcl'"),
]


@pytest.mark.parametrize(("fields", "told"), UNUSED, ids=[json.dumps(fields) for fields, _ in UNUSED])
def test_an_option_that_changes_nothing_is_refused(fields, told):
    with pytest.raises(ValueError, match=f"^VanillaTransformerConfig: {told}"):
        VanillaTransformerConfig(**fields)


def test_the_defaults_of_options_that_change_nothing_are_accepted():
    """Every saved config contains these defaults."""
    defaults = {name: getattr(VanillaTransformerConfig, name) for name in USED_WITH}
    assert VanillaTransformerConfig(**defaults, residual="rezero").residual == "rezero"


def test_types_are_checked_when_a_field_is_set_later_and_the_rest_when_it_is_saved(tmp_path):
    config = MATConfig()
    with pytest.raises(ValueError, match="d_model"):
        config.d_model = "512"
    with pytest.raises(ValueError, match="`drop_unit` must be one of branch, head, chunk, got 'heads'"):
        config.drop_unit = "heads"
    assert (config.d_model, config.drop_unit) == (512, "branch")
    config.drop_branch = 2
    with pytest.raises(ValueError, match=r"`drop_branch` must be in \[0, 1\), got 2"):
        config.save_pretrained(tmp_path)


def test_whole_numbers_are_accepted_as_rates_and_odd_widths_with_learned_positions():
    assert MATConfig(dropout=0, drop_branch=0).drop_branch == 0
    odd = MATConfig(
        d_model=15, encoder_attention_heads=3, decoder_attention_heads=5, position_embedding_type="learned"
    )
    assert odd.d_model == 15


def test_defaults_are_those_of_the_papers():
    vanilla, mat = VanillaTransformerConfig(), MATConfig()
    base = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048, "dropout": 0.1}
    for config in (vanilla, mat):
        assert base.items() <= config.to_dict().items()
        assert not config.normalize_before
        assert config.position_embedding_type == "sinusoidal"
        assert config.branch_merge == "mean"
        assert config.drop_unit == "branch"
        assert config.join_ffn
        assert (config.drop_granularity, config.ffn_drop_branch) == ("batch", None)
        assert config.attention_bias
        assert config.share_encoder_decoder_embeddings
        assert config.tie_word_embeddings
    assert (vanilla.attention_branches, vanilla.drop_branch) == (1, 0)
    assert (mat.attention_branches, mat.drop_branch) == (3, 0.2)
    assert vanilla.decoder_vocab_size == vanilla.vocab_size


@pytest.mark.parametrize("case", CASES)
def test_a_config_survives_its_file_and_every_field_is_in_it(case, tmp_path):
    config = config_of(case)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == CASES[case].family
    assert "num_key_value_heads" not in saved
    for again in (type(config).from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(again) is type(config)
        again.save_pretrained(tmp_path / "again")
        assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()
    for field, value in CASES[case].fields.items():
        assert saved[field] == value
    overridden = AutoConfig.from_pretrained(tmp_path, attention_branches=5)
    keys = 10 if getattr(overridden, "layer_form", "") == "luna" else 5
    assert overridden.num_key_value_heads == keys * overridden.decoder_attention_heads


def test_names_that_readers_of_configs_use():
    config = MATConfig(d_model=64, encoder_layers=3, encoder_attention_heads=4)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 3, 4)
    assert AutoConfig.for_model("mat", hidden_size=64).d_model == 64


def test_unknown_fields_are_kept_as_transformers_does():
    assert MATConfig(note="mine").to_dict()["note"] == "mine"


@pytest.mark.parametrize("field", [{"drop_branch": 30}, {"drop_branch": 1.0}, {"vocab_size": 60}])
def test_what_is_set_when_a_model_is_loaded_is_checked_then(field, tmp_path):
    """A wrong value is refused at loading, not when the model is saved after training."""
    MATForConditionalGeneration(MATConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=next(iter(field))):
        MATForConditionalGeneration.from_pretrained(tmp_path, **field)


def test_the_padding_is_in_both_vocabularies():
    with pytest.raises(ValueError, match=r"`pad_token_id` must be an id of the vocabulary \(0 to 19\), got 30"):
        MATConfig(
            **{**SIZES, "vocab_size": 20, "decoder_vocab_size": 41, "share_encoder_decoder_embeddings": False},
            pad_token_id=30,
        )
