"""A training in a process of its own, for benchmarks that need several; its output goes to a log beside its folder."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError
from hf_deepwide.runs.recipe import differences
from hf_deepwide.runs.yaml_values import to_yaml
from hf_deepwide.training.faults import NonFiniteError

SOURCE = Path(__file__).parents[1] / "src"
COMMAND = (sys.executable, "-m", "hf_deepwide.cli", "train")


def train(recipe: dict[str, Any], *task: str, threads: int | None = None) -> None:
    """Train by a recipe, unless it has ended; an interrupted training goes on.

    Args:
        recipe: the values of the recipe, with `training.output_dir`.
        task: `masked-lm` or `classification`; nothing for translation.
        threads: how many the process may use; None: as many as this process.

    Raises:
        NonFiniteError: a loss or a gradient was not finite, which is a result and not a mistake.
        UserError: the training failed, or the folder holds a finished run of another recipe.
    """
    run = Path(recipe["training"]["output_dir"])
    if (run / "results.json").is_file():
        earlier = json.loads((run / "results.json").read_text(encoding="utf-8"))["recipe"]
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
