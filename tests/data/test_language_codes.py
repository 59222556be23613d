"""Tokenizers with language codes of their own (NLLB, mBART, M2M100): training, scoring and pipeline agree on them."""

import json

import pytest
from coded_languages import KINDS, SIZES, m2m, nllb, token_id
from tiny_run import tiny_values
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    pipeline,
)

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.batches import TranslationCollator
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.languages import set_codes
from hf_deepwide.data.new_languages import add_codes
from hf_deepwide.errors import UserError
from hf_deepwide.loading import load_tokenizer
from hf_deepwide.models.language_pairs import language_ids, set_languages
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.runs.run import run_recipe


def make_base(kind, folder):
    """Save a base with its tokenizer, as another user left it: with no target language, or another one."""
    make, model, config, *_ = KINDS[kind]
    folder.mkdir()
    tokenizer = make(folder)
    size = max(tokenizer.get_vocab().values()) + 1 + len(getattr(tokenizer, "lang_code_to_id", {}))
    base = model(
        config(vocab_size=size, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, **SIZES)
    )
    base.generation_config.forced_bos_token_id = token_id(tokenizer, KINDS[kind][3])
    base.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning_uses_the_codes_of_the_recipe(kind, tmp_path):
    """In training the decoder starts from the same tokens as in scoring and the pipeline, which need no settings."""
    tokenizer = make_base(kind, tmp_path / "base")
    source, target, code_first = KINDS[kind][3:]
    rows = [{"x": text, "y": text[::-1]} for text in ("a b c", "d c", "a a b", "c b a d") * 4]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = tiny_values(tmp_path / "run", max_steps=2, warmup_steps=1, eval_steps=2, save_steps=2, max_tokens=64)
    base = str(tmp_path / "base")
    values["model"] = {"family": "mat", "init_from": base}
    values["tokenizer"] = {"path": base}
    values["data"] = {
        "format": "jsonl", "root": str(tmp_path), **dict.fromkeys(("train", "validation", "test"), "train.jsonl"),
        "source_lang": source, "target_lang": target, "source_field": "x", "target_field": "y", "max_length": 16,
    }  # fmt: skip
    recipe = check_recipe(values, "codes", "codes.yaml")
    run_recipe(recipe)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    encoded = encode(load_parallel(recipe.data, "train"), tokenizer, recipe.data, filter=True)
    batch = TranslationCollator(tokenizer, model.config.decoder_start_token_id)([encoded[0]])
    assert token_id(tokenizer, source) in batch["input_ids"][0].tolist()
    assert token_id(tokenizer, target) in batch["labels"][0].tolist()
    start = [2, token_id(tokenizer, target)] if code_first else [token_id(tokenizer, target)]
    assert batch["decoder_input_ids"][0].tolist()[: len(start)] == start
    assert model.config.trained_pairs == [f"{source}-{target}"]
    settings = model.generation_config
    assert (settings.decoder_start_token_id, settings.forced_bos_token_id) == (
        start[0],
        start[1] if code_first else None,
    )

    translate = pipeline("translation", model=str(tmp_path / "run"), device="cpu", max_new_tokens=4, max_length=None)
    said = translate("a b c", return_tensors=True)[0]["translation_token_ids"].tolist()
    assert said[: len(start)] == start
    by_hand = model.generate(**tokenizer("a b c", return_tensors="pt"), max_new_tokens=4, max_length=None)[0]
    assert said == by_hand.tolist(), "nothing else is forced"
    assert translate("a b c") == translate("a b c", src_lang=source, tgt_lang=target)


def test_codes_that_the_tokenizer_does_not_have_are_refused(tmp_path):
    tokenizer = nllb(tmp_path)
    with pytest.raises(UserError, match=r"^data.source_lang, .*unknown language code 'de'; did you mean deu_Latn\?"):
        set_codes(tokenizer, DataArguments(source_lang="de", target_lang="eng_Latn"))


def test_a_legacy_tokenizer_is_refused_for_training(tmp_path):
    """Such a tokenizer would train the model to expect codes in other places than NLLB does."""
    tokenizer = nllb(tmp_path)
    tokenizer.legacy_behaviour = True
    with pytest.raises(UserError, match="legacy_behaviour=False"):
        set_codes(tokenizer, DataArguments(source_lang="deu_Latn", target_lang="eng_Latn"))


def test_sets_only_the_given_language(tmp_path):
    tokenizer = nllb(tmp_path)
    assert set_languages(tokenizer, "deu_Latn") == {}
    assert set_languages(tokenizer, None, "eng_Latn") == {"forced_bos_token_id": token_id(tokenizer, "eng_Latn")}
    assert tokenizer.convert_ids_to_tokens(tokenizer("a")["input_ids"])[0] == "deu_Latn"


def test_codes_of_a_loaded_tokenizer_are_no_text(tmp_path):
    """A tokenizer that M2M100's class makes writes the language code into the decoded text; a loaded one does not."""
    made = m2m(tmp_path)
    made.save_pretrained(tmp_path)
    codes = language_ids(made)
    assert made.decode([codes["de"], 4, 2], skip_special_tokens=True).startswith("__de__")
    loaded = load_tokenizer(tmp_path)
    add_codes(loaded, {"gsw": "de"})
    loaded.save_pretrained(tmp_path)
    for tokenizer in (loaded, load_tokenizer(tmp_path)):
        found = language_ids(tokenizer)
        assert codes.items() <= found.items()
        assert tokenizer("a b")["input_ids"] == made("a b")["input_ids"]
        for code in ("de", "gsw"):
            ids = [found[code], *tokenizer("a b")["input_ids"][1:]]
            assert tokenizer.decode(ids, skip_special_tokens=True) == "a b"
