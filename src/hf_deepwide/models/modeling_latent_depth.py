"""The Transformer with latent depth (Li et al. 2020, "Deep Transformers with Latent Depth"), arXiv 2009.13102.

Whether layer l is used is a latent variable z_l. It multiplies the outputs of all sub-layers of layer l (section 2.1):

    x_{l+1} = x_l + z_l F_l(x_l),  z_l ~ Bernoulli(q_l)                                                       (Eq. 2)

As in the released code, this means x <- x + z_l SubLayer(LN(x)) for each sub-layer in turn. With `layer_norms=False`
it means x <- x + z_l SubLayer(x); the paper reports that such models train. In training z is a Gumbel-softmax sample
from the posterior q,

    z_l = sigmoid((a_l + eps_1 - eps_0) / tau),  q_l = sigmoid(a_l),  eps ~ Gumbel(0, 1)                        (Eq. 5)

drawn once per forward pass for each language or language pair, because each has its own posterior (section 2.2). In
evaluation z_l is approximately the mean of these samples. If training ended with samples of 0 and 1, z_l is 1 where
q_l >= 1/2, else 0 (`inference_selection`). In this case layers that no sentence uses are not computed, and
`hf_deepwide.prune` removes them permanently. The loss is

    E_q[-log p(y | x, z)] + beta KL(q || p) + lambda |sum_l u_l - K|^2                                        (Eq. 8)

where u_l is the mean of z_l over languages. `layer_selection` computes the terms of the loss. The rest of the model is
the vanilla pre-norm Transformer.
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
    """The base class of the models of this family."""

    config_class = LatentDepthConfig
    no_weight_decay = ("layer_logits",)

    @property
    def layer_selections(self) -> dict[str, LayerSelection]:
        """The posteriors of the latent stacks, by the name of the stack: `"encoder"` or `"decoder"`."""
        stacks = {name: getattr(self.base_model, name, None) for name in ("encoder", "decoder")}
        found = {name: getattr(stack, "layer_selection", None) for name, stack in stacks.items()}
        return {name: selection for name, selection in found.items() if selection is not None}

    def begin_step(self, step: int) -> None:
        """Pass the number of the optimizer step to the posteriors: temperature, hard selection and annealing need it.

        The model cannot count optimizer steps itself, because it cannot see whether a batch ends a step. The trainers
        of this package set the number; in any other Trainer `LatentDepthCallback` sets it. The number is not saved
        with the model, because a checkpoint of the Trainer contains it (`global_step`). A resumed run continues at its
        step. A loaded model that is trained again begins at 0. Without the callback the number stays at 0, and a
        warning reports this.
        """
        for selection in self.layer_selections.values():
            selection.training_step = step

    def training_callback(self, label_smoothing: float = 0.0) -> LatentDepthCallback:
        """Return the callback for Trainers of other packages: `trainer.add_callback(model.training_callback())`."""
        return LatentDepthCallback(label_smoothing)


class LatentStack(LatentDepthPreTrainedModel, Stack):
    """A stack that multiplies what each layer adds by the layer's z, or leaves the layer out."""

    layer_selection: LayerSelection | None

    def become_latent(self, config: LatentDepthConfig, stack: str) -> None:
        """Add the layer selection and remove the norms, if the config requires it, in `"encoder"` or `"decoder"`."""
        self.layer_selection = LayerSelection(config, stack) if getattr(config, f"latent_{stack}") else None
        if not config.layer_norms:
            for module in (*self.layers, self):
                remove_norms(module)

    def run_layers(
        self, hidden_states: torch.Tensor, *inputs: Any, posteriors: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Run the layers that each sentence's posterior selects, `[B, time, D]` to `[B, time, D]`; see `Stack`.

        `posteriors` `[B]` are the indices of the sentences' posteriors; the model's argument has the same name.
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
        """Return whether unused layers can be left out.

        All layers are computed, and multiplied by 0 or 1, in two cases. First, the call requests the hidden states or
        the attention weights of every layer. Second, one compiled graph has to serve every input (while compiling, and
        with a static cache).
        """
        asked = ("output_hidden_states", "output_attentions")
        if any(kwargs.get(name, getattr(self.config, name)) for name in asked):
            return False
        return not (torch.compiler.is_compiling() or (cache is not None and cache.is_compileable))


def count_tokens(cache: Cache, hidden_states: torch.Tensor) -> None:
    """Put a placeholder for each new token `[B, T, D]` into the first layer's cache slot.

    The length of a cache is read from the first layer's slot. Every layer has a fixed slot, so without placeholders
    the slot of a first layer that is left out would stay empty. If the slot holds a prefix (PEFT's prefix tuning), the
    placeholders have the prefix's number of heads and its width.
    """
    cache = self_attention_cache(cache)
    keys = cache.layers[0].keys if cache.layers and cache.layers[0].is_initialized else None
    heads, width = (1, 1) if keys is None else (keys.shape[1], keys.shape[3])
    ones = hidden_states.new_ones(hidden_states.shape[0], heads, hidden_states.shape[1], width)
    cache.update(ones, ones, 0)


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """Log a warning once. If the caller is compiled, the warning is logged while the caller is traced."""
    logger.warning_once(message)


class LatentEncoder(LatentStack, Encoder):
    """The encoder. Its depth is latent in LL-E and LL-Both."""

    def __init__(self, config: LatentDepthConfig) -> None:
        super().__init__(config)
        self.become_latent(config, "encoder")


class LatentDecoder(LatentStack, Decoder):
    """The decoder. Its depth is latent in LL-D and LL-Both."""

    def __init__(self, config: LatentDepthConfig) -> None:
        super().__init__(config)
        self.become_latent(config, "decoder")


class LatentDepthModel(LatentDepthPreTrainedModel, DeepWideModel):
    """Encoder and decoder without a head."""

    encoder_class = LatentEncoder
    decoder_class = LatentDecoder


class LatentDepthLoss(LatentDepthPreTrainedModel):
    """The loss of Eq. 8 for models with a head, and the terms of the loss that are logged."""

    def __init__(self, config: LatentDepthConfig) -> None:
        super().__init__(config)
        self.means = RunningMeans()

    def objective(
        self,
        loss: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | None:
        """Add the KL and target-depth terms to the cross-entropy in training; without labels the result is None.

        The cross-entropy may be this batch's share of a mean over `num_items_in_batch` tokens. Then both terms are
        multiplied by this batch's share of the tokens. So they count once in the sum over devices and accumulation
        steps.
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
        """Warn once if a forward pass in training cannot compute Eq. 8, as in a Trainer without the callback."""
        if not torch.is_grad_enabled():
            return
        if labels is None:
            warn_once(
                f"{type(self).__name__} gets no labels, so the loss has no terms for KL and target depth. A Trainer "
                "with `label_smoothing_factor` does not pass the labels: set it to 0, and call "
                "trainer.add_callback(model.training_callback(label_smoothing=0.1))"
            )
        elif not hasattr(self, "_training_step") and self.config.changes_over_training:
            warn_once(
                f"{type(self).__name__} is trained at step 0 throughout: nothing sets its `training_step`, so KL, "
                "target depth, temperature and hard selection do not follow their schedules. Add "
                "trainer.add_callback(model.training_callback()), which is hf_deepwide.LatentDepthCallback, or set "
                "model.training_step before each optimizer step"
            )

    def training_logs(self) -> dict[str, float]:
        """Return the current depths, and the means of the unweighted loss terms since the last call.

        `reconstruction` is per target token. `effective_depth_…` is the number of layers of a stack with q >= 1/2,
        averaged over posteriors. Hard selection uses these layers in evaluation.
        """
        depths = {
            f"effective_depth_{stack}": selection.chosen.sum(1).float().mean().item()
            for stack, selection in self.layer_selections.items()
        }
        return self.means.take() | depths


class LatentDepthForConditionalGeneration(LatentDepthLoss, WithPosteriors, GenerationMixin):
    """The translation model. Its training loss is Eq. 8."""

    model_class = LatentDepthModel
