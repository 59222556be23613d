"""The Transformer with latent depth (Li et al. 2020, "Deep Transformers with Latent Depth"), arXiv 2009.13102.

Whether layer l is used is a latent variable z_l, a factor of all its sub-layers (section 2.1):

    x_{l+1} = x_l + z_l F_l(x_l),  z_l ~ Bernoulli(q_l)                                                       (Eq. 2)

As in the released code, this means x <- x + z_l SubLayer(LN(x)) for each sub-layer in turn; with `layer_norms=False`
x <- x + z_l SubLayer(x), which the paper reports to train. In training z is a Gumbel-softmax sample from the
posterior q,

    z_l = sigmoid((a_l + eps_1 - eps_0) / tau),  q_l = sigmoid(a_l),  eps ~ Gumbel(0, 1)                        (Eq. 5)

drawn once per forward pass for each language (pair), as each has a posterior of its own (section 2.2). In evaluation
z_l is about the mean of these samples. Where training ended with samples of 0 and 1, z_l is 1 if q_l >= 1/2, else 0
(`inference_selection`). Then layers that no sentence uses are not computed, and `hf_deepwide.prune` removes them for
good. The loss is

    E_q[-log p(y | x, z)] + beta KL(q || p) + lambda |sum_l u_l - K|^2                                        (Eq. 8)

with u_l the mean of z_l over languages. `layer_selection` computes its terms; stacks, layers and everything else
are those of the vanilla pre-norm Transformer.
"""

from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.utils import logging

from .attention import self_attention_cache
from .configuration_latent_depth import LatentDepthConfig
from .layer_selection import LayerSelection, sharing_error, target_depth_error
from .layers import remove_norms
from .loss import token_count
from .modeling_base import DeepWideModel, WithPosteriors
from .pretrained_model import DeepWidePreTrainedModel
from .running_means import RunningMeans
from .stacks import Decoder, Encoder, Stack
from .training_callback import LatentDepthCallback

logger = logging.get_logger(__name__)


class LatentDepthPreTrainedModel(DeepWidePreTrainedModel):
    """What the models of this family share."""

    config_class = LatentDepthConfig
    no_weight_decay = ("layer_logits",)

    @property
    def layer_selections(self) -> dict[str, LayerSelection]:
        """The posteriors of each latent stack, `"encoder"` and `"decoder"`."""
        stacks = {name: getattr(self.base_model, name, None) for name in ("encoder", "decoder")}
        found = {name: getattr(stack, "layer_selection", None) for name, stack in stacks.items()}
        return {name: selection for name, selection in found.items() if selection is not None}

    def begin_step(self, step: int) -> None:
        """Tell the posteriors the step, on which temperature, hard selection and annealing depend.

        The model does not count steps: of a batch it cannot tell whether it ends a step. The trainers of this package
        set the number, and so does `LatentDepthCallback` in any other Trainer. The number is not saved with the model,
        because a checkpoint of the Trainer has it (`global_step`). A run that is resumed goes on at its step; a loaded
        model that is trained anew begins at 0. Without the callback the number stays at 0, and a warning says so.
        """
        for selection in self.layer_selections.values():
            selection.training_step = step

    def training_callback(self, label_smoothing: float = 0.0) -> LatentDepthCallback:
        """What a Trainer that is not ours needs: `trainer.add_callback(model.training_callback())`."""
        return LatentDepthCallback(label_smoothing)


class LatentStack(LatentDepthPreTrainedModel, Stack):
    """Layers, each weighed by its z or left out."""

    layer_selection: LayerSelection | None

    def become_latent(self, config: LatentDepthConfig, stack: str) -> None:
        """Let the stack, `"encoder"` or `"decoder"`, select its layers or be without norms, as the config says."""
        self.layer_selection = LayerSelection(config, stack) if getattr(config, f"latent_{stack}") else None
        if not config.layer_norms:
            for module in (*self.layers, self):
                remove_norms(module)

    def run_layers(
        self, hidden_states: torch.Tensor, *inputs: Any, posteriors: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Run the layers that each sentence's posterior selects, `[B, time, D]` to `[B, time, D]`; see `Stack`.

        `posteriors` `[B]` are the ids of the posteriors, under the name of the model's argument.
        """
        if self.layer_selection is None:
            return super().run_layers(hidden_states, *inputs, **kwargs)
        cache = kwargs.get("past_key_values")
        gates = self.layer_selection(posteriors, hidden_states.shape[0], self._may_skip(cache, kwargs))
        if gates[0] is False and cache is not None:
            count_tokens(cache, hidden_states)
        for layer, gate in zip(self.layers, gates, strict=True):
            if gate is not False:
                hidden_states = layer(hidden_states, *inputs, None if gate is True else gate, **kwargs)
        return hidden_states

    def _may_skip(self, cache: Cache | None, kwargs: dict[str, Any]) -> bool:
        """Whether layers that are not used can be left out.

        All layers are computed, and weighed by 0 or 1, in two cases: every layer's states are asked for, or one
        compiled graph has to serve every input (while compiling, and with a static cache).
        """
        asked = ("output_hidden_states", "output_attentions")
        if any(kwargs.get(name, getattr(self.config, name)) for name in asked):
            return False
        return not (torch.compiler.is_compiling() or (cache is not None and cache.is_compileable))


def count_tokens(cache: Cache, hidden_states: torch.Tensor) -> None:
    """Put one number for each new token `[B, T, D]` into the first layer's slot, off which lengths are read.

    Layers keep their slots, whichever are used, so that of a first layer that is left out would stay empty. A slot
    that holds a prefix (PEFT's prefix tuning) has heads and a width already.
    """
    cache = self_attention_cache(cache)
    keys = cache.layers[0].keys if cache.layers and cache.layers[0].is_initialized else None
    heads, width = (1, 1) if keys is None else (keys.shape[1], keys.shape[3])
    ones = hidden_states.new_ones(hidden_states.shape[0], heads, hidden_states.shape[1], width)
    cache.update(ones, ones, 0)


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """Log a warning, also when the caller is compiled: then while it is traced."""
    logger.warning_once(message)


class LatentEncoder(LatentStack, Encoder):
    """The encoder, of latent depth in LL-E and LL-Both."""

    def __init__(self, config: LatentDepthConfig) -> None:
        super().__init__(config)
        self.become_latent(config, "encoder")


class LatentDecoder(LatentStack, Decoder):
    """The decoder, of latent depth in LL-D and LL-Both."""

    def __init__(self, config: LatentDepthConfig) -> None:
        super().__init__(config)
        self.become_latent(config, "decoder")


class LatentDepthModel(LatentDepthPreTrainedModel, DeepWideModel):
    """Encoder and decoder without a head."""

    encoder_class = LatentEncoder
    decoder_class = LatentDecoder


class LatentDepthLoss(LatentDepthPreTrainedModel):
    """The loss of Eq. 8 for models with a head, and what of it is logged."""

    def __init__(self, config: LatentDepthConfig) -> None:
        super().__init__(config)
        self.means = RunningMeans()

    def objective(
        self,
        loss: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | None:
        """Add KL and target depth to the cross-entropy, in training; without labels there is nothing to add to.

        The cross-entropy may be this batch's part of a mean over `num_items_in_batch` tokens. Then both terms are
        weighed by this batch's part of the tokens, and count once in the sum over devices and accumulation steps.
        """
        if not self.training:
            return loss
        self._warn_of_another_loss(labels)
        if labels is None:
            return None
        labels = labels.to(loss.device)
        tokens, items = (labels != -100).sum(), token_count(labels, num_items_in_batch)
        self.means.add("reconstruction", loss * items, tokens)
        config, step = self.config, self.training_step
        penalty = 0.0
        selections = self.layer_selections.values()
        if selections:
            divergence = sum(selection.divergence() for selection in selections)
            self.means.add("kl", divergence)
            penalty = config.kl_weight * config.kl_annealing_at(step) * divergence
        used = [
            (selection.utilization(), selection.target) for selection in selections if selection.target is not None
        ]
        if used:
            depth = sum(target_depth_error(u, target, config.target_depth_norm) for u, target in used)
            self.means.add("target_depth", depth)
            error = config.target_depth_weight * depth
            if config.layer_sharing_weight:
                error = error + config.layer_sharing_weight * sum(sharing_error(u) for u, _ in used)
            penalty = penalty + config.target_depth_annealing_at(step) * error
        return loss + penalty * tokens / items

    def _warn_of_another_loss(self, labels: torch.Tensor | None) -> None:
        """Say once where a forward pass in training cannot compute Eq. 8, as in a Trainer without the callback."""
        if not torch.is_grad_enabled():
            return
        if labels is None:
            warn_once(
                f"{type(self).__name__} is trained without labels, and so without KL and target depth. A Trainer "
                "keeps the labels to itself with `label_smoothing_factor`: set it to 0, and smooth in the model by "
                "trainer.add_callback(model.training_callback(label_smoothing=…))"
            )
        elif not hasattr(self, "_training_step") and self.config.changes_over_training:
            warn_once(
                f"{type(self).__name__} is trained at step 0 throughout: nothing sets its `training_step`, so KL, "
                "target depth, temperature and hard selection do not follow their schedules. Add "
                "trainer.add_callback(model.training_callback()), which is hf_deepwide.LatentDepthCallback, or set "
                "model.training_step before each optimizer step"
            )

    def training_logs(self) -> dict[str, float]:
        """Means since the last call of the unweighted terms of the loss, and the depths now.

        `reconstruction` is per target token. `effective_depth_…` is how many layers of a stack a posterior would use
        in evaluation, in the mean over posteriors.
        """
        depths = {
            f"effective_depth_{stack}": selection.chosen.sum(1).float().mean().item()
            for stack, selection in self.layer_selections.items()
        }
        return self.means.take() | depths


class LatentDepthForConditionalGeneration(LatentDepthLoss, WithPosteriors, GenerationMixin):
    """The translation model; its loss in training is that of Eq. 8."""

    model_class = LatentDepthModel
