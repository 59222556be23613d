"""share(…, as_=…): a model that fits a class of Transformers becomes that class, and comes back bit by bit."""

import json

import ctranslate2
import pytest
import torch
from coded_languages import make_base, recipe_of, write_corpus
from huggingface_hub import ModelCard
from model_cases import build, pair
from safetensors.torch import load_file
from tiny_run import RESULTS, tiny_recipe
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    M2M100ForConditionalGeneration,
    T5Config,
)

from hf_deepwide import (
    MATForConditionalGeneration,
    VanillaTransformerForConditionalGeneration,
    export_ctranslate2,
    prune,
    share,
)
from hf_deepwide.card_text import use_of_stock
from hf_deepwide.errors import UserError
from hf_deepwide.exporting.shown_languages import shown_languages
from hf_deepwide.exporting.stock import as_stock
from hf_deepwide.models.language_pairs import Languages
from hf_deepwide.runs.model_card import write_model_card
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.vanilla_form import own_fields

PRE, MARIAN, SEPARATE = (
    {"normalize_before": True},
    {"position_embedding_type": "marian", "lm_head_bias": True},
    {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
)
LEARNED = {"position_embedding_type": "learned", "layernorm_embedding": True, "lm_head_bias": True}
FITTING = {
    "m2m_100": ("m2m_100", "vanilla", PRE),
    "m2m_100 untied": ("m2m_100", "vanilla", {**PRE, **SEPARATE, "activation_function": "gelu"}),
    "m2m_100 without biases": ("m2m_100", "vanilla", {**PRE, "attention_bias": False, "scale_embedding": False}),
    "marian": ("marian", "vanilla", MARIAN),
    "marian, two vocabularies": (
        "marian",
        "vanilla",
        {**MARIAN, "decoder_vocab_size": 37, "share_encoder_decoder_embeddings": False},
    ),
    "marian untied": ("marian", "vanilla", {**MARIAN, **SEPARATE}),
    "bart": ("bart", "vanilla", {**LEARNED, "layer_drop": 0.1}),
    "bart untied": ("bart", "vanilla", {**LEARNED, **SEPARATE}),
    "mbart": ("mbart", "vanilla", {**LEARNED, **PRE}),
}


def logits(model):
    """Logits of real target tokens. At padding M2M100 counts positions in its own way, which nothing reads."""
    batch = pair()
    with torch.no_grad():
        return model(**batch).logits[batch["labels"] != -100]


@pytest.mark.parametrize("case", FITTING)
def test_a_model_becomes_a_stock_class_and_comes_back(case):
    model_type, name, fields = FITTING[case]
    model = build(name, **fields).double()
    stock = as_stock(model, model_type)
    assert type(stock).__module__.startswith("transformers.models.")
    assert stock.config.model_type == model_type
    tolerance = 1e-5 if model_type == "m2m_100" else 1e-12  # M2M100 computes its sinusoids in float32
    torch.testing.assert_close(logits(stock), logits(model), rtol=0, atol=tolerance)

    back = type(model).from_base(stock)
    weights = back.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(weights.pop(key), tensor), key
    assert all(not tensor.any() for tensor in weights.values())  # zeros, for biases that the model does not have
    own = set(own_fields(type(model.config))) - {"attention_bias", "lm_head_bias", "init_std", "layer_drop"}
    assert {field: getattr(back.config, field) for field in own} == {
        field: getattr(model.config, field) for field in own
    }
    assert getattr(stock.config, "encoder_layerdrop", 0) == getattr(model.config, "layer_drop", 0)


def test_latent_depth_becomes_the_class_of_its_pruned_model():
    model = build("latent-both", inference_selection="hard")
    stock = as_stock(model, "m2m_100")
    assert isinstance(stock, M2M100ForConditionalGeneration)
    torch.testing.assert_close(logits(stock), logits(prune(model)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "name", "fields", "words"),
    [
        ("marian", "vanilla", PRE, ["normalize_before", "position_embedding_type", "accepted: m2m_100"]),
        ("m2m_100", "vanilla", {}, ["normalize_before", "fits none"]),
        ("m2m_100", "vanilla", {**PRE, "lm_head_bias": True}, ["lm_head_bias"]),
        ("m2m_100", "vanilla", {**PRE, "pad_token_id": 3}, ["pad_token_id"]),
        ("m2m_100", "vanilla", {**PRE, "decoder_start_token_id": 1}, ["decoder_start_token_id"]),
        ("bart", "vanilla", {**LEARNED, "tie_word_embeddings": False}, ["tie_word_embeddings"]),
        ("bart", "vanilla", {**LEARNED, **SEPARATE, "decoder_vocab_size": 39}, ["decoder_vocab_size"]),
        ("marian", "mat-3", MARIAN, ["attention_branches"]),
        ("marian", "vanilla-rezero", MARIAN, ["residual"]),
        ("marian", "vanilla-relative", MARIAN, ["max_relative_position"]),
        ("marian", "vanilla-b2t", {**MARIAN, "ffn_branches": 1}, ["residual"]),
        ("m2m_100", "vanilla-dlcl-prenorm", {}, ["layer_aggregation"]),
        ("m2m_100", "vanilla-attention", {}, ["residual"]),
        ("m2m_100", "vanilla-hyper", {"ffn_branches": 1}, ["residual"]),
        ("m2m_100", "vanilla-mhc", {"ffn_branches": 1}, ["residual"]),
        ("marian", "vanilla-rk2", MARIAN, ["encoder_solver"]),
        ("m2m_100", "lstm", {}, ["depthwise_lstm"]),
        ("m2m_100", "latent-both", {"num_posteriors": 2}, ["prune"]),
        ("t5", "vanilla", {}, ["'t5'", "marian, bart"]),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_its_fields(model_type, name, fields, words):
    with pytest.raises(UserError) as error:
        as_stock(build(name, **fields), model_type)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


ELSEWHERE = """
import json, sys
sys.modules["hf_deepwide"] = None
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
import ctranslate2
from ctranslate2.converters import TransformersConverter
texts, result = json.loads(sys.argv[1]), {}
for folder in sys.argv[2:]:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    result[folder] = [type(model).__name__, model.generate(**batch).tolist()]
    if model.config.model_type == "m2m_100":
        TransformersConverter(folder).convert(folder + "-engine")
        sources = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in texts]
        options = {"beam_size": 1, "min_decoding_length": 0, "max_decoding_length": 8}
        translations = ctranslate2.Translator(folder + "-engine").translate_batch(sources, **options)
        result["engine"] = [translation.hypotheses[0] for translation in translations]
print(json.dumps(result))
"""


def test_a_shared_stock_folder_works_without_the_package(tokenizer, run_code, tmp_path):
    models, folders = {}, []
    for model_type, name, fields in (FITTING[kind] for kind in ("m2m_100", "marian", "bart")):
        # CTranslate2's converter of these classes uses the encoder's number of heads for both stacks
        model = models[model_type] = build(name, vocab_size=36, decoder_attention_heads=2, **fields)
        model.generation_config.update(eos_token_id=2, max_length=9)
        source = tmp_path / f"run-{model_type}"
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        folders.append(share(source, tmp_path / model_type, as_=model_type, verify=model_type == "bart"))
        files = {path.name for path in (tmp_path / model_type).iterdir()}
        assert not any(name.endswith(".py") for name in files)
        card = (tmp_path / model_type / "README.md").read_text()
        assert "trust_remote_code" not in card
        assert "AutoModelForSeq2SeqLM" in card

    words = ["two dogs", "who is a tree there", "red"]
    process = run_code(ELSEWHERE, json.dumps(words), *folders)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    batch = tokenizer(words, return_tensors="pt", padding=True)
    for folder, model in zip(folders, models.values(), strict=True):
        assert found[folder][1] == model.generate(**batch).tolist()
        assert AutoTokenizer.from_pretrained(folder)(words)["input_ids"] == tokenizer(words)["input_ids"]
    expected = found[folders[0]][1]
    ends = [row.index(2, 1) if 2 in row[1:] else len(row) for row in expected]
    assert found["engine"] == [
        tokenizer.convert_ids_to_tokens(row[1:end]) for row, end in zip(expected, ends, strict=True)
    ]


@pytest.mark.parametrize("family", ["latent_depth", "vanilla_transformer"])
def test_the_card_of_a_stock_share_tells_of_what_was_written(family, tokenizer, tmp_path):
    name, fields = {
        "latent_depth": ("latent-both", {"num_posteriors": 1, "final_temperature": 0.5}),
        "vanilla_transformer": ("vanilla", {"attention_bias": False}),
    }[family]
    model, source = build(name, vocab_size=36, **PRE, **fields), tmp_path / "run"
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    recipe = tiny_recipe(source, family=family)
    write_model_card(source, recipe, {**RESULTS, "parameters": model.num_parameters(), "recipe": recipe.values}, [])
    before = ModelCard.load(source / "README.md")
    share(source, tmp_path / "out", as_="m2m_100", verify=False)
    after = ModelCard.load(tmp_path / "out" / "README.md")
    stock = M2M100ForConditionalGeneration.from_pretrained(tmp_path / "out").num_parameters()
    assert f"{model.num_parameters():,} parameters" in before.text
    assert model.num_parameters() != stock
    assert f"class `m2m_100` with {stock:,} parameters" in after.text
    assert f"{model.num_parameters():,} parameters" not in after.text
    assert f"of the family `{family}` ([" in after.text
    assert after.data.tags == [{family: "m2m_100"}.get(tag, tag) for tag in before.data.tags]
    assert family in before.data.tags


def test_code_that_a_config_names_does_not_travel_with_a_stock_class(tokenizer, tmp_path):
    model = as_stock(build("vanilla", vocab_size=36, **PRE), "m2m_100")
    model.config.auto_map = {"AutoModelForSeq2SeqLM": "you/evil--evil.Evil"}
    share(model, tmp_path / "out", tokenizer=tokenizer, verify=False)
    assert "evil" not in (tmp_path / "out" / "config.json").read_text()


def test_the_card_of_a_t5_has_the_words_before_a_source(tokenizer):
    prefixes = {
        "translation_en_to_de": {"prefix": "translate English to German: "},
        "summarization": {"prefix": "s: "},
    }
    config = T5Config(vocab_size=36, task_specific_params=prefixes)
    shown = shown_languages(Languages(config, GenerationConfig(), tokenizer), tokenizer)
    assert (shown.tag, shown.languages) == ("translate English to German: ", ("en", "de"))
    assert "'translate English to German: A sentence" in use_of_stock(None, shown).replace('"', "'")


def test_a_stock_share_of_several_branches_writes_nothing(tokenizer, tmp_path):
    model = build("mat-3", vocab_size=36)
    assert isinstance(model, MATForConditionalGeneration)
    with pytest.raises(UserError, match="attention_branches"):
        share(model, tmp_path / "out", tokenizer=tokenizer, as_="marian")
    assert not list(tmp_path.iterdir())


def test_a_vanilla_model_of_another_dtype_stays_in_it():
    model = build("vanilla", **PRE).to(torch.bfloat16)
    assert as_stock(model, "m2m_100").dtype == torch.bfloat16
    assert isinstance(model, VanillaTransformerForConditionalGeneration)


def test_a_run_of_a_stock_class_is_shared_with_its_card_and_exported(tmp_path, used_in_a_fork):
    make_base("nllb", tmp_path / "base")
    write_corpus(tmp_path)
    pairs = ["eng_Latn-deu_Latn", "deu_Latn-eng_Latn"]
    run_recipe(recipe_of(tmp_path, "m2m_100", pairs=pairs))
    run = tmp_path / "run"
    share(run, tmp_path / "shared", license="cc-by-nc-4.0")  # loads it in another process, and translates
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "shared")
    assert type(model) is M2M100ForConditionalGeneration
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, tmp_path / "shared"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    card = (tmp_path / "shared" / "README.md").read_text()
    assert "chrF" in card
    assert "of Transformers' class `m2m_100`" in card
    assert "It computes what" not in card
    assert "trust_remote_code" not in card
    assert 'from_pretrained(name, src_lang="' in card
    assert ModelCard(card).data.license == "cc-by-nc-4.0"

    tokenizer = AutoTokenizer.from_pretrained(run)
    engine = ctranslate2.Translator(export_ctranslate2(run, tmp_path / "exported"), compute_type="float32")
    tokenizer.src_lang = "eng_Latn"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a b c")["input_ids"])
    (found,) = engine.translate_batch([pieces], target_prefix=[["deu_Latn"]], beam_size=1, max_decoding_length=9)
    first = tokenizer.convert_tokens_to_ids("deu_Latn")
    batch = tokenizer("a b c", return_tensors="pt")
    ids = model.eval().generate(**batch, forced_bos_token_id=first, num_beams=1, max_new_tokens=9)[0].tolist()
    assert [token for token in tokenizer.convert_ids_to_tokens(ids[1:]) if token != "</s>"] == found.hypotheses[0]


def test_a_loaded_stock_model_is_shared(tokenizer, tmp_path):
    model = as_stock(build("vanilla", vocab_size=36, **PRE), "m2m_100")
    share(model, tmp_path / "shared", tokenizer=tokenizer, verify=False)
    assert "AutoModelForSeq2SeqLM.from_pretrained" in (tmp_path / "shared" / "README.md").read_text()
    with pytest.raises(UserError, match="Transformers' m2m_100 already; leave `as_` out"):
        share(model, tmp_path / "again", tokenizer=tokenizer, as_="m2m_100")
    with pytest.raises(UserError, match=r"cannot share a .*M2M100Model; accepted: .*model of transformers"):
        share(model.model, tmp_path / "again", tokenizer=tokenizer)
