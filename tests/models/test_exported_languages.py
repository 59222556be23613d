"""The README of an exported model with language codes: its lines translate from one language into another."""

import json
import re

import pytest
import torch
from coded_languages import KINDS, SIZES
from model_cases import scramble
from readme_code import printed_by, python_block
from transformers import M2M100Config, M2M100ForConditionalGeneration

import hf_deepwide
from hf_deepwide.card_text import use_of_folder
from hf_deepwide.data.new_languages import add_languages
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.checkpoint import load_translator
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.loading import load_tokenizer
from hf_deepwide.models.language_pairs import language_ids, set_languages

TEXT = "One sentence each, in the source language."  # as the README has it
SEARCH = EvaluationArguments(num_beams=1, max_length_factor=0, max_length_offset=12)


def made(kind, folder):
    """A small MAT with random weights whose translations depend on the languages, and its tokenizer."""
    make, model_class, config_class, source, target, _ = KINDS[kind]
    tokenizer = make(folder)
    size = max(len(tokenizer), *language_ids(tokenizer).values()) + 1
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = config_class(vocab_size=size, decoder_start_token_id=tokenizer.eos_token_id, **ids, **SIZES)
    for seed in range(100):
        torch.manual_seed(seed)
        base = model_class(config)
        with torch.no_grad():
            for parameter in base.parameters():
                parameter.mul_(20)
            rows = base.get_input_embeddings().weight
            rows[[row for row in range(size) if row not in range(4, 9)]] *= 0.3  # so that translations are text
        model = hf_deepwide.MATForConditionalGeneration.from_base(base, attention_branches=2, drop_branch=0.0)
        model.generation_config.update(max_length=13, num_beams=1, forced_eos_token_id=None)
        there, back = (translate(model, tokenizer, [TEXT], SEARCH, *pair) for pair in both(source, target))
        if there != back and "" not in (*there, *back):
            return model, tokenizer
    raise AssertionError("no model minds the languages")


def both(source, target):
    return (source, target), (target, source)


def printed(folder, monkeypatch, capsys):
    """Run the code in the README of a folder. Return what it prints, and a match with the languages in the README."""
    readme = (folder / "README.md").read_text()
    monkeypatch.chdir(folder)
    return printed_by(python_block(readme), capsys), re.search(r"translate from (\w+) to (\w+)\.", readme)


# A trace for ONNX takes seconds, so each way to set the language has one model: the first token, or a forced token.
@pytest.mark.parametrize(
    ("kind", "engine"),
    [*((kind, "ctranslate2") for kind in KINDS), ("mbart", "onnx")],  # a forced token: below
)
def test_the_lines_translate_into_another_language(kind, engine, tmp_path, monkeypatch, capsys):
    model, tokenizer = made(kind, tmp_path)
    getattr(hf_deepwide, f"export_{engine}")(model, tmp_path / "out", tokenizer=tokenizer)
    found, languages = printed(tmp_path / "out", monkeypatch, capsys)
    source, target = languages.groups()
    assert source != target
    (expected,) = translate(model, tokenizer, [TEXT], SEARCH, source_lang=source, target_lang=target)
    assert found == expected
    assert f"`{model.config.model_type}`" in (tmp_path / "out" / "README.md").read_text()


def test_the_card_of_a_stock_class_translates_into_another_language(tmp_path, capsys):
    """The example in the run's card needs a translation pipeline, so the new card leaves it out."""
    tokenizer = KINDS["nllb"][0](tmp_path)
    torch.manual_seed(2)
    config = hf_deepwide.VanillaTransformerConfig(
        **{key: value for key, value in SIZES.items() if "layerdrop" not in key}, normalize_before=True,
        position_embedding_type="sinusoidal", vocab_size=len(tokenizer),
    )  # fmt: skip
    model = scramble(hf_deepwide.VanillaTransformerForConditionalGeneration(config)).eval()
    model.generation_config.update(max_length=13, num_beams=1)
    model.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    example = 'translator("a", src_lang="eng_Latn", tgt_lang="deu_Latn")\n# [{"translation_text": "b"}]'
    (tmp_path / "run" / "README.md").write_text(f"```python\n{use_of_folder('runs/x')}\n\n{example}\n```\n")
    hf_deepwide.share(tmp_path / "run", tmp_path / "out", as_="m2m_100", verify=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "translator" not in card
    code = python_block(card).replace("REPOSITORY", str(tmp_path / "out"))
    said = printed_by(code, capsys)
    (ids,) = model.generate(
        torch.tensor([tokenizer("A sentence in the source language.")["input_ids"]]),
        forced_bos_token_id=tokenizer.convert_tokens_to_ids("deu_Latn"),
    )
    assert said == tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert 'forced_bos_token_id=tokenizer.convert_tokens_to_ids("deu_Latn")' in code


def test_the_readme_tells_of_languages_that_were_added(tmp_path):
    """M2M100's table of codes is fixed in its class, so the README has other code for an added language."""
    model, tokenizer = made("m2m100", tmp_path)
    add_languages(model, tokenizer, {"gsw": "de"})
    tokenizer.src_lang = "gsw"
    hf_deepwide.export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "`__gsw__`" in readme
    assert 'src_lang="gsw"' not in readme
    assert "sentencepiece" in readme


@pytest.mark.parametrize("engine", ["ctranslate2", "onnx"])
def test_the_lines_translate_the_pair_that_was_trained(engine, tmp_path, monkeypatch, capsys):
    """Translate from a language that the tokenizer's class does not have, and not into it."""
    model, tokenizer = made("m2m100", tmp_path)
    add_languages(model, tokenizer, {"gsw": "de"})
    model.config.trained_pairs = ["gsw-en", "en-gsw"]
    getattr(hf_deepwide, f"export_{engine}")(model, tmp_path / "out", tokenizer=tokenizer)
    found, languages = printed(tmp_path / "out", monkeypatch, capsys)
    assert languages.groups() == ("gsw", "en")
    (expected,) = translate(model, tokenizer, [TEXT], SEARCH, source_lang="gsw", target_lang="en")
    assert found == expected


def test_cards_name_the_pair_that_was_trained(tmp_path, capsys):
    """The newest code would give another pair. Both a stock class and a family are shared without a run's card."""
    tokenizer = KINDS["m2m100"][0](tmp_path)
    size = max(language_ids(tokenizer).values()) + 1
    torch.manual_seed(0)
    base = M2M100ForConditionalGeneration(M2M100Config(vocab_size=size, decoder_start_token_id=2, **SIZES))
    add_languages(base, tokenizer, {"gsw": "de"})
    base.config.trained_pairs = ["gsw-en"]
    base.generation_config.update(max_length=13, num_beams=1)
    hf_deepwide.share(base, tmp_path / "stock", tokenizer=tokenizer, verify=False)
    card = (tmp_path / "stock" / "README.md").read_text()
    said = printed_by(python_block(card).replace("REPOSITORY", str(tmp_path / "stock")), capsys)
    text = "A sentence in the source language."
    (expected,) = translate(base, tokenizer, [text], SEARCH, source_lang="gsw", target_lang="en")
    assert said == expected
    ours = hf_deepwide.MATForConditionalGeneration.from_base(base, attention_branches=2)
    hf_deepwide.share(ours, tmp_path / "mat", tokenizer=tokenizer, verify=False)
    assert f'translator("{text}", src_lang="gsw", tgt_lang="en")' in (tmp_path / "mat" / "README.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_nobody_named_is_not_saved(kind, tmp_path):
    """Transformers saves the default of the tokenizer's class, and any text would then count as that language."""
    KINDS[kind][0](tmp_path).save_pretrained(tmp_path / "named")
    config = json.loads((tmp_path / "named" / "tokenizer_config.json").read_text())
    config.pop("src_lang")
    (tmp_path / "named" / "tokenizer_config.json").write_text(json.dumps(config))
    load_tokenizer(tmp_path / "named").save_pretrained(tmp_path / "again")
    assert "src_lang" not in json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    tokenizer = load_tokenizer(tmp_path / "again")
    source, target = KINDS[kind][3:5]
    set_languages(tokenizer, source, target)
    tokenizer.save_pretrained(tmp_path / "named")
    assert load_tokenizer(tmp_path / "named").src_lang == source


def test_codes_behind_the_embeddings_are_refused(tmp_path):
    """The length of M2M100's tokenizer does not include these codes."""
    tokenizer = KINDS["m2m100"][0](tmp_path)
    base = M2M100ForConditionalGeneration(M2M100Config(vocab_size=len(tokenizer), **SIZES))
    for part in (base, tokenizer):
        part.save_pretrained(tmp_path / "model")
    entries = max(language_ids(tokenizer).values()) + 1
    assert entries > len(tokenizer)
    with pytest.raises(UserError, match=f"tokenizer has {entries} entries and its model {len(tokenizer)} embeddings"):
        load_translator(tmp_path / "model")
