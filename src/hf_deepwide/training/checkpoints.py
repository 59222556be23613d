"""Checkpoints of a run on disk: which are whole, and which to go on from."""

import json
import logging
import re
import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..durable import STAGING, remove
from ..errors import UserError

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
REQUIRED = (TRAINER_STATE_NAME, WEIGHTS, "config.json", "tokenizer_config.json", "scheduler.pt")
OPTIMIZER = ("optimizer.pt", "optimizer_0/.metadata")  # the latter, written after the shards, of a sharded model
# The kinds of checkpoint: those that a recipe asks for, and the one that a run leaves where a signal ends it, which
# is no part of what is averaged or chosen from, and is deleted when the next one is saved.
REGULAR, INTERRUPTED = "checkpoint", "interrupted"


def checkpoints(run: Path, *kinds: str) -> list[Path]:
    """The checkpoint folders of a run, oldest step first, whole or not; without `kinds`, the regular ones."""
    pattern = re.compile(rf"({'|'.join(kinds or [REGULAR])})-(\d+)")
    found = [
        (int(match[2]), path.name, path)
        for path in run.glob("*-*")
        if (match := pattern.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, _, path in sorted(found)]


def problem(checkpoint: Path) -> str | None:
    """Why training cannot be resumed from a checkpoint, or None if it can.

    Files are read only as far as it takes to see that they are complete.
    """
    for name in REQUIRED:
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    if not any((checkpoint / name).is_file() for name in OPTIMIZER):
        return "the optimizer's state is missing"
    if not any(checkpoint.glob("rng_state*.pth")):
        return "the state of the random generators is missing"
    for path in sorted(checkpoint.iterdir()):
        if damage := _damage(path):
            return f"{path.name} is damaged ({damage})"
    return None


def _damage(path: Path) -> str | None:
    """What is wrong with a file, judged by its kind."""
    if path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            return str(error)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt"):  # compares the file's size with its header
                pass
        except SafetensorError as error:
            return str(error)
    if path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
        return "it is not whole"  # `torch.save` writes the directory of the archive last
    return None


def check_best(checkpoint: Path) -> None:
    """See that the weights of the best checkpoint can be loaded.

    Raises:
        UserError: they are missing or damaged; it is not for us to take worse ones in their place.
    """
    path = checkpoint / WEIGHTS
    damage = _damage(path) if path.is_file() else "missing"
    if damage:
        reason = damage if damage == "missing" else f"damaged ({damage})"
        raise UserError(
            f"{path} is {reason}, and {checkpoint.name} is the best checkpoint, to be the final model. Put it "
            "back from a copy; or remove its folder and give the same command again: the last one then takes its place"
        )


def newest_whole(run: Path) -> Path | None:
    """The newest checkpoint from which training can be resumed exactly, or None; nothing is set aside."""
    return next((path for path in reversed(checkpoints(run, REGULAR, INTERRUPTED)) if problem(path) is None), None)


def last_checkpoint(run: Path) -> Path | None:
    """As `newest_whole`, and the folder is tidied.

    Damaged ones that are newer are set aside as `damaged-checkpoint-…`, with a warning that says what is wrong
    with them, so that they take no part in the rotation of old checkpoints. What an interrupted save has left is
    removed, with a warning as well.
    """
    for draft in checkpoints(run / STAGING, REGULAR, INTERRUPTED):
        logger.warning("%s was being saved when the run was interrupted; what there is of it is removed", draft.name)
    shutil.rmtree(run / STAGING, ignore_errors=True)
    for checkpoint in reversed(checkpoints(run, REGULAR, INTERRUPTED)):
        reason = problem(checkpoint)
        if reason is None:
            return checkpoint
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
        logger.warning("%s is not usable: %s. It is set aside as %s", checkpoint, reason, aside.name)
        shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
        checkpoint.rename(aside)
    return None


def rotate(run: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest regular checkpoints beyond `limit`, but never the newest or the best.

    As Transformers does, only that a checkpoint on its way out is never seen in part.
    """
    present = checkpoints(run)
    kept = {present[-1], *([Path(best)] if best else [])}
    surplus = len(present) - max(limit, len(kept)) if limit else 0
    for checkpoint in [path for path in present if path not in kept][: max(surplus, 0)]:
        remove(checkpoint)


def forget_interrupted(run: Path, newest: Path | None = None) -> None:
    """Delete what interruptions have left, as the run is past them, except `newest`."""
    for checkpoint in checkpoints(run, INTERRUPTED):
        if checkpoint != newest:
            remove(checkpoint)


def load_state(checkpoint: Path) -> TrainerState:
    """The trainer's state at a checkpoint.

    Raises:
        UserError: what is there is not one.
    """
    path = checkpoint / TRAINER_STATE_NAME
    try:
        return TrainerState.load_from_json(str(path))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged, or not what a Trainer writes ({error})") from error


def load_history(folder: Path) -> list[dict]:
    """What was logged in a run, up to its newest checkpoint, or up to the checkpoint given.

    Raises:
        UserError: the folder is neither.
    """
    for checkpoint in (folder, *reversed(checkpoints(folder, REGULAR, INTERRUPTED))):
        if (checkpoint / TRAINER_STATE_NAME).is_file():
            return load_state(checkpoint).log_history
    raise UserError(f"{folder} holds no {TRAINER_STATE_NAME}; give the folder of a run, or one of its checkpoints")


def is_last(state: TrainerState) -> bool:
    """True if training ended at this checkpoint: all steps made, or stopped early."""
    stopped = state.stateful_callbacks.get("TrainerControl", {}).get("args", {}).get("should_training_stop", False)
    return stopped or state.global_step >= state.max_steps
