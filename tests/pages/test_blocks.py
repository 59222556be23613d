"""The Python and shell blocks of README, getting-started and two sections run as printed, in order, in a new folder.

Nothing in a block is changed. The command `hf-deepwide` that the blocks find makes every training a short one. This
command and the Python blocks run in children of a server, which has already imported the slowest modules.
"""

import json
import os
import re
import runpy
import shlex
import subprocess

import forked_commands
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from printed import ROOT, fenced
from sentence_pieces import train_pieces, write_vocabulary
from transformers import MarianConfig, MarianMTModel, MarianTokenizer, set_seed

from hf_deepwide import MATConfig, MATForConditionalGeneration
from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer

README, GETTING_STARTED = ROOT / "README.md", ROOT / "docs" / "getting-started.md"
TRAINING = ROOT / "docs" / "training.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
INSTALLS = re.compile(r"^(pip|make) ", flags=re.MULTILINE)
SIZES = {
    "d_model": 16,
    **{f"{stack}_ffn_dim": 16 for stack in ("encoder", "decoder")},
    **{f"{stack}_layers": 1 for stack in ("encoder", "decoder")},
    **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
}
SHORT = {
    **{f"model.{key}": value for key, value in SIZES.items()},
    "training.max_steps": 2,
    "training.warmup_steps": 1,
    "training.max_tokens": 512,
    "training.predict_with_generate": "false",
    "evaluation.num_beams": 1,
    "evaluation.max_length_factor": 0,
    "evaluation.max_length_offset": 8,
}
COMMAND = """#!/bin/sh
if [ "$1" = train ]; then set -- "$@" {short}; fi
exec {client} hf-deepwide "$@"
"""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT / "src"),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def client():
    """The words that start a command in the server. The server runs during the tests."""
    with forked_commands.serving("hf_deepwide.runs.run", environment=ENVIRONMENT) as address:
        yield forked_commands.client(address)


@pytest.fixture
def paste(tmp_path, client):
    """A function that runs the blocks of a page or section in a new folder. `short`: further keys for trainings."""
    folder, programs = tmp_path / "folder", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    environment = {**ENVIRONMENT, "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(page, section="", **short):
        words = [word for key, value in {**SHORT, **short}.items() for word in (f"--{key}", str(value))]
        command = programs / "hf-deepwide"
        command.write_text(COMMAND.format(short=shlex.join(words), client=shlex.join(client)))
        command.chmod(0o755)
        output = []
        for language, code in fenced(page, section):
            if language not in ("python", "shell") or INSTALLS.search(code):
                continue
            program = [*client, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
            ran = subprocess.run([*program, code], cwd=folder, env=environment, capture_output=True, text=True)
            assert ran.returncode == 0, f"{code}\n{ran.stdout}\n{ran.stderr}"
            output.append(ran.stdout)
        return output

    run.folder = folder
    return run


def test_readme_runs_as_printed(paste):
    """The `runs/quickstart` of the page is a small untrained model of the recipe's family."""
    save_mat(paste.folder / "runs" / "quickstart")
    python, shell = paste(README, **{"data.train_size": 300, "tokenizer.vocab_size": 200})
    assert python.strip()
    assert "bleu" in shell.lower()
    assert MATConfig.from_pretrained(paste.folder / "runs" / "wider").attention_branches == 4
    for shared in ("to-upload", "short-to-upload"):
        assert (paste.folder / "runs" / shared / "modeling_mat.py").is_file()


def save_mat(folder):
    tokenizer = train_tokenizer(
        ["Der Preis beträgt 12,50 €.", "The price is €12.50."] * 9, TokenizerArguments(vocab_size=200)
    )
    set_seed(0)
    model = MATForConditionalGeneration(MATConfig(vocab_size=len(tokenizer), attention_branches=2, **SIZES))
    model.generation_config.max_length = 8
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_adapters_are_merged_as_printed(paste):
    save_mat(paste.folder / "runs" / "mine")
    model = MATForConditionalGeneration.from_pretrained(paste.folder / "runs" / "mine")
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules="all-linear"))
    adapted.save_pretrained(paste.folder / "runs" / "adapter")
    paste(CHECKPOINTS, "Adapters")
    assert (paste.folder / "merged" / "modeling_mat.py").is_file()


def test_getting_started_runs_as_printed(paste):
    """The Marian model that the page names is a small untrained model, in a folder of that name."""
    save_marian(paste.folder / "Helsinki-NLP" / "opus-mt-de-en")
    paste(GETTING_STARTED)
    sources = [
        (paste.folder / "corpus" / f"{name}.de").read_text(encoding="utf-8").splitlines()
        for name in ("val", "test", "train")
    ]
    assert [len(lines) for lines in sources[:2]] == [500, 500]
    assert len(set().union(*sources)) == sum(map(len, sources)) > 9_000, "no sentence is in two sets"
    assert len((paste.folder / "out.en").read_text(encoding="utf-8").splitlines()) == 500
    for run in ("wide", "opus-mat"):
        assert MATConfig.from_pretrained(paste.folder / "runs" / run).attention_branches == 2
    assert (paste.folder / "to-upload" / "modeling_mat.py").is_file()


def test_data_that_a_model_makes_runs_as_printed(paste):
    """The folder holds a small corpus, and the recipe that the section starts from."""
    corpus = paste.folder / "corpus"
    corpus.mkdir()
    phrases = build_phrases("de", "en", train_size=120)["train"]
    for split, rows in (
        ("train", range(80)),
        ("val", range(80, 90)),
        ("test", range(90, 100)),
        ("more", range(100, 120)),
    ):
        for side, language in (("source", "de"), ("target", "en")):
            lines = "".join(f"{phrases[row][side]}\n" for row in rows)
            (corpus / f"{split}.{language}").write_text(lines, encoding="utf-8")
    (corpus / "more.en").rename(paste.folder / "mono.en")
    places = {"source_lang": "de", "target_lang": "en", "train": "corpus/train", "validation": "corpus/val"}
    recipe = {"model": {"family": "vanilla_transformer"}, "data": {**places, "test": "corpus/test"}}
    (paste.folder / "mine.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    paste(TRAINING, "Data that a model makes", **{"tokenizer.vocab_size": 150})
    for made, lines in (("bt.de", 20), ("distilled.en", 80)):
        assert len((corpus / made).read_text(encoding="utf-8").splitlines()) == lines
    tokenizer = json.loads((paste.folder / "runs" / "bt" / "tokenizer.json").read_text(encoding="utf-8"))
    assert "<bt>" in {token["content"] for token in tokenizer["added_tokens"]}
    assert (paste.folder / "runs" / "student" / "results.json").is_file()


def save_marian(folder):
    """A small Marian model with a tokenizer for German and English phrases."""
    folder.mkdir(parents=True)
    phrases = build_phrases("de", "en", train_size=300)["train"]
    pieces, words = train_pieces(folder, [*phrases["source"], *phrases["target"]], 200)
    vocabulary = write_vocabulary(folder / "words.json", ["</s>", "<unk>", *words, "<pad>"])
    tokenizer = MarianTokenizer(pieces, pieces, vocabulary)
    torch.manual_seed(0)
    pad = tokenizer.pad_token_id
    config = MarianConfig(
        vocab_size=len(tokenizer), pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad, **SIZES
    )
    model = MarianMTModel(config)
    model.generation_config.num_beams = 1  # five beams would take most of the test
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_readme_shows_a_sentence_that_the_quick_start_can_translate():
    """The sentence is held out, its translation is the printed one, and its words (not its numbers) are in training.

    The quick start ends with this sentence, so its reader sees how the trained model translates it.
    """
    text = README.read_text(encoding="utf-8")
    source, translation = re.search(r'translate\("(.+)"\)\[0\]\["translation_text"\]\) +# (.+)', text).groups()
    quickstart = runpy.run_path(str(ROOT / "scripts" / "quickstart.py"))
    data = yaml.safe_load((ROOT / "scripts/recipes/quickstart.yaml").read_text(encoding="utf-8"))["data"]
    splits = build_phrases(data["source_lang"], data["target_lang"], data["train_size"], data["seed"])
    held_out = dict(zip(splits["test"]["source"], splits["test"]["target"], strict=True))
    assert quickstart["EXAMPLE"] == source
    assert held_out[source] == translation
    known = set(" ".join(splits["train"]["source"]).split())
    assert [word for word in source.split() if word not in known and not re.search(r"\d", word)] == []
