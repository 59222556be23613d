"""Attention of one new token in each row to the keys and values of all tokens before it.

The equations are the equations of `attention.py`, but for decoding only. Nothing is dropped, the new token sees all
tokens before it, and weights do not change. So one matrix product makes q, k and v. W_q contains the factor 1/sqrt(H),
and the output projection contains the factor 1/N.

Keys are stored in the order that is fastest for the product with the queries. If several beams share keys, the keys
are transposed: all numbers of one feature are neighbours in memory.

Shapes: R rows (sentences times beams), B sentences, S source length, t tokens so far, D model width, heads (of all
branches together), H head width.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from .branches import summed_bias
from .matrix_product import MatrixProduct

BLOCK = 32  # a full cache, or mask of beams, gets room for at least so many more tokens
SLOTS = 64  # the least room of a cache: enough for most sentences, so that the cache is rarely copied
LANES = 16  # numbers in a register; shorter softmaxes are computed number by number, which takes six times as long
MANY = 512  # with at least so many scores, it pays to pad short rows
Make = Callable[..., MatrixProduct]


class Ancestors:
    """The mask that shows each beam its own keys and the keys of its ancestors.

    A beam that continues another beam would need a copy of all keys and values of that beam. Here no key ever moves.
    In one product, all beams of a sentence read the keys of all these beams. This is as fast as if each beam read only
    its own keys. The mask hides the keys that do not belong to a beam's past.
    """

    def __init__(self, rows: int, beams: int) -> None:
        """Start without tokens; `rows` is R, and `beams` is the number of neighbouring rows that share ancestors."""
        self.beams, self.rows = beams, rows
        self.length = 0
        self.bias: torch.Tensor | None = None  # [R / beams, beams, room * beams]: 0 if seen, else the lowest

    def append(self, like: torch.Tensor) -> None:
        """Add a token to each row: one new slot for each beam, which only this beam sees."""
        if self.beams == 1:
            return
        beams, lowest = self.beams, torch.finfo(like.dtype).min
        if self.bias is None or self.length * beams == self.bias.shape[2]:
            room = like.new_full((self.rows // beams, beams, max(BLOCK, self.length) * beams), lowest)
            self.bias = room if self.bias is None else torch.cat([self.bias, room], dim=2)
        self.bias.narrow(2, self.length * beams, beams).diagonal(dim1=1, dim2=2).zero_()
        self.length += 1

    def visible(self) -> torch.Tensor | None:
        """Return the additive mask of the tokens so far, `[R / beams, 1, beams, t * beams]`.

        None means that all slots are visible.
        """
        return None if self.bias is None else self.bias.narrow(2, 0, self.length * self.beams)[:, None]

    def reorder(self, rows: torch.Tensor) -> None:
        """Let row i continue row `rows[i]`, which belongs to the same sentence."""
        if self.bias is not None:
            self.bias = self.bias.flatten(0, 1).index_select(0, rows).view_as(self.bias)

    def keep(self, kept: torch.Tensor, sentences: int) -> None:
        """Keep only the rows of the sentences `kept`; `sentences` is the number of sentences before."""
        self.rows = self.rows // sentences * len(kept)
        if self.bias is not None:
            self.bias = keep_sentences(self.bias, kept, sentences)

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """Select from `states` `[R / beams, heads, t * beams, H]` what each row sees: `[R, heads, t, H]`."""
        if self.bias is None:
            return states.clone()
        slots = (
            (self.bias.narrow(2, 0, self.length * self.beams) == 0).nonzero()[:, 2].view(len(states), self.beams, -1)
        )
        index = slots[:, :, None, :, None].expand(-1, -1, states.shape[1], -1, states.shape[3])
        return states[:, None].expand(-1, self.beams, -1, -1, -1).gather(3, index).flatten(0, 1)


class SelfAttentionStep:
    """Self-attention of a new token. It owns the keys and values of all rows, in tensors with room for more."""

    projections: ClassVar[list[str]] = ["q_proj", "k_proj", "v_proj"]

    def __init__(self, attention: nn.Module, make: Make, ancestors: Ancestors) -> None:
        """Take the weights of a `MultiBranchAttention`; `make` makes a product of a matrix and a bias."""
        self.head_dim = attention.head_dim
        self.project = joint_product(attention, self.projections, make)
        self.merge = self.merge_of(attention, make)
        relative = attention.relative_keys
        self.relative = None if relative is None else relative.table().contiguous()  # [N, H, vectors]
        self.turned = ancestors.beams > 1
        self.begin(ancestors)

    def merge_of(self, attention: nn.Module, make: Make) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that maps the contexts of all heads, `[R, 1, heads * H]`, to the output `[R, 1, D]`."""
        return output_product(attention, make)

    def begin(self, ancestors: Ancestors) -> None:
        """Start without tokens, for the rows of `ancestors`."""
        self.ancestors, self.beams = ancestors, ancestors.beams
        self.slots = self.room = 0
        self.keys: torch.Tensor | None = None  # [R / beams * heads, room, H]; turned: [R / beams * heads, H, room]
        self.values: torch.Tensor | None = None  # [R / beams * heads, room, H]

    def __call__(
        self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Map `[R, 1, D]` to `[R, 1, D]`, without attention weights; `mask` is the mask of `Ancestors`."""
        return self.merge(self.context(self.project(hidden_states), mask)), None

    def context(self, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the contexts of all heads, `[R, 1, heads * H]`, and store the new keys and values.

        Args:
            states: queries, keys and values of the new tokens side by side, `[R, 1, 3 * heads * H]`.
            mask: the mask of `Ancestors`.
        """
        rows, beams, width = states.shape[0], self.beams, self.head_dim
        if rows == 1:
            query, key, value = states.view(3, -1, 1, width).unbind()
        else:
            states = states.view(rows // beams, beams, 3, -1, width).permute(2, 0, 3, 1, 4)
            query, key, value = states.reshape(3, -1, beams, width).unbind()
        if self.slots == self.room:
            self.grow(key)
        if self.turned:
            self.keys.narrow(2, self.slots, beams).copy_(key.transpose(1, 2))
        else:
            self.keys.narrow(1, self.slots, beams).copy_(key)
        self.values.narrow(1, self.slots, beams).copy_(value)
        self.slots += beams
        keys, values = self.seen()
        if self.relative is not None:
            mask = self.relative_mask(query, query.shape[0] // (rows // beams), mask)
        context = attend(query, keys, values, mask)
        if beams > 1:
            context = context.view(rows // beams, -1, beams, width).transpose(1, 2).reshape(rows, 1, -1)
        return context.view(rows, 1, -1)

    def relative_mask(self, query: torch.Tensor, heads: int, mask: torch.Tensor | None) -> torch.Tensor:
        """Return `mask` plus what `RelativeKeys` adds to the scores of `query` `[R / beams * heads, beams, H]`."""
        branches, _, vectors = self.relative.shape
        grouped = query.reshape(-1, branches, heads // branches * self.beams, self.head_dim)
        scores = (grouped @ self.relative.to(query.dtype)).view(-1, heads, self.beams, vectors)
        places = torch.arange(self.slots, device=query.device) // self.beams
        bias = scores.index_select(3, (self.slots // self.beams - 1 - places).clamp(max=vectors - 1))
        return bias if mask is None else bias + mask

    def grow(self, key: torch.Tensor) -> None:
        """Double the room for keys and values that are shaped like `key` `[R / beams * heads, beams, H]`."""
        room = max(2 * self.room, BLOCK * self.beams, SLOTS)
        values = key.new_empty(len(key), room, self.head_dim)
        keys = key.new_empty(len(key), self.head_dim, room) if self.turned else torch.empty_like(values)
        if self.keys is not None and self.values is not None:
            keys.narrow(1 + self.turned, 0, self.room).copy_(self.keys)
            values.narrow(1, 0, self.room).copy_(self.values)
        self.keys, self.values, self.room = keys, values, room

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys `[R / beams * heads, H, slots]` and values `[R / beams * heads, slots, H]` so far."""
        keys = self.keys if self.turned else self.keys.transpose(1, 2)
        return keys.narrow(2, 0, self.slots), self.values.narrow(1, 0, self.slots)

    def keep(self, kept: torch.Tensor, sentences: int) -> None:
        """Keep only the keys and values of the sentences `kept`; `sentences` is the number of sentences before."""
        if self.keys is not None and self.values is not None:
            self.keys = keep_in_place(self.keys, 1 + self.turned, self.slots, kept, sentences)
            self.values = keep_in_place(self.values, 1, self.slots, kept, sentences)

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the tokens so far, `[R, heads, t, H]`."""
        sentences = self.ancestors.rows // self.beams
        keys, values = self.seen()
        states = (each.unflatten(0, (sentences, -1)) for each in (keys.transpose(1, 2), values))
        return tuple(map(self.ancestors.of, states))


class CrossAttentionStep:
    """Attention of a new token to the source. The beams of a sentence share the source's keys and values."""

    def __init__(self, attention: nn.Module, make: Make) -> None:
        """Take the weights of a `MultiBranchAttention`; `make` makes a product of a matrix and a bias."""
        self.head_dim = attention.head_dim
        self.project = joint_product(attention, ["q_proj"], make)
        self.project_source = attention.k_proj, attention.v_proj  # used once, for all tokens of the source
        self.merge = self.merge_of(attention, make)
        self.keys: torch.Tensor | None = None  # [B * heads, S, H]; turned: [B * heads, H, S]
        self.values: torch.Tensor | None = None  # [B * heads, S, H]

    def merge_of(self, attention: nn.Module, make: Make) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that maps the contexts of all heads, `[R, 1, heads * H]`, to the output `[R, 1, D]`."""
        return output_product(attention, make)

    def __call__(
        self, hidden_states: torch.Tensor, mask: torch.Tensor | None, memory: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Map `[R, 1, D]` to `[R, 1, D]`, without attention weights.

        The beams of a sentence attend to the source like several tokens of one sentence.

        Args:
            hidden_states: the new tokens; the rows of a sentence stand together.
            mask: additive, `[B, 1, 1, S]`, or None.
            memory: the source `[B, S, D]`. Only the first call reads its states.
            kwargs: not used.
        """
        return self.merge(self.context(hidden_states, mask, memory)), None

    def context(self, hidden_states: torch.Tensor, mask: torch.Tensor | None, memory: torch.Tensor) -> torch.Tensor:
        """Return the contexts of all heads, `[R, 1, heads * H]`, which are the input of `merge`."""
        rows, sentences, width = hidden_states.shape[0], memory.shape[0], self.head_dim
        if self.keys is None:
            self.turned = rows > sentences
            key, value = (project(memory).unflatten(-1, (-1, width)) for project in self.project_source)
            key = key.permute(0, 2, 3, 1) if self.turned else key.transpose(1, 2)
            self.keys, self.values = (each.flatten(0, 1).contiguous() for each in (key, value.transpose(1, 2)))
        query = self.project(hidden_states).view(sentences, rows // sentences, -1, width)
        heads = query.shape[2]
        keys = self.keys if self.turned else self.keys.transpose(1, 2)
        context = attend(query.transpose(1, 2).reshape(sentences * heads, -1, width), keys, self.values, mask)
        if rows > sentences:
            context = context.view(sentences, heads, -1, width).transpose(1, 2).reshape(rows, 1, -1)
        return context.view(rows, 1, -1)

    def keep(self, kept: torch.Tensor, sentences: int) -> None:
        """Keep only the keys and values of the sentences `kept`; `sentences` is the number of sentences before."""
        if self.keys is not None:
            self.keys, self.values = (keep_sentences(each, kept, sentences) for each in (self.keys, self.values))

    def states(self, sentences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the source, `[B, heads, S, H]`."""
        keys = self.keys.transpose(1, 2) if self.turned else self.keys
        return keys.unflatten(0, (sentences, -1)), self.values.unflatten(0, (sentences, -1))


class ManyRowsSelfAttentionStep(SelfAttentionStep):
    """`SelfAttentionStep` for many rows without beams. Keys and values are stored as `[room, R, heads * H]`.

    Every step reads all keys and values, which are larger than the processor's caches. So the step waits for memory.
    In this order the keys of all rows are contiguous in memory, and are read in half the time. The products with keys
    and values are sums of elementwise products. The class is not for 16-bit numbers: their products would be rounded
    before the sum.
    """

    def context(self, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the contexts as the parent does. No mask is needed, because no row sees the tokens of another row."""
        rows = states.shape[0]
        query, key, value = states.view(rows, 3, -1).unbind(1)
        if self.slots == self.room:
            self.grow(key)
        self.keys.select(0, self.slots).copy_(key)
        self.values.select(0, self.slots).copy_(value)
        self.slots += 1
        by_head = (self.slots, rows, -1, self.head_dim)
        keys, values = (each.narrow(0, 0, self.slots) for each in (self.keys, self.values))
        weights = (keys * query).view(by_head).sum(-1).softmax(0)  # [t, R, heads]
        return (values.view(by_head) * weights[..., None]).sum(0).view(rows, 1, -1)

    def grow(self, key: torch.Tensor) -> None:
        """Double the room for keys and values that are shaped like `key` `[R, heads * H]`."""
        room = max(2 * self.room, BLOCK)
        keys, values = key.new_empty(2, room, *key.shape)
        if self.keys is not None and self.values is not None:
            keys.narrow(0, 0, self.room).copy_(self.keys)
            values.narrow(0, 0, self.room).copy_(self.values)
        self.keys, self.values, self.room = keys, values, room

    def keep(self, kept: torch.Tensor, sentences: int) -> None:
        """Keep only the keys and values of the rows `kept`: one row is one sentence."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (each.index_select(1, kept) for each in (self.keys, self.values))

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the tokens so far, `[R, heads, t, H]`."""
        keys, values = (
            each.narrow(0, 0, self.slots).unflatten(2, (-1, self.head_dim)).permute(1, 2, 0, 3).contiguous()
            for each in (self.keys, self.values)
        )
        return keys, values


class MeanOfValuesStep(SelfAttentionStep):
    """The mean of the values of all tokens so far: attention with queries and keys of zero."""

    projections: ClassVar[list[str]] = ["v_proj"]

    def merge_of(self, attention: nn.Module, make: Make) -> None:
        """Make no copy of the output projection: only the means are read."""

    def mean(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Map `[R, 1, D]` to the means `[R, 1, heads * H]`."""
        value = self.project(hidden_states)
        nothing = torch.zeros_like(value)
        return self.context(torch.cat([nothing, nothing, value], dim=-1), mask)


class MergedAttentionStep(CrossAttentionStep):
    """Merged attention of a new token: `CrossAttentionStep`, and the mean of the target's values."""

    def __init__(self, attention: nn.Module, make: Make, ancestors: Ancestors) -> None:
        """Take the weights of a `MergedAttention`; `make` makes a product of a matrix and a bias."""
        super().__init__(attention, make)
        self.own = MeanOfValuesStep(attention, make, ancestors)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        memory: torch.Tensor,
        causal_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as the parent does, and add the mean; `causal_mask` is the mask of `Ancestors`."""
        context = self.context(hidden_states, mask, memory) + self.own.mean(hidden_states, causal_mask)
        return self.merge(context), None

    def keep(self, kept: torch.Tensor, sentences: int) -> None:
        """Keep only the keys and values of the sentences `kept`; `sentences` is the number of sentences before."""
        super().keep(kept, sentences)
        self.own.keep(kept, sentences)


class BranchedAttentionStep(CrossAttentionStep):
    """Branched attention of a new token to the source: a feed-forward network follows each head."""

    def merge_of(self, attention: nn.Module, make: Make) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function of the parent, for a `BranchedAttention`."""
        outer, activation, heads = make(*attention.outer()), attention.activation, attention.num_heads
        weight, bias = attention.inner_weight().to(outer.dtype), attention.inner_bias().to(outer.dtype)

        def merge(context: torch.Tensor) -> torch.Tensor:
            by_head = context.to(outer.dtype).view(len(context), heads, -1).transpose(0, 1)  # [heads, R, H]
            inner = activation(torch.baddbmm(bias, by_head, weight))
            return outer(inner.transpose(0, 1).reshape(len(context), 1, -1))

        return merge


class DynamicConvolutionStep(SelfAttentionStep):
    """Dynamic convolution of a new token. It owns the gated inputs of all rows, and reads the last window of them."""

    turned = False

    def __init__(self, convolution: nn.Module, make: Make, ancestors: Ancestors) -> None:
        """Take the weights of a `DynamicConvolution`; `make` makes a product of a matrix and a bias."""
        self.head_dim, self.heads, self.width = convolution.head_dim, convolution.heads, convolution.width
        self.project = make(convolution.in_proj.weight, convolution.in_proj.bias)
        self.predict = make(convolution.kernel_proj.weight, None)
        self.merge = make(convolution.out_proj.weight, convolution.out_proj.bias)
        self.begin(ancestors)

    def context(self, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Map the output of W_I for a new token, `[R, 1, 2 * D]`, to the sums of all heads, `[R, 1, D]`."""
        rows, beams = states.shape[0], self.beams
        gated = nn.functional.glu(states)
        value = gated.view(rows // beams, beams, self.heads, -1).transpose(1, 2).reshape(-1, beams, self.head_dim)
        if self.slots == self.room:
            self.grow(value)
        self.values.narrow(1, self.slots, beams).copy_(value)
        self.slots += beams
        scores = self.predict(gated).view(rows // beams, beams, self.heads, self.width).transpose(1, 2)
        kernel = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(gated.dtype)
        seen = min(self.width, self.slots // beams)
        weights = kernel.narrow(3, self.width - seen, seen).repeat_interleave(beams, 3)
        if mask is not None:
            weights = weights * (mask.narrow(3, self.slots - seen * beams, seen * beams) == 0)
        values = self.values.narrow(1, self.slots - seen * beams, seen * beams)
        sums = torch.bmm(weights.flatten(0, 1), values)
        return sums.view(rows // beams, self.heads, beams, -1).transpose(1, 2).reshape(rows, 1, -1)

    def grow(self, key: torch.Tensor) -> None:
        """Double the room as the parent does; the keys are the values."""
        super().grow(key)
        self.keys = self.values

    def keep(self, kept: torch.Tensor, sentences: int) -> None:
        """Keep sentences as the parent does; the keys are the values."""
        if self.values is not None:
            self.keys = self.values = keep_in_place(self.values, 1, self.slots, kept, sentences)


def keep_in_place(states: torch.Tensor, along: int, used: int, kept: torch.Tensor, sentences: int) -> torch.Tensor:
    """Select as `keep_sentences` does, in the same memory.

    The tensor has unused room: only its first `used` entries on the axis `along` matter.
    """
    chosen = keep_sentences(states.narrow(along, 0, used), kept, sentences)
    states = states[: len(chosen)]
    states.narrow(along, 0, used).copy_(chosen)
    return states


def keep_sentences(states: torch.Tensor, kept: torch.Tensor, sentences: int) -> torch.Tensor:
    """Select the entries of the sentences `kept` from a tensor that has equally many entries for each sentence."""
    return states.unflatten(0, (sentences, -1)).index_select(0, kept).flatten(0, 1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute softmax(Q K^T + mask) V with queries that are already scaled.

    On a CPU, for few queries, two products are faster than PyTorch's own attention. On other devices PyTorch's
    attention is used, which is one operation.

    Args:
        query: `[sentences * heads, T, H]`; key `[sentences * heads, H, S]`; value `[sentences * heads, S, H]`.
        mask: additive, `[sentences, 1 or heads, 1 or T, S]`, or None.
    """
    if query.device.type != "cpu":
        sentences = 1 if mask is None else len(mask)
        states = (each.unflatten(0, (sentences, -1)) for each in (query, key.transpose(1, 2), value))
        return nn.functional.scaled_dot_product_attention(*states, attn_mask=mask, scale=1.0).flatten(0, 1)
    scores = torch.bmm(query, key)
    if mask is not None:
        scores.view(len(mask), -1, *scores.shape[1:]).add_(mask)
    if scores.shape[2] < LANES and scores.numel() >= MANY:
        return torch.bmm(short_softmax(scores).to(value.dtype), value)
    if scores.dtype in (torch.float32, torch.float64):
        return torch.bmm(scores.softmax(-1), value)
    return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(value.dtype), value)


def short_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Compute the softmax of many rows of less than `LANES` numbers, in float32 or better."""
    filled = nn.functional.pad(scores, (0, LANES - scores.shape[2]), value=-math.inf)
    full = torch.promote_types(scores.dtype, torch.float32)
    return filled.softmax(-1, dtype=full).narrow(2, 0, scores.shape[2])


def joint_product(attention: nn.Module, names: list[str], make: Make) -> MatrixProduct:
    """Join several projections of one input to one product that scales the queries."""
    weights, biases = [], []
    for name in names:
        projection, scale = getattr(attention, name), attention.scaling if name == "q_proj" else 1
        weights.append(scaled(projection.weight, scale))
        if projection.bias is not None:
            biases.append(scaled(projection.bias, scale))
    return make(torch.cat(weights), torch.cat(biases) if biases else None)


def output_product(attention: nn.Module, make: Make) -> MatrixProduct:
    """Join the output projections of all branches to one product that merges the branches."""
    projection, scale = attention.out_proj, attention.merge_scale
    bias = None if projection.bias is None else scaled(summed_bias(projection), scale)
    return make(scaled(projection.weight, scale), bias)


def scaled(weight: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the weight times the scale, without a copy if the scale is 1."""
    return weight if scale == 1 else weight * scale
