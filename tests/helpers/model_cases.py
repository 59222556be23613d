"""Tiny models of every family, for the model tests: one table, and ways to build, feed and scramble them.

A new family adds a row to `CASES`. Sizes differ between encoder and decoder on purpose, so that a mix-up shows.
"""

from importlib import metadata
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from hf_deepwide.families import FAMILIES

SIZES = {
    "vocab_size": 41,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "drop_branch": 0.0,
}


# Layer joints and layer forms that were added after the families. They go through the same tests as each family.
JOINTS: dict[str, dict[str, Any]] = {
    "deepnorm-denseformer": {"residual": "deepnorm", "layer_aggregation": "denseformer"},
    "b2t": {"residual": "b2t"},
    "rk2": {"encoder_solver": "rk2"},
    "transparent": {"layer_aggregation": "transparent"},
    "sdu": {"residual": "sdu"},
    "hierarchical": {"layer_aggregation": "hierarchical"},
    "em-routing": {"layer_aggregation": "em_routing"},
    "merged": {"decoder_attention": "merged"},
    "weighted": {"layer_form": "weighted"},
    "luna": {"layer_form": "luna", "luna_length": 4},
    "language": {"language_aware": True},
    "dynamic-convolution": {"layer_form": "dynamic_convolution", "encoder_kernel_sizes": [3]},
    "attention": {"residual": "attention", "normalize_before": True},
    "hyper": {"residual": "hyper", "normalize_before": True},
    "mhc": {"residual": "mhc", "normalize_before": True},
}


NEAR_ONE_OR_ZERO = ("static_alpha", "language_scale", "language_bias")  # matrices that `scramble` treats as vectors


class Case(NamedTuple):
    """A family, and the config fields of this model that are added to `SIZES` or replace them."""

    family: str
    fields: dict[str, Any] = {}


CASES = {
    "vanilla": Case("vanilla_transformer"),
    "vanilla-prenorm": Case(
        "vanilla_transformer",
        {"normalize_before": True, "position_embedding_type": "learned", "layernorm_embedding": True},
    ),
    "vanilla-relative": Case("vanilla_transformer", {"max_relative_position": 2}),
    "mat-relative": Case("mat", {"max_relative_position": 3, "attention_branches": 3, "normalize_before": True}),
    "depthwise-lstm-relative": Case("depthwise_lstm", {"max_relative_position": 1}),
    "vanilla-rezero": Case("vanilla_transformer", {"residual": "rezero"}),
    "vanilla-deepnorm": Case("vanilla_transformer", {"residual": "deepnorm", "attention_branches": 2}),
    "vanilla-b2t": Case("vanilla_transformer", {"residual": "b2t", "ffn_branches": 2}),
    "vanilla-attention": Case("vanilla_transformer", {"residual": "attention", "normalize_before": True}),
    "vanilla-attention-blocks": Case(
        "vanilla_transformer",
        {"residual": "attention", "attention_block": 2, "normalize_before": True, "attention_branches": 3},
    ),
    "vanilla-hyper": Case("vanilla_transformer", {"residual": "hyper", "normalize_before": True, "ffn_branches": 2}),
    "vanilla-mhc": Case(
        "vanilla_transformer",
        {
            "residual": "mhc",
            "residual_streams": 3,
            "sinkhorn_iterations": 4,
            "normalize_before": True,
            "ffn_branches": 2,
        },
    ),
    "vanilla-dlcl": Case("vanilla_transformer", {"layer_aggregation": "dlcl"}),
    "vanilla-dlcl-prenorm": Case(
        "vanilla_transformer", {"layer_aggregation": "dlcl", "normalize_before": True, "attention_branches": 2}
    ),
    "vanilla-denseformer": Case("vanilla_transformer", {"layer_aggregation": "denseformer", "attention_branches": 2}),
    "vanilla-denseformer-sparse": Case(
        "vanilla_transformer",
        {
            "layer_aggregation": "denseformer",
            "aggregation_dilation": 2,
            "aggregation_period": 2,
            "normalize_before": True,
        },
    ),
    "vanilla-transparent": Case("vanilla_transformer", {"layer_aggregation": "transparent", "residual": "sdu"}),
    "vanilla-transparent-prenorm": Case(
        "vanilla_transformer",
        {"layer_aggregation": "transparent", "normalize_before": True, "attention_branches": 2},
    ),
    "vanilla-sdu-prenorm": Case(
        "vanilla_transformer", {"residual": "sdu", "normalize_before": True, "attention_branches": 2}
    ),
    "vanilla-iterative": Case("vanilla_transformer", {"layer_aggregation": "iterative", "normalize_before": True}),
    "vanilla-hierarchical": Case("vanilla_transformer", {"layer_aggregation": "hierarchical", "ffn_branches": 2}),
    "vanilla-hierarchical-prenorm": Case(
        "vanilla_transformer",
        {"layer_aggregation": "hierarchical", "normalize_before": True, "attention_branches": 2},
    ),
    "vanilla-em-routing": Case("vanilla_transformer", {"layer_aggregation": "em_routing"}),
    "vanilla-em-routing-capsules": Case(
        "vanilla_transformer",
        {
            "layer_aggregation": "em_routing",
            "routing_capsules": 4,
            "routing_iterations": 2,
            "normalize_before": True,
            "activation_function": "gelu",
        },
    ),
    "vanilla-merged": Case("vanilla_transformer", {"decoder_attention": "merged"}),
    "vanilla-merged-prenorm": Case(
        "vanilla_transformer",
        {
            "decoder_attention": "merged",
            "normalize_before": True,
            "attention_branches": 2,
            "initialization": "depth_scaled",
            "layer_aggregation": "transparent",
        },
    ),
    "vanilla-language": Case("vanilla_transformer", {"language_aware": True}),
    "vanilla-language-merged": Case(
        "vanilla_transformer", {"language_aware": True, "decoder_attention": "merged", "ffn_branches": 2}
    ),
    "vanilla-weighted": Case("vanilla_transformer", {"layer_form": "weighted"}),
    "vanilla-weighted-prenorm": Case(
        "vanilla_transformer",
        {
            "layer_form": "weighted",
            "normalize_before": True,
            "layer_aggregation": "denseformer",
            "attention_bias": False,
            "activation_function": "gelu",
        },
    ),
    "vanilla-luna": Case("vanilla_transformer", {"layer_form": "luna", "luna_length": 3}),
    "vanilla-luna-prenorm": Case(
        "vanilla_transformer",
        {
            "layer_form": "luna",
            "luna_length": 9,
            "luna_tie_kv": True,
            "luna_activation": "elu",
            "normalize_before": True,
            "position_embedding_type": "learned",
            "layernorm_embedding": True,
        },
    ),
    "vanilla-dynamic": Case(
        "vanilla_transformer",
        {
            "layer_form": "dynamic_convolution",
            "encoder_kernel_sizes": [5, 4],
            "decoder_kernel_sizes": [2, 3],
            "activation_function": "gelu",
        },
    ),
    "vanilla-dynamic-prenorm": Case(
        "vanilla_transformer",
        {
            "layer_form": "dynamic_convolution",
            "normalize_before": True,
            "attention_bias": False,
            "layer_aggregation": "transparent",
            "initialization": "depth_scaled",
        },
    ),
    "vanilla-evolved": Case("vanilla_transformer", {"layer_form": "evolved", "normalize_before": True}),
    "vanilla-rk2": Case("vanilla_transformer", {"encoder_solver": "rk2", "layer_aggregation": "dlcl"}),
    "vanilla-rk2-prenorm": Case(
        "vanilla_transformer", {"encoder_solver": "rk2", "normalize_before": True, "attention_branches": 2}
    ),
    "mat-1": Case("mat", {"attention_branches": 1}),
    "mat-3": Case("mat", {"attention_branches": 3}),
    "mat-2-prenorm": Case(
        "mat",
        {
            "attention_branches": 2,
            "ffn_branches": 3,
            "normalize_before": True,
            "position_embedding_type": "marian",
            "tie_word_embeddings": False,
            "lm_head_bias": True,
        },
    ),
    "mat-3-two-vocabularies": Case(
        "mat",
        {
            "attention_branches": 3,
            "branch_merge": "double_mean",
            "attention_bias": False,
            "activation_function": "gelu",
            "scale_embedding": False,
            "decoder_vocab_size": 37,
            "share_encoder_decoder_embeddings": False,
        },
    ),
    "mat-3-unjoined": Case(
        "mat", {"attention_branches": 3, "ffn_branches": 2, "join_ffn": False, "branch_merge": "double_mean"}
    ),
    "multipath-2": Case("multipath_transformer", {"encoder_paths": 2}),
    "multipath-3-more": Case("multipath_transformer", {"encoder_paths": 3}),
    "multipath-4-postnorm": Case(
        "multipath_transformer",
        {
            "encoder_paths": 4,
            "path_norm": False,
            "normalize_before": False,
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "latent-both": Case("latent_depth", {"inference_selection": "soft"}),
    "latent-decoder-hard": Case(
        "latent_depth", {"latent_encoder": False, "attention_branches": 2, "inference_selection": "hard"}
    ),
    "latent-without-norms": Case(
        "latent_depth", {"layer_norms": False, "attention_branches": 2, "inference_selection": "soft"}
    ),
    "lstm": Case("depthwise_lstm"),
    "lstm-concat": Case(
        "depthwise_lstm",
        {
            "decoder_merge": "concat",
            "share_gates": "none",
            "share_hidden": "stack",
            "cross_query": "residual",
            "lstm_bias": True,
            "attention_bias": True,
        },
    ),
    "lstm-two": Case(
        "depthwise_lstm",
        {
            "decoder_merge": "two_lstms",
            "share_gates": "global",
            "decoder_lstm_hidden": "single",
            "attention_branches": 2,
            "tie_word_embeddings": False,
        },
    ),
    "lstm-rnn": Case(
        "depthwise_lstm",
        {
            "cell": "rnn",
            "share_hidden": "global",
            "decoder_ffn_dim": 24,
            "cross_query": "previous",
            "attn_input_norm": False,
            "lm_head_bias": False,
        },
    ),
}

# The cases whose decoder has a twin that reads one token at a time.
WITH_TWIN = [case for case in CASES if "luna" not in case and "evolved" not in case]


def config_of(case: str, **changes: Any) -> Any:
    """The config of a case."""
    family, fields = CASES[case]
    return FAMILIES[family].config(**{**SIZES, **fields, **changes})


def new_vanilla(**fields: Any) -> PreTrainedModel:
    """A vanilla model with `SIZES`, these fields and its initial weights, as before training."""
    torch.manual_seed(0)
    made = FAMILIES["vanilla_transformer"]
    return made.lm(made.config(**{**SIZES, **fields}))


def scramble(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Make all parameters random, and large enough that every part matters, also biases and the scales of norms."""
    generator = torch.Generator().manual_seed(seed)
    config = getattr(model, "config", None)  # a sub-layer may have none
    bound = 1 if getattr(config, "layer_norms", True) else 0.7  # without norms the sums grow from layer to layer
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in sorted(parameters.items()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 or name.endswith(NEAR_ONE_OR_ZERO):  # all noise: ill-conditioned
                parameter.add_(0.2 * noise)
            else:
                sharp = 1.8 if "pack." in name else 3  # smaller, because Luna nests two attentions
                spread = sharp if "q_proj" in name or "k_proj" in name else 1.5  # sharp attention
                sublayer, _, projection = name.removesuffix(".weight").rpartition(".")
                if f"{sublayer}.kappa.simplex_weight" in parameters and projection in ("out_proj", "fc1", "fc2"):
                    spread = 3  # kappa and alpha make branches smaller
                parameter.copy_(noise * spread * bound * parameter.shape[-1] ** -0.5)
    return model


def build(case: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The translation model of a case, scrambled, in eval mode. It always generates up to the length limit."""
    torch.manual_seed(seed)
    config = config_of(case, **changes)
    model = scramble(FAMILIES[CASES[case].family].lm(config), seed).eval()
    model.generation_config.eos_token_id = None
    return model


def tokens(lengths: tuple[int, ...], seed: int = 1, vocabulary: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids and their mask, each `[len(lengths), max(lengths)]`. Every sentence ends with `</s>`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, length - 1] = 2
        ids[row, length:] = 1
        mask[row, :length] = 1
    return ids, mask


def source(lengths: tuple[int, ...] = (7, 4, 5), seed: int = 1) -> dict[str, torch.Tensor]:
    """A right-padded source batch."""
    ids, mask = tokens(lengths, seed)
    return {"input_ids": ids, "attention_mask": mask}


def pair(
    source_lengths: tuple[int, ...] = (7, 4, 5), target_lengths: tuple[int, ...] = (3, 6, 4), seed: int = 1
) -> dict[str, torch.Tensor]:
    """A source batch and its labels, which are -100 at padding."""
    labels, mask = tokens(target_lengths, seed + 100)
    return {**source(source_lengths, seed), "labels": labels.masked_fill(mask == 0, -100)}


def needs_transformers(version: str, what: str) -> None:
    """Skip a test of a feature (`what`) that no model has in the installed Transformers, an old but accepted one."""
    if Version(transformers.__version__) < Version(version):
        pytest.skip(f"{what} needs Transformers {version}")


def needs_fitting_peft() -> None:
    """Skip a test where Transformers is 5.24 or newer, which renamed the cache, and PEFT is older than 0.22."""
    if Version(transformers.__version__) >= Version("5.24") and Version(metadata.version("peft")) < Version("0.22"):
        pytest.skip("Transformers 5.24 needs PEFT 0.22")


def leaves(model):
    """Copy the parameters as autograd leaves, by their names in the headless model. Tied parameters share one leaf."""
    copies = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for _, parameter in named:
        copies.setdefault(id(parameter), parameter.detach().clone().requires_grad_())
    return {name.removeprefix("model."): copies[id(parameter)] for name, parameter in named}


def sentences(batch, start=2):
    """Yield the source ids and the decoder input ids of each pair in a batch, without padding."""
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        target = labels[labels != -100].tolist()
        yield ids[mask == 1].tolist(), [start, *target[:-1]]
