"""Does a deep post-norm decoder diverge when its validation loss rises? Measure its losses with and without dropout.

    HF_DEEPWIDE_DATA=PATH python benchmarks/dropout_gap.py            train, measure, write the report
    HF_DEEPWIDE_DATA=PATH python benchmarks/dropout_gap.py --report   train nothing; report the runs there are

This script trains decoders of 24 layers on Multi30k for a few hundred updates, by packaged recipes and by variations
of these recipes. Each checkpoint is measured twice on the same sentences of the training set: with dropout, as in
training, and without. A model that has diverged has a high loss both times. A finished run is not made again, and an
interrupted run is resumed: give the same command.
"""

import argparse
import concurrent.futures
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from reports import markdown_table, measured_on, write_report
from trainings import train
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_deepwide.analysis.figures import new_figure, save
from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.loading import load_model, load_tokenizer
from hf_deepwide.runs.facts import machine
from hf_deepwide.runs.recipe import Recipe, load_recipe
from hf_deepwide.training.checkpoints import checkpoints

ROOT = Path(__file__).parents[1]
UPDATES, EVERY = 400, 40
SENTENCES = 200  # of the training set, and of the validation set
DRAWS = 3  # dropout masks that a loss is averaged over
DEEP = "multi30k_en_de_deep_postnorm"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # title to recipe, and keys that differ from it
    "post-norm": (DEEP, {}),
    "post-norm, Transformers' Marian": (
        "multi30k_en_de_marian",
        {
            "model.d_model": 128,
            "model.decoder_layers": 24,
            "model.encoder_ffn_dim": 512,
            "model.decoder_ffn_dim": 512,
            "training.warmup_steps": 200,
        },
    ),
    "post-norm, a quarter of the rate": (DEEP, {"training.learning_rate": 5e-4}),
    "post-norm, a twentieth of the rate": (DEEP, {"training.learning_rate": 1e-4}),
    "post-norm, warm-up throughout": (DEEP, {"training.warmup_steps": UPDATES}),
    "post-norm, no dropout": (DEEP, {"model.dropout": 0.0}),
    "pre-norm": (DEEP, {"model.normalize_before": True}),
    "DeepNorm": ("multi30k_en_de_deep_deepnorm", {}),
}
COMMON = {
    "data.test": None,
    "training.num_train_epochs": 1,
    "training.max_steps": UPDATES,
    "training.predict_with_generate": False,
    "training.gradient_norms": False,
    "training.eval_strategy": "no",
    "training.save_strategy": "steps",
    "training.save_steps": EVERY,
    "training.save_total_limit": UPDATES // EVERY,
    "training.load_best_model_at_end": False,
}
KINDS = {"with dropout": "training set, with dropout", "without": "training set, without", "validation": "validation"}


def recipe_of(runs: Path, title: str) -> Recipe:
    """The recipe of a variant."""
    recipe, keys = VARIANTS[title]
    folder = runs / title.replace(", ", "_").replace(" ", "-").replace("'", "")
    options = COMMON | keys | {"training.output_dir": str(folder)}
    return load_recipe(recipe, [part for key, value in options.items() for part in (f"--{key}", json.dumps(value))])


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    draws: int,
) -> float:
    """Return the cross-entropy of the targets in nats per token, without label smoothing.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        sources: sentences.
        targets: their translations.
        draws: number of dropout masks that the loss is averaged over; 0 turns dropout off.
    """
    model.train(draws > 0)
    torch.manual_seed(1)
    total, count = 0.0, 0
    for _ in range(draws or 1):
        for begin in range(0, len(sources), 50):
            rows = slice(begin, begin + 50)
            batch = tokenizer(list(sources[rows]), text_target=list(targets[rows]), padding=True, return_tensors="pt")
            labels = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, -100)
            tokens = int((labels != -100).sum())
            total += model(**{**batch, "labels": labels}).loss.item() * tokens
            count += tokens
    return total / count


def measure(run: Path, texts: dict[str, tuple[list[str], list[str]]]) -> dict[str, Any]:
    """Measure the losses of each checkpoint of a run; `texts` holds the sources and targets of each split."""
    tokenizer, rows = load_tokenizer(run), []
    for checkpoint in checkpoints(run):
        model = load_model(AutoModelForSeq2SeqLM, checkpoint)
        rows.append(
            {
                "update": step_of(checkpoint),
                "with dropout": mean_loss(model, tokenizer, *texts["train"], draws=DRAWS),
                "without": mean_loss(model, tokenizer, *texts["train"], draws=0),
                "validation": mean_loss(model, tokenizer, *texts["validation"], draws=0),
            }
        )
    return {"vocabulary": len(tokenizer), "losses": rows}


def step_of(checkpoint: Path) -> int:
    """The update at which a checkpoint was saved."""
    return int(checkpoint.name.rpartition("-")[2])


def some_of(data: DataArguments, split: str) -> tuple[list[str], list[str]]:
    """The first sentences of a split that are not empty, and their translations."""
    pairs = load_parallel(data, split)
    rows = [row for row in zip(pairs["source"][:], pairs["target"][:], strict=True) if all(row)][:SENTENCES]
    sources, targets = zip(*rows, strict=True)
    return list(sources), list(targets)


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows = (
        (title, losses[-1]["update"], *(f"{losses[-1][kind]:.2f}" for kind in KINDS))
        for title, losses in report["systems"].items()
    )
    return (
        "# Losses of deep decoders with dropout and without\n\n"
        "Encoders of 3 layers and decoders of 24 on Multi30k, English to German, one seed. The loss is in nats a "
        f"token, not smoothed, on {SENTENCES} sentences of each set; with dropout it is a mean over {DRAWS} draws. A "
        f"uniform guess has {math.log(report['vocabulary']):.2f}.\n\n"
    ) + markdown_table(["decoder", "updates", *KINDS.values()], rows)


def draw(report: dict[str, Any], path: Path) -> None:
    """Plot the losses of each variant against the updates, with one panel for each variant."""
    figure, panels = new_figure(2, math.ceil(len(VARIANTS) / 2), (3.2, 2.6), sharex=True, sharey=True)
    for axes, (title, losses) in zip(panels.flat, report["systems"].items(), strict=False):
        for (kind, label), style in zip(KINDS.items(), ("C0-", "C1-", "C1--"), strict=True):
            axes.plot([row["update"] for row in losses], [row[kind] for row in losses], style, label=label)
        axes.axhline(math.log(report["vocabulary"]), color="0.6", linestyle=":", label="uniform guess")
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("updates")
    for axes in panels[:, 0]:
        axes.set_ylabel("nats a token")
    panels[0, 0].legend(fontsize="x-small")
    save(figure, path)


def main() -> None:
    """Train what is missing, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs", "dropout_gap"), help="folder for the runs")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "dropout_gap")
    args = parser.parse_args()
    recipes = {title: recipe_of(args.runs, title) for title in VARIANTS}
    if not args.report:
        threads = max(1, machine()["cores"] // args.jobs)
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda recipe: train(recipe.values, threads=threads), recipes.values()))
    texts = {split: some_of(recipes["post-norm"].data, split) for split in ("train", "validation")}
    report: dict[str, Any] = {**measured_on(), "systems": {}}
    for title, recipe in recipes.items():
        if (recipe.output_dir / "results.json").is_file():
            print(f"{title}: measuring", flush=True)
            measured = measure(recipe.output_dir, texts)
            report["vocabulary"] = measured["vocabulary"]
            report["systems"][title] = measured["losses"]
    if not report["systems"]:
        raise UserError(f"{args.runs} has no finished run")
    write_report(args.output, report, table)
    draw(report, args.output.with_suffix(".png"))
    print(table(report))


if __name__ == "__main__":
    run_script(main)
