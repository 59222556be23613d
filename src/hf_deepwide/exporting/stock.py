"""Convert a model of ours to one of Transformers' own classes, if the class can compute exactly the same function.

This is the reverse of `vanilla_form`, which reads models of these classes. The result needs neither this package nor
remote code, and tools that support the class support the model.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from ..errors import UserError, quote
from ..families import FAMILIES
from ..models.configuration_base import DeepWideConfig
from ..models.configuration_vanilla_transformer import VanillaTransformerConfig
from ..models.saved_fields import FIELDS
from ..prune import is_prunable, prune
from ..vanilla_form import COPIED, ENCODER, FOREIGN, JOINTS, SHARED, Tensors, as_vanilla

STOCK = tuple(FOREIGN)
RENAMED = (
    (".feed_forward.fc", ".fc"),
    (".embeddings.positions.", ".embed_positions."),
    (".embeddings.layer_norm.", ".layernorm_embedding."),
)


def as_stock(model: PreTrainedModel, model_type: str) -> PreTrainedModel:
    """Return a model of a Transformers class that computes the same function as a model of ours.

    Args:
        model: a model of one of our families. It is not changed, and shares no memory with the result. A latent-depth
            model with one posterior is pruned.
        model_type: `"m2m_100"` (pre-norm, sinusoids), `"marian"` (post-norm, Marian's sinusoids), `"bart"` (post-norm,
            learned positions) or `"mbart"` (pre-norm, learned positions).

    Returns:
        The model in evaluation mode, with the dtype, device and generation config of `model`. Its weights are
        bit by bit those of `model`. Biases that `model` lacks are zeros.

    Raises:
        UserError: the model does not fit the class; the message names the fields, and the classes that fit.
    """
    if model_type not in FOREIGN:
        raise UserError(f"as_ is {quote(model_type)}; accepted: {', '.join(STOCK)}")
    if is_prunable(model):
        if model.config.num_posteriors > 1:
            raise UserError(
                f"the model has {model.config.num_posteriors} posteriors, and {model_type} has none; make a model of "
                "one first, by `hf-deepwide prune --language`"
            )
        model = prune(model)
    check_fit(model.config, model_type)
    config, tensors = as_vanilla(model)
    fields = {name: getattr(config, name) for name in COPIED if getattr(config, name) is not None}
    fields |= {"scale_embedding": config.scale_embedding, "tie_word_embeddings": config.tie_word_embeddings}
    fields |= {"vocab_size": config.vocab_size, "forced_eos_token_id": None}
    fields |= {f"{stack}_layerdrop": getattr(model.config, "layer_drop", 0.0) for stack in ("encoder", "decoder")}
    if model_type == "marian":
        fields["decoder_vocab_size"] = config.decoder_vocab_size
        fields["share_encoder_decoder_embeddings"] = config.share_encoder_decoder_embeddings
    fields |= {name: value for name in FIELDS if (value := getattr(model.config, name, None)) is not None}
    stock: Any = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=model.dtype)
    _load(stock, _renamed(tensors, config, model_type))
    stock.generation_config = copy.deepcopy(model.generation_config)
    return stock.to(model.device).eval()


def check_fit(config: DeepWideConfig, model_type: str) -> None:
    """Check that a class of Transformers can hold models of a config.

    Raises:
        UserError: the class cannot; the message names the fields, and the classes that can.
    """
    if reasons := list(_misfits(config, model_type)):
        fitting = [other for other in STOCK if not any(_misfits(config, other))]
        hint = f"accepted: {' or '.join(fitting)}" if fitting else "it fits none of " + ", ".join(STOCK)
        raise UserError(f"the model cannot be saved as {model_type}: {'; '.join(reasons)}; {hint}")


def _misfits(config: DeepWideConfig, model_type: str) -> Iterator[str]:
    """Yield a reason for each field in which a config differs from the fixed properties of a class."""
    if not FAMILIES[config.model_type].is_base:
        yield f"it is a {config.model_type}, and the class has plain layers alone"
        return
    wanted = FOREIGN[model_type]._asdict() | {
        "attention_branches": 1,
        "ffn_branches": 1,
        "max_relative_position": None,
    }
    wanted |= {field: getattr(VanillaTransformerConfig, field) for field in JOINTS}
    if model_type == "m2m_100":  # has no bias of the logits, and numbers positions from the padding's id + 1
        wanted |= {"lm_head_bias": False, "pad_token_id": 1}
        if config.decoder_start_token_id == config.pad_token_id:
            yield "`decoder_start_token_id` is that of padding, which has no position there"
    if model_type != "marian":
        wanted["decoder_vocab_size"] = config.vocab_size
    for field, value in wanted.items():
        if (have := getattr(config, field, value)) != value:
            yield f"`{field}` is {quote(have)}, but there it is {quote(value)}"
    shares, ties = config.share_encoder_decoder_embeddings, config.tie_word_embeddings
    if shares != ties and not (model_type == "marian" and ties):
        yield (
            f"`share_encoder_decoder_embeddings` is {shares} and `tie_word_embeddings` is {ties}, and there the three "
            "embedding matrices are one or three"
        )


def _renamed(tensors: Tensors, config: DeepWideConfig, model_type: str) -> Tensors:
    """Return a vanilla model's tensors under the names of a Transformers class, with the tensors it also needs."""
    result = {}
    for key, tensor in tensors.items():
        for ours, theirs in RENAMED:
            key = key.replace(ours, theirs)
        result[key] = tensor.detach()
    if "lm_head.bias" in result:
        result["final_logits_bias"] = result.pop("lm_head.bias")[None]
    for stack in ("encoder", "decoder"):
        key = f"model.{stack}.embed_positions.weight"
        if key in result:  # as in fairseq, the table begins with two rows that no token looks up
            result[key] = torch.cat([torch.zeros_like(result[key][:2]), result[key]])
    if not config.attention_bias:
        for key in [key for key in result if key.endswith("_proj.weight")]:
            result[key.replace(".weight", ".bias")] = torch.zeros_like(result[key][:, 0])
    if config.share_encoder_decoder_embeddings or model_type != "marian":
        result[SHARED] = result[ENCODER]  # the class reads this key only if matrices are tied
    return result


@torch.no_grad()
def _load(stock: PreTrainedModel, tensors: Tensors) -> None:
    """Copy tensors into a model.

    Raises:
        RuntimeError: a tensor has no place in the model, or a weight gets no tensor; this is a bug of this package.
    """
    own = stock.state_dict().keys()
    made = {key for key in own if key.endswith("embed_positions.weight") or key == "final_logits_bias"}
    if different := (tensors.keys() - own) | (own - tensors.keys() - made):
        raise RuntimeError(f"{type(stock).__name__} and the model differ in {', '.join(sorted(different))}")
    stock.load_state_dict(tensors, strict=False)
