"""Layers that pass more than one tensor to the next layer, and whose joints have weights of their own.

A layer passes on its output and a state: the sources of attention residuals, or the streams of hyper-connections. A
state is a tuple of tensors. The tensors are positional arguments, as reentrant gradient checkpointing requires.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from .configuration_vanilla_transformer import VanillaTransformerConfig

State = tuple[torch.Tensor, ...]


class Join(nn.Module):
    """A joint: it connects one sub-layer to the layers before it. Its weights are plain parameters."""

    def __init__(self, config: VanillaTransformerConfig, number: int, joints: int) -> None:
        """Make the joint.

        Args:
            config: the model's config.
            number: position of this joint in its stack, from 0.
            joints: number of joints in each layer.
        """
        super().__init__()

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Fill the weights of a new model."""
        raise NotImplementedError

    def initialise_plainly(self, config: VanillaTransformerConfig) -> None:
        """Fill the weights so that a trained stack with residual connections computes the same, up to rounding."""
        self.initialise(config)

    def decoding_step(self, autocast: bool) -> Any:
        """Return a callable that computes the same for one token of each row; `autocast`: whether autocast is on."""
        return self

    @classmethod
    def measure(cls, joins: Sequence[Any]) -> dict[str, float]:
        """Return numbers for the log, by name: what the joints of one stack, from bottom to top, have learned."""
        raise NotImplementedError


class JoinedLayer:
    """A mixin for layers that take a state and pass it on. It stands before `EncoderLayer` or `DecoderLayer`.

    The first layer that runs in a stack gets no state, and begins a new one.
    """

    join_class: ClassVar[type[Join]]
    inputs: ClassVar[int]  # number of positional arguments between the hidden states and the state

    def __init__(self, config: VanillaTransformerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.joins = nn.ModuleDict()  # by joint; filled by `add_joins`, because only the stack can number joints

    def forward(self, hidden_states: torch.Tensor, *inputs: Any, **kwargs: Any) -> State:
        """Run the layer on `[B, time, D]`, its usual inputs and a state, if any. Return `[B, time, D]` and a state."""
        inputs, state = inputs[: self.inputs], inputs[self.inputs :]
        return self.end(super().forward(self.begin(hidden_states, state), *inputs, **kwargs))

    def begin(self, hidden_states: torch.Tensor, state: State) -> Any:
        """Return the object that `residual` takes and returns in place of one tensor."""
        raise NotImplementedError

    def end(self, joined: Any) -> State:
        """Return the layer's output `[B, time, D]` and its state, made from the result of the last `residual`."""
        raise NotImplementedError


def add_joins(layers: nn.ModuleList, config: VanillaTransformerConfig) -> None:
    """Give each joint in a stack's layers its own weights, if the layers are `JoinedLayer`s."""
    joined = [layer for layer in layers if isinstance(layer, JoinedLayer)]
    for index, layer in enumerate(joined):
        for place, joint in enumerate(layer.joints):
            layer.joins[joint] = layer.join_class(config, index * len(layer.joints) + place, len(layer.joints))


def as_state(output: torch.Tensor | State) -> State:
    """Return any layer's result as output and state; a plain layer has no state."""
    return output if isinstance(output, tuple) else (output,)
