"""The records of a study's runs: a line a run in `runs.jsonl`, and the translations in `translations.jsonl.gz`.

A record is the run's `results.json`, validation curve included, with further keys: `run` (its name), `system`,
`stage`, `setting` and `seed`. `digests_of_weights` are of the run's weights and of the weights that it started from.
`pruned` holds the parameters, layers and scores of the model after pruning. `chosen_layers` is for models of latent
depth, by posterior and stack. `gradient_norms`, by layer, are from a few moments of the training, if the recipe logs
them. Translations are kept for the last stage, whose runs are the rows of the table. The translations of several
language pairs follow one after the other.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_deepwide.analysis.gradient_norms import KEY
from hf_deepwide.durable import whole_file, write_whole

Record = dict[str, Any]
RUNS, TRANSLATIONS = "runs.jsonl", "translations.jsonl.gz"
GRADIENT_NORMS, CHOSEN_LAYERS = "gradient_norms", "chosen_layers"
MOMENTS = 6  # gradient norms are kept for so many updates
PRUNED = "pruned "  # before the name of a system or a run: the same model without its unused layers


def read_records(results: Path) -> list[Record]:
    """All records of a study, in the order in which the runs ended."""
    file = results / RUNS
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def scores_of(record: Record) -> dict[str, Any]:
    """The test scores of a run; for several language pairs, the means over the pairs."""
    return record["test"].get("average", record["test"])


def parts_of(record: Record) -> dict[str, dict[str, Any]]:
    """The scores of each language pair of a run, or of each test set; empty if the run has only one of each."""
    return record["test"].get("pairs") or record["test"].get("sets") or {}


def read_translations(results: Path) -> dict[str, list[str]]:
    """The translations of the test set by run; empty if the file does not exist."""
    file = results / TRANSLATIONS
    if not file.is_file():
        return {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return {entry["run"]: entry["translations"] for entry in map(json.loads, lines)}


def add_record(results: Path, record: Record, translations: dict[str, list[str]]) -> None:
    """Add a run. A run with a record is done, so the record is written last.

    Each file is replaced as a whole, because a report may be reading it.
    """
    results.mkdir(parents=True, exist_ok=True)
    if translations:
        write_translations(results, read_translations(results) | translations)
    write_records(results, [*read_records(results), record])


def write_records(results: Path, records: list[Record]) -> None:
    """Write `runs.jsonl`."""
    write_whole(results / RUNS, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_translations(results: Path, translations: dict[str, list[str]]) -> None:
    """Write `translations.jsonl.gz`, always the same bytes for the same translations."""
    with (
        whole_file(results / TRANSLATIONS) as draft,
        draft.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file,
    ):
        for run, lines in translations.items():
            file.write((json.dumps({"run": run, "translations": lines}, ensure_ascii=False) + "\n").encode())


def gradient_norms(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The logged gradient norms by layer, with three digits, at up to `MOMENTS` updates from the first to the last."""
    logged = [entry for entry in history if KEY in entry]
    places = sorted({round(number * (len(logged) - 1) / (MOMENTS - 1)) for number in range(MOMENTS)}) if logged else []
    return [
        {"step": logged[place]["step"]}
        | {stack: [float(f"{norm:.3g}") for norm in norms] for stack, norms in logged[place][KEY].items()}
        for place in places
    ]
