"""Make the config of a fairseq checkpoint: sizes come from its tensors, and all else from its arguments."""

import logging
from typing import Any

from ..errors import UserError, one_line, quote
from ..families import FAMILIES
from ..models.configuration_base import DeepWideConfig
from ..vanilla_form import DECODER, ENCODER, HEAD, Tensors

logger = logging.getLogger(__name__)

ACTIVATIONS = {  # fairseq's name to our name
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "tanh": "tanh",
    "linear": "linear",
    "swish": "swish",
}
# Arguments that change a model's function or input but not its tensors, with the values that our models support.
ONLY: dict[str, tuple[Any, ...]] = {
    # other tasks pass the languages to their models in other ways, or end sentences with other tokens
    "task": ("translation", "multilingual_translation", "multilingual_translation_latent_depth"),
    "no_token_positional_embeddings": (False,),
    "no_cross_attention": (False,),
    "cross_self_attention": (False,),
    "join_layer": (False,),
    "encoder_layers_to_keep": (None,),
    "decoder_layers_to_keep": (None,),
}
LOGITS = "model.{}.layer_selection.layer_logits"
PRIORS = {"uniform": "uniform", "agged_posterior": "aggregated"}


def config_of(arguments: dict[str, Any], tensors: Tensors) -> DeepWideConfig:
    """Return the config of the model: vanilla, MAT or latent depth.

    Args:
        arguments: fairseq's arguments.
        tensors: the weights under our names. Layer logits of latent depth have a row for each posterior.

    Raises:
        UserError: an argument or a tensor is missing, or an argument has a value that our models do not support.
    """
    given = Given(arguments)
    for name, accepted in ONLY.items():
        if (value := given(name, accepted[0])) not in accepted:
            raise UserError(f"its argument {name} is {quote(value)}, which our models do not have")
    latent = {stack: LOGITS.format(stack) in tensors for stack in ("encoder", "decoder")}
    branched = arguments.get("branch_dropout") is not None or arguments.get("encoder_branches") is not None
    fields = _shared(given, tensors)
    if any(latent.values()):
        family, more = "latent_depth", _latent(given, tensors, latent)
    elif branched:
        family, more = "mat", _branches(given)
    else:
        family, more = "vanilla_transformer", _layer_drop(given)
    try:
        return FAMILIES[family].config(**fields, **more)
    except ValueError as error:
        raise UserError(f"it cannot be a {family}: {one_line(error, 400)}") from error


class Given:
    """fairseq's arguments. An argument that is missing or None has the default of fairseq's base architecture."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def __call__(self, name: str, default: Any) -> Any:
        """Return the value of an argument.

        Raises:
            UserError: the value has another type than `default`.
        """
        value = self.arguments.get(name)
        if value is None:
            return default
        accepted = (int, float) if isinstance(default, float) else type(default)
        if default is not None and not (isinstance(value, accepted) and isinstance(value, bool) == (accepted is bool)):
            raise UserError(f"its argument {name} is {quote(value)}; {quote(default)} would be of the right type")
        return value

    def both(self, name: str, default: Any) -> Any:
        """Return the value of an argument that each stack has.

        Raises:
            UserError: the two values differ, or have another type than `default`.
        """
        encoder, decoder = self(f"encoder_{name}", default), self(f"decoder_{name}", default)
        if encoder != decoder:
            raise UserError(
                f"its arguments encoder_{name} and decoder_{name} are {quote(encoder)} and {quote(decoder)}; our "
                "models have one value for both"
            )
        return encoder


def _shared(given: Given, tensors: Tensors) -> dict[str, Any]:
    """Return the fields that the configs of all families have."""
    fields: dict[str, Any] = {}
    for stack in ("encoder", "decoder"):
        prefix = f"model.{stack}.layers."
        layers = {key.removeprefix(prefix).partition(".")[0] for key in tensors if key.startswith(prefix)}
        branches = given(f"{stack}_pffn_branches", given(f"{stack}_branches", 1))
        bias = tensors.get(f"{prefix}0.feed_forward.fc1.bias")
        if bias is None or bias.dim() != 1 or not 0 < branches <= len(bias):
            raise UserError(f"it has no {stack} layers with a feed-forward network, or wrong numbers of branches")
        heads = given(f"{stack}_attention_heads", None)
        if type(heads) is not int:
            raise UserError(f"its argument {stack}_attention_heads is {quote(heads)}, and no tensor shows the number")
        fields[f"{stack}_layers"] = len(layers)
        fields[f"{stack}_ffn_dim"] = len(bias) // branches
        fields[f"{stack}_attention_heads"] = heads
    missing = [key for key in (ENCODER, DECODER) if key not in tensors or tensors[key].dim() != 2]
    if missing:
        raise UserError(f"it has no embeddings {missing[0]}")
    activation = given("activation_fn", "relu")
    if activation not in ACTIVATIONS:
        raise UserError(f"its activation_fn is {quote(activation)}; accepted: {', '.join(ACTIVATIONS)}")
    learned = bool(given.both("learned_pos", False))
    return fields | {
        "vocab_size": len(tensors[ENCODER]),
        "decoder_vocab_size": len(tensors[DECODER]),
        "d_model": tensors[ENCODER].shape[1],
        "dropout": given("dropout", 0.1),
        "attention_dropout": given("attention_dropout", 0.0),
        "activation_dropout": given("activation_dropout", 0.0) or given("relu_dropout", 0.0),
        "activation_function": ACTIVATIONS[activation],
        "position_embedding_type": "learned" if learned else "sinusoidal",
        "max_position_embeddings": _longest(given, tensors, learned),
        "scale_embedding": not given("no_scale_embedding", False),
        "layernorm_embedding": bool(given("layernorm_embedding", False)),
        "normalize_before": bool(given.both("normalize_before", False)),
        "share_encoder_decoder_embeddings": bool(given("share_all_embeddings", False)),
        "tie_word_embeddings": bool(
            given("share_all_embeddings", False) or given("share_decoder_input_output_embed", False)
        ),
        "lm_head_bias": "lm_head.bias" in tensors,
    }


def _longest(given: Given, tensors: Tensors, learned: bool) -> int:
    """Return the longest sentence in tokens: the rows of learned positions; for computed positions, an argument."""
    if not learned:
        return max(given("max_source_positions", 1024), given("max_target_positions", 1024))
    tables = [tensors.get(f"model.{stack}.embeddings.positions.weight") for stack in ("encoder", "decoder")]
    lengths = [0 if table is None else len(table) for table in tables]
    if not lengths[0] or lengths[0] != lengths[1]:
        raise UserError(
            f"its learned positions are {lengths[0]} of the encoder and {lengths[1]} of the decoder; our models have "
            "as many in both"
        )
    return lengths[0]


def _layer_drop(given: Given) -> dict[str, Any]:
    """Return the rate of LayerDrop, which our models share between both stacks; {} if fairseq's stacks differ."""
    rates = [given(f"{stack}_layerdrop", 0.0) for stack in ("encoder", "decoder")]
    if rates[0] != rates[1]:
        logger.warning("the stacks were trained with LayerDrop of %s and %s; the result drops no layers", *rates)
        return {}
    return {"layer_drop": rates[0]}


def _branches(given: Given) -> dict[str, Any]:
    """Return the fields of MAT, from the arguments of the MAT fork."""
    return {
        "attention_branches": given.both("branches", 1),
        "ffn_branches": given.both("pffn_branches", given.both("branches", 1)),
        "join_ffn": bool(given("join_pffn", False)),
        "drop_branch": given("branch_dropout", 0.1),
        "ffn_drop_branch": given("pffn_branch_dropout", given("branch_dropout", 0.1)),
        "drop_unit": "chunk" if given("enable_head_dropout", False) else "branch",
        "branch_merge": "double_mean",
    }


def _latent(given: Given, tensors: Tensors, latent: dict[str, bool]) -> dict[str, Any]:
    """Return the fields of latent depth, with the losses of the released code."""
    prior = given("prior", "uniform")
    if prior not in PRIORS:
        raise UserError(f"its prior is {quote(prior)}; accepted: {', '.join(PRIORS)}")
    target = given("target_layers", -1)
    posteriors = {len(tensors[LOGITS.format(stack)]) for stack in latent if latent[stack]}
    if len(posteriors) > 1:
        raise UserError(f"its stacks have {sorted(posteriors)} posteriors, and our models have as many in both")
    depth = {
        **{f"target_{stack}_layers": target for stack in latent if latent[stack]},
        "target_depth_anneal_steps": given("anneal_updates", 1),
        "target_depth_weight": given("share_weight", 0.0),
        "layer_sharing_weight": given("share_weight", 0.0),
    }
    return {
        **{f"latent_{stack}": chosen for stack, chosen in latent.items()},
        **(depth if target > 0 else {}),
        "num_posteriors": posteriors.pop(),
        "gumbel_temperature": given("sampling_tau", 5.0),
        "soft_selection_steps": given("soft_update", 1),
        "inference_selection": "tempered" if given("soft_select", False) else "hard",
        "kl_estimator": "fairseq",
        "kl_reduction": "mean",
        "kl_weight": given("sparsity_weight", 0.0),
        "kl_anneal_steps": given("anneal_updates", 1),
        "layer_prior": PRIORS[prior],
    }


def check_tying(config: DeepWideConfig, tensors: Tensors) -> None:
    """Refuse matrices that the arguments share but that differ. Add a tied output matrix that the file lacks.

    Raises:
        UserError: shared matrices differ.
    """
    if config.tie_word_embeddings:
        tensors.setdefault(HEAD, tensors[DECODER])
    pairs = [(DECODER, ENCODER)] * config.share_encoder_decoder_embeddings
    pairs += [(HEAD, DECODER)] * config.tie_word_embeddings
    for one, other in pairs:
        same = tensors[one] is tensors[other] or (
            tensors[one].shape == tensors[other].shape and bool((tensors[one] == tensors[other]).all())
        )
        if not same:
            raise UserError(
                f"its arguments share {one} and {other}, and they differ; set share_all_embeddings and "
                "share_decoder_input_output_embed in its arguments to say so"
            )
