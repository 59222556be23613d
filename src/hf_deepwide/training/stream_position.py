"""Where in a stream a run was when a checkpoint was saved, so that resuming does not read it all again."""

from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..data.streaming import EndlessStream


class StreamPosition(TrainerCallback, ExportableState):
    """Keeps the position of an `EndlessStream` in checkpoints, and takes it up again.

    It is the beginning of a buffer (`StreamBatches`), whose batches are made anew: at most one buffer is read twice.
    All processes are in the same place, so that the main process's position is everybody's.
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
        """The Trainer has by now put what the checkpoint said in our place."""
        self._stream = train_dataloader.dataset
        self._stream.start = self.position

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count passes over the stream as epochs: to the Trainer, the whole training is one."""
        if self._stream is not None:
            state.epoch = self._stream.epochs

    def state(self) -> dict:
        """What a checkpoint keeps, for the Trainer to restore."""
        position = self._stream.position if self._stream else self.position
        return {"args": {"position": position}, "attributes": {}}


def collate_stream(collator: Any, stream: EndlessStream) -> Any:
    """`collator` for the batches of `stream`: nothing is made of those that stand for what was seen.

    A collator that makes other batches in each pass is told the pass. No worker reads ahead of it.
    """
    tell = getattr(collator, "set_epoch", None)

    def collate(rows: list[dict]) -> dict[str, Any]:
        if not rows:
            return {}
        if tell is not None:
            tell(stream.epoch)
        return collator(rows)

    return collate
