"""Fast decoding, one token after another, inside `generate` of Transformers.

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

The loops that call the twin are in `search`. They remove sentences whose translations cannot change any more.

The twin is deleted after the call, so it never outlives a change of the weights. A call that needs the decoder itself
(hooks, attention weights, adapters, another cache) uses the decoder: see `can_decode`.
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
MANY = 4  # with at least so many rows, `ManyRowsSelfAttentionStep` is faster
# While sentences end, a batch has at most this number of sizes. Each new size compiles kernels again. To remove only a
# few sentences costs more time, for copies of the cache, than it saves.
SIZES = 4
RECORDER = "transformers.utils.output_capturing"  # its hooks stay, but do nothing unless a call requests records


class DecodingCache(EncoderDecoderCache):
    """The state of one call of `generate`: the decoder's twin, and the number of tokens that the twin has read."""

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
            rows: the number of sequences that are decoded, a multiple of the number of sentences.
            beams: the number of neighbouring rows that can continue each other.
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
        """Make the twins. This waits for the first token, because autocast may be active only around each step."""
        device = self.memory.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.twins = twins = Twins(self.ancestors, dtype)
        self.decoder, self.head = twins.of(self.model.model.decoder), twins.of(self.model.lm_head)
        inputs = self.model.model.decoder_inputs() | self.inputs
        self.inputs = {name: twins.of_fields(value) for name, value in inputs.items()}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that have been read in each row."""
        return self.length

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let each row continue another row of its sentence. The states of the source do not change."""
        self.ancestors.reorder(beam_idx)

    @torch.inference_mode()
    def leave_out(self, has_ended: torch.Tensor) -> torch.Tensor | None:
        """Remove sentences that have ended from the batch, so that matrix products are smaller.

        Sentences are only removed when a quarter of the batch has ended, then when the next quarter has, and so on.

        Args:
            has_ended: which sentences in the batch have ended, bools.

        Returns:
            The indices, in the batch so far, of the sentences that stay; None: all stay.
        """
        quarter = -(-self.sentences // SIZES)
        count = -(-int((~has_ended).sum()) // quarter) * quarter
        if not 0 < count < len(has_ended):
            return None
        kept = has_ended.int().argsort(stable=True)[:count].sort().values  # all unfinished ones, then ended ones
        for part in (self.ancestors, *self.twins.made.values()):
            if hasattr(part, "keep"):
                part.keep(kept, len(has_ended))
        self.memory = self.memory[kept]
        self.mask = None if self.mask is None else self.mask[kept]
        for name, value in self.inputs.items():
            if isinstance(value, torch.Tensor):
                self.inputs[name] = keep_sentences(value, kept, len(has_ended))
        return kept

    @torch.inference_mode()  # no bookkeeping of views and versions in each operation
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Read tokens `[rows, T]` of the sentences that are left, and return logits `[rows, T, V]` of what follows."""
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
        """Return a cache of Transformers with the same keys and values, and a copy of the source's for each row."""
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
            elif index == 0 and self.length:  # this layer is left out, but Transformers reads the length from slot 0
                ones = self.memory.new_ones(self.rows, 1, self.length, 1)
                own.update(ones, ones, 0)
        return EncoderDecoderCache(own, cross)


class Twins:
    """The twins of modules, one twin for each module."""

    def __init__(self, ancestors: Ancestors, dtype: torch.dtype | None) -> None:
        """Start without twins; `dtype` is the dtype of products under autocast, and None the dtype of the weights."""
        self.ancestors, self.dtype, self.autocast = ancestors, dtype, dtype is not None
        self.product = functools.partial(MatrixProduct, rows=ancestors.rows, dtype=dtype)
        self.made: dict[int, Any] = {}

    def of(self, module: nn.Module) -> Any:
        """Return the twin of a module, or the module itself if none of its parts has a faster twin."""
        if id(module) not in self.made:
            self.made[id(module)] = self._make(module)
        return self.made[id(module)]

    def of_fields(self, value: Any) -> Any:
        """Return a value, or a dataclass of values, in which twins replace modules."""
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
        vars(twin).update(children, _modules=children)  # as attributes, children are found without `__getattr__`
        return twin

    def _has_many_rows(self, attention: MultiBranchAttention) -> bool:
        """Return whether `ManyRowsSelfAttentionStep` serves this attention, and is faster and as exact here."""
        weight, ancestors = attention.out_proj.weight, self.ancestors
        return (
            ancestors.beams == 1
            and ancestors.rows >= MANY
            and weight.device.type == "cpu"
            and (self.dtype or weight.dtype) in (torch.float32, torch.float64)
            and attention.relative_keys is None
        )


class FeedForwardStep:
    """A feed-forward network, or the mean of several, without drop-branch. Un-joined branches become one network."""

    def __init__(self, module: MultiBranchFeedForward, product: Callable[..., MatrixProduct]) -> None:
        """Take the weights; the factor of the merge is in the second matrix, or, of un-joined branches, in both."""
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
        """Map `[R, 1, D]` to `[R, 1, D]`."""
        inner = self.inner(hidden_states)
        return self.outer(inner if self.activation is None else self.activation(inner))


class EmbeddingsStep:
    """`Embeddings` for one token in each row, all at the same position."""

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
    """A module that is computed once, because its arguments stay the same during a call of `generate`."""

    def __init__(self, module: nn.Module) -> None:
        """Remember the module."""
        self.module = module
        self.result: Any = None

    def __call__(self, *args: Any) -> Any:
        """Return the result of the first call."""
        if self.result is None:
            self.result = self.module(*args)
        return self.result

    def keep(self, kept: torch.Tensor, sentences: int) -> None:
        """Forget the result, so that the next call computes it for the sentences that are left."""
        self.result = None


def norm_step(module: nn.LayerNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a LayerNorm as a plain function, without the hooks of `nn.Module`."""
    shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """Return the input, as dropout does in evaluation."""
    return x


def can_decode(model: nn.Module, config: GenerationConfig, mode: GenerationMode, arguments: dict[str, Any]) -> bool:
    """Return whether a `DecodingCache` gives this call of `generate` everything that the decoder itself would give.

    Args:
        model: a translation model.
        config: the generation config.
        mode: how tokens are chosen.
        arguments: the arguments with which `generate` will call the model.
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
    """Return whether decoder and head are unchanged, in evaluation mode, on one device, and without hooks.

    Return False, too, if the model is compiled, or if its `forward` is replaced by anything but Accelerate's autocast.
    """
    prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
    is_ours = prepare is type(model).prepare_inputs_for_generation and all(
        method.__module__.startswith(PACKAGES[0]) for method in (prepare, type(model).forward)
    )
    if not is_ours or model._compiled_call_impl is not None or torch.compiler.is_compiling():
        return False
    if "forward" in vars(model) and not hasattr(model, "_original_forward"):  # Accelerate's autocast is allowed
        return False
    modules = [model.lm_head, model.model.decoder, *modules_in(model.model.decoder_inputs().values())]
    for module in modules:  # faster than `modules()`, which also makes names
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
    """Yield the modules among values, and the modules in the fields of dataclasses."""
    for value in values:
        if isinstance(value, nn.Module):
            yield value
        elif is_dataclass(value):
            yield from modules_in(vars(value).values())


def has_own_projections(module: nn.Module) -> bool:
    """Return whether the twins can read the weights of a module, because none of its projections is replaced."""
    if isinstance(module, MultiBranchAttention):
        return module.has_own_projections()
    if isinstance(module, MultiBranchFeedForward):
        return is_own(module.fc1, nn.Linear) and is_own(module.fc2, nn.Linear, BranchSum)
    return type(module) is not nn.Sequential  # our models have no `nn.Sequential`


def is_as_made(module: nn.Module) -> bool:
    """Return whether a module is from this library or PyTorch, in evaluation mode, not compiled, and without hooks."""
    is_hooked = module._forward_hooks or module._forward_pre_hooks  # rare; this short check runs for every module
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()] if is_hooked else ()
    return (
        not module.training
        and type(module).__module__.startswith(PACKAGES)
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
        and all(getattr(hook, "__module__", None) == RECORDER for hook in hooks)
    )
