"""The log of a run, read from a checkpoint to draw a figure. It is checked, because anybody may have written it."""

from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from ..analysis import gradient_norms, layer_utilization
from ..analysis.layer_joints import GATE
from ..analysis.learning_curves import is_drawn
from ..errors import UserError, quote
from .checkpoints import INTERRUPTED, REGULAR, checkpoints, load_state

# The log entries that hold lists for each stack, and the depth of the lists: by layer, or by posterior and layer.
TABLES = {gradient_norms.KEY: 1, layer_utilization.KEY: 2}


def load_history(folder: Path) -> list[dict]:
    """Return the log of a run up to its newest checkpoint, or up to the given checkpoint.

    Raises:
        UserError: the folder is neither a run nor a checkpoint, or its log is damaged.
    """
    for checkpoint in (folder, *reversed(checkpoints(folder, REGULAR, INTERRUPTED))):
        if (path := checkpoint / TRAINER_STATE_NAME).is_file():
            history = load_state(checkpoint).log_history
            if problem := _history_problem(history):
                raise UserError(f"{path} is damaged, or not what a Trainer writes: {problem}")
            return history
    raise UserError(f"{folder} holds no {TRAINER_STATE_NAME}; give the folder of a run, or one of its checkpoints")


def _history_problem(history: list[dict]) -> str | None:
    """Return what is wrong with the entries of a log, or None. Each needs a step, and numbers that can be drawn."""
    for number, entry in enumerate(history, start=1):
        if "step" not in entry:
            return f"entry {number} of log_history has no step"
        drawn = [name for name in entry if is_drawn(name) or name.startswith(GATE)]
        numbers = all(_shape(entry[name]) == () for name in drawn)
        if not numbers or not all(_are_tables(entry[name], depth) for name, depth in TABLES.items() if name in entry):
            return f"entry {number} of log_history is {quote(entry)}, which no Trainer logs"
    for name in TABLES:
        shapes = [{stack: _shape(rows) for stack, rows in entry[name].items()} for entry in history if name in entry]
        if any(shape != shapes[0] for shape in shapes):
            return f"the {name} in log_history are not of one model"
    return None


def _are_tables(stacks: Any, depth: int) -> bool:
    """Return True if each stack has numbers, in lists nested `depth` deep."""
    return isinstance(stacks, dict) and bool(stacks) and all(len(_shape(s) or ()) == depth for s in stacks.values())


def _shape(value: Any, deepest: int = 2) -> tuple[int, ...] | None:
    """Return the shape of a list of numbers or of a list of such lists; `()` for a number; None for anything else."""
    if isinstance(value, list) and deepest:
        shapes = {_shape(row, deepest - 1) for row in value}
        shape = shapes.pop() if len(shapes) == 1 else None
        return None if shape is None else (len(value), *shape)
    return () if type(value) is float or (type(value) is int and abs(value) < 2**1000) else None
