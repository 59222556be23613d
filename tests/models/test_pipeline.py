"""pipeline("translation") gives what calls of the tokenizer and `generate` give, for every kind of model."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from sentence_pieces import train_pieces, write_vocabulary
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertTokenizer,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    NllbTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
    pipelines,
)
from transformers.pipelines.pt_utils import KeyDataset
from watched_generation import watch_generation

from hf_deepwide import registration
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.families import FAMILIES
from hf_deepwide.models import language_pairs, pipeline_translation
from hf_deepwide.models.pipeline_translation import TranslationPipeline

TEXTS = ["two dogs run", "a man in a red coat sits by the water", "who is there", "trees"]
CORPUS = [*TEXTS, "the dogs sit in the red water", "a tree by the coat", "a man runs there", "who sits"] * 3
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 48,
    "init_std": 0.6,  # large weights: every source gets its own translation
}
QUICK = {"num_beams": 2, "max_new_tokens": 8}


def build(model_class, config_class, tokenizer, seed=33, **fields):
    """A random model that fits a tokenizer. Its generation config sets only token ids."""
    torch.manual_seed(seed)
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
        "forced_eos_token_id": None,
    }
    return model_class(config_class(**{**ids, **fields})).eval()


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(CORPUS, TokenizerArguments(vocab_size=80))


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    """A SentencePiece model, and its vocabulary with Marian's special tokens, on disk."""
    folder = tmp_path_factory.mktemp("spm")
    _, words = train_pieces(folder, CORPUS, 32)
    write_vocabulary(folder / "marian.json", ["</s>", "<unk>", *words, "<pad>"])
    write_vocabulary(folder / "tagged.json", [">>deu<<", ">>fra<<", "</s>", "<unk>", *words, "<pad>"])
    write_vocabulary(folder / "m2m.json", ["<s>", "<pad>", "</s>", "<unk>", *words])
    return folder


@pytest.fixture(scope="module")
def marian_tokenizer(spm):
    return MarianTokenizer(f"{spm}/m.model", f"{spm}/m.model", f"{spm}/marian.json")


@pytest.fixture(scope="module")
def nllb(bpe):
    """A model and an NLLB tokenizer made of our BPE, for two languages."""
    bpe = json.loads(bpe.backend_tokenizer.to_str())["model"]
    vocabulary = {**bpe["vocab"], "deu": len(bpe["vocab"])}  # an ordinary token, not a language code
    merges = [tuple(merge) for merge in bpe["merges"]]
    tokenizer = NllbTokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=["eng_Latn", "deu_Latn"])
    return SimpleNamespace(
        model=build(M2M100ForConditionalGeneration, M2M100Config, tokenizer, **SIZES), tokenizer=tokenizer
    )


@pytest.fixture(scope="module")
def kinds(bpe, marian_tokenizer):
    """`{name: (model, tokenizer)}`: each of our families, and two models of Transformers."""
    # with half of each layer, or a gate that keeps the embeddings, all texts get the same translation
    fields = {"latent_depth": {"inference_selection": "hard"}, "depthwise_lstm": {"forget_bias_init": 0}}
    built = {
        name: (build(family.lm, family.config, bpe, 48, **SIZES, **fields.get(name, {})), bpe)
        for name, family in FAMILIES.items()
    }
    built["bart"] = (build(BartForConditionalGeneration, BartConfig, bpe, **SIZES), bpe)
    built["marian"] = (build(MarianMTModel, MarianConfig, marian_tokenizer, **SIZES), marian_tokenizer)
    return built


@pytest.fixture(scope="module")
def mat(kinds):
    model, tokenizer = kinds["mat"]
    return pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", **QUICK)


def by_hand(model, tokenizer, text, prefix="", **options):
    """The expected translations: the tokenizer and `generate`, called directly."""
    encoded = tokenizer(prefix + text, return_tensors="pt")
    ids = model.generate(encoded["input_ids"], attention_mask=encoded["attention_mask"], **{**QUICK, **options})
    return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]


def texts_of(results):
    return [result["translation_text"] for result in results]


@pytest.mark.parametrize("kind", [*FAMILIES, "bart", "marian"])
def test_equals_generation_by_hand(kinds, kind):
    model, tokenizer = kinds[kind]
    translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", **QUICK)
    expected = [by_hand(model, tokenizer, text)[0] for text in TEXTS]
    assert len(set(expected)) == len(TEXTS)
    assert texts_of(translate(TEXTS)) == expected
    assert texts_of(translate(TEXTS, batch_size=3)) == expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_decodes_the_fast_way(kinds, kind, monkeypatch):
    counts = watch_generation(monkeypatch)
    model, tokenizer = kinds[kind]
    pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", **QUICK)(TEXTS)
    assert counts["twins"] == counts["generate"] > 0


def test_every_kind_of_input(mat):
    one = [mat(text) for text in TEXTS]
    assert [list(result[0]) for result in one] == [["translation_text"]] * len(TEXTS)
    flat = [result[0] for result in one]
    assert mat(TEXTS) == mat(tuple(TEXTS)) == flat
    table = Dataset.from_dict({"en": TEXTS})
    assert mat(table["en"]) == flat  # a Column
    for stream in (
        KeyDataset(table, "en"),
        (text for text in TEXTS),
        map(str, TEXTS),
        dict.fromkeys(TEXTS).keys(),
        (row["en"] for row in table.to_iterable_dataset()),
    ):
        results = mat(stream, batch_size=2)
        assert not isinstance(results, list)
        assert list(results) == one


def test_lists_are_translated_in_batches_of_texts_of_one_length(mat, monkeypatch):
    """The longest texts come first, and each batch is within the limits. With `batch_size=1` each text is alone."""
    texts = [" ".join(["dog"] * n) for n in (1, 5, 3, 1, 7, 2, 4)]
    expected = [mat(text)[0] for text in texts]
    shapes, generate = [], type(mat.model).generate

    def watch(self, **kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))
        return generate(self, **kwargs)

    monkeypatch.setattr(type(mat.model), "generate", watch)
    monkeypatch.setattr(pipeline_translation, "BATCH_TEXTS", 3)
    assert mat(texts) == expected
    assert [rows for rows, _ in shapes] == [3, 3, 1]
    lengths = [length for _, length in shapes]
    assert lengths == sorted(lengths, reverse=True)
    shapes.clear()
    monkeypatch.setattr(pipeline_translation, "BATCH_TOKENS", max(lengths))
    assert mat(texts) == expected
    assert all(rows * length <= max(lengths) for rows, length in shapes)
    shapes.clear()
    assert mat(texts, batch_size=1) == expected
    assert len(shapes) == len(texts)
    several = mat(texts, num_return_sequences=2)
    assert [each[0] for each in several] == expected


def test_nothing_to_translate(mat):
    assert mat([]) == []
    assert list(mat(KeyDataset(Dataset.from_dict({"en": []}), "en"))) == []
    assert next(mat(iter([])), "end") == "end"


def test_arguments_that_count_rows_get_one_text_each(mat):
    """In a sorted batch, a function of the row number would get another row's number."""
    rows = []

    def allowed(row, tokens):
        rows.append(row)
        return list(range(4, 20))

    assert len(mat(TEXTS, prefix_allowed_tokens_fn=allowed)) == len(TEXTS)
    assert set(rows) == {0}


def test_an_empty_text_where_the_tokenizer_has_no_end(kinds):
    """BERT's tokenizer, for example. Encoder-decoder models can be made from BERT."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({word for text in TEXTS for word in text.split()})]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    parts = [BertConfig(vocab_size=len(words), **sizes) for _ in range(2)]
    model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*parts))
    model.generation_config.update(decoder_start_token_id=2, eos_token_id=3, pad_token_id=0)
    model.config.decoder_start_token_id, model.config.pad_token_id, model.config.eos_token_id = 2, 0, 3
    translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=4)
    alone = translate("two dogs run")
    assert translate(["two dogs run", ""]) == [*alone, {"translation_text": ""}]


def test_generators_are_not_read_ahead(mat):
    read = []
    results = mat(read.append(text) or text for text in TEXTS)
    next(results)
    assert len(read) <= 2


def test_generate_arguments_per_pipeline_and_per_call(kinds):
    model, tokenizer = kinds["mat"]
    translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", num_beams=3, max_new_tokens=5)
    assert (
        translate(TEXTS[1])[0]["translation_text"]
        == by_hand(model, tokenizer, TEXTS[1], num_beams=3, max_new_tokens=5)[0]
    )
    several = translate(TEXTS[:2], max_new_tokens=7, num_return_sequences=2, batch_size=2)
    assert [texts_of(result) for result in several] == [
        by_hand(model, tokenizer, text, num_beams=3, max_new_tokens=7, num_return_sequences=2) for text in TEXTS[:2]
    ]
    config = GenerationConfig(num_beams=1, max_new_tokens=3)
    plain = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
    assert plain("trees", generation_config=config, return_tensors=True)[0]["translation_token_ids"].shape == (4,)


def test_defaults_where_nothing_is_said(kinds, monkeypatch):
    model, tokenizer = kinds["mat"]
    calls = []
    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda self, **kw: calls.append(kw) or generate(self, **kw))
    translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
    translate("trees")
    assert (calls[-1]["num_beams"], calls[-1]["max_new_tokens"]) == (4, 48)  # 48 positions; 256 by default
    translate("trees", num_beams=1, max_length=5)
    assert calls[-1]["num_beams"] == 1
    assert "max_new_tokens" not in calls[-1]
    monkeypatch.setattr(model.generation_config, "num_beams", 1)
    monkeypatch.setattr(model.generation_config, "max_length", 6)
    translate("trees")
    assert not {"num_beams", "max_new_tokens"} & set(calls[-1])


def test_text_and_tensors(mat):
    text = mat("trees")[0]["translation_text"]
    (only,) = mat("trees", return_tensors=True)
    assert list(only) == ["translation_token_ids"]
    assert mat.tokenizer.decode(only["translation_token_ids"], skip_special_tokens=True) == text
    (both,) = mat("trees", return_tensors=True, return_text=True)
    assert both["translation_text"] == text
    assert torch.equal(both["translation_token_ids"], only["translation_token_ids"])
    assert mat("trees", return_text=False) == [{}]


def test_clean_up_is_off_unless_asked_for(kinds, monkeypatch):
    model, tokenizer = kinds["mat"]
    asked = []
    decode = type(tokenizer).decode
    monkeypatch.setattr(
        type(tokenizer),
        "decode",
        lambda self, ids, **kw: asked.append(kw["clean_up_tokenization_spaces"]) or decode(self, ids, **kw),
    )
    translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", **QUICK)
    translate("trees")
    translate("trees", clean_up_tokenization_spaces=True)
    assert asked == [False, True]


def test_too_long_a_source(mat):
    text = "red water " * 60
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the model takes at most 48.*truncation=True"):
        mat(text)
    ids = mat.tokenizer(text, truncation=True, max_length=48, return_tensors="pt")["input_ids"]
    expected = mat.tokenizer.decode(mat.model.generate(ids, **QUICK)[0], skip_special_tokens=True)
    for truncation in (True, "longest_first"):
        assert mat(text, truncation=truncation)[0]["translation_text"] == expected
    with pytest.raises(ValueError, match="longest_first"):
        mat(text, truncation="some")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (3, "int 3; accepted: a string, a list"),
        (None, "NoneType None"),
        (b"two", "bytes b'two'"),
        ({"text": "two"}, "dict"),
        (["two", 3], "item 1, int 3"),
        ([["two"]], r"item 0, list \['two'\]"),
        ((x for x in ("two", None)), "item 1, NoneType"),
        (Dataset.from_dict({"en": TEXTS}), r"item 0, dict .* KeyDataset\(dataset, column\)"),
        (KeyDataset(Dataset.from_dict({"en": [1]}), "en"), "item 0, int 1"),
    ],
)
def test_inputs_that_are_not_strings(mat, inputs, message):
    with pytest.raises(ValueError, match=message):
        list(mat(inputs))


def test_codes_per_pipeline_and_per_call(nllb):
    model, tokenizer = nllb.model, nllb.tokenizer
    tokenizer.src_lang = "eng_Latn"
    forced = tokenizer.convert_tokens_to_ids("deu_Latn")
    expected = [by_hand(model, tokenizer, text, forced_bos_token_id=forced)[0] for text in TEXTS]
    tokenizer.src_lang = "deu_Latn"
    forced = tokenizer.convert_tokens_to_ids("eng_Latn")
    reverse = [by_hand(model, tokenizer, text, forced_bos_token_id=forced)[0] for text in TEXTS]
    assert expected != reverse
    fixed = pipeline(
        "translation",
        model=model,
        tokenizer=tokenizer,
        src_lang="eng_Latn",
        tgt_lang="deu_Latn",
        device="cpu",
        **QUICK,
    )
    assert texts_of(fixed(TEXTS, batch_size=3)) == texts_of(fixed(TEXTS)) == expected
    assert texts_of(fixed(TEXTS, src_lang="deu_Latn", tgt_lang="eng_Latn")) == reverse
    assert texts_of(fixed(TEXTS)) == expected  # the previous call left no languages behind
    assert tokenizer.src_lang == "deu_Latn"
    named = pipeline("translation_eng_Latn_to_deu_Latn", model=model, tokenizer=tokenizer, device="cpu", **QUICK)
    assert texts_of(named(TEXTS)) == expected


def test_codes_of_a_legacy_tokenizer_are_forced(nllb):
    """The language code follows the end token of a target, but the decoder still starts with the end token."""
    tokenizer = nllb.tokenizer
    legacy = NllbTokenizer(
        vocab=tokenizer._vocab, merges=tokenizer._merges, extra_special_tokens=["eng_Latn", "deu_Latn"],
        legacy_behaviour=True,
    )  # fmt: skip
    code = legacy.convert_tokens_to_ids("deu_Latn")
    with language_pairs.speaking(legacy, "eng_Latn", "deu_Latn"):
        assert legacy(text_target="")["input_ids"][-1] == code
        assert language_pairs.target_settings(legacy) == {"forced_bos_token_id": code}


def test_languages_saved_with_the_tokenizer(nllb, tmp_path):
    tokenizer = nllb.tokenizer
    saved = NllbTokenizer(
        vocab=tokenizer._vocab, merges=tokenizer._merges, extra_special_tokens=["eng_Latn", "deu_Latn"],
        src_lang="eng_Latn", tgt_lang="deu_Latn",
    )  # fmt: skip
    saved.save_pretrained(tmp_path)
    nllb.model.save_pretrained(tmp_path)
    translate = pipeline("translation", model=str(tmp_path), device="cpu", **QUICK)
    assert translate(TEXTS) == translate(TEXTS, src_lang="eng_Latn", tgt_lang="deu_Latn")
    assert translate(TEXTS) != translate(TEXTS, tgt_lang="eng_Latn")


def test_missing_and_unknown_languages(nllb):
    translate = pipeline("translation", model=nllb.model, tokenizer=nllb.tokenizer, device="cpu", src_lang="eng_Latn")
    with pytest.raises(ValueError, match=r"give the target language .*; known: deu_Latn, eng_Latn$"):
        translate("trees")
    with pytest.raises(ValueError, match=r"unknown target language 'deu'; did you mean deu_Latn\? known: deu"):
        translate("trees", tgt_lang="deu")  # in the vocabulary, but not a language code
    with pytest.raises(ValueError, match=r"unknown source language 'fra_Latn'"):
        translate("trees", src_lang="fra_Latn", tgt_lang="deu_Latn")


def test_m2m100_tokenizer(spm):
    tokenizer = M2M100Tokenizer(f"{spm}/m2m.json", f"{spm}/m.model")
    size = len(tokenizer) + len(tokenizer.lang_code_to_id)
    model = build(M2M100ForConditionalGeneration, M2M100Config, tokenizer, **{**SIZES, "vocab_size": size})
    translate = pipeline("translation_en_to_ro", model=model, tokenizer=tokenizer, device="cpu", **QUICK)
    tokenizer.src_lang = "en"
    forced = tokenizer.get_lang_id("ro")
    expected = [by_hand(model, tokenizer, text, forced_bos_token_id=forced)[0] for text in TEXTS]
    assert texts_of(translate(TEXTS, batch_size=2)) == expected
    with pytest.raises(ValueError, match=r"unknown target language 'xx'.*known: af, am, ar"):
        translate("trees", tgt_lang="xx")


def test_tags_before_the_source(spm):
    tokenizer = MarianTokenizer(f"{spm}/m.model", f"{spm}/m.model", f"{spm}/tagged.json")
    model = build(MarianMTModel, MarianConfig, tokenizer, **SIZES)
    translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", **QUICK)
    for language in ("deu", "fra"):
        expected = by_hand(model, tokenizer, TEXTS[1], prefix=f">>{language}<< ")
        assert texts_of(translate(TEXTS[1], tgt_lang=language)) == expected
        assert texts_of(translate(f">>{language}<< {TEXTS[1]}")) == expected
        assert texts_of(translate(f">>{language}<< {TEXTS[1]}", tgt_lang=language)) == expected
    with pytest.raises(ValueError, match="unknown target language 'spa'; known: deu, fra"):
        translate("trees", tgt_lang="spa")


def test_a_tag_of_another_language_than_the_asked_one_is_text(spm):
    tokenizer = MarianTokenizer(f"{spm}/m.model", f"{spm}/m.model", f"{spm}/tagged.json")
    languages = language_pairs.Languages(SimpleNamespace(), SimpleNamespace(), tokenizer)
    tags = {name: tokenizer.convert_tokens_to_ids(f">>{name}<<") for name in ("deu", "fra")}
    for asked, expected in (
        ("deu", (tags["deu"], "trees")),
        (None, (tags["deu"], "trees")),
        ("fra", (tags["fra"], ">>deu<< trees")),
    ):
        assert languages.tag_and_text(languages.choose(None, asked), ">>deu<< trees") == expected


def test_languages_are_not_silently_ignored(mat, monkeypatch):
    warnings = []
    monkeypatch.setattr(language_pairs.logger, "warning_once", warnings.append)
    expected = mat("trees")
    assert not warnings
    assert mat("trees", tgt_lang="de") == expected
    assert "…-de are not used" in warnings[0]


def test_prefix_and_settings_of_t5(bpe):
    tasks = {
        "translation_en_to_de": {"prefix": "the dogs : ", "num_beams": 3, "max_length": 6},
        "translation_en_to_fr": {"prefix": "a tree : ", "max_length": 9},
    }
    fields = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "initializer_factor": 8.0}
    model = build(T5ForConditionalGeneration, T5Config, bpe, task_specific_params=tasks, **fields)
    german = by_hand(model, bpe, TEXTS[1], "the dogs : ", num_beams=3, max_length=6, max_new_tokens=None)
    french = by_hand(model, bpe, TEXTS[1], "a tree : ", num_beams=4, max_length=9, max_new_tokens=None)
    assert german != french
    translate = pipeline("translation_en_to_de", model=model, tokenizer=bpe, device="cpu")
    assert texts_of(translate(TEXTS[1])) == german
    assert texts_of(translate(TEXTS[1], tgt_lang="fr")) == french
    assert len(translate(TEXTS[1], num_beams=2, num_return_sequences=2)) == 2


def test_models_that_cannot_translate(bpe, kinds):
    model = kinds["mat"][0]
    with pytest.raises(ValueError, match="encoder-decoder model that can generate, got MATModel"):
        TranslationPipeline(model.model, tokenizer=bpe)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        TranslationPipeline(model)


def test_a_model_in_training_translates_without_dropout(kinds):
    model, tokenizer = kinds["mat"]
    expected = by_hand(model, tokenizer, TEXTS[1])
    model.train()
    translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", **QUICK)
    assert texts_of(translate(TEXTS[1])) == expected


def test_registration():
    registration.register()  # a second call changes nothing
    registry = pipelines.PIPELINE_REGISTRY
    assert "translation" not in getattr(pipelines, "REMOVED_TASKS", {})
    assert pipelines.check_task("translation_en_to_de")[0] == "translation"
    assert pipelines.check_task("ner")[0] == "token-classification"  # Transformers' own aliases stay
    assert "translation" in registry.get_supported_tasks()
    for task in ("translation_en", "translate", "summarization"):
        with pytest.raises(KeyError):
            pipelines.check_task(task)


def test_saving_a_pipeline_leaves_the_checkpoint_plain(kinds, tmp_path):
    model, tokenizer = kinds["marian"]
    pipeline("translation", model=model, tokenizer=tokenizer, device="cpu").save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
    again = pipeline("translation", model=str(tmp_path), device="cpu", **QUICK)
    assert texts_of(again(TEXTS)) == [by_hand(model, tokenizer, text)[0] for text in TEXTS]
