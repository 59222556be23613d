"""Checkpoints of a run on disk: which checkpoints are whole, and which one to resume from."""

import errno
import logging
import lzma
import math
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoint_files import WEIGHTS
from ..durable import STAGING, discard, remove
from ..errors import UserError, one_line, quote
from ..reading import read_json
from .checksums import UNREAD, first_difference, other_run, read_checksums

logger = logging.getLogger(__name__)

REQUIRED = (TRAINER_STATE_NAME, WEIGHTS, "config.json", "tokenizer_config.json", "scheduler.pt")
OPTIMIZER, SHARDED_OPTIMIZER = "optimizer.pt", "optimizer_0/.metadata"  # .metadata is written after the shards
# The kinds of checkpoint. The recipe requests the regular ones. A run that is ended by a signal leaves an interrupted
# one: it is never averaged or chosen as the best, and it is deleted when the next checkpoint is saved.
REGULAR, INTERRUPTED = "checkpoint", "interrupted"


def checkpoints(run: Path, *kinds: str) -> list[Path]:
    """Return the checkpoint folders of a run, oldest step first, whole or not. Without `kinds`: the regular ones.

    Links are left out: the run must not delete the folder that a link points to.
    """
    return [path for _, path in _named(run, *kinds) if _is_folder(path)]


def _named(run: Path, *kinds: str) -> list[tuple[int, Path]]:
    """Return step and path of everything named exactly like a checkpoint (no leading zeros), oldest step first."""
    pattern = re.compile(rf"({'|'.join(kinds or [REGULAR])})-(0|[1-9][0-9]*)")
    found = [(match, path) for path in run.glob("*-*") if (match := pattern.fullmatch(path.name))]
    return sorted((int(match[2]), path) for match, path in found)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def problem(checkpoint: Path, run_id: str | None = None) -> str | None:
    """Return why a run cannot resume from a checkpoint, or None if it can. Without `run_id`, any run may resume.

    Each file has to be as it was saved (`checksums.json`). A checkpoint of an older version has no checksums. Its
    files are checked as far as their formats allow. The trainer state has to be of the checkpoint's step.
    """
    if not _is_folder(checkpoint):
        return "it is a link or a file, and a checkpoint is a folder of the run"
    for name in REQUIRED:
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    if not any((checkpoint / name).is_file() for name in (OPTIMIZER, SHARDED_OPTIMIZER)):
        return "the optimizer's state is missing"
    if reason := _wrong_generators(checkpoint):
        return reason
    try:
        saved = read_checksums(checkpoint)
        if saved is None:
            names = sorted(path.name for path in checkpoint.iterdir() if path.name != UNREAD and path.is_file())
            damage = next((damage for name in names if (damage := _damage(checkpoint / name))), None)
        else:
            damage = other_run(saved, run_id) or first_difference(checkpoint, saved["sha256"])
        return damage or _wrong_state(checkpoint)
    except ValueError as error:  # from reading the checksums or the state
        return str(error)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{error.filename or 'a file'} cannot be read: the disk is damaged"


def _wrong_generators(checkpoint: Path) -> str | None:
    """Return what is wrong with the generator states, or None. One process uses another file name than several."""
    present = {path.name for path in checkpoint.glob("rng_state*.pth")}
    if not present:
        return "the state of the random generators is missing"
    several = {f"rng_state_{rank}.pth" for rank in range(len(present))}
    if present not in ({"rng_state.pth"}, several):
        return f"{', '.join(sorted(present))} are not the random generators of one run"
    return None


def _wrong_state(checkpoint: Path) -> str | None:
    step = load_state(checkpoint).global_step
    return None if checkpoint.name.endswith(f"-{step}") else f"{TRAINER_STATE_NAME} is of step {step}"


def _damage(path: Path) -> str | None:
    """Return what is wrong with a file, checked by its format, or None."""
    if path.suffix == ".json":
        try:
            read_json(path)
        except ValueError as error:
            return str(error)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt"):  # compares the file's size with its header
                pass
        except SafetensorError as error:
            return f"{path.name} is damaged ({one_line(error)})"
    if path.suffix in (".pt", ".pth", ".bin") and not _is_whole_archive(path):
        return f"{path.name} is damaged (it is not whole, or its checksums are wrong)"
    return None


def _is_whole_archive(path: Path) -> bool:
    """Check a file of `torch.save`: a zip archive with a checksum for each part, which PyTorch does not check."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    # flipped bits in an archive can look like a broken directory, a password or another compression
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return False
    except OSError as error:
        if error.errno not in (errno.EINVAL, None):  # an offset before the start of the file, or invalid bzip2 data
            raise
        return False


def check_weights(checkpoint: Path, run_id: str | None = None) -> None:
    """Check that the weights for the final model are as this run saved them.

    Raises:
        UserError: the weights are missing, damaged or from another run. Only the user may decide to use worse weights.
    """
    path = checkpoint / WEIGHTS
    try:
        saved = read_checksums(checkpoint)
        if not path.is_file():
            damage = f"{WEIGHTS} is missing"
        else:
            damage = _damage(path) if saved is None else first_difference(checkpoint, saved["sha256"], [WEIGHTS])
        damage = other_run(saved, run_id) or damage
    except ValueError as error:
        damage = str(error)
    if damage:
        raise UserError(
            f"{checkpoint}: {damage}, and the final model is made of this checkpoint. Put back what the run saved, "
            "from a copy; or remove the folder and give the same command again: the final model is then made without "
            "it"
        )


def best_checkpoint(run: Path, state: TrainerState) -> Path | None:
    """Return the best checkpoint, if it still exists. Only its name counts: an old path of the run is not used."""
    known = {path.name: path for path in checkpoints(run)}
    names = (f"{REGULAR}-{state.best_global_step}", Path(state.best_model_checkpoint or "").name)
    return next((known[name] for name in names if name in known), None)


def find_best(run: Path, state: TrainerState) -> Path | None:
    """Return `best_checkpoint`, and write its path to the state, because the run's folder may have moved."""
    best = best_checkpoint(run, state)
    state.best_model_checkpoint = str(best) if best else None
    return best


def newest_whole(run: Path, run_id: str | None = None) -> Path | None:
    """Return the newest checkpoint from which training can resume exactly, or None. Nothing is renamed."""
    newest_first = reversed(checkpoints(run, REGULAR, INTERRUPTED))
    return next((path for path in newest_first if problem(path, run_id) is None), None)


def last_checkpoint(run: Path, run_id: str | None = None) -> Path | None:
    """Return the same checkpoint as `newest_whole`, and tidy the folder.

    A newer checkpoint that is damaged, or from another run, is renamed to `damaged-checkpoint-…`. A warning reports
    the reason. So `rotate` does not count this checkpoint. Anything else with a checkpoint's name, such as a link, is
    renamed, too. The remains of an interrupted save are deleted, also with a warning.
    """
    for draft in checkpoints(run / STAGING, REGULAR, INTERRUPTED):
        logger.warning("%s was being saved when the run was interrupted; what there is of it is removed", draft.name)
    discard(run / STAGING)
    found = [path for _, path in _named(run, REGULAR, INTERRUPTED)]
    for path in [path for path in found if not _is_folder(path)]:
        _set_aside(path, problem(path))
    for checkpoint in reversed(checkpoints(run, REGULAR, INTERRUPTED)):
        reason = problem(checkpoint, run_id)
        if reason is None:
            return checkpoint
        _set_aside(checkpoint, reason)
    return None


def _set_aside(checkpoint: Path, reason: str | None) -> None:
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    logger.warning("%s is not usable: %s. It is set aside as %s", checkpoint, reason, aside.name)
    discard(aside)  # left by an earlier call
    checkpoint.rename(aside)


def rotate(run: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest regular checkpoints beyond `limit`, but never the newest or the best.

    Transformers does the same, but here no partly deleted checkpoint is ever visible under its name.
    """
    present = checkpoints(run)
    kept = {present[-1], *({Path(best)} & set(present) if best else ())}
    surplus = len(present) - max(limit, len(kept)) if limit else 0
    for checkpoint in [path for path in present if path not in kept][: max(surplus, 0)]:
        remove(checkpoint)


def forget_interrupted(run: Path, newest: Path | None = None) -> None:
    """Delete all interrupted checkpoints except `newest`, because the run has passed them."""
    for checkpoint in checkpoints(run, INTERRUPTED):
        if checkpoint != newest:
            remove(checkpoint)


def load_state(checkpoint: Path) -> TrainerState:
    """Return the trainer state of a checkpoint.

    Raises:
        UserError: the file does not hold a trainer state.
    """
    path = checkpoint / TRAINER_STATE_NAME
    try:
        state = TrainerState.load_from_json(str(path))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged, or not what a Trainer writes ({one_line(error)})") from error
    for name, accepted in _STATE.items():
        value = getattr(state, name)
        if not accepted(value):
            raise UserError(f"{path} is damaged, or not what a Trainer writes ({name} is {quote(value)})")
    return state


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_callback(value: Any) -> bool:
    """Return True if a value can be the state of one callback."""
    return isinstance(value, dict) and all(isinstance(value.get(key, {}), dict) for key in ("args", "attributes"))


# A test for each field of a trainer state: which values it can hold.
_STATE: dict[str, Callable[[Any], bool]] = {
    "global_step": _is_count,
    "max_steps": _is_count,
    "best_global_step": lambda value: value is None or _is_count(value),
    "best_metric": lambda value: value is None or type(value) in (int, float),
    "best_model_checkpoint": lambda value: value is None or isinstance(value, str),
    "epoch": lambda value: value is None or (type(value) in (int, float) and 0 <= value < math.inf),
    "log_history": lambda value: (
        isinstance(value, list) and all(isinstance(entry, dict) and _is_count(entry.get("step", 0)) for entry in value)
    ),
    "stateful_callbacks": lambda value: (
        isinstance(value, dict)
        and all(_is_callback(one) for each in value.values() for one in (each if isinstance(each, list) else [each]))
    ),
}


def is_last(state: TrainerState) -> bool:
    """Return True if training ended at this checkpoint: all steps were made, or training stopped early."""
    stopped = state.stateful_callbacks.get("TrainerControl", {}).get("args", {}).get("should_training_stop", False)
    return stopped or state.global_step >= state.max_steps
