"""The runs of a study that were kept: which setting the search has chosen, and what its runs come to."""

import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_deepwide.data.corpora import load_parallel, read_lines
from hf_deepwide.evaluation.significance import compare_to_baseline

if TYPE_CHECKING:
    from study import Study

PRUNED = "pruned_"
Everything = dict[str, dict[tuple[tuple, int], dict]]  # system to setting and seed to what the run says of itself


def trained(name: str) -> str:
    """The system that was trained: of a pruned one that which was pruned."""
    return name.removeprefix(PRUNED)


def key_of(setting: dict[str, Any]) -> tuple:
    """A setting as something to look up."""
    return tuple(sorted(setting.items()))


def split(setting: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Of each key of a setting the section, the key within it, and the value."""
    return [(*key.split("."), value) for key, value in setting.items()]


def load_results(study: "Study", results: Path) -> Everything:
    """System, and system pruned, to setting and seed, to what the run says of itself; without those without runs."""
    kept: Everything = {}
    for system in study.systems:
        files = sorted((results / system.name).glob(f"{system.name}_*.json"))
        for file in files:
            run = json.loads(file.read_text(encoding="utf-8"))
            values = run["recipe"]
            for setting in study.search:
                if all(values[section].get(key) == value for section, key, value in split(setting)):
                    key = key_of(setting), values["training"]["seed"]
                    kept.setdefault(system.name, {})[key] = run
                    pruned = file.parent / f"{PRUNED}{file.name}"
                    if pruned.is_file():
                        of_pruned = json.loads(pruned.read_text(encoding="utf-8"))
                        kept.setdefault(f"{PRUNED}{system.name}", {})[key] = {**run, **of_pruned}
    return kept


def tried_by_all(study: "Study", kept: Everything) -> list[dict[str, Any]]:
    """The settings that every system with results was tried with: while the search goes on, none is ahead in it."""
    first = study.seeds[0]
    systems = [kept.get(system.name, {}) for system in study.systems]
    started = [of_system for of_system in systems if any(seed == first for _, seed in of_system)]
    return [setting for setting in study.search if all((key_of(setting), first) in tried for tried in started)]


def best_setting(study: "Study", kept: Everything, settings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """System to that of the settings with the best validation loss, among those tried with the first seed."""
    best = {}
    for system in study.systems:
        of_system = kept.get(system.name, {})
        tried = [setting for setting in settings if (key_of(setting), study.seeds[0]) in of_system]
        if tried:
            losses = [of_system[key_of(setting), study.seeds[0]]["train"]["best_validation_loss"] for setting in tried]
            best[system.name] = tried[losses.index(min(losses))]
    return best


def chosen(study: "Study", everything: Everything) -> tuple[dict[str, dict[int, dict]], dict[str, dict[int, dict]]]:
    """System to seed to run with the setting that the search has chosen: of all seeds, and of the study's.

    Left out is what has no such run yet, as a model that is still to be pruned, though others of its system were.
    """
    settings = best_setting(study, everything, tried_by_all(study, everything))
    kept = {
        name: {
            seed: of_system[setting, seed]
            for setting, seed in sorted(of_system, key=lambda run: run[1])
            if trained(name) in settings and setting == key_of(settings[trained(name)])
        }
        for name, of_system in everything.items()
    }
    rows = {
        name: {seed: run for seed, run in of_seeds.items() if seed in study.seeds} for name, of_seeds in kept.items()
    }
    return kept, {name: of_seeds for name, of_seeds in rows.items() if of_seeds}


def folder_of(run: dict[str, Any]) -> str:
    """The name of the folder that a run was written to."""
    return Path(run["recipe"]["training"]["output_dir"]).name


def load_comparison(results: Path) -> dict[str, dict[str, Any]]:
    """The paired tests that were made so far."""
    file = results / "comparison.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def compared(
    study: "Study", rows: dict[str, dict[int, dict]], name: str, among: list[int] | None = None
) -> dict[str, Any]:
    """The seeds that a system and the baseline both have, folders and scores of their runs, the system's first.

    `among` restricts the seeds.
    """
    seeds = sorted(rows[name].keys() & rows.get(study.baseline, {}).keys())
    if among is not None:
        seeds = [seed for seed in seeds if seed in among]
    runs = [[rows[of][seed] for seed in seeds] for of in (name, study.baseline) if seeds]
    return {
        "seeds": seeds,
        "runs": [[folder_of(run) for run in of_system] for of_system in runs],
        "scores": [[run["test"][study.metric] for run in of_system] for of_system in runs],
    }


def compare(study: "Study", rows: dict[str, dict[int, dict]], results: Path) -> None:
    """Test each system against the baseline on the translations of all seeds that both have.

    What was compared before stays: not all translations are committed, so that not everyone has them.
    """
    comparison = load_comparison(results)
    for name in rows:
        pair = compared(study, rows, name)
        if name == study.baseline or not pair["seeds"] or pair.items() <= comparison.get(name, {}).items():
            continue
        ours, theirs = (
            [results / trained(of) / f"{PRUNED * of.startswith(PRUNED)}{run}.txt" for run in runs]
            for of, runs in zip((name, study.baseline), pair["runs"], strict=True)
        )
        if not all(file.is_file() for file in ours + theirs):
            continue
        references, lowercase = test_references(study)
        system, baseline = ([line for file in files for line in read_lines(file)] for files in (ours, theirs))
        tests = compare_to_baseline(
            baseline,
            {name: system},
            references,
            lowercase=lowercase,
            metrics=[study.metric, "chrf"],
            runs=len(pair["seeds"]),
        )
        comparison[name] = {**pair, **tests[name]}
    if comparison:
        (results / "comparison.json").write_text(json.dumps(comparison, indent=2) + "\n", encoding="utf-8")


def test_references(study: "Study") -> tuple[list[str], bool]:
    """The references of the study's test set, and whether they are scored without regard to case."""
    from study import recipe_of

    recipe = recipe_of(study, study.systems[0], study.search[0], study.seeds[0], Path("runs"))
    return load_parallel(recipe.data, "test")["target"][:], recipe.evaluation.lowercase


def summarise(
    study: "Study",
    rows: dict[str, dict[int, dict]],
    tried: int,
    comparison: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """One row a system: means over seeds, standard errors, p against the baseline, the setting that was chosen."""
    titles = {system.name: system.title for system in study.systems}
    summary = {}
    for name, of_seeds in rows.items():
        pruned = name.startswith(PRUNED)
        runs = list(of_seeds.values())
        row = {"title": titles[trained(name)] + (", pruned" if pruned else ""), "seeds": list(of_seeds)}
        row["parameters"] = statistics.mean(run["parameters"] for run in runs)
        for metric in (study.metric, "chrf"):
            row[metric] = mean_and_error([run["test"][metric] for run in runs])
        row["signature"] = runs[0]["test"]["signature"]
        row["setting"] = {
            "learning rate": runs[0]["recipe"]["training"]["learning_rate"],
            "dropout": runs[0]["recipe"]["model"]["dropout"],
        }
        row["settings_tried"] = tried
        pair = compared(study, rows, name)
        if name != study.baseline and pair["seeds"]:
            differences = [ours - theirs for ours, theirs in zip(*pair["scores"], strict=True)]
            row["difference"] = mean_and_error(differences)
        test = comparison.get(name)  # stays when a seed is added by someone who has not the translations of the others
        if test and compared(study, rows, name, test["seeds"]).items() <= test.items():
            row["p"] = {metric: test[metric]["p_randomization"] for metric in (study.metric, "chrf")}
            row["p_seeds"] = test["seeds"]
        if pruned:
            row["layers"] = [run["layers"] for run in runs]
        else:
            row["best_is_last"] = [run["train"]["weights"].startswith(last(run)) for run in runs]
            row["validation_loss"] = mean_and_error([run["train"]["best_validation_loss"] for run in runs])
        summary[name] = row
    return summary


def last(run: dict[str, Any]) -> str:
    """How a run names its last checkpoint."""
    return f"the checkpoint of step {run['train']['steps']},"


def mean_and_error(values: list[float]) -> dict[str, float | None]:
    """Mean, and its standard error, which a single value has not."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "standard_error": error, "values": values}
