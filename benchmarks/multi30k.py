"""Gather the Multi30k runs: their results, the paired tests between them, and the README's table.

    for run in vanilla vanilla_longer marian mat_scratch mat multipath; do
        python scripts/train_translation.py scripts/recipes/multi30k_en_de_$run.yaml
    done
    python benchmarks/multi30k.py runs --reference $HF_DEEPWIDE_DATA/multi30k/test_2016_flickr.de.gz

writes one JSON file a run, `comparison.json` and `validation_loss.json` to benchmarks/results/multi30k_en_de, the
runs' model cards (without sentences of the corpus) to model_cards/, and the table into README.md. Significance is
against the vanilla run, and of the proximal MAT against the vanilla run that was trained for as long, by approximate
randomisation and by paired bootstrap over the test sentences. Beside the results lie the learning curves of all runs
(Multi-Path, Figure 6) and the path weights of the Multi-Path run (its Figure 7).
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from depthwise_lstm import validation_losses

from hf_deepwide.analysis import path_weights
from hf_deepwide.analysis.learning_curves import plot_runs
from hf_deepwide.data.corpora import read_lines
from hf_deepwide.errors import run_script
from hf_deepwide.evaluation.significance import compare_systems
from hf_deepwide.training.checkpoints import load_history
from hf_deepwide.training.model_card import card_of_results

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "multi30k_en_de"
SYSTEMS = {  # run: what it is called in the table
    "vanilla": "vanilla Transformer",
    "vanilla_longer": "vanilla Transformer, 8 epochs more",
    "marian": "Hugging Face's `MarianMTModel`, the control",
    "mat_scratch": "MAT, 3 branches, from scratch",
    "mat": "MAT, 3 branches, proximal, 8 epochs more from the vanilla run",
    "multipath": "Multi-Path, 4 paths in the encoder, more features, pre-norm",
}
AGAINST = {run: "vanilla" for run in SYSTEMS if run != "vanilla"} | {"mat": "vanilla_longer"}
BEGIN, END = "<!-- multi30k -->\n", "<!-- /multi30k -->"


def results_of(run: str) -> dict[str, Any]:
    """The `results.json` that was kept of a run."""
    return json.loads((RESULTS / f"{run}.json").read_text(encoding="utf-8"))


def table() -> str:
    """The Markdown table of what is in `RESULTS`."""
    comparison = json.loads((RESULTS / "comparison.json").read_text(encoding="utf-8"))
    lines = [
        "| system | parameters | sacreBLEU | chrF | against | p | minutes | target tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run, title in SYSTEMS.items():
        results = results_of(run)
        test, train = results["test"], results["train"]
        against, p = "", ""
        if run in comparison:
            against, p = SYSTEMS[AGAINST[run]], f"{comparison[run]['bleu']['p_randomization']:.4f}"
        lines.append(
            f"| {title} | {results['parameters'] / 1e6:.2f} M | {test['bleu']:.2f} | {test['chrf']:.2f} | {against} "
            f"| {p} | {train['minutes']:.0f} | {train['tokens_per_second']:,.0f} |"
        )
    signature = results_of("vanilla")["test"]["signature"]["bleu"]
    return "\n".join([*lines, "", f"sacreBLEU signature `{signature}`."]) + "\n"


def main() -> None:
    """Copy, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder with the runs multi30k_en_de_*")
    parser.add_argument("--reference", type=Path, required=True, help="test_2016_flickr.de or .de.gz")
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    outputs, histories = {}, {}
    for run in SYSTEMS:
        folder = args.runs / f"multi30k_en_de_{run}"
        shutil.copy(folder / "results.json", RESULTS / f"{run}.json")
        card = card_of_results(results_of(run), folder.name)
        (ROOT / "model_cards" / f"multi30k_en_de_{run}.md").write_text(card, encoding="utf-8")
        outputs[run] = list(read_lines(folder / "translations.txt"))
        histories[run] = load_history(folder)
        if (folder / path_weights.PLOT).is_file():
            shutil.copy(folder / path_weights.PLOT, RESULTS / f"{run}_{path_weights.PLOT.name}")
    plot_runs(histories, RESULTS / "learning_curves.png")
    losses = {run: validation_losses(history) for run, history in histories.items()}
    (RESULTS / "validation_loss.json").write_text(json.dumps(losses, indent=2) + "\n", encoding="utf-8")
    references = list(read_lines(args.reference))
    comparison = {
        run: compare_systems(outputs[against], outputs[run], references, metrics=["bleu", "chrf"])
        for run, against in AGAINST.items()
    }
    text = json.dumps(comparison, indent=2, ensure_ascii=False) + "\n"
    (RESULTS / "comparison.json").write_text(text, encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    (ROOT / "README.md").write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
    print(table())


if __name__ == "__main__":
    run_script(main)
