"""Paths against depth: the Multi-Path paper's Figure 8 done again, and our sub-layers beside a plain loop over paths.

    python benchmarks/multipath_speed.py                                  # this machine's default precision
    python benchmarks/multipath_speed.py --threads 1 --output benchmarks/results/multipath_speed.json

Two tables. In the first, models of the same parameters take training steps (forward, backward, clipping, AdamW): 6
layers of 4 paths against 24 of one, 6 of 6 against 36; paths in the paper's variants, depth as the vanilla pre-norm
Transformer. In the second, forward and backward of one encoder layer with more features, ours against one that holds
n attentions and n feed-forward networks and loops over them. All sides are held in one process and take turns on the
same batch; what counts is the median over the rounds of the ratio in the same round.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from reports import write_report
from torch import nn
from training_speed import SIZE, training_step
from transformers import set_seed

from hf_deepwide import (
    MultiPathConfig,
    MultiPathForConditionalGeneration,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_deepwide.models.attention import MultiBranchAttention
from hf_deepwide.models.feed_forward import MultiBranchFeedForward
from hf_deepwide.models.modeling_multipath_transformer import MultiPathEncoderLayer
from hf_deepwide.training.memory import keep_memory

VARIANTS = {  # the paper's names
    "multi-path": {"path_norm": False, "learnable_path_weights": False, "more_features": False},
    "+ ours": {"more_features": False},
    "+ more features": {},
}
SHAPES = ((4, 24), (6, 36))  # paths of six layers, and the depth of the same parameters
PATHS = (1, 2, 3, 4, 6, 8)
WARM_UP = 2  # rounds that are not counted: they compile kernels and grow the heap


class LoopedLayer(nn.Module):
    """A multi-path encoder layer as Eq. 4-7 are written: a loop over paths, subsets averaged, features weighed."""

    def __init__(self, config: MultiPathConfig) -> None:
        super().__init__()
        self.paths = config.encoder_paths
        plain = VanillaTransformerConfig(**SIZE, attn_implementation=config._attn_implementation)
        self.attentions = nn.ModuleList(
            [MultiBranchAttention(plain, plain.encoder_attention_heads) for _ in range(self.paths)]
        )
        self.networks = nn.ModuleList(
            [MultiBranchFeedForward(plain, plain.encoder_ffn_dim) for _ in range(self.paths)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(config.d_model) for _ in range(2)])
        self.path_norms = nn.ModuleList([nn.LayerNorm(config.d_model) for _ in range(2 * config.path_features)])
        self.alpha = nn.Parameter(torch.full((2, config.path_features), config.initial_path_weight))
        self.beta = nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, S, D]` to `[B, S, D]`."""
        sublayers = ([lambda y, f=f: f(y)[0] for f in self.attentions], list(self.networks))
        norms = self.path_norms
        for number, paths in enumerate(sublayers):
            normed = self.norms[number](x)
            features = [path(normed) for path in paths]
            if self.paths >= 3:
                features += [
                    sum(f for i, f in enumerate(features) if i != left_out) / (self.paths - 1)
                    for left_out in range(self.paths)
                ]
            own = norms[number * len(features) : (number + 1) * len(features)]
            joined = sum(a * norm(f) for a, norm, f in zip(self.alpha[number], own, features, strict=True))
            x = self.beta[number] * x + self.dropout(joined)
        return x


def take_turns(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of `rounds` turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + WARM_UP):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def against_depth(paths: int, depth: int, batch: dict, precision: torch.dtype, args: argparse.Namespace) -> dict:
    """Seconds of a training step of 6 layers of `paths` paths and of `depth` layers, and speed by the latter."""
    size = SIZE | {"decoder_layers": 6, "encoder_layers": 6, "dropout": 0.1}
    deep = VanillaTransformerConfig(**size | {"encoder_layers": depth}, normalize_before=True)
    configs = {f"{depth}x1": (VanillaTransformerForConditionalGeneration, deep)}
    for name, fields in VARIANTS.items():
        wide = MultiPathConfig(**size, encoder_paths=paths, **fields)
        configs[f"6x{paths} {name}"] = (MultiPathForConditionalGeneration, wide)
    steps, parameters = {}, {}
    for name, (model_class, config) in configs.items():
        model = model_class._from_config(config, attn_implementation=args.attention).to(args.device).train()
        parameters[name] = model.num_parameters()
        steps[name] = training_step(model, batch, precision)
    seconds = take_turns(steps, args.rounds)
    yardstick = seconds[f"{depth}x1"]
    rows = {}
    for name, own in seconds.items():
        speed = statistics.median(deep / wide for deep, wide in zip(yardstick, own, strict=True))
        median = statistics.median(own)
        rows[name] = {
            "parameters": parameters[name],
            "median_step_seconds": round(median, 4),
            f"speed_by_{depth}x1": round(speed, 3),
        }
        print(
            f"{name:<22} {parameters[name] / 1e6:6.2f} M {median:8.3f} s/step   {speed:5.2f} x {depth}x1", flush=True
        )
    return rows


def against_loop(paths: int, x: torch.Tensor, precision: torch.dtype, args: argparse.Namespace) -> dict:
    """Seconds of forward and backward of one encoder layer, ours and looped, and speed by the latter."""
    config = MultiPathConfig(**SIZE, encoder_paths=paths, attn_implementation=args.attention)

    def step_of(layer: nn.Module) -> Callable[[], None]:
        layer.to(args.device).train()

        def step() -> None:
            with torch.autocast(args.device, dtype=precision, enabled=precision != torch.float32):
                y = layer(x)
            y.backward(x)
            layer.zero_grad()
            if args.device == "cuda":
                torch.cuda.synchronize()

        return step

    seconds = take_turns(
        {"ours": step_of(MultiPathEncoderLayer(config)), "loop": step_of(LoopedLayer(config))}, args.rounds
    )
    speed = statistics.median(loop / own for loop, own in zip(seconds["loop"], seconds["ours"], strict=True))
    medians = {f"{name}_seconds": round(statistics.median(own), 4) for name, own in seconds.items()}
    print(f"n = {paths}: {medians['ours_seconds']:.4f} s, {speed:5.2f} x the loop", flush=True)
    return medians | {"speed_by_loop": round(speed, 3)}


def table(report: dict) -> str:
    """The report as Markdown."""
    settings = report["settings"]
    lines = [
        f"{report['machine']}, torch {report['torch']}, {settings['precision']}, {settings['attention']} attention, "
        f"{settings['sentences']} sentences of 32 tokens, medians of {settings['rounds']} interleaved rounds.",
        "",
        "| training step | parameters | seconds | speed by the deep model's |",
        "|---|---|---|---|",
    ]
    for rows in report["training_step"].values():
        for name, row in rows.items():
            speed = next(value for key, value in row.items() if key.startswith("speed_by"))
            lines.append(f"| {name} | {row['parameters'] / 1e6:.2f} M | {row['median_step_seconds']} | {speed:.2f} |")
    lines += ["", "| encoder layer of n paths | seconds | of the loop | speed by the loop's |", "|---|---|---|---|"]
    for paths, row in report["encoder_layer_by_paths"].items():
        lines.append(f"| {paths} | {row['ours_seconds']} | {row['loop_seconds']} | {row['speed_by_loop']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    parser.add_argument("--rounds", type=int, default=9, help="measured turns of each side")
    parser.add_argument("--sentences", type=int, default=64, help="of 32 tokens each, in the batch")
    parser.add_argument("--precision", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="eager")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON, and beside it as Markdown")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    set_seed(0)
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = getattr(torch, args.precision)
    tokens = torch.randint(4, SIZE["vocab_size"], (2, args.sentences, 32), device=args.device)
    batch = {"input_ids": tokens[0], "attention_mask": torch.ones_like(tokens[0]), "labels": tokens[1]}
    x = torch.randn(args.sentences, 32, SIZE["d_model"], device=args.device)

    depth = {f"6x{n} against {deep}x1": against_depth(n, deep, batch, precision, args) for n, deep in SHAPES}
    loop = {str(n): against_loop(n, x, precision, args) for n in PATHS}
    machine = (
        torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {args.threads} threads"
    )
    if args.output:
        settings = {key: value for key, value in vars(args).items() if key != "output"}
        report = {"machine": machine, "torch": torch.__version__, "settings": settings}
        report |= {"training_step": depth, "encoder_layer_by_paths": loop}
        write_report(args.output, report, table)


if __name__ == "__main__":
    main()
