"""Measure the time from the command to the first update of a training, at the first start and at the second start.

    python benchmarks/first_step.py corpus.de.gz corpus.en.gz                                     # a table
    python benchmarks/first_step.py corpus.de.gz corpus.en.gz --output benchmarks/results/first_step

Each sentence pair is made from two random pairs of a small corpus, and a number. The first start reads the text,
trains a tokenizer and encodes. The second start is another run that names the tokenizer of the first run, so that the
encoded pairs are in the cache. The report has seconds of the clock and seconds of the processor. Other work on the
machine changes the seconds of the processor less.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from reports import markdown_table, measured_on, write_report

from hf_deepwide.data.text_files import read_lines
from hf_deepwide.runs.yaml_values import to_yaml

HELD_OUT = 100  # validation pairs: the first pairs of the training set
STARTS = ("first", "second")
MODEL = {
    "family": "vanilla_transformer", "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
}  # fmt: skip


def write_corpus(folder: Path, sides: tuple[list[str], list[str]], pairs: int) -> None:
    """Write the training pairs to `train.a` and `train.b`, and validation pairs to `held_out.a` and `held_out.b`."""
    draw = random.Random(1)
    drawn = [
        (draw.randrange(len(sides[0])), draw.randrange(len(sides[0])), draw.randrange(1000)) for _ in range(pairs)
    ]
    for name, lines in zip("ab", sides, strict=True):
        text = [f"{lines[one]} {lines[two]} {number}\n" for one, two, number in drawn]
        (folder / f"train.{name}").write_text("".join(text), encoding="utf-8")
        (folder / f"held_out.{name}").write_text("".join(text[:HELD_OUT]), encoding="utf-8")


def start(folder: Path, name: str, tokenizer: dict[str, object]) -> dict[str, float]:
    """Train for one update; return the seconds from the command to the log line of this update."""
    places = {"train": "train", "validation": "held_out"}
    training = {
        "output_dir": str(folder / name), "max_steps": 1, "warmup_steps": 0, "logging_steps": 1, "eval_strategy": "no",
        "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": False,
    }  # fmt: skip
    recipe = {
        "model": MODEL, "data": {"root": str(folder), "source_lang": "a", "target_lang": "b", **places},
        "tokenizer": tokenizer, "training": training,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(to_yaml(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "hf_deepwide.cli", "train", str(path)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache")}
    begin, log, found = time.perf_counter(), [], {}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            log.append(line)
            if line.startswith("step 1 of 1"):
                spent = psutil.Process(process.pid).cpu_times()
                found = {"seconds": time.perf_counter() - begin, "processor_seconds": spent.user + spent.system}
    if process.returncode or not found:
        raise SystemExit(f"{name}: the training failed:\n{''.join(log[-20:])}")
    return found


def table(report: dict) -> str:
    """The report as Markdown."""
    settings, facts = report["settings"], report if "cores" in report else report["machine"]  # as in older reports
    rows = ((name, *(f"{seconds:.0f}" for seconds in row.values())) for name, row in report["starts"].items())
    return (
        f"{settings['pairs']:,} pairs of {settings['words']:.0f} source words, a vocabulary of "
        f"{settings['vocabulary']:,}; {facts['processor']}, {facts['cores']} cores.\n\n"
    ) + markdown_table(["start", "seconds to the first update", "of the processor"], rows)


def main() -> None:
    """Make the corpus, start two trainings, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a text file, one sentence a line")
    parser.add_argument("target", type=Path, help="its translation, line by line")
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--output", type=Path, help="write the results here, as .json and .md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, (list(read_lines(args.source)), list(read_lines(args.target))), args.pairs)
        words = len((folder / "train.a").read_text(encoding="utf-8").split()) / args.pairs
        starts = {}
        for number, tokenizer in zip(
            STARTS, ({"vocab_size": args.vocabulary}, {"path": name + "/first"}), strict=True
        ):
            starts[number] = start(folder, number, tokenizer)
            print(number, json.dumps(starts[number]), flush=True)
    report = {
        **measured_on(),
        "settings": {"pairs": args.pairs, "words": words, "vocabulary": args.vocabulary},
        "starts": starts,
    }
    print(table(report))
    if args.output:
        write_report(args.output, report, table)


if __name__ == "__main__":
    main()
