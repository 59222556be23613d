"""Checkpoints as fairseq writes them: a namespace of arguments, weights under fairseq's names, training history."""

from argparse import Namespace
from collections import OrderedDict

import torch

WIDTH, FFN, HEADS, LAYERS, SYMBOLS, TARGET_SYMBOLS = 8, 12, 2, 2, 13, 11
NAIVE = {  # the arguments of `naive_fairseq` for these weights
    "layers": LAYERS, "heads": HEADS, "pre_norm": False, "learned": False, "layernorm_embedding": False,
    "scale": True, "activation": "relu", "z": None,
}  # fmt: skip


def random_weights(seed=0, fused=False, learned=0, embedding_norm=False, pre_norm=False, shares="all"):
    """Random weights of a plain Transformer, in float64, under fairseq's names.

    `shares`: which embeddings are shared: "all", the decoder's input and output ("decoder"), or "none". With "decoder"
    and "none", source and target have separate vocabularies. `learned` is the number of learned positions.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4

    weights = OrderedDict()

    def add_linear(name, rows, columns):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = draw(rows, columns), draw(rows)

    def add_norm(name):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + draw(WIDTH), draw(WIDTH)

    for stack in ("encoder", "decoder"):
        weights[f"{stack}.version"] = torch.tensor([3.0])
        symbols = SYMBOLS if shares == "all" or stack == "encoder" else TARGET_SYMBOLS
        weights[f"{stack}.embed_tokens.weight"] = draw(symbols, WIDTH)
        if learned:
            weights[f"{stack}.embed_positions.weight"] = draw(learned + 2, WIDTH)
        else:
            weights[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
        if embedding_norm:
            add_norm(f"{stack}.layernorm_embedding")
        for i in range(LAYERS):
            layer = f"{stack}.layers.{i}"
            for name in ("self_attn", "encoder_attn")[: 1 if stack == "encoder" else 2]:
                if fused:
                    weights[f"{layer}.{name}.in_proj_weight"] = draw(3 * WIDTH, WIDTH)
                    weights[f"{layer}.{name}.in_proj_bias"] = draw(3 * WIDTH)
                else:
                    for letter in "kvq":
                        add_linear(f"{layer}.{name}.{letter}_proj", WIDTH, WIDTH)
                add_linear(f"{layer}.{name}.out_proj", WIDTH, WIDTH)
                add_norm(f"{layer}.{name}_layer_norm")
            add_linear(f"{layer}.fc1", FFN, WIDTH)
            add_linear(f"{layer}.fc2", WIDTH, FFN)
            add_norm(f"{layer}.final_layer_norm")
        if pre_norm:
            add_norm(f"{stack}.layer_norm")
    if shares == "all":
        weights["decoder.embed_tokens.weight"] = weights["encoder.embed_tokens.weight"]
    if shares == "none":
        weights["decoder.embed_out"] = draw(TARGET_SYMBOLS, WIDTH)
    else:
        weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
    return weights


def namespace(**more):
    """Arguments of a plain Transformer, as older versions of fairseq store them."""
    fields = {
        "arch": "transformer", "task": "translation", "source_lang": "de", "target_lang": "en", "dropout": 0.0,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "activation_fn": "relu",
        "encoder_normalize_before": False, "decoder_normalize_before": False, "encoder_learned_pos": False,
        "decoder_learned_pos": False, "share_all_embeddings": True, "share_decoder_input_output_embed": True,
        "max_source_positions": 30, "max_target_positions": 30, "lr": [0.0005], "user_dir": None,
    }  # fmt: skip
    return Namespace(**fields | more)


def save(path, args, weights, **more):
    """Write a checkpoint, including all that fairseq stores beside the weights."""
    state = {
        "args": args,
        "model": weights,
        "optimizer_history": [
            {"criterion_name": "LabelSmoothedCrossEntropyCriterion", "optimizer_name": "FairseqAdam", "num_updates": 7}
        ],
        "extra_state": {"train_iterator": {"epoch": 2, "iterations_in_epoch": 0}, "val_loss": 4.5, "best": 4.5},
        "last_optimizer_state": {"state": {0: {"step": 7, "exp_avg": torch.zeros(3)}}, "param_groups": []},
    }
    torch.save(state | more, path)
    return path


def our_logits(model, source, previous, **more):
    """Logits of one sentence, whose source is padded on the left as fairseq pads it."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([[1, 1, *source]]),
            attention_mask=torch.tensor([[0, 0] + [1] * len(source)]),
            decoder_input_ids=torch.tensor([previous]),
            **more,
        ).logits[0]
