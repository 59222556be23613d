"""The multi-path encoder: every row of the paper's ablation against the equations, and special cases."""

import math
from types import SimpleNamespace

import pytest
import torch
from model_cases import SIZES, config_of, pair, scramble
from naive_transformer import multipath_encoder_layer
from transformers import TrainingArguments

from hf_deepwide import (
    MultiPathConfig,
    MultiPathForConditionalGeneration,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_deepwide.models.modeling_multipath_transformer import MultiPathEncoderLayer
from hf_deepwide.training.translation import TranslationTrainer

# Table 4 from top to bottom: the baseline is one path.
ABLATION = {
    "transformer": {"path_norm": False, "learnable_path_weights": False, "more_features": False},
    "multi-path": {"path_norm": False, "learnable_path_weights": False, "more_features": False},
    "path norm": {"path_norm": True, "learnable_path_weights": False, "more_features": False},
    "learnable weights": {"path_norm": False, "learnable_path_weights": True, "more_features": False},
    "both": {"path_norm": True, "learnable_path_weights": True, "more_features": False},
    "more features": {"path_norm": True, "learnable_path_weights": True, "more_features": True},
    # not in the table, but the flags can also be combined like this
    "more features, fixed": {"path_norm": True, "learnable_path_weights": False, "more_features": True},
    "more features alone": {"path_norm": False, "learnable_path_weights": False, "more_features": True},
    "more features, no norm": {"path_norm": False, "learnable_path_weights": True, "more_features": True},
}
ROWS = [(row, n) for row in ABLATION for n in ((1,) if row == "transformer" else (2, 3, 4, 6, 8))]


def multipath(paths, row, **changes):
    return MultiPathConfig(
        **{**SIZES, "attn_implementation": "sdpa", "encoder_paths": paths, **ABLATION[row]} | changes
    )


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize(("row", "paths"), ROWS)
def test_a_layer_and_its_gradients_are_those_of_the_equations(row, paths, pre_norm):
    config = multipath(paths, row, normalize_before=pre_norm, encoder_attention_heads=2)
    layer = scramble(MultiPathEncoderLayer(config).double(), seed=paths)
    x = torch.randn(1, 3, config.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    direction = torch.randn(3, config.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    weights = {f"layer.{name}": p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    expected = multipath_encoder_layer(weights, "layer", config, x[0])
    (expected * direction).sum().backward()
    got = layer(x)[0]
    (got * direction).sum().backward()

    torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[f"layer.{name}"].grad, atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize("row", ABLATION)
@pytest.mark.parametrize("paths", [1, 2, 3, 6])
def test_weights_start_as_the_paper_says(row, paths):
    config = multipath(paths, row)
    raw_and_new = paths * (2 if config.more_features and paths >= 3 else 1)
    if not config.path_norm:
        expected = 1 / raw_and_new
    elif config.learnable_path_weights:
        expected = 1 / math.sqrt(2 * paths)  # section 3.3
    else:
        expected = 1 / math.sqrt(paths)  # section 5.2
    model = MultiPathForConditionalGeneration(config)
    for layer in model.model.encoder.layers:
        for joint in (layer.self_attn_paths, layer.feed_forward_paths):
            assert joint.initial_weight == pytest.approx(expected)
            if config.learnable_path_weights:
                torch.testing.assert_close(joint.alpha.data, torch.full((raw_and_new,), expected))
                assert joint.beta.item() == 1
            else:
                assert joint.alpha is None
                assert joint.beta is None
            assert len(joint.path_norms) == (raw_and_new if config.path_norm else 0)


def test_path_weight_init_overrides_the_rule():
    model = MultiPathForConditionalGeneration(multipath(4, "both", path_weight_init=0.3))
    assert model.model.encoder.layers[0].self_attn_paths.alpha.tolist() == pytest.approx([0.3] * 4)


def test_one_path_with_everything_off_is_the_pre_norm_transformer():
    config = multipath(1, "transformer")
    shared = {name: getattr(config, name) for name in SIZES} | {"normalize_before": True}
    vanilla = (
        scramble(
            VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**shared, attn_implementation="sdpa"))
        )
        .double()
        .eval()
    )
    model = MultiPathForConditionalGeneration(config).double().eval()
    model.load_state_dict(vanilla.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(model(**pair()).logits, vanilla(**pair()).logits, atol=1e-12, rtol=1e-12)


def test_equal_paths_make_new_features_equal_to_them():
    """If all paths are equal, the average of all paths but one is the path. Raw and new norms then read the same."""
    torch.manual_seed(0)
    layer = MultiPathEncoderLayer(multipath(3, "more features")).double()
    with torch.no_grad():
        for sublayer in (layer.self_attn, layer.feed_forward):
            for name, parameter in sublayer.named_parameters():
                along = 1 if name in ("out_proj.weight", "fc2.weight") else 0
                first = parameter.chunk(3, along)[0]
                parameter.copy_(torch.cat([first] * 3, along))
    x = torch.randn(2, 5, layer.self_attn.config.d_model, dtype=torch.float64)
    reached = layer(x)
    for joint in (layer.self_attn_paths, layer.feed_forward_paths):  # all the weight on raw features, or on new ones
        with torch.no_grad():
            joint.alpha.copy_(torch.tensor([1.0, 1, 1, 0, 0, 0]) * joint.alpha.sum() / 3)
    torch.testing.assert_close(layer(x), reached)
    for joint in (layer.self_attn_paths, layer.feed_forward_paths):
        with torch.no_grad():
            joint.alpha.copy_(joint.alpha.roll(3))
    torch.testing.assert_close(layer(x), reached)


@pytest.mark.parametrize("case", ["multipath-2", "multipath-3-more", "multipath-4-postnorm"])
def test_every_weight_of_a_feature_is_learnt(case):
    model = MultiPathForConditionalGeneration(config_of(case))
    model(**pair()).loss.backward()
    weights = {name: p.grad for name, p in model.named_parameters() if name.endswith(("alpha", "beta"))}
    assert len(weights) == 2 * 2 * model.config.encoder_layers
    assert all((grad != 0).all() for grad in weights.values())


def test_weights_of_features_are_not_decayed_but_matrices_are(tmp_path):
    model = MultiPathForConditionalGeneration(config_of("multipath-3-more"))
    trainer = TranslationTrainer.__new__(TranslationTrainer)
    trainer.model, trainer.args = model, TrainingArguments(tmp_path, report_to="none")
    trainer.lora = SimpleNamespace(frozen_tables=set)
    decayed = trainer.get_decay_parameter_names(model)
    assert any(name.endswith("fc2.weight") for name in decayed)
    assert not [name for name in decayed if name.endswith(("alpha", "beta")) or "norm" in name]


def test_weights_of_features_are_reported_to_the_log():
    model = MultiPathForConditionalGeneration(config_of("multipath-3-more"))
    logs = model.training_logs()
    assert len(logs) == model.config.encoder_layers * 2 * (6 + 1)
    with torch.no_grad():
        model.model.encoder.layers[1].feed_forward_paths.alpha[4] = 0.25
        model.model.encoder.layers[0].self_attn_paths.beta.fill_(0.75)
    changed = {name: value for name, value in model.training_logs().items() if value != logs[name]}
    assert changed == {"alpha/1.feed_forward.4": 0.25, "beta/0.self_attn": 0.75}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_paths": 0}, "`encoder_paths` must be at least 1, got 0"),
        ({"path_weight_init": 0}, "`path_weight_init` must be above 0, got 0"),
        ({"attention_branches": 2}, "`attention_branches` must be 1: the width here is `encoder_paths`, got 2"),
        ({"ffn_branches": 3}, "`ffn_branches` must be 1: the width here is `encoder_paths`, got 3"),
        ({"drop_branch": 0.1}, "`drop_branch` must be 0: paths are never dropped, got 0.1"),
        ({"join_ffn": False}, "`join_ffn` must be True: there is one branch and nothing is dropped, got False"),
        ({"drop_unit": "head"}, "`drop_unit` must be 'branch': there is one branch"),
        ({"drop_granularity": "sentence"}, "`drop_granularity` must be 'batch': there is one branch"),
        ({"branch_merge": "double_mean"}, "`branch_merge` must be 'mean': there is one branch"),
        ({"ffn_drop_branch": 0.1}, "`ffn_drop_branch` must be 0: paths are never dropped, got 0.1"),
    ],
)
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        MultiPathConfig(**fields)
