"""Position-wise feed-forward networks, one or several branches of them.

Shapes: B batch, T time, D model width, N branches, F inner width of one branch.
"""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from .branches import BranchDrop, BranchInput, BranchSum, draw_branches, draw_gates, merge_scale, no_branch
from .dropout import Dropout


class MultiBranchFeedForward(nn.Module):
    """(1/N) sum_i FFN_i(x), FFN_i(x) = act(x W1_i + b1_i) W2_i + b2_i (MAT, Eq. 3 and 8).

    In training each branch is dropped with probability rho, and kept ones are scaled by 1 / (1 - rho) (Eq. 7 and 8).
    Where all sentences drop the same branches, dropped branches are not computed. The residual is not part of it.
    """

    def __init__(self, config: Any, ffn_dim: int) -> None:
        super().__init__()
        self.branches = config.ffn_branches
        self.drop_branch = config.drop_branch if config.ffn_drop_branch is None else config.ffn_drop_branch
        self.by_sentence = config.drop_granularity == "sentence"
        self.merge_scale = merge_scale(self.branches, config.branch_merge)
        self.activation = ACT2FN[config.activation_function]
        self.activation_dropout = Dropout(config.activation_dropout)
        self.fc1 = BranchInput(self.branches, config.d_model, ffn_dim)
        self.fc2 = BranchSum(self.branches, ffn_dim, config.d_model)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        drop = BranchDrop(self.merge_scale)
        if self.training and self.drop_branch > 0:
            scale, device = self.merge_scale / (1 - self.drop_branch), hidden_states.device
            if self.by_sentence:
                gates = draw_gates(len(hidden_states), (self.branches, 1), self.drop_branch, device)
                drop = BranchDrop(scale, gates=gates)
            else:
                kept = draw_branches(self.branches, self.drop_branch)
                if not kept:
                    return no_branch(self, hidden_states)
                plain = type(self.fc1) is BranchInput and type(self.fc2) is BranchSum  # not wrapped (LoRA)
                drop = BranchDrop.of(scale, kept, (self.branches, 1), plain, device)

        inner = self.fc1(hidden_states) if drop.kept is None else self.fc1(hidden_states, kept=drop.kept)
        inner = self.activation_dropout(self.activation(inner))
        if self.branches == 1:
            output = self.fc2(inner)
            if drop.gates is not None:  # [B, 1, 1]: one branch needs no weighing inside
                output = output * drop.gates.to(output.dtype)
        elif drop.gates is None:
            output = self.fc2(inner, kept=drop.kept)
        else:  # [N, 1] or [B, N, 1]
            gates = drop.gates[..., None, :, :].to(inner.dtype)
            inner = (inner.unflatten(-1, (self.branches, -1)) * gates).flatten(-2)
            output = self.fc2(inner, gates=drop.gates[..., 0])
        return output if drop.scale == 1 else output * drop.scale
