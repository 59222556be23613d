"""Saving checkpoints so that each is on disk in full or not at all, whatever happens, and resuming from them."""

import errno
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from safetensors import SafetensorError
from transformers import PreTrainedModel, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoint_files import MARK
from ..data.arguments import Places
from ..data.digest import data_digest
from ..durable import STAGING, Writing, discard, publish, remove
from ..errors import UserError, quote
from .checkpoints import (
    INTERRUPTED,
    REGULAR,
    SHARDED_OPTIMIZER,
    checkpoints,
    forget_interrupted,
    rotate,
)
from .checksums import check_data, write_checksums
from .preemption import Preemption

if TYPE_CHECKING:
    from .trainer import TokenBatchTrainer

logger = logging.getLogger(__name__)


class Saving:
    """The part of a trainer that saves checkpoints and resumes from them.

    Args:
        trainer: the trainer, whose arguments and state it looks at.
        preemption: the callback that records whether the recipe requests a checkpoint.
    """

    def __init__(self, trainer: "TokenBatchTrainer", preemption: Preemption) -> None:
        self.trainer, self.preemption = trainer, preemption
        self.draft_folder: str | None = None  # the folder in which a checkpoint is being written, else None
        self.run_id: str | None = None  # id of the run that the checkpoints belong to, if any; set by the run's code
        self._digests: dict[str, str] = {}

    def take_digests(self, train_dataset: Any, eval_dataset: Any, data: Places) -> None:
        """Compute the digests of the data for training and validation. Each checkpoint stores them."""
        splits = {"training": train_dataset, "validation": eval_dataset}
        kinds = (Dataset, IterableDataset)
        self._digests = {name: data_digest(rows, data) for name, rows in splits.items() if isinstance(rows, kinds)}

    def check_data(self, checkpoint: str) -> None:
        """Compare the data with the data of a checkpoint.

        Raises:
            UserError: the data differ.
        """
        check_data(Path(checkpoint), self._digests)

    def check_sharding(self, checkpoint: str) -> None:
        """Check that a run resumes with sharding if its checkpoint is sharded, and only then.

        Raises:
            UserError: only one of the two is sharded.
        """
        was, now = (Path(checkpoint) / SHARDED_OPTIMIZER).is_file(), self.trainer.sharding.enabled
        if was != now:
            raise UserError(
                f"{checkpoint} {'holds shards' if was else 'holds no shards'} of the optimizer, but this start "
                f"{'uses' if now else 'does not use'} FSDP. Set distributed_type: {'FSDP' if was else 'any but FSDP'} "
                "in accelerate's config, give another training.output_dir, or --overwrite to start afresh"
            )

    def reseeds(self, checkpoint: str | None) -> bool:
        """Set new seeds if another number of processes saved the checkpoint. Return whether it set them."""
        args, step = self.trainer.args, self.trainer.state.global_step
        saved = len(list(Path(checkpoint).glob("rng_state*.pth"))) if checkpoint else 0
        if not checkpoint or saved == args.world_size:
            return False
        # The seed differs from that of the start, or the first random numbers of the run would be repeated.
        set_seed((args.seed + step * 1_000_003 + args.process_index) % 2**32)
        if args.process_index == 0:
            logger.warning(
                "%d processes saved %s, and now there are %d. Dropout gets new random seeds, so the final weights "
                "will differ from those of an uninterrupted run",
                *(saved, checkpoint, args.world_size),
            )
        return True

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Let the block write a checkpoint to a draft folder, and rename the draft when it is complete.

        Raises:
            UserError: one process cannot write. All processes raise it, and the draft is deleted.
        """
        args, state = self.trainer.args, self.trainer.state
        run, main = Path(args.output_dir), args.should_save
        draft = run / STAGING / f"{REGULAR}-{state.global_step}"  # the name that the parent uses
        final = run / f"{INTERRUPTED if self.preemption.extra else REGULAR}-{state.global_step}"
        # 1. Make an empty draft.
        with self._together(final):
            if main:
                if self.run_id is not None and not (run / MARK).is_file():  # no run could resume from it
                    raise FileNotFoundError(errno.ENOENT, "the run's folder was removed, or moved away")
                discard(run / STAGING)
                draft.mkdir(parents=True)
        # 2. The parent writes. The best step is hidden: the parent would look for its checkpoint in the draft folder.
        best, state.best_global_step = state.best_global_step, None
        self.draft_folder = str(run / STAGING)
        try:
            with self._together(final):
                yield
        finally:
            self.draft_folder, state.best_global_step = None, best
        # 3. Write state and checksums, then rename the draft, and only then delete older checkpoints.
        with self._together(final):
            folder = run / f"{REGULAR}-{best}"
            if best and (folder == final or folder.is_dir()):
                state.best_model_checkpoint = str(folder)
            if main:
                state.save_to_json(str(draft / TRAINER_STATE_NAME))
                write_checksums(draft, self._digests, self.run_id)
                if final.is_dir():  # left by an earlier attempt
                    remove(final)
                publish(draft, final)
                (run / STAGING).rmdir()
                if not self.preemption.extra:
                    rotate(run, args.save_total_limit, state.best_model_checkpoint)
                forget_interrupted(run, final)
        self.preemption.extra = False

    @contextmanager
    def _together(self, checkpoint: Path) -> Iterator[None]:
        """Do a part of saving on all processes; if one of them fails, all raise the same `UserError`."""
        with Writing(checkpoint) as writing:
            yield
        failures = [each for each in gather_object([writing.why]) if each]
        if not failures:
            return
        run = checkpoint.parent
        if self.trainer.args.should_save:
            shutil.rmtree(run / STAGING, ignore_errors=True)
        kept = checkpoints(run, REGULAR, INTERRUPTED)
        raise UserError(
            f"{checkpoint} cannot be saved: {failures[0]}. "
            + (f"The run is safe up to {kept[-1].name}. " if kept else "Nothing was saved before. ")
            + "Mend this (make room, or allow writing), and give the same command again to go on"
        )


@contextmanager
def fitting(checkpoint: str | None) -> Iterator[None]:
    """Raise a clear `UserError` if a checkpoint can be read, but does not fit this model, optimizer or schedule."""
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


def check_loaded(model: PreTrainedModel, load_result: Any) -> None:
    """Check that a checkpoint held exactly the model's weights. `load_result` was returned by `load_state_dict`.

    Raises:
        UserError: the checkpoint lacks a weight, or has one that the model does not have.
    """
    # Tied weights and constant tables are not in a checkpoint.
    expected = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in expected]
    if odd := sorted([*load_result.missing_keys, *load_result.unexpected_keys]):
        raise UserError(
            f"the checkpoint has no weights for {odd[0]}"
            if odd[0] in load_result.missing_keys
            else f"the checkpoint has weights for {odd[0]}, which the model does not have"
        )
