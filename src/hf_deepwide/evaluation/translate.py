"""Translate sentences with any seq2seq model: beam search in batches that are sorted by length and sized by tokens."""

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError, number_of
from ..models.language_pairs import TARGET_CODE, Choice, Languages
from ..models.plain_text import (
    Source,
    check_text,
    describe,
    encode_sources,
    length_limit,
    padded_behind_end,
    source_limit,
)
from ..models.word_tokenizer import WordTokenizer
from ..progress import shows_bars
from .arguments import AUTOCAST, EvaluationArguments
from .engine import Engine
from .fitting_batches import in_fitting_batches
from .sampling import SamplingArguments, SamplingLogitsProcessor

logger = logging.getLogger(__name__)

LINE_ENDS = {ord(end): " " for end in "\n\r"}  # characters that end a line of a file
_TURN = threading.RLock()  # one thread at a time, because a search replaces the model's generation config for a while


class Hypothesis(NamedTuple):
    """A translation as token ids, without the decoder's start token and the padding after the end.

    `score` is log-probability / length**length_penalty. It is None if the search keeps no scores (greedy search).
    """

    ids: list[int]
    score: float | None


def translate(
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    args: EvaluationArguments,
    source_lang: str | None = None,
    target_lang: str | None = None,
    sampling: SamplingArguments | None = None,
    first_line: int = 1,
) -> list[str]:
    """Translate `sources`. Element i of the result is the translation of element i.

    Afterwards, the model has the same training mode and generation config as before. Other fields of this config, such
    as a forced first token or forbidden words, are used in the search.

    A source that is longer than the model can read is cut. One warning counts and names all such lines. The
    translation of a sentence does not depend on the other sentences of the batch, up to the rounding of differently
    padded sums. A translation is one line. An empty line has an empty translation. Special tokens in a source
    (`</s>`) are treated as ordinary text.

    Args:
        model: any encoder-decoder model with `generate`, or an exported model.
        tokenizer: the model's tokenizer.
        sources: the sentences.
        args: the settings of beam search and batching.
        source_lang, target_lang: the language pair, in the codes of the model's config or tokenizer. A language that
            follows from the other one, or was saved with the tokenizer, is not required; see
            `models/language_pairs.py`.
        sampling: draw translations at random, with `num_beams` 1. None: use beam search.
        first_line: the line number of the first source, for messages.

    Raises:
        UserError: a source is no text; the model does not support the language pair; a language is missing; or
            sampling is combined with several beams.
    """
    translations = []
    for ids in generate_ids(model, tokenizer, sources, args, source_lang, target_lang, sampling, first_line):
        translations.append(as_line(tokenizer, ids))
    return translations


def as_line(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode token ids to one line of text. A `WordTokenizer` keeps all spaces, because code can begin with spaces."""
    # cleaning up would join "do n't" to "don't" and falsify scores on tokenised text
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if isinstance(tokenizer, WordTokenizer):
        return text.translate(LINE_ENDS)
    return " ".join(text.splitlines()).strip()


def generate_ids(
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    args: EvaluationArguments,
    source_lang: str | None = None,
    target_lang: str | None = None,
    sampling: SamplingArguments | None = None,
    first_line: int = 1,
) -> list[list[int]]:
    """Translate as `translate` does, but return token ids, without the decoder's start token and trailing padding."""
    search = (model, tokenizer, sources, args, source_lang, target_lang)
    searched = _search(*search, sampling=sampling, first_line=first_line)
    return [hypotheses[0].ids if hypotheses else [] for hypotheses in searched]


def generate_beams(
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    args: EvaluationArguments,
    source_lang: str | None = None,
    target_lang: str | None = None,
    first_line: int = 1,
) -> list[list[Hypothesis]]:
    """Return the `num_beams` best hypotheses of each source, best first; none for an empty source. See `translate`."""
    search = (model, tokenizer, sources, args, source_lang, target_lang)
    return _search(*search, count=args.num_beams, first_line=first_line)


def _search(
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    args: EvaluationArguments,
    source_lang: str | None,
    target_lang: str | None,
    count: int = 1,
    sampling: SamplingArguments | None = None,
    first_line: int = 1,
) -> list[list[Hypothesis]]:
    """Return the `count` best hypotheses of each source, with scores if `count` > 1; or one sampled hypothesis."""
    if sampling is not None and args.num_beams > 1:
        raise UserError(f"sampling works without beam search, and num_beams is {args.num_beams}; set num_beams to 1")
    sources = _checked(sources, first_line)
    if isinstance(model, Engine):
        if sampling is not None:
            raise UserError(
                f"{model.folder}: sampling is not supported with CTranslate2; sample with the model from which this "
                "folder was exported"
            )
        return _search_by_engine(model, sources, args, source_lang, target_lang, count, first_line)
    try:
        languages = Languages(model.config, model.generation_config, tokenizer)
        choice = languages.decide(source_lang, target_lang)
    except ValueError as error:
        raise UserError(str(error)) from None
    encoded = _encode(languages, choice, sources, source_limit(model.config, tokenizer), first_line)
    if tokenizer.pad_token_id is None:
        raise UserError("the tokenizer has no padding token, so sentences cannot be batched: set tokenizer.pad_token")
    begun = time.perf_counter()
    with (
        _TURN,
        evaluating(model),
        _generation_settings(model, args, choice, count) as settings,
        torch.no_grad(),
        autocast(model.device, args.precision),
    ):

        def generate(batch: list[int], longest: int) -> list[list[Hypothesis]]:
            settings.max_new_tokens = longest
            rows = [encoded[number].ids for number in batch]
            inputs = {
                "input_ids": padded(rows, tokenizer.pad_token_id),  # [batch, source]
                "attention_mask": padded([[1] * len(row) for row in rows], 0),  # [batch, source]
            }
            if choice.posterior is not None:
                inputs["posteriors"] = torch.full((len(batch),), choice.posterior)
            drawing = {}
            if sampling is not None:
                texts = [sources[number] for number in batch]
                drawing = {"logits_processor": [SamplingLogitsProcessor(texts, longest, sampling)]}
            generated = model.generate(**{name: tensor.to(model.device) for name, tensor in inputs.items()}, **drawing)
            return _hypotheses(generated, count, settings.eos_token_id, tokenizer.pad_token_id)

        outputs = _in_batches(encoded, args, model.config, generate)
    if not shows_bars():
        logger.info("translated %s in %.0f s", number_of(len(encoded), "sentence"), time.perf_counter() - begun)
    return outputs


def _in_batches(
    encoded: Sequence[Source], args: EvaluationArguments, config: Any, search: Callable[[list[int], int], list]
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each source. An empty source has none.

    Args:
        encoded: the sources.
        args: the size of a batch, and the limits on the length of a translation.
        config: the config of the model. None: the model sets no limit on the length.
        search: a function that translates a batch. It receives the indices of the sources and the maximum length of a
            translation, and returns the hypotheses of each source.
    """
    outputs: list[list[Hypothesis]] = [[] for _ in encoded]
    full = [number for number, source in enumerate(encoded) if not source.is_empty]
    lengths = [len(encoded[number].ids) for number in full]
    limits = [length_limit(config, length, args) for length in lengths]

    def search_batch(places: list[int]) -> list:
        return search([full[place] for place in places], limits[places[0]])

    with tqdm(total=len(full), desc="translating", unit="sentence", leave=False, disable=not shows_bars()) as progress:
        for places, results in in_fitting_batches(search_batch, lengths, args, limits):
            for place, found in zip(places, results, strict=True):
                outputs[full[place]] = found
            progress.update(len(places))
    return outputs


def _hypotheses(generated: Any, count: int, ends: Any, pad_id: int) -> list[list[Hypothesis]]:
    """Turn the output of `generate` into hypotheses by source: ids `[batch * count, 1 + target]`, and maybe scores."""
    ids, scores = (generated, None) if count == 1 else (generated.sequences, generated.sequences_scores)
    rows = [_strip_padding(row, pad_id) for row in padded_behind_end(ids, ends, pad_id)[:, 1:].tolist()]
    found = list(map(Hypothesis, rows, [None] * len(rows) if scores is None else scores.tolist()))
    return [found[start : start + count] for start in range(0, len(found), count)]


def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Return the rows as one tensor `[rows, longest]`. Shorter rows are padded at the end with `value`."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def _search_by_engine(
    engine: Engine,
    sources: list[str],
    args: EvaluationArguments,
    source_lang: str | None,
    target_lang: str | None,
    count: int,
    first_line: int,
) -> list[list[Hypothesis]]:
    """Search as `_search` does, with CTranslate2."""
    if args.precision != "float32":
        raise UserError(
            f"precision is {args.precision}, but CTranslate2 uses the number type of the exported folder. Leave "
            "precision out. For another number type, export with another quantization"
        )
    if args.num_beams > 1 and not args.early_stopping:
        raise UserError(
            "early_stopping is false, but CTranslate2 always stops at num_beams finished hypotheses; set "
            "early_stopping to true"
        )
    try:
        choice = engine.choose(source_lang, target_lang)
    except ValueError as error:
        raise UserError(str(error)) from None
    encoded = _encode(engine.languages, choice, sources, engine.limit, first_line)

    def search(batch: list[int], longest: int) -> list[list[Hypothesis]]:
        results = engine.search(
            choice,
            [encoded[number].ids for number in batch],
            beams=args.num_beams,
            length_penalty=args.length_penalty,
            longest=longest,
            num_hypotheses=count,
        )
        ids = engine.tokenizer.convert_tokens_to_ids
        return [
            [
                Hypothesis(ids(words), score)
                for words, score in zip(each.hypotheses, each.scores if count > 1 else [None], strict=True)
            ]
            for each in results
        ]

    return _in_batches(encoded, args, None, search)


def _checked(sources: Iterable[str], first_line: int) -> list[str]:
    """Check the sources, and return them as a list of sentences.

    Raises:
        UserError: the sources are no list of sentences, or a sentence is no text.
    """
    if isinstance(sources, str):
        raise UserError("translate: one string was given; a list of sentences is wanted")
    if isinstance(sources, (bytes, bytearray, Mapping)) or not isinstance(sources, Iterable):
        raise UserError(f"translate: {describe(sources)} was given; a list of sentences is wanted")
    accepted = "accepted: a list of strings"
    try:
        return [check_text(source, f"line {line}, ", accepted) for line, source in enumerate(sources, first_line)]
    except ValueError as error:
        raise UserError(str(error)) from None


def _encode(languages: Languages, choice: Choice, sources: Sequence[str], limit: int, first_line: int) -> list[Source]:
    """Encode the sources. Sources over the limit are cut, with one warning for all."""
    encoded = encode_sources(languages, choice, sources, limit)
    too_long = [line for line, source in enumerate(encoded, first_line) if source.length > limit]
    if too_long:
        lines = ", ".join(map(str, too_long[:10])) + (", …" if len(too_long) > 10 else "")
        logger.warning(
            "%d of %d sources cut to the %d tokens that the model reads: %s %s",
            len(too_long), len(encoded), limit, "line" if len(too_long) == 1 else "lines", lines,
        )  # fmt: skip
    return encoded


def _strip_padding(row: list[int], pad_id: int) -> list[int]:
    while row and row[-1] == pad_id:
        row.pop()
    return row


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Return an autocast context for a precision of `EvaluationArguments`. For float32 it does nothing."""
    dtype = AUTOCAST[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put the model into evaluation mode. When the block ends, each of its modules has its former mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _generation_settings(
    model: PreTrainedModel, args: EvaluationArguments, choice: Choice, count: int = 1
) -> Iterator:
    """Replace the model's generation config within the block by a copy with our search settings.

    A language pair may set the first tokens of the decoder in it.

    The config is replaced and not passed to `generate`. `generate` fills the open fields of a passed config from the
    model's config, so that a checkpoint's `max_length` would conflict with our `max_new_tokens`.
    """
    own = model.generation_config
    settings = copy.deepcopy(own)
    settings.update(
        num_beams=args.num_beams,
        length_penalty=args.length_penalty if args.num_beams > 1 else None,
        early_stopping=args.early_stopping if args.num_beams > 1 else None,
        max_length=None,
        do_sample=False,
        num_return_sequences=count,
        return_dict_in_generate=count > 1,
        output_scores=count > 1,  # without these, `generate` returns no scores of hypotheses either
        use_cache=True,
    )
    for name in TARGET_CODE:
        if name in choice.settings:
            setattr(settings, name, choice.settings[name])
    model.generation_config = settings
    try:
        yield settings
    finally:
        model.generation_config = own
