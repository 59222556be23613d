"""Time exported models beside a Marian that was exported by CTranslate2's own converter.

    python benchmarks/speed/exported.py
    python benchmarks/speed/exported.py --threads 1 --rounds 9 --output benchmarks/results/speed
    python benchmarks/speed/exported.py --model runs/mine --source test.de --reference test.en   # BLEU

Models have random weights and 6 + 6 layers of width 256. Systems take turns. What counts is a system's time divided by
the time of Marian in float32 in the same round, as the median over the rounds. The end of a sentence is forbidden, so
that all systems decode 40 tokens. Vanilla is Marian in our classes: their engines differ only in the converter. A MAT
with three branches is compared with two vanilla models. One has the same width and a third of the heads. The other has
as many heads and is three times as wide.

With `--model` a trained checkpoint translates a text by `generate` in float32 and in bfloat16, and by its export in
float32 and in int8.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from harness import against, options, parsed, take_turns
from reports import markdown_table, measured_on, write_report
from sacrebleu.metrics import BLEU
from tasks import NEW_TOKENS, SOURCE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

import hf_deepwide
from hf_deepwide import MATConfig, VanillaTransformerConfig
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.exporting.ctranslate2_spec import vocabulary

VOCABULARY, POSITIONS = 10_000, 256
SIZE = {
    "d_model": 256, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS, "activation_function": "relu", "scale_embedding": True, "bos_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip
OURS = SIZE | {"pad_token_id": 1, "decoder_start_token_id": 2, "position_embedding_type": "marian"}
HEADS_OF_MAT = {"d_model": 768, "encoder_attention_heads": 12, "decoder_attention_heads": 12}
LAST = VOCABULARY - 1  # Marian's padding: the converter assumes that it is the last entry
SETTINGS = ((1, 1), (1, 5), (32, 1), (32, 5))  # sentences, beams
YARDSTICK = "Marian, float32"


def tokenizer_of(pad: int) -> PreTrainedTokenizerFast:
    """A tokenizer with as many words as the models have embeddings; `pad` is the id of the padding."""
    special = {0: "<s>", pad: "<pad>", 2: "</s>", 3: "<unk>"}
    words = {special.get(i, f"word{i}"): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def export_systems(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Export each system in float32 and int8; return the folder of each engine, and its vocabulary."""
    set_seed(0)
    marian = MarianMTModel(MarianConfig(**SIZE, pad_token_id=LAST, decoder_start_token_id=LAST))
    marian.save_pretrained(folder / "marian")
    tokenizer_of(LAST).save_pretrained(folder / "marian")
    converter = ctranslate2.converters.TransformersConverter(str(folder / "marian"))
    ours = {
        "vanilla": hf_deepwide.VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**OURS)),
        "MAT, 3 branches": hf_deepwide.MATForConditionalGeneration(MATConfig(**OURS, attention_branches=3)),
        "vanilla of MAT's heads": hf_deepwide.VanillaTransformerForConditionalGeneration(
            VanillaTransformerConfig(**OURS | HEADS_OF_MAT)
        ),
    }
    systems = {}
    for quantization in ("float32", "int8"):
        place = folder / f"marian-{quantization}"
        converter.convert(str(place), quantization=quantization)
        systems[f"Marian, {quantization}"] = place, vocabulary(tokenizer_of(LAST), LAST)
        for name, model in ours.items():
            place = folder / f"{name}-{quantization}"
            hf_deepwide.export_ctranslate2(model, place, quantization=quantization, tokenizer=tokenizer_of(1))
            systems[f"{name}, {quantization}"] = place, vocabulary(tokenizer_of(1), VOCABULARY)
    return systems


def step_of(place: Path, words: list[str], sentences: int, beams: int, threads: int) -> Callable[[], object]:
    """A function that translates the same sources each time, with the engine in the folder `place`."""
    engine = ctranslate2.Translator(str(place), intra_threads=threads)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY - 1, (sentences, SOURCE), generator=generator)
    sources = [[*(words[i] for i in row), "</s>"] for row in ids.tolist()]
    lengths = {"min_decoding_length": NEW_TOKENS, "max_decoding_length": NEW_TOKENS}
    return lambda: engine.translate_batch(sources, beam_size=beams, **lengths)


def compare_speed(threads: int, rounds: int, only: list[str] | None = None) -> dict:
    """Measure each system's time divided by Marian's, in every setting; `only` names the systems to measure."""
    report: dict[str, Any] = {
        **measured_on(),
        "rounds": rounds,
        "ctranslate2": ctranslate2.__version__,
        "time": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        systems = export_systems(Path(folder))
        systems = {name: place for name, place in systems.items() if name in (YARDSTICK, *(only or systems))}
        for sentences, beams in SETTINGS:
            steps = {name: step_of(*place, sentences, beams, threads) for name, place in systems.items()}
            measured = against(take_turns(steps, rounds), YARDSTICK)
            report["time"][f"{sentences} × {beams}"] = {name: round(each.ratio, 3) for name, each in measured.items()}
            print(sentences, beams, report["time"][f"{sentences} × {beams}"], flush=True)
    return report


def speed_table(report: dict) -> str:
    """The report as Markdown."""
    times = report["time"].values()
    rows = ((name, *(f"{column[name]:.2f}" for column in times)) for name in next(iter(times)))
    return (
        "# Does an exported model run as fast as a Marian that was exported in the same way?\n\n"
        f"Time by that of {YARDSTICK}: medians of {report['rounds']} interleaved rounds. Columns: sentences × beams. "
        f"{report['machine']}, {report['threads']} threads, CTranslate2 {report['ctranslate2']}.\n\n"
    ) + markdown_table(["system", *report["time"]], rows)


def compare_bleu(checkpoint: Path, source: Path, reference: Path, beams: int, threads: int) -> dict:
    """Measure BLEU of `generate` and of the exports on a text, each in two precisions.

    The report also has the share of outputs that equal the output of `generate` in float32.
    """
    texts, references = (list(read_lines(path)) for path in (source, reference))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    full, half = (
        AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    longest = full.config.max_position_embeddings
    ids = [tokenizer(text, truncation=True, max_length=longest)["input_ids"] for text in texts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    limit = min(2 * max(map(len, ids)) + 20, longest - 1)

    def by_generate(model: PreTrainedModel) -> list[str]:
        found = [""] * len(ids)
        for start in range(0, len(order), 32):
            rows = order[start : start + 32]
            batch = tokenizer.pad({"input_ids": [ids[i] for i in rows]}, return_tensors="pt")
            options = {"num_beams": beams, "early_stopping": True if beams > 1 else None, "max_length": limit + 1}
            output = model.generate(**batch, **options)
            for i, text in zip(rows, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True):
                found[i] = text
        return found

    def by_engine(place: str) -> list[str]:
        engine = ctranslate2.Translator(place, intra_threads=threads)
        sources = [tokenizer.convert_ids_to_tokens(row) for row in ids]
        lengths = {"min_decoding_length": 0, "max_decoding_length": limit, "max_input_length": longest}
        results = engine.translate_batch(sources, beam_size=beams, max_batch_size=32, **lengths)
        tokens = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
        return tokenizer.batch_decode(tokens, skip_special_tokens=True)

    report = {}
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, Callable[[], list[str]]] = {
            "generate, float32": lambda: by_generate(full),
            "generate, bfloat16": lambda: by_generate(half),
        }
        for quantization in ("float32", "int8"):
            place = hf_deepwide.export_ctranslate2(checkpoint, Path(folder) / quantization, quantization=quantization)
            systems[f"CTranslate2, {quantization}"] = lambda place=place: by_engine(place)
        first = None
        for name, translate in systems.items():
            found = translate()
            first = found if first is None else first
            same = sum(one == other for one, other in zip(found, first, strict=True))
            bleu = BLEU().corpus_score(found, [references]).score
            report[name] = {"BLEU": round(bleu, 2), "same": same / len(texts)}
            print(name, report[name], flush=True)
    return report


def bleu_table(report: dict) -> str:
    """BLEU as Markdown."""
    first, *_ = report
    rows = ((name, f"{row['BLEU']:.2f}", f"{100 * row['same']:.1f} %") for name, row in report.items())
    return markdown_table(["decoded by", "sacreBLEU", f"same translations as {first}"], rows)


def main() -> None:
    """Measure, print, write."""
    parser = options(__doc__, 7, "folder for exported.json and exported.md, or of exported_bleu")
    parser.add_argument("--model", type=Path, help="a trained checkpoint: compare BLEU on a text")
    parser.add_argument("--source", type=Path, help="the text, a sentence a line")
    parser.add_argument("--reference", type=Path, help="its translation")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="only these rows of the table, and Marian's")
    parser.add_argument("--beams", type=int, default=5, help="of --model's search")
    args = parsed(parser)
    if args.model is None:
        report = compare_speed(args.threads, args.rounds, args.systems)
        print(speed_table(report))
    elif args.source is None or args.reference is None:
        raise UserError("--model needs --source and --reference, two files of as many lines")
    else:
        report = compare_bleu(args.model, args.source, args.reference, args.beams, args.threads)
    if args.output:
        name = "exported" if args.model is None else "exported_bleu"
        table = speed_table if args.model is None else bleu_table
        write_report(args.output / name, report, table)


if __name__ == "__main__":
    run_script(main)
