"""The table and the figure of a study, from the results that were kept; `study.py` calls it as runs end."""

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_deepwide.analysis.figures import new_figure, save
from hf_deepwide.data.corpora import load_parallel, read_lines
from hf_deepwide.evaluation.significance import compare_to_baseline

if TYPE_CHECKING:
    from study import Study

PRUNED = "pruned_"
TITLES = {"bleu": "sacreBLEU", "multi_bleu": "multi-bleu"}


def report(study: "Study", runs: Path, results: Path) -> str:
    """Compare, draw, write; returns the table, in Markdown."""
    _, rows = chosen(study, load_results(study, results))
    compare(study, rows, runs, results)
    summary, text = page(study, results)
    (results / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (results / "table.md").write_text(text, encoding="utf-8")
    if summary:
        plot(study, summary, results / "bleu_by_parameters.png")
    return text


def page(study: "Study", results: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Of the files in `results` alone, the summary, and the table in Markdown."""
    everything = load_results(study, results)
    kept, rows = chosen(study, everything)
    tried = {name: sum(seed == study.seeds[0] for _, seed in of_system) for name, of_system in everything.items()}
    summary = summarise(study, rows, tried, load_comparison(results))
    return summary, table(study, summary) + repetitions(study, kept, summary)


def trained(name: str) -> str:
    """The system that was trained: of a pruned one that which was pruned."""
    return name.removeprefix(PRUNED)


def key_of(setting: dict[str, Any]) -> tuple:
    """A setting as something to look up."""
    return tuple(sorted(setting.items()))


def split(setting: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Of each key of a setting the section, the key within it, and the value."""
    return [(*key.split("."), value) for key, value in setting.items()]


def load_results(study: "Study", results: Path) -> dict[str, dict[tuple[tuple, int], dict]]:
    """System, and system pruned, to setting and seed, to what the run says of itself; without those without runs."""
    kept: dict[str, dict[tuple[tuple, int], dict]] = {}
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


def best_setting(study: "Study", kept: dict[str, dict[tuple[tuple, int], dict]]) -> dict[str, dict[str, Any]]:
    """System to the setting with the best validation loss of those that were tried with the first seed."""
    best = {}
    for system in study.systems:
        of_system = kept.get(system.name, {})
        tried = [setting for setting in study.search if (key_of(setting), study.seeds[0]) in of_system]
        if tried:
            losses = [of_system[key_of(setting), study.seeds[0]]["train"]["best_validation_loss"] for setting in tried]
            best[system.name] = tried[losses.index(min(losses))]
    return best


def chosen(
    study: "Study", everything: dict[str, dict[tuple[tuple, int], dict]]
) -> tuple[dict[str, dict[int, dict]], dict[str, dict[int, dict]]]:
    """System to seed to run with the setting that the search has chosen: of all seeds, and of the study's.

    Left out is what has no such run yet, as a model that is still to be pruned, though others of its system were.
    """
    settings = best_setting(study, everything)
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


def load_comparison(results: Path) -> dict[str, dict[str, Any]]:
    """The paired tests that were made so far."""
    file = results / "comparison.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def compared(study: "Study", rows: dict[str, dict[int, dict]], name: str) -> dict[str, Any]:
    """The seeds that a system and the baseline both have, and the folders of their runs, the system's first."""
    seeds = sorted(rows[name].keys() & rows.get(study.baseline, {}).keys())
    folders = [
        [Path(rows[of][seed]["recipe"]["training"]["output_dir"]).name for seed in seeds]
        for of in (name, study.baseline)
        if seeds
    ]
    return {"seeds": seeds, "runs": folders}


def compare(study: "Study", rows: dict[str, dict[int, dict]], runs: Path, results: Path) -> None:
    """Test each system against the baseline on the translations of all seeds that both have, one after the other.

    What was compared before stays: runs are not committed, so that not everyone has all translations.
    """
    comparison = load_comparison(results)
    for name in rows:
        pair = compared(study, rows, name)
        if name == study.baseline or not pair["seeds"] or pair.items() <= comparison.get(name, {}).items():
            continue
        output = f"{PRUNED if name.startswith(PRUNED) else ''}translations.txt"
        ours, theirs = (
            [runs / folder / file for folder in folders]
            for folders, file in zip(pair["runs"], (output, "translations.txt"), strict=True)
        )
        if not all(file.is_file() for file in ours + theirs):
            continue
        references, lowercase = test_references(study)
        system, baseline = ([line for file in files for line in read_lines(file)] for files in (ours, theirs))
        tests = compare_to_baseline(
            baseline,
            {name: system},
            references * len(pair["seeds"]),
            lowercase=lowercase,
            metrics=[study.metric, "chrf"],
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
    tried: dict[str, int],
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
        row["settings_tried"] = tried[name]
        pair = compared(study, rows, name)
        if row["seeds"] == pair["seeds"] and pair.items() <= comparison.get(name, {}).items():
            row["p"] = comparison[name][study.metric]["p_randomization"]
        if pruned:
            row["layers"] = [run["layers"] for run in runs]
        else:
            row["validation_loss"] = mean_and_error([run["train"]["best_validation_loss"] for run in runs])
            row["training_tokens_per_second"] = statistics.mean(run["train"]["tokens_per_second"] for run in runs)
            row["generation_sentences_per_second"] = statistics.mean(
                run["generation"]["sentences_per_second"] for run in runs
            )
            row["peak_memory_gib"] = max(run["train"]["peak_memory_bytes"] for run in runs) / 2**30
        summary[name] = row
    return summary


def mean_and_error(values: list[float]) -> dict[str, float | None]:
    """Mean, and its standard error, which a single value has not."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "standard_error": error, "values": values}


def table(study: "Study", summary: dict[str, dict[str, Any]]) -> str:
    """The summary as Markdown."""
    lines = [
        f"| system | parameters | {TITLES[study.metric]} | chrF | p | seeds | learning rate, dropout (settings tried) "
        "| validation loss | training, target tokens/s | generation, sentences/s | peak memory |",
        "|---" * 11 + "|",
    ]
    for row in summary.values():
        cells = [row["title"], f"{row['parameters'] / 1e6:.2f} M", with_error(row[study.metric])]
        cells += [with_error(row["chrf"])]
        cells += [f"{row['p']:.4f}" if "p" in row else "", str(len(row["seeds"]))]
        if "layers" in row:
            layers = ", ".join(f"{each['encoder']} + {each['decoder']}" for each in row["layers"])
            cells += [f"layers left: {layers}", "", "", "", ""]
        else:
            setting = ", ".join(f"{value:g}" for value in row["setting"].values())
            cells += [
                f"{setting} ({row['settings_tried']} of {len(study.search)})",
                with_error(row["validation_loss"]),
                f"{row['training_tokens_per_second']:,.0f}",
                f"{row['generation_sentences_per_second']:.1f}",
                f"{row['peak_memory_gib']:.1f} GiB",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Tokens and sentences a second are the runs' own, with other work beside them; `speed.py` measures speed.",
    ]
    return "\n".join(lines) + "\n"


def overview(study: "Study", results: Path) -> str:
    """What the README shows, in Markdown: scores, and the speeds of `speed.py`, beside the baseline's."""
    summary, _ = page(study, results)
    file = results / "speed.json"
    speeds = json.loads(file.read_text(encoding="utf-8"))["systems"] if file.is_file() else {}
    baseline = next(system.title for system in study.systems if system.name == study.baseline)
    lines = [
        f"| system | parameters | {TITLES[study.metric]} | p against {baseline} | seeds | speed of training "
        "| of translation |",
        "|---" * 7 + "|",
    ]
    for name, row in summary.items():
        speed = speeds.get(name, {})
        times = [f"{speed[what]['by_baseline']:.2f} x" if what in speed else "" for what in ("training", "generation")]
        cells = [row["title"], f"{row['parameters'] / 1e6:.2f} M", with_error(row[study.metric])]
        cells += [f"{row['p']:.4f}" if "p" in row else "", str(len(row["seeds"])), *times]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_overview(study: "Study", results: Path, readme: Path) -> None:
    """Put the short table into the README, if that has a place for the study."""
    begin, end = f"<!-- quality: {study.name} -->\n", f"<!-- /quality: {study.name} -->"
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin)
    if found:
        text = before + begin + overview(study, results) + end + rest.partition(end)[2]
        readme.write_text(text, encoding="utf-8")


def with_error(value: dict[str, Any]) -> str:
    """Mean and standard error."""
    error = value["standard_error"]
    return f"{value['mean']:.2f}" + (f" ± {error:.2f}" if error is not None else "")


def repetitions(study: "Study", kept: dict[str, dict[int, dict]], summary: dict[str, dict[str, Any]]) -> str:
    """Rows that were made again with seeds that are not the study's."""
    lines = [
        f"| {summary[name]['title']} | {seed} | {run['test'][study.metric]:.2f} "
        f"| {with_error(summary[name][study.metric])} |"
        for name, of_seeds in kept.items()
        for seed, run in of_seeds.items()
        if seed not in study.seeds and name in summary
    ]
    if not lines:
        return ""
    head = ["", f"| made again | seed | {TITLES[study.metric]} | in the table |", "|---|---|---|---|"]
    return "\n".join(head + lines) + "\n"


def plot(study: "Study", summary: dict[str, dict[str, Any]], path: Path) -> None:
    """BLEU against parameters, with standard errors (the papers' Figure 1)."""
    figure, axes = new_figure(1, 1, (7.0, 4.2))
    (axis,) = axes[0]
    ranked = sorted(summary.values(), key=lambda row: row[study.metric]["mean"], reverse=True)  # as the legend stands
    for row, marker in zip(ranked, itertools.cycle("osD^vP*X"), strict=False):
        score = row[study.metric]
        error = score["standard_error"] or 0.0
        label = f"{score['mean']:.1f}  {row['title']}"
        axis.errorbar(row["parameters"] / 1e6, score["mean"], yerr=error, fmt=marker, capsize=3, label=label)
    axis.set_xlim(0, 1.2 * max(row["parameters"] for row in ranked) / 1e6)
    axis.set_xlabel("parameters, millions")
    axis.set_ylabel(TITLES[study.metric])
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)
