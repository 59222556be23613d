"""Languages: all ways to choose languages give the model the same input; errors name the unknown language."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace

import pytest
import torch
from coded_languages import KINDS, SIZES, make_base, token_id
from model_cases import build
from paired_languages import build as build_pairs
from tiny_run import tiny_recipe
from transformers import BartConfig, BartForConditionalGeneration, pipeline

from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.forced_decoding import score_targets
from hf_deepwide.evaluation.translate import generate_ids, translate
from hf_deepwide.families import FAMILIES
from hf_deepwide.models import language_pairs
from hf_deepwide.models.language_names import nearest
from hf_deepwide.models.language_pairs import Languages, language_ids
from hf_deepwide.models.plain_text import MOST_CHARACTERS
from hf_deepwide.runs.build import build_model

SEARCH = EvaluationArguments(num_beams=2, max_length_factor=0, max_length_offset=6)
QUICK = {"num_beams": 2, "length_penalty": 1.0, "early_stopping": True, "max_new_tokens": 6}
TEXTS = ["a b c", "d", "", "b b a d c a"]


def ids_of(results):
    return [result["translation_token_ids"].tolist() for result in results]


def code_model(kind, folder):
    make, model_class, config_class, source, target, _ = KINDS[kind]
    tokenizer = make(folder)
    size = max(tokenizer.get_vocab().values()) + 1 + len(getattr(tokenizer, "lang_code_to_id", {}))
    torch.manual_seed(1)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = model_class(config_class(vocab_size=size, init_std=0.6, **ids, **SIZES))
    model.generation_config.forced_eos_token_id = None
    return model.eval(), tokenizer, source, target


def test_threads_do_not_hear_each_other_s_languages(tmp_path):
    """While another thread has set the tokenizer's languages, a thread waits, and then finds the saved languages."""
    model, tokenizer, source, target = code_model("nllb", tmp_path)
    language_pairs.set_languages(tokenizer, source, target)
    languages = Languages(model.config, model.generation_config, tokenizer)
    with ThreadPoolExecutor(1) as other:
        with language_pairs.speaking(tokenizer, target, source):
            asked = other.submit(languages.choose)
            with pytest.raises(FutureTimeout):
                asked.result(timeout=0.2)
        choice = asked.result(timeout=60)
    assert (choice.source_lang, choice.target_lang) == (source, target)
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == (source, target)


@pytest.mark.parametrize("kind", KINDS)
def test_obeys_codes_in_every_interface(kind, tmp_path):
    model, tokenizer, source, target = code_model(kind, tmp_path)
    state = tokenizer.src_lang, tokenizer.tgt_lang, model.generation_config.to_dict()
    made = {"model": model, "tokenizer": tokenizer, "device": "cpu", **QUICK}
    asked = {"src_lang": source, "tgt_lang": target}
    expected = generate_ids(model, tokenizer, TEXTS, SEARCH, source_lang=source, target_lang=target)
    assert token_id(tokenizer, target) in expected[0][:1] or kind == "mbart"
    ways = [
        pipeline("translation", **made)(TEXTS, return_tensors=True, **asked),
        pipeline("translation", **made, **asked)(TEXTS, return_tensors=True, batch_size=3),
        pipeline(f"translation_{source}_to_{target}", **made)(TEXTS, return_tensors=True),
        pipeline(f"translation_{target}_to_{source}", **made, **asked)(TEXTS, return_tensors=True),
        pipeline("translation", **made, src_lang=target, tgt_lang=source)(TEXTS, return_tensors=True, **asked),
    ]
    for way in ways:
        assert [ids[1:] for ids in ids_of(way) if len(ids) > 2] == [ids for ids in expected if ids]
    assert expected != generate_ids(model, tokenizer, TEXTS, SEARCH, source_lang=target, target_lang=source)
    assert state == (tokenizer.src_lang, tokenizer.tgt_lang, model.generation_config.to_dict())
    saved = "decoder_start_token_id" if kind == "mbart" else "forced_bos_token_id"
    setattr(model.generation_config, saved, token_id(tokenizer, target))
    assert generate_ids(model, tokenizer, TEXTS, SEARCH, source_lang=source) == expected, "the default"


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_codes_are_refused_in_every_way_of_asking(kind, tmp_path):
    model, tokenizer, source, target = code_model(kind, tmp_path)
    made = {"model": model, "tokenizer": tokenizer, "device": "cpu"}
    wrong = {"nllb": "de", "m2m100": "deu_Latn"}.get(kind, "deu")
    for ask in (
        lambda: translate(model, tokenizer, TEXTS, SEARCH, source_lang=wrong, target_lang=target),
        lambda: pipeline("translation", **made)("a", src_lang=wrong, tgt_lang=target),
        lambda: pipeline("translation", **made, src_lang=wrong),
        lambda: pipeline(f"translation_{wrong}_to_{target}", **made, src_lang=source),
    ):
        with pytest.raises(ValueError, match=f"unknown source language '{wrong}'; did you mean {source}"):
            ask()
    with pytest.raises(UserError, match="give the source language"):
        translate(model, tokenizer, TEXTS, SEARCH, target_lang=target)
    with pytest.raises(UserError, match="a string"):
        translate(model, tokenizer, TEXTS, SEARCH, source_lang=3)


@pytest.mark.parametrize(
    ("asked", "known", "meant"),
    [
        ("en", ["eng_Latn", "ewe_Latn", "est_Latn"], ["eng_Latn"]),
        ("es", ["est_Latn", "spa_Latn"], ["spa_Latn"]),
        ("zh-CN", ["zho_Hans", "zho_Hant", "zul_Latn"], ["zho_Hans", "zho_Hant"]),
        ("de", ["de_DE", "cs_CZ"], ["de_DE"]),
        ("pol_Latn", ["pl", "pt", "po"], ["pl"]),
        ("DE", ["de", "en"], ["de"]),
        ("frx", ["fr", "en"], ["fr"]),
        ("qqq", ["fr", "en"], []),
    ],
)
def test_the_nearest_languages_are_those_of_the_same_language(asked, known, meant):
    assert sorted(nearest(asked, known)) == meant


def test_pairs_of_our_models_name_what_may_have_been_meant():
    model, tokenizer = build_pairs("mat", "source")
    for ask in (
        lambda: translate(model, tokenizer, TEXTS, SEARCH, target_lang="fra"),
        lambda: pipeline("translation_en_to_fra", model=model, tokenizer=tokenizer, device="cpu"),
        lambda: pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", tgt_lang="fra"),
    ):
        with pytest.raises(ValueError, match=r"did you mean fr.*known: en-de, en-fr"):
            ask()


def test_ignores_tags_in_texts():
    model, tokenizer = build_pairs("mat", "source")
    made = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", **QUICK)
    text = "<2fr> the dogs </s> sit"
    (german,) = generate_ids(model, tokenizer, [text], SEARCH, target_lang="de")
    assert ids_of(made(text, tgt_lang="de", return_tensors=True))[0][1:] == german
    ids = made.preprocess(text, tgt_lang="de")["input_ids"][0].tolist()
    controls = {tokenizer.convert_tokens_to_ids(tag) for tag in ("<2de>", "<2fr>", "</s>")}
    expected = [tokenizer.convert_tokens_to_ids("<2de>"), tokenizer.eos_token_id]
    assert [i for i in ids if i in controls] == expected


@pytest.mark.parametrize("pairs", [["en-de"], {"ende": {}}, {"en-de": "<2de>"}])
def test_pairs_of_another_form_are_refused(pairs):
    model, tokenizer = build_pairs("mat", "source")
    model.config.translation_pairs = pairs
    with pytest.raises(UserError, match="translation_pairs are not of the form"):
        translate(model, tokenizer, TEXTS, SEARCH)


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(["a b c d dogs", "x y z </s>"] * 4, TokenizerArguments(vocab_size=40))


def plain_model(bpe, family="mat", **fields):
    torch.manual_seed(3)
    sizes = {**SIZES, "max_position_embeddings": 16, "init_std": 0.6, **fields}
    sizes = {name: value for name, value in sizes.items() if "layerdrop" not in name}
    model = FAMILIES[family].lm(FAMILIES[family].config(vocab_size=len(bpe), **sizes)).eval()
    model.generation_config.min_length = 400  # a model that does not end
    return model


def test_a_model_of_one_pair_says_that_it_was_asked_for_another(bpe, monkeypatch):
    said = []
    monkeypatch.setattr(language_pairs.logger, "warning_once", said.append)
    model = plain_model(bpe)
    model.config.source_lang, model.config.target_lang = "de", "en"
    for right in ("translation", "translation_de_to_en"):
        pipeline(right, model=model, tokenizer=bpe, device="cpu")("a", max_new_tokens=2)
    translate(model, bpe, ["a"], SEARCH, source_lang="de", target_lang="en")
    assert said == []
    pipeline("translation_fr_to_en", model=model, tokenizer=bpe, device="cpu")
    translate(model, bpe, ["a"], SEARCH, target_lang="fr")
    assert ["fr-en" in said[0], "…-fr" in said[1]] == [True, True]
    assert all("trained to translate de-en" in line for line in said)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_translation_without_end_stops_at_the_last_position(family, positions, bpe):
    extra = {"layer_selection_init": 1.0} if family == "latent_depth" else {}
    model = plain_model(bpe, family, position_embedding_type=positions, **extra)
    model.generation_config.max_length = 256  # more than the 16 positions of the model
    made = pipeline("translation", model=model, tokenizer=bpe, device="cpu", num_beams=1)
    assert len(made("a b", return_tensors=True)[0]["translation_token_ids"]) <= 17
    for limit in ({"max_length": 99}, {"max_new_tokens": 99}):
        assert len(made("a b", return_tensors=True, **limit)[0]["translation_token_ids"]) <= 17
    args = EvaluationArguments(num_beams=1, max_length_factor=9.0, max_length_offset=90)
    (ids,) = generate_ids(model, bpe, ["a b"], args)
    assert len(ids) <= 16


@pytest.mark.parametrize("kind", ["mat", "bart"])
def test_batches_translate_as_one_by_one(kind, bpe):
    """Bart counts positions from the first token of the row, even if this token is padding."""
    model = plain_model(bpe)
    if kind == "bart":
        ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
        torch.manual_seed(3)
        model = BartForConditionalGeneration(BartConfig(vocab_size=len(bpe), init_std=0.6, **ids, **SIZES)).eval()
    model.generation_config.min_length = 0
    texts = ["a b c", "", "d", "a dogs b c x y", " ", "z"]
    made = pipeline("translation", model=model, tokenizer=bpe, device="cpu", num_beams=3, max_new_tokens=9)
    for several in ({}, {"num_return_sequences": 2}):
        alone = [ids_of(made(text, return_tensors=True, **several)) for text in texts]
        for side in ("right", "left"):
            bpe.padding_side = side
            batched = made(iter(texts), return_tensors=True, batch_size=4, **several)
            assert [ids_of(results) for results in batched] == alone
    bpe.padding_side = "right"
    assert [made(text)[0]["translation_text"] for text in ("", " ", "\n", "\u3000")] == [""] * 4


def test_empty_lines_stay_empty_and_in_their_places(bpe):
    model = plain_model(bpe)
    lines = ["", "a b", " ", "c", "\t"]
    translations = translate(model, bpe, lines, SEARCH)
    assert [bool(line) for line in translations] == [False, True, False, True, False]
    assert translations[1::2] == translate(model, bpe, lines[1::2], SEARCH)
    assert translate(model, bpe, ["", " "], SEARCH) == ["", ""]


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (["a", None], ["line 2", "NoneType"]),
        (["a", 3], ["line 2", "int 3"]),
        ([b"a"], ["line 1", "bytes"]),
        ([["a"]], ["line 1", "list"]),
        (["a", "\ud800"], ["line 2", "half a surrogate"]),
        ([10**10_000], ["line 1", "bits"]),
        ({"a": "b"}, ["dict", "a list of sentences"]),
        (None, ["NoneType", "a list of sentences"]),
        (b"a", ["bytes", "a list of sentences"]),
    ],
)
def test_sources_that_are_no_text_are_refused_with_their_line(sources, words, bpe):
    with pytest.raises(UserError) as error:
        translate(plain_model(bpe), bpe, sources, SEARCH)
    assert all(word in str(error.value) for word in words)
    assert len(str(error.value)) < 200
    assert "\n" not in str(error.value)


def test_sources_may_come_from_a_generator(bpe):
    model = plain_model(bpe)
    assert translate(model, bpe, (text for text in ("a", "b")), SEARCH) == translate(model, bpe, ["a", "b"], SEARCH)


def test_texts_of_ten_megabytes_are_cut_or_refused(bpe, caplog):
    model = plain_model(bpe)
    huge = ["a" * 10_000_000, "a " * 5_000_000, "\n" * 1_000_000 + "a"]
    with caplog.at_level(logging.WARNING, logger="hf_deepwide"):
        translations = translate(model, bpe, ["b", *huge], SEARCH)
    assert len(translations) == 4
    assert "lines 2, 3, 4" in caplog.text
    made = pipeline("translation", model=model, tokenizer=bpe, device="cpu", max_new_tokens=3)
    with pytest.raises(ValueError, match=r"10000000 characters.*truncation=True"):
        made(huge[0])
    assert made(huge[0], truncation=True) == made(huge[0][:MOST_CHARACTERS], truncation=True)


def test_prefixes_of_t5_are_found_by_one_language_and_refused_by_name(bpe):
    model = plain_model(bpe)
    model.config.task_specific_params = json.loads('{"translation_en_to_de": {"prefix": "x "}, "summarization": {}}')
    languages = Languages(model.config, model.generation_config, bpe)
    assert languages.choose(None, "de").prefix == languages.choose("en").prefix == "x "
    assert languages.choose().prefix == ""
    with pytest.raises(ValueError, match="no prefix for the language pair en-fr; known: en-de"):
        languages.check("en", "fr")


def test_a_language_chooses_the_posterior_that_has_its_name(bpe, caplog):
    """The config of the model has no pairs, as in a model that `init` made."""
    model = build("latent-both", num_posteriors=2, posterior_names=["de", "en-fr"], vocab_size=len(bpe))
    made = pipeline("translation", model=model, tokenizer=bpe, device="cpu", **QUICK)
    found = {}
    for index, asked in enumerate(((None, "de"), ("en", "fr"))):
        expected = made(TEXTS, posteriors=torch.tensor([index]), batch_size=1)
        assert made(TEXTS, src_lang=asked[0], tgt_lang=asked[1]) == expected
        found[index] = translate(model, bpe, TEXTS, SEARCH, *asked)
        assert found[index] == [each["translation_text"] for each in expected]
        scored = score_targets(model, bpe, TEXTS[:1], found[index][:1], SEARCH, *asked)
        assert scored != score_targets(model, bpe, TEXTS[:1], found[index][:1], SEARCH, "de" if index else "en", "fr")
    assert "not used" not in caplog.text
    for ask in (translate, lambda *words: score_targets(*words[:3], TEXTS, SEARCH)):
        with pytest.raises(UserError, match=r"2 posteriors.*give the target language.*known: de, en-fr"):
            ask(model, bpe, TEXTS, SEARCH)
    model.config.posterior_names = None
    with pytest.raises(UserError, match=r"2 posteriors.*write posterior_names into its config\.json"):
        translate(model, bpe, TEXTS, SEARCH, target_lang="de")


@pytest.mark.parametrize(("positions", "expected"), [(64, 64), (256, 128)])
def test_a_run_asks_for_no_more_positions_than_its_model_has(positions, expected, tmp_path):
    """The recipe allows 128 tokens per sentence. The config also names the only pair, so that others are noticed."""
    recipe = tiny_recipe(tmp_path, model={"max_position_embeddings": positions, "position_embedding_type": "learned"})
    tokenizer = train_tokenizer(["a b c"], TokenizerArguments(vocab_size=20))
    model = build_model(recipe, tokenizer, recipe.training_arguments())
    assert model.generation_config.max_length == expected
    assert (model.config.source_lang, model.config.target_lang) == ("de", "en")


def test_trained_pairs_may_have_underscores_around_their_codes(tmp_path):
    _, tokenizer = make_base("m2m100", tmp_path)
    one, other = sorted(language_ids(tokenizer))[:2]
    for pair in (f"{one}-{other}", f"__{one}__-__{other}__", f"__{one}__-{other}"):
        config = SimpleNamespace(trained_pairs=[pair])
        assert Languages(config, SimpleNamespace(), tokenizer).trained_pairs == [(one, other)]
