"""Language pairs in use: the pipeline, `translate`, pruning and sharing do what tags and posteriors say by hand."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel, pipeline

from hf_deepwide import prune, share
from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.languages import add_tags, translation_pairs
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.translate import EvaluationArguments, translate
from hf_deepwide.families import FAMILIES
from hf_deepwide.models.language_pairs import pair_settings

TEXTS = ["two dogs run", "a man in a red coat sits by the water", "who is there"]
CORPUS = [*TEXTS, "the dogs sit in the red water", "a tree by the coat", "a man runs there", "who sits"] * 3
PAIRS = ["en-de", "en-fr"]
LENGTH = 7
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 48,
    "init_std": 0.6,  # large weights: every tag makes its own translation
}
SEARCH = EvaluationArguments(num_beams=2, max_length_factor=0, max_length_offset=LENGTH)


def build(family: str, side: str, posteriors: str = "none"):
    """A random model of the pairs `PAIRS`, and its tokenizer."""
    args = DataArguments(pairs=PAIRS, language_tag=side, posteriors=posteriors)
    tokenizer = train_tokenizer(CORPUS, TokenizerArguments(vocab_size=80))
    add_tags(tokenizer, args)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    fields = {**SIZES, **ids, "vocab_size": len(tokenizer), "decoder_start_token_id": tokenizer.eos_token_id}
    torch.manual_seed(1)
    if family == "marian":
        model = MarianMTModel(MarianConfig(**fields, forced_eos_token_id=None, scale_embedding=True))
    else:
        if posteriors != "none":
            fields |= {"num_posteriors": 2, "posterior_names": args.posterior_names, "latent_encoder": False}
        elif family == "latent_depth":
            fields["layer_selection_init"] = 1.0
        model = FAMILIES[family].lm(FAMILIES[family].config(**fields))
    model.config.translation_pairs = translation_pairs(args, tokenizer)
    model.generation_config.min_new_tokens = LENGTH
    return model.eval(), tokenizer


def by_hand(model, tokenizer, text: str, tag: str, side: str, **options) -> str:
    """A translation with the tag put where it belongs, token by token."""
    ids = tokenizer(text)["input_ids"]
    start, tag_id = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(tag)
    if side == "source":
        ids = [tag_id, *ids]
    else:
        start = tag_id
    output = model.generate(
        torch.tensor([ids]),
        decoder_start_token_id=start,
        num_beams=2,
        length_penalty=1.0,
        early_stopping=True,
        max_new_tokens=LENGTH,
        **options,
    )
    assert output[0, 0] == start
    return tokenizer.decode(output[0], skip_special_tokens=True)


@pytest.mark.parametrize("side", ["source", "decoder"])
@pytest.mark.parametrize("family", [*FAMILIES, "marian"])
def test_every_family_is_told_the_language(family, side, tmp_path):
    built, tokenizer = build(family, side)
    built.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    translator = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
    search = {"num_beams": 2, "length_penalty": 1.0, "early_stopping": True, "max_new_tokens": LENGTH}
    outputs = {}
    for language in ("de", "fr"):
        expected = [by_hand(model, tokenizer, text, f"<2{language}>", side) for text in TEXTS]
        outputs[language] = expected
        assert translate(model, tokenizer, TEXTS, SEARCH, source_lang="en", target_lang=language) == expected
        assert translate(model, tokenizer, TEXTS, SEARCH, target_lang=language) == expected, "there is one source"
        results = translator(TEXTS, src_lang="en", tgt_lang=language, batch_size=2, **search)
        assert [result["translation_text"] for result in results] == expected
    assert outputs["de"] != outputs["fr"]
    named = pipeline("translation_en_to_fr", model=model, tokenizer=tokenizer, device="cpu")
    assert named(TEXTS[0], **search) == [{"translation_text": outputs["fr"][0]}]


def latent(side: str = "decoder"):
    """A model whose German posterior uses one of two layers and whose French posterior uses the other."""
    model, tokenizer = build("latent_depth", side, posteriors="target")
    with torch.no_grad():
        model.model.decoder.layer_selection.layer_logits.copy_(torch.tensor([[3.0, -3.0], [-3.0, 3.0]]))
    return model, tokenizer


def test_the_posterior_of_the_language_chooses_the_layers():
    model, tokenizer = latent()
    translator = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
    search = {"num_beams": 2, "length_penalty": 1.0, "early_stopping": True, "max_new_tokens": LENGTH}
    for index, language in enumerate(("de", "fr")):
        small = prune(model, language)
        assert small.config.translation_pairs == {
            f"en-{language}": {"decoder_start_token_id": tokenizer.convert_tokens_to_ids(f"<2{language}>")}
        }
        expected = [by_hand(small, tokenizer, text, f"<2{language}>", "decoder") for text in TEXTS]
        other = torch.tensor([1 - index])
        assert [by_hand(model, tokenizer, t, f"<2{language}>", "decoder", posteriors=other) for t in TEXTS] != expected
        assert translate(model, tokenizer, TEXTS, SEARCH, target_lang=language) == expected
        assert translate(small, tokenizer, TEXTS, SEARCH) == expected, "what is left of the pairs needs no naming"
        results = translator(TEXTS, tgt_lang=language, batch_size=3, **search)
        assert [result["translation_text"] for result in results] == expected


def test_sharing_takes_the_pairs_along(tmp_path):
    model, tokenizer = latent()
    share(model, tmp_path / "shared", tokenizer=tokenizer)  # translates in a process without this package
    assert (tmp_path / "shared" / "language_pairs.py").is_file()
    translator = pipeline("translation", model=str(tmp_path / "shared"), device="cpu", max_new_tokens=LENGTH)
    own = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=LENGTH)
    assert translator(TEXTS, tgt_lang="fr") == own(TEXTS, tgt_lang="fr") != own(TEXTS, tgt_lang="de")


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        ({}, "say the target language; known: en-de, en-fr"),
        ({"src_lang": "en"}, "say the target language"),
        ({"tgt_lang": "cs"}, "not trained on the language pair …-cs; known: en-de, en-fr"),
        ({"src_lang": "de", "tgt_lang": "en"}, "not trained on the language pair de-en"),
    ],
)
def test_missing_and_unknown_languages(languages, message):
    model, tokenizer = build("vanilla_transformer", "source")
    translator = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
    with pytest.raises(ValueError, match=message):
        translator("trees", **languages)
    with pytest.raises(UserError, match=message):
        translate(
            model, tokenizer, ["trees"], SEARCH,
            source_lang=languages.get("src_lang"), target_lang=languages.get("tgt_lang"),
        )  # fmt: skip


def test_what_makes_no_difference_need_not_be_said():
    config = FAMILIES["mat"].config()
    assert pair_settings(config, "en", "xx") == {}, "a model of one pair"
    config.translation_pairs = {"de-en": {}, "fr-en": {}}
    assert pair_settings(config) == {}
    config.translation_pairs = {"de-en": {"posterior": 0}, "fr-en": {"posterior": 1}, "fr-de": {"posterior": 2}}
    assert pair_settings(config, "de") == {"posterior": 0}
    with pytest.raises(ValueError, match="say the source language"):
        pair_settings(config, None, "en")
    with pytest.raises(ValueError, match="say the source and the target language"):
        pair_settings(config)
