"""A workspace with a corpus, recipes and checkpoints, in which tests call scripts wrongly.

A script runs in this process, as `python script arguments…` would. It must end within `SECONDS`, with status 2 and one
short line `error: …`. It must not change or delete any file that was in the workspace.
"""

import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from transformers import BertConfig, BertModel

from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.families import FAMILIES

SCRIPTS = Path(__file__).parents[2] / "scripts"
SECONDS, SHORT = 60, 450  # most seconds of a wrong call, on a busy machine; most characters of its error line
SIZES = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "max_position_embeddings": 64,
}
ENGLISH = [f"the dog number {number} sees a cat" for number in range(30)]
GERMAN = [f"der Hund Nummer {number} sieht eine Katze" for number in range(30)]
TRAINING = {
    "output_dir": "run",
    "max_tokens": 512,
    "max_steps": 2,
    "warmup_steps": 1,
    "disable_tqdm": True,
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "bf16": False,
}


def make_workspace(folder: Path) -> Path:
    """Fill a folder: `corpus/`, `recipe.yaml`, `masked.yaml`, `tokenizer/`, and a checkpoint per family."""
    (folder / "corpus").mkdir(parents=True)
    for split, count in (("train", 30), ("valid", 4), ("test", 4)):
        for lang, lines in (("en", ENGLISH), ("de", GERMAN)):
            (folder / "corpus" / f"{split}.{lang}").write_text("".join(f"{line}\n" for line in lines[:count]))
    tokenizer = train_tokenizer(ENGLISH + GERMAN, TokenizerArguments(vocab_size=90))
    tokenizer.save_pretrained(folder / "tokenizer")
    for name in ("vanilla_transformer", "latent_depth", "multipath_transformer"):
        family = FAMILIES[name]
        extra = {"learnable_path_weights": True} if name == "multipath_transformer" else {}
        family.lm(family.config(vocab_size=len(tokenizer), **SIZES, **extra)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    bert = BertConfig(vocab_size=90, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(bert).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    splits = {"train": "corpus/train", "validation": "corpus/valid"}
    shared = {"tokenizer": {"vocab_size": 90}, "training": TRAINING}
    recipe = {
        "model": {"family": "vanilla_transformer", **SIZES},
        "data": {**splits, "test": "corpus/test", "max_length": 64},
        "evaluation": {"num_beams": 1, "max_length_factor": 0.0, "max_length_offset": 4},
        **shared,
    }
    masked = {
        "model": {"family": "latent_depth", **SIZES},
        "data": {**splits, "languages": ["en", "de"], "max_length": 64},
        **shared,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "masked.yaml").write_text(yaml.safe_dump(masked))
    return folder


def files(folder: Path) -> dict[str, str]:
    """Map the name of every file in a folder to the file's digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail if the block takes more than `seconds`."""

    def end(*_: object) -> None:
        raise AssertionError(f"no end after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Workspace:
    """A copy of the workspace that a test may spoil. It is the working directory."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture) -> None:
        self.folder = folder
        self.capsys = capsys

    def put(self, name: str, content: str | bytes) -> None:
        """Write a file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def cut(self, name: str, count: int = 60) -> None:
        """Cut the last `count` bytes off a file."""
        self.put(name, (self.folder / name).read_bytes()[:-count])

    def remove(self, *names: str) -> None:
        """Remove files or folders."""
        for name in names:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def pipe(self, name: str) -> None:
        """Replace a file by a named pipe that nothing is ever written to."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    def link(self, name: str, target: str) -> None:
        """Replace a file by a symbolic link."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    def edit_config(self, model: str, **fields: object) -> None:
        """Set fields of a checkpoint's config."""
        config = json.loads((self.folder / model / "config.json").read_text())
        self.put(f"{model}/config.json", json.dumps({**config, **fields}))

    def error_of(self, script: str, *arguments: str) -> str:
        """Run a script and return the last line of its error output; the module's docstring lists the other checks."""
        before = files(self.folder)
        self.capsys.readouterr()
        called = patch.object(sys, "argv", [script, *arguments])
        with within(SECONDS), called, pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        written = self.capsys.readouterr().err
        after = files(self.folder)
        assert [name for name in before if after.get(name) != before[name]] == [], "files were harmed"
        assert end.value.code == 2
        assert "Traceback" not in written
        last = written.splitlines()[-1]
        assert len(last) <= SHORT
        if not re.match(r"[\w.-]+( \w+)*: error: ", last):  # argparse prints its own errors below the usage
            assert last.startswith("error: ")
            assert written.count("error: ") == 1
        return last


def spoilt(
    spoil: Callable[[Workspace], object] | None, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> Workspace:
    """Copy a workspace, make the copy the working directory, and let `spoil` break something in it."""
    copy = tmp_path / "workspace"
    shutil.copytree(folder, copy)
    os.chdir(copy)
    workspace = Workspace(copy, capsys)
    if spoil is not None:
        spoil(workspace)
    return workspace


class Payload:
    """An object whose pickle creates the file `FIRED` when it is loaded."""

    def __reduce__(self):
        return open, ("FIRED", "w")
