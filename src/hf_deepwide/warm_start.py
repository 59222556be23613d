"""Proximal initialisation: a wide model that starts with the function of its trained base (MAT, section 3.3).

A base is read in two steps. `vanilla_form` expresses it as a vanilla Transformer of ours, whatever library it comes
from. Then the target family makes its own weights from these tensors, by the rules in its row in `families`. By
default, each branch becomes a bit-identical copy of the base's sub-layer. With all dropping off, the mean over
branches is then the base's function. Without drop-branch and attention dropout, the copies receive equal gradients,
except for rounding: only dropping makes the branches differ.

The function is preserved for real tokens, as marked by attention masks with padding on the right. A family that joins
layers in another way does not preserve it. Its row gives the reason (`Start.losses`).
"""

import copy
import difflib
import logging
import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from .errors import UserError, quote, some
from .families import Start, family_of
from .models.branches import merge_scale
from .models.configuration_base import DeepWideConfig
from .models.configuration_vanilla_transformer import USED_WITH, VanillaTransformerConfig
from .models.joined_layers import Join
from .models.saved_fields import keep_fields
from .vanilla_form import SHARED, Tensors, as_vanilla, load_base, name_of, own_fields, tie

logger = logging.getLogger(__name__)

# Fields that an override may change without changing the base's function …
BRANCHING = (
    "attention_branches",
    "ffn_branches",
    "join_ffn",
    "drop_branch",
    "ffn_drop_branch",
    "drop_granularity",
    "drop_unit",
    "branch_merge",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "decoder_start_token_id")
DROPPING = ("dropout", "attention_dropout", "activation_dropout", "layer_drop")
POSTERIORS = ("num_posteriors", "posterior_names")  # a base has none
# USED_WITH: options of layers that no base has. The config refuses them unless the result has such layers.
FREE = {*BRANCHING, *TOKEN_IDS, *DROPPING, *POSTERIORS, *USED_WITH, "init_std", "use_cache"} - {"join_ffn"}
TYING = ("tie_word_embeddings", "share_encoder_decoder_embeddings")  # True may become False; the matrix is then copied
# … and fields whose other values would fit the base's weights but change the function. Other values of the remaining
# fields would not fit the weights.
FUNCTION = {
    "encoder_attention_heads",
    "decoder_attention_heads",
    "activation_function",
    "position_embedding_type",
    "scale_embedding",
    "normalize_before",
    "residual",
    "layer_aggregation",
    "join_ffn",
    "decoder_attention",
    "layer_form",
    "language_aware",
    "pad_token_id",
}
# Part of a sub-layer's keys to: the field that counts its branches, its own dropout, and its name in a message.
SUBLAYERS = {
    "attn": ("attention_branches", "attention_dropout", "attentions"),
    "feed_forward": ("ffn_branches", "activation_dropout", "feed-forward networks"),
}


def from_base(cls: type[PreTrainedModel], base: Any, **config_overrides: Any) -> PreTrainedModel:
    """Return a model of the family `cls` that computes the function of a trained base (MAT, section 3.3).

    The base is not changed and shares no memory with the result. The result has the base's dtype, device and
    generation config, and is in evaluation mode. Config fields come from the base, except the fields in
    `config_overrides`. If the base has a single branch and drops none, the fields of branches have the family's
    defaults.

    Weights that the base does not have, such as the LSTM of a depth-wise LSTM, start as in a new model. If the result
    does not compute the base's function, a warning is logged with the reason.

    Args:
        cls: a `…ForConditionalGeneration` of this package.
        base: a folder, a Hub id, or a loaded model: of a family of ours whose row has `is_base`, or Marian, BART,
            mBART, M2M100, NLLB.
        config_overrides: fields that do not change the function: branches and dropping, dropout rates, token ids
            other than padding, untying of embeddings, and the longest sequence if positions are computed. A vanilla
            model from a pre-norm base can also be joined by `residual="attention"`, `"hyper"` or `"mhc"`.
            `branch_merge="double_mean"` divides the sum of the copies by N**2, as in the released code. This changes
            the function, and is logged as a warning.

    Raises:
        UserError: nothing can be loaded from `base`; the base has another architecture or is quantised; or an override
            is unknown or contradicts the base.
    """
    model, start = load_base(base), start_of(cls.config_class)
    name = name_of(model)
    base_config, tensors = as_vanilla(model)
    config = target_config(name, cls.config_class, base_config, config_overrides)
    keep_fields(model.config, config)
    reasons = losses(base_config, config)
    with torch.device("meta"):
        own = cls(config).state_dict().keys()
    used = {key: tensor for key, tensor in tensors.items() if start.takes(key, base_config)}
    if (surplus := used.keys() - own) and not reasons:
        raise UserError(
            f"cannot start from {name}: a {cls.__name__} has no place for {some(surplus)}, and its family gives no "
            "reason; let `takes` and `losses` in its row of FAMILIES say so"
        )
    tensors = copy_branches({key: used[key] for key in used if key in own}, base_config, config)
    if lacking := own - tensors.keys() - {SHARED}:  # weights that the base lacks start as in a new model
        fresh = cls(config)
        for module in fresh.modules():
            if isinstance(module, Join):
                module.initialise_plainly(config)
        tensors |= {key: tensor for key, tensor in fresh.state_dict().items() if key in lacking}
    result = cls.from_pretrained(None, config=config, state_dict=tie(tensors, config), dtype=model.dtype)
    result.generation_config = copy.deepcopy(model.generation_config)
    for field in TOKEN_IDS:
        if field in config_overrides:
            setattr(result.generation_config, field, config_overrides[field])
    for reason in reasons:
        logger.warning(f"the result does not compute the function of {name}: {reason}")
    _warn(name, model, base_config, config)
    return result.to(model.device)


def start_of(config_class: type[DeepWideConfig]) -> Start:
    """The rules by which models of a config class start from a base; the default rules for a class without a row."""
    family = family_of(config_class)
    return Start() if family is None else family.start


def losses(base: VanillaTransformerConfig, config: DeepWideConfig) -> list[str]:
    """Reasons why a model of `config` that starts from `base` does not compute the base's function, dropping off."""
    return merge_losses(base, config) + start_of(type(config)).losses(base, config)


def merge_losses(base: Any, config: Any) -> list[str]:
    """The reasons that come from the merging of branches.

    Both configs need the fields for the numbers of branches and `branch_merge`, and `config` needs `join_ffn`.
    """
    reasons = []
    for field, *_ in SUBLAYERS.values():
        have, want = getattr(base, field), getattr(config, field)
        factor = merge_scale(want, config.branch_merge) * want / have / merge_scale(have, base.branch_merge)
        if not math.isclose(factor, 1):
            inside = "" if config.join_ffn or field != "ffn_branches" else ", and the input of their activation,"
            reasons.append(
                f"with `{field}` {want}, `branch_merge` {config.branch_merge!r} multiplies the output of these "
                f"sub-layers{inside} by {factor:.3g}; 'mean' preserves it"
            )
    return reasons


def preserves_function(config: DeepWideConfig, base: VanillaTransformerConfig | None = None) -> bool:
    """Return whether a model that `from_base` makes computes the base's function, with all dropping off.

    Args:
        config: the config of the result.
        base: the config of the base, in vanilla form; None: a base without branches.
    """
    return not losses(VanillaTransformerConfig() if base is None else base, config)


def target_config(
    name: str, config_class: type[DeepWideConfig], base: VanillaTransformerConfig, overrides: dict[str, Any]
) -> DeepWideConfig:
    """The target's config: the base's fields, the family's defaults for its branches (see `inherited`), and overrides.

    Raises:
        UserError: an override is unknown, invalid, or would change the base's shapes or function.
    """
    known, start = own_fields(config_class), start_of(config_class)
    fields = inherited(base, own_fields(DeepWideConfig))
    for field, value in overrides.items():
        check_field(config_class, field, known)
        free = field in start.free or value in start.neutral.get(field, ()) or _is_free(field, base)
        if hasattr(base, field) and value != getattr(base, field) and not free:
            have = getattr(base, field)
            raise UserError(
                f"`{field}` cannot be {quote(value)}: {name} has {quote(have)}, and {_reason(field)}; leave it out"
            )
    try:
        config = config_class(**{**fields, **start.defaults, **overrides})
    except ValueError as error:
        if not base.normalize_before and "normalize_before" in str(error):
            raise UserError(
                f"{name} is post-norm, and a {config_class.model_type} with these options must be pre-norm ({error}); "
                "train a base with normalize_before: true"
            ) from error
        raise UserError(str(error)) from error
    check_copies(name, base, config)
    return config


def inherited(base: Any, fields: Iterable[str]) -> dict[str, Any]:
    """The base's values of `fields`, without fields of branches if the base has a single branch and drops none."""
    plain = base.attention_branches == base.ffn_branches == 1 and not (base.drop_branch or base.ffn_drop_branch)
    return {field: getattr(base, field) for field in fields if not (plain and field in BRANCHING)}


def check_field(config_class: type, field: str, known: Iterable[str]) -> None:
    """Check that an override names a field of the config.

    Raises:
        UserError: there is no such field; the message names the most similar field.
    """
    known = list(known)
    if field not in known:
        nearest = difflib.get_close_matches(field, known, n=1)
        instead = f"the nearest is {nearest[0]!r}" if nearest else f"`help({config_class.__name__})` lists all"
        raise UserError(f"{config_class.__name__} has no field {quote(field)}; {instead}")


def check_copies(name: str, base: Any, config: Any) -> None:
    """Check that every branch of the base can be copied equally often.

    Raises:
        UserError: a number of branches is no multiple of the base's number.
    """
    for field, *_ in SUBLAYERS.values():
        have, want = getattr(base, field), getattr(config, field)
        if want % have:
            raise UserError(
                f"`{field}` cannot be {want}: {name} has {have}, and each is copied equally often; give a multiple "
                f"of {have}"
            )


def _reason(field: str) -> str:
    """The reason why a field cannot differ from the base's."""
    if field == "initialization":
        return "its weights are copied, so that no rule starts them"
    return "it was trained for that one" if field in FUNCTION else "its weights have no such shapes"


def _is_free(field: str, base: VanillaTransformerConfig) -> bool:
    """Return whether a field can differ from the base's without a change of the function."""
    if field == "max_position_embeddings":
        return base.position_embedding_type != "learned"
    if field == "join_ffn":
        return base.ffn_branches == 1
    return field in FREE or (field in TYING and getattr(base, field))


def copy_branches(tensors: Tensors, base: DeepWideConfig, config: DeepWideConfig) -> Tensors:
    """Return new tensors in which the base's branches are repeated until they fill the target's branches.

    Projections into N branches are N blocks of rows, projections out of them N blocks of columns. With k copies
    `[N*D, D]` becomes `[k*N*D, D]`, and `[D, N*D]` becomes `[D, k*N*D]`. Biases are repeated like rows.
    """

    start = start_of(type(config))

    def expand(key: str, tensor: torch.Tensor) -> torch.Tensor:
        match = re.search(
            r"(encoder|decoder)\.layers.*(attn|feed_forward)\."
            r"(?:([qkv]_proj|relative_keys|fc1)|out_proj|fc2)\.(?:weight|bias)$",
            key,
        )
        if match is None:
            return tensor.clone()
        stack, sublayer, enters = match.groups()
        copies = start.copies(config, stack, sublayer) // getattr(base, SUBLAYERS[sublayer][0])
        along_rows = enters or tensor.dim() == 1
        return tensor.repeat(*(copies, 1)[: tensor.dim()] if along_rows else (1, copies))

    return {key: expand(key, tensor.detach()) for key, tensor in tensors.items()}


@torch.no_grad()
def logit_difference(
    base: PreTrainedModel, other: PreTrainedModel, seed: int = 0, **base_inputs: torch.Tensor
) -> tuple[float, float]:
    """Compare the logits of two models on a random batch of four sentences with padding.

    Both models keep their mode and dtype.

    Args:
        base: the first model.
        other: the second model.
        seed: the seed of the batch.
        base_inputs: further inputs of the first model.

    Returns:
        The largest absolute difference of the logits, and the largest absolute logit of the first model.
    """
    generator, config = torch.Generator().manual_seed(seed), base.config
    length = min(24, *(model.config.max_position_embeddings for model in (base, other)))

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


def _warn(name: str, model: PreTrainedModel, base: VanillaTransformerConfig, config: DeepWideConfig) -> None:
    """Log warnings about settings with which training the result may go wrong or differ from training the base."""
    start = start_of(type(config))
    ffn = "drop_branch" if config.ffn_drop_branch is None else "ffn_drop_branch"
    for (sublayer, (branches, dropout, plural)), drop in zip(SUBLAYERS.items(), ("drop_branch", ffn), strict=True):
        copies = max(start.copies(config, stack, sublayer) for stack in ("encoder", "decoder"))
        # a Multi-Path model has more paths than branches, and its paths are not dropped
        zero = [dropout] if copies > getattr(config, branches) else [drop, dropout]
        if copies > getattr(base, branches) and not any(getattr(config, field) for field in zero):
            fields = " and ".join(f"`{field}`" for field in zero)
            verb, what = ("is", "it") if len(zero) == 1 else ("are", f"`{drop}`")
            logger.warning(
                f"{fields} {verb} 0: nothing makes the copied {plural} of a layer differ; set {what} above 0"
            )
    for field in ("encoder_layerdrop", "decoder_layerdrop", "layer_drop"):
        if (rate := getattr(model.config, field, 0)) and not getattr(config, "layer_drop", 0):
            logger.warning(f"{name} was trained with `{field}` {rate}; the result never drops layers")
    if config.decoder_start_token_id is None:
        logger.warning(
            f"{name} says no `decoder_start_token_id`; before training or translating, set it to the id of what "
            "begins a translation (in mBART, the target language)"
        )
