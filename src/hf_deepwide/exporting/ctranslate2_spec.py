"""Convert a model of ours to a CTranslate2 specification: the same function in the engine's own layers.

In the engine each sub-layer has one wide attention or one wide feed-forward network. So branches are joined. N
branches of M heads become N * M heads, with the scale of one branch's heads. The weight of each branch is multiplied
into its output projection, and the branches' biases are summed. This module imports ctranslate2, so
`ctranslate2_folder` imports it only during an export.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from ctranslate2.converters import utils
from ctranslate2.specs import TransformerSpec, common_spec, transformer_spec
from ctranslate2.specs.model_spec import LayerSpec
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError, quote
from ..models.branches import BranchSum
from ..models.configuration_depthwise_lstm import DepthwiseLSTMConfig
from ..models.configuration_multipath_transformer import MultiPathConfig
from ..models.embeddings import Embeddings
from ..models.feed_forward import MultiBranchFeedForward
from ..models.language_pairs import language_ids, speaking, target_settings
from ..models.modeling_multipath_transformer import MultiPathEncoderLayer, PathSum
from ..models.residuals import DeepNorm

Activation = common_spec.Activation
ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELUTanh,
    "gelu_fast": Activation.GELUTanh,
    "gelu_accurate": Activation.GELUTanh,
    "gelu_pytorch_tanh": Activation.GELUTanh,
    "gelu_python_tanh": Activation.GELUTanh,
    "quick_gelu": Activation.GELUSigmoid,
    "silu": Activation.SWISH,
    "swish": Activation.SWISH,
    "tanh": Activation.Tanh,
    "sigmoid": Activation.Sigmoid,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "lm_head")
INSTEAD = "use `generate`, or export it to ONNX (--to onnx), which takes nearly all models"


def check_expressible(model: PreTrainedModel) -> None:
    """Check that the engine has every part of a model.

    Raises:
        UserError: the engine lacks a part; the message names the part and a remedy.
    """
    if reasons := list(_inexpressible(model)) or list(_replaced(model)):
        instead = "use `generate`" if model.config.slots_per_layer > 1 else INSTEAD
        raise UserError(f"CTranslate2 cannot run this model: {'; '.join(reasons)}; {instead}")


def _inexpressible(model: PreTrainedModel) -> Iterator[str]:
    """Yield the reasons why the engine cannot compute a model's function."""
    config = model.config
    if isinstance(config, DepthwiseLSTMConfig):
        yield "its layers are joined by an LSTM, and the engine only adds a sub-layer to its input"
        return
    if (residual := getattr(config, "residual", "add")) == "rezero":
        yield (
            "it has no LayerNorms (`residual: rezero`, or `layer_norms: false` of latent_depth), and the engine's "
            "sub-layers have them"
        )
    elif residual not in ("add", "deepnorm"):
        yield f"`residual` is {residual!r}, and the engine's sub-layers are added to their inputs, pre- or post-norm"
    if (aggregation := getattr(config, "layer_aggregation", None)) is not None:
        yield f"`layer_aggregation` is {aggregation!r}, and the engine's layers read the layer before them alone"
    if (solver := getattr(config, "encoder_solver", None)) is not None:
        yield f"`encoder_solver` is {solver!r}, and the engine evaluates each layer once"
    if getattr(config, "decoder_attention", "separate") != "separate":
        yield "its decoder layers have one attention (`decoder_attention`), and the engine's have two"
    if (form := getattr(config, "layer_form", "transformer")) != "transformer":
        yield f"`layer_form` is {form!r}, and the engine's layers are made of attention and feed-forward networks"
    if getattr(config, "language_aware", False):
        yield "each language has its own norms (`language_aware`), and the engine is not told the language"
    if config.max_relative_position is not None:
        yield "it has relative positions of keys alone, and the engine's are of keys and values"
    if config.activation_function not in ACTIVATIONS:
        yield (f"it has no `activation_function` {quote(config.activation_function)}; it has {', '.join(ACTIVATIONS)}")
    if isinstance(config, MultiPathConfig):
        yield from _inexpressible_paths(model, config)


def _replaced(model: PreTrainedModel) -> Iterator[str]:
    """Yield a reason for the first module with weights that an adapter or quantisation replaced, if there is one."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in PROJECTIONS and type(module) not in (nn.Linear, BranchSum):
            cls = f"{type(module).__module__}.{type(module).__name__}"
            yield f"{name} is a {cls}; merge adapters (`merge_and_unload()`), or undo quantisation"
            return


def _inexpressible_paths(model: PreTrainedModel, config: MultiPathConfig) -> Iterator[str]:
    if config.path_norm and config.encoder_paths > 1:
        yield (
            f"it normalises each of its {config.encoder_paths} paths (`path_norm`), and the engine has one norm a "
            "sub-layer"
        )
    elif config.path_norm and not config.normalize_before:
        yield "`path_norm` is a second norm of its post-norm sub-layers, which the engine has of pre-norm ones alone"
    if any(paths.beta is not None and not paths.beta > 0 for paths in _path_sums(model)):
        yield "a `beta`, the weight of a sub-layer's input, is 0 or less"


def _path_sums(model: PreTrainedModel) -> Iterator[PathSum]:
    """Yield the encoder's sums of paths, in the order in which they are computed."""
    for layer in model.model.encoder.layers:
        yield layer.self_attn_paths
        yield layer.feed_forward_paths


@torch.no_grad()
def specification(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TransformerSpec:
    """Return the engine's specification of a model: weights in float32, vocabularies, special tokens.

    Args:
        model: a model of ours. A latent-depth model must be pruned before. The result shares memory with the model.
        tokenizer: the model's tokenizer.

    Raises:
        UserError: the engine cannot compute the model's function, or source and target have separate vocabularies.
    """
    check_expressible(model)
    if getattr(tokenizer, "separate_vocabs", False):
        raise UserError(
            "the model cannot become CTranslate2: its tokenizer has a vocabulary for each side (`separate_vocabs`), "
            "and an engine is given tokens of one vocabulary; export to ONNX, which is given ids"
        )
    config = model.config
    branches = getattr(config, "encoder_paths", config.attention_branches)
    common = {
        "pre_norm": config.normalize_before,
        "activation": ACTIVATIONS[config.activation_function],
        "layernorm_embedding": config.layernorm_embedding,
    }
    spec = TransformerSpec(
        transformer_spec.TransformerEncoderSpec(
            config.encoder_layers,
            branches * config.encoder_attention_heads,
            pre_post_layer_norm=getattr(config, "path_norm", False),
            **common,
        ),
        transformer_spec.TransformerDecoderSpec(
            config.decoder_layers, config.attention_branches * config.decoder_attention_heads, **common
        ),
    )
    _set_encoder(spec.encoder, model.model.encoder)
    _set_decoder(spec.decoder, model.model.decoder)
    _set_linear(spec.decoder.projection, model.lm_head.weight, model.lm_head.bias)

    source, target = (vocabulary(tokenizer, size) for size in (config.vocab_size, config.decoder_vocab_size))
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    spec.config.unk_token = tokenizer.unk_token or target[config.pad_token_id]
    spec.config.eos_token = tokenizer.eos_token  # the tokenizer appends it to the source, so the engine need not
    spec.config.bos_token = tokenizer.bos_token or tokenizer.eos_token
    starts = start_tokens(config, tokenizer)
    # With several start tokens, the caller passes one of them as the first token of the target's prefix.
    spec.config.decoder_start_token = target[starts.pop()] if len(starts) == 1 else None
    spec.config.layer_norm_epsilon = 1e-5  # the epsilon of every norm in the models
    return spec


def start_tokens(config: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the possible ids of the decoder's first token: one, or one for each target language."""
    default = config.decoder_start_token_id
    pairs = (getattr(config, "translation_pairs", None) or {}).values()
    if pairs:
        return {pair.get("decoder_start_token_id", default) for pair in pairs}
    codes = language_ids(tokenizer)
    if not codes:
        return {default}
    with speaking(tokenizer, *[next(iter(codes))] * 2):  # M2M100's tokenizer may have no target yet
        by_code = "decoder_start_token_id" in target_settings(tokenizer)  # as in mBART
    return set(codes.values()) if by_code else {default}


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> list[str]:
    """Return the tokens of the ids 0 to `size` - 1. No token occurs twice.

    The model may have more embeddings than the tokenizer has entries. An id without an entry gets a new name.
    """
    codes = language_ids(tokenizer).values()  # M2M100's codes may be missing in `get_vocab()`
    entries = {**tokenizer.get_vocab(), **{tokenizer.convert_ids_to_tokens(i): i for i in codes}}
    tokens: list[str | None] = [None] * size
    for token, token_id in entries.items():
        if token_id < size:
            tokens[token_id] = token
    names = (name for i in range(len(entries) + size) if (name := f"<unused{i}>") not in entries)
    return [next(names) if token is None else token for token in tokens]


def _set_encoder(spec: LayerSpec, encoder: Any) -> None:
    """Set the encoder's weights.

    A weight on a sub-layer's input (Multi-Path's beta, DeepNorm's alpha) scales the residual stream. The next norm
    undoes this scale, except for the norm's epsilon. So the engine's stream is not scaled, and the sub-layer's output,
    which is added to the stream, is divided by the scale.
    """
    _set_embeddings(spec, spec.embeddings[0], encoder)
    scale = 1.0
    for layer_spec, layer in zip(spec.layer, encoder.layers, strict=True):
        multipath = isinstance(layer, MultiPathEncoderLayer)
        sublayers = (
            ("attention", layer_spec.self_attention, layer.self_attn, layer.self_attn_layer_norm),
            ("feedforward", layer_spec.ffn, layer.feed_forward, layer.final_layer_norm),
        )
        for name, sub_spec, sublayer, norm in sublayers:
            if multipath:
                paths = layer.self_attn_paths if name == "attention" else layer.feed_forward_paths
                beta = 1.0 if paths.beta is None else paths.beta.item()
                scale = scale * beta if layer.normalize_before else beta
                weights = [weight / scale for weight in _path_weights(paths)]
            else:
                paths, weights = None, _branch_weights(sublayer, layer)
            if paths is not None and paths.path_norms:  # there is one path: x + PathNorm(F(LN(x)))
                before, after = _norms_around(layer_spec, name)
                _set_norm(before, norm)
                _set_norm(after, paths.path_norms[0], weights[0])
                weights = [1.0]
            else:
                _set_norm(sub_spec.layer_norm, norm)
            if name == "attention":
                _set_attention(sub_spec, sublayer, weights, fused=3)
            else:
                _set_feed_forward(sub_spec, sublayer, weights)
    if hasattr(spec, "layer_norm"):
        _set_norm(spec.layer_norm, encoder.layer_norm)


def _norms_around(spec: LayerSpec, sublayer: str) -> tuple[LayerSpec, LayerSpec]:
    """Return the norms before and after a sub-layer, `"attention"` or `"feedforward"`, of a layer with both norms."""
    before = spec.input_layer_norm if sublayer == "attention" else spec.pre_feedforward_layer_norm
    return before, getattr(spec, f"post_{sublayer}_layer_norm")


def _branch_weights(sublayer: Any, layer: nn.Module) -> list[float]:
    """Return the weight of each branch of a sub-layer, relative to a residual stream of weight 1."""
    alpha = layer.alpha if isinstance(layer, DeepNorm) else 1.0
    return [sublayer.merge_scale / alpha] * sublayer.branches


def _path_weights(paths: PathSum) -> list[float]:
    """Return the weight of each path's raw feature."""
    if paths.path_norms:
        return [paths.initial_weight] if paths.alpha is None else paths.alpha.tolist()
    if paths.alpha is None:
        return [paths.initial_weight * paths.features / paths.paths] * paths.paths
    return paths._path_weights().tolist()


def _set_decoder(spec: LayerSpec, decoder: Any) -> None:
    _set_embeddings(spec, spec.embeddings, decoder)
    for layer_spec, layer in zip(spec.layer, decoder.layers, strict=True):
        attentions = (
            (layer_spec.self_attention, layer.self_attn, layer.self_attn_layer_norm, 3),
            (layer_spec.attention, layer.encoder_attn, layer.encoder_attn_layer_norm, 1),
        )
        for sub_spec, attention, norm, fused in attentions:
            _set_attention(sub_spec, attention, _branch_weights(attention, layer), fused)
            _set_norm(sub_spec.layer_norm, norm)
        _set_feed_forward(layer_spec.ffn, layer.feed_forward, _branch_weights(layer.feed_forward, layer))
        _set_norm(layer_spec.ffn.layer_norm, layer.final_layer_norm)
    if hasattr(spec, "layer_norm"):
        _set_norm(spec.layer_norm, decoder.layer_norm)


def _set_embeddings(spec: LayerSpec, token_spec: LayerSpec, stack: Any) -> None:
    """Set token embeddings, their scale, positions, and the norm after them; `stack` is the encoder or the decoder."""
    embeddings: Embeddings = stack.embeddings
    token_spec.weight = stack.embed_tokens.weight.float()
    spec.scale_embeddings = float(embeddings.scale)
    positions = embeddings.positions
    spec.position_encodings.encodings = (
        positions.weight if isinstance(positions, nn.Embedding) else positions.table
    ).float()
    if embeddings.layer_norm is not None:
        _set_norm(spec.layernorm_embedding, embeddings.layer_norm)


def _set_attention(spec: LayerSpec, attention: Any, weights: Sequence[float], fused: int) -> None:
    """Set an attention. The first `fused` of its three input projections are joined, and so are the others, if any."""
    # The engine's default scale assumes that all heads share d_model. Here only the heads of one branch share it.
    spec.queries_scale = float(attention.scaling)
    inputs = []
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        inputs.append(common_spec.LinearSpec())
        _set_linear(inputs[-1], projection.weight, projection.bias)
    utils.fuse_linear(spec.linear[0], inputs[:fused])
    if inputs[fused:]:
        utils.fuse_linear(spec.linear[1], inputs[fused:])
    _set_sum(spec.linear[-1], attention.out_proj, weights)


def _set_feed_forward(spec: LayerSpec, network: Any, weights: Sequence[float]) -> None:
    if isinstance(network, MultiBranchFeedForward) and not network.joined:
        inner, (weight, bias) = network.averaged()
        rest = weights[0] / network.merge_scale
        _set_linear(spec.linear_0, *inner)
        _set_linear(spec.linear_1, weight * rest, bias * rest)
        return
    _set_linear(spec.linear_0, network.fc1.weight, network.fc1.bias)
    _set_sum(spec.linear_1, network.fc2, weights)


def _set_sum(spec: LayerSpec, projection: nn.Linear, weights: Sequence[float]) -> None:
    """Set the linear layer that computes sum_i w_i (x_i W_i + b_i); the x_i stand side by side in its input."""
    factors = torch.tensor(weights, dtype=torch.float64, device=projection.weight.device)
    blocks = projection.weight.double().unflatten(1, (len(weights), -1))  # [out, N, in]
    bias: torch.Tensor | None = projection.bias
    if bias is not None:
        bias = (bias.double().view(len(weights), -1) * factors[:, None]).sum(0)
    _set_linear(spec, (blocks * factors[:, None]).flatten(1), bias)


def _set_linear(spec: LayerSpec, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    spec.weight = weight.float()
    if bias is not None:
        spec.bias = bias.float()


def _set_norm(spec: LayerSpec, norm: nn.LayerNorm, weight: float = 1.0) -> None:
    """Set a norm whose output is multiplied by `weight`."""
    spec.gamma, spec.beta = norm.weight.float() * weight, norm.bias.float() * weight
