"""Gather the depth-wise LSTM's runs: what the paper leaves open, depth beside the vanilla Transformer, and gradients.

Which variant is the default, on Multi30k (6 + 6 layers of d 128, five epochs) and on the embedded corpus:

    SMALL="--model.d_model 128 --model.encoder_ffn_dim 512 --model.decoder_ffn_dim 512
           --training.predict_with_generate false"
    OPEN="$SMALL --model.encoder_layers 6 --model.decoder_layers 6 --training.num_train_epochs 5
          --training.warmup_steps 200 --training.save_total_limit 2 --data.test null"
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_dwlstm.yaml $OPEN VARIANT \
        --training.output_dir runs/multi30k_en_de_dwlstm_NAME
    python scripts/train_translation.py scripts/recipes/quickstart.yaml --model.family depthwise_lstm \
        --model.attention_branches 1 --model.drop_branch 0.0 VARIANT --training.output_dir runs/quickstart_dwlstm_NAME
    python benchmarks/depthwise_lstm.py defaults runs
    python benchmarks/depthwise_lstm.py embedded runs

where NAME and VARIANT are those of `VARIANTS`. Depth, N = 6 and 12, against a vanilla pre-norm Transformer of the same
width, and started from it:

    DEPTH="$SMALL --training.num_train_epochs 8 --model.encoder_layers N --model.decoder_layers N"
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_vanilla.yaml $DEPTH \
        --model.normalize_before true --training.output_dir runs/multi30k_en_de_vanilla_N_layers
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_dwlstm.yaml $DEPTH \
        --training.output_dir runs/multi30k_en_de_dwlstm_N_layers
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_dwlstm.yaml $DEPTH \
        --model.init_from runs/multi30k_en_de_vanilla_6_layers --tokenizer.path runs/multi30k_en_de_vanilla_6_layers \
        --training.num_train_epochs 4 --training.output_dir runs/multi30k_en_de_dwlstm_from_base         # N = 6
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_dwlstm.yaml $DEPTH \
        --model.forget_bias_init 1.0 --training.num_train_epochs 3 --data.test null \
        --training.output_dir runs/multi30k_en_de_dwlstm_12_layers_forget_bias                          # N = 12
    python benchmarks/depthwise_lstm.py depth runs --reference $HF_DEEPWIDE_DATA/multi30k/test_2016_flickr.de.gz

Gradients of 24 + 24 layers in the first hundred steps, of the LSTM, also with a forget gate that starts open, and of
the vanilla pre-norm Transformer:

    DEEP="$SMALL --model.encoder_layers 24 --model.decoder_layers 24 --training.gradient_norms true
          --training.max_steps 100 --training.max_tokens 2048 --training.logging_steps 10
          --training.eval_strategy steps --training.eval_steps 100 --training.save_strategy steps
          --training.save_steps 100 --data.test null"
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_dwlstm.yaml $DEEP \
        --training.output_dir runs/multi30k_en_de_dwlstm_24_layers
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_dwlstm.yaml $DEEP \
        --model.forget_bias_init 1.0 --training.output_dir runs/multi30k_en_de_dwlstm_24_layers_forget_bias
    python scripts/train_translation.py scripts/recipes/multi30k_en_de_vanilla.yaml $DEEP \
        --model.normalize_before true --training.output_dir runs/multi30k_en_de_vanilla_24_prenorm
    python benchmarks/depthwise_lstm.py gradients runs

Each part writes its table and its figures to benchmarks/results/depthwise_lstm.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_deepwide.analysis.gradient_norms import KEY, plot_gradient_norms
from hf_deepwide.analysis.learning_curves import plot_runs
from hf_deepwide.data.corpora import read_lines
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.evaluation.significance import compare_to_baseline
from hf_deepwide.training.checkpoints import load_history

RESULTS = Path(__file__).parent / "results" / "depthwise_lstm"
MULTI30K, QUICKSTART = "multi30k_en_de_dwlstm_", "quickstart_dwlstm_"
VARIANTS = {  # run: what is asked in cross-attention, and the norms
    "query_self": "the defaults",
    "query_residual": "--model.cross_query residual",
    "query_previous": "--model.cross_query previous",
    "final_norm": "--model.final_layer_norm true",
    "no_input_norm": "--model.attn_input_norm false",
}
DEPTH = {  # run: what it is compared with
    "multi30k_en_de_vanilla_6_layers": None,
    "multi30k_en_de_dwlstm_6_layers": "multi30k_en_de_vanilla_6_layers",
    "multi30k_en_de_dwlstm_from_base": "multi30k_en_de_dwlstm_6_layers",
    "multi30k_en_de_vanilla_12_layers": None,
    "multi30k_en_de_dwlstm_12_layers": "multi30k_en_de_vanilla_12_layers",
}
FORGET_BIAS = {"0": "multi30k_en_de_dwlstm_12_layers", "1": "multi30k_en_de_dwlstm_12_layers_forget_bias"}
GIVEN_LOSS = 4.0  # validation loss, to which steps are counted
DEEP = (
    "multi30k_en_de_dwlstm_24_layers",
    "multi30k_en_de_dwlstm_24_layers_forget_bias",
    "multi30k_en_de_vanilla_24_prenorm",
)


def validation_losses(history: Sequence[dict]) -> dict[int, float]:
    """Step to validation loss."""
    return {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}


def results_of(run: Path) -> dict[str, Any]:
    """The `results.json` of a run that has ended."""
    if not (run / "results.json").is_file():
        raise UserError(f"{run} holds no results.json: the run has not ended")
    return json.loads((run / "results.json").read_text(encoding="utf-8"))


def defaults(runs: Path) -> dict[str, Any]:
    """Validation loss on Multi30k by epoch, of each variant."""
    histories = {name: load_history(runs / f"{MULTI30K}{name}") for name in VARIANTS}
    plot_runs(histories, RESULTS / "defaults.png")
    return {
        name: {
            "variant": variant,
            "validation_loss": validation_losses(histories[name]),
            "recipe": results_of(runs / f"{MULTI30K}{name}")["recipe"],
        }
        for name, variant in VARIANTS.items()
    }


def embedded(runs: Path) -> dict[str, Any]:
    """Best validation loss and test scores on the embedded corpus, of each variant."""
    results = {name: results_of(runs / f"{QUICKSTART}{name}") for name in VARIANTS}
    return {name: {"variant": VARIANTS[name], **of_variant} for name, of_variant in results.items()}


def depth(runs: Path, references: list[str]) -> dict[str, Any]:
    """Scores, paired tests, steps to the best validation loss of what each run is compared with; the forget bias."""
    histories = {run: load_history(runs / run) for run in DEPTH}
    plot_runs(
        {run.removeprefix("multi30k_en_de_"): history for run, history in histories.items()}, RESULTS / "depth.png"
    )
    rows = {}
    for run, rival in DEPTH.items():
        losses = validation_losses(histories[run])
        rows[run] = {"results": results_of(runs / run), "validation_loss": losses, "rival": rival}
        if rival is not None:
            ours, theirs = (list(read_lines(runs / name / "translations.txt")) for name in (run, rival))
            compared = compare_to_baseline(theirs, {run: ours}, references, metrics=["bleu", "chrf"])
            rows[run]["comparison"] = compared[run]
    forget = {start: validation_losses(load_history(runs / run)) for start, run in FORGET_BIAS.items()}
    return {"runs": rows, "forget_bias_init": forget}


def steps_to(goal: float, losses: dict[str, float]) -> str:
    """Step of the first validation whose loss is at most `goal`; there is one at the end of each epoch."""
    return next((step for step, loss in losses.items() if loss <= goal), "never")


def gradients(runs: Path) -> dict[str, Any]:
    """Gradient norms of each layer, at each logged step of the first hundred."""
    histories = {run: load_history(runs / run) for run in DEEP}
    plot_gradient_norms(
        {run.removeprefix("multi30k_en_de_"): history for run, history in histories.items()}, RESULTS / "gradients.png"
    )
    return {
        run: {
            "norms": {entry["step"]: entry[KEY] for entry in history if KEY in entry},
            "validation_loss": validation_losses(history),
        }
        for run, history in histories.items()
    }


def defaults_table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["| depth-wise LSTM, 6 layers | Multi30k, validation loss after each epoch |", "|---|---|"]
    for row in report.values():
        by_epoch = ", ".join(f"{loss:.2f}" for loss in row["validation_loss"].values())
        lines.append(f"| {row['variant']} | {by_epoch} |")
    return "\n".join(lines) + "\n"


def embedded_table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["| depth-wise LSTM | embedded corpus, validation loss | sacreBLEU |", "|---|---|---|"]
    for row in report.values():
        loss, bleu = row["train"]["best_validation_loss"], row["test"]["bleu"]
        lines.append(f"| {row['variant']} | {loss:.3f} | {bleu:.1f} |")
    return "\n".join(lines) + "\n"


def depth_table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [
        f"| system | parameters | steps | steps to validation loss {GIVEN_LOSS:g} | best validation loss | sacreBLEU "
        "| chrF | against | p | target tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run, row in report["runs"].items():
        results = row["results"]
        test, best = results["test"], min(row["validation_loss"].values())
        rivalry = " | "
        if row["rival"] is not None:
            rivalry = f"{short(row['rival'])} | {row['comparison']['bleu']['p_randomization']:.4f}"
        lines.append(
            f"| {short(run)} | {results['parameters'] / 1e6:.2f} M | {results['train']['steps']:,} "
            f"| {steps_to(GIVEN_LOSS, row['validation_loss'])} | {best:.3f} | {test['bleu']:.2f} | {test['chrf']:.2f} "
            f"| {rivalry} | {results['train']['tokens_per_second']:,.0f} |"
        )
    lines += ["", "| 12 layers, the forget gate's bias starts at | validation loss after each epoch |", "|---|---|"]
    for start, losses in report["forget_bias_init"].items():
        lines.append(f"| {start} | {', '.join(f'{loss:.2f}' for loss in losses.values())} |")
    return "\n".join(lines) + "\n"


def gradients_table(report: dict[str, Any]) -> str:
    """First and last layer of each stack, at the first and the last step that was logged."""
    lines = [
        "| 24 + 24 layers | step | encoder, first layer | last | decoder, first layer | last | validation loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, row in report.items():
        loss = f"{list(row['validation_loss'].values())[-1]:.2f}"
        steps = list(row["norms"])
        for step in (steps[0], steps[-1]):
            norms = [row["norms"][step][stack][layer] for stack in ("encoder", "decoder") for layer in (0, -1)]
            cells = " | ".join(f"{norm:.1e}" for norm in norms)
            lines.append(f"| {short(run)} | {step} | {cells} | {loss if step == steps[-1] else ''} |")
    return "\n".join(lines) + "\n"


TABLES = {"defaults": defaults_table, "embedded": embedded_table, "depth": depth_table, "gradients": gradients_table}


def short(run: str) -> str:
    """The name of a run without that of its corpus."""
    name = run.removeprefix("multi30k_en_de_").replace("_", " ").replace("dwlstm", "depth-wise LSTM,", 1)
    return name.replace("24 prenorm", "24 layers").replace("forget bias", "with forget bias 1")


def main() -> None:
    """Gather, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(TABLES))
    parser.add_argument("runs", type=Path, help="folder with the runs")
    parser.add_argument("--reference", type=Path, help="test_2016_flickr.de or .de.gz; depth needs it")
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if args.part == "depth":
        if args.reference is None:
            parser.error("depth needs --reference")
        report = depth(args.runs, list(read_lines(args.reference)))
    else:
        report = {"defaults": defaults, "embedded": embedded, "gradients": gradients}[args.part](args.runs)
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    (RESULTS / f"{args.part}.json").write_text(text, encoding="utf-8")
    # of what was written, as JSON turns numbers that are keys into text
    table = TABLES[args.part](json.loads(text))
    (RESULTS / f"{args.part}.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    run_script(main)
