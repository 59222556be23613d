"""Ending in good order when a scheduler takes the machine away: SIGTERM, or SIGINT (Ctrl-C), saves and exits.

Transformers has `enable_jit_checkpoint` for this. It is not used, for three reasons. Each process waits three seconds
by a timer of its own, so the processes of one run stop at different steps and hang. It may save between the batches of
a step. Its checkpoint says that training had ended.
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
    """A signal ended training, after a checkpoint was saved; the exit status is that of the signal, 128 + number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Preemption(TrainerCallback):
    """Asks the Trainer to save and stop at the end of the optimizer step in which any process got a signal.

    An evaluation that is due at that step is made first, as the checkpoint needs to know how good it is. All
    processes agree, once a step, by one number over the CPU's network, for which no GPU is waited.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.extra = False  # the next save is not one that the recipe asks for
        self.agreed = 0  # the number of the signal that any process got, as far as they have told each other
        self._received = 0  # by this process
        self._saved_at: int | None = None
        self._group: dist.ProcessGroup | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of signals rather than die of them, here; only the main thread of a process can."""
        self._forget()  # what an earlier training was asked
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
        """The number of the signal that any process got, or 0; all processes must call this."""
        if args.world_size > 1:
            received = torch.tensor(self._received)
            dist.all_reduce(received, dist.ReduceOp.MAX, group=self._group)
            self.agreed = int(received)
        else:
            self.agreed = self._received
        return self.agreed

    def leave(self, args: TrainingArguments, state: TrainerState) -> None:
        """Leave if a signal ended training.

        Raises:
            Interrupted: it did. The run has been saved, and goes on from there.
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
        """Open the way by which processes agree."""
        if args.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the step saved; at the last step of an epoch `on_epoch_end` follows, and at the last of all a save."""
        if self.asked(args) and not control.should_training_stop and not float(state.epoch).is_integer():
            self._save(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the epoch saved if it is complete; if it was left, it is not: nothing is due."""
        if not self.agreed:
            return
        if self._saved_at == state.global_step:
            control.should_log = control.should_evaluate = control.should_save = False
        else:
            self._save(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop once all is saved, and not before: a checkpoint should not say that training has ended."""
        self._saved_at = state.global_step
        if self.asked(args):
            control.should_training_stop = True

    def _save(self, control: TrainerControl) -> None:
        self.extra = not control.should_save
        control.should_save = True


def outlive_signals(worker: int) -> None:
    """Let a worker of a DataLoader end when its parent says so, not when a signal is sent to all processes of a job.

    Without its workers the parent could not end the step that it is in.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
