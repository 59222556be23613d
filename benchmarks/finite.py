"""Check every family under fp16 and bf16 autocast at the papers' sizes: is everything finite, and near to float32?

    python benchmarks/finite.py                                          # some minutes
    python benchmarks/finite.py --output benchmarks/results/finite       # and finite.json, finite.md

A batch goes forward and backward through one encoder layer and one decoder layer, with dropout off. It has three rows:
a sentence of the greatest length, a sentence of one token, and a row of padding only. The script checks whether the
output of every module and the gradient of every parameter are finite. It prints the loss beside the loss in float32.
`extreme` multiplies attention scores and logits by 1000, and divides the loss by 1000. The division is there because
the loss scaler of fp16, not this script, takes care of large gradients. `depth` has 24 narrow layers. The tests run a
part of this script.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import torch
from reports import markdown_table, measured_on, write_report
from torch import nn
from transformers import PreTrainedModel, set_seed

from hf_deepwide.families import FAMILIES
from hf_deepwide.training.replay import first_nonfinite

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ATTENTIONS = ("eager", "sdpa")
KINDS = {  # what differs from one layer: layers, width, heads, inner width
    "base": (1, 512, 8, 2048),
    "big": (1, 1024, 16, 4096),
    "extreme": (1, 512, 8, 2048),
    "depth": (24, 64, 4, 256),
}
VOCABULARY = 200
EXTREME = 1000


def build(family: str, kind: str, attention: str, length: int) -> PreTrainedModel:
    """Build the model with the random weights of the start of training; `extreme` enlarges some of the weights."""
    layers, width, heads, inner = KINDS[kind]
    set_seed(0)
    config = FAMILIES[family].config(
        vocab_size=VOCABULARY, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner,
        max_position_embeddings=length, dropout=0.0, drop_branch=0.0, tie_word_embeddings=kind != "extreme",
    )  # fmt: skip
    model = FAMILIES[family].lm._from_config(config, attn_implementation=attention).train()
    if kind == "extreme":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name == "lm_head.weight" or name.endswith("q_proj.weight"):
                    parameter.mul_(EXTREME)
    return model


def batch_of(length: int) -> dict[str, torch.Tensor]:
    """A batch of sources and targets `[3, length]`: the longest sentence, a sentence of one token, only padding."""
    generator = torch.Generator().manual_seed(1)
    source, target = torch.randint(4, VOCABULARY, (2, 3, length), generator=generator)
    mask = torch.zeros_like(source)
    mask[0] = 1
    mask[1, 0] = 1
    return {
        "input_ids": source.where(mask == 1, 1),
        "attention_mask": mask,
        "labels": target.where(mask == 1, -100),
    }


def run(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], dtype: torch.dtype | None, divisor: int = 1
) -> dict[str, Any]:
    """Compute forward and backward; return the loss, and the modules and gradients that are not finite."""
    torch.manual_seed(2)  # all precisions draw the same latent selection
    device = model.device.type
    tokens = batch["labels"].ne(-100).sum() * divisor
    model.zero_grad()
    with first_nonfinite(model) as modules, torch.autocast(device, dtype, enabled=dtype is not None):
        loss = model(**batch, label_smoothing=0.1, skip_logits=True, num_items_in_batch=tokens).loss
    loss.backward()
    gradients = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return {"loss": loss.item(), "modules": list(modules), "gradients": gradients, "trained": trained(model)}


def trained(model: nn.Module) -> int:
    """The number of parameter tensors with a gradient that is not zero."""
    return sum(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def compare(
    family: str, kind: str, attention: str, length: int, device: str = "cpu", precisions: Any = tuple(DTYPES)
) -> dict[str, dict[str, Any]]:
    """Call `run` in float32 and in each low precision."""
    model = build(family, kind, attention, length).to(device)
    batch = {name: tensor.to(device) for name, tensor in batch_of(length).items()}
    divisor = EXTREME if kind == "extreme" else 1
    return {name: run(model, batch, DTYPES.get(name), divisor) for name in ("float32", *precisions)}


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows = []
    for row in report["rows"]:
        losses = (f"{row[name]['loss']:.4f}" for name in ("float32", *DTYPES))
        wrong = sum(len(row[name]["modules"]) + len(row[name]["gradients"]) for name in DTYPES)
        rows.append((row["family"], row["kind"], row["attention"], *losses, wrong or "nothing"))
    return markdown_table(["family", "what", "attention", "float32 loss", *DTYPES, "not finite"], rows)


def main() -> None:
    """Compare all families, kinds and attention implementations, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="of the longest sentence, in tokens")
    parser.add_argument("--output", type=Path, help="write the results here, as .json and .md")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for family, kind, attention in product(FAMILIES, KINDS, ATTENTIONS):
        length = min(args.length, 128) if kind == "depth" else args.length
        results = compare(family, kind, attention, length, device)
        rows.append({"family": family, "kind": kind, "attention": attention, "length": length, **results})
        print(table({"rows": rows[-1:]}).splitlines()[-1], flush=True)
    if args.output:
        write_report(args.output, {**measured_on(device), "rows": rows}, table)


if __name__ == "__main__":
    main()
