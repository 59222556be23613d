"""Checkpoints of a run on disk: which are whole, and which to go on from."""

import json
import logging
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..errors import UserError

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
STAGING = ".saving"  # a checkpoint is written here and renamed when it is whole


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest step first, whole or not."""
    found = {
        int(match[1]): path
        for path in run.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()
    }
    return [found[step] for step in sorted(found)]


def problem(checkpoint: Path) -> str | None:
    """Why training cannot be resumed from a checkpoint, or None if it can.

    Files are read only as far as it takes to see that they are complete.
    """
    for name in (TRAINER_STATE_NAME, WEIGHTS, "config.json", "optimizer.pt", "scheduler.pt"):
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    states = [*checkpoint.glob("rng_state*.pth")]
    if not states:
        return "the state of the random generators is missing"
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except ValueError:
        return f"{TRAINER_STATE_NAME} is damaged"
    try:
        with safe_open(checkpoint / WEIGHTS, "pt"):  # compares the file's size with its header
            pass
    except SafetensorError as error:
        return f"{WEIGHTS} is damaged ({error})"
    for path in (checkpoint / "optimizer.pt", checkpoint / "scheduler.pt", *states):
        if not zipfile.is_zipfile(path):  # what `torch.save` writes; its directory comes last
            return f"{path.name} is damaged"
    return None


def last_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint from which training can be resumed exactly, or None.

    Damaged ones that are newer are set aside as `damaged-checkpoint-…`, with a warning that says what is wrong
    with them, so that they take no part in the rotation of old checkpoints.
    """
    for checkpoint in reversed(checkpoints(run)):
        reason = problem(checkpoint)
        if reason is None:
            return checkpoint
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
        logger.warning("%s is not usable: %s. It is set aside as %s", checkpoint, reason, aside.name)
        checkpoint.rename(aside)
    return None


def load_state(checkpoint: Path) -> TrainerState:
    """The trainer's state at a checkpoint."""
    return TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))


def load_history(folder: Path) -> list[dict]:
    """What was logged in a run, up to its newest checkpoint, or up to the checkpoint given.

    Raises:
        UserError: the folder is neither.
    """
    for checkpoint in (folder, *reversed(checkpoints(folder))):
        if (checkpoint / TRAINER_STATE_NAME).is_file():
            return load_state(checkpoint).log_history
    raise UserError(f"{folder} holds no {TRAINER_STATE_NAME}; give the folder of a run, or one of its checkpoints")


def is_last(state: TrainerState) -> bool:
    """True if training ended at this checkpoint: all steps made, or stopped early."""
    stopped = state.stateful_callbacks.get("TrainerControl", {}).get("args", {}).get("should_training_stop", False)
    return stopped or state.global_step >= state.max_steps
