"""The mean of checkpoints against a plain mean, and the checkpoints that cannot be averaged."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    TOKENIZER_MAPPING,
    BartConfig,
    MarianConfig,
    RobertaConfig,
)

from hf_deepwide.errors import UserError
from hf_deepwide.families import FAMILIES
from hf_deepwide.models.saved_fields import LIMITS
from hf_deepwide.runs.averaging import FREE, SIDE_FILES, average_checkpoints


def checkpoint(folder: Path, **tensors) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["PhobertTokenizer", "BertweetTokenizer", "BartphoTokenizer", "M2M100Tokenizer"])
def test_all_files_of_slow_tokenizers_are_taken_along(name):
    """The tokenizers of bases that a recipe can name: models like RoBERTa, mBART and NLLB."""
    assert {*getattr(transformers, name).vocab_files_names.values()} <= {*SIDE_FILES}


def test_the_mean_is_taken_in_double_precision(tmp_path):
    """Compare with a plain sum. In float32 the small differences of bfloat16 weights would be lost to rounding."""
    generator = torch.Generator().manual_seed(0)
    sets = [
        {
            "w": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
            "b": torch.randn(5, generator=generator) * 1e6,
            "n": torch.tensor([1, 2]),
        }
        for _ in range(5)
    ]
    folders = [checkpoint(tmp_path / str(i), **tensors) for i, tensors in enumerate(sets)]
    output = average_checkpoints(folders, tmp_path / "mean")
    mean = load_file(output / "model.safetensors")
    for name in ("w", "b"):
        total = sum(tensors[name].double() for tensors in sets) / 5
        assert torch.equal(mean[name], total.to(sets[0][name].dtype))
    assert torch.equal(mean["n"], sets[0]["n"])
    assert (output / "config.json").is_file()


@pytest.mark.parametrize(("ids", "told"), [("aa", False), ("ab", True), ((None, "a"), False)])
def test_the_mean_of_several_trainings_is_pointed_out(ids, told, tmp_path, caplog):
    folders = []
    for number, own in enumerate(ids):
        folder = checkpoint(tmp_path / f"run-{number}", w=torch.zeros(2))
        (folder / "run.json").write_text(json.dumps({"hf_deepwide": "0", **({} if own is None else {"id": own})}))
        folders.append(folder)
    average_checkpoints(folders, tmp_path / "mean")
    assert ("come from 2 trainings" in caplog.text) is told
    (folders[0] / "checksums.json").write_text("{")
    with pytest.raises(UserError, match=r"run-0 is damaged: .*checksums\.json"):
        average_checkpoints(folders, tmp_path / "mean")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": torch.zeros(2)}, ["only one of them has b"]),
        ({"w": torch.zeros(3), "b": torch.zeros(1)}, ["w is [3]", "[2]"]),
        ({"w": torch.zeros(2), "b": torch.zeros(1, dtype=torch.float16)}, ["b is", "float16"]),
    ],
)
def test_checkpoints_of_different_models_have_no_mean(other, words, tmp_path):
    one = checkpoint(tmp_path / "one", w=torch.zeros(2), b=torch.zeros(1))
    two = checkpoint(tmp_path / "two", **other)
    with pytest.raises(UserError) as error:
        average_checkpoints([one, two], tmp_path / "mean")
    for word in [str(one), str(two), *words]:
        assert word in str(error.value)
    assert not (tmp_path / "mean").exists()


def test_the_mean_comes_with_its_tokenizer_whatever_that_is(tmp_path):
    """Copy all files of the tokenizers of Transformers' encoder-decoders, and no files of the training."""
    tokenizers = [TOKENIZER_MAPPING.get(config, None) for config in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    names = {name for each in filter(None, tokenizers) for name in each.vocab_files_names.values()}
    assert names >= {"sentencepiece.bpe.model", "target_vocab.json", "merges.txt", "source.spm", "tokenizer.json"}
    folder = checkpoint(tmp_path / "one", weight=torch.ones(2))
    for name in (*names, "optimizer.pt", "trainer_state.json"):
        (folder / name).touch()
    mean = average_checkpoints([folder], tmp_path / "mean")
    assert {path.name for path in mean.iterdir()} == {*names, "config.json", "model.safetensors"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_to_average_non_finite_weights(value, tmp_path):
    good = checkpoint(tmp_path / "good", w=torch.zeros(3))
    bad = checkpoint(tmp_path / "bad", w=torch.tensor([0, value, 1]))
    for folders in ([good, bad], [bad, good], [bad]):
        with pytest.raises(UserError, match=r"bad: w holds numbers that are NaN or infinite"):
            average_checkpoints(folders, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_models_that_compute_different_things_have_no_mean(tmp_path):
    one, two = (checkpoint(tmp_path / name, w=torch.zeros(3)) for name in ("one", "two"))
    (one / "config.json").write_text('{"normalize_before": true, "dropout": 0.1}')
    (two / "config.json").write_text('{"normalize_before": true, "dropout": 0.3}')
    average_checkpoints([one, two], tmp_path / "mean")
    (two / "config.json").write_text('{"normalize_before": false}')
    with pytest.raises(UserError, match=r"not checkpoints of one model: `normalize_before` is True in one and False"):
        average_checkpoints([one, two], tmp_path / "mean")


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("depthwise_lstm", "cross_query", "residual"),
        ("vanilla_transformer", "sinkhorn_iterations", 3),
        ("latent_depth", "inference_selection", "soft"),
        ("multipath_transformer", "path_weight_init", 0.5),
        ("marian", "activation_function", "swish"),
    ],
)
def test_fields_of_all_families_decide_what_a_model_computes(tmp_path, model_type, field, value):
    """The first checkpoint is older than the field, so the field has its default there."""
    one, two = (checkpoint(tmp_path / name, w=torch.zeros(3)) for name in ("one", "two"))
    (one / "config.json").write_text(json.dumps({"model_type": model_type, "dropout": 0.3}))
    default = getattr(CONFIG_MAPPING[model_type], field)
    (two / "config.json").write_text(json.dumps({"model_type": model_type, field: default}))
    average_checkpoints([one, two], tmp_path / "mean")
    (two / "config.json").write_text(json.dumps({"model_type": model_type, field: value}))
    with pytest.raises(UserError, match=rf"`{field}` is '?{default}'? in one and '?{value}'? in the other"):
        average_checkpoints([one, two], tmp_path / "mean")


def test_two_families_are_named_before_the_fields_that_one_of_them_lacks(tmp_path):
    one, two = (checkpoint(tmp_path / name, w=torch.zeros(3)) for name in ("one", "two"))
    (one / "config.json").write_text('{"model_type": "mat"}')
    (two / "config.json").write_text('{"model_type": "vanilla_transformer", "aggregation_dilation": 2}')
    with pytest.raises(UserError, match=r"`model_type` is 'mat' in one and 'vanilla_transformer' in the other"):
        average_checkpoints([one, two], tmp_path / "mean")


def test_fields_that_concern_training_may_differ_in_a_mean():
    """Each listed field exists in some config, so that a renamed field does not stay in the list."""
    configs = [MarianConfig, BartConfig, RobertaConfig, *(family.config for family in FAMILIES.values())]
    known = {name for config in configs for name in config().to_dict()}
    assert FREE - known <= {"torch_dtype", "auto_map", "custom_pipelines", "layerdrop", "_name_or_path", *LIMITS}


def test_models_of_other_languages_or_tokens_have_no_mean(tmp_path):
    """Refuse them although their weights have the same shapes."""
    one, two = (checkpoint(tmp_path / name, w=torch.zeros(3)) for name in ("one", "two"))
    config = {"source_lang": "en", "target_lang": "de"}
    for folder in (one, two):
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "padding": folder.name}))
    average_checkpoints([one, two], tmp_path / "mean")
    (two / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))
    with pytest.raises(UserError, match=r"not checkpoints of one model: their tokenizer\.json differ"):
        average_checkpoints([one, two], tmp_path / "mean")
    (two / "config.json").write_text(json.dumps(config | {"source_lang": "fr"}))
    with pytest.raises(UserError, match=r"not checkpoints of one model: `source_lang` is 'en' in one and 'fr'"):
        average_checkpoints([one, two], tmp_path / "mean")


def test_an_input_is_never_the_output_of_an_average(tmp_path):
    one, two = (checkpoint(tmp_path / name, w=torch.full((3,), float(len(name)))) for name in ("one", "three"))
    before = (two / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(two)
    for output in (two, tmp_path / "link", tmp_path / "one" / ".." / "three"):
        with pytest.raises(UserError, match="is also an input"):
            average_checkpoints([one, two], output)
    assert (two / "model.safetensors").read_bytes() == before


def test_the_same_weights_in_two_folders_are_pointed_out(tmp_path, caplog):
    one, two = (checkpoint(tmp_path / name, w=torch.ones(3)) for name in ("one", "two"))
    three = checkpoint(tmp_path / "three", w=torch.zeros(3))
    average_checkpoints([one, three], tmp_path / "mean")
    assert "same weights" not in caplog.text
    average_checkpoints([one, two], tmp_path / "mean")
    assert "two and " in caplog.text
    assert "hold the same weights, which count twice" in caplog.text


def test_refuses_to_average_nothing(tmp_path):
    with pytest.raises(UserError, match="no checkpoints"):
        average_checkpoints([], tmp_path / "mean")
    with pytest.raises(UserError, match=r"nowhere.*model\.safetensors"):
        average_checkpoints([tmp_path / "nowhere"], tmp_path / "mean")


# The rest
