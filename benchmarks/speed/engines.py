"""Time every way to decode with one model: `generate`, `torch.compile`, CTranslate2, ONNX.

    python benchmarks/speed/engines.py --output benchmarks/results/decoding_engines_amd.json
    python benchmarks/speed/engines.py --threads 1 --sentences 32 --beams 5 --output decoding_engines.json
    python benchmarks/speed/engines.py --compile --sentences 1 --beams 1

Models have random weights and 6 + 6 layers of width 256. The end of a sentence is forbidden, so that all ways decode
40 tokens. The ways take turns. What counts is Marian's time divided by the time of a way in the same round, as the
median over the rounds. Numbers that `--output` already holds are kept, so that a measurement can be made in pieces.

`--compile` measures one more way: the decoder as one graph, by `torch.compile`, with a static cache. ONNX graphs
decode greedily, as in the README of an exported folder, so they are missing in the columns of beam search.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import onnxruntime
import torch
from exported import OURS, SETTINGS, SIZE, VOCABULARY, step_of, tokenizer_of
from harness import against, options, parsed, take_turns
from reports import begun, markdown_table, measured_on, write_report
from tasks import NEW_TOKENS, SOURCE, Decoding
from transformers import MarianConfig, MarianMTModel, PreTrainedModel, set_seed

import hf_deepwide
from hf_deepwide import MATConfig, VanillaTransformerConfig
from hf_deepwide.errors import run_script
from hf_deepwide.exporting.ctranslate2_spec import vocabulary
from hf_deepwide.exporting.onnx_folder import DECODER, ENCODER

YARDSTICK = "Marian, `generate`"


def vanilla(**options: Any) -> PreTrainedModel:
    """Our vanilla model, with the same weights at each call."""
    set_seed(0)
    model = hf_deepwide.VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**OURS))
    return model.eval().to(**options) if options else model.eval()


def marian() -> PreTrainedModel:
    """Marian of the same size."""
    special = {"pad_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    return MarianMTModel(MarianConfig(**SIZE, **special)).eval()


def ways(folder: Path, threads: int, sentences: int, beams: int) -> dict[str, Callable[[], object]]:
    """Every way to decode, as a function that decodes the same sources each time."""
    task = Decoding(sentences, beams)
    mat = hf_deepwide.MATForConditionalGeneration(MATConfig(**OURS, attention_branches=3)).eval()
    steps = {
        YARDSTICK: task.step(marian(), "cpu"),
        "vanilla, `generate`": task.step(vanilla(), "cpu"),
        "vanilla, `generate`, bfloat16": task.step(vanilla(dtype=torch.bfloat16), "cpu"),
        "MAT of 3 branches, `generate`": task.step(mat, "cpu"),
    }
    for quantization in ("float32", "int8"):
        place = folder / quantization
        if not place.exists():
            hf_deepwide.export_ctranslate2(vanilla(), place, quantization=quantization, tokenizer=tokenizer_of(1))
        words = vocabulary(tokenizer_of(1), VOCABULARY)
        steps[f"vanilla, CTranslate2, {quantization}"] = step_of(place, words, sentences, beams, threads)
    if beams == 1:
        place = folder / "onnx"
        if not place.exists():
            hf_deepwide.export_onnx(vanilla(), place, tokenizer=tokenizer_of(1))
        steps["vanilla, ONNX"] = by_graphs(place, sentences, threads)
    return steps


def by_graphs(place: Path, sentences: int, threads: int) -> Callable[[], object]:
    """A function that decodes the same sources each time, greedily, with the ONNX graphs in a folder."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    encoder, decoder = (onnxruntime.InferenceSession(place / name, options) for name in (ENCODER, DECODER))
    names = [node.name for node in decoder.get_inputs()]
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(4, VOCABULARY - 1, (sentences, SOURCE), generator=generator).numpy()
    mask = np.ones_like(source)

    def decode() -> object:
        cross = encoder.run(None, {"input_ids": source, "attention_mask": mask})
        past, token = [tensor[:, :, :0] for tensor in cross], np.full((sentences, 1), OURS["decoder_start_token_id"])
        for _ in range(NEW_TOKENS):
            inputs = [token, mask, *past, *cross]
            logits, *past = decoder.run(None, dict(zip(names, inputs, strict=True)))
            logits[:, OURS["eos_token_id"]] = -np.inf
            token = logits.argmax(-1)[:, None]
        return token

    return decode


def compiled(sentences: int, beams: int) -> tuple[dict[str, Callable[[], object]], float]:
    """Return Marian, vanilla, and vanilla as a compiled graph with a static cache, and the seconds of compiling."""
    task, model = Decoding(sentences, beams), vanilla()
    model.generation_config.cache_implementation = "static"
    model.forward = torch.compile(model.forward)
    graph = task.step(model, "cpu")
    begin = time.perf_counter()
    graph()
    seconds = time.perf_counter() - begin
    steps = {YARDSTICK: task.step(marian(), "cpu"), "vanilla, `generate`": task.step(vanilla(), "cpu")}
    return steps | {"vanilla, torch.compile, static cache": graph}, seconds


def table(report: dict) -> str:
    """The report as Markdown."""
    columns = report["speed"].values()
    rows = (
        (name, *(f"{column[name]:.2f}" if name in column else "" for column in columns))
        for name in dict.fromkeys(name for column in columns for name in column)
    )
    text = (
        "# How fast is one model, by the way in which it decodes?\n\n"
        f"Marian's time by a way's, for equal work: more is faster. Medians of interleaved rounds. "
        f"Columns: threads, sentences × beams. {report['machine']}, torch {report['torch']}, "
        f"CTranslate2 {report['ctranslate2']}.\n\n{markdown_table(['way', *report['speed']], rows)}"
    )
    loads = ", ".join(
        f"{column}: {report['rounds'][column]} rounds, load {load:.0f}" for column, load in report["load"].items()
    )
    text += f"\nThe load counts programs that want one of the {report['cores']} cores. {loads}.\n"
    if report["compile_seconds"]:
        seconds = ", ".join(f"{column}: {value:.0f} s" for column, value in report["compile_seconds"].items())
        text += f"\nSeconds until the compiled graph had decoded for the first time: {seconds}.\n"
    return text


def main() -> None:
    """Measure, print, write."""
    parser = options(__doc__, rounds=5)
    parser.add_argument("--sentences", type=int, help="of a batch; all settings without it")
    parser.add_argument("--beams", type=int, default=1, help="of the search, with --sentences")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile, too slow to be one of the ways")
    args = parsed(parser)
    about = {**measured_on(), "cores": os.cpu_count(), "ctranslate2": ctranslate2.__version__}
    del about["threads"]  # the title of each column gives its threads
    report = begun(args.output, about, speed={}, compile_seconds={}, load={}, rounds={})
    with tempfile.TemporaryDirectory() as folder:
        for sentences, beams in ((args.sentences, args.beams),) if args.sentences else SETTINGS:
            column = f"{args.threads} thread{'s' * (args.threads > 1)}, {sentences} × {beams}"
            if args.compile:
                steps, report["compile_seconds"][column] = compiled(sentences, beams)
            else:
                steps = ways(Path(folder), args.threads, sentences, beams)
            measured = against(take_turns(steps, args.rounds, warm_up=1), YARDSTICK)
            found = {name: round(1 / each.ratio, 3) for name, each in measured.items()}
            if args.compile and column in report["speed"]:  # add the graph; the other ways keep their numbers
                report["speed"][column] = found | report["speed"][column]
            else:
                report["speed"][column], report["rounds"][column] = found, args.rounds
                report["load"][column] = round(os.getloadavg()[0], 1)
            print(column, {name: (round(each.seconds, 3), found[name]) for name, each in measured.items()}, flush=True)
    if args.output:
        write_report(args.output, report, table)


if __name__ == "__main__":
    run_script(main)
