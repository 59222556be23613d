"""The README's Python runs as printed, and the commands it names exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import set_seed

from hf_deepwide import MATConfig, MATForConditionalGeneration
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


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

    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    wider = MATConfig.from_pretrained(tmp_path / "runs" / "wider")
    assert wider.attention_branches == 4
    assert (tmp_path / "runs" / "to-upload" / "modeling_mat.py").is_file()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:scripts|benchmarks)/[\w/]+\.(?:py|yaml)", README))))
def test_every_file_it_names_exists(path):
    assert (ROOT / path).is_file()
