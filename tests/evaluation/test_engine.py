"""A folder exported to CTranslate2 gives the same translations and scores as the original model."""

import json
import shutil
import sys

import pytest
import torch
from coded_languages import make_base
from paired_languages import CORPUS, SEARCH, SIZES, TEXTS, build
from word_models import tiny_model, tiny_tokenizer

import hf_deepwide_cli
from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, export_ctranslate2
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.checkpoint import load_any_translator, load_translator
from hf_deepwide.evaluation.engine import Engine
from hf_deepwide.evaluation.sampling import SamplingArguments
from hf_deepwide.evaluation.translate import generate_beams, translate


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of one pair, which searches with three beams, and its export."""
    folder = tmp_path_factory.mktemp("engine")
    tokenizer = train_tokenizer(CORPUS, TokenizerArguments(vocab_size=80))
    torch.manual_seed(1)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(vocab_size=len(tokenizer), **SIZES))
    model.generation_config.update(num_beams=3, length_penalty=0.7, early_stopping=True, max_length=30)
    model.config.max_length_factor, model.config.max_length_offset = 0.5, 6
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    export_ctranslate2(folder / "model", folder / "exported")
    return folder / "model", folder / "exported"


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", *map(str, words)])
    hf_deepwide_cli.main()


def test_beams_and_their_scores_are_the_models(folders):
    lists = []
    for folder in folders:
        model, tokenizer = load_any_translator(folder)
        lists.append(generate_beams(model, tokenizer, [TEXTS[0], "", *TEXTS[1:]], SEARCH))
    for ours, theirs in zip(*lists, strict=True):
        assert [beam.ids for beam in ours] == [beam.ids for beam in theirs]
        assert [beam.score for beam in ours] == pytest.approx([beam.score for beam in theirs], abs=1e-3)
    assert [len(beams) for beams in lists[0]] == [2, 0, 2, 2]


def test_the_commands_search_as_the_model_was_saved_to(folders, tmp_path, monkeypatch, capsys):
    (tmp_path / "source").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    made = []
    for number, folder in enumerate(folders):
        out, report = tmp_path / f"out{number}", tmp_path / f"report{number}.json"
        call(monkeypatch, "translate", "--model", folder, "--input", tmp_path / "source", "--output", out)
        made.append(out.read_text())
        words = ("--source", tmp_path / "source", "--reference", tmp_path / "out0", "--output", report)
        call(monkeypatch, "evaluate", "--model", folder, *words)
        (scores,) = json.loads(report.read_text())["systems"].values()
        assert scores["search"] == {
            **{"num_beams": 3, "length_penalty": 0.7, "early_stopping": True},
            **{"max_length_factor": 0.5, "max_length_offset": 6},
        }
        assert scores["chrf"] == pytest.approx(100)
    assert made[0] == made[1]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("forced", [{}, {"forced_eos_token_id": 2}, {"forced_eos_token_id": 2, "min_new_tokens": 6}])
def test_a_forced_end_is_the_last_of_the_tokens(forced, beams, tmp_path):
    """A translation that never ends by itself has as many words as with `generate`."""
    model = tiny_model()
    with torch.no_grad():
        model.final_logits_bias[:, 2] = -1e3
    model.generation_config.update(num_beams=beams, **forced)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    export_ctranslate2(tmp_path / "model", tmp_path / "exported")
    settings = EvaluationArguments(num_beams=beams, max_length_factor=0, max_length_offset=6)
    made = [
        translate(*load_any_translator(tmp_path / name), ["w1 w2", "w3"], settings) for name in ("model", "exported")
    ]
    assert made[0] == made[1]
    assert {len(line.split()) for line in made[0]} == {5 if forced else 6}


@pytest.mark.parametrize("pair", [("eng_Latn", "deu_Latn"), ("deu_Latn", "eng_Latn")])
def test_a_language_is_asked_for_by_its_code(pair, tmp_path):
    model, _ = make_base("nllb", tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
        model.model.shared.weight[:4] *= 0.1  # so that no translation is empty
    model.save_pretrained(tmp_path / "base")
    export_ctranslate2(tmp_path / "base", tmp_path / "exported")
    settings = EvaluationArguments(num_beams=1, max_length_factor=0, max_length_offset=9)
    made = [
        translate(*load_any_translator(tmp_path / name), ["a b c", "dd a"], settings, *pair)
        for name in ("base", "exported")
    ]
    assert made[0] == made[1]
    assert any(made[0])


def test_tags_of_several_pairs(tmp_path):
    """The folder names the pairs, and refuses other pairs with the same message as the model."""
    for side in ("source", "decoder"):
        model, tokenizer = build("vanilla_transformer", side)
        model.save_pretrained(tmp_path / side)
        tokenizer.save_pretrained(tmp_path / side)
        export_ctranslate2(tmp_path / side, tmp_path / f"{side}-exported")
        made = [
            translate(*load_any_translator(tmp_path / name), TEXTS, SEARCH, source_lang, "fr")
            for name, source_lang in ((side, "en"), (f"{side}-exported", None))
        ]
        assert made[0] == made[1], side
        messages = []
        for name in (side, f"{side}-exported"):
            for pair in (("fr", "en"), (None, None)):
                with pytest.raises(UserError) as refused:
                    translate(*load_any_translator(tmp_path / name), TEXTS, SEARCH, *pair)
                messages.append(str(refused.value))
        assert messages[:2] == messages[2:], side


@pytest.mark.parametrize("side", ["source", "decoder"])
def test_an_exported_model_of_one_pair_needs_no_language(side, tmp_path):
    """As in a model that was pruned to one pair. The tag comes from the folder, and other pairs are refused."""
    model, tokenizer = build("vanilla_transformer", side)
    pairs = model.config.translation_pairs
    model.config.translation_pairs = {"en-fr": pairs["en-fr"]}
    model.save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    export_ctranslate2(tmp_path / "own", tmp_path / "exported")
    own, exported = (translate(*load_any_translator(tmp_path / name), TEXTS, SEARCH) for name in ("own", "exported"))
    assert own == exported
    assert any(own)
    with pytest.raises(UserError, match="not trained on the language pair …-de"):
        translate(*load_any_translator(tmp_path / "exported"), TEXTS, SEARCH, None, "de")


def test_a_decoder_that_starts_from_a_language_must_be_given_one(tmp_path):
    """The folder does not name the trained pairs."""
    model, tokenizer = build("vanilla_transformer", "decoder")
    export_ctranslate2(model, tmp_path / "out", tokenizer=tokenizer)
    file = tmp_path / "out" / "generation_config.json"
    fields = json.loads(file.read_text())
    del fields["translation_pairs"]
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="give the target language"):
        translate(*load_any_translator(tmp_path / "out"), TEXTS, SEARCH)
    file.write_text(json.dumps(fields | {"translation_pairs": [1]}))
    with pytest.raises(UserError, match="translation_pairs are not of the form"):
        load_any_translator(tmp_path / "out")


def test_what_the_engine_cannot_do_is_refused(folders, tmp_path):
    engine, tokenizer = load_any_translator(folders[1])
    assert isinstance(engine, Engine)
    for settings, sampling, message in (
        (EvaluationArguments(num_beams=1), SamplingArguments(), "sample with the model from which"),
        (EvaluationArguments(precision="bfloat16"), None, "export with another quantization"),
        (EvaluationArguments(early_stopping=False), None, "early_stopping is false"),
    ):
        with pytest.raises(UserError, match=message):
            translate(engine, tokenizer, TEXTS, settings, sampling=sampling)
    with pytest.raises(UserError, match="exported to CTranslate2"):
        load_translator(folders[1])
    damaged = shutil.copytree(folders[1], tmp_path / "damaged")
    (damaged / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json is damaged"):
        load_any_translator(damaged)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_least_length_counts_the_token_that_the_decoder_starts_from(beams, tmp_path):
    """A translation that would end at once has as many words as with `generate`."""
    model = tiny_model()
    with torch.no_grad():
        model.final_logits_bias[:, 2] = 1e3
    model.generation_config.update(num_beams=beams, min_length=5)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    export_ctranslate2(tmp_path / "model", tmp_path / "exported")
    settings = EvaluationArguments(num_beams=beams)
    loaded = (load_any_translator(tmp_path / name) for name in ("model", "exported"))
    made = [translate(*each, ["w1 w2", "w3"], settings) for each in loaded]
    assert made[0] == made[1]
    assert {len(line.split()) for line in made[0]} == {4}
