"""Saving checkpoints so that each is on disk in full or not at all, whatever happens."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME

from ..durable import STAGING, publish, remove, why_not_written
from ..errors import UserError
from .checkpoints import INTERRUPTED, REGULAR, check_best, checkpoints, forget_interrupted, rotate
from .preemption import Preemptible


class Saving(Preemptible):
    """A part of a Trainer: how it saves."""

    _run_dir: str | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return self._run_dir or super()._get_output_dir(trial)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # Training runs with `use_cache=False`, but that is no property of the model that is saved.
        self.model.config.use_cache = True
        super()._save(output_dir, state_dict)
        self.model.config.use_cache = self.args.use_cache

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint under another name and rename it, so that an interruption leaves none in part.

        Raises:
            UserError: on all processes, if any cannot write; what it has written is removed.
        """
        run, state, main = Path(self.args.output_dir), self.state, self.args.should_save
        draft = run / STAGING / f"{REGULAR}-{state.global_step}"  # the parent's name for it
        final = run / f"{INTERRUPTED if self.preemption.extra else REGULAR}-{state.global_step}"
        with self._together(final):
            if main:
                shutil.rmtree(run / STAGING, ignore_errors=True)
                draft.mkdir(parents=True)
        best, state.best_global_step = state.best_global_step, None  # the parent would look for it in the draft
        self._run_dir = str(run / STAGING)
        try:
            with self._together(final):
                super()._save_checkpoint(model, trial)
        finally:
            self._run_dir, state.best_global_step = None, best
        with self._together(final):
            folder = run / f"{REGULAR}-{best}"
            if best and (folder == final or folder.is_dir()):
                state.best_model_checkpoint = str(folder)
            if main:
                state.save_to_json(str(draft / TRAINER_STATE_NAME))
                if final.is_dir():  # of an earlier attempt
                    remove(final)
                publish(draft, final)
                (run / STAGING).rmdir()
                if not self.preemption.extra:
                    rotate(run, self.args.save_total_limit, state.best_model_checkpoint)
                forget_interrupted(run, final)
        self.preemption.extra = False

    def _load_best_model(self) -> None:
        if not self.preemption.agreed:  # else the run goes on later, and there may be little time
            check_best(Path(self.state.best_model_checkpoint))
            super()._load_best_model()

    @contextmanager
    def _together(self, checkpoint: Path) -> Iterator[None]:
        """Do a part of saving on all processes; a failure of one is one of all, in words."""
        failure = None
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            failure = why_not_written(error, checkpoint.parent)
            if failure is None:
                raise
        failures = [each for each in gather_object([failure]) if each]
        if not failures:
            return
        run = checkpoint.parent
        if self.args.should_save:
            shutil.rmtree(run / STAGING, ignore_errors=True)
        kept = checkpoints(run, REGULAR, INTERRUPTED)
        raise UserError(
            f"{checkpoint} cannot be saved: {failures[0]}. "
            + (f"The run is safe up to {kept[-1].name}. " if kept else "Nothing was saved before. ")
            + "Mend this (make room, or allow writing), and give the same command again to go on"
        )
