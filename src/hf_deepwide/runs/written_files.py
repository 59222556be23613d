"""The files that a run of any kind writes to its folder, and their removal when a new run replaces it."""

import re
from pathlib import Path
from typing import Any

from ..analysis.gradient_norms import PLOT as GRADIENT_NORMS
from ..analysis.joint_weights import JOINTS as JOINT_WEIGHTS
from ..analysis.layer_joints import GATES as SOLVER_GATES
from ..analysis.layer_joints import WEIGHTS as LAYER_WEIGHTS
from ..analysis.layer_utilization import PLOT as LAYER_UTILIZATION
from ..analysis.layer_utilization import SAMPLES as SELECTION_SAMPLES
from ..analysis.path_weights import PLOT as PATH_WEIGHTS
from ..card_text import CARD
from ..checkpoint_files import RESULTS
from ..durable import STAGING, discard, draft_of, remove
from ..training.checkpoints import INTERRUPTED, REGULAR, WEIGHTS, checkpoints
from ..training.faults import FAULTS
from .averaging import SIDE_FILES
from .recipe import read_mark

TRANSLATIONS, CURVES = "translations.txt", "plots/learning_curves.png"
PLOTS = (CURVES, PATH_WEIGHTS, GRADIENT_NORMS, LAYER_UTILIZATION, JOINT_WEIGHTS, LAYER_WEIGHTS, SOLVER_GATES)
# Figures that `hf-deepwide plot` draws in the folder of a run, unless another place is given.
DRAWN = (f"plots/{SELECTION_SAMPLES}", f"plots/*_{LAYER_UTILIZATION.name}")
KINDS = [f"{damaged}{kind}" for damaged in ("", "damaged-") for kind in (REGULAR, INTERRUPTED)]  # of checkpoints


def translations_file(pair: str) -> str:
    """The file in a run's folder with the translations of one of several language pairs."""
    return f"translations.{pair}.txt"


def has_seeds(mark: dict[str, Any]) -> bool:
    """Return True if the mark of a run shows that the run trains with several seeds."""
    return "data" in mark


def seeds_in(run: Path) -> list[Path]:
    """The folders of a run's seeds. A user's own folder, such as `seed-notes`, is not among them."""
    return [
        path
        for path in run.glob("seed-*")
        if re.fullmatch(r"seed-(0|[1-9]\d*)", path.name) and path.is_dir() and not path.is_symlink()
    ]


def clear_run(run: Path, pairs: list[str]) -> None:
    """Remove the files that a run has written, and its figures. The mark, the recipe and other files stay.

    `results.json` is removed first, because it marks the run as finished.

    Args:
        run: the folder of the run.
        pairs: the run's language pairs, if it had several. Translations under other names belong to the user.
    """
    (run / RESULTS).unlink(missing_ok=True)
    for place in (run, run / FAULTS):
        discard(place / STAGING)
    for folder in (*checkpoints(run, *KINDS), *checkpoints(run / FAULTS, "step")):
        remove(folder)
    logs = [folder for folder in run.glob("runs/*") if folder.is_dir() and not folder.is_symlink()]
    event_files = [file for folder in logs for file in folder.glob("events.out.tfevents.*")]
    names = {TRANSLATIONS, *map(translations_file, pairs), CARD, WEIGHTS, *SIDE_FILES, *map(str, PLOTS)}
    seeds = seeds_in(run) if has_seeds(read_mark(run) or {}) else []
    for seed in seeds:  # the run's model is a copy of a seed's model
        names |= {file.name for file in seed.iterdir() if file.is_file()}
    files = [run / name for name in names]
    drawn = [path for name in DRAWN for path in run.glob(name)]  # by `hf-deepwide plot`
    drafts = [draft_of(file) for file in files]  # of a process that was killed
    for file in (*files, *drafts, *drawn, *event_files):
        file.unlink(missing_ok=True)
    for seed in seeds:
        remove(seed)
    for folder in (*logs, run / "runs", run / "plots", run / FAULTS):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
