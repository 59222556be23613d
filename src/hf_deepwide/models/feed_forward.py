"""Position-wise feed-forward networks with one or several branches.

Shapes: B batch, T time, D model width, N branches, F inner width of one branch.
"""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from .branches import (
    BranchDrop,
    BranchSum,
    input_projection,
    is_own,
    merge_scale,
    no_branch,
    no_gradient,
    output_projection,
    project,
    sum_branches,
)
from .dropout import Dropout


class MultiBranchFeedForward(nn.Module):
    """(1/N) sum_i FFN_i(x), FFN_i(x) = act(x W1_i + b1_i) W2_i + b2_i (MAT, Eq. 3 and 8).

    In training each branch is dropped with probability rho, and kept branches are scaled by 1 / (1 - rho) (Eq. 7 and
    8). Where all sentences drop the same branches, dropped branches are not computed. The residual connection is not
    part of this module.

    In the released code a flag makes the branches N networks, as above. Without the flag (`join_ffn=False`) the
    branches of each projection are averaged. The 0 or 1 that drops a branch, beta, is drawn for each projection:

        h = act(1/N sum_i beta_i (x W1_i + b1_i)),  1/N sum_i beta'_i (h W2_i + b2_i)
    """

    def __init__(self, config: Any, ffn_dim: int) -> None:
        super().__init__()
        self.branches = config.ffn_branches
        self.joined = config.join_ffn
        self.ffn_dim = ffn_dim
        self.drop_branch = config.drop_branch if config.ffn_drop_branch is None else config.ffn_drop_branch
        self.by_sentence = config.drop_granularity == "sentence"
        self.merge_scale = merge_scale(self.branches, config.branch_merge)
        self.activation = ACT2FN[config.activation_function]
        self.activation_dropout = Dropout(config.activation_dropout)
        self.fc1 = input_projection(self.branches, config.d_model, ffn_dim)
        self.fc2 = output_projection(self.branches, ffn_dim, config.d_model)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform `[B, T, D]` to `[B, T, D]`."""
        if not self.joined:
            return self._unjoined(hidden_states)
        drop = self._draw(hidden_states)
        if drop.kept == []:
            return no_branch(self, hidden_states)
        inner = project(self.fc1, hidden_states, self.branches, drop.kept)
        inner = self.activation_dropout(self.activation(inner))
        if self.branches == 1:
            output = self.fc2(inner)
            if drop.gates is not None:  # [B, 1, 1] or [1, 1]: one branch is weighed as a whole
                output = output * drop.gates.to(output.dtype)
        elif drop.gates is None:
            output = sum_branches(self.fc2, inner, self.branches, drop.kept)
        else:
            gated = inner.unflatten(-1, (self.branches, -1)) * feature_gates(drop.gates, inner)
            output = sum_branches(self.fc2, gated.flatten(-2), self.branches, gates=drop.gates[..., 0])
        return output if drop.scale == 1 else output * drop.scale

    def _draw(self, hidden_states: torch.Tensor) -> BranchDrop:
        """Draw the branches that this forward pass drops; none in evaluation."""
        if not self.training or self.drop_branch == 0:
            return BranchDrop(self.merge_scale)
        scale, shape = self.merge_scale / (1 - self.drop_branch), (self.branches, 1)
        can_skip = is_own(self.fc1, nn.Linear) and is_own(self.fc2, nn.Linear, BranchSum)
        return BranchDrop.draw(scale, self.drop_branch, shape, self.by_sentence, can_skip, hidden_states)

    def _unjoined(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Average the branches before the activation, and again after it (`join_ffn=False`)."""
        drop = self._draw(hidden_states)
        if drop.kept == []:  # the activation's input is 0
            shape = *hidden_states.shape[:-1], self.ffn_dim
            inner = hidden_states.new_zeros(shape) + no_gradient(self.fc1, hidden_states)
        else:
            inner = project(self.fc1, hidden_states, self.branches, drop.kept)
            inner = inner.unflatten(-1, (-1, self.ffn_dim))
            if drop.gates is not None:
                inner = inner * feature_gates(drop.gates, inner)
            inner = inner.sum(-2) * drop.scale
        inner = self.activation_dropout(self.activation(inner))

        drop = self._draw(hidden_states)
        if drop.kept == []:
            return no_branch(self, hidden_states)
        branches = self.branches if drop.kept is None else len(drop.kept)
        repeated = inner.unsqueeze(-2).expand(*inner.shape[:-1], branches, -1)
        if drop.gates is not None:
            repeated = repeated * feature_gates(drop.gates, inner)
        gates = None if drop.gates is None else drop.gates[..., 0]
        return sum_branches(self.fc2, repeated.flatten(-2), self.branches, drop.kept, gates) * drop.scale

    def averaged(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """The single network that equals un-joined branches in evaluation: (W1, b1) and (W2, b2)."""

        def merged(parameter: torch.Tensor, along: int = 0) -> torch.Tensor:
            return parameter.unflatten(along, (self.branches, -1)).sum(along) * self.merge_scale

        return (merged(self.fc1.weight), merged(self.fc1.bias)), (merged(self.fc2.weight, 1), merged(self.fc2.bias))


def feature_gates(gates: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """Reshape and cast gates `[N, 1]` or `[B, N, 1]`, so that they weigh the branches' features `[B, T, N, F]`."""
    return gates[..., None, :, :].to(inner.dtype)
