"""A run that takes seconds: a recipe for the phrases corpus. Shared by the training tests."""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from matplotlib.figure import Figure
from transformers.trainer_callback import CallbackHandler

from hf_deepwide.data import phrases
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer, training_texts
from hf_deepwide.runs.build import build_model
from hf_deepwide.runs.recipe import Recipe, check_recipe
from hf_deepwide.training.translation import TranslationTrainer

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_translation.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PATHS = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
WITH_HELPERS = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(PATHS)}  # for processes that import these helpers
LAUNCH = "from accelerate.commands.launch import main; main()"  # code that launches processes

MODEL = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.1,
    "max_position_embeddings": 128,
}

# The results of a run that its model card reports.
RESULTS = {
    "parameters": 7,
    "train": {"steps": 1, "epochs": 1.0, "target_tokens": 9, "minutes": 0.1, "tokens_per_second": 5.0,
              "precision": "float32", "processes": 1, "weights": "the last checkpoint"},
    "machine": {"processor": "x86_64", "cores": 1, "gpus": ["H100"]},
    "versions": {"python": "3"},
    "test": {"bleu": 1.0, "chrf": 2.0, "sentences": 3, "signature": {"bleu": "a|b", "chrf": "c"}},
}  # fmt: skip


def tiny_values(output_dir: Path, family: str = "mat", model: dict | None = None, **training) -> dict:
    """The sections of a tiny recipe: 20 steps, in epochs of 6 steps."""
    by_steps = {
        f"{kind}_{name}": value
        for kind in ("eval", "save")
        for name, value in (("strategy", "steps"), ("steps", 4))
        if name == "strategy" or training.get(f"{kind}_strategy", "steps") == "steps"
    }
    return {
        "model": {"family": family, **MODEL, **(model or {})},
        "data": {"format": "phrases", "source_lang": "de", "target_lang": "en", "train_size": 150, "max_length": 128},
        "tokenizer": {"vocab_size": 200},
        "training": {
            "output_dir": str(output_dir),
            "seed": 3,
            "max_tokens": 1024,
            "max_steps": 20,
            "learning_rate": 2e-3,
            "warmup_steps": 5,
            **by_steps,
            "save_total_limit": 10,
            "logging_steps": 2,
            "disable_tqdm": True,
            **training,
        },
        "evaluation": {"num_beams": 1, "max_length_factor": 0.0, "max_length_offset": 8},
    }


def tiny_recipe(output_dir: Path, **options) -> Recipe:
    """The recipe with the values of `tiny_values`."""
    values = tiny_values(output_dir, **options)
    return check_recipe(values, "tiny", "tiny.yaml")


def write_recipe(folder: Path, values: dict) -> Path:
    """Write a recipe file, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def tiny_corpus() -> SimpleNamespace:
    """Twice as many pairs of the phrases corpus as the tiny recipe uses, encoded, and their tokenizer."""
    recipe = tiny_recipe(Path("unused"))
    recipe.data.train_size = 300
    texts = load_parallel(recipe.data, "train")
    tokenizer = train_tokenizer(training_texts(texts), TokenizerArguments(vocab_size=200))
    return SimpleNamespace(tokenizer=tokenizer, encoded=encode(texts, tokenizer, recipe.data, filter=True))


def tiny_trainer(
    corpus: SimpleNamespace, output_dir: Path, family: str = "mat", model: dict | None = None, **training
) -> TranslationTrainer:
    """A trainer on `corpus`, in float32, which logs every step.

    It saves only after the last step. Training does not evaluate, but 40 of the pairs are the evaluation set.
    """
    training = {
        "bf16": False, "eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "steps",
        "save_steps": 10_000, "max_tokens": 1024, "max_steps": 8, "logging_steps": 1, **training,
    }  # fmt: skip
    recipe = tiny_recipe(output_dir, family=family, model=model, **training)
    args = recipe.training_arguments()
    start = build_model(recipe, corpus.tokenizer, args)
    return TranslationTrainer(start, args, corpus.tokenizer, corpus.encoded, corpus.encoded.select(range(40)))


def run_script_here(script: Path, *arguments: str) -> None:
    """Run a script in this process, as `python script arguments…` would run it."""
    with patch.object(sys, "argv", [str(script), *arguments]):
        runpy.run_path(str(script), run_name="__main__")


@contextmanager
def counted_updates() -> Iterator[list[int]]:
    """Yield a list of the optimizer steps made in the block, by number. A resumed run makes only its last steps."""
    made: list[int] = []
    plain = CallbackHandler.on_step_end

    def on_step_end(handler: CallbackHandler, args: Any, state: Any, control: Any) -> Any:
        made.append(state.global_step)
        return plain(handler, args, state, control)

    with patch.object(CallbackHandler, "on_step_end", on_step_end):
        yield made


def hold_out_few(patch: pytest.MonkeyPatch) -> None:
    """Hold out 60 phrases for validation and 60 for the test, instead of 500 for each."""
    patch.setattr(phrases, "HELD_OUT", 60)
    phrases.build_phrases.cache_clear()


def leave_figures_blank(patch: pytest.MonkeyPatch) -> None:
    """Write empty files in place of figures. Figures that go to memory are still drawn."""
    draw = Figure.savefig

    def savefig(figure: Figure, target: Any, **options: Any) -> None:
        if isinstance(target, (str, Path)):
            Path(target).write_bytes(b"")
        else:
            draw(figure, target, **options)

    patch.setattr(Figure, "savefig", savefig)
