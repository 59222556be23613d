"""The folder of a run: which run it belongs to, which run may begin or resume in it, and how a run replaces another.

    run.json         says that the folder is a run's, which run's (its id), and how the run is run
    recipe.yaml      what the run is
    checkpoint-*     how far the run has come
    results.json     that the run is finished; written last

A run that replaces an older run begins in the hidden folder `.new`, and the older run stays as it is. Once `.new`
holds a checkpoint, the older run is deleted, `.new` is renamed to `.renewed`, and the content of `.renewed` moves up.
Whenever a process is killed, these folders show which steps are left. A run that a signal ends before its first
regular checkpoint stays in `.new`, because the user may not want to replace the older run. When the new run is
resumed, it takes the older run's place.
"""

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from accelerate import PartialState
from datasets import disable_progress_bars
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..checkpoint_files import MARK, RESULTS, read_results
from ..durable import Writing, discard, draft_of, is_same, write_whole
from ..errors import UserError
from ..lock import LOCK, locked
from ..reading import read_text
from ..training.arguments import TranslationTrainingArguments
from ..training.checkpoints import (
    INTERRUPTED,
    REGULAR,
    WEIGHTS,
    best_checkpoint,
    check_weights,
    checkpoints,
    is_last,
    last_checkpoint,
    load_state,
    newest_whole,
)
from ..training.faults import FAULTS
from ..training.memory import bound_kernel_caches, keep_memory
from .averaging import SIDE_FILES
from .recipe import NO_DIFFERENCE, RECIPE, Recipe, differences, read_mark
from .written_files import CURVES, KINDS, clear_run, has_seeds, seeds_in
from .yaml_values import LARGEST, parse_yaml, to_yaml

logger = logging.getLogger(__name__)

NEW, RENEWED = ".new", ".renewed"
# Files that the folder of a run may hold before its mark. An older version named drafts by a dot and the file's name.
DRAFTS = (LOCK, *(name for file in (MARK, RECIPE) for name in (draft_of(Path(file)).name, f".{file}")))
SHOWN = 3  # differences of two recipes in a message
# Keys of the section training whose results on this machine are compared (`resolved`), once a run has begun.
RESOLVED = {"gradient_accumulation_steps", "bf16", "fp16", "attn_implementation", "pad_to_multiple_of"}
EARLIER = {"padding": 8}  # values that marks of older versions leave out, because they were always the same


@dataclass
class Start:
    """How a run begins in its folder.

    Args:
        checkpoint: the checkpoint that the run is resumed from.
        ended: True if no training is left.
        results: the content of `results.json`, if a finished run is only scored again.
        run_id: the id of the run; None for a run that an older version began.
    """

    checkpoint: Path | None = None
    ended: bool = False
    results: dict[str, Any] | None = None
    run_id: str | None = None


class RunFolder:
    """The folder of one run: what may begin in it, what is written to it, and what a new run clears from it.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def opened(
        self, recipe: Recipe, args: TranslationTrainingArguments, overwrite: bool, process: PartialState
    ) -> Iterator[Start]:
        """Lock the folder for this run, and set `args.output_dir` to the folder that the run is written to.

        Raises:
            UserError: the folder is in use, holds a finished run or another run, or does not belong to a run.
        """
        run, main = self.path, process.is_main_process
        if main:
            self.check(recipe)
            run.mkdir(parents=True, exist_ok=True)
        with locked(run) if main else nullcontext():
            try:
                if main:
                    self.open(recipe, args, overwrite)
                else:
                    disable_progress_bars()
                process.wait_for_everyone()
                bound_kernel_caches()
                if args.keep_memory:
                    keep_memory()
                yield self._start(args, process)
            finally:
                begun = main and read_mark(run / NEW) is not None
                if begun and not (checkpoints(run / NEW, *KINDS) or (run / NEW / FAULTS).is_dir()):
                    discard(run / NEW)  # the new run ended before it saved anything

    def _start(self, args: TranslationTrainingArguments, process: PartialState) -> Start:
        run = self.path
        if (run / NEW).is_dir():
            args.output_dir = str(run / NEW)
            return Start(run_id=read_id(run / NEW))
        if (run / RESULTS).is_file():
            return Start(ended=True, results=read_results(run))
        if process.is_main_process:
            last_checkpoint(run, read_id(run))  # sets damaged checkpoints aside before the other processes look
        process.wait_for_everyone()
        checkpoint = next(reversed(checkpoints(run, REGULAR, INTERRUPTED)), None)  # was found to be whole
        ended = checkpoint is not None and is_last(load_state(checkpoint))
        return Start(checkpoint, ended, run_id=read_id(run))

    def check(self, recipe: Recipe) -> None:
        """Refuse a folder that a run must not be written to, with any options. This check writes nothing."""
        run = self.path
        if run.exists() and not run.is_dir():
            raise UserError(f"training.output_dir: {run} is a file")
        for key, given in (("model.init_from", recipe.init_from), ("tokenizer.path", recipe.tokenizer.path)):
            if given and (_is_within(run, Path(given)) or _is_within(Path(given), run)):
                raise UserError(
                    f"training.output_dir: {run} and {key} {given} are one folder, or one is in the other, and the "
                    "run would replace what it starts from; give another training.output_dir"
                )
        for folder in (run / FAULTS, (run / CURVES).parent, run / "runs", run / NEW, run / RENEWED):
            if folder.is_symlink():
                raise UserError(
                    f"{folder} is a link, and a run writes and deletes within its own folder alone; remove the link, "
                    "or give another training.output_dir"
                )
        if run.is_dir() and read_mark(run) is None and any(path.name not in DRAFTS for path in run.iterdir()):
            raise UserError(f"training.output_dir: {run} is not empty and holds no run; give another folder")

    def open(self, recipe: Recipe, args: TranslationTrainingArguments, overwrite: bool) -> None:
        """Make the folder of a run, or check that a run may resume in it. Write the mark and the recipe to it.

        With `overwrite` a new run begins in `.new`. A folder that does not belong to a run is never changed.
        """
        self.check(recipe)
        run = self.path
        run.mkdir(parents=True, exist_ok=True)
        self.finish_replacing(goes_on=not overwrite and self._goes_on_in_new(recipe))
        mark, now = read_mark(run), {**resolved(args), "name": recipe.name}
        mark = mark and EARLIER | mark
        replaces, finished = mark is not None and overwrite, (run / RESULTS).is_file()
        if replaces:
            logger.info("%s stays as it is until the new run has its first checkpoint", run)
        elif finished:
            self._refuse_finished(recipe)
        elif checkpoints(run, *KINDS):
            newest = newest_whole(run, read_id(run))
            ended = newest is not None and is_last(load_state(newest))
            known = newest is not None and not ended and mark.keys() >= now.keys()
            self._refuse_another_recipe(recipe, NO_DIFFERENCE | RESOLVED if known else NO_DIFFERENCE, ended)
            if known:
                self._refuse_another_start(mark, now)
            if ended:
                now |= mark
        elif mark is not None:
            if has_seeds(mark) and has_begun(run):
                refuse_another_kind(run)
            self._forget_another_start(recipe)
        if not overwrite and checkpoints(run / NEW, INTERRUPTED):
            refuse_to_discard(run / NEW)
        discard_start(run / NEW)
        if replaces:
            run = run / NEW
            run.mkdir()
        elif finished:  # the recipe is written with the scores
            return
        run_id = uuid.uuid4().hex if mark is None or replaces else read_id(run)
        now |= {} if run_id is None else {"id": run_id}
        write_whole(run / MARK, json.dumps(now, indent=2, ensure_ascii=False) + "\n")
        write_whole(run / RECIPE, to_yaml(recipe.values))

    def _refuse_finished(self, recipe: Recipe) -> None:
        """Refuse a finished run, unless its recipe differs only in the section evaluation.

        The keys `RESOLVED` are not compared: the run may have been resumed with other values, and keeps its own.
        """
        run, apart_from = self.path, NO_DIFFERENCE | RESOLVED
        try:
            earlier = read_results(run)
            # if scoring again was interrupted, the recipe's file is newer than the results
            known = [earlier["recipe"], self.earlier_recipe()] if "train" in earlier else []
            changes = next(filter(None, (differences(each, recipe.values, apart_from) for each in known)), [])
        except (UserError, ValueError, KeyError, TypeError, AttributeError):  # the files are not those of a run
            changes = []
        if changes and all(change.startswith("evaluation.") for change in changes):
            logger.info("%s is scored again, as the recipe has changed: %s", run, some_of(changes))
            return
        raise UserError(
            f"{run} holds a finished run ({RESULTS}); give another training.output_dir, or --overwrite to replace the "
            "run. A finished run is scored again only if all changes are in the section evaluation"
        )

    def earlier_recipe(self) -> dict[str, dict[str, Any]]:
        """The recipe that a run began with.

        Raises:
            UserError: there is no recipe.
        """
        kept = self.path / RECIPE
        earlier = parse_yaml(read_text(kept, "recipe", LARGEST), str(kept)) if kept.is_file() else None
        if not isinstance(earlier, dict) or not all(isinstance(keys, dict) for keys in earlier.values()):
            raise UserError(
                f"{kept} is missing or is no recipe, so the run in this folder cannot be resumed; give another "
                "training.output_dir"
            )
        return earlier

    def _refuse_another_recipe(self, recipe: Recipe, apart_from: set[str], ended: bool) -> None:
        """Refuse to resume a run with another recipe. The keys `apart_from` of the section training may differ.

        Once training has `ended`, the section evaluation may differ as well, because only scoring is left.
        """
        earlier, values = self.earlier_recipe(), recipe.values
        if ended:
            earlier, values = (
                {name: each[name] for name in each if name != "evaluation"} for each in (earlier, values)
            )
        if changes := differences(earlier, values, apart_from):
            kept = self.path / RECIPE
            raise UserError(
                f"{kept.parent} holds an unfinished run of another recipe ({some_of(changes)}). Resume it with its "
                f"own recipe ({kept}), give another training.output_dir, or --overwrite to start afresh"
            )

    def _forget_another_start(self, recipe: Recipe) -> None:
        """Let another recipe begin in the folder of a run without checkpoints. Delete the old run's tokenizer files.

        Raises:
            UserError: the folder holds a model, but its checkpoints were removed.
        """
        run = self.path
        weights = run / WEIGHTS
        if weights.is_file() and not weights.is_symlink():  # a run writes no links
            raise UserError(
                f"{run} holds a model ({WEIGHTS}), and neither checkpoints nor {RESULTS} of its run; give another "
                "training.output_dir, or --overwrite to replace it"
            )
        if not (run / RECIPE).is_file():
            return
        try:
            changes = differences(self.earlier_recipe(), recipe.values)
        except UserError as error:
            changes = [str(error)]
        if changes:
            logger.info(
                "%s was begun by another recipe, and has no checkpoint: it begins anew (%s)", run, some_of(changes)
            )
            for name in SIDE_FILES:
                (run / name).unlink(missing_ok=True)

    def _refuse_another_start(self, mark: dict[str, Any], now: dict[str, Any]) -> None:
        """Refuse to resume with another effective batch size, precision, attention implementation or padding."""
        compared = ("batches_per_update", "precision", "attention", "padding")
        if changes := [f"{name}: {mark[name]}, now {now[name]}" for name in compared if mark[name] != now[name]]:
            raise UserError(
                f"{self.path} holds an unfinished run that began with other settings: {'; '.join(changes)}. Start the "
                "same number of processes, or restore the settings by training.gradient_accumulation_steps, bf16, "
                "attn_implementation and pad_to_multiple_of. Otherwise give another training.output_dir, or "
                "--overwrite to start afresh"
            )

    def _goes_on_in_new(self, recipe: Recipe) -> bool:
        """Return whether `.new` holds a run of this recipe that a signal ended before its first regular checkpoint."""
        new = self.path / NEW
        if not checkpoints(new, INTERRUPTED):
            return False
        return not differences(RunFolder(new).earlier_recipe(), recipe.values, NO_DIFFERENCE | RESOLVED)

    def finish_replacing(self, goes_on: bool = False) -> None:
        """Replace the older run by a new run that has a checkpoint, or complete a replacement that was interrupted.

        A new run that `goes_on` needs no regular checkpoint. A checkpoint that was saved after a signal is enough.
        """
        run, new, renewed = self.path, self.path / NEW, self.path / RENEWED
        if goes_on or self.is_under_way(new):
            self.clear()
            new.rename(renewed)
        if renewed.is_dir():
            move_into(renewed, run)

    def is_under_way(self, new: Path) -> bool:
        """Return whether a new run has progressed so far that it takes the older run's place."""
        return bool(checkpoints(new, REGULAR))

    def clear(self) -> None:
        """Remove the files that the run has written. The mark, the recipe and other files stay."""
        try:
            pairs = self.earlier_recipe().get("data", {}).get("pairs")
        except UserError:  # the recipe is damaged, but the new run may still replace the old one
            pairs = None
        clear_run(self.path, pairs if isinstance(pairs, list) else [])

    def final_checkpoints(self, state: TrainerState, args: TranslationTrainingArguments) -> tuple[list[Path], str]:
        """Return the checkpoints whose mean is the final model, and a description of the model."""
        run = self.path
        present = checkpoints(run)
        if args.average_last:
            chosen = present[-args.average_last :]
            if len(chosen) < args.average_last:
                logger.warning("the run has %d checkpoints; average_last asks for %d", len(chosen), args.average_last)
            for checkpoint in chosen:
                check_weights(checkpoint, read_id(run))
            return chosen, f"the mean of the checkpoints of steps {', '.join(_step(path) for path in chosen)}"
        best = best_checkpoint(run, state)
        if args.load_best_model_at_end and best is not None:
            check_weights(best, read_id(run))
            metric = "BLEU" if args.metric_for_best_model.endswith("bleu") else "loss"
            return [best], f"the checkpoint of step {_step(best)}, the best in validation {metric}"
        if args.load_best_model_at_end:  # removed by hand, or step 0 of eval_on_start
            logger.warning("the best checkpoint is not there any more; the last one takes its place")
        return present[-1:], f"the last checkpoint, of step {_step(present[-1])}"

    @contextmanager
    def refusing_unwritable_results(self) -> Iterator[None]:
        """Explain in a `UserError` why the results of a run cannot be written."""
        with Writing(self.path) as writing:
            yield
        if writing.why is not None:
            raise UserError(
                f"{self.path}: the results cannot be written: {writing.why}. The training has ended, and is safe. "
                "Mend this (make room, or allow writing), and give the same command again"
            ) from writing.error


def read_id(run: Path) -> str | None:
    """The random id that a run draws when it begins; None for a run that an older version began."""
    mark = read_mark(run)
    return mark["id"] if mark and isinstance(mark.get("id"), str) else None


def _is_within(path: Path, folder: Path) -> bool:
    """Return True if a path is the folder or lies in it, however the two paths are spelt."""
    path = path.resolve()
    return any(is_same(each, folder) for each in (path, *path.parents))


def refuse_to_discard(new: Path) -> NoReturn:
    """Explain how to resume an interrupted run that was to replace an older run.

    Raises:
        UserError: always.
    """
    raise UserError(
        f"{new} holds an interrupted run that was to replace the older run in {new.parent}. Resume the interrupted "
        f"run with its recipe ({new / RECIPE}), start a new run with --overwrite, or remove {new} to keep the older "
        "run"
    )


def discard_start(new: Path) -> None:
    """Remove the files of a new run that was killed before its first checkpoint."""
    begun = new.is_dir() and (read_mark(new) is not None or all(path.name in DRAFTS for path in new.iterdir()))
    if new.exists() and not begun:
        raise UserError(f"{new} was not made by a run, but the run needs this name; move it elsewhere")
    discard(new)


def some_of(changes: list[str]) -> str:
    """The first differences of two recipes, and the number of further differences."""
    more = f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return "; ".join(changes[:SHOWN]) + more


def resolved(args: TranslationTrainingArguments) -> dict[str, Any]:
    """Settings that depend on the launch and on the machine, and also change what is trained."""
    return {
        "hf_deepwide": version("hf_deepwide"),
        "processes": args.world_size,
        "batches_per_update": args.world_size * args.gradient_accumulation_steps,
        "precision": f"{args.mixed_precision} autocast" if args.mixed_precision != "no" else "float32",
        "attention": args.attn_implementation,
        "padding": args.pad_to_multiple_of,
    }


def move_into(source: Path, target: Path) -> None:
    """Move the content of `source` to `target`. Folders that are in both are merged file by file.

    A link in `target` is replaced, not followed.
    """
    for path in sorted(source.iterdir()):
        place = target / path.name
        if place.is_symlink():
            place.unlink()
        if path.is_dir() and place.is_dir():
            move_into(path, place)
        else:
            path.replace(place)
    source.rmdir()


def _step(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix("checkpoint-")


class Replacing(TrainerCallback):
    """Replace an older run by the new run once the new run has a checkpoint."""

    def __init__(self, folder: RunFolder, process: PartialState) -> None:
        self.folder, self.process = folder, process

    def on_save(
        self, args: TranslationTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Replace the older run, now that a checkpoint is on disk."""
        if Path(args.output_dir) == self.folder.path:
            return
        if state.is_world_process_zero:
            self.folder.finish_replacing()
        self.process.wait_for_everyone()
        new = self.folder.path / NEW
        if new.is_dir():
            if state.is_world_process_zero:
                logger.info("%s stays as it is until the new run goes on; to keep it, remove %s", new.parent, new)
            return
        args.output_dir = str(self.folder.path)
        if state.best_model_checkpoint:
            state.best_model_checkpoint = str(self.folder.path / Path(state.best_model_checkpoint).name)


def has_begun(run: Path) -> bool:
    """Return True if a run of several seeds has a finished seed, or a checkpoint to resume from."""
    return any((seed / RESULTS).is_file() or newest_whole(seed) for seed in seeds_in(run))


def refuse_another_kind(run: Path) -> NoReturn:
    """Refuse to begin a translation model where a classifier can be resumed, or the other way round."""
    raise UserError(
        f"{run} holds an unfinished run of another kind. Resume it with its own command and recipe ({run / RECIPE}), "
        "give another training.output_dir, or --overwrite to start afresh"
    )
