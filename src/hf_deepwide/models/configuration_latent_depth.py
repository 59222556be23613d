"""Configuration of the Transformer with latent depth."""

from typing import Any, Literal

from .configuration_base import (
    LAYERS,
    STEPS,
    WEIGHT,
    DeepWideConfig,
    check_bounds,
    check_posterior_fields,
    check_rates,
    check_used,
    validated,
)
from .quoting import quote


@validated
class LatentDepthConfig(DeepWideConfig):
    """The Transformer with latent depth (Li et al. 2020): the model learns which layers to use.

    The paper's LL-D is `latent_encoder=False`, LL-E is `latent_decoder=False`, and LL-Both is the default. Steps are
    optimizer steps, t. The loss per target token is `-log p + kl_weight * KL + target_depth_weight * L_K` (Eq. 8). The
    last two terms exist in training only. They grow linearly from zero. The third term starts to grow when the second
    term has its full weight:

        t0 = soft_selection_steps or 0               the last step before hard selection
        t0 to t1 = t0 + kl_anneal_steps              the weight of the KL term grows
        t1 to t1 + target_depth_anneal_steps         the weight of the target depth grows

    Args:
        latent_encoder, latent_decoder: which stacks choose their layers.
        num_posteriors: N, one posterior per language or language pair. With several posteriors, `forward` and
            `generate` take the argument `posteriors`: the index of the posterior for each sentence.
        posterior_names: a name for each posterior, e.g. `["de", "fr", "cs"]`; for `hf_deepwide.prune` and plots.
        gumbel_temperature: tau of Eq. 5.
        final_temperature: tau after `temperature_anneal_steps`. Tau falls geometrically. None: tau is constant.
        temperature_anneal_steps: number of steps from the first tau to the last tau.
        layer_selection_init: the initial logits a. With 0, each layer has the probability 1/2, and hard selection in
            evaluation uses all layers.
        layer_prior: p(z): `"uniform"` is Beta(1, 1), `"beta"` is Beta(`prior_select`, `prior_skip`), and
            `"aggregated"` is the mean of all posteriors (Eq. 7), through which no gradient flows.
        prior_select, prior_skip: a and b of the Beta prior; a > b favours selecting.
        soft_selection_steps: the number of steps with soft samples. Later samples are hard, 0 or 1, with the gradient
            of the soft sample (straight-through). None: samples stay soft, as in the paper.
        kl_weight: beta. The released code uses 0.1 with a mean over its 24 layers; Eq. 4 has a sum over layers.
        kl_anneal_steps: number of steps in which beta grows from 0.
        kl_reduction: over layers, the `"sum"` of Eq. 4 or the `"mean"` of the released code. Over posteriors it is
            always the mean.
        kl_estimator: `"analytic"` is KL(q || p) of Bernoulli distributions. `"fairseq"` is z * log(z / p) of one
            sample, as in the released code; it is not a divergence.
        target_encoder_layers, target_decoder_layers: K, the number of layers that a latent stack shall use; None: any
            number.
        target_depth_weight: lambda.
        target_depth_anneal_steps: number of steps in which lambda grows from 0.
        target_depth_norm: L_K is the `"squared"` difference to K, which is smooth, or the `"absolute"` difference, as
            in the paper.
        layer_norms: whether sub-layers, and the ends of the stacks, have LayerNorms. The paper claims that models
            train without them, because z scales the outputs of the sub-layers, and so the gradients.
        layer_drop: LayerDrop (Fan, Grave and Joulin 2020), a baseline of the paper: the probability of skipping a
            whole layer in training, in a stack that does not choose its layers.
        layer_sharing_weight: weight of -sum_l u_l log u_l over the utilisations of a stack with a target. The released
            code has this term, the paper does not. It grows with lambda.
        inference_selection: z in evaluation. `"hard"`: 1 if a >= 0, else 0. `"soft"`: sigmoid(a). `"tempered"`:
            sigmoid(a / tau) with the last tau, which is near the mean of the soft samples in training. None: the value
            that fits the samples at the end of training (`trained_selection`).

    Raises:
        ValueError: a field has a wrong type, is out of range, or contradicts another.
    """

    model_type = "latent_depth"

    normalize_before: bool = True
    latent_encoder: bool = True
    latent_decoder: bool = True
    num_posteriors: int = 1
    posterior_names: list[str] | None = None
    gumbel_temperature: float | int = 5.0
    final_temperature: float | int | None = None
    temperature_anneal_steps: int = 0
    layer_selection_init: float | int = 0.0
    layer_prior: Literal["uniform", "beta", "aggregated"] = "uniform"
    prior_select: float | int = 1.0
    prior_skip: float | int = 1.0
    soft_selection_steps: int | None = None
    kl_weight: float | int = 0.01
    kl_anneal_steps: int = 5000
    kl_reduction: Literal["sum", "mean"] = "sum"
    kl_estimator: Literal["analytic", "fairseq"] = "analytic"
    target_encoder_layers: float | int | None = None
    target_decoder_layers: float | int | None = None
    target_depth_weight: float | int = 0.1
    target_depth_anneal_steps: int = 5000
    target_depth_norm: Literal["squared", "absolute"] = "squared"
    layer_sharing_weight: float | int = 0.0
    layer_drop: float | int = 0.0
    layer_norms: bool = True
    inference_selection: Literal["hard", "soft", "tempered"] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in `inference_selection`, and pass the rest to the parent."""
        if self.inference_selection is None:
            self.inference_selection = self.trained_selection
        super().__post_init__(**kwargs)

    @property
    def last_temperature(self) -> float:
        """Tau at the end of training."""
        return float(self.final_temperature or self.gumbel_temperature)

    @property
    def trained_selection(self) -> str:
        """The value of `inference_selection` that fits the samples at the end of training.

        Selection is hard if the samples are 0 or 1, or close to these values. The modes of a soft sample are at 0 and
        1 if tau is below 1, else between them (Maddison et al. 2017, The Concrete Distribution). At tau = 5, z stays
        around 1/2: in training no layer is ever used fully or skipped. Such samples hardly move the logits, so the
        signs of the logits carry little information. Evaluation then weighs layers as in training.
        """
        return "hard" if self.soft_selection_steps is not None or self.last_temperature < 1 else "tempered"

    def temperature_at(self, step: int) -> float:
        """Return tau after `step` optimizer steps."""
        if self.final_temperature is None:
            return float(self.gumbel_temperature)
        passed = ramp(step, 0, self.temperature_anneal_steps)
        return self.gumbel_temperature * (self.final_temperature / self.gumbel_temperature) ** passed

    def selects_hard_at(self, step: int) -> bool:
        """Return whether training draws hard samples, 0 or 1, after `step` optimizer steps."""
        return self.soft_selection_steps is not None and step > self.soft_selection_steps

    def kl_annealing_at(self, step: int) -> float:
        """Return the fraction of `kl_weight` that applies after `step` optimizer steps, 0 to 1."""
        return ramp(step, self.soft_selection_steps or 0, self.kl_anneal_steps)

    def target_depth_annealing_at(self, step: int) -> float:
        """Return the fraction of `target_depth_weight` and `layer_sharing_weight` after `step` steps, 0 to 1."""
        return ramp(step, (self.soft_selection_steps or 0) + self.kl_anneal_steps, self.target_depth_anneal_steps)

    @property
    def changes_over_training(self) -> bool:
        """Whether the loss depends on the number of optimizer steps so far."""

        def at(step: int) -> tuple[float, ...]:
            targets = self.target_encoder_layers, self.target_decoder_layers
            depth = self.target_depth_weight + self.layer_sharing_weight if targets != (None, None) else 0.0
            return (
                self.temperature_at(step),
                self.selects_hard_at(step),
                self.kl_weight * self.kl_annealing_at(step),
                depth * self.target_depth_annealing_at(step),
            )

        return at(0) != at(2**62)

    def validate_depth(self) -> None:
        """Check that layers are pre-norm, that a stack is latent, and that only a latent stack has a target depth."""
        if not self.normalize_before:
            raise ValueError(
                "`normalize_before` must be True: with post-norm, a skipped layer would still change its input; got "
                "False"
            )
        if not (self.latent_encoder or self.latent_decoder):
            raise ValueError("`latent_encoder` and `latent_decoder` are both False; one must be True, or use vanilla")
        for stack in ("encoder", "decoder"):
            target, layers = getattr(self, f"target_{stack}_layers"), getattr(self, f"{stack}_layers")
            if target is not None and not getattr(self, f"latent_{stack}"):
                raise ValueError(f"`target_{stack}_layers` must be None where `latent_{stack}` is False, got {target}")
            check_bounds(self, 0, LAYERS, f"target_{stack}_layers")
            if target is not None and target > layers:
                raise ValueError(f"`target_{stack}_layers` must be in [0, {layers}], got {target}")

    def validate_layer_drop(self) -> None:
        """Check that LayerDrop is only used with a stack that does not choose its layers."""
        check_rates(self, "layer_drop")
        if self.layer_drop and self.latent_encoder and self.latent_decoder:
            raise ValueError(
                "`layer_drop` is for a stack that does not choose its layers, and both do; set it to 0, or "
                "`latent_encoder` or `latent_decoder` to False"
            )

    def validate_selection(self) -> None:
        """Check that weights, steps, temperatures and posteriors are in range, and that each value has an effect."""
        check_bounds(self, 0, WEIGHT, "kl_weight", "target_depth_weight", "layer_sharing_weight")
        check_bounds(self, -WEIGHT, WEIGHT, "layer_selection_init")
        steps = ("temperature_anneal_steps", "soft_selection_steps", "kl_anneal_steps", "target_depth_anneal_steps")
        check_bounds(self, 0, STEPS, *steps)
        positive = ("gumbel_temperature", "final_temperature", "prior_select", "prior_skip")
        check_bounds(self, 0, WEIGHT, *positive, above=True)
        check_used(self, {"prior_select": ("layer_prior", ("beta",)), "prior_skip": ("layer_prior", ("beta",))})
        if self.temperature_anneal_steps and self.final_temperature is None:
            raise ValueError(
                f"`temperature_anneal_steps` is {self.temperature_anneal_steps}, and without `final_temperature` the "
                "temperature stays; set `final_temperature`, or `temperature_anneal_steps=0`"
            )
        check_posterior_fields(self, "posteriors")
        if self.target_encoder_layers is self.target_decoder_layers is None:
            depth = (f"target_depth_{what}" for what in ("weight", "anneal_steps", "norm"))
            for name in (*depth, "layer_sharing_weight"):
                default, value = getattr(type(self), name), getattr(self, name)
                if value != default:
                    raise ValueError(
                        f"`{name}` is {quote(value)}, and has no effect without a target depth; set "
                        f"`target_encoder_layers` or `target_decoder_layers`, or `{name}={default!r}`"
                    )


def ramp(step: int, start: int, length: int) -> float:
    """Return 0 up to `start`, then a value that rises to 1 over `length` steps; with length 0, 1 from `start` on."""
    return min(max((step - start) / length, 0.0), 1.0) if length else float(step >= start)
