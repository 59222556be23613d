"""Make a plain model of the layers that a posterior of a latent-depth model chose (Li et al. 2020, section 2.1).

    plain = prune(model)                               # one posterior
    plain = prune(model, "de")                         # one of several, by its name in `posterior_names` or its index
    small = prune(model, selection="hard")             # drops the layers that are not chosen
    same_depth = prune(model, selection="tempered")    # keeps all layers, with their weights folded in

The result is a `vanilla_transformer` without posteriors. With fewer layers it is smaller and faster. By default,
layers are selected as in the model's own evaluation, so the result computes the same function. A model that was
trained with soft samples therefore keeps all its layers.
"""

import copy
import re
from typing import Any

import torch
from transformers import PreTrainedModel

from .errors import UserError, quote
from .models.configuration_base import DeepWideConfig
from .models.configuration_latent_depth import LatentDepthConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.language_pairs import pairs_of_posterior
from .models.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .models.saved_fields import keep_fields
from .vanilla_form import SHARED, Tensors, own_fields, tie
from .weight_checks import check_weight_names

SELECTIONS = ("hard", "soft", "tempered")
LAYER = re.compile(r"model\.(encoder|decoder)\.layers\.(\d+)\.")
ENDS_SUBLAYER = re.compile(r"(attn\.out_proj|feed_forward\.fc2)\.(weight|bias)$")  # the tensors that z multiplies


def prune(
    model: PreTrainedModel, language: int | str | None = None, *, selection: str | None = None
) -> VanillaTransformerForConditionalGeneration:
    """Return a vanilla model that computes the function of a latent-depth model in evaluation, for one posterior.

    Hard selection keeps the layers that the posterior selects and drops the others. Soft selection keeps all layers.
    It multiplies the last projection of each sub-layer (`out_proj` and `fc2`, weights and biases) by the layer's z.
    A model without LayerNorms becomes a model with `residual="rezero"`, whose residual weights are z.

    Args:
        model: a `LatentDepthForConditionalGeneration`. It is not changed and shares no memory with the result. The
            result has the model's dtype, device and generation config, and is in evaluation mode.
        language: index or name of the posterior; not needed if the model has only one.
        selection: one of the values of `inference_selection`; None: the model's own value.

    Raises:
        UserError: the model is of another kind or has an adapter; the posterior or the selection does not exist; or a
            stack would have no layers.
    """
    _check_model(model)
    config = model.config
    selection = selection or config.inference_selection
    if selection not in SELECTIONS:
        raise UserError(f"selection is {quote(selection)}; accepted: {', '.join(SELECTIONS)}")
    posterior = posterior_index(config, language)
    weights = layer_weights(model, posterior, selection)
    kept = {stack: [layer for layer, z in enumerate(each) if z > 0] for stack, each in weights.items()}
    for stack, layers in kept.items():
        if not layers:
            raise UserError(
                f"posterior {posterior} selects no layer of the {stack}, and a plain Transformer needs one; train for "
                "longer, with a larger target depth, or keep all layers with the selection 'tempered'"
            )
    plain = plain_config(config, posterior, kept)
    tensors = tie(plain_tensors(model, weights, kept), plain)
    pruned = VanillaTransformerForConditionalGeneration.from_pretrained(
        None, config=plain, state_dict=tensors, dtype=model.dtype
    )
    pruned.generation_config = copy.deepcopy(model.generation_config)
    return pruned.to(model.device)


def _check_model(model: Any) -> None:
    """Refuse a model that is no latent-depth translation model, and a model with an adapter."""
    if not is_prunable(model):
        raise UserError(
            f"cannot prune a {type(model).__name__}: only a LatentDepthForConditionalGeneration can be, loaded by "
            "from_pretrained"
        )
    try:
        check_weight_names(model)
    except ValueError as error:
        raise UserError(f"cannot prune the {type(model).__name__}: {error}") from error


def layer_weights(model: PreTrainedModel, posterior: int, selection: str) -> dict[str, list[float]]:
    """The z of each encoder and decoder layer in evaluation; 1 for the layers of a stack without a selection."""
    config, selections = model.config, model.layer_selections
    return {
        stack: selections[stack].evaluation_weights(selection)[posterior].tolist()
        if stack in selections
        else [1.0] * getattr(config, f"{stack}_layers")
        for stack in ("encoder", "decoder")
    }


def plain_config(config: LatentDepthConfig, posterior: int, kept: dict[str, list[int]]) -> VanillaTransformerConfig:
    """The config of a vanilla model with the kept layers; its language pairs are the posterior's."""
    fields = {name: getattr(config, name) for name in own_fields(DeepWideConfig)}
    depths = {f"{stack}_layers": len(layers) for stack, layers in kept.items()}
    joined: dict[str, Any] = {} if config.layer_norms else {"residual": "rezero", "normalize_before": False}
    plain = VanillaTransformerConfig(**fields | depths | joined)
    keep_fields(config, plain)
    if getattr(config, "translation_pairs", None):  # `keep_fields` also copied other posteriors' pairs
        plain.translation_pairs = pairs_of_posterior(config, posterior) or None
    return plain


def plain_tensors(model: PreTrainedModel, weights: dict[str, list[float]], kept: dict[str, list[int]]) -> Tensors:
    """The tensors of the vanilla model: the kept layers are renumbered, and z is multiplied into their weights.

    Without LayerNorms, z is stored beside the weights, as `residual_weight`.
    """
    has_norms, tensors = model.config.layer_norms, {}
    for name, tensor in model.state_dict().items():
        match = LAYER.match(name)
        if match is None:
            if name != SHARED and not name.endswith("layer_selection.layer_logits"):
                tensors[name] = tensor.detach().clone()
            continue
        stack, layer = match[1], int(match[2])
        if layer in kept[stack]:
            z = weights[stack][layer]
            place = f"model.{stack}.layers.{kept[stack].index(layer)}."
            folded = has_norms and ENDS_SUBLAYER.search(name)
            tensors[place + name[match.end() :]] = tensor.detach() * (z if folded else 1.0)
            if not has_norms:
                tensors[place + "residual_weight"] = torch.tensor([z], dtype=torch.float64)
    return tensors


def is_prunable(model: Any) -> bool:
    """Return whether an object is a latent-depth translation model."""
    whole = isinstance(model, PreTrainedModel) and hasattr(model, "model") and hasattr(model, "lm_head")
    return whole and model.config.model_type == LatentDepthConfig.model_type


def posterior_index(config: LatentDepthConfig, language: int | str | None) -> int:
    """The index of a posterior that is given by index or name.

    Raises:
        UserError: there is no such posterior, or `language` is None and there are several.
    """
    count, names = config.num_posteriors, config.posterior_names or []
    accepted = f"0 to {count - 1}" + (f", or one of {', '.join(names)}" if names else "")
    if language is None:
        if count > 1:
            raise UserError(f"the model has {count} posteriors; say which language: {accepted}")
        return 0
    if language in names:
        return names.index(language)
    index = int(language) if str(language).isdecimal() else -1
    if not 0 <= index < count:
        accepted = accepted if count > 1 else "0; a model of one posterior needs no language"
        raise UserError(f"there is no posterior {quote(language)}; accepted: {accepted}")
    return index


def kept_layers(model: PreTrainedModel, language: int | str | None = None) -> dict[str, list[int]]:
    """The layers of each latent stack that a posterior uses in evaluation."""
    posterior = posterior_index(model.config, language)
    return {
        stack: torch.nonzero(selection.evaluation_weights()[posterior]).flatten().tolist()
        for stack, selection in model.layer_selections.items()
    }
