"""Time of generation: our vanilla model beside Hugging Face's Marian of the same size, and MAT's wide attention.

    python benchmarks/generation_speed.py
    python benchmarks/generation_speed.py --threads 1 --rounds 9 --output benchmarks/results/generation_speed.json

Every system generates 40 tokens (the end token is forbidden) from sources of 24 tokens through `model.generate`,
greedily and with 5 beams, for 1 and for 32 sentences. The systems take turns in one process; what counts is the median
over the rounds of the ratio between a system and its yardstick in the same round.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from training_speed import SIZE
from transformers import MarianConfig, MarianMTModel, PreTrainedModel, set_seed

from hf_deepwide import MATConfig, MATForConditionalGeneration
from hf_deepwide import VanillaTransformerConfig as VanillaConfig
from hf_deepwide import VanillaTransformerForConditionalGeneration as Vanilla

NEW_TOKENS = 40
SYSTEMS = {  # name: (class, config, yardstick)
    "marian": (MarianMTModel, MarianConfig(**SIZE, forced_eos_token_id=None), "marian"),
    "vanilla": (Vanilla, VanillaConfig(**SIZE), "marian"),
    "mat N=3": (MATForConditionalGeneration, MATConfig(**SIZE, attention_branches=3), "vanilla"),
}


def seconds_to_generate(model: PreTrainedModel, source: torch.Tensor, beams: int) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    model.generate(
        input_ids=source,
        attention_mask=torch.ones_like(source),
        num_beams=beams,
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
    )
    if source.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Build the systems, take turns, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    parser.add_argument("--rounds", type=int, default=9, help="measured calls of each system and setting")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {name: cls._from_config(config).to(device).eval() for name, (cls, config, _) in SYSTEMS.items()}

    report = {}
    for sentences in (1, 32):
        source = torch.randint(4, SIZE["vocab_size"], (sentences, 24), device=device)
        for beams in (1, 5):
            seconds: dict[str, list[float]] = {name: [] for name in models}
            for turn in range(args.rounds + 2):
                for name, model in models.items():
                    taken = seconds_to_generate(model, source, beams)
                    if turn >= 2:
                        seconds[name].append(taken)
            setting = f"{sentences} sentence{'s' * (sentences > 1)}, {beams} beam{'s' * (beams > 1)}"
            report[setting] = {}
            for name, (_, _, yardstick) in SYSTEMS.items():
                pairs = zip(seconds[yardstick], seconds[name], strict=True)
                ratio = statistics.median(theirs / own for theirs, own in pairs)
                rate = sentences * NEW_TOKENS / statistics.median(seconds[name])
                report[setting][name] = {
                    "tokens_per_second": round(rate),
                    "yardstick": yardstick,
                    "speed_by_yardstick": round(ratio, 3),
                }
                print(f"{setting:<22} {name:<8} {rate:8.0f} tokens/s   {ratio:5.2f} x {yardstick}")
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {args.threads} threads"
    if args.output:
        result = {"machine": machine, "torch": torch.__version__, "rounds": args.rounds, "settings": report}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
