"""Compare bfloat16 with float32, in validation loss and in speed.

    python benchmarks/speed/precision.py                                       # a table
    python benchmarks/speed/precision.py --output benchmarks/results/precision # and precision.json, precision.md
    python benchmarks/speed/precision.py --seeds 0 --output benchmarks/results/precision_amd  # speed alone

First, the quick start's model is trained on its corpus in both precisions, from several seeds. Runs with one seed
begin with the same weights and see the same batches, so they differ only in precision. The spread over seeds shows the
effect of chance. Then models of three sizes take training steps (forward, backward, clipping, AdamW) in both
precisions, in turns, on the same batch. What counts is the ratio of the times in the same round, as the median over
the rounds. Each precision has the attention that is faster with it on this device, as in training
(`attn_implementation: auto`). The faster precision depends on the processor, so speed is measured on three kinds.
"""

import statistics
import tempfile

import torch
from harness import against, options, parsed, take_turns
from questions import size
from reports import markdown_table, measured_on, write_report
from speed import build
from tasks import Training
from trainings import encoded_corpus, trainer_of
from transformers.utils.logging import disable_progress_bar

from hf_deepwide import VanillaTransformerConfig
from hf_deepwide.training.arguments import TranslationTrainingArguments

RECIPE = "quickstart"
SIZES = {  # layers of each stack, width, heads, inner width
    "2 layers, d 128": (2, 128, 4, 512),
    "3 layers, d 256": (3, 256, 4, 1024),
    "6 layers, d 512 (base)": (6, 512, 8, 2048),
}
SENTENCES, LENGTH = 64, 32  # of the batch whose steps are timed


def validation_losses(seeds: int, steps: int, max_tokens: int) -> dict[str, list[float]]:
    """Train in each precision from each seed; return the validation losses after `steps` steps, in lists by seed."""
    losses: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    corpus = encoded_corpus(RECIPE, "train", "validation")
    for seed in range(1, seeds + 1):
        for precision, own in losses.items():
            with tempfile.TemporaryDirectory() as folder:
                changed = {
                    "training.output_dir": folder, "training.seed": seed, "training.max_steps": steps,
                    "training.bf16": precision == "bfloat16", "training.eval_strategy": "no",
                    "training.save_strategy": "steps", "training.save_steps": 10 * steps,
                    "training.load_best_model_at_end": False, "training.disable_tqdm": True,
                    "training.logging_steps": steps, "training.warmup_steps": steps // 3,
                    "training.max_tokens": max_tokens,
                }  # fmt: skip
                trainer = trainer_of(RECIPE, changed, *corpus)
                trainer.train()
                own.append(trainer.evaluate()["eval_loss"])
            print(f"seed {seed}, {precision}: {own[-1]:.4f}", flush=True)
    return losses


def speed_of(name: str, rounds: int, device: str) -> dict[str, float]:
    """Median seconds of a training step in both precisions, and how many times faster bfloat16 is."""
    config, steps = VanillaTransformerConfig(**size(*SIZES[name])), {}
    for task in (Training("float32", SENTENCES, LENGTH), Training("bfloat16", SENTENCES, LENGTH)):
        steps[task.precision] = task.step(build(config, task, device), device)
    seconds = take_turns(steps, rounds)
    ratio = 1 / against(seconds, "float32")["bfloat16"].ratio
    medians = {precision: round(statistics.median(own), 4) for precision, own in seconds.items()}
    print(f"{name}: {ratio:.2f} x", flush=True)
    return {**medians, "speed_of_bfloat16": round(ratio, 2)}


def table(report: dict) -> str:
    """The report as Markdown."""
    rows = (
        (name, f"{row['float32']:.3f}", f"{row['bfloat16']:.3f}", f"{row['speed_of_bfloat16']:.2f} x as fast")
        for name, row in report["speed"].items()
    )
    return (
        (losses_table(report) if report["settings"]["seeds"] else "")
        + "Steps taken in turns; seconds are those of a machine that may do other work, too. `bf16: auto` is "
        f"{'bfloat16' if report['auto_is_bfloat16'] else 'float32'} on it.\n\n"
    ) + markdown_table(["training step of", "float32, s", "bfloat16, s", "bfloat16 is"], rows)


def losses_table(report: dict) -> str:
    """The part of the report on validation loss, as Markdown."""
    settings, losses = report["settings"], report["validation_loss"]
    head = ["precision", *(f"seed {seed}" for seed in range(1, settings["seeds"] + 1)), "mean"]
    rows = [(name, *(f"{loss:.4f}" for loss in (*own, statistics.mean(own)))) for name, own in losses.items()]
    differences = [b - a for a, b in zip(losses["float32"], losses["bfloat16"], strict=True)]
    rows.append(("difference", *(f"{each:+.4f}" for each in (*differences, statistics.mean(differences)))))
    deviations = [f"{statistics.stdev(own):.4f} in {precision}" for precision, own in losses.items() if own[1:]]
    spread = f"Standard deviation over seeds: {', '.join(deviations)}.\n\n" if deviations else ""
    text = f"Validation loss after {settings['steps']} steps of the quick start.\n\n"
    return f"{text}{markdown_table(head, rows)}\n{spread}"


def main() -> None:
    """Train, time, report."""
    parser = options(__doc__, rounds=7)
    parser.add_argument("--seeds", type=int, default=3, help="how many; 0: no training runs, speed alone")
    parser.add_argument("--steps", type=int, default=300, help="of each training run, a third of them warm-up")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a batch in these runs")
    args = parsed(parser)
    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = {
        **measured_on(device),
        "auto_is_bfloat16": TranslationTrainingArguments("not written to").bf16,
        "settings": {key: value for key, value in vars(args).items() if key != "output"},
        "speed": {name: speed_of(name, args.rounds, device) for name in SIZES},
        "validation_loss": validation_losses(args.seeds, args.steps, args.max_tokens) if args.seeds else {},
    }
    print(table(report))
    if args.output:
        write_report(args.output, report, table)


if __name__ == "__main__":
    main()
