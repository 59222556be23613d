"""Conversion of a base into a vanilla Transformer of ours: a `VanillaTransformerConfig`, and tensors under our names.

A base is a model of a family whose row has `is_base`, or a model of Transformers: Marian, BART, mBART, M2M100, NLLB.
"""

import dataclasses
import os
import re
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from .errors import UserError, quote
from .families import FAMILIES
from .loading import load_config, load_model
from .models.configuration_base import DeepWideConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.embeddings import SinusoidalPositions
from .models.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .weight_checks import check_tensors

Tensors = dict[str, torch.Tensor]

SHARED, ENCODER, DECODER, HEAD = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)


class Foreign(NamedTuple):
    """The values of our options for a model type of Transformers, whose config does not contain them."""

    position_embedding_type: str
    normalize_before: bool
    layernorm_embedding: bool


FOREIGN = {
    "marian": Foreign("marian", normalize_before=False, layernorm_embedding=False),
    "bart": Foreign("learned", normalize_before=False, layernorm_embedding=True),
    "mbart": Foreign("learned", normalize_before=True, layernorm_embedding=True),
    "m2m_100": Foreign("sinusoidal", normalize_before=True, layernorm_embedding=False),
}

# Fields that have the same name in the configs of all model types of `FOREIGN`.
COPIED = (
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "activation_function",
    "max_position_embeddings",
    "init_std",
    "bos_token_id",
    "pad_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)
# Fields of a vanilla config that say how layers are joined.
JOINTS = ("residual", "layer_aggregation", "encoder_solver", "decoder_attention", "layer_form", "language_aware")
RENAMED = (
    (r"\.(fc[12])\.", r".feed_forward.\1."),
    (r"\.embed_positions\.", ".embeddings.positions."),
    (r"\.layernorm_embedding\.", ".embeddings.layer_norm."),
    (r"^final_logits_bias$", "lm_head.bias"),
)


def load_base(base: Any) -> PreTrainedModel:
    """Load the model of a folder or Hub id in its saved dtype, or take a loaded model; check that it can be a base.

    Raises:
        UserError: nothing can be loaded, or the model cannot be a base.
    """
    if isinstance(base, str | os.PathLike):
        prefix = f"cannot start from {quote(str(base))}"
        check_base_config(repr(str(base)), load_config(base, prefix))
        return load_model(AutoModelForSeq2SeqLM, base, prefix, dtype="auto")
    if not isinstance(base, PreTrainedModel):
        raise UserError(
            f"cannot start from a {type(base).__name__}: a base is a folder, a Hub id, or a loaded model of "
            "Transformers. If a wrapper holds the model, give the inner model; if the model has an adapter, call "
            "`merge_and_unload()` first"
        )
    check_base_config(name_of(base), base.config)
    body = getattr(base, "model", None)
    if not all(hasattr(*part) for part in ((base, "lm_head"), (body, "encoder"), (body, "decoder"))):
        raise UserError(
            f"cannot start from {name_of(base)}: it lacks an encoder, a decoder or a language-model head; load it "
            "with AutoModelForSeq2SeqLM"
        )
    check_tying(base)
    return base


def check_tying(base: PreTrainedModel) -> None:
    """Refuse a loaded model whose config ties matrices that differ; Transformers 5 does not tie these."""
    tied = base.get_expanded_tied_weights_keys(all_submodels=True)
    for key, source in tied.items():
        if not torch.equal(base.get_parameter(key), base.get_parameter(source)):
            raise UserError(
                f"cannot start from {name_of(base)}: its config ties {key} to {source}, and they differ. Give the "
                f"model's folder. Or, if only {source} is right, call `tie_weights()` of the model; if both are "
                "right, set `config.tie_word_embeddings` to False"
            )


def as_vanilla(model: PreTrainedModel) -> tuple[VanillaTransformerConfig, Tensors]:
    """Express a base as a vanilla Transformer of ours: return its config, and its tensors under our names.

    A MAT becomes a vanilla Transformer with several `attention_branches`. The result always has three embedding
    matrices, tied or not, and none is called `shared`. The tensors are the base's own, not copies.

    Raises:
        UserError: the base has weights for which we have no place, lacks weights, computes positions in another way,
            or is no plain Transformer.
    """
    name, config = name_of(model), model.config
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key != SHARED}
    if config.model_type in FOREIGN:
        fields = {field: getattr(config, field) for field in COPIED}
        fields |= FOREIGN[config.model_type]._asdict() | {"scale_embedding": bool(config.scale_embedding)}
        for pattern, ours in RENAMED:
            tensors = {re.sub(pattern, ours, key): tensor for key, tensor in tensors.items()}
        _positions(name, config, tensors)
        bias = tensors.pop("lm_head.bias", None)
        if bias is not None and (config.model_type == "marian" or bias.any()):
            tensors["lm_head.bias"] = bias[0]
    else:
        _check_joints(name, config)
        fields = {field: getattr(config, field) for field in own_fields(DeepWideConfig)}
    encoder, decoder = model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight
    fields |= {
        "vocab_size": len(encoder),
        "decoder_vocab_size": len(decoder),
        "share_encoder_decoder_embeddings": encoder is decoder,
        "tie_word_embeddings": model.lm_head.weight is decoder,
        "lm_head_bias": "lm_head.bias" in tensors,
        "use_cache": True,  # Trainer saves False, which is meant for training alone
    }
    try:
        vanilla = VanillaTransformerConfig(**fields)
        check_tensors(tensors, VanillaTransformerForConditionalGeneration, vanilla, without=SHARED)
    except ValueError as error:
        raise UserError(f"cannot start from {name}: {error}") from error
    return vanilla, tensors


def _positions(name: str, config: PreTrainedConfig, tensors: Tensors) -> None:
    """Convert a foreign model's position tables to ours: cut unused rows, and drop tables that we compute."""
    if config.model_type == "m2m_100" and config.pad_token_id != 1:
        raise UserError(
            f"cannot start from {name}: M2M100 counts positions from pad_token_id + 1, and ours count from 2; its "
            f"`pad_token_id` is {config.pad_token_id} and must be 1"
        )
    if config.model_type == "m2m_100" and config.decoder_start_token_id == config.pad_token_id:
        raise UserError(
            f"cannot start from {name}: its decoder begins with padding, to which M2M100 gives no position, and ours "
            "give every token one"
        )
    for stack in ("encoder", "decoder"):
        key = f"model.{stack}.embeddings.positions.weight"
        if config.model_type in ("bart", "mbart"):
            tensors[key] = tensors[key][2:]  # from fairseq: two rows for padding, never looked up
        elif config.model_type == "marian":
            table = tensors.pop(key).float().cpu()
            length, dim = table.shape
            computed = SinusoidalPositions(length, dim, "marian").table
            if (table - computed).abs().max() > 0.01:  # bfloat16 rounds by up to 0.004
                raise UserError(f"cannot start from {name}: the positions of its {stack} are not Marian's sinusoids")


def tie(tensors: Tensors, config: DeepWideConfig) -> Tensors:
    """The tensors that a checkpoint with this config holds: of tied embeddings, only the source matrix."""
    tied = dict(tensors)
    if config.share_encoder_decoder_embeddings:
        tied[SHARED] = tied.pop(ENCODER)
        del tied[DECODER]
    if config.tie_word_embeddings:
        del tied[HEAD]
    return tied


def check_base_config(name: str, config: PreTrainedConfig) -> None:
    """Refuse a base whose config is of another model type, of a decoder alone, or quantised.

    Raises:
        UserError: the base is refused; the message says what is accepted.
    """
    accepted = [*(model_type for model_type, family in FAMILIES.items() if family.is_base), *FOREIGN]
    if config.model_type not in accepted:
        raise UserError(
            f"cannot start from {name}: its model type is {quote(config.model_type)}; accepted are "
            f"{', '.join(accepted)} (NLLB is m2m_100)"
        )
    if not config.is_encoder_decoder:
        raise UserError(f"cannot start from {name}: it is a decoder alone, and translation needs an encoder, too")
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"cannot start from {name}: its weights are quantised; give the checkpoint it was made from")


def _check_joints(name: str, config: DeepWideConfig) -> None:
    """Refuse a model of ours whose layers are not a plain Transformer's, or are not joined by addition.

    Its weights can fit a plain Transformer, but would compute another function there.
    """
    plain = {field: getattr(VanillaTransformerConfig, field) for field in JOINTS}
    for field, value in plain.items():
        if (have := getattr(config, field, value)) != value:
            raise UserError(
                f"cannot start from {name}: its `{field}` is {quote(have)}, and a base must be a plain Transformer, "
                f"with {quote(value)}"
            )


def own_fields(config_class: type[DeepWideConfig]) -> list[str]:
    """Names of the fields that a config class adds to the fields of `PreTrainedConfig`."""
    everybody = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return [field.name for field in dataclasses.fields(config_class) if field.name not in everybody]


def name_of(model: PreTrainedModel) -> str:
    """The name of a model for a message: its class, and the place that it was loaded from."""
    where = getattr(model.config, "_name_or_path", "")
    loaded = where not in ("", "None")  # "None": made by `from_pretrained(None, …)`, as `from_base` does
    return f"the {type(model).__name__} {where!r}" if loaded else f"the {type(model).__name__}"
