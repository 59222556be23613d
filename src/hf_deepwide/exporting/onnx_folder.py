"""Export models of all families to ONNX, which onnxruntime and other engines run: encoder, and decoder with cache.

    export_onnx("runs/mat", "exported")

`encoder.onnx` computes the keys and values of every cross-attention from the source tokens, once for each sentence.
`decoder.onnx` takes one target token of each sentence, the keys and values of the cross-attentions, and the keys and
values of the earlier target tokens. It returns the logits of the next token, and the keys and values including the new
token's.
"""

import copy
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from .. import checkpoint_files
from ..card_text import CARD
from ..durable import check_output, saving, whole_folder
from ..errors import UserError, need
from ..models.language_pairs import Languages
from .opening import Opened, open_model, warn_of_rules
from .shown_languages import packages, shown_languages

logger = logging.getLogger(__name__)

ENCODER, DECODER = checkpoint_files.ONNX, "decoder.onnx"
UNKNOWN_RULES = (
    *("begin_suppress_tokens", "sequence_bias", "repetition_penalty", "encoder_repetition_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "forced_eos_token_id"),
)
SENTENCES, SOURCE, PAST = 3, 5, 4  # sizes of the traced inputs; the graphs accept all sizes
MOST_SENTENCES = 2**20
TOLERANCE = 1e-3  # largest accepted error of a logit, relative to the largest logit or to 1


class EncoderGraph(nn.Module):
    """The graph from source tokens `[B, S]` and mask to all cross-attention keys and values `[B, heads, S, width]`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Encode, and let the decoder fill its cache. The exporter removes the decoder's unused operations."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        start = torch.full_like(input_ids[:, :1], self.model.config.decoder_start_token_id)
        self.model(input_ids, attention_mask, decoder_input_ids=start, cache=cache, use_cache=True)
        return tensors_of(cache.cross_attention_cache)


class DecoderGraph(nn.Module):
    """The graph from one target token of each sentence `[B, 1]` to logits `[B, V]` and all keys and values so far."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past: tuple[torch.Tensor, ...],
        cross: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Decode one token of each sentence.

        Args:
            input_ids: the target tokens.
            attention_mask: the mask of the source.
            past: a key and a value of each layer's self-attention.
            cross: a key and a value of each layer's cross-attention.
        """
        cache = EncoderDecoderCache(cache_of(past), cache_of(cross))
        config, (sentences, source) = self.model.config, attention_mask.shape  # no layer reads the states
        states = cross[0].new_zeros(sentences, source + config.memory_rest, config.memory_width)
        output = self.model(
            encoder_outputs=BaseModelOutput(states), attention_mask=attention_mask, decoder_input_ids=input_ids,
            cache=cache, use_cache=True,
        )  # fmt: skip
        return output.logits[:, -1], *tensors_of(cache.self_attention_cache)


def cache_of(tensors: tuple[torch.Tensor, ...]) -> DynamicCache:
    """Return a cache with the key and value of each layer."""
    cache = DynamicCache()
    for layer in range(len(tensors) // 2):
        cache.update(tensors[2 * layer], tensors[2 * layer + 1], layer)
    return cache


def tensors_of(cache: DynamicCache) -> tuple[torch.Tensor, ...]:
    """Return the key and value of each layer in a cache."""
    return tuple(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))


def export_onnx(
    model: str | os.PathLike | PreTrainedModel,
    folder: str | os.PathLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    language: int | str | None = None,
) -> str:
    """Write a folder with a model in ONNX, in float32: its encoder, its decoder with cache, and its tokenizer.

    The folder's README holds code that translates with onnxruntime, without this package. Before the folder gets its
    final name, onnxruntime and the model decode random sentences, and their logits are compared.

    Args:
        model: a folder, a Hub id, or a loaded model, as `open_model` accepts it. It is not changed.
        folder: where to write; new or empty.
        tokenizer: the model's tokenizer, required for a loaded model; None: the tokenizer saved with the model.
        language: name or index of the posterior, if a latent-depth model has several. Export each to its own folder.

    Returns:
        The folder.

    Raises:
        UserError: a package is not installed; the folder is in use; layers cache more than keys and values; or the
            model cannot be loaded or exported (see `open_model`).
        RuntimeError: the logits of the graphs differ from the model's; `folder` is not written then.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, "onnx", "an export to ONNX, on Python 3.11 or newer,")
    target = Path(folder)
    check_output(target, inputs=[Path(model)] if isinstance(model, str | os.PathLike) else [])
    opened = open_model(model, tokenizer, language)
    warn_of_lost_rules(opened.model.generation_config)
    check_cache(opened.model)
    plain = copy.deepcopy(opened.model).to("cpu", torch.float32).eval()
    plain.set_attn_implementation("sdpa")
    with saving(target), whole_folder(target) as draft:
        write_graphs(plain, draft)
        difference = check_logits(plain, draft)
        opened.save_tokenizer(draft)
        (draft / CARD).write_text(readme(opened), encoding="utf-8")
    logger.info("%s: its logits differ from the model's by up to %.2g", target, difference)
    return str(target)


def warn_of_lost_rules(settings: GenerationConfig) -> None:
    """Log which rules of a generation config the program in the README leaves out."""
    phrases = [ids for ids in settings.bad_words_ids or [] if len(ids) > 1]
    warn_of_rules(settings, UNKNOWN_RULES, "the program in the folder's README", bad_words_ids=phrases)


def check_cache(model: PreTrainedModel) -> None:
    """Refuse a model whose layers cache more for each token than the keys and values that the graphs return.

    Raises:
        UserError: the layers do; the message names the model's `layer_form`.
    """
    if model.config.slots_per_layer > 1:
        raise UserError(
            f"the model cannot become ONNX: `layer_form` is {model.config.layer_form!r}, and its layers keep more for "
            "each token than keys and values; use `generate`"
        )


@torch.no_grad()
def write_graphs(model: PreTrainedModel, folder: Path) -> None:
    """Trace and write the encoder and the decoder of a model in evaluation mode."""
    config = model.config
    source = {0: Dim("batch", max=MOST_SENTENCES), 1: Dim("source", max=config.max_position_embeddings)}
    cached = {0: source[0]} if config.memory_rest else {0: source[0], 2: source[1]}  # Luna's length is fixed
    past_shape = {0: source[0], 2: Dim("past", max=config.max_position_embeddings - 1)}
    ids = torch.full((SENTENCES, SOURCE), config.decoder_start_token_id)
    mask = torch.ones_like(ids)
    cross = EncoderGraph(model)(ids, mask)
    past = tuple(tensor.new_zeros(*tensor.shape[:2], PAST, tensor.shape[3]) for tensor in cross)
    names = [f"{layer}.{part}" for layer in range(len(cross) // 2) for part in ("key", "value")]
    inputs = [f"{kind}.{name}" for kind in ("past", "cross") for name in names]
    with _quietly():
        encoder: Any = torch.onnx.export(
            EncoderGraph(model).eval(),
            (ids, mask),
            dynamo=True,
            verbose=False,
            input_names=["input_ids", "attention_mask"],
            output_names=[f"cross.{name}" for name in names],
            dynamic_shapes=(source, source),
        )
        encoder.save(folder / ENCODER)
        decoder: Any = torch.onnx.export(
            DecoderGraph(model).eval(),
            (ids[:, :1], mask, past, cross),
            dynamo=True,
            verbose=False,
            input_names=["input_ids", "attention_mask", *inputs],
            output_names=["logits", *(f"present.{name}" for name in names)],
            dynamic_shapes=({0: source[0]}, source, (past_shape,) * len(past), (cached,) * len(cross)),
        )
        decoder.save(folder / DECODER)


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter's warnings, such as remarks on packages that it does not need."""
    remarks = logging.getLogger("torch.onnx")
    level = remarks.level
    remarks.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        remarks.setLevel(level)


@torch.no_grad()
def check_logits(model: PreTrainedModel, folder: Path) -> float:
    """Decode three tokens of random sentences with the graphs; return the largest difference from the model's logits.

    Raises:
        RuntimeError: the graphs do not compute the model's function.
    """
    import onnxruntime

    config, generator = model.config, torch.Generator().manual_seed(0)
    longest = min(9, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (2, longest), generator=generator)
    target = torch.randint(config.decoder_vocab_size, (2, min(3, longest)), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 1:] = 0
    expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits
    encoder, decoder = (onnxruntime.InferenceSession(folder / name) for name in (ENCODER, DECODER))
    cross = encoder.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    past = [tensor[:, : config.num_key_value_heads, :0] for tensor in cross]
    names = [node.name for node in decoder.get_inputs()]
    worst = 0.0
    for step in range(target.shape[1]):
        inputs = [target[:, step : step + 1].numpy(), mask.numpy(), *past, *cross]
        logits, *past = decoder.run(None, dict(zip(names, inputs, strict=True)))
        worst = max(worst, (torch.from_numpy(logits) - expected[:, step]).abs().max().item())
    if not worst <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise RuntimeError(
            f"the ONNX graphs do not compute the model's function: logits differ by up to {worst:.2g}; please report "
            "this"
        )
    return worst


def readme(opened: Opened) -> str:
    """Return the folder's README: lines of Python that translate greedily with onnxruntime."""
    model, tokenizer, model_type = opened
    config, settings = model.config, model.generation_config
    languages = Languages(config, settings, tokenizer)
    shown = shown_languages(languages, tokenizer)
    asked = {name: tokenizer.convert_tokens_to_ids(token) for name, token in shown.settings.items()}
    start = asked.get("decoder_start_token_id", config.decoder_start_token_id)
    forced = asked.get("forced_bos_token_id", None if asked else settings.forced_bos_token_id)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    before = shown.tag or shown.source_token
    tag = f"[{tokenizer.convert_tokens_to_ids(before)}] + " if before else ""
    rest = "[1:]" if shown.source_token else ""
    room = ", max_length=tokenizer.model_max_length - 1" if shown.tag else ""
    others = (
        f"\nPut the id of another target language's code in the place of {next(iter(asked.values()), None)}.\n"
        if languages.codes
        else ""
    )
    single = (ids[0] for ids in settings.bad_words_ids or [] if len(ids) == 1)
    bad = sorted({*single, *(settings.suppress_tokens or [])})
    never = f"    logits[:, {bad}] = -np.inf\n" if bad else ""
    first = "" if forced is None else f"    best = np.full_like(best, {forced}) if step == 0 else best\n"
    code = f"""import numpy as np
import onnxruntime
from transformers import AutoTokenizer

texts = ["One sentence each, in the source language."]
tokenizer = AutoTokenizer.from_pretrained("."{shown.arguments})
encoder, decoder = (onnxruntime.InferenceSession(name) for name in ("{ENCODER}", "{DECODER}"))
options = dict(split_special_tokens=True, truncation=True{room})  # what looks like a special token is text
ids = [{tag}tokenizer(text, **options)["input_ids"]{rest} for text in texts]
batch = tokenizer.pad({{"input_ids": ids}}, return_tensors="np")
source, mask = batch["input_ids"], batch["attention_mask"]
cross = encoder.run(None, {{"input_ids": source, "attention_mask": mask}})
past, tokens = [tensor[:, :{config.num_key_value_heads}, :0] for tensor in cross], np.full((len(texts), 1), {start})
for step in range({min(opened.longest, config.max_position_embeddings - 1)}):
    inputs = [tokens[:, -1:], mask, *past, *cross]
    logits, *past = decoder.run(None, {{node.name: x for node, x in zip(decoder.get_inputs(), inputs)}})
{never}    best = logits.argmax(-1)
{first}    ended = np.isin(tokens[:, 1:], {ends}).any(1)
    if ended.all():
        break
    tokens = np.concatenate([tokens, np.where(ended, {config.pad_token_id}, best)[:, None]], axis=1)
print(*tokenizer.batch_decode(tokens, skip_special_tokens=True), sep="\\n")
"""
    return (
        "# A translation model in ONNX\n\n"
        f"A model of the type `{model_type}`, exported by hf_deepwide. It needs "
        f"`pip install {packages('onnxruntime', tokenizer)}`.\n\n"
        f"```python\n{code}```\n\nLeave empty lines out: a model makes some text of them.\n{shown.note}{others}"
    )
