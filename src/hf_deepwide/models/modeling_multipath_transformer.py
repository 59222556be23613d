"""The Multi-Path Transformer (Lin et al. 2023, "Multi-Path Transformer is Better: A Case Study on Neural Machine
Translation"), arXiv 2305.05948.

Each encoder sub-layer holds n paths that share its LayerNorm:

    Y = beta X + sum_k alpha_k PathNorm_k(F_k),    F_i = Func_i(LN(X)),    Func = MHA or FFN         (Eq. 4, 5)

where k runs over the n raw features F_1 ... F_n. With more features, k also runs over n new features. Each new feature
is the average of one of the n combinations of n - 1 paths (section 3.2):

    F_{n+j} = 1/(n-1) sum_{i != j} F_i = (sum_i F_i - F_j) / (n-1)

The decoder is the standard one. Shapes: B batch, S time, D model width, n paths, M heads and F inner width of a path.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import MultiBranchAttention
from .branches import input_projection, is_own, output_projection, outputs_by_branch, project_by_branch
from .configuration_multipath_transformer import MultiPathConfig
from .dropout import Dropout
from .modeling_base import DeepWideForConditionalGeneration, DeepWideModel
from .pretrained_model import DeepWidePreTrainedModel
from .stacks import Encoder


class MultiPathAttention(MultiBranchAttention):
    """The attentions of n paths; `forward` stops before the output projections."""

    def __init__(self, config: MultiPathConfig) -> None:
        super().__init__(config, config.encoder_attention_heads, branches=config.encoder_paths)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map `[B, S, D]` to the contexts of the paths `[n, B * S, D]`.

        The second result is the attention weights, as `MultiBranchAttention` returns them.
        """
        context, weights = self.attend(hidden_states, attention_mask, None, None, None, **kwargs)
        paths = context.unflatten(2, (self.branches, -1)).movedim(2, 0)  # [n, B, S, M, D / M]
        return self.report(paths.flatten(3).flatten(1, 2), weights, kwargs)


class MultiPathFeedForward(nn.Module):
    """The feed-forward networks of n paths; `forward` stops before the output projections."""

    def __init__(self, config: MultiPathConfig) -> None:
        super().__init__()
        self.paths = config.encoder_paths
        self.fc1 = input_projection(config.encoder_paths, config.d_model, config.encoder_ffn_dim)
        self.fc2 = output_projection(config.encoder_paths, config.encoder_ffn_dim, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.activation_dropout = Dropout(config.activation_dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `[B, S, D]` to the inner activations of the paths `[n, B * S, F]`."""
        return self.activation_dropout(self.activation(project_by_branch(self.fc1, hidden_states, self.paths)))


class PathSum(nn.Module):
    """The weighted sum of the paths of one sub-layer: beta X + dropout(sum_k alpha_k PathNorm_k(F_k)) (Eq. 4, 5).

    Fixed weights are not parameters. With PathNorm, alpha multiplies the affine parameters of a feature's LayerNorm.
    Without PathNorm the sum is linear in the paths. So the weights of the new features are added to the weights of the
    raw features, and the sums multiply the output projections.
    """

    def __init__(self, config: MultiPathConfig) -> None:
        super().__init__()
        self.paths = config.encoder_paths
        self.features = config.path_features
        self.initial_weight = config.initial_path_weight
        norms = self.features if config.path_norm else 0
        self.path_norms = nn.ModuleList([nn.LayerNorm(config.d_model) for _ in range(norms)])
        self.alpha = self.beta = None
        if config.learnable_path_weights:
            self.alpha = nn.Parameter(torch.full((self.features,), self.initial_weight))
            self.beta = nn.Parameter(torch.ones(1))
        self.dropout = Dropout(config.dropout)

    def initialise(self, config: MultiPathConfig) -> None:
        """Set alpha to the config's `initial_path_weight`, and beta to 1 (section 3.3)."""
        if self.alpha is not None:
            init.constant_(self.alpha, config.initial_path_weight)
            init.ones_(self.beta)

    def forward(
        self, residual: torch.Tensor, inner: torch.Tensor, project: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Project and join the n paths.

        Args:
            residual: the sub-layer's input X `[B, S, D]`.
            inner: the inputs of the paths' output projections `[n, B * S, in]`.
            project: the paths' output projections: `outputs_by_branch`, bound to an `output_projection`.
        """
        if self.path_norms:
            joined = self._normalised_sum(project(inner).unbind())
        elif self.alpha is None:  # one weight for all raw features, also when the new features are added to it
            joined = project(inner).sum(0) * (self.initial_weight * self.features / self.paths)
        else:
            joined = project(inner, self._path_weights()).sum(0)
        joined = self.dropout(joined).view_as(residual)
        return residual + joined if self.beta is None else torch.addcmul(joined, residual, self.beta)

    def _normalised_sum(self, features: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return sum_k alpha_k PathNorm_k(F_k).

        A new feature is computed as sum_i F_i - F_j, without the division by n - 1. The norm would cancel this
        division, except for the norm's epsilon, so epsilon is multiplied by (n - 1)**2 instead. If the weights of a
        norm may not be read (see `is_own`), the norm is called.
        """
        total = sum(features) if self.features > self.paths else None
        joined = None
        for k, norm in enumerate(self.path_norms):
            feature, eps = features[k % self.paths], norm.eps
            if k >= self.paths:
                feature, eps = total - feature, eps * (self.paths - 1) ** 2
            alpha = self.initial_weight if self.alpha is None else self.alpha[k]
            if is_own(norm, nn.LayerNorm):
                weighed = nn.functional.layer_norm(
                    feature, norm.normalized_shape, alpha * norm.weight, alpha * norm.bias, eps
                )
            else:
                weighed = alpha * norm(feature * math.sqrt(norm.eps / eps))
            joined = weighed if joined is None else joined + weighed
        return joined

    def _path_weights(self) -> torch.Tensor:
        """Return the weights `[n]` of the raw features that give the same sum as all raw and new features.

        Path i is part of the i-th raw feature, and, with the factor 1/(n-1), of all new features except the i-th.
        """
        if self.features == self.paths:
            return self.alpha
        raw, new = self.alpha.chunk(2)
        return raw + (new.sum() - new) / (self.paths - 1)


class MultiPathEncoderLayer(GradientCheckpointingLayer):
    """n attentions, then n feed-forward networks."""

    def __init__(self, config: MultiPathConfig) -> None:
        super().__init__()
        self.normalize_before = config.normalize_before
        self.self_attn = MultiPathAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.self_attn_paths = PathSum(config)
        self.feed_forward = MultiPathFeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_paths = PathSum(config)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        """Map `[B, S, D]` to `[B, S, D]`. Pre-norm, the norm precedes the paths; post-norm, it follows their sum."""
        x, norm = hidden_states, self.self_attn_layer_norm
        context, _ = self.self_attn(norm(x) if self.normalize_before else x, attention_mask, **kwargs)
        x = self.self_attn_paths(x, context, partial(outputs_by_branch, self.self_attn.out_proj))
        x = x if self.normalize_before else norm(x)

        norm = self.final_layer_norm
        inner = self.feed_forward(norm(x) if self.normalize_before else x)
        x = self.feed_forward_paths(x, inner, partial(outputs_by_branch, self.feed_forward.fc2))
        return x if self.normalize_before else norm(x)


class MultiPathPreTrainedModel(DeepWidePreTrainedModel):
    """The base class of the models of this family."""

    config_class = MultiPathConfig
    _no_split_modules = ["MultiPathEncoderLayer", "DecoderLayer"]
    no_weight_decay = ("alpha", "beta")


class MultiPathEncoder(MultiPathPreTrainedModel, Encoder):
    """Embeddings and a stack of multi-path layers."""

    layer_class = MultiPathEncoderLayer
    _can_record_outputs = {"hidden_states": MultiPathEncoderLayer, "attentions": MultiPathAttention}


class MultiPathModel(MultiPathPreTrainedModel, DeepWideModel):
    """Multi-path encoder and standard decoder without a head."""

    encoder_class = MultiPathEncoder


class MultiPathForConditionalGeneration(MultiPathPreTrainedModel, DeepWideForConditionalGeneration, GenerationMixin):
    """The Multi-Path translation model."""

    model_class = MultiPathModel

    def training_logs(self) -> dict[str, float]:
        """Return every alpha and beta, as `alpha/<layer>.<sub-layer>.<feature>` and `beta/<layer>.<sub-layer>`."""
        weights = {}
        for index, layer in enumerate(self.model.encoder.layers):
            for name, paths in (("self_attn", layer.self_attn_paths), ("feed_forward", layer.feed_forward_paths)):
                if paths.alpha is None:
                    continue
                for feature, alpha in enumerate(paths.alpha.tolist()):
                    weights[f"alpha/{index}.{name}.{feature}"] = alpha
                weights[f"beta/{index}.{name}"] = paths.beta.item()
        return weights
