"""The part of a trainer that trains deep and latent layers.

The weights and the posteriors over layers are optimised on two levels (Li et al. 2020, Algorithm 1):

    for t = 1 ... T:
        for i = 1 ... I:    sample a batch and z, compute the loss, update the weights
        update the posteriors by their gradient of the last of these losses

Each optimizer step is an inner step. Every I-th step (`inner_steps`) updates the posteriors, too. The log contains the
numbers that the papers plot.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..analysis.gradient_norms import GradientNorms
from ..analysis.layer_utilization import LayerUtilization
from ..errors import UserError
from ..models.layer_selection import LayerSelection
from ..models.modeling_latent_depth import LatentDepthLoss
from ..models.pretrained_model import DeepWidePreTrainedModel
from ..models.training_callback import TrainingStep

if TYPE_CHECKING:
    from .trainer import TokenBatchTrainer

logger = logging.getLogger(__name__)


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


def posterior_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all posteriors over layers, in the order of the model's modules."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, LayerSelection)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]


class AnnealingFits(TrainerCallback):
    """A callback that warns if the temperature will not reach its final value before training ends."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the temperature. The number of steps is known only now."""
        config = kwargs["model"].config
        if config.temperature_anneal_steps > state.max_steps:
            logger.warning(
                "model.temperature_anneal_steps is %d, and the whole training has %d steps: the temperature ends at "
                "%.2f, and not at final_temperature %g. Lower temperature_anneal_steps, or train for longer",
                config.temperature_anneal_steps,
                state.max_steps,
                config.temperature_at(state.max_steps),
                config.final_temperature,
            )


class DepthTraining:
    """The part of a trainer for deep and latent layers. Its arguments are `DepthArguments`.

    It optimises the posteriors as a separate parameter group. It logs the values that the model reports, how much each
    layer is used, and, with `gradient_norms`, the gradient norm of each layer.

    Args:
        trainer: the trainer, whose model, arguments and state it looks at.

    Raises:
        UserError: an argument is about posteriors, and the model has none.
    """

    def __init__(self, trainer: "TokenBatchTrainer") -> None:
        self.trainer = trainer
        self.find_posteriors()
        self.gradient_norms = GradientNorms() if trainer.args.gradient_norms else None
        for name, default in (("posterior_learning_rate", None), ("inner_steps", 1)):
            if not self.posterior_parameters and getattr(trainer.args, name) != default:
                raise UserError(
                    f"training.{name}: {type(trainer.model).__name__} has no posteriors over layers; leave it out, "
                    "or train a latent_depth model"
                )

    @property
    def callbacks(self) -> Iterator[TrainerCallback]:
        """Callbacks that set the model's step, and that add to the log."""
        yield TrainingStep()
        if self.gradient_norms is not None:
            yield self.gradient_norms
        if self.posterior_parameters:
            yield LayerUtilization()
            yield AnnealingFits()

    def find_posteriors(self) -> None:
        """Find the posteriors in the trainer's model."""
        self.posterior_parameters = posterior_parameters(self.trainer.model)

    def add_group(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Move the posteriors to a separate parameter group, the last one, without weight decay."""
        parameters = posterior_parameters(model)
        if not parameters:
            return
        own = {id(parameter) for parameter in parameters}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
        rate = self.trainer.args.posterior_learning_rate or self.trainer.args.learning_rate
        optimizer.add_param_group({"params": parameters, "lr": rate, "weight_decay": 0.0})

    def after_backward(self) -> None:
        """Before clipping: drop the posteriors' gradients if the step does not update them; measure gradient norms."""
        trainer = self.trainer
        if (trainer.state.global_step + 1) % trainer.args.inner_steps:
            for parameter in self.posterior_parameters:
                parameter.grad = None
        if self.gradient_norms is not None and trainer.accelerator.sync_gradients:
            scaler = trainer.accelerator.scaler
            scale = 1.0 if scaler is None else scaler.get_scale()
            self.gradient_norms.measure(trainer.model, trainer.args, trainer.state, scale)

    def logs(self) -> dict[str, float]:
        """Return the values that the model reports beside the loss, over all processes."""
        model = self.trainer.model
        if isinstance(model, LatentDepthLoss):
            model.means.reduce(lambda sums: self.trainer.accelerator.reduce(sums, "sum"))
        return model.training_logs() if isinstance(model, DeepWidePreTrainedModel) else {}
