"""Parts of a model with separate weights for each language (Zhang et al. 2020, arXiv 2004.11867).

    LALN   LN(x) = g_l * (x - mean) / deviation + b_l, in the place of each LayerNorm of a layer
    LALT   H <- H W_l, after the encoder

l is the language of a sentence's pair. In the paper and its code (zero, `transformer_multilingual`) it is the target
language, in both stacks. Shapes: B batch, T time, S source length, D model width, N languages.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .layers import DecoderLayer, EncoderLayer, ResidualLayer
from .merged_attention import MergedAttentionDecoderLayer

Languages = torch.Tensor | None  # the index of each sentence's language, `[B]`; None in a model with one language
SubLayer = tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]  # its norm, and the function itself


def of_language(table: torch.Tensor, languages: Languages) -> torch.Tensor:
    """Return the entries `[B, …]` of a table `[N, …]` for each sentence's language; the table `[1, …]` if N is 1."""
    return table if languages is None else table.index_select(0, languages.to(table.device).long())


class LanguageLayerNorm(nn.Module):
    """A LayerNorm with a scale and a bias for each language (LALN)."""

    def __init__(self, width: int, languages: int) -> None:
        super().__init__()
        self.language_scale = nn.Parameter(torch.ones(languages, width))
        self.language_bias = nn.Parameter(torch.zeros(languages, width))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Start as a plain LayerNorm, for every language."""
        init.ones_(self.language_scale)
        init.zeros_(self.language_bias)

    def forward(self, x: torch.Tensor, languages: Languages = None) -> torch.Tensor:
        """Normalise `[B, T, D]`."""
        scale, bias = (of_language(table, languages)[:, None] for table in (self.language_scale, self.language_bias))
        return torch.addcmul(bias, nn.functional.layer_norm(x, x.shape[-1:]), scale)


class LanguageTransform(nn.Module):
    """A matrix for each language between encoder and decoder (LALT)."""

    def __init__(self, width: int, languages: int) -> None:
        super().__init__()
        self.language_matrices = nn.Parameter(torch.empty(languages, width, width))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Start as projections do: Xavier for each matrix alone, or N(0, init_std^2)."""
        if config.init_std is None:
            bound = math.sqrt(3 / config.d_model)
            init.uniform_(self.language_matrices, -bound, bound)
        else:
            init.normal_(self.language_matrices, std=config.init_std)

    def forward(self, x: torch.Tensor, languages: Languages = None) -> torch.Tensor:
        """Multiply the states `[B, S, D]` by the matrix of each sentence's language."""
        return torch.matmul(x, of_language(self.language_matrices, languages))


class LanguageAware(ResidualLayer):
    """A mixin, before a post-norm layer's class, that makes each LayerNorm of the layer a `LanguageLayerNorm`."""

    def __init__(self, config: VanillaTransformerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        for name, module in list(self.named_children()):
            if isinstance(module, nn.LayerNorm):
                setattr(self, name, LanguageLayerNorm(config.d_model, config.num_posteriors))

    def join(
        self, x: torch.Tensor, norm: nn.Module, sublayer: Callable[[torch.Tensor], torch.Tensor], languages: Languages
    ) -> torch.Tensor:
        """Join a sub-layer to its input `[B, time, D]`, with the norm of each sentence's language."""
        return self.residual(x, partial(norm, languages=languages), sublayer)


class LanguageAwareEncoderLayer(LanguageAware, EncoderLayer):
    """Self-attention and feed-forward."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, languages: Languages = None, **kwargs: Any
    ) -> torch.Tensor:
        """Transform `[B, S, D]` to `[B, S, D]`; `languages` are the sentences' languages."""
        attended = self.join(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, attention_mask, **kwargs)[0],
            languages,
        )
        return self.join(attended, self.final_layer_norm, self.feed_forward, languages)


class LanguageAwareDecoderLayer(LanguageAware, DecoderLayer):
    """Causal self-attention, attention to the source and feed-forward."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: Any = None,
        languages: Languages = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Transform `[B, T, D]` to `[B, T, D]`; `languages` are the sentences' languages."""
        source = encoder_hidden_states, encoder_attention_mask
        for norm, attention in self.attentions(attention_mask, *source, **kwargs):
            hidden_states = self.join(hidden_states, norm, attention, languages)
        return self.join(hidden_states, self.final_layer_norm, self.feed_forward, languages)

    def attentions(self, mask: Any, memory: torch.Tensor | None, memory_mask: Any, **kwargs: Any) -> list[SubLayer]:
        """Return the attention sub-layers, each with its norm; only one without a source, `memory` `[B, S, D]`."""
        found = [(self.self_attn_layer_norm, lambda x: self.self_attn(x, mask, **kwargs)[0])]
        if memory is not None:
            found.append(
                (self.encoder_attn_layer_norm, lambda x: self.encoder_attn(x, memory_mask, memory, **kwargs)[0])
            )
        return found


class LanguageAwareMergedLayer(LanguageAwareDecoderLayer, MergedAttentionDecoderLayer):
    """Merged attention and feed-forward."""

    def attentions(self, mask: Any, memory: torch.Tensor | None, memory_mask: Any, **kwargs: Any) -> list[SubLayer]:
        """Return the only attention sub-layer, with its norm."""
        merged = partial(self.encoder_attn, causal_mask=mask, **kwargs)
        return [(self.encoder_attn_layer_norm, lambda x: merged(x, memory_mask, memory)[0])]
