"""The translation pipeline, which Transformers v5 no longer has.

    pipeline("translation", model="runs/mat")("Two dogs run.")      # [{"translation_text": …}]

It works with every encoder-decoder checkpoint. `language_pairs.py` describes how the language pair reaches the model.

This file is uploaded to the Hub with a shared model. So it imports only torch, transformers and the modules beside it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Integral
from types import NoneType
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import GenerationConfig, Pipeline, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import logging

from .cache_name import CACHE_NAMES
from .language_pairs import Languages, task_languages
from .plain_text import (
    MOST_CHARACTERS,
    check_text,
    describe,
    encode_sources,
    length_limit,
    padded_behind_end,
    positions,
    sorted_batches,
    source_limit,
)
from .saved_fields import LIMITS

logger = logging.get_logger(__name__)

ACCEPTED = "accepted: a string, a list of strings, a generator or dataset of strings"
MAX_NEW_TOKENS, NUM_BEAMS = 256, 4  # defaults, if neither the caller nor the model's generation config sets them
WITHOUT_BEAMS = {"streamer", "assistant_model", "prompt_lookup_num_tokens"}  # arguments that beam search refuses
WITHOUT_BATCHES = {  # arguments that apply to one text
    *(*WITHOUT_BEAMS, *CACHE_NAMES, "encoder_outputs", "prefix_allowed_tokens_fn", "logits_processor"),
    *("stopping_criteria", "custom_generate"),
}
LENGTHS = ("max_length", "max_new_tokens")
BATCH_TOKENS, BATCH_TEXTS = 2048, 64  # the limits of a batch; padding counts, beams do not


class TranslationPipeline(Pipeline):
    """Translate text with an encoder-decoder model.

    `pipeline("translation", …)` and each call accept these arguments; the arguments of the call take precedence:

    Args:
        src_lang, tgt_lang: the languages, by their names in the config or tokenizer; required if there are several.
            They default to the languages in the task's name (`"translation_en_to_de"`), then to the languages saved
            with the tokenizer or the generation config.
        truncation: True cuts a source that is too long for the model; False (default) raises `ValueError`.
        return_text: return `translation_text` (default, unless `return_tensors`).
        return_tensors: return `translation_token_ids`, a tensor `[target]`.
        clean_up_tokenization_spaces: remove spaces before punctuation and the like (default False).
        batch_size, num_workers: as in every pipeline. Without them a list is sorted by length and translated in
            batches of up to 64 texts and 2,048 tokens. The results are in the order of the texts. Datasets and
            generators are read one text after another unless `batch_size` is given.
        generate_kwargs: any argument of `model.generate`, such as `num_beams=5`. Unless the model's generation config
            sets other values, the default is 4 beams and at most 256 new tokens. A model that a recipe has trained
            uses the length limit with which it was scored: `max_length_factor` times the number of source tokens (of
            the longest source in a batch), plus `max_length_offset`. A translation never has more tokens than the
            model has positions.

    The pipeline sets the model to evaluation mode. Special tokens in a text (`</s>`) are treated as plain text. The
    translation of an empty text is empty.

    Raises:
        ValueError: the model cannot translate, an input is not a string or is too long, or a language is missing
            or unknown.
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False
    _pipeline_calls_generate = False  # what the base class does with generation arguments changes between versions

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any) -> None:
        if not (getattr(model.config, "is_encoder_decoder", False) and model.can_generate()):
            raise ValueError(
                f"pipeline('translation') needs an encoder-decoder model that can generate, got {type(model).__name__}"
            )
        if tokenizer is None:
            raise ValueError("pipeline('translation') needs a tokenizer: none came with the model, pass `tokenizer=`")
        if tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token, so texts cannot be batched: set tokenizer.pad_token")
        self.languages = Languages(model.config, model.generation_config, tokenizer)
        self.task_languages = task_languages(kwargs.get("task"))
        self.languages.check(*self.task_languages)
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)
        self.model.eval()

    def _sanitize_parameters(
        self,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        truncation: bool | str | None = None,
        return_text: bool | None = None,
        return_tensors: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        **generate_kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        for name in ("num_beams", *LENGTHS):
            value = generate_kwargs.get(name, 1)
            unlimited = value is None and name in LENGTHS
            if not unlimited and not (isinstance(value, Integral) and value >= 1):
                raise ValueError(f"`{name}` is {describe(value)}; accepted: 1 or more")
        config = generate_kwargs.get("generation_config")
        if not isinstance(config, (GenerationConfig, NoneType)):
            raise ValueError(f"`generation_config` is {describe(config)}; accepted: a GenerationConfig")
        self.languages.check(src_lang, tgt_lang)
        languages = given(src_lang=src_lang, tgt_lang=tgt_lang)
        postprocess = given(
            return_text=return_text,
            return_tensors=return_tensors,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
        )
        return {**languages, **given(truncation=truncation)}, {**languages, **generate_kwargs}, postprocess

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Translate.

        Args:
            inputs: a string; a list (or other sequence) of strings; a dataset whose items are strings, such as
                `KeyDataset(dataset, "text")`; a generator or other iterable of strings.
            kwargs: see the class.

        Returns:
            For a string, a list of `num_return_sequences` dicts. For a list, one dict per input, or a list of dicts
            per input if `num_return_sequences` > 1. For any other input, an iterator that yields the result for each
            text as for a string.
        """
        if isinstance(inputs, str):
            return super().__call__(check_text(inputs, "", ACCEPTED), **kwargs)
        if isinstance(inputs, (bytes, bytearray, Mapping)) or not (
            isinstance(inputs, Iterable) or is_map_style(inputs)
        ):
            raise ValueError(f"cannot translate {describe(inputs)}; {ACCEPTED}")
        if isinstance(inputs, Sequence):
            texts = list(checked(inputs))
            if self._chooses_batches(kwargs):
                results = self._translate_sorted(texts, **kwargs)
            else:
                results = super().__call__(texts, **kwargs) if texts else []
            return [result[0] for result in results] if all(len(result) == 1 for result in results) else results
        if is_map_style(inputs):
            return iter(super().__call__(CheckedTexts(inputs), **kwargs))
        return iter(super().__call__(checked(inputs), **kwargs))

    def _chooses_batches(self, kwargs: dict[str, Any]) -> bool:
        """Return whether this class forms the batches of a list of texts.

        It does not if the caller sets `batch_size` or `num_workers`, or passes arguments for one text or one batch.
        """
        settings = {**self._forward_params, **kwargs}
        return (
            kwargs.get("batch_size", self._batch_size) is None
            and kwargs.get("num_workers", self._num_workers) is None
            and not settings.keys() & WITHOUT_BATCHES
            and not any(isinstance(value, torch.Tensor) for value in settings.values())
        )

    def _translate_sorted(self, texts: list[str], **kwargs: Any) -> list[list[dict[str, Any]]]:
        """Translate in batches, the longest texts first. The results are in the order of the texts."""
        options = {name: value for name, value in kwargs.items() if name not in ("batch_size", "num_workers")}
        preprocess, forward, postprocess = self._sanitize_parameters(**options)
        sources = self._encode(texts, **{**self._preprocess_params, **preprocess})
        lengths = [source["input_ids"].shape[1] for source in sources]
        results: list[list[dict[str, Any]]] = [[] for _ in texts]
        settings = {**self._forward_params, **forward}
        limits = [self._length_limit(settings, length) for length in lengths]
        for batch in sorted_batches(lengths, BATCH_TOKENS, BATCH_TEXTS, None if None in limits else limits):
            inputs = join([sources[i] for i in batch], self.tokenizer.pad_token_id)
            outputs = self.forward(inputs, **settings)
            for place, i in enumerate(batch):
                output = {name: tensor[place : place + 1] for name, tensor in outputs.items()}
                results[i] = self.postprocess(output, **{**self._postprocess_params, **postprocess})
        return results

    def preprocess(
        self,
        text: str,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        truncation: bool | str = False,
    ) -> dict[str, torch.Tensor]:
        """Tokenize a source into `input_ids` and `attention_mask`, `[1, source]` each, and `is_empty` `[1]`."""
        return self._encode([text], src_lang, tgt_lang, truncation)[0]

    def _encode(
        self,
        texts: Sequence[str],
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        truncation: bool | str = False,
    ) -> list[dict[str, torch.Tensor]]:
        """Tokenize all sources at once. Each result is as `preprocess` returns it."""
        truncation = TruncationStrategy({True: "longest_first", False: "do_not_truncate"}.get(truncation, truncation))
        choice = self.languages.choose(*self._asked(src_lang, tgt_lang))
        limit = source_limit(self.model.config, self.tokenizer)
        encoded = []
        for text, source in zip(texts, encode_sources(self.languages, choice, texts, limit), strict=True):
            if source.length > limit:
                if truncation == TruncationStrategy.DO_NOT_TRUNCATE:
                    length = f"{source.length} tokens" if len(text) <= MOST_CHARACTERS else f"{len(text)} characters"
                    raise ValueError(
                        f"the text has {length}, and the model takes at most {limit} tokens: split it, or pass "
                        f"`truncation=True` to translate its beginning only. It starts with {text[:60]!r}"
                    )
                logger.warning_once(f"texts of more than {limit} tokens are cut")
            ids = torch.tensor([source.ids], dtype=torch.long)
            is_empty = torch.tensor([source.is_empty])
            encoded.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "is_empty": is_empty})
        return encoded

    def _forward(
        self,
        inputs: dict[str, torch.Tensor],
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **generate_kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Translate a batch to `output_ids` `[batch, num_return_sequences, target]`, and keep `is_empty` `[batch]`."""
        choice = self.languages.choose(*self._asked(src_lang, tgt_lang))
        settings = {**choice.settings, **generate_kwargs}
        is_empty = inputs.pop("is_empty")
        inputs = pad_on_the_right(**inputs)
        if choice.posterior is not None:
            ids = inputs["input_ids"]
            settings.setdefault("posteriors", torch.full((len(ids),), choice.posterior, device=ids.device))
        limit = self._length_limit(settings, int(inputs["attention_mask"].sum(1).max()))
        if limit is not None:
            settings["max_length"] = limit + 1  # plus the token that the decoder starts from
        else:
            settings.update(self._default_length(settings))
        settings.update(self._default_beams(settings))
        output = self.model.generate(**inputs, **settings)
        ids = getattr(output, "sequences", output)  # [batch * num_return_sequences, target]
        said = {**self.model.generation_config.to_dict(), **given_config(settings), **settings}
        ids = padded_behind_end(ids, said["eos_token_id"], self.tokenizer.pad_token_id)
        return {"output_ids": ids.view(len(is_empty), -1, ids.shape[-1]), "is_empty": is_empty}

    def postprocess(
        self,
        outputs: dict[str, torch.Tensor],
        return_text: bool | None = None,
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the translations of one source as dicts."""
        records = []
        for padded in outputs["output_ids"][0]:
            ids = self._without_padding(padded, bool(outputs["is_empty"][0]))
            record = {"translation_token_ids": ids} if return_tensors else {}
            if return_text or (return_text is None and not return_tensors):
                record["translation_text"] = self.tokenizer.decode(
                    ids, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
                )
            records.append(record)
        return records

    def _asked(self, src_lang: str | None, tgt_lang: str | None) -> tuple[str | None, str | None]:
        """Return the languages of the call, or else of the pipeline, or else in the task's name."""
        return src_lang or self.task_languages[0], tgt_lang or self.task_languages[1]

    def _without_padding(self, ids: torch.Tensor, is_empty: bool) -> torch.Tensor:
        """Return a translation's ids without padding; for an empty text, return only the start and end tokens."""
        if is_empty:
            ends = self.tokenizer.eos_token_id
            ends = self.model.generation_config.eos_token_id if ends is None else ends  # BERT's tokenizers have none
            end = ends[0] if isinstance(ends, list) else ends
            return ids[:1] if end is None else torch.cat([ids[:1], ids.new_tensor([end])])
        text = (ids != self.tokenizer.pad_token_id).nonzero()
        return ids[: int(text[-1]) + 1] if len(text) else ids[:1]

    def _said(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Merge the settings of the model's generation config, the call's generation config and the call itself.

        Later settings override earlier ones.
        """
        return {**self.model.generation_config.to_diff_dict(), **given_config(settings), **settings}

    def _default_beams(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the default number of beams, unless the settings contain a number or exclude beam search."""
        said = self._said(settings)
        return {} if "num_beams" in said or said.keys() & WITHOUT_BEAMS else {"num_beams": NUM_BEAMS}

    def _length_limit(self, settings: dict[str, Any], source_length: int) -> int | None:
        """Return the most tokens of a translation of such a source, by the limit used in scoring the model.

        The result is None if the call sets a length, or the model's generation config sets `max_new_tokens`. It is
        also None if the model's config does not contain the limit used in scoring.
        """
        config, asked = self.model.config, {**given_config(settings), **settings}
        is_set = any(asked.get(name) is not None for name in LENGTHS)
        if is_set or self.model.generation_config.max_new_tokens is not None:
            return None
        is_known = all(getattr(config, name, None) is not None for name in LIMITS)
        return length_limit(config, source_length, config) if is_known else None

    def _default_length(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the default length limit, if neither `settings` nor a generation config sets a limit.

        A limit that is larger than the number of the model's positions is lowered to this number.
        """
        said, defaults = self._said(settings), {}
        longest = positions(self.model.config)
        if all(said.get(name) is None for name in LENGTHS):
            defaults["max_new_tokens"] = min(MAX_NEW_TOKENS, longest or MAX_NEW_TOKENS)
        # If both are set, `generate` uses `max_new_tokens`.
        name = "max_length" if said.get("max_new_tokens") is None else "max_new_tokens"
        if longest is not None and (said.get(name) or 0) > longest:
            logger.warning_once(f"`{name}` is {said[name]}, and the model takes at most {longest}: {longest} is used")
            defaults[name] = longest
        return defaults


class CheckedTexts(Dataset):
    """A dataset of strings. Its error message contains the index of an item that is not a string."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> str:
        return check(self.dataset[index], index)


def join(sources: Sequence[dict[str, torch.Tensor]], pad: int) -> dict[str, torch.Tensor]:
    """Join sources of one row each into a batch that is padded on the right."""
    padding = {"input_ids": pad, "attention_mask": 0}
    rows = {
        name: pad_sequence([source[name][0] for source in sources], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }
    return {**rows, "is_empty": torch.cat([source["is_empty"] for source in sources])}


def pad_on_the_right(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Move the padding of rows `[batch, source]` to the right, because models count positions from a row's start."""
    order = attention_mask.argsort(dim=1, descending=True, stable=True)
    return {"input_ids": input_ids.gather(1, order), "attention_mask": attention_mask.gather(1, order)}


def given_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a `generation_config` in the arguments of `generate` sets."""
    config = settings.get("generation_config")
    return {} if config is None else config.to_diff_dict()


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, so that a call keeps the pipeline's value of an option that it omits."""
    return {name: value for name, value in options.items() if value is not None}


def is_map_style(inputs: Any) -> bool:
    """Return whether `inputs` is a torch dataset that is read by index."""
    return isinstance(inputs, Dataset) and isinstance(inputs, Sized)


def checked(texts: Iterable[Any]) -> Iterator[str]:
    """Yield the texts; raise `ValueError` at the first item that is not a string."""
    for position, text in enumerate(texts):
        yield check(text, position)


def check(text: Any, position: int) -> str:
    """Return a string unchanged.

    Raises:
        ValueError: `text` is not a valid string; the message contains `position`.
    """
    hint = "; for a column of a dataset: KeyDataset(dataset, column)" if isinstance(text, Mapping) else ""
    return check_text(text, f"item {position}, ", f"{ACCEPTED}{hint}")
