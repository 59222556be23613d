"""Measure the memory that a streamed corpus takes: does it depend on the corpus's size?

    python benchmarks/streaming.py --mib 40 240 --buffer 5000 --output benchmarks/results/streaming   # .json and .md

Parallel text of random words is written to two files. It is read as in training (`data.streaming: true`): reader,
filters, tokenizer, shuffling buffer, batches, collator. There is no model. A new process reads each corpus, and
measures its resident memory forty times. "Held" is the largest of these values, minus the memory before the first
pair, which libraries and the tokenizer take. "Growth" is the rise of a straight line through the values of the second
half, divided by their mean. Then a new stream starts in the middle of the corpus, as in a resumed run.
"""

import argparse
import random
import tempfile
import time
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from long_run import growth, resident_mib
from reports import markdown, measured_on, write_report
from torch.utils.data import DataLoader

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.batches import TranslationCollator
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.streaming import EndlessStream, StreamBatches
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.training.memory import keep_memory
from hf_deepwide.training.stream_position import collate_stream

LANGUAGES = ("en", "de")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_corpus(folder: Path, mib: int, seed: int) -> int:
    """Write `train.en` and `train.de`, together at least `mib` MiB; return the number of pairs."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 10))) for _ in range(20_000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    pairs = written = 0
    with (
        (folder / "train.en").open("w", encoding="utf-8") as source,
        (folder / "train.de").open("w", encoding="utf-8") as target,
    ):
        while written < mib * 2**20:
            drawn = iter(draw.choices(words, weights, k=100_000))
            while sides := [" ".join(islice(drawn, draw.randint(5, 40))) for _ in LANGUAGES]:
                if not all(sides):
                    break
                pairs += 1
                for file, text in zip((source, target), sides, strict=True):
                    written += file.write(f"{text}\n")
    return pairs


def batches_of(args: DataArguments, tokenizer: Any, max_tokens: int) -> tuple[EndlessStream, DataLoader]:
    """The stream of a training run, and the loader around it."""
    rows = encode(load_parallel(args, "train"), tokenizer, args, filter=True)
    stream = EndlessStream(StreamBatches(rows, max_tokens, seed=1, buffer_size=args.shuffle_buffer))
    return stream, DataLoader(stream, batch_size=None, collate_fn=collate_stream(TranslationCollator(tokenizer, 2)))


def read(folder: Path, pairs: int, max_tokens: int, buffer: int) -> dict[str, Any]:
    """Read the corpus once; return memory, speed, and the seconds that a resumed stream needs to reach the middle."""
    keep_memory()
    every = pairs // 40
    args = DataArguments(root=str(folder), train="train", streaming=True, shuffle_buffer=buffer)
    with (folder / "train.en").open(encoding="utf-8") as lines:
        tokenizer = train_tokenizer(islice(lines, 20_000), TokenizerArguments(vocab_size=8000))
    stream, loader = batches_of(args, tokenizer, max_tokens)
    before, start = resident_mib(), time.perf_counter()
    resident, seen, middle, expected = {}, 0, None, None
    for batch in loader:
        if middle is not None and expected is None and stream.position != middle:
            expected, middle = batch["input_ids"], stream.position  # the first batch of the next buffer
        if stream.position["epoch"] > 0:
            break
        seen += len(batch["input_ids"])
        if seen // every > len(resident):
            resident[seen] = round(resident_mib(), 1)
        if middle is None and seen > pairs // 2:
            middle = stream.position
    seconds = time.perf_counter() - start
    if seen != pairs:
        raise RuntimeError(f"{seen} of {pairs} pairs came out")
    stream, loader = batches_of(args, tokenizer, max_tokens)
    stream.start, start = {**middle, "given": 0}, time.perf_counter()
    if not next(iter(loader))["input_ids"].equal(expected):
        raise RuntimeError("the stream was taken up in another place")
    return {
        "mib_before": round(before, 1),
        "mib_after_pairs": resident,
        "mib_held": round(max(resident.values()) - before, 1),
        "growth": growth(resident, pairs // 2)["share_of_memory"],
        "pairs_per_second": round(pairs / seconds),
        "seconds_to_the_middle_when_resumed": round(time.perf_counter() - start, 1),
        "seconds": round(seconds, 1),
    }


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows = [
        {
            "corpus": f"{run['corpus_mib']:.0f} MiB",
            "pairs": f"{run['pairs']:,}",
            "buffer, pairs": f"{report['settings']['buffer']:,}",
            "memory held": f"{run['mib_held']:.0f} MiB",
            "growth over the second half": f"{run['growth']:+.1%}",
            "pairs/s": f"{run['pairs_per_second']:,}",
            "to its middle when resumed": f"{run['seconds_to_the_middle_when_resumed']:.0f} s",
        }
        for run in report["runs"]
    ]
    return markdown(rows)


def main() -> None:
    """Measure corpora of several sizes, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[100, 400], help="sizes of the corpora")
    parser.add_argument("--buffer", type=int, default=20_000, help="data.shuffle_buffer")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--output", type=Path, help="write the results here, as .json and .md")
    args = parser.parse_args()
    runs = []
    for mib in args.mib:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pairs = write_corpus(folder, mib, seed=1)
            size = sum((folder / f"train.{lang}").stat().st_size for lang in LANGUAGES) / 2**20
            with get_context("spawn").Pool(1) as process:
                measured = process.apply(read, (folder, pairs, args.max_tokens, args.buffer))
        runs.append({"corpus_mib": round(size, 1), "pairs": pairs, **measured})
        print(table({"runs": runs[-1:], "settings": vars(args)}).splitlines()[-1], flush=True)
    report = {
        **measured_on(),
        "settings": {key: value for key, value in vars(args).items() if key != "output"},
        "runs": runs,
    }
    if args.output:
        write_report(args.output, report, table)


if __name__ == "__main__":
    main()
