"""Saving checkpoints so that each is on disk in full or not at all, whatever happens, and going on from them."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from safetensors import SafetensorError
from torch import nn
from transformers import set_seed
from transformers.trainer import TRAINER_STATE_NAME

from ..data.digest import data_digest
from ..durable import STAGING, discard, publish, remove, why_not_written
from ..errors import UserError, quote
from .checkpoints import (
    INTERRUPTED,
    REGULAR,
    best_checkpoint,
    check_weights,
    checkpoints,
    forget_interrupted,
    rotate,
)
from .checksums import check_data, write_checksums
from .preemption import Preemptible

logger = logging.getLogger(__name__)


class Saving(Preemptible):
    """A part of a Trainer: how it saves, and how it goes on from what was saved."""

    _run_dir: str | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent; what the data are is kept in each checkpoint.

        Raises:
            UserError: training would go on with other data, or the checkpoint is not one of this run.
        """
        splits = {"training": self.train_dataset, "validation": self.eval_dataset}
        kinds = (Dataset, IterableDataset)
        self._data = {name: data_digest(data, self.data) for name, data in splits.items() if isinstance(data, kinds)}
        return super().train(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        check_data(Path(resume_from_checkpoint), self._data)
        with _fitting(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _fitting(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with _fitting(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_callback_state(self) -> None:
        best = best_checkpoint(Path(self.args.output_dir), self.state)
        self.state.best_model_checkpoint = str(best) if best else None
        with _fitting(f"{REGULAR}-{self.state.global_step}"):
            super()._load_callback_state()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        saved = len(list(Path(checkpoint).glob("rng_state*.pth"))) if checkpoint else 0
        if checkpoint and saved != self.args.world_size:
            # Not as at the start of the run, or its first random numbers would come again.
            set_seed((self.args.seed + self.state.global_step * 1_000_003 + self.args.process_index) % 2**32)
            logger.warning(
                "%s was saved by %d processes, and there are %d now: random numbers, as of dropout, go on from a new "
                "seed, so that the run does not end as it would have with %d",
                *(checkpoint, saved, self.args.world_size, saved),
            )
            return
        with _fitting(checkpoint):
            super()._load_rng_state(checkpoint)

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
                discard(run / STAGING)
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
                write_checksums(draft, self._data)
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
            check_weights(Path(self.state.best_model_checkpoint))
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


@contextmanager
def _fitting(checkpoint: str | None) -> Iterator[None]:
    """Say in words that what a checkpoint holds can be read, but is nothing for this model, optimizer or schedule."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        reason = quote(str(error))
        raise UserError(
            f"{checkpoint} does not fit this run ({type(error).__name__}: {reason}). If another run saved it, or part "
            "of it, remove the folder and give the same command again: the run goes on from the checkpoint before it"
        ) from error
