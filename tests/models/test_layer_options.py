"""Tests of every way to build the layers of a vanilla Transformer, whatever its equations are.

Tests of one particular way are in the file with its name.
"""

import pytest
import torch
from model_cases import build, leaves, pair, sentences, source
from model_checks import check_checkpointing, check_equations
from naive_transformer import logits as naive_logits

from hf_deepwide import VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import UserError
from hf_deepwide.exporting.ctranslate2_spec import check_expressible
from hf_deepwide.exporting.stock import check_fit

CASES = [
    *("vanilla-iterative", "vanilla-hierarchical", "vanilla-hierarchical-prenorm"),
    *("vanilla-em-routing", "vanilla-em-routing-capsules"),
    *("vanilla-transparent", "vanilla-transparent-prenorm", "vanilla-sdu-prenorm"),
    *("vanilla-merged", "vanilla-merged-prenorm"),
    *("vanilla-weighted", "vanilla-weighted-prenorm"),
    *("vanilla-dynamic", "vanilla-dynamic-prenorm"),
]
LUNA = ["vanilla-luna", "vanilla-luna-prenorm"]  # like the evolved model, decoded with Transformers' caches only
CELLS = {"encoder_layers": 1, "decoder_layers": 2}
EVOLVED = [{}, {"decoder_attention_heads": 8, "encoder_ffn_dim": 9, "attention_bias": False}]
DROPPING = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.2}
MERGED_BRANCHES = ("vanilla-merged-prenorm", {"drop_branch": 0.5}, None)


@pytest.mark.parametrize("fields", EVOLVED, ids=str)
def test_evolved_cells_compute_their_equations(fields):
    """The sentences have more positions than the widest filter reads."""
    model = build("vanilla-evolved", attn_implementation="sdpa", **CELLS, **fields).double().train()
    batch = pair((11, 3), (14, 2))
    weights, got = leaves(model), model(**batch).logits
    expected = [naive_logits(weights, model.config, *each) for each in sentences(batch)]
    check_equations(model, got, weights, expected)


@pytest.mark.parametrize(
    ("case", "more", "options"),
    [
        *((case, DROPPING, None) for case in (*CASES, *LUNA, "vanilla-evolved")),
        *((case, DROPPING, {"use_reentrant": True}) for case in LUNA),  # the state is a positional argument here
        MERGED_BRANCHES,
    ],
    ids=str,
)
def test_checkpointing_and_layer_drop_keep_every_gradient(case, more, options):
    check_checkpointing(lambda: build(case, layer_drop=0.4, **more), options)


@pytest.mark.parametrize("case", CASES)
def test_an_ordinary_cache_goes_on_where_the_fast_decoder_ends(case):
    model = build(case).double()  # so that rounding makes no difference
    fast = model.generate(**source(), max_new_tokens=9, return_dict_in_generate=True)
    ids, cache = fast.sequences, fast.past_key_values
    with torch.no_grad():
        cached = model(**source(), decoder_input_ids=ids[:, -1:], past_key_values=cache).logits[:, -1]
        whole = model(**source(), decoder_input_ids=ids).logits[:, -1]
    torch.testing.assert_close(cached, whole)


@pytest.mark.parametrize("case", CASES)
def test_beams_are_those_of_the_ordinary_decoder(case):
    model = build(case)
    model.generation_config.eos_token_id = 2
    fields = {"num_beams": 3, "max_new_tokens": 7}
    assert torch.equal(model.generate(**source(), **fields), model.generate(**source(), **fields, use_cache=False))


DOORS = {  # a field that changes the layers, its value, and the error of the export to CTranslate2
    "vanilla-weighted": ("layer_form", "weighted", "`layer_form` is 'weighted'"),
    "vanilla-luna": ("layer_form", "luna", "`layer_form` is 'luna'"),
    "vanilla-dynamic": ("layer_form", "dynamic_convolution", "`layer_form` is 'dynamic_convolution'"),
    "vanilla-evolved": ("layer_form", "evolved", "`layer_form` is 'evolved'"),
    "vanilla-merged": ("decoder_attention", "merged", "one attention"),
}


@pytest.mark.parametrize("case", DOORS)
def test_doors_to_other_models_refuse_layers_of_another_form(case):
    model, (field, value, told) = build(case), DOORS[case]
    base = build("vanilla-prenorm" if model.config.normalize_before else "vanilla")
    with pytest.raises(UserError, match=f"`{field}` cannot be"):
        VanillaTransformerForConditionalGeneration.from_base(base, **{field: value})
    with pytest.raises(UserError, match=rf"cannot start from .*`{field}` is"):
        VanillaTransformerForConditionalGeneration.from_base(model)
    with pytest.raises(UserError, match=told):
        check_expressible(model)
    with pytest.raises(UserError, match=f"`{field}` is '{value}'"):
        check_fit(model.config, "marian")
