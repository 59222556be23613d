"""Find out which runs a study needs next, which setting its search has chosen, and which runs its tables show.

The validation loss decides, never the test set.
"""

import math
import statistics
from collections.abc import Sequence

from definition import Setting, Stage, Study, System, run_name
from records import PRUNED, Record

from hf_deepwide.evaluation.seeds import standard_error

RATE = "training.learning_rate"
Rows = dict[str, dict[int, Record]]  # the records by system (or pruned system) and seed


def key_of(setting: Setting) -> tuple:
    """A setting as a key of a dictionary."""
    return tuple(sorted(setting.items()))


def tried(records: Sequence[Record], system: System, stage: Stage, seed: int) -> dict[tuple, Record]:
    """The records of a stage's runs with a seed, by setting."""
    return {
        key_of(record["setting"]): record
        for record in records
        if (record["system"], record["stage"], record["seed"]) == (system.name, stage.name, seed)
    }


def validation_loss(record: Record) -> float:
    """The validation loss of the final model, in nats per token, with label smoothing as in training.

    If it was not measured, the least loss of the validation curve. If the run diverged, the loss is infinite.
    """
    if "diverged" in record:
        return math.inf
    return record["validation"]["loss"] if "validation" in record else record["train"]["best_validation_loss"]


def best(records: Sequence[Record], system: System, stage: Stage, seed: int) -> Setting | None:
    """The setting with the least validation loss in a stage; None while all its runs diverged, or there is none."""
    runs = [run for run in tried(records, system, stage, seed).values() if "diverged" not in run]
    return min(runs, key=validation_loss)["setting"] if runs else None


def settings_of(study: Study, system: System, number: int, records: Sequence[Record]) -> list[Setting]:
    """The settings that a stage tries, including the settings that `extend` adds.

    There are none while the stage before it has runs to make, or if all runs of that stage diverged. The same holds
    for the search of the system in `start`.
    """
    stages, seed = study.stages(system), study.seeds[0]
    start: Setting = {}
    if system.start:
        setting = winner(study, study.system(system.start), records)
        if setting is None:
            return []
        start = setting | ({RATE: float(f"{setting[RATE] * system.start_rate:.3g}")} if RATE in setting else {})
    if number:
        before = settings_of(study, system, number - 1, records)
        done = tried(records, system, stages[number - 1], seed)
        if not before or any(key_of(setting) not in done for setting in before):
            return []
        chosen = best(records, system, stages[number - 1], seed)
        if chosen is None:
            return []
        start |= chosen
    stage = stages[number]
    settings = [start | setting for setting in stage.settings]
    if not stage.extend:
        return settings
    (key,) = stage.settings[0]
    done = tried(records, system, stage, seed)
    while all(key_of(setting) in done for setting in settings):
        values = sorted(setting[key] for setting in settings)
        # If all values diverge, search below the smallest value: it is nearest to a value that does not diverge.
        least = min(settings, key=lambda setting: (validation_loss(done[key_of(setting)]), setting[key]))[key]
        if least not in (values[0], values[-1]):
            break
        beyond = values[0] ** 2 / values[1] if least == values[0] else values[-1] ** 2 / values[-2]
        settings.append(start | {key: float(f"{beyond:.3g}")})
    return settings


def winner(study: Study, system: System, records: Sequence[Record]) -> Setting | None:
    """The setting that the search of a system has chosen; None while the search goes on, or if all runs diverged."""
    stages, seed = study.stages(system), study.seeds[0]
    settings = settings_of(study, system, len(stages) - 1, records)
    done = tried(records, system, stages[-1], seed)
    if not settings or any(key_of(setting) not in done for setting in settings):
        return None
    return best(records, system, stages[-1], seed)


def winners_run(study: Study, name: str, seed: int, records: Sequence[Record]) -> str | None:
    """The name of the run with a system's chosen setting and a seed; None if it has not ended, or diverged."""
    system = study.system(name)
    setting, stage = winner(study, system, records), study.stages(system)[-1]
    record = None if setting is None else tried(records, system, stage, seed).get(key_of(setting))
    if setting is None or record is None or "diverged" in record:
        return None
    return run_name(system, stage, setting, seed)


def seeds_of(study: Study, system: System, records: Sequence[Record]) -> list[int]:
    """The seeds to train a system's chosen setting with; more seeds if the system is close to the baseline."""
    losses = []
    for each in (system, study.system(study.baseline)):
        setting, stage = winner(study, each, records), study.stages(each)[-1]
        runs = [tried(records, each, stage, seed).get(key_of(setting or {})) for seed in study.seeds]
        if setting is None or None in runs or any("diverged" in run for run in runs):
            return study.seeds
        losses.append([validation_loss(run) for run in runs])
    ours, theirs = map(statistics.mean, losses)
    error = math.hypot(*(standard_error(each) or 0 for each in losses))
    close = system.name == study.baseline or abs(ours - theirs) <= 2 * error
    return [*study.seeds, *study.close_seeds] if close else study.seeds


def chosen_rows(study: Study, records: Sequence[Record]) -> Rows:
    """The last stage's runs with the chosen setting, by system and seed, without runs that diverged."""
    rows: Rows = {}
    for system in study.systems:
        stage = study.stages(system)[-1]
        setting = winner(study, system, records)
        for seed in [] if setting is None else [*study.seeds, *study.close_seeds]:
            record = tried(records, system, stage, seed).get(key_of(setting))
            if record and "diverged" not in record:
                rows.setdefault(system.name, {})[seed] = record
                if "pruned" in record:
                    rows.setdefault(f"{PRUNED}{system.name}", {})[seed] = {
                        **record,
                        **record["pruned"],
                        "run": f"{PRUNED}{record['run']}",
                    }
    return rows


def leading_rows(study: Study, records: Sequence[Record]) -> Rows:
    """The runs that figures show: `chosen_rows`, and for other systems the best run of the last stage so far."""
    chosen, seed, rows = chosen_rows(study, records), study.seeds[0], {}
    for system in study.systems:
        stage = study.stages(system)[-1]
        setting = best(records, system, stage, seed)
        if system.name in chosen:
            rows[system.name] = chosen[system.name]
        elif setting is not None:
            rows[system.name] = {seed: tried(records, system, stage, seed)[key_of(setting)]}
    return rows


def lost_seeds(study: Study, system: System, records: Sequence[Record]) -> int:
    """The number of runs with a system's chosen setting that have diverged."""
    setting, stage = winner(study, system, records), study.stages(system)[-1]
    seeds = [*study.seeds, *study.close_seeds]
    runs = [tried(records, system, stage, seed).get(key_of(setting or {}), {}) for seed in seeds]
    return 0 if setting is None else sum("diverged" in run for run in runs)


def has_pairs(rows: Rows) -> bool:
    """True if the runs translate several language pairs."""
    return any("pairs" in run.get("test", {}) for by_seed in rows.values() for run in by_seed.values())
