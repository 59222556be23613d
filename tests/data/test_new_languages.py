"""Languages that a tokenizer with codes lacks: the code, its embedding, and fine-tuning beside other languages."""

import re
import shutil

import pytest
import torch
from coded_languages import KINDS, SIZES, make_base, nllb, recipe_of, token_id, write_corpus
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_run import counted_updates
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from hf_deepwide import MATConfig, MATForConditionalGeneration, add_languages, share
from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.batches import TranslationCollator
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.languages import set_codes
from hf_deepwide.data.new_languages import add_codes
from hf_deepwide.data.tokenizer import TokenizerArguments
from hf_deepwide.errors import UserError
from hf_deepwide.loading import load_model
from hf_deepwide.models.language_pairs import Languages, language_ids
from hf_deepwide.runs.build import build_model
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.runs.translation import Translation

NEW = {"nllb": "gsw_Latn", "m2m100": "gsw"}
TOKENS = {"nllb": "gsw_Latn", "m2m100": "__gsw__"}


def tables(model):
    parts = (model.get_encoder(), model.get_decoder())
    return [*(part.get_input_embeddings().weight for part in parts), model.get_output_embeddings().weight]


@pytest.mark.parametrize("related", [True, False], ids=["related", "mean"])
@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("kind", NEW)
def test_a_new_code_is_a_token_whose_embedding_is_that_of_others(kind, spare, related, tmp_path):
    model, tokenizer = make_base(kind, tmp_path, spare)
    before, old, size = language_ids(tokenizer), tables(model)[0].detach().clone(), model.config.vocab_size
    code, source = NEW[kind], KINDS[kind][3]
    add_languages(model, tokenizer, {code: source if related else None})
    ids = language_ids(tokenizer)
    assert ids == {**before, code: max(before.values()) + 1}
    assert model.config.vocab_size == max(size, ids[code] + 1)
    encoder, decoder, head = tables(model)
    assert encoder is decoder is head
    expected = old[before[source]] if related else torch.stack([old[i] for i in before.values()]).mean(0)
    torch.testing.assert_close(encoder[ids[code]], expected)
    others = [i for i in range(size) if i != ids[code]]
    assert torch.equal(encoder[others], old[others])

    model.save_pretrained(tmp_path / "new")
    tokenizer.save_pretrained(tmp_path / "new")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert language_ids(loaded) == ids
    assert loaded.convert_tokens_to_ids(TOKENS[kind]) == ids[code]
    assert TOKENS[kind] in loaded.all_special_tokens
    translate = pipeline("translation", str(tmp_path / "new"), device="cpu", max_new_tokens=4, max_length=None)
    said = translate("a b", src_lang=source, tgt_lang=code, return_tensors=True)[0]["translation_token_ids"].tolist()
    assert said[:2] == [2, ids[code]]
    read = Languages(translate.model.config, translate.model.generation_config, loaded).choose(code, source)
    assert (read.source_lang, read.settings) == (code, {"forced_bos_token_id": ids[source]})


@pytest.mark.parametrize("kind", NEW)
def test_a_new_code_leaves_other_added_tokens_alone(kind, tmp_path):
    """An example of such a token is the tag of back-translations."""
    model, tokenizer = make_base(kind, tmp_path)
    last = max(language_ids(tokenizer).values())
    while tokenizer.convert_tokens_to_ids("<bt>") == tokenizer.unk_token_id:  # <bt> becomes the first behind the codes
        behind = max(tokenizer.get_vocab().values()) >= last
        tokenizer.add_tokens(["<bt>" if behind else f"<{len(tokenizer)}>"], special_tokens=True)
    tag = tokenizer.convert_tokens_to_ids("<bt>")
    model.resize_token_embeddings(max(last, tag) + 1)
    before = tables(model)[0][tag].detach().clone()
    add_languages(model, tokenizer, {NEW[kind]: KINDS[kind][3]})
    assert len({last, tag, language_ids(tokenizer)[NEW[kind]]}) == 3
    assert tokenizer.convert_ids_to_tokens(tag) == "<bt>"
    assert torch.equal(tables(model)[0][tag], before)


def test_tables_that_are_not_tied_each_get_a_row(tmp_path):
    base, tokenizer = make_base("nllb", tmp_path, tie_word_embeddings=False)
    model = MATForConditionalGeneration.from_base(base, attention_branches=2)
    before = [table.detach().clone() for table in tables(model)]
    add_languages(model, tokenizer, {"gsw_Latn": "deu_Latn"})
    for old, new in zip(before, tables(model), strict=True):
        assert len(new) == len(old) + 1
        assert torch.equal(new[-1], old[token_id(tokenizer, "deu_Latn")])
    assert model.config.decoder_vocab_size == model.config.vocab_size == len(tokenizer)


def test_a_bias_of_the_logits_gets_an_entry_too(tmp_path):
    tokenizer = nllb(tmp_path)
    sizes = {name: SIZES[name] for name in SIZES if "layerdrop" not in name}
    model = MATForConditionalGeneration(MATConfig(**sizes, vocab_size=len(tokenizer), lm_head_bias=True))
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.arange(float(len(tokenizer))))
    add_languages(model, tokenizer, {"gsw_Latn": "deu_Latn"})
    assert model.lm_head.bias[-1] == token_id(tokenizer, "deu_Latn")
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("kind", "languages", "message"),
    [
        ("nllb", {"deu_Latn": None}, "'deu_Latn': the tokenizer knows this code already"),
        ("nllb", {"a": None}, "'a': the tokenizer has a piece of this name"),
        ("nllb", {"gsw_Latn": "de"}, "does not know 'de'; did you mean deu_Latn?"),
        ("nllb", {}, "{} is not accepted"),
        ("nllb", ["gsw_Latn"], "is not accepted; accepted: {new code: related code, or None}"),
        ("nllb", {5: None}, "5 is no code"),
        ("nllb", {"gsw_Latn": 5}, "5 is no code"),
        ("nllb", {"gsw_Latn": "deu_Latn", "": None}, "'' is no code of a language; accepted: letters"),
        ("m2m100", {"gsw": "xyz"}, "does not know 'xyz'"),
        ("m2m100", {"de": None}, "'de': the tokenizer knows this code already"),
        ("mbart", {"gsw_CH": "de_DE"}, "MBartTokenizer takes no further codes; accepted"),
    ],
)
def test_codes_that_cannot_be_added_are_refused_and_change_nothing(kind, languages, message, tmp_path):
    tokenizer = KINDS[kind][0](tmp_path)
    before = tokenizer.get_vocab()
    with pytest.raises(UserError, match=re.escape(message)):
        add_languages(None, tokenizer, languages)
    assert tokenizer.get_vocab() == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "x", "new_languages": {"gsw_Latn": 3}}, "'gsw_Latn': 3 is no code"),
        ({"path": "x", "new_languages": {1: "deu_Latn"}}, "1: 1 is no code"),
        ({"path": "x", "new_languages": {"a-b": None}}, "'a-b': 'a-b' is no code of a language; accepted: letters"),
        ({"new_languages": {"gsw_Latn": None}}, "set tokenizer.path"),
    ],
)
def test_fields_that_name_no_codes_are_refused(fields, message):
    with pytest.raises(UserError, match=f"tokenizer.new_languages.*{message}"):
        TokenizerArguments(**fields)


@pytest.mark.parametrize("more", [0, 2])
def test_rows_that_start_at_random_are_told_of(more, tmp_path, caplog):
    """Except the row of a new language, which starts as a copy, and the row of the synthetic tag, which is meant."""
    base, tokenizer = make_base("nllb", tmp_path / "base")
    tokenizer.add_tokens([f"new{number}" for number in range(more)])
    tokenizer.save_pretrained(tmp_path / "other")
    options = {"path": str(tmp_path / "other"), "new_languages": {"gsw_Latn": "deu_Latn"}}
    data = {"source_lang": "eng_Latn", "target_lang": "gsw_Latn", "synthetic": "made.jsonl", "synthetic_tag": "<bt>"}
    recipe = recipe_of(tmp_path, "m2m_100", options, **data)
    tokenizer = Translation(recipe).new_tokenizer({})
    model = build_model(recipe, tokenizer, recipe.training_arguments())
    assert model.config.vocab_size == len(tokenizer) == base.config.vocab_size + 2 + more
    assert (f"{more} rows were added, and start at random" in caplog.text) is bool(more)


@pytest.mark.parametrize("family", ["mat", "m2m_100"])
@pytest.mark.parametrize("kind", NEW)
def test_a_run_learns_a_new_language_beside_another(kind, family, tmp_path, used_in_a_fork):
    make_base(kind, tmp_path / "base")
    write_corpus(tmp_path)
    code, source, other = NEW[kind], *KINDS[kind][3:5]
    pairs = [f"{source}-{other}", f"{source}-{code}", f"{code}-{source}"]
    recipe = recipe_of(tmp_path, family, {"new_languages": {code: source}}, pairs=pairs)
    results = run_recipe(recipe)
    assert set(results["test"]["pairs"]) == set(pairs)

    run = tmp_path / "run"
    tokenizer, model = AutoTokenizer.from_pretrained(run), AutoModelForSeq2SeqLM.from_pretrained(run)
    ids = language_ids(tokenizer)
    assert model.config.model_type == family
    assert model.config.vocab_size == ids[code] + 1
    assert getattr(model.config, "translation_pairs", None) is None
    assert model.generation_config.forced_bos_token_id is None
    encoded = encode(load_parallel(recipe.data, "train"), tokenizer, recipe.data, filter=True)
    collate = TranslationCollator(tokenizer, model.config.decoder_start_token_id)
    for number, pair in enumerate(pairs):
        rows = [row for row in encoded if row["pair"] == number]
        assert len(rows) == 16
        batch = collate(rows)
        source_code, target_code = pair.split("-")
        assert set(batch["input_ids"][:, 0].tolist()) == {ids[source_code]}
        assert set(batch["labels"][:, 0].tolist()) == {ids[target_code]}
        assert set(map(tuple, batch["decoder_input_ids"][:, :2].tolist())) == {(2, ids[target_code])}

    if family == "mat":
        share(run, tmp_path / "shared")  # loads the model in another process, and translates
        run = tmp_path / "shared"
    translate = pipeline("translation", str(run), device="cpu", max_new_tokens=4, max_length=None)
    for source_code, target_code in (pair.split("-") for pair in pairs):
        words = {"src_lang": source_code, "tgt_lang": target_code}
        said = translate("a b c", return_tensors=True, **words)[0]["translation_token_ids"].tolist()
        assert said[:2] == [2, ids[target_code]]
    with pytest.raises(ValueError, match="give the target language"):
        translate("a b c", src_lang=source)


@pytest.mark.parametrize("kind", NEW)
def test_a_run_reads_a_new_language(kind, tmp_path):
    """One pair, from the new language. The saved tokenizer can be loaded, and each call names the languages."""
    make_base(kind, tmp_path / "base")
    write_corpus(tmp_path)
    code, target = NEW[kind], KINDS[kind][4]
    recipe = recipe_of(tmp_path, tokenizer={"new_languages": {code: None}}, source_lang=code, target_lang=target)
    run_recipe(recipe)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    ids = language_ids(tokenizer)
    encoded = encode(load_parallel(recipe.data, "train"), tokenizer, recipe.data, filter=True)
    assert {row["input_ids"][0] for row in encoded} == {ids[code]}
    assert {row["labels"][0] for row in encoded} == {ids[target]}
    translate = pipeline("translation", str(tmp_path / "run"), device="cpu", max_new_tokens=4, max_length=None)
    said = translate("a b", src_lang=code, tgt_lang=target, return_tensors=True)[0]["translation_token_ids"].tolist()
    assert said[:2] == [2, ids[target]]


@pytest.mark.parametrize("kind", NEW)
def test_an_interrupted_run_goes_on_with_its_new_language(kind, tmp_path):
    make_base(kind, tmp_path / "base")
    write_corpus(tmp_path)
    code, source, other = NEW[kind], *KINDS[kind][3:5]
    pairs = [f"{source}-{other}", f"{source}-{code}"]
    recipe = recipe_of(tmp_path, tokenizer={"new_languages": {code: source}}, pairs=pairs)
    recipe.values["training"] |= {"eval_steps": 1, "save_steps": 1, "bf16": False}
    results, run = run_recipe(recipe), tmp_path / "run"
    weights = load_file(run / "model.safetensors")
    (run / "results.json").unlink()
    shutil.rmtree(run / "checkpoint-2")
    with counted_updates() as made:
        assert run_recipe(recipe)["test"] == results["test"]
    assert made == [2]
    again = load_file(run / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_a_new_language_that_is_not_in_the_data_is_refused(tmp_path):
    make_base("nllb", tmp_path / "base")
    write_corpus(tmp_path)
    recipe = recipe_of(tmp_path, tokenizer={"new_languages": {"gsw_Latn": None}}, pairs=["eng_Latn-deu_Latn"])
    with pytest.raises(UserError, match="'gsw_Latn' is no language of the section data"):
        run_recipe(recipe)


def test_decoders_of_mbart_start_from_the_language_of_each_pair(tmp_path):
    _, tokenizer = make_base("mbart", tmp_path / "base")
    write_corpus(tmp_path)
    pairs = ["de_DE-fr_XX", "de_DE-en_XX"]
    recipe = recipe_of(tmp_path, pairs=pairs)
    run_recipe(recipe)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    encoded = encode(load_parallel(recipe.data, "train"), tokenizer, recipe.data, filter=True)
    starts = {row["pair"]: row["decoder_start"] for row in encoded}
    assert starts == {0: token_id(tokenizer, "fr_XX"), 1: token_id(tokenizer, "en_XX")}
    assert all(row["labels"][-2:] == [2, row["decoder_start"]] for row in encoded)
    translate = pipeline("translation", str(tmp_path / "run"), device="cpu", max_new_tokens=4, max_length=None)
    for language in ("fr_XX", "en_XX"):
        said = translate("a b", tgt_lang=language, return_tensors=True)  # all pairs have the same source language
        assert said[0]["translation_token_ids"][0] == token_id(tokenizer, language)
    with pytest.raises(ValueError, match="give the target language"):
        translate("a b")


def test_a_source_that_was_added_is_not_mistaken_for_the_bases(tmp_path):
    """M2M100's tokenizer cannot save the added source language, and must not keep the base's language instead."""
    (tokenizer_of, *_) = KINDS["m2m100"]
    tokenizer = tokenizer_of(tmp_path)
    tokenizer.src_lang = tokenizer.init_kwargs["src_lang"] = "de"
    add_codes(tokenizer, {"gsw": "de"})
    set_codes(tokenizer, DataArguments(pairs=["gsw-en", "gsw-fr"]))
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="give the source language"):
        Languages(None, None, saved).choose(None, "en")


def test_a_model_of_several_targets_forgets_the_target_of_its_base(tmp_path):
    """The base was trained on one pair, so its tokenizer names a target."""
    _, tokenizer = make_base("nllb", tmp_path / "base")
    tokenizer.src_lang, tokenizer.tgt_lang = "eng_Latn", "deu_Latn"
    tokenizer.save_pretrained(tmp_path / "base")
    write_corpus(tmp_path)
    run_recipe(recipe_of(tmp_path, pairs=["eng_Latn-deu_Latn", "deu_Latn-eng_Latn"]))
    translate = pipeline("translation", str(tmp_path / "run"), device="cpu", max_new_tokens=4, max_length=None)
    with pytest.raises(ValueError, match="give the target language"):
        translate("a b", src_lang="deu_Latn")
    with pytest.raises(ValueError, match="give the source language"):
        translate("a b", tgt_lang="deu_Latn")
    assert translate("a b", src_lang="eng_Latn", tgt_lang="deu_Latn")


def test_pairs_of_a_tokenizer_with_codes_are_checked(tmp_path):
    tokenizer = nllb(tmp_path)
    both = ["deu_Latn-eng_Latn", "eng_Latn-deu_Latn"]
    assert set_codes(tokenizer, DataArguments(pairs=both)) == {"forced_bos_token_id": None}
    one_target = set_codes(tokenizer, DataArguments(pairs=both[:1]))
    assert one_target == {"forced_bos_token_id": token_id(tokenizer, "eng_Latn")}
    with pytest.raises(UserError, match=r"^data.pairs: unknown language code 'de'; did you mean deu_Latn\?.*new_lang"):
        set_codes(tokenizer, DataArguments(pairs=["eng_Latn-de"]))
    with pytest.raises(UserError, match=r"data\.language_tag is decoder, but the NllbTokenizer has language codes"):
        set_codes(tokenizer, DataArguments(pairs=both, language_tag="decoder"))
    with pytest.raises(UserError, match=r"data\.posteriors is target"):
        set_codes(tokenizer, DataArguments(pairs=both, posteriors="target"))


def test_a_token_that_is_no_code_is_no_language(tmp_path):
    _, tokenizer = make_base("nllb", tmp_path)
    before = language_ids(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<bt>"]}, replace_extra_special_tokens=False)
    assert "<bt>" in tokenizer.get_vocab()
    assert language_ids(tokenizer) == before


@pytest.mark.parametrize("trained", [False, True])
def test_an_adapter_without_the_embedding_of_its_language_is_pointed_out(trained, tmp_path, caplog):
    """The base has spare rows, so nothing is resized, and PEFT does not notice that a row has changed."""
    model, tokenizer = make_base("nllb", tmp_path / "base", spare=3)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    add_languages(model, tokenizer, {"gsw_Latn": "deu_Latn"})
    if trained:
        model.save_pretrained(tmp_path / "larger")
        tokenizer.save_pretrained(tmp_path / "larger")
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "larger")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="SEQ_2_SEQ_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    load_model(AutoModelForSeq2SeqLM, tmp_path / "adapter")
    assert ("has no embeddings of them" in caplog.text) is not trained
    assert ("gsw_Latn" in caplog.text) is not trained
