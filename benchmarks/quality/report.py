"""The pages and the figure of a study, from the results that were kept; `study.py` has them written as runs end."""

import itertools
import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_runs import (
    Everything,
    best_setting,
    chosen,
    compare,
    folder_of,
    key_of,
    load_comparison,
    load_results,
    summarise,
    trained,
    tried_by_all,
)

from hf_deepwide.analysis.figures import new_figure, save

if TYPE_CHECKING:
    from study import Study

Repetitions = dict[tuple[str, int], dict]
TITLES = {"bleu": "sacreBLEU", "multi_bleu": "multi-bleu", "chrf": "chrF"}


def report(study: "Study", results: Path) -> str:
    """Compare, draw, write; returns the table, in Markdown."""
    everything = load_results(study, results)
    _, rows = chosen(study, everything)
    compare(study, rows, results)
    summary, text = page(study, results, everything)
    (results / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (results / "table.md").write_text(text, encoding="utf-8")
    (results / "runs.md").write_text(every_run(study, everything), encoding="utf-8")
    if summary:
        plot(study, summary, results / "bleu_by_parameters.png")
    return text


def page(study: "Study", results: Path, everything: Everything | None = None) -> tuple[dict[str, dict[str, Any]], str]:
    """Of the files in `results` alone, the summary, and the table in Markdown.

    `everything` is what was loaded of them already: runs that end meanwhile would be in one half of a page only.
    """
    if everything is None:
        everything = load_results(study, results)
    kept, rows = chosen(study, everything)
    summary = summarise(study, rows, len(tried_by_all(study, everything)), load_comparison(results))
    again = made_again(study, repetitions(study, kept, summary), summary)
    timed, weighed = (measured(study, results / f"{what}.json", rows) for what in ("speed", "memory"))
    return summary, table(study, summary, timed, weighed) + grid(study, rows, summary) + again


def table(study: "Study", summary: dict[str, dict[str, Any]], timed: dict[str, Any], weighed: dict[str, Any]) -> str:
    """The summary as Markdown, with speeds and memory where they were measured."""
    head = ["system", "parameters", TITLES[study.metric], "chrF", "difference", "p", "seeds"]
    head += ["learning rate, dropout (settings tried)", "validation loss"]
    head += ["training, target tokens/s", "translation, target tokens/s"] if timed else []
    head += ["peak memory of training"] if weighed else []
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in summary.items():
        cells = [row["title"], f"{row['parameters'] / 1e6:.2f} M", with_error(row[study.metric])]
        cells += [with_error(row["chrf"]), *against_baseline(row, study.metric)]
        if "layers" in row:
            layers = ", ".join(f"{each['encoder']} + {each['decoder']}" for each in row["layers"])
            cells += [f"layers left: {layers}", ""]
        else:
            setting = ", ".join(f"{value:g}" for value in row["setting"].values())
            cells += [
                f"{setting} ({row['settings_tried']} of {len(study.search)})",
                with_error(row["validation_loss"]),
            ]
        if timed:
            cells += speeds(timed["systems"].get(name, {}), "tokens_per_second", ",.0f")
        if weighed:
            memory = weighed["systems"].get(name)
            cells += [f"{memory['peak_memory_bytes'] / 2**30:.2f} GiB" if memory else ""]
        lines.append(f"| {' | '.join(cells)} |")
    about = [
        f"Difference in {TITLES[study.metric]} from the baseline: mean and standard error over the seeds that both "
        "have.",
        "p: approximate randomisation, in which a sentence's translations of all seeds are swapped together; it "
        "speaks of these trained models on such sentences, the standard error of other seeds.",
        "Validation loss: nats a token, label-smoothed as in training.",
        *speed_taken_on(timed),
    ]
    if weighed:
        about.append(
            f"Memory: all that a process holds that trains the model in {weighed['precision']}, libraries included."
        )
    about.append("Every run, with its own speed and memory and the scores' signatures: [runs.md](runs.md).")
    lines += ["", " ".join(about)]
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


def against_baseline(row: dict[str, Any], metric: str) -> list[str]:
    """Difference, p and number of seeds, as cells."""
    difference = with_error(row["difference"], sign="+") if "difference" in row else ""
    return [difference, p_value(row, metric), str(len(row["seeds"]))]


def p_value(row: dict[str, Any], metric: str) -> str:
    """p as a cell, with the seeds that it is of where the row has others."""
    if "p" not in row:
        return ""
    return f"{row['p'][metric]:.4f}" + ("" if row["p_seeds"] == row["seeds"] else f" ({seeds_of(row['p_seeds'])})")


def seeds_of(seeds: list[int]) -> str:
    """Seeds in words."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def overview(study: "Study", results: Path) -> str:
    """What the README shows, in Markdown: scores, and the speeds of `speed.py`, beside the baseline's."""
    everything = load_results(study, results)
    kept, rows = chosen(study, everything)
    summary, _ = page(study, results, everything)
    timed = measured(study, results / "speed.json", rows)
    baseline = next(system.title for system in study.systems if system.name == study.baseline)
    head = ["system", "parameters", TITLES[study.metric], f"difference from {baseline}", "p", "seeds"]
    head += ["speed of training", "of translation"] if timed else []
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in summary.items():
        cells = [row["title"], f"{row['parameters'] / 1e6:.2f} M", with_error(row[study.metric])]
        cells += against_baseline(row, study.metric)
        if timed:
            cells += speeds(timed["systems"].get(name, {}), "by_baseline", ".2f", " x")
        lines.append(f"| {' | '.join(cells)} |")
    again = repetitions(study, kept, summary)
    said = [*agreement(study, again, summary), *state(study, everything, summary), *speed_taken_on(timed)]
    words = textwrap.fill(" ".join(said), 119)
    return "\n".join(lines) + "\n" + grid(study, rows, summary) + (f"\n{words}\n" if words else "")


def measured(study: "Study", file: Path, rows: dict[str, dict[int, dict]]) -> dict[str, Any]:
    """What `speed.py` or `memory.py` has measured, if it has: of runs that are in the table, not of other settings."""
    if not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    systems = {}
    for name, of_seeds in rows.items():
        run, of_system = of_seeds[study.seeds[0]], found["systems"].get(name, {})
        if (of_system.get("run"), of_system.get("parameters")) == (folder_of(run), run["parameters"]):  # pruned alike
            systems[name] = of_system
    return found | {"systems": systems}


def speeds(of_system: dict[str, Any], unit: str, form: str, sign: str = "") -> list[str]:
    """Of training and of translation, as cells; empty where a system has none."""
    kinds = ("training", "generation")
    return [f"{of_system[kind][unit]:{form}}{sign}" if kind in of_system else "" for kind in kinds]


def speed_taken_on(timed: dict[str, Any]) -> list[str]:
    """Where speeds were taken, if they were."""
    if not timed:
        return []
    threads, processor = timed["machine"]["threads"], timed["machine"]["processor"]
    cores = "one core" if threads == 1 else f"{threads} cores"
    return [f"Speeds: training in {timed['precision']}, translating in float32, {cores} of {processor}."]


def state(study: "Study", everything: Everything, summary: dict) -> list[str]:
    """Sentences on how much of the study is done, how settings were chosen, and whether models had learnt all."""
    return [*progress(study, everything), *choice(study, everything), *learning(summary)]


def progress(study: "Study", everything: Everything) -> list[str]:
    """How many of the study's runs have been made, until all are."""
    settings = [key_of(setting) for setting in study.search]
    best = best_setting(study, everything, study.search)
    search = seeds = 0
    for system in study.systems:
        of_system = everything.get(system.name, {})
        search += sum((setting, study.seeds[0]) in of_system for setting in settings)
        if system.name in best:
            seeds += sum((key_of(best[system.name]), seed) in of_system for seed in study.seeds[1:])
    runs = len(study.systems) * len(settings), len(study.systems) * len(study.seeds[1:])
    if (search, seeds) == runs:
        return []
    others = f" and {seeds} of the {runs[1]} with other seeds" * (len(study.seeds) > 1)
    return [f"The study is not done: {search} of the {runs[0]} runs of the search{others} are."]


def choice(study: "Study", everything: Everything) -> list[str]:
    """For how many systems the test set, were it to choose, would choose another setting than validation loss did."""
    tried = tried_by_all(study, everything)
    best = best_setting(study, everything, tried)
    others = 0
    for name, setting in best.items():
        runs = {key_of(each): everything[name][key_of(each), study.seeds[0]] for each in tried}
        others += max(run["test"][study.metric] for run in runs.values()) > runs[key_of(setting)]["test"][study.metric]
    if not others:
        return []
    return [
        f"Validation loss chose among {len(tried)} settings; of {others} of these {len(best)} systems another one has "
        "the better score on the test set, which may not choose."
    ]


def learning(summary: dict[str, dict[str, Any]]) -> list[str]:
    """How many systems were better at the end than before."""
    at_end = [all(row["best_is_last"]) for row in summary.values() if "best_is_last" in row]
    if not any(at_end):
        return []
    some = "all" if all(at_end) else f"{sum(at_end)} of"
    return [
        f"Of {some} these {len(at_end)} systems the last checkpoint is the best: they were still learning when "
        "training ended, and the order may be another after more of it."
    ]


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


def repetitions(study: "Study", kept: dict[str, dict[int, dict]], summary: dict[str, dict[str, Any]]) -> Repetitions:
    """System and seed to the run, of rows that were made again with seeds that are not the study's.

    A pruned model is no training of its own.
    """
    return {
        (name, seed): run
        for name, of_seeds in kept.items()
        for seed, run in of_seeds.items()
        if seed not in study.seeds and name in summary and trained(name) == name
    }


def made_again(study: "Study", again: Repetitions, summary: dict[str, dict[str, Any]]) -> str:
    """Rows that were made again beside what the table says of them, in Markdown."""
    if not again:
        return ""
    metric = TITLES[study.metric]
    lines = [
        f"| made again | seed | {metric} | in the table | difference | in the table |",
        "|---|---|---|---|---|---|",
    ]
    for (name, seed), run in again.items():
        cells = [summary[name]["title"], str(seed), f"{run['test'][study.metric]:.2f}"]
        cells.append(with_error(summary[name][study.metric]))
        difference = difference_again(study, again, name, seed)
        of_table = summary[name].get("difference") if difference is not None else None
        cells += [f"{difference:+.2f}", with_error(of_table, sign="+")] if of_table else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    said = agreement(study, again, summary)
    return "\n".join(["", *lines, *(["", " ".join(said)] if said else []), ""])


def difference_again(study: "Study", again: Repetitions, name: str, seed: int) -> float | None:
    """From the baseline of the same seed, if that was made, and another system is asked for."""
    if name == study.baseline or (study.baseline, seed) not in again:
        return None
    ours, theirs = (again[of, seed]["test"][study.metric] for of in (name, study.baseline))
    return ours - theirs


def agreement(study: "Study", again: Repetitions, summary: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence on whether rows that were made again came out as the table says, within its errors.

    A run differs from the mean of n others by a standard error of the square root of n + 1 times that of the mean.
    """
    away, signs = {}, []
    for (name, seed), run in again.items():
        of_table = summary[name][study.metric]
        if of_table["standard_error"] is not None:
            expected = of_table["standard_error"] * math.sqrt(len(of_table["values"]) + 1)
            away[name, seed] = abs(run["test"][study.metric] - of_table["mean"]), expected
        difference = difference_again(study, again, name, seed)
        if difference is not None and "difference" in summary[name]:
            signs.append(difference * summary[name]["difference"]["mean"] > 0)
    clauses = []
    if away:
        within = [sum(distance <= times * expected for distance, expected in away.values()) for times in (1, 2)]
        furthest = max(away, key=lambda run: away[run][0])
        of_table = summary[furthest[0]]
        clauses += [
            f"{within[0]} of {len(away)} systems came out no further from the table's mean than its standard error "
            f"lets one expect of one more seed, {within[1]} no further than twice that",
            f"the furthest, {of_table['title']}, has {again[furthest]['test'][study.metric]:.2f} where the table has "
            f"{with_error(of_table[study.metric])}",
        ]
    if signs:
        clauses.append(f"{sum(signs)} of {len(signs)} differences from the baseline are in the table's direction")
    if not clauses:
        return []
    return [f"Made again with {seeds_of(sorted({seed for _, seed in again}))}, {'; '.join(clauses)}."]


def every_run(study: "Study", everything: Everything) -> str:
    """All runs one by one, in Markdown, and the signatures of their scores."""
    metrics = [study.metric, "chrf"]
    head = ["system", "setting", "seed", "parameters", *(TITLES[metric] for metric in metrics), "validation loss"]
    head += ["precision", "training, target tokens/s", "generation, sentences/s", "peak memory"]
    lines, signatures = [], {}
    for system in study.systems:
        of_system = everything.get(system.name, {})
        for setting in study.search:
            of_setting = {seed: run for (key, seed), run in of_system.items() if key == key_of(setting)}
            for seed, run in sorted(of_setting.items()):
                test, training = run["test"], run["train"]
                cells = [system.title, ", ".join(f"{value:g}" for value in setting.values()), str(seed)]
                cells += [f"{run['parameters']:,}", *(f"{test[metric]:.2f}" for metric in metrics)]
                cells += [f"{training['best_validation_loss']:.3f}", training["precision"]]
                cells += [f"{training['tokens_per_second']:,.0f}"]
                cells += [f"{run['generation']['sentences_per_second']:.1f}"]
                cells += [f"{training['peak_memory_bytes'] / 2**30:.1f} GiB"]
                lines.append(f"| {' | '.join(cells)} |")
                signatures |= {(metric, test["signature"][metric]): None for metric in metrics}
    words = ", ".join(key.rpartition(".")[2].replace("_", " ") for key in study.search[0])
    signed = "".join(f"\n{TITLES[metric]} `{signature}`  " for metric, signature in signatures)
    about = (
        "Every run, also of settings that were not chosen. Speeds were taken with other work beside it, and on more "
        "than one machine: the precision is what is faster there. Peak memory is the process's, of which runs of "
        "earlier versions took more ([kernel_caches.md](../../../results/kernel_caches.md)). "
        f"A setting is {words}. Signatures:\n{signed}\n"
    )
    return "\n".join([about, f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines, ""])


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
    axis.margins(x=0.15)
    axis.set_xlabel("parameters, millions")
    axis.set_ylabel(TITLES[study.metric])
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)
