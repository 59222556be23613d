"""Proximal initialisation of MAT for language understanding from a trained RoBERTa (MAT, sections 3.3 and 6).

A base is a RoBERTa, a model with the same architecture (XLM-R, CamemBERT), or a model of the family itself. Each
branch becomes a copy of the base's attention, so that with all dropping off the logits are the base's. If the base has
no head for the task, the head starts as in a new model.
"""

import dataclasses
import os
import re
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from .errors import UserError, one_line, quote
from .loading import load_config, load_model
from .models.configuration_mat_roberta import MATRobertaConfig
from .vanilla_form import Tensors, check_tying, name_of
from .warm_start import BRANCHING, check_copies, check_field, copy_branches, inherited, merge_losses
from .weight_checks import check_surplus

logger = logging.get_logger(__name__)

ROBERTA = ("roberta", "xlm-roberta", "camembert")
HEADS = {"ForMaskedLM": AutoModelForMaskedLM, "ForSequenceClassification": AutoModelForSequenceClassification}
LABELS = ("num_labels", "id2label", "label2id", "problem_type")
FREE = {
    *(*BRANCHING, *LABELS, "dropout", "attention_dropout", "activation_dropout", "classifier_dropout", "layer_drop"),
    *("bos_token_id", "eos_token_id", "init_std"),
} - {"join_ffn"}
RENAMED = (
    (r"^embeddings\.word_embeddings\.", "model.encoder.embed_tokens."),
    (r"^embeddings\.LayerNorm\.", "model.encoder.embeddings.layer_norm."),
    (r"^encoder\.layer\.(\d+)\.", r"model.encoder.layers.\1."),
    (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.dense\.", ".self_attn.out_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".self_attn_layer_norm."),
    (r"\.intermediate\.dense\.", ".feed_forward.fc1."),
    (r"\.output\.dense\.", ".feed_forward.fc2."),
    (r"\.output\.LayerNorm\.", ".final_layer_norm."),
)


def from_base(cls: type[PreTrainedModel], base: Any, **config_overrides: Any) -> Any:
    """Return a model of the family that computes the function of a trained base, with all dropping off.

    The base is not changed and shares no memory with the result. The result has the base's dtype and device, and is in
    evaluation mode. Config fields come from the base, except the fields in `config_overrides`. If the base has a
    single branch and drops none, the fields of branches have the family's defaults. If `config_overrides` change the
    order of the labels, the rows of the head are reordered, too.

    Args:
        cls: `MATRobertaModel`, `MATRobertaForMaskedLM` or `MATRobertaForSequenceClassification`.
        base: a folder, a Hub id, or a loaded model, with or without a head.
        config_overrides: branches and dropping, dropout rates, labels, token ids other than padding.

    Raises:
        UserError: nothing can be loaded from `base`; the base has another architecture; or an override is unknown or
            contradicts the base.
    """
    model = _load(base)
    name = name_of(model)
    base_config, tensors = as_family(model)
    config = _config(name, base_config, config_overrides)
    own = cls(config).state_dict()
    body = "model." if any(key.startswith("model.") for key in own) else ""
    given = {
        key if body else key.removeprefix("model."): tensor
        for key, tensor in copy_branches(tensors, base_config, config).items()
        if not key.startswith("classifier.") or config.num_labels == base_config.num_labels
    }
    if order := order_of_labels(base_config, config):
        given |= {key: given[key][order] for key in given if key.startswith("classifier.out_proj.")}
    state = own | {key: tensor for key, tensor in given.items() if key in own}
    if config.tie_word_embeddings and "lm_head.weight" in own:
        state["lm_head.weight"] = state["model.encoder.embed_tokens.weight"]
    lacking = sorted(own.keys() - given.keys() - {"lm_head.weight"})
    if lost := [key for key in lacking if key.startswith(body or "encoder.")]:
        raise UserError(f"cannot start from {name}: it has no weights for {lost[0]}")
    if lacking:
        logger.warning_once(
            "%s has no head for these labels or this task. The weights of %s start at random; train the model "
            "before use",
            *(name, lacking[0].partition(".")[0]),
        )
    result = cls.from_pretrained(None, config=config, state_dict=state, dtype=model.dtype)
    for reason in merge_losses(base_config, config):
        logger.warning(f"the result does not compute the function of {name}: {reason}")
    return result.to(model.device)


def order_of_labels(base: PreTrainedConfig, config: PreTrainedConfig) -> list[int] | None:
    """The base's index of each label, if both configs have the same label names in another order; else None."""
    theirs, ours = ([names[number] for number in sorted(names)] for names in (base.id2label, config.id2label))
    return [theirs.index(name) for name in ours] if theirs != ours and sorted(theirs) == sorted(ours) else None


def _load(base: Any) -> PreTrainedModel:
    """Check the base's architecture, and return the base with the head that its config names."""
    if not isinstance(base, str | os.PathLike):
        if not isinstance(base, PreTrainedModel):
            raise UserError(
                f"cannot start from a {type(base).__name__}: a base is a folder, a Hub id, or a loaded model of "
                "Transformers"
            )
        check_encoder_config(name_of(base), base.config)
        check_tying(base)
        try:
            check_surplus({key for key in base.state_dict() if "pooler." not in key}, type(base), base.config)
        except ValueError as error:
            raise UserError(f"cannot start from {name_of(base)}: {error}") from error
        return base
    prefix = f"cannot start from {quote(str(base))}"
    config = load_config(base, prefix)
    check_encoder_config(repr(str(base)), config)
    names = getattr(config, "architectures", None) or []
    auto = next((auto for end, auto in HEADS.items() if any(str(name).endswith(end) for name in names)), AutoModel)
    # published models have a pooler, which none of their heads reads
    plain: dict[str, Any] = {"add_pooling_layer": False} if auto is AutoModel and config.model_type in ROBERTA else {}
    return load_model(auto, base, prefix, accept_unexpected=lambda _: True, dtype="auto", **plain)


def check_encoder_config(name: str, config: PreTrainedConfig) -> None:
    """Refuse a config of another architecture.

    Raises:
        UserError: the config is refused; the message says what is accepted.
    """
    if config.model_type == MATRobertaConfig.model_type:
        return
    if config.model_type not in ROBERTA:
        accepted = ", ".join((*ROBERTA, MATRobertaConfig.model_type))
        raise UserError(f"cannot start from {name}: it is a {config.model_type}; accepted: {accepted}")
    for field, value in {"is_decoder": False, "add_cross_attention": False}.items():
        if getattr(config, field, value) != value:
            raise UserError(
                f"cannot start from {name}: its `{field}` is {getattr(config, field)}; an encoder is needed"
            )


def as_family(model: PreTrainedModel) -> tuple[MATRobertaConfig, Tensors]:
    """Express a base as a model of the family: return its config, and its tensors under our names, head included."""
    config = model.config
    if config.model_type == MATRobertaConfig.model_type:
        tensors = model.state_dict()
        return config, tensors if any(key.startswith("model.") for key in tensors) else {
            f"model.{key}": tensor for key, tensor in tensors.items()
        }
    body = model.base_model.state_dict()
    first = config.pad_token_id + 1  # this row holds position 0
    positions = body["embeddings.position_embeddings.weight"][first:]
    tensors = {
        "model.encoder.embeddings.positions.weight": positions + body["embeddings.token_type_embeddings.weight"][0]
    }
    for key, tensor in body.items():
        renamed = key
        for pattern, replacement in RENAMED:
            renamed = re.sub(pattern, replacement, renamed)
        if renamed.startswith("model."):
            tensors[renamed] = tensor
    if (head := getattr(model, "lm_head", None)) is not None:
        for ours, theirs in (("dense", head.dense), ("layer_norm", head.layer_norm)):
            tensors |= {f"{ours}.{key}": tensor for key, tensor in theirs.state_dict().items()}
        tensors |= {"lm_head.weight": head.decoder.weight, "lm_head.bias": head.decoder.bias}
    if isinstance(head := getattr(model, "classifier", None), torch.nn.Module):
        tensors |= {f"classifier.{key}": tensor for key, tensor in head.state_dict().items()}
    heads, inner = config.num_attention_heads, config.intermediate_size
    fields = {
        "vocab_size": config.vocab_size, "d_model": config.hidden_size, "encoder_layers": config.num_hidden_layers,
        "encoder_attention_heads": heads, "encoder_ffn_dim": inner, "dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob, "activation_function": config.hidden_act,
        "max_position_embeddings": len(positions), "init_std": config.initializer_range,
        "classifier_dropout": getattr(config, "classifier_dropout", None), "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id,
        "tie_word_embeddings": config.tie_word_embeddings, "id2label": config.id2label, "label2id": config.label2id,
        "problem_type": config.problem_type, "layer_norm_eps": config.layer_norm_eps, "attention_branches": 1,
        "drop_branch": 0.0,
    }  # fmt: skip
    try:
        return MATRobertaConfig(**fields), tensors
    except ValueError as error:
        raise UserError(f"cannot start from {name_of(model)}: {one_line(error)}") from error


def _config(name: str, base: MATRobertaConfig, overrides: dict[str, Any]) -> MATRobertaConfig:
    """The result's config: the base's fields, the family's defaults if the base has one branch, and overrides."""
    known = {field.name for field in dataclasses.fields(MATRobertaConfig)} | {*LABELS}
    fields = inherited(base, [key for key in known if hasattr(base, key) and key != "num_labels"])
    for key, value in overrides.items():
        check_field(MATRobertaConfig, key, known)
        unties = key == "tie_word_embeddings" and value is False  # the copied matrix is then trained separately
        free = key in FREE or unties or (key == "join_ffn" and base.ffn_branches == 1)
        if not free and value != getattr(base, key):
            raise UserError(
                f"`{key}` cannot be {quote(value)}: the weights of {name} were trained for "
                f"{quote(getattr(base, key))}; leave `{key}` out"
            )
    if {"num_labels", "id2label"} & overrides.keys():
        fields = {key: value for key, value in fields.items() if key not in LABELS}
    try:
        config = MATRobertaConfig(**{**fields, **overrides})
    except ValueError as error:
        raise UserError(str(error)) from error
    check_copies(name, base, config)
    return config
