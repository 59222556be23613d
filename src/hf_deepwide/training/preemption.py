"""Preemption, for example by a scheduler: on SIGTERM or SIGINT (Ctrl-C), the run saves a checkpoint and exits.

Transformers has `enable_jit_checkpoint` for this. It is not used, for three reasons. Each process waits three seconds
by its own timer, so the processes of one run stop at different steps and hang. It may save between the batches of
an optimizer step. Its checkpoint states that training has ended.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(SystemExit):
    """Exit after a signal ended training and a checkpoint was saved. The exit status is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Preemption(TrainerCallback):
    """A callback that saves and stops at the end of the optimizer step in which any process got a signal.

    An evaluation that is due at that step is made first, because the checkpoint stores its result. Once a step, all
    processes exchange one number over the CPU's network, to agree without waiting for a GPU.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.extra = False  # whether the next save is one that the recipe does not request
        self.agreed = 0  # the number of the signal that any process got, as of the last exchange; 0: none
        self._received = 0  # the number of the signal that this process got; 0: none
        self._saved_at: int | None = None
        self._group: dist.ProcessGroup | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals in the block, instead of being ended by them. Only the main thread of a process can do so."""
        self._forget()  # signals of an earlier training
        before = {}
        if threading.current_thread() is threading.main_thread():
            # A signal that is ignored (`nohup`, a job in the background) stays so.
            before = {number: old for number in SIGNALS if (old := signal.getsignal(number)) is not signal.SIG_IGN}
        for number in before:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._received and os.environ.get("RANK", "0") == "0":
            name = signal.Signals(number).name
            line = f"{name}: the run ends after this step, and the evaluation if one is due\n"
            os.write(2, line.encode())  # `print` and `logging` are not safe here
        self._received = number

    def asked(self, args: TrainingArguments) -> int:
        """Return the number of the signal that any process got, or 0. All processes must call this."""
        if args.world_size > 1:
            received = torch.tensor(self._received)
            dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group)
            self.agreed = int(received)
        else:
            self.agreed = self._received
        return self.agreed

    def leave(self, args: TrainingArguments, state: TrainerState) -> None:
        """Exit if a signal ended training.

        Raises:
            Interrupted: a signal ended training. The run has been saved, and can be resumed.
        """
        if not self.agreed:
            return
        logger.warning(
            "%s ended the run after step %d of %d, which is saved in %s. Give the same command again, without "
            "--overwrite, to go on",
            signal.Signals(self.agreed).name,
            state.global_step,
            state.max_steps,
            args.output_dir,
        )
        raise Interrupted(self.agreed)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Create the process group in which the processes agree."""
        if args.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request a save, except at the last step of an epoch (see `on_epoch_end`) or of training (saved anyway)."""
        if self.asked(args) and not control.should_training_stop and not float(state.epoch).is_integer():
            self._save(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request a save if the epoch is complete. If it was left early, the run is already saved: do nothing."""
        if not self.agreed:
            return
        if self._saved_at == state.global_step:
            control.should_log = control.should_evaluate = control.should_save = False
        else:
            self._save(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop training after the save, not before it: the checkpoint must not state that training has ended."""
        self._saved_at = state.global_step
        if self.asked(args):
            control.should_training_stop = True

    def _save(self, control: TrainerControl) -> None:
        self.extra = not control.should_save
        control.should_save = True


def outlive_signals(worker: int) -> None:
    """Let a DataLoader worker end only at a signal from its parent, not at a signal to all processes of a job.

    Without its workers, the parent could not finish the current step.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
