"""Compare a trained model with the same weights in a class of Transformers: tokens of the translations, and time.

    python benchmarks/speed/translated.py --model runs/mine --source test.en
    python benchmarks/speed/translated.py --model runs/mine --source test.en --as m2m_100 --threads 1 \\
        --output benchmarks/results/translated.json

Both systems translate the same batches by `generate` in float32. A batch has sentences of about equal length. The
systems take turns at each batch. What counts is the ratio of the times for the whole text, as the median over rounds.
In a real text, translations end at different lengths. Our decoder leaves out sentences that have ended, and the class
of Transformers does not.

This command trains the model for the comparison with Marian, in half an hour on one core:

    hf-deepwide train multi30k_en_de_vanilla --training.output_dir runs/mine --model.encoder_layers 6 \\
        --model.decoder_layers 6 --model.position_embedding_type marian --training.max_tokens 2048 \\
        --training.num_train_epochs 7 --training.learning_rate 1e-3 --training.warmup_steps 500 \\
        --training.predict_with_generate false
"""

import statistics
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from harness import options, parsed
from reports import markdown_table, measured_on, write_report
from transformers import AutoModelForSeq2SeqLM

import hf_deepwide
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.errors import run_script
from hf_deepwide.exporting.stock import STOCK, as_stock
from hf_deepwide.loading import load_model, load_tokenizer

SETTINGS = ((1, 1), (1, 5), (32, 1), (32, 5))  # sentences, beams
SOME = 64  # at least so many sentences, if the text has them, are translated one by one


def batches_of(ids: list[list[int]], sentences: int) -> list[list[int]]:
    """Batches of sentence indices, with about equal lengths in a batch. Batches of one sentence cover only a part."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    if sentences == 1:
        order = order[:: max(1, len(order) // SOME)]
    return [order[start : start + sentences] for start in range(0, len(order), sentences)]


def measure(
    models: dict[str, Any], tokenizer: Any, ids: list[list[int]], sentences: int, beams: int, rounds: int
) -> dict:
    """Translate with each model; return the seconds for the text, their ratio, and the share of equal translations."""
    seconds = {name: [0.0] * rounds for name in models}
    same, count, worked = 0, 0, []
    batches = batches_of(ids, sentences)
    turns = [(turn, rows) for turn in range(rounds) for rows in batches]
    for turn, rows in [(None, batches[len(batches) // 2]), *turns]:  # the first batch is warm-up
        batch = tokenizer.pad({"input_ids": [ids[i] for i in rows]}, return_tensors="pt").to("cpu")
        options: dict[str, Any] = {"num_beams": beams, "do_sample": False, "max_length": 101}
        options |= {"early_stopping": True} if beams > 1 else {}
        found = []
        for name, model in models.items():
            begin = time.perf_counter()
            found.append(
                model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **options)
            )
            if turn is not None:
                seconds[name][turn] += time.perf_counter() - begin
        if turn is not None:
            ours, theirs = ([row[row != tokenizer.pad_token_id].tolist() for row in tokens] for tokens in found)
            same += sum(one == other for one, other in zip(ours, theirs, strict=True))
            count += len(rows)
            worked.append(statistics.mean(map(len, ours)) / max(map(len, ours)))
    ratios = [second / first for first, second in zip(*seconds.values(), strict=True)]
    return {
        "sentences": count // rounds,
        "faster": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "seconds": {name: round(statistics.median(values), 2) for name, values in seconds.items()},
        "same_tokens": round(same / count, 4),
        "mean_length_by_longest": round(statistics.mean(worked), 3),
    }


def table(report: dict) -> str:
    """The report as Markdown."""
    head = ["sentences × beams", "times as fast", "the same tokens", "mean length by the longest of a batch"]
    rows = (
        (setting, f"{row['faster']:.2f}", f"{row['same_tokens']:.1%}", f"{row['mean_length_by_longest']:.2f}")
        for setting, row in report["settings"].items()
    )
    return (
        "# How fast does a trained model translate a text, beside the same weights in Transformers' own class?\n\n"
        f"Time of {report['class']} by ours, by `generate` in float32, sentences of about equal length together. The "
        f"model: {report['model']}. Medians of {report['rounds']} rounds. {report['machine']}, "
        f"{report['threads']} threads, torch {report['torch']}.\n\n"
    ) + markdown_table(head, rows)


def main() -> None:
    """Translate, compare, write."""
    parser = options(__doc__, rounds=5)
    parser.add_argument("--model", type=Path, required=True, help="a trained checkpoint")
    parser.add_argument("--source", type=Path, required=True, help="the text, a sentence a line; .gz is read, too")
    parser.add_argument("--as", dest="as_", default="m2m_100", help=f"Transformers' class: {', '.join(STOCK)}")
    parser.add_argument("--limit", type=int, help="lines of the text")
    args = parsed(parser)
    tokenizer = load_tokenizer(args.model)
    ids = [tokenizer(line)["input_ids"] for line in islice(read_lines(args.source), args.limit)]
    ours = load_model(AutoModelForSeq2SeqLM, args.model, dtype=torch.float32).eval()
    models = {"ours": ours, args.as_: as_stock(ours, args.as_)}
    config = ours.config
    layers = f"{config.encoder_layers} + {config.decoder_layers} layers"
    report = {
        **measured_on(),
        "model": f"a {config.model_type} of width {config.d_model} with {layers}",
        "class": args.as_,
        "rounds": args.rounds,
        "version": hf_deepwide.__version__,
        "settings": {},
    }
    for sentences, beams in SETTINGS:
        report["settings"][f"{sentences} × {beams}"] = row = measure(
            models, tokenizer, ids, sentences, beams, args.rounds
        )
        print(sentences, beams, row, flush=True)
    if args.output:
        write_report(args.output, report, table)


if __name__ == "__main__":
    run_script(main)
