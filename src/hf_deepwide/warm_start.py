"""Proximal initialisation: a wide model that starts as its trained base (MAT, section 3.3).

A base is read in two steps. First it is expressed as a vanilla Transformer of ours, whatever library's names it came
in: a `VanillaTransformerConfig` and tensors under our names. Then the target family makes its own weights of those:
each branch (in a Multi-Path encoder: each path) becomes a copy of the base's sub-layer, so that with all dropping off
the mean over branches is the base's function. Copies are bit-identical, and without drop-branch and attention dropout
they receive equal gradients, but for rounding: it is dropping that makes the branches differ.

The function is preserved for real tokens, marked as such by the attention masks, whose padding is on the right. A
depth-wise LSTM, which joins layers in another way, does not preserve it: it takes embeddings and attentions alone. Nor
does latent depth with soft samples, which weighs the copied layers; with hard ones it does.
"""

import copy
import dataclasses
import difflib
import logging
import math
import os
import re
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from .errors import UserError, quote
from .loading import load_config, load_model
from .models.branches import merge_scale
from .models.configuration_base import DeepWideConfig
from .models.configuration_depthwise_lstm import DepthwiseLSTMConfig
from .models.configuration_latent_depth import LatentDepthConfig
from .models.configuration_multipath_transformer import MultiPathConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.embeddings import SinusoidalPositions
from .models.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


class Foreign(NamedTuple):
    """What a model type of Transformers is among our options, where its config does not say so."""

    position_embedding_type: str
    normalize_before: bool
    layernorm_embedding: bool


FOREIGN = {
    "marian": Foreign("marian", normalize_before=False, layernorm_embedding=False),
    "bart": Foreign("learned", normalize_before=False, layernorm_embedding=True),
    "mbart": Foreign("learned", normalize_before=True, layernorm_embedding=True),
    "m2m_100": Foreign("sinusoidal", normalize_before=True, layernorm_embedding=False),
}
OURS = ("vanilla_transformer", "mat")
ACCEPTED = f"{', '.join((*OURS, *FOREIGN))} (NLLB is m2m_100)"

# Fields under the same name in the configs of all of `FOREIGN`.
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
RENAMED = (
    (r"\.(fc[12])\.", r".feed_forward.\1."),
    (r"\.embed_positions\.", ".embeddings.positions."),
    (r"\.layernorm_embedding\.", ".embeddings.layer_norm."),
    (r"^final_logits_bias$", "lm_head.bias"),
)

# What an override may change without changing the base's function …
BRANCHING = ("attention_branches", "ffn_branches", "drop_branch", "drop_unit", "branch_merge")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "decoder_start_token_id")
DROPPING = ("dropout", "attention_dropout", "activation_dropout", "layer_drop")
FREE = {*BRANCHING, *TOKEN_IDS, *DROPPING, "init_std", "use_cache"}
TYING = ("tie_word_embeddings", "share_encoder_decoder_embeddings")  # True may become False, and copies be made
# … and what would fit its weights but make another function of them; the rest would not fit.
FUNCTION = {
    "encoder_attention_heads",
    "decoder_attention_heads",
    "activation_function",
    "position_embedding_type",
    "scale_embedding",
    "normalize_before",
    "residual",
    "layer_aggregation",
    "pad_token_id",
}

SHARED, ENCODER, DECODER, HEAD = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)


def from_base(cls: type[PreTrainedModel], base: Any, **config_overrides: Any) -> PreTrainedModel:
    """A model of the family `cls` that computes the function of a trained base (MAT, section 3.3).

    The base is not changed and shares no memory with the result, which has its dtype, device and generation config,
    and is in evaluation mode. Fields of the config come from the base, except those of the branches where the base
    has a single one (then the family's defaults hold) and those that `config_overrides` sets.

    A depth-wise LSTM does not compute the base's function and has to be trained: embeddings, attentions, the output
    projection and, of a pre-norm base, the norms before the attentions are copied; its LSTM, which stands where
    residual connections and feed-forward networks were, starts at random.

    Args:
        cls: a `…ForConditionalGeneration` of this package.
        base: a folder, a Hub id, or a loaded model: a vanilla model or MAT of ours, Marian, BART, mBART, M2M100, NLLB.
        config_overrides: fields that leave the function as it is: branches and dropping, dropout rates, token ids
            other than padding, untying of embeddings, and the longest sequence if positions are computed.
            `branch_merge="double_mean"` divides the copies' sum by N**2, as the paper's released code does, and so
            does change the function; it is logged as a warning.

    Raises:
        UserError: nothing can be loaded from `base`; it is of another architecture or quantised; an override is
            unknown or contradicts the base.
    """
    model = load_base(base)
    name = _name(model)
    base_config, tensors = as_vanilla(model)
    config = target_config(name, cls.config_class, base_config, config_overrides)
    tensors = copy_branches(tensors, base_config, config)
    if isinstance(config, DepthwiseLSTMConfig):
        tensors = without_feed_forward(cls, config, base_config, tensors)
    tensors |= fresh(cls, config, tensors)
    result = cls.from_pretrained(None, config=config, state_dict=tie(tensors, config), dtype=model.dtype)
    result.generation_config = copy.deepcopy(model.generation_config)
    for field in TOKEN_IDS:
        if field in config_overrides:
            setattr(result.generation_config, field, config_overrides[field])
    _warn(name, model, base_config, config)
    return result.to(model.device)


def load_base(base: Any) -> PreTrainedModel:
    """The model at a folder or Hub id, in the dtype it was saved in, or the loaded model given, once it is accepted.

    Raises:
        UserError: nothing can be loaded, or what is there cannot be a base.
    """
    if isinstance(base, str | os.PathLike):
        told = f"cannot start from {quote(str(base))}"
        _check_config(repr(str(base)), load_config(base, told))
        return load_model(AutoModelForSeq2SeqLM, base, told, dtype="auto")
    if not isinstance(base, PreTrainedModel):
        raise UserError(
            f"cannot start from a {type(base).__name__}: a base is a folder, a Hub id, or a loaded model of "
            "Transformers (of a wrapper, give what it wraps; merge an adapter first, by its `merge_and_unload()`)"
        )
    _check_config(_name(base), base.config)
    body = getattr(base, "model", None)
    if not all(hasattr(*part) for part in ((base, "lm_head"), (body, "encoder"), (body, "decoder"))):
        raise UserError(
            f"cannot start from {_name(base)}: it lacks an encoder, a decoder or a language-model head; load it "
            "with AutoModelForSeq2SeqLM"
        )
    _check_tying(base)
    return base


def _check_tying(base: PreTrainedModel) -> None:
    """Refuse a loaded model whose config ties matrices that differ; Transformers 5 leaves them apart."""
    tied = base.get_expanded_tied_weights_keys(all_submodels=True)
    for key, source in tied.items():
        if not torch.equal(base.get_parameter(key), base.get_parameter(source)):
            raise UserError(
                f"cannot start from {_name(base)}: its config ties {key} to {source}, and they differ. Give the "
                "folder it was loaded from, call its `tie_weights()` if the second is right, or set "
                "`config.tie_word_embeddings` to False if both are"
            )


def as_vanilla(model: PreTrainedModel) -> tuple[VanillaTransformerConfig, Tensors]:
    """A base as a vanilla Transformer of ours: its config, and its tensors under our names.

    A MAT is one with several `attention_branches`. The three embedding matrices are all there, tied or not, and none
    is called `shared`. The tensors are the base's own, not copies.

    Raises:
        UserError: the base has weights, or lacks weights, or computes positions, for which we have no place.
    """
    name, config = _name(model), model.config
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
        fields = {field: getattr(config, field) for field in own_fields(DeepWideConfig)}
    encoder, decoder = model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight
    fields |= {
        "vocab_size": len(encoder),
        "decoder_vocab_size": len(decoder),
        "share_encoder_decoder_embeddings": encoder is decoder,
        "tie_word_embeddings": model.lm_head.weight is decoder,
        "lm_head_bias": "lm_head.bias" in tensors,
        "use_cache": True,  # Trainer saves False, which concerns training alone
    }
    try:
        vanilla = VanillaTransformerConfig(**fields)
    except ValueError as error:
        raise UserError(f"cannot start from {name}: {error}") from error
    _check_tensors(name, vanilla, tensors)
    return vanilla, tensors


def _positions(name: str, config: PreTrainedConfig, tensors: Tensors) -> None:
    """Bring a foreign model's position tables to ours: cut unused rows, drop what is computed."""
    if config.model_type == "m2m_100" and config.pad_token_id != 1:
        raise UserError(
            f"cannot start from {name}: M2M100 counts positions from pad_token_id + 1, and ours count from 2; its "
            f"`pad_token_id` is {config.pad_token_id} and must be 1"
        )
    for stack in ("encoder", "decoder"):
        key = f"model.{stack}.embeddings.positions.weight"
        if config.model_type in ("bart", "mbart"):
            tensors[key] = tensors[key][2:]  # fairseq's: two rows for padding, which nothing looks up
        elif config.model_type == "marian":
            table = tensors.pop(key).float().cpu()
            length, dim = table.shape
            computed = SinusoidalPositions(length, dim, "marian").table
            if (table - computed).abs().max() > 0.01:  # bfloat16 rounds by up to 0.004
                raise UserError(f"cannot start from {name}: the positions of its {stack} are not Marian's sinusoids")


def target_config(
    name: str, config_class: type[DeepWideConfig], base: VanillaTransformerConfig, overrides: dict[str, Any]
) -> DeepWideConfig:
    """The target's config: the base's fields, the family's defaults for what a single branch leaves open, overrides.

    Raises:
        UserError: an override is unknown, invalid, or would change the base's shapes or function.
    """
    known = own_fields(config_class)
    fields = {field: getattr(base, field) for field in own_fields(DeepWideConfig)}
    if base.attention_branches == base.ffn_branches == 1 and not base.drop_branch:
        fields = {field: value for field, value in fields.items() if field not in BRANCHING}
    for field, value in overrides.items():
        if field not in known:
            nearest = difflib.get_close_matches(field, known, n=1, cutoff=0)[0]
            raise UserError(f"{config_class.__name__} has no field {quote(field)}; the nearest is {nearest!r}")
        free = field in config_class.from_base_fresh or _is_free(field, base)
        if hasattr(base, field) and value != getattr(base, field) and not free:
            have = getattr(base, field)
            reason = "it was trained for that one" if field in FUNCTION else "its weights have no such shapes"
            raise UserError(
                f"`{field}` cannot be {quote(value)}: {name} has {quote(have)}, and {reason}; leave it out"
            )
    try:
        config = config_class(**fields | config_class.from_base_defaults | overrides)
    except ValueError as error:
        raise UserError(str(error)) from error
    for field in ("attention_branches", "ffn_branches"):
        have, want = getattr(base, field), getattr(config, field)
        if want % have:
            raise UserError(
                f"`{field}` cannot be {want}: {name} has {have}, and each is copied equally often; give a multiple "
                f"of {have}"
            )
    return config


def _is_free(field: str, base: VanillaTransformerConfig) -> bool:
    """Whether a field can differ from the base's without changing its function."""
    if field == "max_position_embeddings":
        return base.position_embedding_type != "learned"
    return field in FREE or (field in TYING and getattr(base, field))


def copy_branches(tensors: Tensors, base: DeepWideConfig, config: DeepWideConfig) -> Tensors:
    """Fresh tensors in which the base's branches stand side by side as often as the target's fit.

    Projections into N branches are N blocks of rows, projections out of them N blocks of columns, biases N blocks:
    with k copies `[N*D, D]` becomes `[k*N*D, D]`, and `[D, N*D]` becomes `[D, k*N*D]`. Paths are branches of the
    encoder.
    """
    branches = {
        "attn": config.attention_branches // base.attention_branches,
        "feed_forward": config.ffn_branches // base.ffn_branches,
    }
    paths = {"encoder": getattr(config, "encoder_paths", 1), "decoder": 1}

    def expand(key: str, tensor: torch.Tensor) -> torch.Tensor:
        match = re.search(
            r"(encoder|decoder)\.layers.*(attn|feed_forward)\.(?:([qkv]_proj|fc1)|out_proj|fc2)\.(?:weight|bias)$", key
        )
        if match is None:
            return tensor.clone()
        stack, sublayer, enters = match.groups()
        copies = branches[sublayer] * paths[stack]
        along_rows = enters or tensor.dim() == 1
        return tensor.repeat(*(copies, 1)[: tensor.dim()] if along_rows else (1, copies))

    return {key: expand(key, tensor.detach()) for key, tensor in tensors.items()}


def without_feed_forward(
    cls: type[PreTrainedModel], config: DepthwiseLSTMConfig, base: DeepWideConfig, tensors: Tensors
) -> Tensors:
    """What a depth-wise LSTM takes over: neither feed-forward networks, nor norms that stood behind a sub-layer."""
    with torch.device("meta"):
        own = cls(config).state_dict().keys()
    norm = re.compile(r"(_attn_layer_norm|model\.(encoder|decoder)\.layer_norm)\.")
    return {
        key: tensor
        for key, tensor in tensors.items()
        if key in own and (base.normalize_before or not norm.search(key))
    }


def fresh(cls: type[PreTrainedModel], config: DeepWideConfig, tensors: Tensors) -> Tensors:
    """What the family has and no base, as it starts: the weights and norms of paths, for example."""
    with torch.device("meta"):
        own = cls(config).state_dict().keys() - tensors.keys() - {SHARED}
    return {key: tensor for key, tensor in cls(config).state_dict().items() if key in own} if own else {}


def tie(tensors: Tensors, config: DeepWideConfig) -> Tensors:
    """The tensors that a checkpoint of the config holds: of embeddings that are tied, only their source."""
    tied = dict(tensors)
    if config.share_encoder_decoder_embeddings:
        tied[SHARED] = tied.pop(ENCODER)
        del tied[DECODER]
    if config.tie_word_embeddings:
        del tied[HEAD]
    return tied


@torch.no_grad()
def logit_difference(
    base: PreTrainedModel, other: PreTrainedModel, seed: int = 0, **base_inputs: torch.Tensor
) -> tuple[float, float]:
    """How far the logits of two models differ on a random batch of four with padding, and the largest of the first's.

    Both are called in the mode and dtype they are in; `base_inputs` are further inputs of the first.
    """
    generator = torch.Generator().manual_seed(seed)
    config, length = base.config, min(24, base.config.max_position_embeddings)

    def random_ids(embeddings: torch.nn.Embedding) -> torch.Tensor:
        ids = torch.randint(embeddings.num_embeddings - 1, (4, length), generator=generator)
        return ids + (ids >= config.pad_token_id)  # any token but padding

    ids = random_ids(base.model.encoder.embed_tokens)
    mask = torch.arange(length) < torch.tensor([length, length, -(-length // 2), 1])[:, None]
    batch = {
        "input_ids": ids.masked_fill(~mask, config.pad_token_id),
        "attention_mask": mask.long(),
        "decoder_input_ids": random_ids(base.model.decoder.embed_tokens),
    }
    logits = [
        model(**{k: v.to(model.device) for k, v in inputs.items()}).logits.cpu()
        for model, inputs in ((base, batch | base_inputs), (other, batch))
    ]
    return (logits[0] - logits[1]).abs().max().item(), logits[0].abs().max().item()


def _check_config(name: str, config: PreTrainedConfig) -> None:
    if config.model_type not in (*OURS, *FOREIGN):
        raise UserError(
            f"cannot start from {name}: its model type is {quote(config.model_type)}; accepted are {ACCEPTED}"
        )
    if not config.is_encoder_decoder:
        raise UserError(f"cannot start from {name}: it is a decoder alone, and translation needs an encoder, too")
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"cannot start from {name}: its weights are quantised; give the checkpoint it was made from")


def _check_tensors(name: str, config: VanillaTransformerConfig, tensors: Tensors) -> None:
    """Compare names and shapes with those of the vanilla model that the base is said to be."""
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    expected = {key: tensor.shape for key, tensor in model.state_dict().items() if key != SHARED}
    if surplus := tensors.keys() - expected.keys():
        raise UserError(
            f"cannot start from {name}: it has weights that a plain Transformer has not: {_some(surplus)} (merge "
            "adapters, and undo quantisation, first)"
        )
    if lacking := expected.keys() - tensors.keys():
        raise UserError(f"cannot start from {name}: it lacks weights of a plain Transformer: {_some(lacking)}")
    for key, shape in expected.items():
        if tensors[key].shape != shape:
            raise UserError(
                f"cannot start from {name}: {key} has the shape {list(tensors[key].shape)}, which its config does "
                f"not explain; {list(shape)} would be"
            )


def _warn(name: str, model: PreTrainedModel, base: DeepWideConfig, config: DeepWideConfig) -> None:
    """Log in what the result differs from the base."""
    for field in ("attention_branches", "ffn_branches"):
        have, want = getattr(base, field), getattr(config, field)
        factor = merge_scale(want, config.branch_merge) * want / have / merge_scale(have, base.branch_merge)
        if factor != 1:
            logger.warning(
                f"the result does not compute the function of {name}: with `{field}` {want}, `branch_merge` "
                f"{config.branch_merge!r} multiplies what those sub-layers give by {factor:.3g}; 'mean' preserves it"
            )
    if isinstance(config, DepthwiseLSTMConfig):
        logger.warning(
            f"the result does not compute the function of {name}: its embeddings and attentions are copied, and the "
            "LSTM that joins them is new; train it before use"
        )
    if isinstance(config, LatentDepthConfig) and not preserves_function(config):
        logger.warning(
            f"the result does not compute the function of {name}: `inference_selection` "
            f"{config.inference_selection!r} weighs each layer by less than 1, as training does with these samples; "
            "train it before use. Hard selection (`soft_selection_steps=0`) preserves it"
        )
    if isinstance(config, MultiPathConfig):
        _warn_of_paths(name, config)
    for field in ("encoder_layerdrop", "decoder_layerdrop", "layer_drop"):
        if (rate := getattr(model.config, field, 0)) and not getattr(config, "layer_drop", 0):
            logger.warning(f"{name} was trained with `{field}` {rate}; the result never drops layers")
    if config.decoder_start_token_id is None:
        logger.warning(
            f"{name} says no `decoder_start_token_id`; before training or translating, set it to the id of what "
            "begins a translation (in mBART, the target language)"
        )


def preserves_function(config: DeepWideConfig) -> bool:
    """Whether a model of this config that was made by `from_base` computes the base's function, with dropping off."""
    if isinstance(config, DepthwiseLSTMConfig):
        return False
    if isinstance(config, MultiPathConfig):
        return not config.path_norm and math.isclose(config.initial_path_weight * config.path_features, 1)
    if isinstance(config, LatentDepthConfig):
        all_layers = config.inference_selection == "hard" and config.layer_selection_init >= 0
        return all_layers and config.branch_merge == "mean"
    return config.branch_merge == "mean"


def _warn_of_paths(name: str, config: MultiPathConfig) -> None:
    if not preserves_function(config):
        weights = f"weights that add up to {config.initial_path_weight * config.path_features:.3g}"
        logger.warning(
            f"the result does not compute the function of {name}: its {config.encoder_paths} paths are joined by "
            f"{'norms that the base does not have' if config.path_norm else weights}; path_norm=False without a "
            "path_weight_init preserves it"
        )
    for field, paths in (("attention_dropout", "attentions"), ("activation_dropout", "feed-forward networks")):
        if config.encoder_paths > 1 and not getattr(config, field):
            logger.warning(f"`{field}` is 0: nothing makes the copied {paths} of a layer differ; set it above 0")


def own_fields(config_class: type[DeepWideConfig]) -> list[str]:
    """Names of the fields that a config adds to those every config of Transformers has."""
    everybody = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return [field.name for field in dataclasses.fields(config_class) if field.name not in everybody]


def _name(model: PreTrainedModel) -> str:
    where = getattr(model.config, "_name_or_path", "")
    return f"the {type(model).__name__} {where!r}" if where else f"the {type(model).__name__}"


def _some(names: Any) -> str:
    """A few of many names."""
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
