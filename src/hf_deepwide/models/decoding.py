"""Decoding one token after another, as fast as `generate` of Transformers lets it be.

`generate` calls the model once for each token. During one call of `generate` the decoder has a twin. The twin has the
decoder's layers and equations. Its parts are made for single tokens:

    attention          keeps keys and values: of the targets for each row, of the source for each sentence
                       (`attention_step`)
    matrix products    read a copy of the weights that is faster to read (`matrix_product`)
    feed-forward       knows that no branch is dropped
    plain layers       call their parts at once (`layer_step`)
    layer selection    is computed once
    joints             say themselves what a step of them is (`decoding_step`)
    norms, dropout     are called as functions, without the hooks of `nn.Module`

The loops that call it are in `search`. They leave sentences out whose translations cannot change any more.

The twin is deleted after the call, so it never outlives a change of the weights. A call that needs the decoder itself
(hooks, attention weights, adapters, another cache) gets the decoder: see `can_decode`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationMode

from .attention import MultiBranchAttention
from .attention_step import (
    Ancestors,
    BranchedAttentionStep,
    CrossAttentionStep,
    DynamicConvolutionStep,
    ManyRowsSelfAttentionStep,
    MergedAttentionStep,
    SelfAttentionStep,
    keep_sentences,
    scaled,
)
from .branched_attention import BranchedAttention
from .branches import BranchSum, is_own, summed_bias
from .cache_name import CACHE_NAMES
from .dynamic_convolution import DynamicConvolution
from .embeddings import SHORTER, Embeddings, check_length
from .feed_forward import MultiBranchFeedForward
from .layer_selection import LayerSelection
from .layer_step import DecoderLayerStep
from .layers import DecoderLayer
from .matrix_product import MatrixProduct
from .merged_attention import MergedAttention

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
ARGUMENTS = {"encoder_outputs", "attention_mask", *CACHE_NAMES, "use_cache", "posteriors"}
PACKAGES = (__name__.rpartition(".")[0], "torch.nn.modules", "transformers.activations")
MANY = 4  # rows from which on `ManyRowsSelfAttentionStep` is faster
# A batch has at most so many sizes while its sentences end. Each new size compiles kernels again, and to remove a few
# sentences costs more, in copies of the cache, than it saves.
SIZES = 4
RECORDER = "transformers.utils.output_capturing"  # its hooks stay, and do nothing unless a call asks for records


class DecodingCache(EncoderDecoderCache):
    """What one call of `generate` keeps from token to token: the decoder's twin, and how many tokens it has read."""

    def __init__(
        self,
        model: nn.Module,
        memory: torch.Tensor,
        mask: torch.Tensor | None,
        rows: int,
        beams: int,
        inputs: dict[str, Any],
    ) -> None:
        """Prepare decoding.

        Args:
            model: a translation model.
            memory: the encoder's output, `[sentences, source, D]`.
            mask: 1 for real source tokens, `[sentences, source]`, or None.
            rows: how many sequences are decoded, a multiple of the sentences.
            beams: how many rows, standing together, can go on from each other.
            inputs: further arguments of the decoder's layers.
        """
        super().__init__(DynamicCache(), DynamicCache())
        self.model, self.memory, self.rows, self.inputs = model, memory, rows, inputs
        self.ancestors = Ancestors(rows, beams)
        self.decoder = self.head = None
        self.length = 0
        self.sentences = len(memory)
        self.mask = None
        if mask is not None and not mask.all():
            lowest = torch.finfo(memory.dtype).min
            self.mask = torch.zeros_like(mask, dtype=memory.dtype).masked_fill(mask == 0, lowest)[:, None, None]

    def begin(self) -> None:
        """Make the twins: when the first token is read, since autocast may be around each step alone."""
        device = self.memory.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.twins = twins = Twins(self.ancestors, dtype)
        self.decoder, self.head = twins.of(self.model.model.decoder), twins.of(self.model.lm_head)
        inputs = self.model.model.decoder_inputs() | self.inputs
        self.inputs = {name: twins.of_fields(value) for name, value in inputs.items()}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens of a row have been read."""
        return self.length

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let each row go on from another one of its sentence; the source has no part in it."""
        self.ancestors.reorder(beam_idx)

    @torch.inference_mode()
    def leave_out(self, has_ended: torch.Tensor) -> torch.Tensor | None:
        """Decode sentences no further, so that products are smaller.

        They wait until a quarter of the batch has ended, and then another one.

        Args:
            has_ended: which of the sentences that are left have ended, bools.

        Returns:
            The places of those that go on, among those that were left; None: all go on.
        """
        quarter = -(-self.sentences // SIZES)
        count = -(-int((~has_ended).sum()) // quarter) * quarter
        if not 0 < count < len(has_ended):
            return None
        kept = has_ended.int().argsort(stable=True)[:count].sort().values  # those that go on, and as many as fill up
        for part in (self.ancestors, *self.twins.made.values()):
            if hasattr(part, "keep"):
                part.keep(kept, len(has_ended))
        self.memory = self.memory[kept]
        self.mask = None if self.mask is None else self.mask[kept]
        for name, value in self.inputs.items():
            if isinstance(value, torch.Tensor):
                self.inputs[name] = keep_sentences(value, kept, len(has_ended))
        return kept

    @torch.inference_mode()  # spares each operation the bookkeeping of views and versions
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read tokens `[rows, T]` of the sentences that are left; logits `[rows, T, V]` of what follows each."""
        if self.decoder is None:
            self.begin()
        steps = []
        input_ids = input_ids.to(self.memory.device)
        for ids in (input_ids,) if input_ids.shape[1] == 1 else input_ids.split(1, dim=1):
            self.ancestors.append(self.memory)
            steps.append(
                self.decoder.step(ids, self.length, self.ancestors.visible(), self.memory, self.mask, **self.inputs)
            )
            self.length += 1
        return self.head(steps[0] if len(steps) == 1 else torch.cat(steps, dim=1))

    def ordinary(self) -> EncoderDecoderCache:
        """The same keys and values as Transformers keeps them, each row with the source's."""
        own, cross = DynamicCache(), DynamicCache()
        beams = self.rows // len(self.memory)
        for index, layer in enumerate(self.decoder.layers):
            attention_to_source = layer.encoder_attn
            is_merged = isinstance(attention_to_source, MergedAttentionStep)
            attention = attention_to_source.own if is_merged else layer.self_attn
            if attention is not None and attention.keys is not None:
                own.update(*attention.states(), index)
                source = attention_to_source.states(len(self.memory))
                cross.update(*(states.repeat_interleave(beams, 0) for states in source), index)
            elif index == 0 and self.length:  # a layer that is left out; the length is read off the first one's slot
                ones = self.memory.new_ones(self.rows, 1, self.length, 1)
                own.update(ones, ones, 0)
        return EncoderDecoderCache(own, cross)


class Twins:
    """The twins of modules, one of each."""

    def __init__(self, ancestors: Ancestors, dtype: torch.dtype | None) -> None:
        """`dtype` is that of matrix products under autocast; None is that of the weights."""
        self.ancestors, self.dtype, self.autocast = ancestors, dtype, dtype is not None
        self.product = functools.partial(MatrixProduct, rows=ancestors.rows, dtype=dtype)
        self.made: dict[int, Any] = {}

    def of(self, module: nn.Module) -> Any:
        """The twin of a module: itself, where nothing in it is to be faster."""
        if id(module) not in self.made:
            self.made[id(module)] = self._make(module)
        return self.made[id(module)]

    def of_fields(self, value: Any) -> Any:
        """A value, or a dataclass of values, with twins in the place of modules."""
        if is_dataclass(value):
            return type(value)(**{name: self.of_fields(each) for name, each in vars(value).items()})
        return self.of(value) if isinstance(value, nn.Module) else value

    def _make(self, module: nn.Module) -> Any:
        if isinstance(module, MergedAttention):
            return MergedAttentionStep(module, self.product, self.ancestors)
        if isinstance(module, BranchedAttention):
            return BranchedAttentionStep(module, self.product)
        if isinstance(module, MultiBranchAttention):
            if module.is_causal:
                step = ManyRowsSelfAttentionStep if self._has_many_rows(module) else SelfAttentionStep
                return step(module, self.product, self.ancestors)
            return CrossAttentionStep(module, self.product)
        if isinstance(module, DynamicConvolution):
            return DynamicConvolutionStep(module, self.product, self.ancestors)
        if isinstance(module, MultiBranchFeedForward):
            return FeedForwardStep(module, self.product)
        if isinstance(module, BranchSum):
            return self.product(module.weight, summed_bias(module))
        if isinstance(module, nn.Linear):
            return self.product(module.weight, module.bias)
        if isinstance(module, LayerSelection):
            return Once(module)
        if isinstance(module, Embeddings):
            return EmbeddingsStep(module)
        if isinstance(module, nn.Dropout):
            return unchanged
        if type(module) is nn.LayerNorm:
            return norm_step(module)
        if type(module) is DecoderLayer:
            return DecoderLayerStep(module, self.of)
        if hasattr(module, "decoding_step"):
            return module.decoding_step(self.autocast)
        children = {name: child if child is None else self.of(child) for name, child in module._modules.items()}
        if all(child is module._modules[name] for name, child in children.items()):
            return module
        twin = object.__new__(type(module))
        vars(twin).update(vars(module))
        vars(twin).update(children, _modules=children)  # as attributes they are found at once
        return twin

    def _has_many_rows(self, attention: MultiBranchAttention) -> bool:
        """Whether `ManyRowsSelfAttentionStep` is the faster one here, and as exact."""
        weight, ancestors = attention.out_proj.weight, self.ancestors
        return (
            ancestors.beams == 1
            and ancestors.rows >= MANY
            and weight.device.type == "cpu"
            and (self.dtype or weight.dtype) in (torch.float32, torch.float64)
            and attention.relative_keys is None
        )


class FeedForwardStep:
    """A feed-forward network, or the mean of several, none of which is dropped; un-joined, they are one network."""

    def __init__(self, module: MultiBranchFeedForward, product: Callable[..., MatrixProduct]) -> None:
        """Take the weights; the factor of the merge is in the second matrix."""
        is_relu = type(module.activation) is nn.ReLU
        self.activation = None if is_relu else module.activation
        if module.joined:
            scale, bias = module.merge_scale, summed_bias(module.fc2)
            self.inner = product(module.fc1.weight, module.fc1.bias, relu=is_relu)
            self.outer = product(scaled(module.fc2.weight, scale), None if bias is None else scaled(bias, scale))
        else:
            inner, outer = module.averaged()
            self.inner, self.outer = product(*inner, relu=is_relu), product(*outer)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[R, 1, D]` to `[R, 1, D]`."""
        inner = self.inner(hidden_states)
        return self.outer(inner if self.activation is None else self.activation(inner))


class EmbeddingsStep:
    """`Embeddings` of one token in each row, all at the same position."""

    def __init__(self, module: Embeddings) -> None:
        """Take the table of positions."""
        self.scale, self.max_length = module.scale, module.max_length
        self.table = module.positions.weight if isinstance(module.positions, nn.Embedding) else module.positions.table
        self.norm = unchanged if module.layer_norm is None else norm_step(module.layer_norm)

    def __call__(self, token_embeddings: torch.Tensor, mask: None, past_length: int) -> torch.Tensor:
        """Scale token embeddings `[R, 1, D]` and add their position."""
        check_length(past_length + 1, self.max_length, SHORTER)
        position = self.table.select(0, past_length).to(token_embeddings.dtype)
        return self.norm(torch.add(position, token_embeddings, alpha=self.scale))


class Once:
    """A module whose arguments stay the same for the whole of a call of `generate`."""

    def __init__(self, module: nn.Module) -> None:
        """Remember the module."""
        self.module = module
        self.result: Any = None

    def __call__(self, *args: Any) -> Any:
        """The result of the first call."""
        if self.result is None:
            self.result = self.module(*args)
        return self.result

    def keep(self, kept: torch.Tensor, sentences: int) -> None:
        """Compute it once more, for the sentences that are left."""
        self.result = None


def norm_step(module: nn.LayerNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    """A LayerNorm as a plain function, without the hooks of `nn.Module`."""
    shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """What dropout is in evaluation."""
    return x


def can_decode(model: nn.Module, config: GenerationConfig, mode: GenerationMode, arguments: dict[str, Any]) -> bool:
    """Whether a `DecodingCache` serves this call of `generate`, that is, gives all that the decoder itself would.

    Args:
        model: a translation model.
        config: the generation config.
        mode: how tokens are chosen.
        arguments: what `generate` is about to call the model with.
    """
    is_usual = (
        mode in MODES
        and config.use_cache is not False
        and config.cache_implementation in (None, "dynamic")
        and not config.is_assistant
    )
    is_recorded = any((config.output_attentions, config.output_hidden_states)) or any(
        (model.config.output_attentions, model.config.output_hidden_states)
    )
    has_twin = model.model.decoder.has_twin
    others = [value for name, value in arguments.items() if name not in ARGUMENTS]
    if not (is_usual and has_twin) or is_recorded or any(value is not None and value is not False for value in others):
        return False
    has_cache = any(arguments.get(name) is not None for name in CACHE_NAMES)
    if has_cache or model.config._attn_implementation not in ("eager", "sdpa"):
        return False
    mask, memory = arguments.get("attention_mask"), arguments["encoder_outputs"][0]
    has_sources = mask is None or (mask.shape == memory.shape[:2] and bool(mask.any(1).all()))
    return has_sources and is_plain(model)


def is_plain(model: nn.Module) -> bool:
    """Whether decoder and head are as they were made, in evaluation mode and on one device, and nobody looks on."""
    prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
    is_ours = prepare is type(model).prepare_inputs_for_generation and all(
        method.__module__.startswith(PACKAGES[0]) for method in (prepare, type(model).forward)
    )
    if not is_ours or model._compiled_call_impl is not None or torch.compiler.is_compiling():
        return False
    if "forward" in vars(model) and not hasattr(model, "_original_forward"):  # Accelerate's autocast is welcome
        return False
    modules = [model.lm_head, model.model.decoder, *modules_in(model.model.decoder_inputs().values())]
    for module in modules:  # as `modules()`, which also names each
        modules += [child for child in module._modules.values() if child is not None]
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    return (
        is_as_made(model.model)
        and all(is_as_made(module) and has_own_projections(module) for module in modules)
        and all(
            type(p) is nn.Parameter and p.device == parameters[0].device and p.dtype == parameters[0].dtype
            for p in parameters
        )
    )


def modules_in(values: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules among values, and in the fields of dataclasses among them."""
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif is_dataclass(value):
            yield from modules_in(vars(value).values())


def has_own_projections(module: nn.Module) -> bool:
    """Whether the steps find the weights of a module where they read them: nobody has replaced a projection."""
    if isinstance(module, MultiBranchAttention):
        return module.has_own_projections()
    if isinstance(module, MultiBranchFeedForward):
        return is_own(module.fc1, nn.Linear) and is_own(module.fc2, nn.Linear, BranchSum)
    return type(module) is not nn.Sequential  # there is none in our models


def is_as_made(module: nn.Module) -> bool:
    """Whether a module is one of ours or PyTorch's, in evaluation mode, not compiled, and without hooks."""
    is_hooked = module._forward_hooks or module._forward_pre_hooks  # hardly ever: this is asked for every module
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()] if is_hooked else ()
    return (
        not module.training
        and type(module).__module__.startswith(PACKAGES)
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
        and all(getattr(hook, "__module__", None) == RECORDER for hook in hooks)
    )
