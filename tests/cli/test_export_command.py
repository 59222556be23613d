"""`hf-deepwide export`: its forms, their options, and the place of the result."""

import sys
from pathlib import Path

import pytest
from model_cases import build
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSeq2SeqLM

import hf_deepwide_cli
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer

TEXTS = ["two dogs run", "a man in a red coat", "who is there", "the dogs sit in the red water", "a tree"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with two posteriors."""
    folder = tmp_path_factory.mktemp("model")
    build("latent-both", num_posteriors=2, posterior_names=["de", "fr"]).save_pretrained(folder)
    train_tokenizer(TEXTS * 3, TokenizerArguments(vocab_size=36)).save_pretrained(folder)
    return folder


def export(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "export", *map(str, words)])
    hf_deepwide_cli.main()
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("options", [["--quantization", "int8"], []])
def test_export_writes_a_folder(options, folder, tmp_path, monkeypatch, capsys):
    """`test_export_onnx.py` runs the command for ONNX."""
    where = tmp_path / "out"
    printed = export(
        monkeypatch, capsys, folder, "--to", "ctranslate2", "--output", where, "--language", "fr", *options
    )
    assert Path(printed) == where
    assert {"model.bin", "README.md", "tokenizer.json"} <= {path.name for path in where.iterdir()}


def test_quantization_is_smaller(folder, tmp_path, monkeypatch, capsys):
    sizes = []
    for options in ([], ["--quantization", "int8"]):
        where = tmp_path / f"out{len(options)}"
        export(monkeypatch, capsys, folder, "--to", "ctranslate2", "--output", where, "--language", "0", *options)
        sizes.append((where / "model.bin").stat().st_size)
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--to", "onnx", "--language", "de", "--quantization", "int8"], "--quantization is for --to ctranslate2"),
        (["--to", "ctranslate2", "--language", "de", "--quantization", "int3"], "quantization is 'int3'; accepted"),
        (["--to", "ctranslate2"], "de, fr"),
    ],
)
def test_wrong_options_write_nothing(options, told, folder, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        export(monkeypatch, capsys, folder, "--output", tmp_path / "out", *options)
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["ctranslate2", "onnx"])
def test_an_adapter_is_to_be_merged_first(form, folder, tmp_path, monkeypatch, capsys):
    base = AutoModelForSeq2SeqLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(r=2, target_modules=["fc1"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(SystemExit):
        export(monkeypatch, capsys, tmp_path / "adapter", "--to", form, "--output", tmp_path / "out")
    told = capsys.readouterr().err
    assert "it is an adapter" in told
    assert "merge" in told
