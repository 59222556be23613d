"""Which runs a study needs next, which setting its search has chosen, and what the runs of a system come to.

Validation loss chooses: the test set may not.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from definition import Setting, Stage, Study, System
from records import PRUNED, Record

Rows = dict[str, dict[int, Record]]  # system, or system pruned, to seed to record


def key_of(setting: Setting) -> tuple:
    """A setting as something to look up."""
    return tuple(sorted(setting.items()))


def tried(records: Sequence[Record], system: System, stage: Stage, seed: int) -> dict[tuple, Record]:
    """Setting to record, of the runs of a stage."""
    return {
        key_of(record["setting"]): record
        for record in records
        if (record["system"], record["stage"], record["seed"]) == (system.name, stage.name, seed)
    }


def validation_loss(record: Record) -> float:
    """The least of the validation curve, in nats a token, smoothed as in training."""
    return record["train"]["best_validation_loss"]


def best(records: Sequence[Record], system: System, stage: Stage, seed: int) -> Setting | None:
    """The setting with the least validation loss in a stage; None while nothing was tried."""
    runs = tried(records, system, stage, seed).values()
    return min(runs, key=validation_loss)["setting"] if runs else None


def settings_of(study: Study, system: System, number: int, records: Sequence[Record]) -> list[Setting]:
    """The settings that a stage tries, with those beyond an edge; [] while the stage before it goes on."""
    stages, seed = study.stages(system), study.seeds[0]
    start: Setting = {}
    if number:
        before = settings_of(study, system, number - 1, records)
        done = tried(records, system, stages[number - 1], seed)
        if not before or any(key_of(setting) not in done for setting in before):
            return []
        start = best(records, system, stages[number - 1], seed) or {}
    stage = stages[number]
    settings = [start | setting for setting in stage.settings]
    if not stage.extend:
        return settings
    (key,) = stage.settings[0]
    done = tried(records, system, stage, seed)
    while all(key_of(setting) in done for setting in settings):
        values = sorted(setting[key] for setting in settings)
        chosen = min(settings, key=lambda setting: validation_loss(done[key_of(setting)]))[key]
        if chosen not in (values[0], values[-1]):
            break
        beyond = values[0] ** 2 / values[1] if chosen == values[0] else values[-1] ** 2 / values[-2]
        settings.append(start | {key: float(f"{beyond:.3g}")})
    return settings


def chosen_rows(study: Study, records: Sequence[Record]) -> Rows:
    """The runs of the last stage with the setting that the search has chosen, by system and seed."""
    rows: Rows = {}
    for system in study.systems:
        stage = study.stages(system)[-1]
        setting = best(records, system, stage, study.seeds[0])
        for seed in study.seeds if setting else []:
            if record := tried(records, system, stage, seed).get(key_of(setting)):
                rows.setdefault(system.name, {})[seed] = record
                if "pruned" in record:
                    rows.setdefault(f"{PRUNED}{system.name}", {})[seed] = {
                        **record,
                        **record["pruned"],
                        "run": f"{PRUNED}{record['run']}",
                    }
    return rows


def mean_and_error(values: Sequence[float]) -> dict[str, Any]:
    """The mean and its standard error, which a single value does not have."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "standard_error": error, "values": list(values)}
