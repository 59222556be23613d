"""The position of a run in a stream, kept in checkpoints, so that resuming does not read the whole stream again."""

from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..data.streaming import EndlessStream


class StreamPosition(TrainerCallback, ExportableState):
    """A callback that stores the position of an `EndlessStream` in checkpoints, and restores it.

    The position is the start of a buffer (`StreamBatches`), whose batches are made again: at most one buffer is read
    twice. All processes are at the same position, so only that of the main process is stored.
    """

    def __init__(self, position: dict[str, Any] | None = None) -> None:
        self.position = position
        self._stream: EndlessStream | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader | None = None,
        **kwargs: Any,
    ) -> None:
        """Set the start of the stream. By now the Trainer has restored `position` from the checkpoint, if any."""
        self._stream = train_dataloader.dataset
        self._stream.start = self.position

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count passes over the stream as epochs. The Trainer counts the whole training as one epoch."""
        if self._stream is not None:
            state.epoch = self._stream.epochs

    def state(self) -> dict:
        """Return the position, which a checkpoint stores and the Trainer restores."""
        position = self._stream.position if self._stream else self.position
        return {"args": {"position": position}, "attributes": {}}


def collate_stream(collator: Any, stream: EndlessStream) -> Any:
    """Return `collator` for the batches of `stream`. Batches from before a resume are empty, and stay empty.

    A collator whose batches depend on the pass gets the number of the pass. No worker reads ahead, so it is current.
    """
    tell = getattr(collator, "set_epoch", None)

    def collate(rows: list[dict]) -> dict[str, Any]:
        if not rows:
            return {}
        if tell is not None:
            tell(stream.epoch)
        return collator(rows)

    return collate
