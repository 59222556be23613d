"""Gather the latent-depth runs on Multi30k: scores, paired tests, pruning, and depth that trains.

    python scripts/train_translation.py scripts/recipes/multi30k_en_xx_vanilla.yaml
    python scripts/train_translation.py scripts/recipes/multi30k_en_xx_latent_depth.yaml
    python benchmarks/latent_depth.py one_to_many runs --data $HF_DEEPWIDE_DATA/multi30k --threads 1

    python scripts/train_translation.py scripts/recipes/multi30k_en_de_deep_postnorm.yaml --data.test null
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_deep_postnorm.yaml \
        --model.normalize_before true --training.output_dir runs/multi30k_en_de_deep_prenorm
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_deep_latent.yaml
    python benchmarks/latent_depth.py deep runs

writes tables and figures to benchmarks/results/latent_depth.

One-to-many: a decoder of twelve latent layers, six to be used, against one of six static layers, with paired tests
over the sentences of each pair. The latent model is then pruned for each language. BLEU before and after comes of
the same beam search; speed is greedy search on the first sentences of the test set, by the whole decoder (its z
multiplied in), by the latent model that skips what it does not use, and by the pruned one, in turns; of each the
median, and the median of the ratios to the first.

Deep: a decoder of 24 layers at one learning rate, latent, and static pre-norm and post-norm: learning curves and
gradient norms by layer.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_deepwide import prune
from hf_deepwide.analysis import gradient_norms, layer_utilization
from hf_deepwide.analysis.learning_curves import plot_runs
from hf_deepwide.data.corpora import read_lines
from hf_deepwide.errors import run_script
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.significance import compare_to_baseline
from hf_deepwide.evaluation.translate import EvaluationArguments, translate
from hf_deepwide.training.checkpoints import load_history

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "latent_depth"
STATIC, LATENT = "multi30k_en_xx_vanilla", "multi30k_en_xx_latent_depth"
DEEP = ("multi30k_en_de_deep_latent", "multi30k_en_de_deep_prenorm", "multi30k_en_de_deep_postnorm")
TEST = "test_2016_flickr"
TIMED_SENTENCES, TURNS = 100, 5


def one_to_many(runs: Path, data: Path) -> dict[str, Any]:
    """Scores of both runs, and the paired tests of each pair."""
    results = {run: json.loads((runs / run / "results.json").read_text(encoding="utf-8")) for run in (STATIC, LATENT)}
    comparison = {}
    for pair in results[STATIC]["test"]["pairs"]:
        ours, theirs = (list(read_lines(runs / run / f"translations.{pair}.txt")) for run in (LATENT, STATIC))
        references = list(read_lines(data / f"{TEST}.{pair.rpartition('-')[2]}.gz"))
        compared = compare_to_baseline(theirs, {LATENT: ours}, references, metrics=["bleu", "chrf"])
        comparison[pair] = compared[LATENT]
    return {"runs": results, "comparison": comparison}


def pruning(run: Path, data: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Size, speed and BLEU of the latent model and of what is left of it for each language."""
    model = AutoModelForSeq2SeqLM.from_pretrained(run)
    tokenizer = AutoTokenizer.from_pretrained(run)
    sources = list(read_lines(data / f"{TEST}.en.gz"))
    beam = EvaluationArguments(num_beams=5)
    rows = {"parameters": model.num_parameters(), "decoder_layers": model.config.decoder_layers, "languages": {}}
    for language in model.config.posterior_names:
        pair = {"source_lang": "en", "target_lang": language}
        small, whole = prune(model, language), prune(model, language, selection="soft")
        translations = translate(small, tokenizer, sources, beam, **pair)
        scores = score(translations, list(read_lines(data / f"{TEST}.{language}.gz")), target_lang=language)
        rows["languages"][language] = {
            "parameters": small.num_parameters(),
            "decoder_layers": small.config.decoder_layers,
            "bleu_before": before["pairs"][f"en-{language}"]["bleu"],
            "bleu_after": scores["bleu"],
            "signature": scores["signature"]["bleu"],
            "speed": speeds({"whole": whole, "skipping": model, "pruned": small}, tokenizer, sources, pair),
        }
    return rows


def speeds(models: dict[str, Any], tokenizer: Any, sources: list[str], pair: dict[str, str]) -> dict[str, Any]:
    """Sentences a second of each model, in turns, and its speed by the first's."""
    greedy = EvaluationArguments(num_beams=1)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(TURNS + 1):
        for name, model in models.items():
            start = time.perf_counter()
            translate(model, tokenizer, sources[:TIMED_SENTENCES], greedy, **pair)
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    yardstick = next(iter(seconds.values()))
    return {
        name: {
            "sentences_per_second": TIMED_SENTENCES / statistics.median(own),
            "speed_by_whole": statistics.median(theirs / ours for theirs, ours in zip(yardstick, own, strict=True)),
        }
        for name, own in seconds.items()
    }


def depth_that_trains(runs: Path) -> dict[str, Any]:
    """Validation loss by step of decoders of 24 layers, and the figures that show how they learn."""
    histories = {run.removeprefix("multi30k_en_de_"): load_history(runs / run) for run in DEEP}
    plot_runs(histories, RESULTS / "deep_learning_curves.png")
    gradient_norms.plot_gradient_norms(histories, RESULTS / "deep_gradient_norms.png")
    rows = {}
    for run in DEEP:
        losses = {entry["step"]: entry["eval_loss"] for entry in load_history(runs / run) if "eval_loss" in entry}
        rows[run] = {"validation_loss": losses, "best": min(losses.values())}
    return rows


def one_to_many_table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    runs, comparison, pruned = (report[key] for key in ("runs", "comparison", "pruned"))
    pairs = list(comparison)
    lines = [
        "| one-to-many | parameters | decoder layers | " + " | ".join(pairs) + " | average |",
        "|---" * (len(pairs) + 4) + "|",
    ]
    for run, results in runs.items():
        test, model = results["test"], results["recipe"]["model"]
        bleu = " | ".join(f"{test['pairs'][pair]['bleu']:.2f}" for pair in pairs)
        lines.append(
            f"| {run} | {results['parameters'] / 1e6:.2f} M | {model['decoder_layers']} | {bleu} "
            f"| {test['average']['bleu']:.2f} |"
        )
    p = " | ".join(f"{comparison[pair]['bleu']['p_randomization']:.4f}" for pair in pairs)
    lines += [f"| p, latent against static | | | {p} | |", ""]
    lines += [
        "| pruned | parameters | decoder layers | BLEU before | after | sentences/s, whole | skipping | pruned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for language, row in pruned["languages"].items():
        speed = " | ".join(
            f"{row['speed'][name]['sentences_per_second']:.1f} ({row['speed'][name]['speed_by_whole']:.2f} x)"
            for name in ("whole", "skipping", "pruned")
        )
        lines.append(
            f"| {language} | {row['parameters'] / 1e6:.2f} of {pruned['parameters'] / 1e6:.2f} M "
            f"| {row['decoder_layers']} of {pruned['decoder_layers']} | {row['bleu_before']:.2f} "
            f"| {row['bleu_after']:.2f} | {speed} |"
        )
    return "\n".join(lines) + "\n"


def deep_table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["| decoder of 24 layers | validation loss after each epoch | best |", "|---|---|---|"]
    for run, row in report.items():
        losses = ", ".join(f"{loss:.2f}" for loss in row["validation_loss"].values())
        lines.append(f"| {run} | {losses} | {row['best']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compare, prune, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["one_to_many", "deep"])
    parser.add_argument("runs", type=Path, help="folder with the runs")
    parser.add_argument("--data", type=Path, help="folder of Multi30k's files; one_to_many needs it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if args.part == "deep":
        report = depth_that_trains(args.runs)
        table = deep_table(report)
    else:
        if args.data is None:
            parser.error("one_to_many needs --data")
        report = {"threads": args.threads, **one_to_many(args.runs, args.data)}
        report["pruned"] = pruning(args.runs / LATENT, args.data, report["runs"][LATENT]["test"])
        shutil.copy(args.runs / LATENT / layer_utilization.PLOT, RESULTS / layer_utilization.PLOT.name)
        plot_runs({run: load_history(args.runs / run) for run in (STATIC, LATENT)}, RESULTS / "learning_curves.png")
        table = one_to_many_table(report)
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    (RESULTS / f"{args.part}.json").write_text(text, encoding="utf-8")
    (RESULTS / f"{args.part}.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    run_script(main)
