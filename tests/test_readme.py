"""What the README prints runs as printed: its Python on the model it names, its commands as far as their data."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import set_seed

from hf_deepwide import MATConfig, MATForConditionalGeneration
from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]
COMMANDS = re.findall(r"(?:^|`)python (scripts/\w+\.py)([^`\n#]*)", README.replace("\\\n", " "), flags=re.MULTILINE)


def test_the_python_example_runs_as_printed(tmp_path):
    """In a folder whose runs/quickstart is a small untrained model of the recipe's kind."""
    run = tmp_path / "runs" / "quickstart"
    tokenizer = train_tokenizer(["Der Preis beträgt 12,50 €.", "The price is €12.50."] * 9, TokenizerArguments(200))
    set_seed(0)
    sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
    config = MATConfig(vocab_size=len(tokenizer), attention_branches=2, **sizes)
    model = MATForConditionalGeneration(config)
    model.generation_config.max_length = 8
    model.save_pretrained(run)
    tokenizer.save_pretrained(run)

    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, "-c", PYTHON], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    wider = MATConfig.from_pretrained(tmp_path / "runs" / "wider")
    assert wider.attention_branches == 4
    assert (tmp_path / "runs" / "to-upload" / "modeling_mat.py").is_file()


def test_the_python_example_is_a_sentence_that_the_quick_start_can_translate():
    """A held-out one of its corpus, with the printed answer, and its words and numbers' digits all in training.

    The quick start ends with this sentence, so whoever runs it sees what the trained model makes of it.
    """
    source, translation = re.search(r'translate\("(.+)"\)\[0\]\["translation_text"\]\) +# (.+)', PYTHON).groups()
    quickstart = runpy.run_path(str(ROOT / "scripts" / "quickstart.py"))
    data = yaml.safe_load((ROOT / "scripts/recipes/quickstart.yaml").read_text(encoding="utf-8"))["data"]
    splits = build_phrases(data["source_lang"], data["target_lang"], data["train_size"], data["seed"])
    held_out = dict(zip(splits["test"]["source"], splits["test"]["target"], strict=True))
    assert quickstart["EXAMPLE"] == source
    assert held_out[source] == translation
    known = set(" ".join(splits["train"]["source"]).split())
    assert [word for word in source.split() if word not in known and not re.search(r"\d", word)] == []


@pytest.mark.parametrize(("script", "words"), COMMANDS)
def test_the_commands_run_as_far_as_they_can_without_data(script, words, tmp_path, monkeypatch, capsys):
    """`--help` to its end; a training until it misses its corpus, which is what it says in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_DEEPWIDE_DATA", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the walkthrough sets its own
    monkeypatch.setattr(sys, "argv", [script, *words.split()])
    Path("scripts").symlink_to(ROOT / "scripts")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    if "--help" in words:
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith("usage: ")
    else:
        assert script == "scripts/train_translation.py"
        assert "error: no file " in capsys.readouterr().err.splitlines()[-1]


def test_the_commands_are_found():
    assert len(COMMANDS) > 10
    for target in re.findall(r"^make (\S+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:scripts|benchmarks)/[\w/]+\.(?:py|yaml)", README))))
def test_every_file_it_names_exists(path):
    assert (ROOT / path).is_file()
