"""What any Trainer needs to train deep and latent layers.

The weights and the posteriors over layers are optimised on two levels (Li et al. 2020, Algorithm 1):

    for t = 1 ... T:
        for i = 1 ... I:    sample a batch and z, compute the loss, update the weights
        update the posteriors by their gradient of the last of these losses

An optimizer step is an inner one; those whose number is a multiple of I (`inner_steps`) update the posteriors, too.
Beside that the log gets what the papers plot.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..analysis.gradient_norms import GradientNorms
from ..analysis.layer_utilization import LayerUtilization
from ..errors import UserError
from ..models.layer_selection import LayerSelection
from ..models.modeling_base import DeepWidePreTrainedModel
from ..models.training_callback import TrainingStep


@dataclass
class DepthArguments:
    """The fields that `DepthTraining` adds to a Trainer's arguments; their ranges are in `ranges.py`."""

    posterior_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Peak learning rate of the posteriors of latent layers; the schedule is that of the weights. "
            "Default: learning_rate."
        },
    )
    inner_steps: int = field(
        default=1,
        metadata={"help": "Update the posteriors of latent layers in every n-th optimizer step only."},
    )
    gradient_norms: bool = field(
        default=False,
        metadata={"help": "Log the gradient norm of each layer, and plot it at the end."},
    )


def posteriors_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all posteriors over layers, in the order of the model's modules."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, LayerSelection)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]


class DepthTraining:
    """What a Trainer inherits before `Trainer`. Its arguments are `DepthArguments`.

    It tells the model which step it is, optimises posteriors as a group of their own, and logs what the model
    reports, how much each layer is used, and, if asked for, how large its gradient is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.posteriors = posteriors_of(self.model)
        self.add_callback(TrainingStep())
        self.gradient_norms = GradientNorms() if self.args.gradient_norms else None
        if self.gradient_norms is not None:
            self.add_callback(self.gradient_norms)
        if self.posteriors:
            self.add_callback(LayerUtilization())
            return
        for name, default in (("posterior_learning_rate", None), ("inner_steps", 1)):
            if getattr(self.args, name) != default:
                raise UserError(
                    f"training.{name}: {type(self.model).__name__} has no posteriors over layers; leave it out, or "
                    "train a latent_depth model"
                )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As the parent, without the parameters that the model exempts (`no_weight_decay`)."""
        exempt = getattr(self.model, "no_weight_decay", ())
        return [name for name in super().get_decay_parameter_names(model) if name.rpartition(".")[2] not in exempt]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As the parent; posteriors are a group of their own, the last, without weight decay."""
        made_before = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        posteriors = posteriors_of(self.model if model is None else model)
        if posteriors and not made_before:
            own = {id(parameter) for parameter in posteriors}
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
            rate = self.args.posterior_learning_rate or self.args.learning_rate
            optimizer.add_param_group({"params": posteriors, "lr": rate, "weight_decay": 0.0})
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the parent. In steps that are not theirs, posteriors get no gradient: not to clip by, nor to Adam."""
        loss = super().training_step(*args, **kwargs)
        if (self.state.global_step + 1) % self.args.inner_steps:
            for parameter in self.posteriors:
                parameter.grad = None
        if self.gradient_norms is not None and self.accelerator.sync_gradients:
            scaler = self.accelerator.scaler
            scale = 1.0 if scaler is None else scaler.get_scale()
            self.gradient_norms.measure(self.model, self.args, self.state, scale)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the parent, with what the model reports beside the loss."""
        if "loss" in logs and isinstance(self.model, DeepWidePreTrainedModel):
            logs |= self.model.training_logs()
        super().log(logs, *args, **kwargs)
