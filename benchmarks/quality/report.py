"""The table and the figure of a study, from the results that were kept; `study.py` calls it as runs end."""

import itertools
import json
import math
import statistics
import textwrap
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
    everything = load_results(study, results)
    _, rows = chosen(study, everything)
    compare(study, rows, runs, results)
    summary, text = page(study, results, everything)
    (results / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (results / "table.md").write_text(text, encoding="utf-8")
    if summary:
        plot(study, summary, results / "bleu_by_parameters.png")
    return text


def page(
    study: "Study", results: Path, everything: dict[str, dict[tuple[tuple, int], dict]] | None = None
) -> tuple[dict[str, dict[str, Any]], str]:
    """Of the files in `results` alone, the summary, and the table in Markdown.

    `everything` is what was loaded of them already: runs that end meanwhile would be in one half of a page only.
    """
    if everything is None:
        everything = load_results(study, results)
    kept, rows = chosen(study, everything)
    summary = summarise(study, rows, len(tried_by_all(study, everything)), load_comparison(results))
    return summary, table(study, summary) + grid(study, rows, summary) + repetitions(study, kept, summary)


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


def tried_by_all(study: "Study", kept: dict[str, dict[tuple[tuple, int], dict]]) -> list[dict[str, Any]]:
    """The settings that every system with results was tried with: while the search goes on, none is ahead in it."""
    first = study.seeds[0]
    systems = [kept.get(system.name, {}) for system in study.systems]
    started = [of_system for of_system in systems if any(seed == first for _, seed in of_system)]
    return [setting for setting in study.search if all((key_of(setting), first) in tried for tried in started)]


def best_setting(
    study: "Study", kept: dict[str, dict[tuple[tuple, int], dict]], settings: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """System to that of the settings with the best validation loss, among those tried with the first seed."""
    best = {}
    for system in study.systems:
        of_system = kept.get(system.name, {})
        tried = [setting for setting in settings if (key_of(setting), study.seeds[0]) in of_system]
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


def compared(study: "Study", rows: dict[str, dict[int, dict]], name: str) -> dict[str, Any]:
    """The seeds that a system and the baseline both have, folders and scores of their runs, the system's first."""
    seeds = sorted(rows[name].keys() & rows.get(study.baseline, {}).keys())
    runs = [[rows[of][seed] for seed in seeds] for of in (name, study.baseline) if seeds]
    return {
        "seeds": seeds,
        "runs": [[folder_of(run) for run in of_system] for of_system in runs],
        "scores": [[run["test"][study.metric] for run in of_system] for of_system in runs],
    }


def compare(study: "Study", rows: dict[str, dict[int, dict]], runs: Path, results: Path) -> None:
    """Test each system against the baseline on the translations of all seeds that both have.

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
        if row["seeds"] == pair["seeds"] and pair.items() <= comparison.get(name, {}).items():
            row["p"] = comparison[name][study.metric]["p_randomization"]
        if pruned:
            row["layers"] = [run["layers"] for run in runs]
        else:
            row["best_is_last"] = [run["train"]["weights"].startswith(last(run)) for run in runs]
            row["validation_loss"] = mean_and_error([run["train"]["best_validation_loss"] for run in runs])
            row["training_tokens_per_second"] = statistics.mean(run["train"]["tokens_per_second"] for run in runs)
            row["generation_sentences_per_second"] = statistics.mean(
                run["generation"]["sentences_per_second"] for run in runs
            )
            row["peak_memory_gib"] = max(run["train"]["peak_memory_bytes"] for run in runs) / 2**30
        summary[name] = row
    return summary


def last(run: dict[str, Any]) -> str:
    """How a run names its last checkpoint."""
    return f"the checkpoint of step {run['train']['steps']},"


def mean_and_error(values: list[float]) -> dict[str, float | None]:
    """Mean, and its standard error, which a single value has not."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "standard_error": error, "values": values}


def table(study: "Study", summary: dict[str, dict[str, Any]]) -> str:
    """The summary as Markdown."""
    lines = [
        f"| system | parameters | {TITLES[study.metric]} | chrF | difference | p | seeds "
        "| learning rate, dropout (settings tried) | validation loss | training, target tokens/s "
        "| generation, sentences/s | peak memory |",
        "|---" * 12 + "|",
    ]
    for row in summary.values():
        cells = [row["title"], f"{row['parameters'] / 1e6:.2f} M", with_error(row[study.metric])]
        cells += [with_error(row["chrf"]), *against_baseline(row)]
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
        f"Difference in {TITLES[study.metric]} from the baseline: mean and standard error over the seeds that both "
        "have. p: approximate randomisation, in which a sentence's translations of all seeds are swapped together; it "
        "speaks of these trained models on such sentences, the standard error of other seeds. Validation loss: nats a "
        "token, label-smoothed as in training. Tokens and sentences a second are the runs' own, with other work "
        "beside them; `speed.py` measures speed.",
    ]
    return "\n".join(lines) + "\n"


def grid(study: "Study", rows: dict[str, dict[int, dict]], summary: dict[str, dict[str, Any]]) -> str:
    """The scores by two keys of the model, where the study asks for it; a system with a base is no part of it."""
    if study.grid is None:
        return ""
    cells = {}
    for system in study.systems:
        if system.name in rows and system.base is None:
            model = rows[system.name][study.seeds[0]]["recipe"]["model"]
            cells[tuple(model[key] for key in study.grid)] = with_error(summary[system.name][study.metric])
    by, across = ([*dict.fromkeys(values)] for values in zip(*cells, strict=True)) if cells else ([], [])
    names = [key.replace("_", " ") for key in study.grid]
    lines = ["", f"| {TITLES[study.metric]}: {names[0]}, by {names[1]} | {' | '.join(map(str, across))} |"]
    lines.append("|---" * (1 + len(across)) + "|")
    lines += [f"| {row} | {' | '.join(cells.get((row, column), '') for column in across)} |" for row in by]
    return "\n".join(lines) + "\n" if cells else ""


def against_baseline(row: dict[str, Any]) -> list[str]:
    """Difference, p and number of seeds, as cells."""
    difference = with_error(row["difference"], sign="+") if "difference" in row else ""
    return [difference, f"{row['p']:.4f}" if "p" in row else "", str(len(row["seeds"]))]


def overview(study: "Study", results: Path) -> str:
    """What the README shows, in Markdown: scores, and the speeds of `speed.py`, beside the baseline's."""
    everything = load_results(study, results)
    _, rows = chosen(study, everything)
    summary, _ = page(study, results, everything)
    file = results / "speed.json"
    speeds = json.loads(file.read_text(encoding="utf-8"))["systems"] if file.is_file() else {}
    baseline = next(system.title for system in study.systems if system.name == study.baseline)
    head = ["system", "parameters", TITLES[study.metric], f"difference from {baseline}", "p", "seeds"]
    head += ["speed of training", "of translation"] if speeds else []
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in summary.items():
        speed = speeds.get(name, {})
        if speed.get("run") != folder_of(rows[name][study.seeds[0]]):  # of other weights, and other layers left
            speed = {}
        times = [f"{speed[what]['by_baseline']:.2f} x" if what in speed else "" for what in ("training", "generation")]
        cells = [row["title"], f"{row['parameters'] / 1e6:.2f} M", with_error(row[study.metric])]
        cells += [*against_baseline(row), *(times if speeds else [])]
        lines.append(f"| {' | '.join(cells)} |")
    words = textwrap.fill(" ".join(state(study, everything, summary)), 119)
    return "\n".join(lines) + "\n" + grid(study, rows, summary) + (f"\n{words}\n" if words else "")


def state(study: "Study", everything: dict[str, dict[tuple[tuple, int], dict]], summary: dict) -> list[str]:
    """Sentences on how much of the study is done, and whether its models had learnt all that they could."""
    settings = [key_of(setting) for setting in study.search]
    best = best_setting(study, everything, study.search)
    search = seeds = 0
    for system in study.systems:
        of_system = everything.get(system.name, {})
        search += sum((setting, study.seeds[0]) in of_system for setting in settings)
        if system.name in best:
            seeds += sum((key_of(best[system.name]), seed) in of_system for seed in study.seeds[1:])
    runs = len(study.systems) * len(settings), len(study.systems) * len(study.seeds[1:])
    sentences = []
    if (search, seeds) != runs:
        others = f" and {seeds} of the {runs[1]} with other seeds" * (len(study.seeds) > 1)
        sentences.append(f"The study is not done: {search} of the {runs[0]} runs of the search{others} are.")
    at_end = [all(row["best_is_last"]) for row in summary.values() if "best_is_last" in row]
    if any(at_end):
        sentences.append(
            f"Of {sum(at_end)} of these {len(at_end)} systems the last checkpoint is the best: they were still "
            "learning when training ended, and the order may be another after more of it."
        )
    return sentences


def write_overview(study: "Study", results: Path, readme: Path) -> None:
    """Put the short table into the README, if that has a place for the study."""
    begin, end = f"<!-- quality: {study.name} -->\n", f"<!-- /quality: {study.name} -->"
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin)
    if found:
        text = before + begin + overview(study, results) + end + rest.partition(end)[2]
        readme.write_text(text, encoding="utf-8")


def with_error(value: dict[str, Any], sign: str = "-") -> str:
    """Mean and standard error; `sign` is that of format specifications."""
    error = value["standard_error"]
    return f"{value['mean']:{sign}.2f}" + (f" ± {error:.2f}" if error is not None else "")


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
        label = f"{score['mean']:.1f}  {row['title']}"
        place = row["parameters"] / 1e6, score["mean"]
        axis.errorbar(*place, yerr=score["standard_error"], fmt=marker, capsize=3, label=label)
    axis.set_xlim(0, 1.2 * max(row["parameters"] for row in ranked) / 1e6)
    axis.set_xlabel("parameters, millions")
    axis.set_ylabel(TITLES[study.metric])
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)
