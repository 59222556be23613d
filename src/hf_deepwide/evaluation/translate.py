"""Translate a list of sentences with any seq2seq model: beam search, sorted by length, batches by tokens."""

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

LINE_ENDS = {ord(end): " " for end in "\n\r"}  # what ends a line of a file
_TURN = threading.RLock()  # for one thread at a time: a model's generation config is another one meanwhile


class Hypothesis(NamedTuple):
    """A translation as token ids, without the decoder's start token and the padding after the end.

    `score` is log-probability / length**length_penalty; None where the search keeps no scores (greedy search).
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
    """Translate `sources`; element i of the result is the translation of element i.

    The model comes back as it was: same training mode, same generation config (whose other fields, such as a
    forced first token or forbidden words, are in force). A source longer than the model can read is cut, with
    one warning that counts and names the lines. What a sentence becomes does not depend on its neighbours in
    the batch, up to the rounding of differently padded sums. A translation is one line, and that of an empty line is
    empty. Special tokens in a source (`</s>`) are text as any other.

    Args:
        model: any encoder-decoder model with `generate`, or an exported one.
        tokenizer: its tokenizer.
        sources: the sentences.
        args: beam search and batching.
        source_lang, target_lang: the language pair, as the model's config or its tokenizer calls the languages. A
            language that follows from the other, or was saved with the tokenizer, need not be given; see
            `models/language_pairs.py`.
        sampling: draw translations at random, with `num_beams` 1; None: search for them.
        first_line: the line in which `sources` begin, for messages.

    Raises:
        UserError: a source that is no text, or a language pair that the model does not know, or that is missing; or
            beams and sampling together.
    """
    translations = []
    for ids in generate_ids(model, tokenizer, sources, args, source_lang, target_lang, sampling, first_line):
        translations.append(as_line(tokenizer, ids))
    return translations


def as_line(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """A translation's token ids as one line of text. All spaces stay where words are tokens: code begins with some."""
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
    """As `translate`, but the token ids, without the decoder's start token and the padding after the end."""
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
    """As `translate`, but the `num_beams` best hypotheses of each source, best first; none of an empty source."""
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
    """The `count` best hypotheses of each source, with scores where there are several; or one that is drawn."""
    if sampling is not None and args.num_beams > 1:
        raise UserError(f"a translation is drawn, or searched for with {args.num_beams} beams; with sampling set 1")
    sources = _checked(sources, first_line)
    if isinstance(model, Engine):
        if sampling is not None:
            raise UserError(f"{model.folder}: CTranslate2 draws in its own way; sample with the exported model itself")
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
    """The hypotheses of each source; none of an empty one.

    Args:
        encoded: the sources.
        args: the size of a batch, and how long translations may be.
        config: the model's; None: it has no limit of its own.
        search: makes hypotheses of some sources, given by their numbers, and is told the most tokens of one.
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
    """What `generate` gives for a batch, `[batch * count, 1 + target]` or that with scores, source by source."""
    ids, scores = (generated, None) if count == 1 else (generated.sequences, generated.sequences_scores)
    rows = [_strip_padding(row, pad_id) for row in padded_behind_end(ids, ends, pad_id)[:, 1:].tolist()]
    found = list(map(Hypothesis, rows, [None] * len(rows) if scores is None else scores.tolist()))
    return [found[start : start + count] for start in range(0, len(found), count)]


def padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Rows as one tensor `[rows, longest]`, with a value behind the shorter ones."""
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
    """As `_search`, by CTranslate2."""
    if args.precision != "float32":
        raise UserError(
            f"precision is {args.precision}, and CTranslate2 computes as the folder was exported; leave it out, and "
            "export with another quantization"
        )
    if args.num_beams > 1 and not args.early_stopping:
        raise UserError("early_stopping is false, and CTranslate2 stops at num_beams finished hypotheses; set true")
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
    """A list of sentences.

    Raises:
        UserError: it is none, or one of them is no text.
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
    """Encode the sources; those over the limit are cut, with one warning for all."""
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
    """Autocast to a precision of `EvaluationArguments`; none to float32."""
    dtype = AUTOCAST[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for the model; afterwards each of its modules has the mode it had."""
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
    """Put a generation config with our search settings in place of the model's own for a while.

    A language pair may have its own first tokens for the decoder.

    In place, and not as an argument of `generate`: what an argument leaves open is filled from the model's
    config, so that a checkpoint's `max_length` would stand beside our `max_new_tokens`.
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
        output_scores=count > 1,  # without them there are no scores of hypotheses either
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
