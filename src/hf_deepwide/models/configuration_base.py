"""The config fields that all families share, and the checks of these fields.

Names follow Marian's configuration. There are two separate axes. *Width* is what one sub-layer computes
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
CACHE_SHAPE = ("num_key_value_heads", "head_dim")  # Transformers' names for the shape of a decoder layer's cache

# Limits that no real model comes near. A model beyond them takes all memory, or hours to be created.
LAYERS, WIDTH, ENTRIES, STEPS, WEIGHT = 10_000, 10_000_000, 100_000_000, 10**12, 1_000_000
PARAMETERS = 10**13


def validated(cls: Config) -> Config:
    """Check field types, and run the class's `validate_*` methods; an error is a `ValueError` with a plain message.

    The function uses `strict` of `huggingface_hub`. The exceptions of `strict` are not `ValueError`s and wrap the
    message twice. The message about a `Literal[…]` field is replaced, because it can be long and names the accepted
    values last.
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
    """List the values of `Literal[…]` or `Literal[…] | None`; return () for any other annotation."""
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
        max_relative_position: k of relative positions (Shaw et al. 2018), in addition to the positions above. In
            self-attention a key has a learned vector for its distance to the query, up to k tokens. None: no relative
            positions.
        scale_embedding: multiply token embeddings by sqrt(D).
        layernorm_embedding: LayerNorm after embedding and position, as in BART.
        normalize_before: pre-norm sub-layers and a final norm on both stacks; otherwise post-norm.
        attention_bias: biases on the q, k, v and output projections.
        lm_head_bias: a bias on the logits.
        init_std: None for the papers' initialisation (embeddings N(0, 1/D), projections Xavier-uniform, biases 0),
            or the standard deviation of a normal distribution for every matrix.
        tie_word_embeddings: the output projection is the target embedding.
        share_encoder_decoder_embeddings: source and target embeddings are one matrix.
        attention_branches: N_a, parallel attentions in each attention sub-layer (MAT, Eq. 4).
        ffn_branches: N_f, parallel feed-forward networks in each feed-forward sub-layer (MAT, Eq. 8).
        join_ffn: a feed-forward branch is a whole network, and drops as a whole (MAT, Eq. 7 and 8). False is the
            released code without `--join-pffn`: each of the two projections is averaged over the branches, with its
            own draw of drop-branch. So the N_f branches have one common activation.
        drop_branch: rho, the probability of dropping a branch in training (MAT, Eq. 5-8).
        ffn_drop_branch: the same for feed-forward branches; None means `drop_branch`. 0 is the paper's ablation
            without drop-branch at the FFN layers (section 4.2).
        drop_granularity: `"batch"` makes one draw of U (Eq. 5) for all sentences of a forward pass, as in the released
            code, and does not compute dropped branches. `"sentence"` makes one draw for each sentence.
        drop_unit: `"branch"` drops whole attention branches (Eq. 5), `"head"` their heads one by one (Eq. 9).
            `"chunk"`, as in the released code, divides the output features of a branch into M chunks of D / M
            features. It drops these chunks after the output projection, in place of heads.
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
        """Fill in the target vocabulary, and pass the rest to `PreTrainedConfig`."""
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if not is_remote(type(self)):
            # A shared checkpoint names its own copy of the translation pipeline. This package registers the pipeline
            # itself, and the key would only make `pipeline()` require trust_remote_code.
            kwargs.pop("custom_pipelines", None)
            if auto_map := own_entries(kwargs.pop("auto_map", None), type(self)):
                kwargs["auto_map"] = auto_map
        for name in CACHE_SHAPE:
            kwargs.pop(name, None)  # written by `to_dict`; other fields determine them
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write `config.json`; if the config names code (`auto_map`), copy this code to the same folder."""
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
        """The number of heads in the cache of a decoder layer: the heads of all branches, side by side.

        Transformers also reads this property from `get_text_config(decoder=True)`. In that copy the decoder's number
        of heads is in the encoder's field.
        """
        return self.attention_branches * self._decoder_heads

    @property
    def _decoder_heads(self) -> int:
        return vars(self).get("decoder_attention_heads", self.encoder_attention_heads)

    def to_dict(self) -> dict[str, Any]:
        """Return the parent's dictionary with the shape of the cache, from which PEFT takes the size of a prefix.

        If the config names code and the model translates, the dictionary also names the pipeline.
        """
        shape = self.num_key_value_heads, self.d_model // self._decoder_heads
        fields = super().to_dict() | dict(zip(CACHE_SHAPE, shape, strict=True))
        has_pipeline = fields.get("auto_map") and self.is_encoder_decoder
        return fields | {"custom_pipelines": CUSTOM_PIPELINES} if has_pipeline else fields

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the parent's dictionary for `config.json`, without the fields that other fields determine."""
        return {name: value for name, value in super().to_diff_dict().items() if name not in CACHE_SHAPE}

    @property
    def memory_width(self) -> int:
        """The number of features that the encoder passes to the decoder for each source token."""
        return self.d_model

    @property
    def slots_per_layer(self) -> int:
        """The number of cache slots that a decoder layer fills with its states of the target."""
        return 1

    @property
    def memory_rest(self) -> int:
        """The number of positions that the encoder's output has after the positions of the source."""
        return 0

    @property
    def least_parameters(self) -> int:
        """A lower bound of the numbers in a model's weights and tables, to refuse too large a model early."""
        vocabularies = self.vocab_size + (0 if self.share_encoder_decoder_embeddings else self.decoder_vocab_size)
        stacks = ((self.encoder_layers, self.encoder_ffn_dim), (self.decoder_layers, self.decoder_ffn_dim))
        rows = sum(n * (4 * self.attention_branches * self.d_model + 2 * self.ffn_branches * f) for n, f in stacks)
        return self.d_model * (vocabularies + self.max_position_embeddings + rows)

    def validate_form(self) -> None:
        """Check that `is_encoder_decoder` is the value of the family."""
        if self.is_encoder_decoder != type(self).is_encoder_decoder:
            raise ValueError(
                f"`is_encoder_decoder` must be {type(self).is_encoder_decoder} for {self.model_type}, "
                f"got {quote(self.is_encoder_decoder)}"
            )

    def validate_sizes(self) -> None:
        """Check that counts are positive and bounded, heads divide the width, and sinusoids have an even width."""
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
        """Check that rates are in [0, 1), and `init_std` in its bounds."""
        check_rates(self, "dropout", "attention_dropout", "activation_dropout", "drop_branch", "ffn_drop_branch")
        check_bounds(self, 0, WEIGHT, "init_std")

    def validate_activation(self) -> None:
        """Check that Transformers has the activation function."""
        if self.activation_function not in ACT2FN:
            accepted = ", ".join(ACT2FN)
            raise ValueError(f"`activation_function` must be one of {accepted}, got {quote(self.activation_function)}")

    def validate_vocabularies(self) -> None:
        """Check that a shared embedding matrix has one vocabulary, and that special tokens are in the vocabularies."""
        target_size = self.decoder_vocab_size or self.vocab_size
        if self.share_encoder_decoder_embeddings and target_size != self.vocab_size:
            raise ValueError(
                f"`share_encoder_decoder_embeddings=True` needs one vocabulary, got `vocab_size` {self.vocab_size} "
                f"and `decoder_vocab_size` {target_size}; set both alike, or `share_encoder_decoder_embeddings=False`"
            )
        if self.pad_token_id is None:
            raise ValueError("`pad_token_id` is required: padding and shifted labels use it, got None")
        for name in ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"):
            # the padding must be in both vocabularies, `bos_token_id` in one of them, the others in the target's
            choose = {"bos_token_id": max, "pad_token_id": min}.get(name, lambda _, target: target)
            size = choose(self.vocab_size, target_size)
            tokens = getattr(self, name)
            for token in tokens if isinstance(tokens, list) else [tokens]:
                if token is not None and (isinstance(token, bool) or not 0 <= token < size):
                    raise ValueError(f"`{name}` must be an id of the vocabulary (0 to {size - 1}), got {quote(token)}")


def check_bounds(config: PreTrainedConfig, least: float, most: float, *names: str, above: bool = False) -> None:
    """Refuse fields that are out of range, not a number, or a bool; None is accepted.

    Args:
        config: the config.
        least, most: the range.
        names: the fields.
        above: whether `least` itself is refused.

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
    """Refuse fields that would change nothing. Defaults are accepted, because every saved config contains them.

    Args:
        config: the config.
        used_with: for each field, the other field that decides whether it is used, and the values of the other field
            with which it is used.

    Raises:
        ValueError: names both fields, their values, and what is accepted.
    """
    for name, (other, values) in used_with.items():
        default, value, have = getattr(type(config), name), getattr(config, name), getattr(config, other)
        if value != default and have not in values:
            accepted = " or ".join(f"`{other}={accepted!r}`" for accepted in values)
            raise ValueError(
                f"`{name}` is {quote(value)}, but has no effect while `{other}` is {quote(have)}; set {accepted}, or "
                f"`{name}={default!r}`"
            )


def check_posterior_fields(config: PreTrainedConfig, what: str) -> None:
    """Check `num_posteriors`, and that `posterior_names` has one distinct name for each posterior.

    `what` is the word for posteriors in the messages.

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
    """Refuse fields that are not a rate in [0, 1); None is accepted."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not (value is None or 0 <= value < 1):
            raise ValueError(f"`{name}` must be in [0, 1), got {quote(value)}")
