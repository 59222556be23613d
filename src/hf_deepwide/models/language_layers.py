"""Parts of a model that each language has for itself (Zhang et al. 2020, arXiv 2004.11867).

    LALN   LN(x) = g_l * (x - mean) / deviation + b_l, in the place of each LayerNorm of a layer
    LALT   H <- H W_l, behind the encoder

l is the language of the sentence's pair: in the paper and its code (zero, `transformer_multilingual`) the target's, in
both stacks. Shapes: B batch, T time, D model width, N languages.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .layers import DecoderLayer, EncoderLayer
from .merged_attention import MergedAttentionDecoderLayer

Languages = torch.Tensor | None  # the index of each sentence's, `[B]`; None where there is one


def of_language(table: torch.Tensor, languages: Languages) -> torch.Tensor:
    """The entries `[B or 1, …]` of each sentence's language, of a table `[N, …]`."""
    return table if languages is None else table.index_select(0, languages.to(table.device))


class LanguageLayerNorm(nn.Module):
    """A LayerNorm whose scale and bias are those of the language (LALN)."""

    def __init__(self, width: int, languages: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.language_scale = nn.Parameter(torch.ones(languages, width))
        self.language_bias = nn.Parameter(torch.zeros(languages, width))

    def forward(self, x: torch.Tensor, languages: Languages = None) -> torch.Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        scale, bias = (of_language(table, languages)[:, None] for table in (self.language_scale, self.language_bias))
        return torch.addcmul(bias, nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps), scale)


class LanguageTransform(nn.Module):
    """A matrix for each language between encoder and decoder (LALT)."""

    def __init__(self, width: int, languages: int) -> None:
        super().__init__()
        self.language_matrices = nn.Parameter(torch.empty(languages, width, width))

    def forward(self, x: torch.Tensor, languages: Languages = None) -> torch.Tensor:
        """`[B, S, D]` to `[B, S, D]`."""
        return torch.matmul(x, of_language(self.language_matrices, languages))


class LanguageAware:
    """Makes of a layer one whose norms are those of the language: a mixin before the layer's class."""

    def __init__(self, config: VanillaTransformerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.languages: Languages = None  # of the forward pass under way
        for name, module in list(self.named_children()):
            if isinstance(module, nn.LayerNorm):
                setattr(self, name, LanguageLayerNorm(config.d_model, config.num_posteriors))

    def forward(
        self, hidden_states: torch.Tensor, *inputs: Any, languages: Languages = None, **kwargs: Any
    ) -> torch.Tensor:
        """As the parent's, for sentences of these languages."""
        self.languages = languages
        return super().forward(hidden_states, *inputs, **kwargs)

    def residual(
        self,
        x: torch.Tensor,
        norm: nn.Module,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
        joint: str = "",
    ) -> torch.Tensor:
        """Join a sub-layer to its input, with the norm of the language."""
        return super().residual(x, functools.partial(norm, languages=self.languages), sublayer, gate, joint)


class LanguageAwareEncoderLayer(LanguageAware, EncoderLayer):
    """Self-attention and feed-forward."""


class LanguageAwareDecoderLayer(LanguageAware, DecoderLayer):
    """Causal self-attention, attention to the source and feed-forward."""


class LanguageAwareMergedLayer(LanguageAware, MergedAttentionDecoderLayer):
    """Merged attention and feed-forward."""
