"""Compare training as a user runs it: our trainer with token batches, and Marian under Transformers' own trainer.

    HF_DEEPWIDE_DATA=… python benchmarks/speed/training_system.py
    python benchmarks/speed/training_system.py --size "d 128" --precision bfloat16
    python benchmarks/speed/training_system.py --threads 1 --output benchmarks/results/training_system_amd.json

Three systems train on Multi30k, English to German, with the same tokenizer, optimizer, clipping and label smoothing:

- Ours has the defaults of a recipe: sentences of about equal length together, and the attention that suits the
  precision.
- Marian has the defaults of Seq2SeqTrainer: a fixed number of shuffled sentences, padded to the longest by
  DataCollatorForSeq2Seq, and its default attention.
- The third system is Marian with sentences grouped by length, which is an option of the trainer.

Marian's batches have as many sentences as our batches have on average, so that updates see equally many real tokens.
An epoch is a random sample of the corpus, so that a few updates see sentences of all lengths. What counts is real
target tokens per second. The time runs from the end of one update to the end of a later update, so it includes the
loading of batches. The trainers take turns. Our process keeps freed memory (see `keep_memory`), which makes Marian
faster, too.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from harness import options, parsed
from questions import size
from reports import begun, markdown, measured_on, write_report
from trainings import encoded_corpus, trainer_of
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import run_script

RECIPE = "multi30k_en_de_vanilla"
SIZES = {"d 256": (6, 256, 4, 1024), "d 128": (6, 128, 4, 512)}  # layers of each stack, width, heads, inner width
IDS = ("bos_token_id", "pad_token_id", "eos_token_id")
PRECISIONS = ("float32", "bfloat16")
SYSTEMS = ("ours", "Marian", "Marian, grouped by length")
WARM_UP = 1  # updates of a turn that are not counted


class Clock(TrainerCallback):
    """A callback that records when each update ended."""

    def __init__(self) -> None:
        """Begin without updates."""
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


class Counting:
    """A collator that counts the target tokens of each batch, without padding and with padding."""

    def __init__(self, collator: Any) -> None:
        """Wrap `collator`."""
        self.collator = collator
        self.counts: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped collator."""
        return getattr(self.collator, name)

    def __call__(self, rows: Any) -> Any:
        """Make a batch, and count its target tokens."""
        batch = self.collator(rows)
        self.counts.append((int((batch["labels"] != -100).sum()), batch["labels"].numel()))
        return batch


def turn_of(make: Callable[[str, int], Any], updates: int, seed: int) -> dict[str, float]:
    """Train for `updates` updates; return real target tokens per second and per update, and the share of padding."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, clock = make(folder, seed), Clock()
        trainer.add_callback(clock)
        trainer.data_collator = counting = Counting(trainer.data_collator)
        trainer.train()
    real, padded = (sum(column) for column in zip(*counting.counts[WARM_UP:updates], strict=True))
    seconds = clock.ends[updates - 1] - clock.ends[WARM_UP - 1]
    return {"speed": real / seconds, "an_update": real / (updates - WARM_UP), "padding": 1 - real / padded}


def measure(name: str, precision: str, updates: int, rounds: int, tokenizer: Any, corpus: Any) -> dict[str, Any]:
    """Measure the three systems in turns."""
    is_half = precision == "bfloat16"
    ids = {each: getattr(tokenizer, each) for each in IDS} | {"decoder_start_token_id": tokenizer.eos_token_id}
    fields = size(*SIZES[name]) | ids | {"vocab_size": len(tokenizer)}

    def vanilla(recipe: Any, tokenizer: Any, args: Any) -> Any:
        set_seed(args.seed)
        config, attention = VanillaTransformerConfig(**fields), args.attn_implementation
        return VanillaTransformerForConditionalGeneration._from_config(config, attn_implementation=attention)

    def ours(folder: str, seed: int) -> Any:
        changed = {
            "training.output_dir": folder, "training.seed": seed, "training.max_steps": updates,
            "training.bf16": is_half, "training.eval_strategy": "no", "training.save_strategy": "steps",
            "training.save_steps": 10 * updates, "training.load_best_model_at_end": False,
            "training.disable_tqdm": True, "training.predict_with_generate": False,
        }  # fmt: skip
        return trainer_of(RECIPE, changed, tokenizer, {"train": sample}, vanilla)

    def marian(folder: str, seed: int, sampling: str = "random") -> Any:
        set_seed(seed)
        model = MarianMTModel(MarianConfig(**fields, forced_eos_token_id=None))
        args = Seq2SeqTrainingArguments(
            folder, seed=seed, max_steps=updates, bf16=is_half, use_cpu=True, label_smoothing_factor=0.1,
            per_device_train_batch_size=sentences, learning_rate=1e-3, warmup_steps=400, max_grad_norm=1.0,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1000,
            train_sampling_strategy=sampling,
        )  # fmt: skip
        return Seq2SeqTrainer(
            model, args, DataCollatorForSeq2Seq(tokenizer, model), sample.select_columns(["input_ids", "labels"])
        )

    sample = corpus
    with tempfile.TemporaryDirectory() as folder:
        sentences = round(len(sample) / len(ours(folder, 1).get_train_dataloader()))
    makes = (ours, marian, functools.partial(marian, sampling="group_by_length"))
    found: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for seed in range(1, rounds + 1):
        sample = corpus.shuffle(seed=seed).select(range(sentences * updates))
        for system, make in zip(SYSTEMS, makes, strict=True):
            found[system].append(turn_of(make, updates, seed))
    rows = {
        system: {key: round(statistics.median(turn[key] for turn in turns), 3) for key in turns[0]}
        for system, turns in found.items()
    }
    for system, turns in found.items():
        ratios = [one["speed"] / other["speed"] for one, other in zip(found["ours"], turns, strict=True)]
        rows[system]["ours_by_it"] = round(statistics.median(ratios), 3)
    print(name, precision, rows, flush=True)
    return {"systems": rows, "sentences": sentences, "updates": updates, "rounds": rounds}


def table(report: dict) -> str:
    """The report as Markdown."""
    rows = [
        {
            "6 + 6 layers": setting,
            "system": system,
            "tokens a second": f"{row['speed']:.0f}",
            "ours is faster by": f"{row['ours_by_it']:.2f}",
            "real target tokens of an update": f"{row['an_update']:.0f}",
            "padding among target tokens": f"{row['padding']:.0%}",
            "turns × updates": f"{measured['rounds']} × {measured['updates'] - WARM_UP}",
        }
        for setting, measured in report["training"].items()
        for system, row in measured["systems"].items()
    ]
    return (
        "# How fast is training as a user runs it, beside Marian under Transformers' own trainer?\n\n"
        "Real target tokens a second on Multi30k, English to German. Ours has token batches, with sentences of about "
        "equal length together. Marian has a fixed number of shuffled sentences, padded to the longest, and its "
        "default attention, and the same once more with `train_sampling_strategy: group_by_length`. The sampler "
        "groups within these few updates alone, so it pads more than on a whole corpus. "
        f"{report['machine']}, {report['threads']} threads, torch {report['torch']}.\n\n"
    ) + markdown(rows)


def main() -> None:
    """Train, compare, write."""
    parser = options(__doc__, rounds=3)
    parser.add_argument("--updates", type=int, default=20, help="of a turn")
    parser.add_argument("--size", choices=SIZES, help="one size alone; what --output holds of others stays")
    parser.add_argument("--precision", choices=PRECISIONS, help="one precision alone, likewise")
    args = parsed(parser)
    disable_progress_bar()
    tokenizer, encoded = encoded_corpus(RECIPE, "train")
    report = begun(args.output, measured_on(), training={})
    for name in [args.size] if args.size else SIZES:
        for precision in [args.precision] if args.precision else PRECISIONS:
            row = measure(name, precision, args.updates, args.rounds, tokenizer, encoded["train"])
            report["training"][f"{name}, {precision}"] = row
    print(table(report))
    if args.output:
        write_report(args.output, report, table)


if __name__ == "__main__":
    run_script(main)
