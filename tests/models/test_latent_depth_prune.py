"""Pruning makes a plain model that computes what the latent-depth model computes with one of its posteriors."""

import copy
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from model_cases import SIZES, build, needs_transformers, pair, scramble, source
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_deepwide import (
    LatentDepthConfig,
    LatentDepthForConditionalGeneration,
    LatentDepthForMaskedLM,
    VanillaTransformerForConditionalGeneration,
    prune,
)
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.prune import kept_layers

SCRIPT = Path(__file__).parents[2] / "scripts" / "prune_latent_depth.py"
LANGUAGES = ["de", "fr", "cs"]
CHOSEN = {  # the layers that each posterior selects, of 2 encoder layers and 3 decoder layers
    "encoder": [[0, 1], [1], [0]],
    "decoder": [[1], [0, 2], [0, 1, 2]],
}
VARIANTS = {
    "LL-D": {"latent_encoder": False},
    "branches": {"attention_branches": 2, "ffn_branches": 2},
    "no biases": {"attention_bias": False, "lm_head_bias": True},
    "untied": {"tie_word_embeddings": False},
    "no norms": {"layer_norms": False},
    "two vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37},
}


def latent(**fields):
    """A scrambled model of three languages, in evaluation mode, that selects the layers in `CHOSEN`."""
    fields = {"num_posteriors": 3, "posterior_names": LANGUAGES, "inference_selection": "hard", **fields}
    model = scramble(LatentDepthForConditionalGeneration(LatentDepthConfig(**{**SIZES, **fields}))).eval().double()
    for stack, selection in model.layer_selections.items():
        with torch.no_grad():
            sign = -torch.ones_like(selection.layer_logits)
            for posterior, layers in enumerate(CHOSEN[stack][: len(sign)]):
                sign[posterior, layers] = 1.0
            selection.layer_logits.copy_(sign * (0.3 + selection.layer_logits.abs()))
    model.generation_config.update(eos_token_id=None, num_beams=2, max_new_tokens=5)
    return model


def logits(model, **more):
    batch = pair()
    batch["labels"] = batch["labels"].clamp(max=36)
    with torch.no_grad():
        return model(**batch, **more).logits


@pytest.mark.parametrize(
    ("fields", "language", "selection"),
    [
        *(({}, language, "hard") for language in LANGUAGES),
        *((fields, "fr", selection) for fields in VARIANTS.values() for selection in ("hard", "soft")),
        ({}, "cs", "tempered"),
    ],
)
def test_the_result_computes_what_the_model_does(fields, language, selection):
    model = latent(**fields, inference_selection=selection)
    before = copy.deepcopy(model.state_dict())
    index = LANGUAGES.index(language)
    pruned = prune(model, language)
    assert type(pruned) is VanillaTransformerForConditionalGeneration
    assert not pruned.training
    expected = logits(model, posteriors=torch.tensor([index] * 3))
    torch.testing.assert_close(logits(pruned), expected, atol=1e-10, rtol=0)
    depths = (pruned.config.encoder_layers, pruned.config.decoder_layers)
    if selection == "hard":
        encoder = 2 if "latent_encoder" in fields else len(CHOSEN["encoder"][index])
        assert depths == (encoder, len(CHOSEN["decoder"][index]))
    else:
        assert depths == (2, 3)
    inputs = source()
    if "decoder_vocab_size" in fields:
        needs_transformers("5.18", "beam search with two vocabularies")
    translations = model.generate(**inputs, posteriors=torch.tensor([index] * 3))
    assert torch.equal(pruned.generate(**inputs), translations)
    assert pruned.generation_config.num_beams == 2
    for name, tensor in model.state_dict().items():  # the model is unchanged, and shares no memory with the result
        assert torch.equal(tensor, before[name])
    for parameter in pruned.parameters():
        with torch.no_grad():
            parameter.zero_()
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)


def test_the_result_is_smaller_by_the_layers_that_are_gone():
    model = latent()
    layers = {stack: getattr(model.model, stack).layers for stack in ("encoder", "decoder")}
    size = {stack: sum(p.numel() for p in stack_layers[0].parameters()) for stack, stack_layers in layers.items()}
    logits_too = sum(selection.layer_logits.numel() for selection in model.layer_selections.values())
    gone = (2 - 1) * size["encoder"] + (3 - 2) * size["decoder"] + logits_too
    assert prune(model, "fr").num_parameters() == model.num_parameters() - gone


def test_the_selection_can_be_said_and_the_language_counted():
    model = latent()
    soft = prune(model, 1, selection="soft")
    model.config.inference_selection = "soft"
    torch.testing.assert_close(logits(soft), logits(model, posteriors=torch.tensor([1] * 3)), atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(prune(model, "1", selection="hard")), logits(prune(model, "fr", selection="hard")))
    assert kept_layers(model, "fr") == {"encoder": [0, 1], "decoder": [0, 1, 2]}
    assert kept_layers(latent(), "fr") == {"encoder": [1], "decoder": [0, 2]}
    alone = latent(num_posteriors=1, posterior_names=None)
    assert torch.equal(logits(prune(alone)), logits(alone))


def test_dtype_and_saving(tmp_path):
    model = latent().bfloat16()
    pruned = prune(model, "fr")
    assert {p.dtype for p in pruned.parameters()} == {torch.bfloat16}
    pruned.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)), logits(pruned))


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        ({}, {}, ["3 posteriors", "0 to 2", "de, fr, cs"]),
        ({}, {"language": "it"}, ["no posterior 'it'", "de, fr, cs"]),
        ({}, {"language": 3}, ["no posterior 3", "0 to 2"]),
        ({}, {"language": -1}, ["no posterior -1", "0 to 2"]),
        ({}, {"language": "de", "selection": "sample"}, ["'sample'", "hard, soft, tempered"]),
        ({"latent_decoder": False}, {"language": "de"}, ["no layer of the encoder", "'tempered'"]),
    ],
)
def test_what_cannot_be_pruned_is_explained(change, arguments, words):
    model = latent(**change)
    if change:
        with torch.no_grad():
            model.layer_selections["encoder"].layer_logits.fill_(-1)
    with pytest.raises(UserError) as error:
        prune(model, **arguments)
    for word in words:
        assert word in str(error.value)


def test_other_models_cannot_be_pruned():
    for model in (build("vanilla"), latent().model, LatentDepthForMaskedLM(LatentDepthConfig(**SIZES))):
        with pytest.raises(UserError, match=type(model).__name__):
            prune(model)


# The script


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "latent"
    tokenizer = train_tokenizer(["two dogs run in the red water", "a tree"] * 3, TokenizerArguments(vocab_size=41))
    latent(vocab_size=max(41, len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def script(*arguments):
    argv, sys.argv = sys.argv, [str(SCRIPT), *map(str, arguments)]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = argv


def test_the_script_writes_a_checkpoint_and_compares(run, tmp_path, capsys):
    script(run, tmp_path / "fr", "--language", "fr")
    printed = capsys.readouterr().out
    assert "encoder: selects 1 of 2 layers: [2]" in printed
    assert "decoder: selects 2 of 3 layers: [1, 3]" in printed
    assert "largest difference of logits from the model's: " in printed
    assert "own selection" not in printed
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "fr")
    assert type(saved) is VanillaTransformerForConditionalGeneration
    assert saved.config.decoder_layers == 2
    assert AutoTokenizer.from_pretrained(tmp_path / "fr")("two dogs").input_ids

    script(run, tmp_path / "soft", "--language", "0", "--selection", "soft")
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "soft").config.decoder_layers == 3
    changed = re.search(r"own selection, hard, the largest difference is (\S+)", capsys.readouterr().out)
    assert float(changed[1]) > 1e-3, "the function is another one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NOWHERE", "out"], "nowhere cannot be loaded"),
        (["RUN", "out"], "3 posteriors; say which language"),
        (["RUN", "RUN", "--language", "de"], "exists already"),
        (["VANILLA", "out"], "only a latent-depth model can be pruned"),
    ],
)
def test_mistakes_end_in_one_line(run, arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vanilla = tmp_path / "vanilla"
    build("vanilla").save_pretrained(vanilla)
    AutoTokenizer.from_pretrained(run).save_pretrained(vanilla)
    places = {"RUN": str(run), "VANILLA": str(vanilla), "NOWHERE": str(tmp_path / "nowhere")}
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        script(*(places.get(argument, argument) for argument in arguments))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def test_the_result_names_the_languages_of_the_model():
    model = latent()
    model.config.source_lang, model.config.target_lang = "en", "de"
    pruned = prune(model, language="de")
    assert (pruned.config.source_lang, pruned.config.target_lang) == ("en", "de")


def test_the_result_keeps_the_pairs_of_its_posterior_alone():
    model = latent()
    model.config.translation_pairs = {"en-de": {"posterior": 0}, "en-fr": {"posterior": 1}}
    assert prune(model, "fr").config.translation_pairs == {"en-fr": {}}
    assert getattr(prune(model, "cs").config, "translation_pairs", None) is None


def test_an_adapter_is_to_be_merged_before():
    model = latent()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False))
    with pytest.raises(UserError, match=r"cannot prune .*q_proj\.base_layer.*merge_and_unload"):
        prune(model, "de")
    merged = adapted.merge_and_unload()
    expected = logits(merged, posteriors=torch.tensor([0] * 3))
    torch.testing.assert_close(logits(prune(merged, "de")), expected, atol=1e-10, rtol=0)


def test_a_layer_that_was_removed_is_missed():
    model = latent()
    del model.model.encoder.layers[1]
    with pytest.raises(UserError, match=r"cannot prune .*it lacks weights .*encoder\.layers\.1"):
        prune(model, "de")


def test_what_is_no_model_is_refused():
    with pytest.raises(UserError, match=r"cannot prune a str: .* loaded by from_pretrained"):
        prune("runs/latent")
