"""Trainings for benchmarks: in a new process, with a log beside the run's folder, or in this process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_deepwide.checkpoint_files import read_results
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.tokenizer import train_tokenizer, training_texts
from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError
from hf_deepwide.runs.build import build_model
from hf_deepwide.runs.recipe import differences, load_recipe
from hf_deepwide.runs.yaml_values import to_yaml
from hf_deepwide.training.faults import NonFiniteError
from hf_deepwide.training.translation import TranslationTrainer

SOURCE = Path(__file__).parents[1] / "src"
COMMAND = (sys.executable, "-m", "hf_deepwide.cli", "train")


def train(recipe: dict[str, Any], *task: str, threads: int | None = None) -> None:
    """Train by a recipe in a new process, unless the run has ended; resume an interrupted run.

    Args:
        recipe: the values of the recipe, with `training.output_dir`.
        task: `masked-lm` or `classification`; nothing for translation.
        threads: number of threads of the new process; None leaves it to the environment of this process.

    Raises:
        NonFiniteError: a loss or a gradient was not finite, which is a result and not a mistake.
        UserError: the training failed, or the folder holds a finished run of another recipe.
    """
    run = Path(recipe["training"]["output_dir"])
    if results := read_results(run):
        earlier = results["recipe"]
        given = {  # results also hold defaults of keys that the recipe does not name
            section: {key: value for key, value in earlier[section].items() if key in keys}
            for section, keys in recipe.items()
        }
        if changes := differences(given, recipe):
            raise UserError(f"{run} holds another recipe ({'; '.join(changes)}); move it away, or give another --runs")
        return
    run.parent.mkdir(parents=True, exist_ok=True)
    written, log = run.parent / f"{run.name}.yaml", run.parent / f"{run.name}.log"
    write_whole(written, to_yaml(recipe))
    print(f"{time.strftime('%H:%M')} {run.name}: training, log in {log}", flush=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with log.open("a", encoding="utf-8") as file:
        command = [*COMMAND, *task, str(written)]
        done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        kind = NonFiniteError if done.returncode == NonFiniteError.status else UserError
        raise kind(f"{run.name} has failed: {' '.join(last)}")


def encoded_corpus(name: str, *splits: str) -> tuple[PreTrainedTokenizerBase, dict[str, Dataset]]:
    """Train a tokenizer on the corpus of a packaged recipe; return it, and the splits, encoded as in training."""
    recipe = load_recipe(name)
    texts = {split: load_parallel(recipe.data, split) for split in splits}
    tokenizer = train_tokenizer(training_texts(texts["train"]), recipe.tokenizer)
    return tokenizer, {
        split: encode(rows, tokenizer, recipe.data, filter=split == "train") for split, rows in texts.items()
    }


def trainer_of(
    name: str, changed: dict[str, Any], tokenizer: Any, encoded: dict[str, Dataset], build: Callable = build_model
) -> TranslationTrainer:
    """A trainer in this process for a packaged recipe with `changed` keys; `build` makes the model."""
    recipe = load_recipe(name, [f"--{key}={json.dumps(value)}" for key, value in changed.items()])
    args = recipe.training_arguments()
    model = build(recipe, tokenizer, args)
    return TranslationTrainer(model, args, tokenizer, encoded["train"], encoded.get("validation"))
