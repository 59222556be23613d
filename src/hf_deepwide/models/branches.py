"""Branches of one sub-layer as one wide operation: draw which branches are kept, slice them out, and sum them.

N branches of the same shape are stored side by side. Their input projections are one matrix with N blocks of rows.
Their output projections are one matrix with N blocks of columns. So

    sum_i (x_i W_i + b_i)  =  [x_1 ... x_N] [W_1; ...; W_N] + sum_i b_i

is one matrix product. A branch that is dropped for the whole batch is cut out of both matrices and not computed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn


def draw_branches(units: int, drop_rate: float) -> list[int]:
    """Draw the branches, or the heads of all branches, that survive one forward pass (MAT, Eq. 5 and 9).

    Each unit is kept if U >= rho, U ~ U[0, 1]. There is one draw per unit, sub-layer and forward pass, for all
    sentences and positions. It comes from the CPU's generator, so that a GPU needs no synchronisation.
    """
    return [i for i, u in enumerate(torch.rand(units, device="cpu").tolist()) if u >= drop_rate]


def draw_gates(sentences: int, shape: tuple[int, int], drop_rate: float, device: torch.device) -> torch.Tensor:
    """Draw 1 for a kept and 0 for a dropped unit, `[sentences, N, units of a branch]` (MAT, Eq. 5 and 9).

    Each sentence has its own U for each unit. So one forward pass averages over as many draws as it has sentences.
    The released code makes one draw per forward pass, and its WMT command averages 128 forward passes in one update.
    """
    return (torch.rand(sentences, *shape, device=device) >= drop_rate).float()


class BranchDrop(NamedTuple):
    """The decision of drop-branch for one forward pass of a sub-layer.

    Attributes:
        scale: the factor of the sub-layer's output: `merge_scale`. In training with drop-branch it is also divided by
            1 - rho, unless the dropped units are heads.
        kept: the branches to compute. None: all.
        gates: 1 for a kept and 0 for a dropped unit. The shape is `[N, units of a branch]` for all sentences, or
            `[B, N, units of a branch]` for each sentence. `B` is 1 in compiled code if all sentences share one draw.
            None: no computed unit is dropped.
    """

    scale: float
    kept: list[int] | None = None
    gates: torch.Tensor | None = None

    @classmethod
    def draw(
        cls, scale: float, rate: float, shape: tuple[int, int], by_sentence: bool, can_skip: bool, x: torch.Tensor
    ) -> "BranchDrop":
        """Draw which of `[N, units of a branch]` are dropped in one forward pass of training on `x` `[B, ...]`.

        If one draw serves the whole batch and the sub-layer `can_skip`, dropped branches are not computed. Otherwise
        all branches are computed and weighed by 0 or 1. `torch.compile` also needs the weights: a list of branches
        would break the graph, and each new list would be compiled again.
        """
        if by_sentence or torch.compiler.is_compiling():
            return cls(scale, gates=draw_gates(len(x) if by_sentence else 1, shape, rate, x.device))
        units = draw_branches(math.prod(shape), rate)
        if len(units) == math.prod(shape):
            return cls(scale)
        if can_skip:
            return cls(scale, kept=units)
        gates = torch.zeros(math.prod(shape))
        gates[units] = 1
        return cls(scale, gates=gates.view(shape).to(x.device))


def merge_scale(branches: int, merge: str) -> float:
    """Return the factor of a sum of N branches: 1/N as in the paper (`"mean"`), or 1/N**2 as in the released code."""
    return 1 / branches if merge == "mean" else 1 / branches**2


def is_own(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a module is an unchanged instance of `kinds`, so that code may read its weights without a call.

    A module is not unchanged in three cases. An adapter (LoRA) wraps it. It is quantised (torchao replaces its weight
    by another kind of tensor). Or a hook runs when the module is called: accelerate's hooks load offloaded weights,
    and PyTorch's hooks compute weights (spectral norm, pruning) or read activations.
    """
    hooked = "forward" in vars(module) or module._forward_pre_hooks or module._forward_hooks
    own = type(module) in kinds and not hooked
    return own and type(module.weight) in (nn.Parameter, torch.Tensor)


def input_projection(
    branches: int, in_features: int, out_features: int, bias: bool = True, *, fused: int = 1
) -> nn.Linear:
    """Make the input projections of N branches: `[batch, time, in]` to `[batch, time, N * out]`.

    `fused` is the number of projections that are initialised as if they were stacked in one matrix.

    The result is a plain `nn.Linear`, because quantisation tools find linear layers by this type.
    """
    return mark(nn.Linear(in_features, branches * out_features, bias=bias), branches_out=branches, fused=fused)


def mark(projection: nn.Linear, **marks: float) -> nn.Linear:
    """Set attributes that the initialisation reads, and return the projection; `gain` scales its initial weights."""
    for name, value in marks.items():
        setattr(projection, name, value)
    return projection


def fans(projection: nn.Linear) -> tuple[int, int]:
    """Return fan-in and fan-out of one branch of a projection; `fused` projections count as one stacked matrix."""
    fan_in = projection.in_features // getattr(projection, "branches_in", 1)
    fan_out = projection.out_features // getattr(projection, "branches_out", 1) * getattr(projection, "fused", 1)
    return fan_in, fan_out


def project(projection: nn.Module, x: torch.Tensor, branches: int, kept: Sequence[int] | None = None) -> torch.Tensor:
    """Map `[B, T, in]` to `[B, T, branches * out]`, or only to the features of the branches in `kept`."""
    return projection(x) if kept is None else project_together([projection], x, branches, kept)[0]


def project_together(
    projections: Sequence[nn.Linear], x: torch.Tensor, branches: int = 1, kept: Sequence[int] | None = None
) -> tuple[torch.Tensor, ...]:
    """Compute several projections of the same `x` `[B, T, in]` as one product, and return each as `project` does.

    Joining the weights copies them. This pays in training, where `x` has many more rows than the weights. It also
    saves one cast of `x`, and one sum of its gradients, per projection.
    """
    weights = [block for each in projections for block in _blocks(each.weight, branches, kept)]
    biases = [block for each in projections if each.bias is not None for block in _blocks(each.bias, branches, kept)]
    weight = torch.cat(weights)
    return nn.functional.linear(x, weight, torch.cat(biases) if biases else None).chunk(len(projections), dim=-1)


def _blocks(parameter: torch.Tensor, branches: int, kept: Sequence[int] | None) -> Sequence[torch.Tensor]:
    """Return the rows of all branches as one block, or one block for each branch in `kept`."""
    if kept is None:
        return [parameter]
    blocks = parameter.chunk(branches)
    return [blocks[i] for i in kept]


class BranchSum(nn.Linear):
    """The sum of the output projections of N branches: `[batch, time, kept * in]` to `[batch, time, out]`.

    Each branch has its own bias (`bias` holds N blocks of `out`), which is dropped with the branch.
    """

    def __init__(self, branches: int, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(branches * in_features, out_features, bias=bias)
        self.branches = self.branches_in = branches
        if bias and branches > 1:
            self.bias = nn.Parameter(torch.zeros(branches * out_features))

    def forward(
        self, x: torch.Tensor, kept: Sequence[int] | None = None, gates: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum over all branches, or only over the branches in `kept`.

        `gates` `[N]`, or `[batch, N]`, weighs the biases. The caller has already weighed `x` with the same gates.
        """
        weight, bias = self.weight, self.bias
        if kept is not None:
            weights = weight.chunk(self.branches, dim=1)
            weight = torch.cat([weights[i] for i in kept], dim=1)
        if bias is not None and (self.branches > 1 or gates is not None):
            bias = bias.view(self.branches, -1)
            if kept is not None:
                bias = bias[list(kept)]
            elif gates is not None:
                bias = bias * gates.to(bias.dtype)[..., None]
            bias = bias.sum(-2)
            if bias.dim() > 1:  # [batch, out]: each sentence has its own
                output = nn.functional.linear(x, weight)
                return output + bias[:, None].to(output.dtype)
        return nn.functional.linear(x, weight, bias)


def output_projection(branches: int, in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """Make the summed output projections of N branches: a `BranchSum`, or a plain `nn.Linear` for one branch."""
    if branches == 1:
        return nn.Linear(in_features, out_features, bias=bias)
    return BranchSum(branches, in_features, out_features, bias)


def summed_bias(projection: nn.Linear) -> torch.Tensor | None:
    """Return the sum `[out]` of the biases of all branches of an `output_projection`, or None without biases."""
    return None if projection.bias is None else projection.bias.view(-1, projection.out_features).sum(0)


def sum_branches(
    projection: nn.Module,
    x: torch.Tensor,
    branches: int,
    kept: Sequence[int] | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply an `output_projection` to all branches of `x` `[B, T, branches * in]`, and return the sum `[B, T, D]`.

    Branches may be left out (`kept`), or weighed by 0 or 1 (`gates` `[N]` or `[B, N]`): see `BranchSum`.
    """
    if kept is not None:
        return projection(x, kept=kept)
    if gates is None:
        return projection(x)
    if branches > 1:
        return projection(x, gates=gates)
    output = projection(x)
    return output * gates[..., None].to(output.dtype)


def project_by_branch(projection: nn.Module, x: torch.Tensor, branches: int) -> torch.Tensor:
    """Apply an `input_projection` to `x` `[batch, time, in]`, branch by branch: `[N, batch * time, out]`.

    With this layout, `outputs_by_branch` needs no copies. On a CPU, the two functions together are as fast as a loop
    over the branches. On a GPU they are two operations.
    """
    if not is_own(projection, nn.Linear):
        return projection(x).unflatten(-1, (branches, -1)).flatten(0, -3).transpose(0, 1)
    x = x.flatten(0, -2).expand(branches, -1, -1)
    weight = projection.weight.unflatten(0, (branches, -1)).transpose(1, 2)
    if projection.bias is None:
        return torch.bmm(x, weight)
    return torch.baddbmm(projection.bias.view(branches, 1, -1), x, weight)


def outputs_by_branch(projection: nn.Module, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the N outputs `[N, tokens, out]` that an `output_projection` would sum, for `x` `[N, tokens, in]`.

    `weights` `[N]` weighs each output. The matrices are weighed, because in training they have fewer rows than `x`.
    """
    branches, _, width = x.shape
    if not is_own(projection, nn.Linear, BranchSum):
        if branches == 1:
            outputs = projection(x)
            return outputs if weights is None else outputs * weights[:, None, None].to(outputs.dtype)
        # the output for one branch, while the inputs of all other branches are zero
        gates = torch.eye(branches, device=x.device)
        alone = [
            projection(nn.functional.pad(x[i], (i * width, (branches - 1 - i) * width)), gates=gates[i])
            for i in range(branches)
        ]
        outputs = torch.stack(alone)
        return outputs if weights is None else outputs * weights[:, None, None].to(outputs.dtype)
    weight = projection.weight.unflatten(1, (branches, -1)).permute(1, 2, 0)
    bias = None if projection.bias is None else projection.bias.view(branches, 1, -1)
    if weights is not None:
        weights = weights[:, None, None]
        weight = weight * weights
        bias = None if bias is None else bias * weights
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)


def gated_outputs(projection: nn.Module, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Weigh the output features of each branch in chunks, and sum the branches: `[B, T, N * in]` to `[B, T, out]`.

    `gates` `[N, M]`, or `[B, N, M]`, weighs each of the M chunks of a branch's output, bias included.
    """
    branches, chunks = gates.shape[-2:]
    inner = x.unflatten(-1, (branches, -1)).flatten(0, 1).transpose(0, 1)
    outputs = outputs_by_branch(projection, inner).view(branches, *x.shape[:2], chunks, -1)
    by_branch = gates.expand(len(x), -1, -1).transpose(0, 1)[:, :, None, :, None]
    return (outputs * by_branch.to(outputs.dtype)).sum(0).flatten(-2)


def no_gradient(module: nn.Module, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Return a scalar 0 connected to a module's parameters and inputs, so that their gradients are 0 instead of None.

    The scalar is added to the output that replaces a skipped module. DistributedDataParallel waits for the gradient of
    every parameter. This includes a norm before the module, and the encoder that feeds a cross-attention.
    """
    sources = [*inputs, *module.parameters()]
    return sum(x[:0].sum() for x in sources if x is not None and x.requires_grad)


def no_branch(module: nn.Module, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Return the output of a sub-layer whose branches all drop: zeros, shaped like its first input `[B, time, D]`."""
    return torch.zeros_like(inputs[0]) + no_gradient(module, *inputs)
