"""The folder of a run that trains with several seeds: like the folder of any run, with a subfolder for each seed.

    run/seed-1/checkpoint-*    how far the first seed has come
    run/seed-1/results.json    that the first seed is finished
    run/results.json           that all seeds are; written last

A run that replaces an older run begins in `.new`. It takes the older run's place once its first seed is trained.
"""

import json
import logging
from pathlib import Path

from ..checkpoint_files import MARK, RESULTS
from ..durable import write_whole
from ..errors import UserError
from ..lock import locked
from ..training.checkpoints import checkpoints
from ..training.checksums import refuse_other_data
from .facts import versions
from .recipe import RECIPE, Recipe, differences, read_mark
from .run_folder import (
    NEW,
    RENEWED,
    RunFolder,
    discard_start,
    has_begun,
    refuse_another_kind,
    refuse_to_discard,
    some_of,
)
from .written_files import KINDS, seeds_in
from .yaml_values import to_yaml

logger = logging.getLogger(__name__)


class SeedsFolder(RunFolder):
    """The folder of a run of several seeds."""

    def check_start(self, recipe: Recipe, overwrite: bool) -> None:
        """Complete an interrupted replacement of an older run, and refuse a folder that this run must not use.

        Without `overwrite`, the folder must not hold a finished run, or an unfinished run of another recipe.
        """
        run = self.path
        self.check(recipe)
        if (run / NEW).is_dir() or (run / RENEWED).is_dir():
            with locked(run):
                goes_on = not overwrite and has_begun(run / NEW) and not SeedsFolder(run / NEW).changes(recipe)
                self.finish_replacing(goes_on)
        self._refuse_another(recipe, overwrite)

    def begin(self, recipe: Recipe, overwrite: bool, data: dict[str, str]) -> None:
        """Write the mark and the recipe of a run to its folder, or to `.new` if the run replaces an older run.

        Args:
            recipe: the recipe of the run.
            overwrite: whether an older run is replaced.
            data: the digest of each split.
        """
        run = self.path
        self.finish_replacing()
        self._refuse_another(recipe, overwrite)  # again: another process may have used the folder since then
        mark = read_mark(run)
        if mark and not overwrite and has_begun(run):
            refuse_other_data(run, mark.get("data", data), data)
        if not overwrite and has_begun(run / NEW):
            refuse_to_discard(run / NEW)
        discard_start(run / NEW)
        if overwrite and read_mark(run) is not None:
            logger.info("%s stays as it is until the new run has trained its first seed", run)
            run = run / NEW
            run.mkdir()
        mark = {"hf_deepwide": versions()["hf_deepwide"], "name": recipe.name, "data": data}
        write_whole(run / MARK, json.dumps(mark) + "\n")
        write_whole(run / RECIPE, to_yaml(recipe.values))

    def changes(self, recipe: Recipe) -> list[str]:
        """The differences between the recipe that the run began with and another recipe."""
        return differences(self.earlier_recipe(), recipe.values)

    def _refuse_another(self, recipe: Recipe, overwrite: bool) -> None:
        """Refuse a finished run, or an unfinished run of another recipe, unless `overwrite` is set."""
        run = self.path
        if overwrite or read_mark(run) is None:
            return
        if (run / RESULTS).is_file():
            raise UserError(
                f"{run} holds a finished run; give another training.output_dir, or --overwrite to replace it"
            )
        if checkpoints(run, *KINDS):  # a run of several seeds has checkpoints only in the folders of its seeds
            refuse_another_kind(run)
        if has_begun(run) and (changes := self.changes(recipe)):
            raise UserError(
                f"{run} holds an unfinished run of another recipe ({some_of(changes)}). Resume it with its own recipe "
                f"({run / RECIPE}), give another training.output_dir, or --overwrite to start afresh"
            )

    def is_under_way(self, new: Path) -> bool:
        """Return whether a new run has trained a seed."""
        return any((seed / RESULTS).is_file() for seed in seeds_in(new))
