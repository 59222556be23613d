"""Language pairs in use: the pipeline, `translate`, pruning and sharing equal `generate` with tags and posteriors."""

import pytest
import torch
from paired_languages import LENGTH, SEARCH, TEXTS, build
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from hf_deepwide import prune, share
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.families import FAMILIES
from hf_deepwide.models.language_pairs import pair_settings


def by_hand(model, tokenizer, text: str, tag: str, side: str, **options) -> str:
    """A translation by `generate`, with the tag's token before the source or as the decoder's start token."""
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


def test_sharing_takes_the_pairs_along(tmp_path, used_in_a_fork):
    model, tokenizer = latent()
    share(model, tmp_path / "shared", tokenizer=tokenizer)  # translates in a process without this package
    assert (tmp_path / "shared" / "language_pairs.py").is_file()
    translator = pipeline("translation", model=str(tmp_path / "shared"), device="cpu", max_new_tokens=LENGTH)
    own = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=LENGTH)
    assert translator(TEXTS, tgt_lang="fr") == own(TEXTS, tgt_lang="fr") != own(TEXTS, tgt_lang="de")


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        ({}, r"give the target language .*tgt_lang\); known: en-de, en-fr"),
        ({"src_lang": "en"}, "give the target language"),
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


def test_needs_no_language_where_there_is_no_choice():
    config = FAMILIES["mat"].config()
    assert pair_settings(config, "en", "xx") == {}, "a model of one pair"
    config.translation_pairs = {"de-en": {}, "fr-en": {}}
    assert pair_settings(config) == {}
    config.translation_pairs = {"de-en": {"posterior": 0}, "fr-en": {"posterior": 1}, "fr-de": {"posterior": 2}}
    assert pair_settings(config, "de") == {"posterior": 0}
    with pytest.raises(ValueError, match="give the source language"):
        pair_settings(config, None, "en")
    with pytest.raises(ValueError, match="give the source and the target language"):
        pair_settings(config)
