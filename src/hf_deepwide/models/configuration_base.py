"""The fields that every family shares, and how they are checked.

Names follow Marian's configuration. Two axes are kept apart. *Width* is what one sub-layer computes
(`attention_branches`, `ffn_branches`, `join_ffn`, `drop_branch`, `ffn_drop_branch`, `drop_granularity`, `drop_unit`,
`branch_merge`). *Depth* is how layers are joined (`normalize_before`, and what a family adds). With their
defaults the model is the Transformer of Vaswani et al. (2017).
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .quoting import one_line, quote
from .remote_code import CUSTOM_PIPELINES, copy_code, is_remote, own_entries

Config = TypeVar("Config", bound=type)
CACHE_SHAPE = ("num_key_value_heads", "head_dim")  # of a decoder layer's cache, as Transformers names them

# Limits that no real model comes near; beyond them a model takes all memory, or takes hours to be made.
LAYERS, WIDTH, ENTRIES, STEPS, WEIGHT = 10_000, 10_000_000, 100_000_000, 10**12, 1_000_000
PARAMETERS = 10**13


def validated(cls: Config) -> Config:
    """Check field types and the class's `validate_*` methods; a violation raises `ValueError` with a plain message.

    Built on `huggingface_hub`'s `strict`, whose own exceptions are not `ValueError`s and wrap the message twice. Its
    message about a `Literal[…]` field is replaced, because it can be long and names the accepted values last.
    """
    cls = strict(cls)
    choices = {field.name: accepted_values(field.type) for field in dataclasses.fields(cls)}

    def plainly(method):
        @functools.wraps(method)
        def wrapper(self, *args, **kwargs):
            try:
                return method(self, *args, **kwargs)
            except StrictDataclassError as error:
                message = one_line(error.__cause__ or error, 400)
                if isinstance(error, StrictDataclassFieldValidationError) and choices.get(args[0]):  # `__setattr__`
                    accepted = ", ".join(map(str, choices[args[0]]))
                    message = f"`{args[0]}` must be one of {accepted}, got {quote(args[1])}"
                raise ValueError(f"{type(self).__name__}: {message}") from error

        return wrapper

    for name in ("__init__", "__setattr__", "validate"):
        setattr(cls, name, plainly(getattr(cls, name)))
    cls.validate.__is_defined_by_strict_decorator__ = True  # so that `strict` accepts a subclass, too
    return cls


def accepted_values(annotation: Any) -> tuple[Any, ...]:
    """List the values of `Literal[…]` or `Literal[…] | None`; any other annotation has ()."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    options = [accepted_values(option) for option in get_args(annotation) if option is not type(None)]
    return (*options[0], None) if len(options) == 1 and options[0] else ()


@validated
class DeepWideConfig(PreTrainedConfig):
    """The config fields that all families share.

    Args:
        vocab_size: entries of the source (or joint) vocabulary.
        decoder_vocab_size: entries of the target vocabulary; None means `vocab_size`.
        d_model: width of the residual stream, D.
        encoder_layers, decoder_layers: depth of the two stacks.
        encoder_attention_heads, decoder_attention_heads: heads M of one attention branch; M divides D.
        encoder_ffn_dim, decoder_ffn_dim: inner width F of one feed-forward branch.
        dropout: on embeddings and on each sub-layer's output before it is added to the residual.
        attention_dropout: on attention weights.
        activation_dropout: after the activation in the feed-forward sub-layer.
        activation_function: any name of `transformers.activations.ACT2FN`.
        max_position_embeddings: longest source or target, in tokens.
        position_embedding_type: `"sinusoidal"` (half sines, half cosines as in tensor2tensor and fairseq),
            `"marian"` (the sinusoids of Marian NMT, which Marian checkpoints were trained with) or `"learned"`.
        max_relative_position: k of relative positions (Shaw et al. 2018), beside the positions above. In
            self-attention a key has a learned vector for its distance to the query, up to k tokens. None: none.
        scale_embedding: multiply token embeddings by sqrt(D).
        layernorm_embedding: LayerNorm after embedding and position, as BART has it.
        normalize_before: pre-norm sub-layers and a final norm on both stacks; otherwise post-norm.
        attention_bias: biases on the q, k, v and output projections.
        lm_head_bias: a bias on the logits.
        init_std: None for the papers' initialisation (embeddings N(0, 1/D), projections Xavier-uniform, biases 0),
            or the standard deviation of a normal distribution for every matrix.
        tie_word_embeddings: the output projection is the target embedding.
        share_encoder_decoder_embeddings: source and target embeddings are one matrix.
        attention_branches: N_a, parallel attentions in each attention sub-layer (MAT, Eq. 4).
        ffn_branches: N_f, parallel feed-forward networks in each such sub-layer (MAT, Eq. 8).
        join_ffn: a feed-forward branch is a whole network, and drops as a whole (MAT, Eq. 7 and 8). False, as in the
            released code without its `--join-pffn`: the two projections of all branches are averaged, and drop, each
            on their own. So N_f branches are activated as one.
        drop_branch: rho, the probability of dropping a branch in training (MAT, Eq. 5-8).
        ffn_drop_branch: the same for feed-forward branches; None means `drop_branch`. 0 is the paper's ablation
            without drop-branch at the FFN layers (section 4.2).
        drop_granularity: `"batch"` makes one draw of U (Eq. 5) for all sentences of a forward pass, as in the released
            code, and does not compute dropped branches. `"sentence"` makes one draw for each sentence.
        drop_unit: `"branch"` drops whole attention branches (Eq. 5), `"head"` their heads one by one (Eq. 9).
            `"chunk"`, as in the released code, drops what stands in the place of a head behind the output projection:
            D / M of the features that a branch gives.
        branch_merge: `"mean"` is the paper's 1/N; `"double_mean"` the released code's 1/N**2.

    Raises:
        ValueError: a field has a wrong type, is out of range, or contradicts another.
    """

    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # the name depends on the version of Transformers
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
    }

    vocab_size: int = 32768
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    activation_function: str = "relu"
    max_position_embeddings: int = 1024
    position_embedding_type: Literal["sinusoidal", "marian", "learned"] = "sinusoidal"
    max_relative_position: int | None = None
    scale_embedding: bool = True
    layernorm_embedding: bool = False
    normalize_before: bool = False
    attention_bias: bool = True
    lm_head_bias: bool = False
    init_std: float | int | None = None
    tie_word_embeddings: bool = True
    share_encoder_decoder_embeddings: bool = True
    attention_branches: int = 1
    ffn_branches: int = 1
    join_ffn: bool = True
    drop_branch: float | int = 0.0
    ffn_drop_branch: float | int | None = None
    drop_granularity: Literal["batch", "sentence"] = "batch"
    drop_unit: Literal["branch", "head", "chunk"] = "branch"
    branch_merge: Literal["mean", "double_mean"] = "mean"
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 2
    is_encoder_decoder: bool = True
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the target vocabulary and leave the rest to `PreTrainedConfig`."""
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if not is_remote(type(self)):
            # A shared checkpoint names its own copy of the translation pipeline. Where this package is imported, the
            # registered pipeline serves, and the key would only make `pipeline()` ask for trust_remote_code.
            kwargs.pop("custom_pipelines", None)
            if auto_map := own_entries(kwargs.pop("auto_map", None), type(self)):
                kwargs["auto_map"] = auto_map
        for name in CACHE_SHAPE:
            kwargs.pop(name, None)  # of a `to_dict`: other fields determine them
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write `config.json`, and the code that the config names, if any, beside it."""
        auto_map = getattr(self, "auto_map", None)
        if not auto_map or Path(save_directory).is_file():
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        self.auto_map = copy_code(auto_map, Path(save_directory))
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.auto_map = auto_map

    @property
    def num_key_value_heads(self) -> int:
        """Heads in the cache of a decoder layer: those of all branches, side by side.

        Transformers also asks `get_text_config(decoder=True)`, a copy that keeps the decoder's heads as the encoder's.
        """
        return self.attention_branches * self._decoder_heads

    @property
    def _decoder_heads(self) -> int:
        return vars(self).get("decoder_attention_heads", self.encoder_attention_heads)

    def to_dict(self) -> dict[str, Any]:
        """As the parent, with the shape of the cache: PEFT reads from this dictionary how large a prefix must be.

        A config that names code names the pipeline as well, if the model translates.
        """
        shape = self.num_key_value_heads, self.d_model // self._decoder_heads
        fields = super().to_dict() | dict(zip(CACHE_SHAPE, shape, strict=True))
        has_pipeline = fields.get("auto_map") and self.is_encoder_decoder
        return fields | {"custom_pipelines": CUSTOM_PIPELINES} if has_pipeline else fields

    def to_diff_dict(self) -> dict[str, Any]:
        """As the parent, which writes `config.json`; what other fields determine is left out."""
        return {name: value for name, value in super().to_diff_dict().items() if name not in CACHE_SHAPE}

    @property
    def memory_width(self) -> int:
        """How many numbers the encoder gives the decoder for each source token."""
        return self.d_model

    @property
    def slots_per_layer(self) -> int:
        """How many slots of a cache a decoder layer fills with what it keeps of the target."""
        return 1

    @property
    def memory_rest(self) -> int:
        """How many positions the encoder's output has behind those of the source."""
        return 0

    @property
    def least_parameters(self) -> int:
        """Numbers in the weights and tables of a model, at least: what can never fit is known before it is made."""
        vocabularies = self.vocab_size + (0 if self.share_encoder_decoder_embeddings else self.decoder_vocab_size)
        stacks = ((self.encoder_layers, self.encoder_ffn_dim), (self.decoder_layers, self.decoder_ffn_dim))
        rows = sum(n * (4 * self.attention_branches * self.d_model + 2 * self.ffn_branches * f) for n, f in stacks)
        return self.d_model * (vocabularies + self.max_position_embeddings + rows)

    def validate_form(self) -> None:
        """A family translates, or it does not."""
        if self.is_encoder_decoder != type(self).is_encoder_decoder:
            raise ValueError(
                f"`is_encoder_decoder` must be {type(self).is_encoder_decoder} for {self.model_type}, "
                f"got {quote(self.is_encoder_decoder)}"
            )

    def validate_sizes(self) -> None:
        """Counts are positive and bounded; heads divide the width; sinusoids need an even width."""
        check_bounds(self, 1, ENTRIES, "vocab_size", "decoder_vocab_size", "max_position_embeddings")
        check_bounds(self, 1, WIDTH, "d_model", "encoder_ffn_dim", "decoder_ffn_dim")
        check_bounds(self, 1, WIDTH, "encoder_attention_heads", "decoder_attention_heads")
        check_bounds(self, 1, LAYERS, "encoder_layers", "decoder_layers", "attention_branches", "ffn_branches")
        check_bounds(self, 0, WIDTH, "chunk_size_feed_forward")
        check_bounds(self, 1, ENTRIES, "max_relative_position")
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            if self.d_model % getattr(self, name):
                raise ValueError(f"`{name}` must divide `d_model` ({self.d_model}), got {getattr(self, name)}")
        if self.d_model % 2 and self.position_embedding_type != "learned":
            raise ValueError(f"`d_model` must be even for sinusoidal positions, got {self.d_model}")
        if self.least_parameters > PARAMETERS:
            raise ValueError(
                f"the sizes make at least {self.least_parameters:.1e} parameters, and {PARAMETERS:.0e} is the most; "
                "lower `d_model`, `encoder_layers`, `decoder_layers`, `vocab_size` or `attention_branches`"
            )

    def validate_probabilities(self) -> None:
        """Rates lie in [0, 1)."""
        check_rates(self, "dropout", "attention_dropout", "activation_dropout", "drop_branch", "ffn_drop_branch")
        check_bounds(self, 0, WEIGHT, "init_std")

    def validate_activation(self) -> None:
        """The activation function is one of Transformers'."""
        if self.activation_function not in ACT2FN:
            accepted = ", ".join(ACT2FN)
            raise ValueError(f"`activation_function` must be one of {accepted}, got {quote(self.activation_function)}")

    def validate_vocabularies(self) -> None:
        """One shared embedding matrix needs one vocabulary, and token ids must lie in it."""
        target_size = self.decoder_vocab_size or self.vocab_size
        if self.share_encoder_decoder_embeddings and target_size != self.vocab_size:
            raise ValueError(
                f"`share_encoder_decoder_embeddings=True` needs one vocabulary, got `vocab_size` {self.vocab_size} "
                f"and `decoder_vocab_size` {target_size}; set both alike, or `share_encoder_decoder_embeddings=False`"
            )
        if self.pad_token_id is None:
            raise ValueError("`pad_token_id` is required: padding and shifted labels use it, got None")
        for name in ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"):
            # the padding is in both vocabularies, and the first token in either
            choose = {"bos_token_id": max, "pad_token_id": min}.get(name, lambda _, target: target)
            size = choose(self.vocab_size, target_size)
            tokens = getattr(self, name)
            for token in tokens if isinstance(tokens, list) else [tokens]:
                if token is not None and (isinstance(token, bool) or not 0 <= token < size):
                    raise ValueError(f"`{name}` must be an id of the vocabulary (0 to {size - 1}), got {quote(token)}")


def check_bounds(config: PreTrainedConfig, least: float, most: float, *names: str, above: bool = False) -> None:
    """Refuse fields that are out of range, not a number, or a bool; None is in range.

    Args:
        config: the config.
        least, most: the range.
        names: the fields.
        above: `least` itself is refused.

    Raises:
        ValueError: names the field, its value, and what is accepted.
    """
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ValueError(f"`{name}` must be a number, got {quote(value)}")
        if value < least or (above and value == least):
            raise ValueError(f"`{name}` must be {'above' if above else 'at least'} {least:,}, got {quote(value)}")
        if value > most:
            raise ValueError(f"`{name}` must be at most {most:,}, got {quote(value)}")


def check_used(config: PreTrainedConfig, used_with: dict[str, tuple[str, tuple[Any, ...]]]) -> None:
    """Refuse fields that would change nothing, unless they have their defaults: every saved config holds defaults.

    Args:
        config: the config.
        used_with: field to the field that decides whether it is used, and the values with which it is.

    Raises:
        ValueError: names both fields, their values, and what is accepted.
    """
    for name, (other, values) in used_with.items():
        default, value, have = getattr(type(config), name), getattr(config, name), getattr(config, other)
        if value != default and have not in values:
            accepted = " or ".join(f"`{other}={accepted!r}`" for accepted in values)
            raise ValueError(
                f"`{name}` is {quote(value)}, and without {accepted} it changes nothing: `{other}` is {quote(have)}; "
                f"set {accepted}, or `{name}={default!r}`"
            )


def check_posterior_fields(config: PreTrainedConfig, what: str) -> None:
    """Refuse a number of posteriors below 1, and names that are not one for each; messages call them `what`.

    Raises:
        ValueError: names the field, its value, and what is accepted.
    """
    check_bounds(config, 1, WEIGHT, "num_posteriors")
    names, count = config.posterior_names, config.num_posteriors
    if names is not None and len(names) != count:
        raise ValueError(
            f"`posterior_names` must name each of the {count} {what} (`num_posteriors`), got {quote(names)}"
        )
    if names is not None and len({*names}) < count:
        raise ValueError(f"`posterior_names` must give each of the {what} another name, got {quote(names)}")


def check_rates(config: PreTrainedConfig, *names: str) -> None:
    """Refuse fields that are no rate, which is 0 or more and less than 1; None is accepted."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not (value is None or 0 <= value < 1):
            raise ValueError(f"`{name}` must be in [0, 1), got {quote(value)}")
