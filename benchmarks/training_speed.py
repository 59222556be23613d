"""Time of a training step: our vanilla model beside Hugging Face's Marian, and MAT with and without dropped branches.

    python benchmarks/training_speed.py                    # this machine's default precision
    python benchmarks/training_speed.py --threads 1 --rounds 15 --output benchmarks/results/training_speed.json

All systems are held in one process and take turns, step by step, on the same batch; what counts is the median over
the rounds of the ratio between a system and its yardstick in the same round. A step is forward, backward, gradient
clipping and AdamW. Memory is kept between steps for all of them alike (`hf_deepwide.training.memory`).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel, set_seed

from hf_deepwide import MATConfig, MATForConditionalGeneration
from hf_deepwide import VanillaTransformerConfig as VanillaConfig
from hf_deepwide import VanillaTransformerForConditionalGeneration as Vanilla
from hf_deepwide.training.memory import keep_memory

SIZE = {
    "vocab_size": 8000,
    "d_model": 256,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
    "dropout": 0.2,
    "activation_function": "relu",
    "scale_embedding": True,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
SMOOTHING = 0.1
SYSTEMS = {  # name: (class, config, yardstick)
    "marian": (MarianMTModel, MarianConfig(**SIZE, forced_eos_token_id=None), "marian"),
    "vanilla": (Vanilla, VanillaConfig(**SIZE), "marian"),
    "mat N=3 rho=0": (
        MATForConditionalGeneration,
        MATConfig(**SIZE, attention_branches=3, drop_branch=0.0),
        "vanilla",
    ),
    "mat N=3 rho=0.2": (
        MATForConditionalGeneration,
        MATConfig(**SIZE, attention_branches=3, drop_branch=0.2),
        "mat N=3 rho=0",
    ),
    "mat N=3 rho=0.3": (
        MATForConditionalGeneration,
        MATConfig(**SIZE, attention_branches=3, drop_branch=0.3),
        "mat N=3 rho=0",
    ),
}


def marian_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What Trainer does for a model that has no label smoothing of its own: full logits, then the loss."""
    labels = batch["labels"]
    start = torch.full_like(labels[:, :1], model.config.decoder_start_token_id)
    inputs = {**batch, "decoder_input_ids": torch.cat([start, labels[:, :-1]], 1), "use_cache": False}
    del inputs["labels"]
    logits = model(**inputs).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=SMOOTHING, reduction="mean"
    )


def our_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What our trainer does."""
    return model(**batch, label_smoothing=SMOOTHING, skip_logits=True).loss


def training_step(model: nn.Module, batch: dict[str, torch.Tensor], precision: torch.dtype) -> Callable[[], None]:
    """A function that takes one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss_of = marian_loss if isinstance(model, MarianMTModel) else our_loss
    device = model.device.type

    def step() -> None:
        with torch.autocast(device, dtype=precision, enabled=precision != torch.float32):
            loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    """Build the systems, take turns, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each system")
    parser.add_argument("--sentences", type=int, default=128, help="of 32 tokens each, in the batch")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="eager")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    set_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randint(4, SIZE["vocab_size"], (2, args.sentences, 32), device=device)
    batch = {"input_ids": tokens[0], "attention_mask": torch.ones_like(tokens[0]), "labels": tokens[1]}

    steps = {}
    for name, (model_class, config, _) in SYSTEMS.items():
        model = model_class._from_config(config, attn_implementation=args.attention).to(device).train()
        steps[name] = training_step(model, batch, getattr(torch, args.precision))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 3:  # the first steps compile kernels and grow the heap
                seconds[name].append(time.perf_counter() - start)

    rows = {}
    for name, (_, _, yardstick) in SYSTEMS.items():
        ratios = [theirs / own for theirs, own in zip(seconds[yardstick], seconds[name], strict=True)]
        median = statistics.median(seconds[name])
        rows[name] = {
            "median_step_seconds": round(median, 4),
            "target_tokens_per_second": round(tokens[1].numel() / median),
            "yardstick": yardstick,
            "speed_by_yardstick": round(statistics.median(ratios), 3),
        }
        print(f"{name:<16} {median:7.3f} s/step   {rows[name]['speed_by_yardstick']:5.2f} x {yardstick}")
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {args.threads} threads"
    if args.output:
        settings = {key: value for key, value in vars(args).items() if key != "output"}
        report = {"machine": machine, "torch": torch.__version__, "settings": settings, "systems": rows}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
