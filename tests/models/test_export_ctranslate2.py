"""CTranslate2 computes the same as the model (scores, greedy and beam search) for all models that it can express."""

import copy
import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import ctranslate2
import pytest
import torch
from model_cases import build, needs_transformers, source, tokens
from peft import LoraConfig, get_peft_model
from readme_code import printed_by, python_block
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

import hf_deepwide
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.engine import Engine
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.exporting import ctranslate2_folder, ctranslate2_spec
from hf_deepwide.exporting.ctranslate2_spec import vocabulary
from hf_deepwide.exporting.opening import Opened
from hf_deepwide.loading import load_model
from hf_deepwide.models.configuration_base import accepted_values
from hf_deepwide.models.configuration_vanilla_transformer import VanillaTransformerConfig
from hf_deepwide.vanilla_form import JOINTS

RAW = {"path_norm": False}
UNEQUAL = {"d_model": 20, "encoder_ffn_dim": 22}  # not multiples of the length of a processor's vectors
EXPRESSIBLE = {
    "post-norm, sinusoids": ("vanilla", {}),
    "pre-norm, learned positions, norm of embeddings": ("vanilla-prenorm", {}),
    "bias on logits, untied": ("mat-2-prenorm", {"ffn_branches": 1, "attention_branches": 1}),
    "gelu of tanh": ("vanilla", {"activation_function": "gelu_new"}),
    "quick gelu": ("vanilla", {"activation_function": "quick_gelu"}),
    "swish": ("vanilla", {"activation_function": "silu", "position_embedding_type": "marian"}),
    "DeepNorm": ("vanilla-deepnorm", {}),
    "DeepNorm, un-joined networks": ("vanilla-deepnorm", {"ffn_branches": 2, "join_ffn": False}),
    "MAT": ("mat-3", {}),
    "MAT, branches of networks, Marian's sinusoids": ("mat-2-prenorm", {}),
    "MAT, two vocabularies, 1/N^2, no biases, no scale": ("mat-3-two-vocabularies", {}),
    "MAT, un-joined networks": ("mat-3-unjoined", {}),
    "MAT, odd widths": ("mat-3", UNEQUAL),
    "paths": ("multipath-2", RAW),
    "paths, more features": ("multipath-3-more", RAW),
    "paths, post-norm": ("multipath-4-postnorm", {}),
    "paths, fixed weights": ("multipath-4-postnorm", {"learnable_path_weights": False}),
    "one path with its norm": ("multipath-2", {"encoder_paths": 1}),
    "latent depth, tempered, over branches": ("latent-decoder-hard", {"inference_selection": "tempered"}),
    "latent depth, hard": ("latent-both", {"inference_selection": "hard"}),
}
REFUSED = {
    "rezero": ("vanilla-rezero", {}, "rezero"),
    "attention residuals": ("vanilla-attention", {}, "attention"),
    "hyper-connections": ("vanilla-hyper", {}, "hyper"),
    "mhc": ("vanilla-mhc", {}, "mhc"),
    "combined layers": ("vanilla-dlcl", {}, "dlcl"),
    "averaged layers": ("vanilla-denseformer", {}, "denseformer"),
    "layers in a chain": ("vanilla-iterative", {}, "'iterative', and the engine's layers read the layer before them"),
    "layers in a tree": ("vanilla-hierarchical", {}, "hierarchical"),
    "capsules": ("vanilla-em-routing", {}, "em_routing"),
    "cells": ("vanilla-evolved", {}, "evolved"),
    "layers evaluated twice": ("vanilla-rk2", {}, "encoder_solver"),
    "relative positions": ("vanilla-relative", {}, "relative positions of keys alone"),
    "norms of several paths": ("multipath-2", {}, "path_norm"),
    "a norm behind a post-norm path": ("multipath-2", {"encoder_paths": 1, "normalize_before": False}, "path_norm"),
    "latent depth without norms": ("latent-without-norms", {}, "this model: .*`layer_norms: false` of latent_depth"),
    "lstm": ("lstm", {}, "LSTM"),
    "activation": ("vanilla", {"activation_function": "mish"}, "mish"),
}


def model_of(case):
    """A scrambled model for a row of the tables above. Its learned weights of paths are positive."""
    name, fields = case[:2]
    model = build(name, **fields)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".beta"):
                parameter.copy_(parameter.abs() + 0.3)
    return model


def words(ids, names):
    """Tokens of rows of ids, without padding."""
    return [[names[i] for i in row if i != 1] for row in ids]


def until_end(ids):
    """The ids of a translation between the first token and `</s>`."""
    return list(itertools.takewhile(lambda i: i != 2, ids[1:]))


def run_readme(folder, monkeypatch, capsys):
    """Run the code in the README of a folder, and return what it prints."""
    monkeypatch.chdir(folder)
    return printed_by(python_block((folder / "README.md").read_text()), capsys)


@pytest.mark.parametrize("case", EXPRESSIBLE)
def test_the_engine_scores_and_translates_as_the_model_does(case, tokenizer, tmp_path):
    model = model_of(EXPRESSIBLE[case])
    folder = hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    engine = ctranslate2.Translator(folder, compute_type="float32")
    names, target_names = (
        vocabulary(tokenizer, n) for n in (model.config.vocab_size, model.config.decoder_vocab_size)
    )

    batch, (target, mask) = source((9, 4, 6)), tokens((5, 7, 3), seed=9)
    sources = words(batch["input_ids"].tolist(), names)
    shifted = torch.cat([torch.full((3, 1), 2), target[:, :-1]], dim=1)
    with torch.no_grad():
        logits = model(**batch, decoder_input_ids=shifted).logits
    expected = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    without_end = [row[:-1] for row in words(target.tolist(), target_names)]  # the engine adds </s>
    for scored, row, length in zip(engine.score_batch(sources, without_end), expected, mask.sum(1), strict=True):
        torch.testing.assert_close(torch.tensor(scored.log_probs), row[:length], rtol=0, atol=1e-4)

    for beams, early in ((1, None), (5, True)):
        if beams > 1 and model.config.decoder_vocab_size != model.config.vocab_size:
            needs_transformers("5.18", "beam search with two vocabularies")
        found = model.generate(**batch, num_beams=beams, early_stopping=early, max_new_tokens=12, eos_token_id=2)
        results = engine.translate_batch(sources, beam_size=beams, min_decoding_length=0, max_decoding_length=12)
        assert [result.hypotheses[0] for result in results] == [
            [target_names[i] for i in until_end(row)] for row in found.tolist()
        ]


def test_heads_of_branches_keep_the_scale_of_one_branch(tokenizer, tmp_path):
    """Without `queries_scale` the engine divides by the wrong root, and no error shows it."""
    model = build("mat-3", encoder_attention_heads=2, decoder_attention_heads=4)
    hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    stored = (tmp_path / "out" / "model.bin").read_bytes()
    assert stored.count(b"queries_scale\0") == 2 + 2 * 3  # encoder; decoder, self and cross


@pytest.mark.parametrize("quantization", ["int8", "int16", "float16", "bfloat16"])
def test_smaller_weights_score_about_the_same(quantization, tokenizer, tmp_path):
    model = build("mat-3", **UNEQUAL)
    exact = hf_deepwide.export_ctranslate2(model, tmp_path / "exact", tokenizer=tokenizer)
    small = hf_deepwide.export_ctranslate2(model, tmp_path / "small", tokenizer=tokenizer, quantization=quantization)
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("exact", "small")]
    assert sizes[1] < 0.75 * sizes[0]
    scores = [
        torch.tensor(ctranslate2.Translator(folder).score_batch([["a", "</s>"]], [["a", "e", "o"]])[0].log_probs)
        for folder in (exact, small)
    ]
    assert 0 < (scores[0] - scores[1]).abs().max() < 0.5


def test_a_model_in_bfloat16_is_computed_in_float32(tokenizer, tmp_path):
    """The engine computes in float32. In bfloat16 the model would round each product, and the scores would differ."""
    model = build("vanilla").to(torch.bfloat16)
    folder = hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    assert model.dtype == torch.bfloat16
    assert (Path(folder) / "model.bin").is_file()


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_engine_cannot_express_is_refused(case, tokenizer, tmp_path):
    with pytest.raises(UserError, match=REFUSED[case][2]) as error:
        hf_deepwide.export_ctranslate2(model_of(REFUSED[case]), tmp_path / "out", tokenizer=tokenizer)
    assert "use `generate`" in str(error.value)
    assert "adapter" not in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", JOINTS)
def test_no_way_to_join_layers_is_overlooked(field):
    """Each field that makes layers differ from those of a Transformer is refused for the engine."""
    config = VanillaTransformerConfig()
    values = accepted_values(VanillaTransformerConfig.__dataclass_fields__[field].type) or (True,)
    other = next(value for value in reversed(values) if value not in (getattr(config, field), None))
    vars(config)[field] = other
    assert list(ctranslate2_spec._inexpressible(SimpleNamespace(config=config)))


def test_a_vocabulary_for_each_side_is_refused(tokenizer, tmp_path):
    separate = copy.deepcopy(tokenizer)
    separate.separate_vocabs = True  # as a MarianTokenizer of opus-mt-tc has it
    with pytest.raises(UserError, match=r"a vocabulary for each side .*; export to ONNX"):
        hf_deepwide.export_ctranslate2(build("vanilla"), tmp_path / "out", tokenizer=separate)
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_named(tokenizer, tmp_path):
    adapted = get_peft_model(build("vanilla"), LoraConfig(target_modules=["fc1"])).base_model.model
    with pytest.raises(UserError, match=r"this model: model\.encoder\.layers\.0\.\S*fc1 is a peft\.\S+; merge"):
        hf_deepwide.export_ctranslate2(adapted, tmp_path / "out", tokenizer=tokenizer)


def test_a_posterior_is_chosen_by_its_name(tokenizer, tmp_path):
    fields = {"num_posteriors": 2, "posterior_names": ["de", "fr"], "inference_selection": "tempered"}
    model = build("latent-both", **fields)
    with pytest.raises(UserError, match="de, fr"):
        hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    scores = []
    for language in ("de", "fr"):
        folder = hf_deepwide.export_ctranslate2(model, tmp_path / language, tokenizer=tokenizer, language=language)
        scores.append(ctranslate2.Translator(folder).score_batch([["a", "</s>"]], [["a", "e"]])[0].log_probs)
    assert scores[0] != scores[1]


def test_each_module_of_the_model_keeps_its_mode(tokenizer, tmp_path):
    model = build("mat-3").train()
    model.model.encoder.eval()
    hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    assert model.model.decoder.training
    assert not model.model.encoder.training


def test_a_folder_that_computes_something_else_is_not_left_behind(tokenizer, tmp_path):
    model = build("mat-3")
    model.model.encoder.layers[0].self_attn.register_forward_hook(lambda module, inputs, output: (2 * output[0], None))
    with pytest.raises(RuntimeError, match="does not compute"):
        hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


TEXT = "One sentence each, in the source language."  # the sentence in the README


def test_the_readme_translates_as_printed(tokenizer, tmp_path, monkeypatch, capsys):
    model = build("vanilla", seed=1)
    model.generation_config.update(num_beams=3, max_length=12)
    folder = hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    printed = run_readme(Path(folder), monkeypatch, capsys)
    ids = model.generate(**tokenizer(TEXT, return_tensors="pt"), eos_token_id=2, early_stopping=True)
    assert printed == tokenizer.decode(ids[0], skip_special_tokens=True).strip() != ""


def test_the_readme_has_the_options_of_the_generation_config(tokenizer, tmp_path):
    model = build("vanilla")
    model.config.eos_token_id = [2, 7]
    model.generation_config.update(
        num_beams=3, length_penalty=0.6, bad_words_ids=[[1]], no_repeat_ngram_size=2, min_new_tokens=3
    )
    model.generation_config.suppress_tokens = [5]
    readme = ctranslate2_folder.readme(Opened(model, tokenizer, "vanilla_transformer"))
    ends, forbidden = tokenizer.convert_ids_to_tokens([2, 7]), tokenizer.convert_ids_to_tokens(5)
    for option in (
        "beam_size=3", "length_penalty=0.6", "no_repeat_ngram_size=2",
        f'suppress_sequences=[["<pad>"], ["{forbidden}"]]',
        "min_decoding_length=3", "max_input_length=40", "max_decoding_length=39", f'end_token=["</s>", "{ends[1]}"]',
    ):  # fmt: skip
        assert f"    {option},\n" in readme


def test_the_readme_has_no_room_for_a_forced_end(tokenizer, tmp_path, monkeypatch, capsys):
    model = build("vanilla", seed=1)
    model.generation_config.update(max_length=9, forced_eos_token_id=2, bad_words_ids=[[2]])  # only the forced end
    folder = hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    printed = run_readme(Path(folder), monkeypatch, capsys)
    ids = model.generate(**tokenizer(TEXT, return_tensors="pt"), eos_token_id=2)
    assert printed == tokenizer.decode(ids[0], skip_special_tokens=True).strip() != ""


def test_the_readme_begins_with_a_forced_token(tokenizer, tmp_path, monkeypatch, capsys):
    """A model without language codes can have a forced first token, as BART does."""
    model = build("vanilla", seed=1)
    model.generation_config.update(max_length=9, forced_bos_token_id=9)
    folder = hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    printed = run_readme(Path(folder), monkeypatch, capsys)
    ids = model.generate(**tokenizer(TEXT, return_tensors="pt"), eos_token_id=2)
    assert ids[0, 1] == 9
    assert printed == tokenizer.decode(ids[0], skip_special_tokens=True).strip() != ""


PAIRS = {
    "tags": {"en-de": {"tag": "<2de>"}, "en-fr": {"tag": "<2fr>"}},
    "starts": {"en-de": {"decoder_start_token_id": 36}, "en-fr": {"decoder_start_token_id": 37}},
    "one start": {"en-de": {"decoder_start_token_id": 36}, "en-fr": {"decoder_start_token_id": 36}},
}


@pytest.mark.parametrize("kind", PAIRS)
def test_the_readme_asks_for_a_language(kind, tokenizer, tmp_path, monkeypatch, capsys):
    model = build("vanilla", seed=7)
    model.config.translation_pairs = PAIRS[kind]
    model.generation_config.update(max_length=9)
    tagged = copy.deepcopy(tokenizer)
    tagged.add_special_tokens({"additional_special_tokens": ["<2de>", "<2fr>"]})
    folder = hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tagged)
    assert "en-fr" in (tmp_path / "out" / "README.md").read_text()
    printed = run_readme(Path(folder), monkeypatch, capsys)
    source_ids = ([36] if kind == "tags" else []) + tagged(TEXT)["input_ids"]
    start = PAIRS[kind]["en-de"].get("decoder_start_token_id", 2)
    ids = model.generate(torch.tensor([source_ids]), eos_token_id=2, decoder_start_token_id=start)
    assert printed == tagged.decode(ids[0], skip_special_tokens=True).strip() != ""


def test_every_id_has_a_token_of_its_own(tokenizer):
    names = vocabulary(tokenizer, 50)
    assert len(set(names)) == 50
    assert names[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))


CONVERT = """
import sys
import hf_deepwide
assert "ctranslate2" not in sys.modules
from ctranslate2.converters import TransformersConverter
from ctranslate2.converters.transformers import _MODEL_LOADERS
assert "M2M100Config" in _MODEL_LOADERS
TransformersConverter(sys.argv[1]).convert(sys.argv[2])
"""


def test_its_own_converter_takes_our_folders(tokenizer, run_code, tmp_path):
    model = build("mat-3")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    converted = run_code(CONVERT, tmp_path / "model", tmp_path / "theirs")
    assert converted.returncode == 0, converted.stderr
    hf_deepwide.export_ctranslate2(tmp_path / "model", tmp_path / "ours")
    for name in ("model.bin", "config.json", "shared_vocabulary.json"):
        assert (tmp_path / "theirs" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


def test_the_folder_is_for_the_engine_alone(tokenizer, tmp_path):
    folder = hf_deepwide.export_ctranslate2(build("vanilla"), tmp_path / "out", tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"exported to CTranslate2.*README\.md"):
        load_model(AutoModelForSeq2SeqLM, folder)


def test_a_missing_engine_is_one_line(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(UserError, match=r"hf_deepwide\[ctranslate2\]"):
        hf_deepwide.export_ctranslate2(build("vanilla"), tmp_path / "out", tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [({"quantization": "int4"}, "int4"), ({"language": "de"}, "de"), ({"tokenizer": None}, "tokenizer")],
)
def test_a_mistake_names_itself(arguments, key, tokenizer, tmp_path):
    with pytest.raises(UserError, match=key):
        hf_deepwide.export_ctranslate2(build("vanilla"), tmp_path / "out", **{"tokenizer": tokenizer, **arguments})


def test_the_names_of_quantizations_are_the_engines():
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES

    assert set(ctranslate2_folder.QUANTIZATIONS) == set(ACCEPTED_MODEL_TYPES)


def test_an_export_does_not_search_in_another_way_unsaid(tokenizer, tmp_path, caplog):
    """`generate` reads the generation config, but the engine reads the config."""
    model = build("vanilla")
    model.generation_config.begin_suppress_tokens = [5]
    hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    assert "CTranslate2 does not know these rules" in caplog.text
    assert "begin_suppress_tokens [5]" in caplog.text
    for field, value in (("decoder_start_token_id", 5), ("eos_token_id", [2, 5])):
        model = build("vanilla")
        setattr(model.generation_config, field, value)
        with pytest.raises(UserError, match=rf"{field} is 2 in its config and .*5.* in its generation config"):
            hf_deepwide.export_ctranslate2(model, tmp_path / "other", tokenizer=tokenizer)


RULES = {"no_repeat_ngram_size": 2, "suppress_tokens": [4, 6, 9, 12, 15, 20]}


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_rules_that_rank_beams_in_another_way_are_told(rule, renormalize, tokenizer, tmp_path, caplog):
    """Only these rules are reported: with normalised scores the engine's translations are those of `generate`."""
    model = build("mat-3")
    model.generation_config.update(
        num_beams=4, early_stopping=True, max_length=12, renormalize_logits=renormalize, **{rule: RULES[rule]}
    )
    hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    assert (f"than `generate`, by {rule}" in caplog.text) is not renormalize
    assert (rule in (tmp_path / "out" / "README.md").read_text().rpartition("```")[2]) is not renormalize
    settings = EvaluationArguments(num_beams=4, early_stopping=True, max_length_factor=0, max_length_offset=11)
    words = ["two", "dogs", "run", "a", "red", "tree"]
    texts = [" ".join(random.Random(seed).choices(words, k=6)) for seed in range(30)]
    own, engine = (translate(each, tokenizer, texts, settings) for each in (model.eval(), Engine(tmp_path / "out")))
    assert (own == engine) is renormalize


def test_a_penalty_of_repetition_ranks_in_another_way_always():
    for renormalize in (False, True):
        settings = GenerationConfig(num_beams=2, repetition_penalty=1.5, renormalize_logits=renormalize)
        assert "repetition_penalty" in ctranslate2_folder.other_ranking(settings)
    assert not ctranslate2_folder.other_ranking(GenerationConfig(num_beams=1, repetition_penalty=1.5))
