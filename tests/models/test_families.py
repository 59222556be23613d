"""A family is one row of a table: the rest of the package reads all facts about a family from its row."""

import pytest
import torch
from model_cases import CASES, SIZES, build, config_of, pair
from tiny_run import RESULTS, tiny_values
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, GenerationMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_deepwide.errors import UserError
from hf_deepwide.families import FAMILIES, Family, Start, count_posteriors, family_of
from hf_deepwide.models.configuration_base import DeepWideConfig, validated
from hf_deepwide.models.modeling_base import DeepWideForConditionalGeneration, DeepWideModel
from hf_deepwide.registration import register
from hf_deepwide.runs.model_card import write_model_card
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.warm_start import copy_branches, losses, preserves_function


@validated
class ToyConfig(DeepWideConfig):
    """A family that changes a default and nothing else."""

    model_type = "toy"
    ffn_branches: int = 2


class ToyModel(DeepWideModel):
    """Encoder and decoder."""

    config_class = ToyConfig


class ToyForConditionalGeneration(DeepWideForConditionalGeneration, GenerationMixin):
    """The translation model."""

    config_class = ToyConfig
    model_class = ToyModel


@pytest.fixture
def toy(monkeypatch) -> Family:
    """A sixth family, registered for one test."""
    family = Family(ToyConfig, ToyModel, ToyForConditionalGeneration, paper=("Nobody 2030, Toys", "3001.00001"))
    for mapping in (CONFIG_MAPPING, *(cls._model_mapping for cls in (AutoModel, AutoModelForSeq2SeqLM))):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    monkeypatch.setitem(FAMILIES, "toy", family)
    register()
    return family


def test_auto_classes_load_a_family_by_its_row(toy, tmp_path):
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("toy", **SIZES)).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is ToyConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is ToyModel
    assert type(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)) is ToyForConditionalGeneration


def test_a_family_starts_from_a_base_by_the_default_rules(toy, caplog):
    base = build("vanilla")
    model = toy.lm.from_base(base, drop_branch=0.1)
    assert type(model) is ToyForConditionalGeneration
    assert model.config.ffn_branches == 2
    with torch.no_grad():
        torch.testing.assert_close(model(**pair()).logits, base(**pair()).logits, rtol=1e-4, atol=1e-4)
    assert not caplog.records
    assert preserves_function(model.config)
    with pytest.raises(UserError, match=r"toy.*accepted are"):  # `is_base` is False in its row
        toy.lm.from_base(model)


def test_a_family_whose_row_says_so_is_a_base(toy, monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", toy._replace(is_base=True))
    base = build("vanilla")
    wide = FAMILIES["mat"].lm.from_base(toy.lm.from_base(base), attention_branches=1)
    with torch.no_grad():
        torch.testing.assert_close(wide(**pair()).logits, base(**pair()).logits, rtol=1e-4, atol=1e-4)


def test_a_row_decides_what_is_taken_copied_and_lost(toy, monkeypatch, caplog):
    start = Start(
        defaults={"dropout": 0.25},
        free=("decoder_ffn_dim",),
        copies=lambda config, stack, sublayer: 4 if (stack, sublayer) == ("encoder", "attn") else 1,
        takes=lambda key, base: "feed_forward" not in key,
        losses=lambda base, config: ["its toys are new"],
    )
    base = build("vanilla")
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, "toy", toy._replace(start=start._replace(copies=Start().copies)))
        model = toy.lm.from_base(base, decoder_ffn_dim=8)
        assert not preserves_function(model.config)
    assert "does not compute the function" in caplog.text
    assert "its toys are new" in caplog.text
    assert model.config.dropout == 0.25
    theirs, ours = base.model.decoder.layers[0], model.model.decoder.layers[0]
    assert ours.feed_forward.fc1.weight.shape == (2 * 8, 16)
    assert torch.equal(ours.encoder_attn.q_proj.weight, theirs.encoder_attn.q_proj.weight)
    theirs, ours = base.model.encoder.layers[0], model.model.encoder.layers[0]
    assert not torch.equal(ours.feed_forward.fc1.weight[:24], theirs.feed_forward.fc1.weight)

    monkeypatch.setitem(FAMILIES, "toy", toy._replace(start=start))
    copies = copy_branches(base.state_dict(), base.config, ToyConfig(**SIZES))
    assert copies["model.encoder.layers.1.self_attn.q_proj.weight"].shape == (4 * 16, 16)
    assert copies["model.encoder.layers.1.self_attn.out_proj.weight"].shape == (16, 4 * 16)
    assert copies["model.decoder.layers.1.self_attn.q_proj.weight"].shape == (16, 16)
    assert copies["model.encoder.layers.1.feed_forward.fc1.weight"].shape == (24, 16)


def test_a_family_without_a_place_for_a_tensor_gives_a_reason_or_is_refused(monkeypatch):
    family = FAMILIES["depthwise_lstm"]
    silent = family.start._replace(takes=Start().takes, losses=Start().losses)
    monkeypatch.setitem(FAMILIES, "depthwise_lstm", family._replace(start=silent))
    with pytest.raises(UserError, match=r"no place for .*feed_forward"):
        family.lm.from_base(build("vanilla-prenorm"))


def test_a_card_and_a_recipe_know_a_family_by_its_row(toy, tmp_path):
    recipe = check_recipe(tiny_values(tmp_path / "run", family="toy"), "toy run", "toy.yaml")
    card = write_model_card(tmp_path, recipe, RESULTS, []).read_text(encoding="utf-8")
    assert "[Nobody 2030, Toys](https://arxiv.org/abs/3001.00001)" in card


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_has_a_paper_and_classes_of_one_config(name):
    family = FAMILIES[name]
    title, number = family.paper
    assert title
    assert number.replace(".", "").isdecimal()
    assert {cls.config_class for cls in (family.model, family.lm, family.masked_lm) if cls} == {family.config}
    assert ("num_posteriors" in family.config.__dataclass_fields__) == family.has_posteriors


def test_posteriors_are_counted_where_the_row_says_so(toy):
    assert count_posteriors(config_of("latent-decoder-hard", num_posteriors=3)) == 3
    assert count_posteriors(config_of("mat-1")) == 1
    assert count_posteriors(AutoConfig.for_model("marian")) == 1
    assert family_of(type("Tuned", (ToyConfig,), {"model_type": "tuned"})) is toy
    assert family_of(type(AutoConfig.for_model("marian"))) is None


DOUBLE = {"attention_branches": 2, "branch_merge": "double_mean"}


@pytest.mark.parametrize(
    ("base", "family", "fields", "reasons"),
    [
        ({}, "mat", {"attention_branches": 49}, []),  # 49 * (1 / 49) is not 1 in floating point
        ({}, "mat", DOUBLE, ["multiplies the output of these sub-layers by 0.5"]),
        (DOUBLE, "mat", DOUBLE, []),
        ({}, "latent_depth", {"inference_selection": "hard"}, []),
        ({}, "latent_depth", {"inference_selection": "hard", "layer_selection_init": -1.0}, ["selects no layer"]),
        ({}, "latent_depth", {"inference_selection": "soft"}, ["weighs each layer"]),
        ({}, "depthwise_lstm", {}, ["the LSTM that joins them is new"]),
    ],
)
def test_losses_name_what_changes_the_function(base, family, fields, reasons):
    found = losses(FAMILIES["vanilla_transformer"].config(**base), FAMILIES[family].config(**fields))
    assert len(found) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_only_layers_that_the_model_has_may_not_be_split(case):
    """FSDP refuses a model that names other classes."""
    model = build(case)
    present = {type(module).__name__ for module in model.modules()}
    assert {type(model.model.encoder.layers[0]).__name__} <= model._no_split_modules <= present


@pytest.mark.parametrize("shared", [True, False])
def test_hooks_on_the_input_embeddings_are_called(shared):
    """NEFTune adds its noise there."""
    model, called = build("vanilla", share_encoder_decoder_embeddings=shared, tie_word_embeddings=shared), []
    model.get_input_embeddings().register_forward_hook(lambda *_: called.append(True))
    model(**pair())
    assert called == [True]
