"""Branches of one sub-layer as one wide operation: drawing which are kept, slicing them out, and summing them.

N branches of the same shape are stored side by side: their input projections as one matrix with N blocks of rows,
their output projections as one matrix with N blocks of columns, so that

    sum_i (x_i W_i + b_i)  =  [x_1 ... x_N] [W_1; ...; W_N] + sum_i b_i

is one matrix product. A branch that is dropped for the whole batch is sliced out of both and never computed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn


def draw_branches(units: int, drop_rate: float) -> list[int]:
    """Draw the branches, or the heads of all branches, that survive one forward pass (MAT, Eq. 5 and 9).

    Each is kept if U >= rho, U ~ U[0, 1]. One draw per unit, sub-layer and forward pass is shared by all sentences and
    positions. It comes from the CPU's generator, so that on a GPU the decision needs no synchronisation.
    """
    return [i for i, u in enumerate(torch.rand(units, device="cpu").tolist()) if u >= drop_rate]


def draw_gates(sentences: int, shape: tuple[int, int], drop_rate: float, device: torch.device) -> torch.Tensor:
    """Draw 1 for a kept and 0 for a dropped unit, `[sentences, N, units of a branch]` (MAT, Eq. 5 and 9).

    Each sentence has its own U for each unit. One forward pass thus averages over as many draws as it has sentences.
    The released code makes one draw a forward pass, and its WMT command averages 128 forward passes in an update.
    """
    return (torch.rand(sentences, *shape, device=device) >= drop_rate).float()


class BranchDrop(NamedTuple):
    """What drop-branch decides for one forward pass of a sub-layer.

    Attributes:
        scale: the factor of the sub-layer's output: 1/N, and in training 1 / (1 - rho) where whole branches drop.
        kept: the branches to compute. None: all.
        gates: 1 for a kept and 0 for a dropped unit, `[N, units of a branch]`, or `[B, N, units of a branch]` where
            each sentence has its own (`B` is 1 where they share one). None: nothing that is computed drops.
    """

    scale: float
    kept: list[int] | None = None
    gates: torch.Tensor | None = None

    @classmethod
    def draw(
        cls, scale: float, rate: float, shape: tuple[int, int], by_sentence: bool, can_skip: bool, x: torch.Tensor
    ) -> "BranchDrop":
        """Draw which of `[N, units of a branch]` drop in one forward pass of training on `x` `[B, ...]`.

        A draw for the whole batch leaves out what it drops, if the sub-layer `can_skip`; else all is computed and
        weighed by 0 or 1. So it is within `torch.compile`, too: a list of branches would break the graph, and each
        other list would compile it anew.
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
    """The factor of a sum of N branches: 1/N as in the paper (`"mean"`), or the released code's 1/N**2."""
    return 1 / branches if merge == "mean" else 1 / branches**2


def is_own(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of one of these kinds, as we made it, so that its weights may be read without calling it.

    Otherwise an adapter (LoRA) wraps it, it was quantised (torchao puts a tensor of another kind in its place), or
    something acts when it is called: accelerate's hooks bring offloaded weights, and PyTorch's compute weights
    (spectral norm, pruning) or look at activations.
    """
    hooked = "forward" in vars(module) or module._forward_pre_hooks or module._forward_hooks
    own = type(module) in kinds and not hooked
    return own and type(module.weight) in (nn.Parameter, torch.Tensor)


def input_projection(
    branches: int, in_features: int, out_features: int, bias: bool = True, *, fused: int = 1
) -> nn.Linear:
    """Input projections of N branches: `[batch, time, in]` to `[batch, time, N * out]`.

    `fused` tells the initialisation that so many projections start as if they were one matrix, stacked.

    It is a plain `nn.Linear`, which tools that quantise models know by its type.
    """
    return mark(nn.Linear(in_features, branches * out_features, bias=bias), branches_out=branches, fused=fused)


def mark(projection: nn.Linear, **marks: float) -> nn.Linear:
    """The projection with attributes that the initialisation reads; `gain` makes it start so many times as large."""
    for name, value in marks.items():
        setattr(projection, name, value)
    return projection


def fans(projection: nn.Linear) -> tuple[int, int]:
    """Fan-in and fan-out of one branch of a projection, or of the matrix as a part of which it starts."""
    fan_in = projection.in_features // getattr(projection, "branches_in", 1)
    fan_out = projection.out_features // getattr(projection, "branches_out", 1) * getattr(projection, "fused", 1)
    return fan_in, fan_out


def project(projection: nn.Module, x: torch.Tensor, branches: int, kept: Sequence[int] | None = None) -> torch.Tensor:
    """`[B, T, in]` to `[B, T, branches * out]`, or only to the features of the branches in `kept`."""
    return projection(x) if kept is None else project_together([projection], x, branches, kept)[0]


def project_together(
    projections: Sequence[nn.Linear], x: torch.Tensor, branches: int = 1, kept: Sequence[int] | None = None
) -> tuple[torch.Tensor, ...]:
    """Several projections of the same `x` `[B, T, in]` as one matrix product, each as `project` gives it.

    Joining the weights copies them. This pays where `x` has many more rows than the weights: in training. There it
    also saves casting `x`, and adding up its gradients, once per projection.
    """
    weights = [block for each in projections for block in _blocks(each.weight, branches, kept)]
    biases = [block for each in projections if each.bias is not None for block in _blocks(each.bias, branches, kept)]
    weight = torch.cat(weights)
    return nn.functional.linear(x, weight, torch.cat(biases) if biases else None).chunk(len(projections), dim=-1)


def _blocks(parameter: torch.Tensor, branches: int, kept: Sequence[int] | None) -> Sequence[torch.Tensor]:
    """The rows of all branches as one block, or of those in `kept`, in blocks."""
    if kept is None:
        return [parameter]
    blocks = parameter.chunk(branches)
    return [blocks[i] for i in kept]


class BranchSum(nn.Linear):
    """Output projections of N branches, summed: `[batch, time, kept * in]` to `[batch, time, out]`.

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
        """Sum over all branches, or only over those in `kept`.

        `gates` `[N]`, or `[batch, N]`, weighs the biases as `x` was weighed.
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
    """Output projections of N branches, summed. That of a single branch is a plain `nn.Linear`."""
    if branches == 1:
        return nn.Linear(in_features, out_features, bias=bias)
    return BranchSum(branches, in_features, out_features, bias)


def summed_bias(projection: nn.Linear) -> torch.Tensor | None:
    """The biases of all branches of an `output_projection` as one, `[out]`."""
    return None if projection.bias is None else projection.bias.view(-1, projection.out_features).sum(0)


def sum_branches(
    projection: nn.Module,
    x: torch.Tensor,
    branches: int,
    kept: Sequence[int] | None = None,
    gates: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum `[B, T, D]` of what an `output_projection` makes of each branch of `x` `[B, T, branches * in]`.

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
    """What an `input_projection` makes of `x` `[batch, time, in]`, branch by branch: `[N, batch * time, out]`.

    In this layout a following `outputs_by_branch` needs no copies. On a CPU the two together are as fast as a loop
    over the branches; on a GPU they are two operations.
    """
    if not is_own(projection, nn.Linear):
        return projection(x).unflatten(-1, (branches, -1)).flatten(0, -3).transpose(0, 1)
    x = x.flatten(0, -2).expand(branches, -1, -1)
    weight = projection.weight.unflatten(0, (branches, -1)).transpose(1, 2)
    if projection.bias is None:
        return torch.bmm(x, weight)
    return torch.baddbmm(projection.bias.view(branches, 1, -1), x, weight)


def outputs_by_branch(projection: nn.Module, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The N outputs `[N, tokens, out]` that an `output_projection` would sum, of `x` `[N, tokens, in]`.

    With `weights` `[N]` each is weighed: in the matrices, which in training have fewer rows than `x`.
    """
    branches, _, width = x.shape
    if not is_own(projection, nn.Linear, BranchSum):
        if branches == 1:
            outputs = projection(x)
            return outputs if weights is None else outputs * weights[:, None, None].to(outputs.dtype)
        # what it gives for one branch, the others being zero
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
    """Sum the outputs of the branches, whose features are weighed in chunks: `[B, T, N * in]` to `[B, T, out]`.

    `gates` `[N, M]`, or `[B, N, M]`, weighs each of the M chunks of a branch's output, its bias included.
    """
    branches, chunks = gates.shape[-2:]
    inner = x.unflatten(-1, (branches, -1)).flatten(0, 1).transpose(0, 1)
    outputs = outputs_by_branch(projection, inner).view(branches, *x.shape[:2], chunks, -1)
    by_branch = gates.expand(len(x), -1, -1).transpose(0, 1)[:, :, None, :, None]
    return (outputs * by_branch.to(outputs.dtype)).sum(0).flatten(-2)


def no_gradient(module: nn.Module, *inputs: torch.Tensor | None) -> torch.Tensor:
    """A scalar 0 connected to the module's parameters and inputs, so that their gradients are zero instead of None.

    It is added to the output that replaces a skipped module: DistributedDataParallel waits for every gradient, also
    for the gradients of a norm before the module, and of the encoder behind a cross-attention.
    """
    sources = [*inputs, *module.parameters()]
    return sum(x[:0].sum() for x in sources if x is not None and x.requires_grad)


def no_branch(module: nn.Module, *inputs: torch.Tensor | None) -> torch.Tensor:
    """The output of a sub-layer whose branches were all dropped: zero, shaped like its first input `[B, time, D]`."""
    return torch.zeros_like(inputs[0]) + no_gradient(module, *inputs)
