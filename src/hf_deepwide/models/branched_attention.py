"""Attention whose heads have feed-forward networks of their own (Ahmed, Keskar and Socher 2017, arXiv 1711.02132).

In the Weighted Transformer, each of the M heads of an attention is a branch. The feed-forward network after the
attention is cut into M networks, each F / M wide. Learned weights scale the input and the output of each network:

    head_i = Attention(Q W^Q_i, K W^K_i, V W^V_i)
    BranchedAttention(Q, K, V) = sum_i alpha_i FFN_i(kappa_i head_i W^O_i)
    FFN_i(x) = act(x W1_i + b1_i) W2_i + b2_i
    kappa_i >= 0, sum_i kappa_i = 1, and the same of alpha

An encoder layer is one such sub-layer. A decoder layer is causal self-attention, then a branched attention to the
source. Each sub-layer has its residual connection and norm. No norm or residual connection is inside a branch.

Between W^O_i and W1_i there is no activation. So for several positions their product, `[H, F / M]`, is computed first.
The M vectors of width D between the two matrices are then never computed.

Kappa and alpha start at random. Before every training step they are moved to the nearest point of the simplex, as in
the paper. The paper trains them with a higher learning rate of their own, and freezes them for the last 10,000 steps.
Here they have the learning rate of all weights, and are never frozen. Weight decay does not apply to them.

The paper does not say which attentions are branched. It gives both stacks branched attention, and counts 192 extra
weights: two for each of 8 heads, once in each of 12 layers. So one attention of a decoder layer is plain. Here it is
the self-attention, as in JayParks/transformer. That code is not by the authors, who released none. It also has a
residual connection and a norm in each network. Here W^O has no bias, because b1 would absorb it.

Shapes: B batch, T time, S source length, D model width, M heads, H = D / M head width, F inner width of a layer.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from .attention import MultiBranchAttention
from .branches import BranchSum, input_projection, is_own, outputs_by_branch
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout import Dropout
from .layers import DecoderLayer, EncoderLayer, ResidualLayer


class SimplexWeights(nn.Module):
    """Learned weights that are not negative and add up to 1.

    The model uses the point of the simplex that is nearest to the parameter. The gradient of this point is passed to
    the parameter unchanged, so a weight of 0 can grow again. `project` moves the parameter to the point. A stack calls
    `project` when its `training_step` is set. With another Trainer, add the callback `TrainingStep`, which sets it.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.simplex_weight = nn.Parameter(torch.empty(size))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Draw the weights of a new model: uniform numbers, divided by their sum."""
        drawn = torch.rand(self.simplex_weight.shape)
        init.copy_(self.simplex_weight, drawn / drawn.sum())

    def forward(self) -> torch.Tensor:
        """Return the weights, `[size]`."""
        weight = self.simplex_weight
        return weight + (nearest_on_simplex(weight) - weight).detach()

    @torch.no_grad()
    def project(self) -> None:
        """Move the parameter to the simplex. A shard (FSDP) is not moved, which does not change `forward`."""
        weight = self.simplex_weight
        if type(weight.data) is torch.Tensor:
            weight.copy_(nearest_on_simplex(weight))


def nearest_on_simplex(x: torch.Tensor) -> torch.Tensor:
    """Return the point of the simplex that is nearest to `x`, `[size]`: numbers >= 0 that add up to 1.

    The point is max(x - t, 0). If k numbers stay positive, t is (sum of the k largest numbers - 1) / k. Any other k
    gives a smaller t, so t is the maximum over all k.
    """
    full = x.to(torch.promote_types(x.dtype, torch.float32))
    excess = full.sort(descending=True).values.cumsum(0) - 1
    threshold = (excess / torch.arange(1, len(full) + 1, device=full.device)).max()
    return (full - threshold).clamp(min=0).to(x.dtype)


class BranchedAttention(MultiBranchAttention):
    """Self-attention, or attention to the source, with a feed-forward network after each head."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, ffn_dim: int, **kwargs: Any) -> None:
        """Make the weights; `ffn_dim` is F for all heads together, and `kwargs` are passed to the parent."""
        super().__init__(config, num_heads, **kwargs)
        self.activation = ACT2FN[config.activation_function]
        self.activation_dropout = Dropout(config.activation_dropout)
        self.out_proj = BranchSum(num_heads, self.head_dim, config.d_model, bias=False)
        self.kappa = SimplexWeights(num_heads)
        self.fc1 = input_projection(num_heads, config.d_model, ffn_dim // num_heads)
        self.fc2 = BranchSum(num_heads, ffn_dim // num_heads, config.d_model)
        self.alpha = SimplexWeights(num_heads)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output `[B, T, D]`, and the attention weights `[B, M, T, S]` or None, as the parent does."""
        context, weights = self.attend(
            hidden_states, attention_mask, encoder_hidden_states, past_key_values, None, **kwargs
        )
        heads = context.flatten(0, 1).transpose(0, 1)  # [M, tokens, H]
        inner = self.activated(heads, many=hidden_states.shape[1] > 1)
        alpha = self.alpha()
        inner = inner * alpha[:, None, None].to(inner.dtype)
        inner = inner.transpose(0, 1).reshape(*hidden_states.shape[:-1], -1)
        return self.fc2(inner, gates=alpha), weights

    def activated(self, heads: torch.Tensor, many: bool) -> torch.Tensor:
        """Return act(kappa_i head_i W^O_i W1_i + b1_i), `[M, tokens, F / M]`, for heads `[M, tokens, H]`.

        With `many` tokens the matrices are multiplied first, unless an adapter wraps one of them.
        """
        if many and self.has_own_projections():
            inner = torch.baddbmm(self.inner_bias(), heads, self.inner_weight())
        elif is_own(self.fc1, nn.Linear):
            inner = torch.baddbmm(self.inner_bias(), self.scaled_outputs(heads), self._fc1_blocks())
        else:
            outputs = self.scaled_outputs(heads)
            inner = torch.stack([self.fc1(x).chunk(len(outputs), dim=-1)[i] for i, x in enumerate(outputs)])
        return self.activation_dropout(self.activation(inner))

    def scaled_outputs(self, heads: torch.Tensor) -> torch.Tensor:
        """Return kappa_i head_i W^O_i, `[M, tokens, D]`."""
        return outputs_by_branch(self.out_proj, heads, self.kappa())

    def inner_weight(self) -> torch.Tensor:
        """Return kappa_i W^O_i W1_i, `[M, H, F / M]`."""
        output = self.out_proj.weight.unflatten(1, (self.num_heads, -1)).permute(1, 2, 0)
        return torch.bmm(output * self.kappa()[:, None, None], self._fc1_blocks())

    def inner_bias(self) -> torch.Tensor:
        """Return the biases b1, `[M, 1, F / M]`."""
        return self.fc1.bias.view(self.num_heads, 1, -1)

    def outer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all alpha_i W2_i side by side, `[D, F]`, and the sum of alpha_i b2_i, `[D]`."""
        alpha, bias = self.alpha(), self.fc2.bias.view(self.num_heads, -1)
        weight = self.fc2.weight.unflatten(1, (self.num_heads, -1)) * alpha[:, None]
        return weight.flatten(1), alpha @ bias

    def _fc1_blocks(self) -> torch.Tensor:
        """Return W1 of each branch, `[M, D, F / M]`."""
        return self.fc1.weight.unflatten(0, (self.num_heads, -1)).transpose(1, 2)

    def has_own_projections(self) -> bool:
        """Return whether the parent's projections and `fc1` are still the modules that this class made."""
        return super().has_own_projections() and is_own(self.fc1, nn.Linear)


class WeightedEncoderLayer(EncoderLayer):
    """An encoder layer of one sub-layer: branched self-attention."""

    joints = ("self_attn",)

    def __init__(self, config: VanillaTransformerConfig) -> None:
        ResidualLayer.__init__(self, config)
        self.self_attn = BranchedAttention(config, config.encoder_attention_heads, config.encoder_ffn_dim)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        gate: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map `[B, S, D]` to `[B, S, D]`, with the parent's arguments."""
        return self.attend_to_itself(hidden_states, attention_mask, gate, **kwargs)


class WeightedDecoderLayer(DecoderLayer):
    """Causal self-attention, then branched attention to the source."""

    joints = ("self_attn", "encoder_attn")

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        ResidualLayer.__init__(self, config)
        heads = config.decoder_attention_heads
        self.self_attn = MultiBranchAttention(config, heads, is_causal=True, layer_idx=layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.encoder_attn = BranchedAttention(
            config, heads, config.decoder_ffn_dim, is_cross=True, layer_idx=layer_idx
        )
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: Any = None,
        gate: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map `[B, T, D]` to `[B, T, D]`, with the parent's arguments; without a source, apply only self-attention."""
        kwargs["past_key_values"] = past_key_values
        hidden_states = self.attend_to_itself(hidden_states, attention_mask, gate, **kwargs)
        if encoder_hidden_states is None:
            return hidden_states
        return self.attend_to_source(hidden_states, encoder_attention_mask, encoder_hidden_states, gate, **kwargs)


def largest_weights(modules: Iterable[nn.Module]) -> dict[str, float]:
    """Return the largest kappa and the largest alpha, each as the mean over all branched attentions.

    The value is 1/M if all weights of an attention are equal.
    """
    attentions = [module for module in modules if isinstance(module, BranchedAttention)]
    weights = {
        "largest_kappa": [attention.kappa().max().item() for attention in attentions],
        "largest_alpha": [attention.alpha().max().item() for attention in attentions],
    }
    return {name: sum(values) / len(values) for name, values in weights.items() if values}
