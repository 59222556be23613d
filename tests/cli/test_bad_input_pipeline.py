"""Wrong inputs to `pipeline("translation")`: the error's type and message. The pipeline still works afterwards."""

import pytest
from transformers import AutoModelForSeq2SeqLM, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from hf_deepwide import VanillaTransformerModel
from hf_deepwide.models.pipeline_translation import TranslationPipeline


@pytest.fixture(scope="module")
def translate(workspace):
    return pipeline("translation", model=str(workspace / "vanilla_transformer"))


CALLS = {
    "nothing": (lambda call: call(None), ValueError, ["cannot translate NoneType None", "accepted: a string"]),
    "a number": (lambda call: call(3), ValueError, ["cannot translate int 3"]),
    "bytes": (lambda call: call(b"dog"), ValueError, ["cannot translate bytes b'dog'"]),
    "a dict": (lambda call: call({"text": "dog"}), ValueError, ["cannot translate dict"]),
    "a number in a list": (lambda call: call(["dog", 3]), ValueError, ["cannot translate item 1, int 3"]),
    "nothing in a list": (lambda call: call([None]), ValueError, ["cannot translate item 0, NoneType"]),
    "rows of a dataset": (
        lambda call: list(call(row for row in [{"text": "dog"}])), ValueError, ["item 0, dict", "KeyDataset"],
    ),
    "a column that is missing": (
        lambda call: list(call(KeyDataset([{"text": "dog"}], "source"))), KeyError, ["source"],
    ),
    "a sentence too long": (
        lambda call: call("dog " * 300), ValueError, ["tokens, and the model takes at most 64", "`truncation=True`"],
    ),
    "no way to truncate": (lambda call: call("dog", truncation="somehow"), ValueError, ["somehow"]),
    "no beams": (lambda call: call("dog", num_beams=0), ValueError, ["num_beams"]),
    "beams in words": (lambda call: call("dog", num_beams="2"), ValueError, ["num_beams", "str '2'", "1 or more"]),
    "beams of None": (lambda call: call("dog", num_beams=None), ValueError, ["num_beams", "None"]),
    "a length in words": (lambda call: call("dog", max_length="5"), ValueError, ["max_length", "str '5'"]),
    "no length": (lambda call: call("dog", max_new_tokens=0), ValueError, ["max_new_tokens", "int 0"]),
    "a length that is no number": (
        lambda call: call("dog", max_new_tokens=float("nan")), ValueError, ["max_new_tokens", "float nan"],
    ),
    "settings in a dict": (
        lambda call: call("dog", generation_config={"max_length": 3}), ValueError, ["generation_config", "dict"],
    ),
    "more results than beams": (
        lambda call: call("dog", num_beams=2, num_return_sequences=3), ValueError, ["num_return_sequences"],
    ),
    "half a character": (lambda call: call("\ud800"), ValueError, ["half a surrogate pair is no character"]),
    "half a character in a list": (lambda call: call(["dog", "\udfff"]), ValueError, ["half a surrogate pair"]),
    "no such argument": (lambda call: call("dog", beam_size=3), ValueError, ["beam_size"]),
    "no batch size": (lambda call: list(call(["dog", "cat"], batch_size=-1)), ValueError, ["batch_size"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name, translate):
    call, kind, words = CALLS[name]
    with pytest.raises(kind) as error:
        call(translate)
    for word in words:
        assert word in str(error.value)
    assert "translation_text" in translate("the dog", max_length=4)[0]


@pytest.mark.parametrize("text", ["", " ", "\n", "\0", "\u2028", "\U0010ffff", "🐕" * 3, "<s></s><pad>"])
def test_odd_text_has_one_translation(text, translate):
    (result,) = translate(text, max_length=4)
    assert [*result] == ["translation_text"]
    assert isinstance(result["translation_text"], str)


MODELS = {
    "an encoder": (lambda at: pipeline("translation", model=str(at / "bert")), ValueError, ["BertModel"]),
    "a model without head": (
        lambda at: TranslationPipeline(VanillaTransformerModel.from_pretrained(at / "vanilla_transformer")),
        ValueError, ["encoder-decoder model that can generate, got VanillaTransformerModel"],
    ),
    "no tokenizer": (
        lambda at: TranslationPipeline(AutoModelForSeq2SeqLM.from_pretrained(at / "vanilla_transformer")),
        ValueError, ["needs a tokenizer"],
    ),
    "no folder": (lambda at: pipeline("translation", model=str(at / "nowhere")), (ValueError, OSError), ["nowhere"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name, workspace):
    make, kind, words = MODELS[name]
    with pytest.raises(kind) as error:
        make(workspace)
    for word in words:
        assert word in str(error.value)
