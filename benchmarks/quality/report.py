"""The table and the figure of a study, from the results that were kept; `study.py` calls it as runs end."""

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


def report(study: "Study", runs: Path, results: Path) -> str:
    """Compare, draw, write; returns the table, in Markdown."""
    kept = load_results(study, results)
    if study.baseline in kept:
        compare(study, kept, runs, results)
    titles = {system.name: system.title for system in study.systems}
    titles |= {f"{PRUNED}{name}": f"{title}, pruned" for name, title in titles.items()}
    summary = summarise(kept, titles, study.baseline, results)
    (results / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (results / "table.md").write_text(table(summary), encoding="utf-8")
    if summary:
        plot(summary, results / "bleu_by_parameters.png")
    return table(summary)


def load_results(study: "Study", results: Path) -> dict[str, dict[int, dict]]:
    """System, and system pruned, to seed, to what its run says of itself; systems without runs are left out."""
    kept: dict[str, dict[int, dict]] = {}
    for system in study.systems:
        for prefix in ("", PRUNED):
            files = {
                int(path.stem.rpartition("_")[2]): path
                for path in (results / system.name).glob(f"{prefix}seed_*.json")
            }
            if files:
                of_seeds = {seed: json.loads(files[seed].read_text(encoding="utf-8")) for seed in sorted(files)}
                kept[f"{prefix}{system.name}"] = of_seeds
    return kept


def compare(study: "Study", kept: dict[str, dict[int, dict]], runs: Path, results: Path) -> None:
    """Test each system against the baseline on the translations of all seeds that both have, one after the other."""
    outputs: dict[str, dict[int, list[str]]] = {}
    for name, of_seeds in kept.items():
        trained = kept[name.removeprefix(PRUNED)]
        for seed in of_seeds:
            recipe = trained[seed]["recipe"]
            folder = runs / Path(recipe["training"]["output_dir"]).name
            file = folder / ("pruned_translations.txt" if name.startswith(PRUNED) else "translations.txt")
            if file.is_file():
                outputs.setdefault(name, {})[seed] = list(read_lines(file))
    comparison = {}
    for name, of_seeds in outputs.items():
        seeds = sorted(of_seeds.keys() & outputs.get(study.baseline, {}).keys())
        if name == study.baseline or not seeds:
            continue
        ours, theirs = ([line for seed in seeds for line in outputs[of][seed]] for of in (name, study.baseline))
        references = test_references(study) * len(seeds)
        compared = compare_to_baseline(theirs, {name: ours}, references, metrics=["bleu", "chrf"])
        comparison[name] = {"seeds": seeds, **compared[name]}
    if comparison:
        text = json.dumps(comparison, indent=2) + "\n"
        (results / "comparison.json").write_text(text, encoding="utf-8")


def test_references(study: "Study") -> list[str]:
    """The references of the study's test set."""
    from study import recipe_of

    recipe = recipe_of(study, study.systems[0], study.settings[0], study.seeds[0], Path("runs"))
    return load_parallel(recipe.data, "test")["target"][:]


def summarise(
    kept: dict[str, dict[int, dict]], titles: dict[str, str], baseline: str, results: Path
) -> dict[str, dict[str, Any]]:
    """One row a system: means over seeds, standard errors, p against the baseline, the setting that was chosen."""
    file = results / "comparison.json"
    comparison = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    rows = {}
    for name, of_seeds in kept.items():
        runs = list(of_seeds.values())
        row = {"title": titles[name], "seeds": list(of_seeds), "parameters": runs[0]["parameters"]}
        for metric in ("bleu", "chrf"):
            row[metric] = mean_and_error([run["test"][metric] for run in runs])
        row["signature"] = runs[0]["test"]["signature"]
        if name in comparison:
            row["p"] = comparison[name]["bleu"]["p_randomization"]
        if name.startswith(PRUNED):
            row["layers"] = [run["layers"] for run in runs]
            row["parameters"] = statistics.mean(run["parameters"] for run in runs)
        else:
            recipe = runs[0]["recipe"]
            row["setting"] = {
                "learning rate": recipe["training"]["learning_rate"],
                "dropout": recipe["model"]["dropout"],
            }
            row["training_tokens_per_second"] = statistics.mean(run["train"]["tokens_per_second"] for run in runs)
            row["generation_sentences_per_second"] = statistics.mean(
                run["generation"]["sentences_per_second"] for run in runs
            )
            row["peak_memory_gib"] = max(run["train"]["peak_memory_bytes"] for run in runs) / 2**30
        rows[name] = row
    return rows


def mean_and_error(values: list[float]) -> dict[str, float | None]:
    """Mean, and its standard error, which a single value has not."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "standard_error": error, "values": values}


def table(summary: dict[str, dict[str, Any]]) -> str:
    """The summary as Markdown."""
    lines = [
        "| system | parameters | sacreBLEU | chrF | p | seeds | learning rate, dropout | training, target tokens/s "
        "| generation, sentences/s | peak memory |",
        "|---" * 10 + "|",
    ]
    for row in summary.values():
        cells = [row["title"], f"{row['parameters'] / 1e6:.2f} M"]
        for metric in ("bleu", "chrf"):
            error = row[metric]["standard_error"]
            cells.append(f"{row[metric]['mean']:.2f}" + (f" ± {error:.2f}" if error is not None else ""))
        cells += [f"{row['p']:.4f}" if "p" in row else "", str(len(row["seeds"]))]
        if "setting" in row:
            cells += [
                ", ".join(f"{value:g}" for value in row["setting"].values()),
                f"{row['training_tokens_per_second']:,.0f}",
                f"{row['generation_sentences_per_second']:.1f}",
                f"{row['peak_memory_gib']:.1f} GiB",
            ]
        else:
            layers = ", ".join(f"{each['encoder']} + {each['decoder']}" for each in row["layers"])
            cells += [f"layers left: {layers}", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(summary: dict[str, dict[str, Any]], path: Path) -> None:
    """BLEU against parameters, with standard errors (the papers' Figure 1)."""
    figure, axes = new_figure(1, 1, (7.0, 4.2))
    (axis,) = axes[0]
    for row in summary.values():
        error = row["bleu"]["standard_error"] or 0.0
        axis.errorbar(row["parameters"] / 1e6, row["bleu"]["mean"], yerr=error, fmt="o", capsize=3, label=row["title"])
    axis.set_xlabel("parameters, millions")
    axis.set_ylabel("sacreBLEU")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)
