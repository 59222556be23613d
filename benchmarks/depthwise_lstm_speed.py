"""What a depth-wise LSTM costs: training and decoding beside the vanilla Transformer, of equal width and parameters.

    python benchmarks/depthwise_lstm_speed.py
    python benchmarks/depthwise_lstm_speed.py --threads 1 --rounds 5 --sentences 16 \
        --output benchmarks/results/depthwise_lstm_speed.json

Models of the paper's base size (d 512, 6 + 6 layers, pre-norm), with 8,000 tokens. Against them stand the operations
that one target token costs, forward, counted by PyTorch: what the time would be if only matrix products took any. A
training step is forward, backward, clipping and AdamW on 32 tokens a sentence; decoding gives 40 tokens to sources of
24. All systems are held in one process and take turns; what counts is the median over the rounds of the ratio to the
vanilla model in the same round.
"""

import argparse
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from generation_speed import NEW_TOKENS, seconds_to_generate
from multipath_speed import take_turns
from reports import write_report
from torch.utils.flop_counter import FlopCounterMode
from training_speed import SIZE, training_step
from transformers import PreTrainedModel, set_seed

from hf_deepwide import (
    DepthwiseLSTMConfig,
    DepthwiseLSTMForConditionalGeneration,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_deepwide.training.memory import keep_memory

BASE = SIZE | {
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "dropout": 0.1,
}
LSTM = {name: value for name, value in BASE.items() if name != "activation_function"}
YARDSTICK = "vanilla"
SYSTEMS = {
    YARDSTICK: VanillaTransformerConfig(**BASE, normalize_before=True, attention_bias=False),
    "depth-wise LSTM, equal width": DepthwiseLSTMConfig(**LSTM),
    "depth-wise LSTM, equal parameters": DepthwiseLSTMConfig(
        **LSTM | {"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}, share_gates="global"
    ),
    "depth-wise LSTM, hidden state of one layer (Eq. 5)": DepthwiseLSTMConfig(**LSTM, lstm_hidden="single"),
    "depth-wise LSTM, concatenation": DepthwiseLSTMConfig(**LSTM, decoder_merge="concat"),
    "depth-wise LSTM, two in a decoder layer": DepthwiseLSTMConfig(**LSTM, decoder_merge="two_lstms"),
}
DECODING = {"1 sentence, greedy": (1, 1), "32 sentences, 4 beams": (32, 4)}


def build(config: VanillaTransformerConfig | DepthwiseLSTMConfig, attention: str) -> PreTrainedModel:
    """A model of either family."""
    of_lstm = isinstance(config, DepthwiseLSTMConfig)
    cls = DepthwiseLSTMForConditionalGeneration if of_lstm else VanillaTransformerForConditionalGeneration
    return cls._from_config(config, attn_implementation=attention)


def operations(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> float:
    """Floating-point operations of the forward pass for each target token."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch, skip_logits=True)
    return counter.get_total_flops() / batch["labels"].numel()


def compare(steps: dict[str, Callable[[], object]], tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Of each system, tokens a second and the time it takes by the yardstick's."""
    rows = {}
    seconds = take_turns(steps, rounds)
    for name, own in seconds.items():
        rows[name] = {
            "tokens_per_second": round(tokens / statistics.median(own), 1),
            "time_by_vanilla": round(
                statistics.median(ours / theirs for ours, theirs in zip(own, seconds[YARDSTICK], strict=True)), 3
            ),
        }
        print(f"{name:<52} {rows[name]['tokens_per_second']:10.1f} tokens/s {rows[name]['time_by_vanilla']:5.2f} x")
    return rows


def table(report: dict) -> str:
    """The report as Markdown."""
    settings = report["settings"]
    columns = list(report["time"])
    lines = [
        f"{report['machine']}, torch {report['torch']}, {settings['attention']} attention, training with "
        f"{settings['sentences']} sentences of 32 tokens; time for each token by the vanilla model's, medians of "
        f"{settings['rounds']} interleaved rounds.",
        "",
        "| model | parameters | operations | " + " | ".join(columns) + " |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for name, size in report["size"].items():
        times = " | ".join(f"{report['time'][column][name]['time_by_vanilla']:.2f} x" for column in columns)
        lines.append(
            f"| {name} | {size['parameters'] / 1e6:.2f} M | {size['operations_by_vanilla']:.2f} x | {times} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Count, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    parser.add_argument("--rounds", type=int, default=7, help="measured turns of each system")
    parser.add_argument("--sentences", type=int, default=32, help="of 32 tokens each, in a training batch")
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="eager")
    parser.add_argument("--output", type=Path, help="write the results here, as JSON, and beside it as Markdown")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    set_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {name: build(config, args.attention).to(device) for name, config in SYSTEMS.items()}
    tokens = torch.randint(4, BASE["vocab_size"], (2, args.sentences, 32), device=device)
    batch = {"input_ids": tokens[0], "attention_mask": torch.ones_like(tokens[0]), "labels": tokens[1]}

    counted = {name: operations(model.eval(), batch) for name, model in models.items()}
    size = {
        name: {
            "parameters": model.num_parameters(),
            "operations_per_target_token": counted[name],
            "operations_by_vanilla": round(counted[name] / counted[YARDSTICK], 3),
        }
        for name, model in models.items()
    }
    time: dict[str, dict] = {}
    for column, (sentences, beams) in DECODING.items():
        print(f"decoding, {column}")
        source = tokens[0][:1, :24].expand(sentences, -1).contiguous()
        steps = {name: partial(seconds_to_generate, model.eval(), source, beams) for name, model in models.items()}
        time[f"decoding, {column}"] = compare(steps, sentences * NEW_TOKENS, args.rounds)
    for precision in ("float32", "bfloat16"):
        print(f"training, {precision}")
        steps = {
            name: training_step(model.train(), batch, getattr(torch, precision)) for name, model in models.items()
        }
        time[f"training, {precision}"] = compare(steps, tokens[1].numel(), args.rounds)

    if args.output:
        on_cpu = f"{platform.machine()}, {args.threads} threads"
        machine = torch.cuda.get_device_name() if device == "cuda" else on_cpu
        settings = {key: value for key, value in vars(args).items() if key != "output"}
        report = {"machine": machine, "torch": torch.__version__, "settings": settings, "size": size, "time": time}
        write_report(args.output, report, table)


if __name__ == "__main__":
    main()
