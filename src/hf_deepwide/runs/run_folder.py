"""The folder of a run: whose it is, what may begin or go on in it, and how a new run replaces an older one.

    run.json         says that the folder is a run's, which run's (its id), and how the run is run
    recipe.yaml      what the run is
    checkpoint-*     how far the run has come
    results.json     that the run is finished; written last

A run that replaces an older one begins in the hidden folder `.new`, and the older one stays as it is. Once `.new`
holds a checkpoint, the older run is deleted, `.new` becomes `.renewed`, and what it holds moves up. So whenever a
process is killed, what is there tells what is left to be done. A run that a signal ends before its first regular
checkpoint stays in `.new`: perhaps it was not meant. It takes the older one's place when it goes on.
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
# What the folder of a run may hold before its mark; an older version called drafts by a dot and their name.
DRAFTS = (LOCK, *(name for file in (MARK, RECIPE) for name in (draft_of(Path(file)).name, f".{file}")))
SHOWN = 3  # differences of two recipes in a message
# Keys of the section training that are compared as they come out on this machine, once a run has begun (`resolved`).
RESOLVED = {"gradient_accumulation_steps", "bf16", "fp16", "attn_implementation", "pad_to_multiple_of"}
EARLIER = {"padding": 8}  # what marks of older versions leave out, as it was always the same


@dataclass
class Start:
    """How a run begins in its folder.

    Args:
        checkpoint: what it goes on from.
        ended: no training is left.
        results: what `results.json` holds, of a finished run that is only to be scored again.
        run_id: what tells the run from others; None of a run that an older version began.
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
        """Have the folder to ourselves; `args.output_dir` becomes the place where the run is written.

        Raises:
            UserError: the folder is in use, holds a finished run or another one, or is no run's.
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
                    discard(run / NEW)  # it ended before there was anything to keep

    def _start(self, args: TranslationTrainingArguments, process: PartialState) -> Start:
        run = self.path
        if (run / NEW).is_dir():
            args.output_dir = str(run / NEW)
            return Start(run_id=read_id(run / NEW))
        if (run / RESULTS).is_file():
            return Start(ended=True, results=read_results(run))
        if process.is_main_process:
            last_checkpoint(run, read_id(run))  # sets damaged ones aside before the other processes look
        process.wait_for_everyone()
        checkpoint = next(reversed(checkpoints(run, REGULAR, INTERRUPTED)), None)  # it was found to be whole
        ended = checkpoint is not None and is_last(load_state(checkpoint))
        return Start(checkpoint, ended, run_id=read_id(run))

    def check(self, recipe: Recipe) -> None:
        """Refuse a folder that a run must not be written to, whatever the options; nothing is written yet."""
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
        """Make the folder of a run, or see that going on in it is right; leave its mark and the recipe in it.

        With `overwrite` a new run begins in `.new`. A folder that is not a run's is never touched.
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
        elif finished:  # what is there is written anew with the scores
            return
        run_id = uuid.uuid4().hex if mark is None or replaces else read_id(run)
        now |= {} if run_id is None else {"id": run_id}
        write_whole(run / MARK, json.dumps(now, indent=2, ensure_ascii=False) + "\n")
        write_whole(run / RECIPE, to_yaml(recipe.values))

    def _refuse_finished(self, recipe: Recipe) -> None:
        """A finished run is left alone, unless it is the same but for its section evaluation.

        It keeps its own values of the keys `RESOLVED`, with which it may have been taken up again.
        """
        run, apart_from = self.path, NO_DIFFERENCE | RESOLVED
        try:
            earlier = read_results(run)
            # where scoring it again was interrupted, the file of the recipe is ahead of the results
            known = [earlier["recipe"], self.earlier_recipe()] if "train" in earlier else []
            changes = next(filter(None, (differences(each, recipe.values, apart_from) for each in known)), [])
        except (UserError, ValueError, KeyError, TypeError, AttributeError):  # not what a run writes
            changes = []
        if changes and all(change.startswith("evaluation.") for change in changes):
            logger.info("%s is scored again, as the recipe has changed: %s", run, some_of(changes))
            return
        raise UserError(
            f"{run} holds a finished run ({RESULTS}); give another training.output_dir, or --overwrite to replace it. "
            "It is scored again if the section evaluation changes, and nothing else"
        )

    def earlier_recipe(self) -> dict[str, dict[str, Any]]:
        """The recipe that a run began with.

        Raises:
            UserError: there is none.
        """
        kept = self.path / RECIPE
        earlier = parse_yaml(read_text(kept, "recipe", LARGEST), str(kept)) if kept.is_file() else None
        if not isinstance(earlier, dict) or not all(isinstance(keys, dict) for keys in earlier.values()):
            raise UserError(f"{kept} is no recipe, so what was trained here is not known; give another output_dir")
        return earlier

    def _refuse_another_recipe(self, recipe: Recipe, apart_from: set[str], ended: bool) -> None:
        """An unfinished run goes on by the recipe that it began with, `apart_from` some keys of the section training.

        Once training has ended, the section evaluation may change, as only scoring is left.
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
        """Before its first checkpoint a run has nothing to go on with: another recipe may begin in its folder.

        Raises:
            UserError: there is a model, whose checkpoints somebody has removed.
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
                f"{self.path} holds an unfinished run that would continue in another way than it began "
                f"({'; '.join(changes)}). "
                "Start the same number of processes, or set training.gradient_accumulation_steps, bf16, "
                "attn_implementation and pad_to_multiple_of so that nothing changes; or give another "
                "training.output_dir, or --overwrite to start afresh"
            )

    def _goes_on_in_new(self, recipe: Recipe) -> bool:
        """Whether `.new` holds a run of this recipe that a signal ended before its first regular checkpoint."""
        new = self.path / NEW
        if not checkpoints(new, INTERRUPTED):
            return False
        return not differences(RunFolder(new).earlier_recipe(), recipe.values, NO_DIFFERENCE | RESOLVED)

    def finish_replacing(self, goes_on: bool = False) -> None:
        """Put a new run that has a checkpoint in the place of the older one, or go on with that where it was left.

        A new run that `goes_on` takes the older one's place with less, such as a checkpoint that a signal had saved.
        """
        run, new, renewed = self.path, self.path / NEW, self.path / RENEWED
        if goes_on or self.is_under_way(new):
            self.clear()
            new.rename(renewed)
        if renewed.is_dir():
            move_into(renewed, run)

    def is_under_way(self, new: Path) -> bool:
        """Whether a new run has come so far that it takes the older one's place."""
        return bool(checkpoints(new, REGULAR))

    def clear(self) -> None:
        """Remove what the run has written; the mark, the recipe and files of others stay."""
        try:
            pairs = self.earlier_recipe().get("data", {}).get("pairs")
        except UserError:  # somebody has damaged the recipe, and the new run may take its place all the same
            pairs = None
        clear_run(self.path, pairs if isinstance(pairs, list) else [])

    def final_checkpoints(self, state: TrainerState, args: TranslationTrainingArguments) -> tuple[list[Path], str]:
        """The checkpoints whose mean is the final model, and what to call it."""
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
        """Say in words that what a run writes at its end cannot be written."""
        with Writing(self.path) as writing:
            yield
        if writing.why is not None:
            raise UserError(
                f"{self.path}: the results cannot be written: {writing.why}. The training has ended, and is safe. "
                "Mend this (make room, or allow writing), and give the same command again"
            ) from writing.error


def read_id(run: Path) -> str | None:
    """The random id that a run draws when it begins; None of a run that an older version began."""
    mark = read_mark(run)
    return mark["id"] if mark and isinstance(mark.get("id"), str) else None


def _is_within(path: Path, folder: Path) -> bool:
    """True if a path is the folder or in it, however the two are spelt."""
    path = path.resolve()
    return any(is_same(each, folder) for each in (path, *path.parents))


def refuse_to_discard(new: Path) -> NoReturn:
    """Say how a run that was to replace an older one, and was interrupted, goes on.

    Raises:
        UserError: always.
    """
    raise UserError(
        f"{new} holds a run that replaces the one beside it, and was interrupted. Go on with it by its own recipe "
        f"({new / RECIPE}), replace it by another one with --overwrite, or remove {new} to keep the older run"
    )


def discard_start(new: Path) -> None:
    """Remove what is left of a start that was killed before its first checkpoint."""
    begun = new.is_dir() and (read_mark(new) is not None or all(path.name in DRAFTS for path in new.iterdir()))
    if new.exists() and not begun:
        raise UserError(f"{new} was not made by a run, but the run needs this name; move it elsewhere")
    discard(new)


def some_of(changes: list[str]) -> str:
    """The first differences of two recipes, and how many more there are."""
    more = f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return "; ".join(changes[:SHOWN]) + more


def resolved(args: TranslationTrainingArguments) -> dict[str, Any]:
    """Settings of the launch and of the machine, which change what is trained as well."""
    return {
        "hf_deepwide": version("hf_deepwide"),
        "processes": args.world_size,
        "batches_per_update": args.world_size * args.gradient_accumulation_steps,
        "precision": f"{args.mixed_precision} autocast" if args.mixed_precision != "no" else "float32",
        "attention": args.attn_implementation,
        "padding": args.pad_to_multiple_of,
    }


def move_into(source: Path, target: Path) -> None:
    """Move what is in a folder to another one, file by file where both have a folder of that name.

    A link in the other folder is replaced, not followed.
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
    """Puts a new run in the place of the older one once it has a checkpoint."""

    def __init__(self, folder: RunFolder, process: PartialState) -> None:
        self.folder, self.process = folder, process

    def on_save(
        self, args: TranslationTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The checkpoint is on disk."""
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
    """True if a run of several seeds has anything to go on from."""
    return any((seed / RESULTS).is_file() or newest_whole(seed) for seed in seeds_in(run))


def refuse_another_kind(run: Path) -> NoReturn:
    """A translation model does not begin where a classifier can go on, nor the other way round."""
    raise UserError(
        f"{run} holds an unfinished run of another kind. Resume it with its own command and recipe ({run / RECIPE}), "
        "give another training.output_dir, or --overwrite to start afresh"
    )
