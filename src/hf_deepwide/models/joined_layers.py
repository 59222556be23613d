"""Layers that hand more than one tensor to the next layer, and whose joints have weights of their own.

What a layer hands on beside its output is its state: the sources of attention residuals, or the streams of
hyper-connections. A state is a tuple of tensors. It travels by position, as reentrant gradient checkpointing needs it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from .configuration_vanilla_transformer import VanillaTransformerConfig

State = tuple[torch.Tensor, ...]


class Join(nn.Module):
    """What joins one sub-layer to the layers before it; its weights are plain parameters."""

    def __init__(self, config: VanillaTransformerConfig, number: int, joints: int) -> None:
        """`number` is the place of this joint in its stack, from 0; `joints` is how many joints each layer has."""
        super().__init__()

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Fill the weights of a new model."""
        raise NotImplementedError

    def initialise_plainly(self, config: VanillaTransformerConfig) -> None:
        """Fill the weights so that a trained stack of residual connections keeps its function, up to rounding."""
        self.initialise(config)

    def decoding_step(self, autocast: bool) -> Any:
        """What computes the same for one token of each row, in a call of `generate` that is under autocast or not."""
        return self

    @classmethod
    def measure(cls, joins: Sequence[Any]) -> dict[str, float]:
        """What the joints of one stack, from bottom to top, have come to: numbers for the log, by name."""
        raise NotImplementedError


class JoinedLayer:
    """Makes of a layer one that takes a state and gives it on: a mixin before `EncoderLayer` or `DecoderLayer`.

    The first layer of a stack that runs has no state before it, and begins one.
    """

    join_class: ClassVar[type[Join]]
    inputs: ClassVar[int]  # how many of a layer's inputs stand between the hidden states and the state

    def __init__(self, config: VanillaTransformerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.joins = nn.ModuleDict()  # by joint; the stack, which counts joints, fills it

    def forward(self, hidden_states: torch.Tensor, *inputs: Any, **kwargs: Any) -> State:
        """`[B, time, D]`, the usual inputs, and a state or none, to `[B, time, D]` and the state behind the layer."""
        inputs, state = inputs[: self.inputs], inputs[self.inputs :]
        return self.end(super().forward(self.begin(hidden_states, state), *inputs, **kwargs))

    def begin(self, hidden_states: torch.Tensor, state: State) -> Any:
        """What `residual` takes and gives in the place of one tensor."""
        raise NotImplementedError

    def end(self, joined: Any) -> State:
        """The layer's output `[B, time, D]`, and its state, of what the last `residual` gave."""
        raise NotImplementedError


def add_joins(layers: nn.ModuleList, config: VanillaTransformerConfig) -> None:
    """Give each joint of a stack's layers its own weights, if they are such layers."""
    joined = [layer for layer in layers if isinstance(layer, JoinedLayer)]
    for index, layer in enumerate(joined):
        for place, joint in enumerate(layer.joints):
            layer.joins[joint] = layer.join_class(config, index * len(layer.joints) + place, len(layer.joints))


def as_state(output: torch.Tensor | State) -> State:
    """What any layer gives, as its output and its state, which a plain layer has not."""
    return output if isinstance(output, tuple) else (output,)
