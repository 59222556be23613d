"""Position-wise feed-forward networks, one or several branches of them.

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

    In training each branch is dropped with probability rho, and kept ones are scaled by 1 / (1 - rho) (Eq. 7 and 8).
    Where all sentences drop the same branches, dropped branches are not computed. The residual is not part of it.

    The released code joins branches by a flag alone. Without it (`join_ffn=False`), both projections are averaged, and
    the drop beta of each branch is drawn for each of them:

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
        """`[B, T, D]` to `[B, T, D]`."""
        if not self.joined:
            return self._unjoined(hidden_states)
        drop = self._draw(hidden_states)
        if drop.kept == []:
            return no_branch(self, hidden_states)
        inner = project(self.fc1, hidden_states, self.branches, drop.kept)
        inner = self.activation_dropout(self.activation(inner))
        if self.branches == 1:
            output = self.fc2(inner)
            if drop.gates is not None:  # [B, 1, 1]: one branch needs no weighing inside
                output = output * drop.gates.to(output.dtype)
        elif drop.gates is None:
            output = sum_branches(self.fc2, inner, self.branches, drop.kept)
        else:
            gated = inner.unflatten(-1, (self.branches, -1)) * feature_gates(drop.gates, inner)
            output = sum_branches(self.fc2, gated.flatten(-2), self.branches, gates=drop.gates[..., 0])
        return output if drop.scale == 1 else output * drop.scale

    def _draw(self, hidden_states: torch.Tensor) -> BranchDrop:
        """Decide what drops in this forward pass; nothing does in evaluation."""
        if not self.training or self.drop_branch == 0:
            return BranchDrop(self.merge_scale)
        scale, shape = self.merge_scale / (1 - self.drop_branch), (self.branches, 1)
        can_skip = is_own(self.fc1, nn.Linear) and is_own(self.fc2, nn.Linear, BranchSum)
        return BranchDrop.draw(scale, self.drop_branch, shape, self.by_sentence, can_skip, hidden_states)

    def _unjoined(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Average the branches before the activation and again behind it."""
        drop = self._draw(hidden_states)
        if drop.kept == []:  # what is activated is 0
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
        """The network that un-joined branches are in evaluation: matrix and bias, inner and outer."""

        def merged(parameter: torch.Tensor, along: int = 0) -> torch.Tensor:
            return parameter.unflatten(along, (self.branches, -1)).sum(along) * self.merge_scale

        return (merged(self.fc1.weight), merged(self.fc1.bias)), (merged(self.fc2.weight, 1), merged(self.fc2.bias))


def feature_gates(gates: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """Gates `[N, 1]`, or `[B, N, 1]`, shaped and typed to weigh the features `[B, T, N, F]` of branches."""
    return gates[..., None, :, :].to(inner.dtype)
