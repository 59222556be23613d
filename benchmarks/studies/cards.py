"""Write a filled model card for each family from a study's records alone, without the models."""

import copy
from pathlib import Path, PurePosixPath
from typing import Any

from definition import Study
from pages import score_title, table_cells
from records import PRUNED, Record, read_records
from reports import markdown
from selection import Rows, chosen_rows

from hf_deepwide.durable import write_whole
from hf_deepwide.runs.model_card import card_of_results

STUDIES = "benchmarks/studies"
COLUMNS = ("difference in loss", "validation loss", "seeds", "setting")


def write_cards(study: Study, results: Path, folder: Path) -> None:
    """Write the card of each family, `FAMILY.md`, into `folder`."""
    for family, text in cards(study, results).items():
        write_whole(folder / f"{family}.md", text)


def cards(study: Study, results: Path) -> dict[str, str]:
    """The model card of each family, for the systems that the study lists under `cards`."""
    rows = chosen_rows(study, read_records(results)) if study.cards else {}
    families = {
        name: next(iter(rows[name].values()))["recipe"]["model"]["family"] for name in study.cards if name in rows
    }
    return {family: _card(study, rows, results, name) for name, family in families.items()}


def _card(study: Study, rows: Rows, results: Path, name: str) -> str:
    """The card of a system's run with the first seed; the scores of all seeds, and the corpus, are added."""
    seed, record = next(iter(rows[name].items()))
    card = card_of_results(_at_home(study, record), f"{study.name}_{name}")
    command = f"python {STUDIES}/again.py {STUDIES}/{study.name}.yaml {name} --runs runs/studies"
    unpublished = (
        "The model is not published. This command trains the model again with all seeds, in the setting that the "
        "study chose. [The page of results](../docs/results.md) says what `PATH` holds.\n\n"
        f"```\nHF_DEEPWIDE_DATA=PATH {command}\n```\n"
    )
    cells = table_cells(study, rows, results)
    columns = ("system", "parameters", score_title(rows, study.metric), score_title(rows, study.beside), *COLUMNS)
    shown = [each for each in dict.fromkeys([study.baseline, name, f"{PRUNED}{name}"]) if each in cells]
    table = [{column: cells[each][column] for column in columns} for each in shown]
    about = ["± is a standard error over seeds."]
    if any(row["difference in loss"] for row in table):
        about.append("The difference to the baseline is that of the validation losses.")
    if f"{PRUNED}{name}" in shown:
        about.append("The setting of the pruned model is the layers left in encoder and decoder, for each seed.")
    scores = (
        f"{markdown(table)}\n"
        f"{' '.join(about)}\n"
        "[The page of results](../docs/results.md) says how the settings were chosen.\n\n"
        f"The rest of this card is about the model of seed {seed}.\n"
    )
    card = _with(card, "## Use", before=unpublished)
    card = _with(card, "## Scores", after=scores)
    return _with(card, "## Training", before=f"## Data\n\n{study.corpus.strip()}\n").rstrip() + "\n"


def _at_home(study: Study, record: Record) -> Record:
    """The record with the paths that study.py uses by default. Older records have paths of another folder."""
    record = copy.deepcopy(record)
    recipe: dict[str, dict[str, Any]] = record["recipe"]
    for section, key in (("training", "output_dir"), ("model", "init_from"), ("tokenizer", "path")):
        if place := recipe[section].get(key):
            recipe[section][key] = str(PurePosixPath("runs/studies", study.name, PurePosixPath(place).name))
    return record


def _with(card: str, heading: str, before: str = "", after: str = "") -> str:
    """The card with paragraphs before and after a heading.

    Raises:
        ValueError: the card has no such heading, or several.
    """
    start, end = card.split(f"\n{heading}\n")
    return f"{start}\n{before}{before and chr(10)}{heading}\n{after and chr(10)}{after}{end}"
