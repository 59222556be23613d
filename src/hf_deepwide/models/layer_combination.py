"""Layer inputs that are learned sums over the outputs of all earlier layers, with one set of weights for each stack.

y_0 are the embeddings, y_l is the output of layer l, and x_{l+1} is the next layer's input, or the stack's output:

    DLCL          x_{l+1} = sum_{k<=l} W_lk LN_k(y_k)     (Wang et al. 2019, arXiv 1906.01787, Eq. 8, 9)
    DenseFormer   x_{l+1} = sum_{k<=l} W_lk y_k           (Pagliardini et al. 2024, arXiv 2402.02622)

With transparent attention the encoder's layers are unchanged, and decoder layer j attends to the mixture z_j:

    z_j = sum_{k<=L} softmax_k(W_kj) y_k                  (Bapna et al. 2018, arXiv 1808.07561)

Shapes: B batch, T time, D model width, L layers, M layers of the decoder.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import initialization as init

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout import Dropout

Combined = tuple[torch.Tensor, torch.Tensor]
"""The next layer's input, or the stack's output, and the term for y_l in the `history` of later sums.

The stack keeps the history. A module cannot append to it: accelerate's hooks copy a list that is passed to a module.
"""


class LayerSum(nn.Module):
    """Weighted sums of the outputs y_0 … y_l, for l from 0 to L.

    Row l of W `[L + 1, L + 1]` weighs y_0 … y_l. The entries above the diagonal are never used.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.combination_weights = nn.Parameter(self.initial_weights())

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Fill the weights of a new model."""
        init.copy_(self.combination_weights, self.initial_weights())

    def initial_weights(self) -> torch.Tensor:
        """Return W `[L + 1, L + 1]` of a new model."""
        raise NotImplementedError

    def used(self, index: int) -> Sequence[int]:
        """Return the indices of the outputs that row `index` weighs. If there are none, y_index passes unchanged."""
        return range(index + 1)

    def rows(self) -> torch.Tensor:
        """Return the sums' weights `[L + 1, L + 1]`: 0 for unused outputs, and 1 for a y_l that passes unchanged."""
        used = torch.zeros(self.layers + 1, self.layers + 1)
        passing = torch.zeros_like(used)
        for index in range(self.layers + 1):
            used[index, list(self.used(index))] = 1
            passing[index, index] = not self.used(index)
        weights = self.combination_weights.detach().float().cpu()
        return weights.where(used > 0, passing)

    def forward(self, history: Sequence[torch.Tensor], output: torch.Tensor) -> Combined:
        """Combine the l terms of `history` with y_l `[B, T, D]`."""
        raise NotImplementedError

    def weighted_sum(self, history: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum all terms with the weights of their row."""
        index = len(history) - 1
        weights = self.combination_weights[index].unbind()
        first, *others = self.used(index)
        combined = weights[first] * history[first]
        for k in others:
            combined = torch.addcmul(combined, weights[k], history[k])
        return combined


class LayerCombination(LayerSum):
    """The dynamic linear combination of layers (DLCL).

    Pre-norm: x_{l+1} = sum_{k<=l} W_lk LN_k(y_k). Post-norm: x_{l+1} = LN_l(sum_{k<=l} W_lk y_k). Each sum starts as
    a mean. As in the released code, the embeddings y_0 are not normalised. In post-norm, x_1 is not normalised either,
    because it combines the embeddings alone. So there is one LayerNorm per layer.
    """

    def __init__(self, config: VanillaTransformerConfig, layers: int) -> None:
        super().__init__(layers)
        self.normalize_before = config.normalize_before
        self.layer_norms = nn.ModuleList([nn.LayerNorm(config.d_model) for _ in range(layers)])

    def initial_weights(self) -> torch.Tensor:
        """Return W of a new model, lower triangular: row l holds 1 / (l + 1)."""
        ones = torch.ones(self.layers + 1, self.layers + 1).tril()
        return ones / ones.sum(1, keepdim=True)

    def forward(self, history: Sequence[torch.Tensor], output: torch.Tensor) -> Combined:
        """Combine the l terms of `history` with y_l `[B, T, D]`. In pre-norm, the term of y_l is normalised."""
        index = len(history)
        norm = self.layer_norms[index - 1] if index else nn.Identity()
        term = norm(output) if self.normalize_before else output
        combined = self.weighted_sum([*history, term])
        return combined if self.normalize_before else norm(combined), term


class DepthWeightedAverage(LayerSum):
    """DenseFormer's weighted average of the embeddings and of all layers so far, after each layer.

    It starts as the identity: W_ll is 1, and all other weights are 0. So a plain stack keeps its function. Weights can
    become negative, and need not add up to 1. An average follows each layer l that the period p divides. It is over
    the outputs y_k with k = l (mod k'), where k' is the dilation. There is no average before the first layer.
    """

    def __init__(self, config: VanillaTransformerConfig, layers: int) -> None:
        super().__init__(layers)
        self.dilation = config.aggregation_dilation
        self.period = config.aggregation_period

    def initial_weights(self) -> torch.Tensor:
        """Return the identity."""
        return torch.eye(self.layers + 1)

    def used(self, index: int) -> Sequence[int]:
        """Return the indices of the outputs that row `index` weighs; none where no average is taken."""
        if index == 0 or index % self.period:
            return ()
        return range(index % self.dilation, index + 1, self.dilation)

    def forward(self, history: Sequence[torch.Tensor], output: torch.Tensor) -> Combined:
        """Average the l terms of `history` and y_l `[B, T, D]`, or pass y_l on where no average is taken."""
        return self.weighted_sum([*history, output]) if self.used(len(history)) else output, output


class TransparentAttention(nn.Module):
    """A weighted mean of the embeddings and of all encoder layers' outputs, with other weights in each decoder layer.

    Dropout is on the weights before their softmax. This is as in Neutron, the toolkit of Xu et al. 2024, who reproduce
    transparent attention.
    """

    def __init__(self, config: VanillaTransformerConfig, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.mixture_logits = nn.Parameter(torch.zeros(layers + 1, config.decoder_layers))
        self.dropout = Dropout(config.dropout)

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Start uniform within sqrt(2 / (L + 1 + M)), as in Neutron."""
        bound = math.sqrt(2 / sum(self.mixture_logits.shape))
        init.uniform_(self.mixture_logits, -bound, bound)

    def weights(self) -> torch.Tensor:
        """Return the weights `[L + 1, M]` of y_k for decoder layer j; each column adds up to 1."""
        return self.dropout(self.mixture_logits).softmax(0)

    def forward(self, history: Sequence[torch.Tensor], output: torch.Tensor) -> Combined:
        """Pass y_l `[B, S, D]` on. After the last layer, mix it and the terms of `history`.

        Returns:
            y_l, or the concatenated z_1 ... z_M, `[B, S, M * D]`; and y_l as a term.
        """
        if len(history) < self.layers:
            return output, output
        weights = self.weights().to(output.dtype)
        return torch.einsum("kbsd,kj->bsjd", torch.stack([*history, output]), weights).flatten(2), output


class LayerNormEach(nn.LayerNorm):
    """The final norm of an encoder whose outputs `[B, S, M * D]` are M concatenated vectors. It normalises each."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise each of the M vectors in `[B, S, M * D]`."""
        return super().forward(hidden_states.unflatten(-1, (-1, *self.normalized_shape))).flatten(-2)


COMBINATIONS: dict[str, type[LayerSum]] = {"dlcl": LayerCombination, "denseformer": DepthWeightedAverage}
