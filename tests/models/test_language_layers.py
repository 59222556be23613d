"""Norms and a matrix for each language (Zhang et al. 2020, LALN and LALT).

The tests of all models check logits, generation, saving and back-ends with one language.
"""

import pytest
import torch
from model_cases import build, leaves, new_vanilla, pair, sentences, source
from model_checks import check_checkpointing, check_equations, check_refused
from naive_transformer import logits as naive_logits
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import UserError
from hf_deepwide.exporting.ctranslate2_spec import check_expressible
from hf_deepwide.exporting.opening import open_model
from hf_deepwide.exporting.stock import check_fit
from hf_deepwide.families import count_posteriors

CASES = ["vanilla-language", "vanilla-language-merged"]
LANGUAGES = torch.tensor([2, 0, 2])


def three(case, **fields):
    """A model of three languages. No sentence in `LANGUAGES` has the second language."""
    return build(case, num_posteriors=3, **fields)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_each_sentences_language(case):
    model = three(case, attn_implementation="sdpa").double().train()
    batch = pair((4, 3, 2), (3, 2, 2))
    weights, got = leaves(model), model(**batch, posteriors=LANGUAGES).logits
    expected = [
        naive_logits(weights, model.config, *each, language=int(language))
        for each, language in zip(sentences(batch), LANGUAGES, strict=True)
    ]
    check_equations(model, got, weights, expected)
    for name, parameter in model.named_parameters():
        if ".language_" in name or name.endswith("language_matrices"):
            assert (parameter.grad[1] == 0).all(), name
            assert parameter.grad[2].abs().max() > 0, name


def test_a_language_that_changes_nothing_is_the_plain_model():
    plain, model = build("vanilla"), three("vanilla-language")
    state = plain.state_dict()
    for name, tensor in model.state_dict().items():
        if name.endswith("language_matrices"):
            tensor.copy_(torch.eye(16))
        elif "language_" in name:
            last = "weight" if name.endswith("scale") else "bias"
            tensor.copy_(state[f"{name.rpartition('.')[0]}.{last}"])
    model.load_state_dict({name: tensor for name, tensor in state.items() if "layer_norm" not in name}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model(**pair(), posteriors=LANGUAGES).logits, plain(**pair()).logits)


def test_each_language_has_a_matrix_and_the_norms_of_all_layers():
    """N D^2 more, and 2 (N - 1) D for each norm. The paper's 100 languages add 26.2 M and 2.4 M (merged attention)."""
    norms = 2 * 2 + 3 * 3
    assert new_vanilla(language_aware=True, num_posteriors=3).num_parameters() - new_vanilla().num_parameters() == (
        3 * 16 * 16 + 2 * norms * 2 * 16
    )
    deep = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "decoder_attention": "merged"}
    with torch.device("meta"):
        more = (
            new_vanilla(**deep, language_aware=True, num_posteriors=100).num_parameters()
            - new_vanilla(**deep).num_parameters()
        )
    assert more == 100 * 512**2 + 99 * (6 * 2 + 6 * 2) * 2 * 512


def test_new_languages_are_equal_but_for_their_matrices():
    model = new_vanilla(language_aware=True, num_posteriors=3, d_model=64)
    assert {"language_scale", "language_bias"} < set(model.no_weight_decay)
    for name, parameter in model.named_parameters():
        if name.endswith(("language_scale", "language_bias")):
            assert (parameter == float(name.endswith("scale"))).all()
    matrices = model.model.encoder.language_transform.language_matrices
    bound = (6 / 128) ** 0.5
    assert 0.97 * bound < matrices.abs().max() <= bound
    assert matrices.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_generation_follows_the_language_with_every_cache(case, search):
    model = three(case)
    model.generation_config.eos_token_id = 2
    fields = {"max_new_tokens": 8, **search, "posteriors": LANGUAGES}
    fast = model.generate(**source(), **fields)
    assert torch.equal(fast, model.generate(**source(), **fields, use_cache=False))
    assert torch.equal(fast, model.generate(**source(), **fields, cache_implementation="static"))
    other = model.generate(**source(), **{**fields, "posteriors": torch.tensor([1, 1, 1])})
    assert fast.shape != other.shape or not torch.equal(fast, other)


@pytest.mark.parametrize("case", CASES)
def test_checkpointing_and_layer_drop_keep_every_gradient(case):
    check_checkpointing(lambda: three(case, layer_drop=0.4), None, posteriors=LANGUAGES)


@pytest.mark.parametrize("case", CASES)
def test_calls_at_the_same_time_keep_their_languages_apart(case):
    """A second call runs between two sub-layers of the first one, as threads of a server may."""
    model, others = three(case), (torch.tensor([1, 1, 0]), torch.tensor([1, 2, 1]))
    with torch.no_grad():
        expected = model(**pair(), posteriors=LANGUAGES).logits
        layers = (model.model.encoder.layers[0], model.model.decoder.layers[0])
        for layer, other in zip(layers, others, strict=True):
            attention = getattr(layer, "self_attn", layer.encoder_attn if layer is layers[1] else None)

            handles = []

            def call_again(*args, other=other, handles=handles):
                handles.pop().remove()
                model(**pair(), posteriors=other)

            handles.append(attention.register_forward_hook(call_again))
            assert torch.equal(model(**pair(), posteriors=LANGUAGES).logits, expected)
            assert not handles, "the second call was made"


def test_a_saved_model_knows_its_languages(tmp_path):
    model = three("vanilla-language", posterior_names=["de", "fr", "cs"])
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert (again.config.num_posteriors, again.config.posterior_names) == (3, ["de", "fr", "cs"])
    assert count_posteriors(again.config) == 3
    with torch.no_grad():
        logits = [one(**pair(), posteriors=LANGUAGES).logits for one in (model, again)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_any_whole_numbers_name_languages(dtype):
    model = three("vanilla-language")
    with torch.no_grad():
        ours, theirs = (model(**pair(), posteriors=LANGUAGES.to(kind)).logits for kind in (dtype, torch.int64))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("posteriors", "words"),
    [
        (None, "3 posteriors"),
        (torch.tensor([0, 1]), "one index for each of 3 sentences"),
        (torch.tensor([0, 1, 3]), "0 to 2"),
    ],
)
def test_names_wrong_languages(posteriors, words):
    with pytest.raises(ValueError, match=words):
        three("vanilla-language")(**pair(), posteriors=posteriors)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_posteriors": 2}, ["`num_posteriors`", "`language_aware=True`"]),
        ({"language_aware": True, "num_posteriors": 0}, ["`num_posteriors`", "at least 1"]),
        ({"language_aware": True, "num_posteriors": 2, "posterior_names": ["de"]}, ["`posterior_names`", "'de'"]),
        (
            {"language_aware": True, "num_posteriors": 2, "posterior_names": ["de", "de"]},
            ["`posterior_names`", "another name"],
        ),
        ({"language_aware": True, "normalize_before": True}, ["post-norm", "`normalize_before=False`"]),
        ({"language_aware": True, "layer_aggregation": "dlcl"}, ["'dlcl'", "`layer_aggregation=None`"]),
        ({"language_aware": True, "num_posteriors": 900_000, "d_model": 9_000}, ["parameters"]),
    ],
)
def test_names_what_does_not_fit(fields, words):
    check_refused(VanillaTransformerConfig, fields, words)


def test_a_model_without_languages_refuses_them():
    with pytest.raises(ValueError, match="`language_aware` is False; leave them out"):
        build("vanilla")(**pair(), posteriors=LANGUAGES)


def test_doors_to_other_models_refuse_languages():
    model = three("vanilla-language")
    with pytest.raises(UserError, match="`language_aware` cannot be"):
        VanillaTransformerForConditionalGeneration.from_base(build("vanilla"), language_aware=True)
    with pytest.raises(UserError, match=r"cannot start from .*`language_aware` is"):
        VanillaTransformerForConditionalGeneration.from_base(model)
    with pytest.raises(UserError, match="not told the language"):
        check_expressible(model)
    with pytest.raises(UserError, match="not told the language"):
        open_model(model, object())
    with pytest.raises(UserError, match="`language_aware` is True"):
        check_fit(model.config, "marian")


def test_an_index_of_no_language_is_refused():
    with pytest.raises(ValueError, match="`posteriors` must be from 0 to 0, got 0 to 1"):
        build("vanilla-language")(**pair(), posteriors=torch.tensor([0, 1, 0]))
