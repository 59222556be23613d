"""The use of layers as latent variables (Li et al. 2020): sampling, evaluation, and the terms of the loss.

Shapes: N posteriors (one for each language or language pair), L layers, B sentences. A posterior is given by the
log-odds of selecting each layer, `logits` a = alpha(1) - alpha(0) `[N, L]`: q = sigmoid(a).
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import initialization as init
from transformers.utils import logging

from .configuration_latent_depth import LatentDepthConfig

logger = logging.get_logger(__name__)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
EPSILON = 1e-7  # as in the logarithms of the released code


def gumbel_difference(logits: torch.Tensor) -> torch.Tensor:
    """Draw eps(1) - eps(0) of Eq. 5, two Gumbel variables for each logit; shaped like `logits`."""
    select, skip = -torch.empty(2, *logits.shape, dtype=logits.dtype, device=logits.device).exponential_().log()
    return select - skip


def sample_selection(
    logits: torch.Tensor, noise: torch.Tensor, temperature: float, hard: bool = False
) -> torch.Tensor:
    """Return z of Eq. 5, whose two-way softmax is sigmoid((a + eps(1) - eps(0)) / tau); shaped like `logits`.

    Hard samples are 0 or 1, and have the gradient of soft samples. For any tau they are 1 with probability sigmoid(a).
    """
    perturbed = logits + noise
    soft = torch.sigmoid(perturbed / temperature)
    return (perturbed > 0).to(soft.dtype) + (soft - soft.detach()) if hard else soft


def log_prior(
    logits: torch.Tensor, prior: str = "uniform", select: float = 1.0, skip: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(z = 1) and log p(z = 0) of each layer, `[L]`.

    The mean of a Bernoulli variable under Beta(a, b) is a / (a + b). The aggregated posterior (Eq. 7) is the mean of
    all posteriors. No gradient flows through it.
    """
    if prior == "aggregated":
        a, count = logits.detach(), math.log(len(logits))
        return logsigmoid(a).logsumexp(0) - count, logsigmoid(-a).logsumexp(0) - count
    p = select / (select + skip) if prior == "beta" else 0.5
    return logits.new_full(logits.shape[1:], math.log(p)), logits.new_full(logits.shape[1:], math.log(1 - p))


def bernoulli_kl(logits: torch.Tensor, log_select: torch.Tensor, log_skip: torch.Tensor) -> torch.Tensor:
    """Return KL(q || p) = q log(q / p) + (1 - q) log((1 - q) / (1 - p)) of each layer, `[N, L]` (Eq. 4)."""
    q = torch.sigmoid(logits)
    return q * (logsigmoid(logits) - log_select) + (1 - q) * (logsigmoid(-logits) - log_skip)


def sampled_kl(z: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """Return z log(z / p) of samples z `[N, L]`, which the released code uses as the divergence."""
    return z * ((z + EPSILON).log() - prior.clamp(min=EPSILON).log())


def target_depth_error(utilization: torch.Tensor, target: float, norm: str = "squared") -> torch.Tensor:
    """Return L_K = ||sum_l u_l - K||_2 (section 2.2), the absolute value of a number, or its square; u is `[L]`."""
    excess = utilization.sum() - target
    return excess.abs() if norm == "absolute" else excess.square()


def sharing_error(utilization: torch.Tensor) -> torch.Tensor:
    """Return -sum_l u_l log u_l, which draws each utilisation `[L]` to 0 or 1.

    In the released code no gradient flows through the logarithm.
    """
    u = utilization.clamp(min=EPSILON)  # hard samples may all be 0, where the logarithm is not finite
    return -(u * u.log()).sum()


class LayerSelection(nn.Module):
    """The posteriors q of one stack: one logit for each layer, in each of N posteriors.

    In training one z is drawn for each layer and posterior in each forward pass. In evaluation z follows from the
    logits alone.
    """

    def __init__(self, config: LatentDepthConfig, stack: str) -> None:
        super().__init__()
        self.config = config
        self.stack = stack
        self.target = getattr(config, f"target_{stack}_layers")
        shape = config.num_posteriors, getattr(config, f"{stack}_layers")
        self.layer_logits = nn.Parameter(torch.full(shape, float(config.layer_selection_init)))
        self.training_step = 0  # optimizer steps made so far
        self.noise: torch.Tensor | None = None  # of the last sample

    def initialise(self, config: LatentDepthConfig) -> None:
        """Start with the same logit for all layers: `layer_selection_init`."""
        init.constant_(self.layer_logits, config.layer_selection_init)

    def forward(
        self, posterior_ids: torch.Tensor | None, batch_size: int, may_skip: bool = True
    ) -> list[torch.Tensor | bool]:
        """Decide how to use each layer in this forward pass.

        Args:
            posterior_ids: index of each sentence's posterior `[B]`; not needed if there is only one posterior.
            batch_size: B.
            may_skip: whether a layer that no sentence uses can be left out; otherwise it is weighed by 0.

        Returns:
            One entry per layer. True: use the layer as it is. False: leave the layer out. A tensor z, a scalar or
            `[B, 1, 1]`: weigh the output of the layer's sub-layers by z.

        Raises:
            ValueError: the ids (`posteriors` in the model's call) are missing, or not one for each sentence.
        """
        check_posteriors(posterior_ids, batch_size, self.config)
        several = self.config.num_posteriors > 1
        if self.training:
            self.noise = gumbel_difference(self._logits)
            z = self.sample()
        else:
            z = self.evaluation_weights()
        z = nn.functional.embedding(posterior_ids.to(z.device).long(), z) if several else z  # [B or 1, L]
        if not self.training and may_skip and self.config.inference_selection == "hard":
            used, by_all, some = torch.stack([z.any(0), z.all(0), z.any(1).all().expand(z.shape[1])]).tolist()
            if not some[0]:
                self._warn_of_no_layer()
        else:
            used, by_all = [True] * z.shape[1], [False] * z.shape[1]
        weights = z.t()[..., None, None] if several else z[0]
        return [all_ or (one and weight) for one, all_, weight in zip(used, by_all, weights.unbind(), strict=True)]

    @property
    def _logits(self) -> torch.Tensor:
        """The logits in float32 or better: logarithms of noise close to 0 or 1 are inaccurate in half precision."""
        return self.layer_logits.to(torch.promote_types(self.layer_logits.dtype, torch.float32))

    @property
    def chosen(self) -> torch.Tensor:
        """The layers that each posterior selects (q >= 1/2), as bools `[N, L]`.

        By default training starts at q = 1/2. There a layer is used, so that an untrained model has all layers.
        """
        return self.layer_logits >= 0

    @property
    def probabilities(self) -> torch.Tensor:
        """q `[N, L]`, the probability that a posterior selects a layer."""
        return torch.sigmoid(self._logits)

    def evaluation_weights(self, selection: str | None = None) -> torch.Tensor:
        """Return z in evaluation `[N, L]`, for a `selection`; the default is the config's `inference_selection`."""
        selection = selection or self.config.inference_selection
        if selection == "hard":
            return self.chosen.to(self._logits.dtype)
        if selection == "soft":
            return self.probabilities
        return torch.sigmoid(self._logits / self.config.last_temperature)

    def sample(self) -> torch.Tensor:
        """Return z of the last forward pass in training `[N, L]`, differentiable."""
        if self.noise is None:
            self.noise = gumbel_difference(self._logits)
        config, step = self.config, self.training_step
        return sample_selection(
            self._logits, self.noise, config.temperature_at(step), hard=config.selects_hard_at(step)
        )

    def divergence(self) -> torch.Tensor:
        """Return the KL term of this stack (Eq. 3, 4): the sum or mean over layers of the mean over posteriors."""
        config = self.config
        if config.kl_estimator == "analytic":
            prior = log_prior(self._logits, config.layer_prior, config.prior_select, config.prior_skip)
            terms = bernoulli_kl(self._logits, *prior)
        else:
            z = self.sample()
            if config.layer_prior == "aggregated":  # a distribution over layers
                prior = z.detach().sum(0) / z.detach().sum().clamp(min=EPSILON)
            else:
                prior = log_prior(z, config.layer_prior, config.prior_select, config.prior_skip)[0].exp()
            terms = sampled_kl(z, prior)
        terms = terms.mean(0)
        return terms.sum() if config.kl_reduction == "sum" else terms.mean()

    def utilization(self) -> torch.Tensor:
        """Return u_l = 1/N sum_n z_l^(n) of the last sample, `[L]`."""
        return self.sample().mean(0)

    def _warn_of_no_layer(self) -> None:
        logger.warning_once(
            f"in evaluation a posterior selects no layer of the {self.stack}, so the {self.stack} returns only its "
            "embeddings. Set `inference_selection` to 'tempered', which uses all layers, or train with a larger "
            f"`target_{self.stack}_layers`"
        )


def check_posteriors(posterior_ids: torch.Tensor | None, batch_size: int, config: Any) -> None:
    """Check that there is one index for each sentence, if the config has several posteriors (or languages).

    Raises:
        ValueError: the indices are missing, or wrong.
    """
    count = config.num_posteriors
    if posterior_ids is None:
        if count > 1:
            names = f" ({', '.join(config.posterior_names)})" if config.posterior_names else ""
            raise ValueError(
                f"this model has {count} posteriors{names}: pass `posteriors`, a LongTensor with the index of each "
                f"sentence's, 0 to {count - 1}"
            )
        return
    is_tensor = isinstance(posterior_ids, torch.Tensor)
    if not is_tensor or posterior_ids.dtype not in INTEGERS or posterior_ids.shape != (batch_size,):
        shape = f"{posterior_ids.dtype} {list(posterior_ids.shape)}" if is_tensor else ""
        raise ValueError(
            f"`posteriors` must be one index for each of {batch_size} sentences, a LongTensor `[{batch_size}]`; "
            f"got a {type(posterior_ids).__name__} {shape}".rstrip()
        )
    looks = posterior_ids.device.type == "cpu" and not torch.compiler.is_compiling()  # on a GPU this would synchronise
    if looks and ((posterior_ids < 0) | (posterior_ids >= count)).any():
        raise ValueError(
            f"`posteriors` must be from 0 to {count - 1}, got {posterior_ids.min()} to {posterior_ids.max()}"
        )
