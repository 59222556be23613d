"""The translation pipeline, which Transformers v5 no longer has.

    pipeline("translation", model="runs/mat")("Two dogs run.")      # [{"translation_text": …}]

It serves every encoder-decoder checkpoint. How the language pair reaches the model depends on its config and its
tokenizer:

- pairs (multilingual models of this package): the config's `translation_pairs` say what tag stands before the source
  or begins the translation, and which posterior chooses the layers (`language_pairs.py`);
- codes (NLLB, mBART, M2M100): the tokenizer marks the source, and the target code is the first token generated, or,
  of mBART, the one that the decoder starts from;
- tags (`<2de>`, or Marian's `>>deu<<`): the target's tag is put in front of the source;
- prefixes (T5): the model's config has one for `translation_xx_to_yy` in `task_specific_params`;
- none (one language pair): nothing is to be said.

The file travels to the Hub with a shared model: it imports torch and transformers, and nothing else.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Pipeline, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import logging

from .language_pairs import language_codes, pair_settings, set_languages, with_tag

logger = logging.get_logger(__name__)

ACCEPTED = "accepted: a string, a list of strings, a generator or dataset of strings"
MAX_NEW_TOKENS, NUM_BEAMS = 256, 4  # where neither the caller nor the model's generation config says otherwise
WITHOUT_BEAMS = {"streamer", "assistant_model", "prompt_lookup_num_tokens"}  # arguments that beam search refuses
TARGET_CODE = ("forced_bos_token_id", "decoder_start_token_id")  # how a code of the target language reaches `generate`
TAG = re.compile(r"<2(\w+)>|>>([\w-]+)<<")


class TranslationPipeline(Pipeline):
    """Translate text with an encoder-decoder model.

    Arguments of `pipeline("translation", …)` and of each call, which win:

    Args:
        src_lang, tgt_lang: the languages, as config or tokenizer call them; needed where there are several. They
            default to the task's (`"translation_en_to_de"`), then to those saved with the tokenizer.
        truncation: True cuts a source that is longer than the model takes; False (default) raises `ValueError`.
        return_text: give `translation_text` (default, unless `return_tensors`).
        return_tensors: give `translation_token_ids`, a tensor `[target]`.
        clean_up_tokenization_spaces: remove spaces before punctuation and the like (default False).
        batch_size, num_workers: as in every pipeline.
        generate_kwargs: anything `model.generate` takes, such as `num_beams=5`. Where neither they nor the model's
            generation config say otherwise, 4 beams and at most 256 new tokens.

    The model is put into evaluation mode.

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
        self.codes = language_codes(tokenizer)
        self.tags = language_tags(tokenizer)
        pair = re.fullmatch(r"translation_(.+)_to_(.+)", kwargs.get("task") or "")
        self.task_languages = pair.groups() if pair else (None, None)
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
        if not generate_kwargs.get("num_beams", 1) >= 1:
            raise ValueError(f"`num_beams` is {generate_kwargs['num_beams']}; accepted: 1 or more")
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
            For a string, a list of `num_return_sequences` dicts; for a list, one dict per input, or a list of dicts
            if `num_return_sequences` > 1; for anything else, an iterator over what a string would give.
        """
        if isinstance(inputs, str):
            return super().__call__(inputs, **kwargs)
        if isinstance(inputs, (bytes, bytearray, Mapping)) or not (
            isinstance(inputs, Iterable) or is_map_style(inputs)
        ):
            raise ValueError(f"cannot translate {describe(inputs)}; {ACCEPTED}")
        if isinstance(inputs, Sequence):
            texts = list(checked(inputs))
            results = super().__call__(texts, **kwargs) if texts else []
            return [result[0] for result in results] if all(len(result) == 1 for result in results) else results
        if is_map_style(inputs):
            return iter(super().__call__(CheckedTexts(inputs), **kwargs))
        return iter(super().__call__(checked(inputs), **kwargs))

    def preprocess(
        self,
        text: str,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        truncation: bool | str = False,
    ) -> dict[str, torch.Tensor]:
        """Tokenize a source: `input_ids`, `attention_mask` `[1, source]`; with codes, one of `TARGET_CODE` `[1]`."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a surrogate pair is no character: {describe(text)}") from error
        truncation = TruncationStrategy({True: "longest_first", False: "do_not_truncate"}.get(truncation, truncation))
        limit = self.source_limit() if truncation != TruncationStrategy.DO_NOT_TRUNCATE else None
        options = {"return_tensors": "pt", "truncation": truncation, "max_length": limit}
        if self._knows_pairs:
            encoded = self.tokenizer(with_tag(text, self._pair(src_lang, tgt_lang).get("tag")), **options)
        elif self.codes is not None:
            encoded = self._encode_with_codes(text, src_lang, tgt_lang, options)
        else:
            encoded = self.tokenizer(self._prefix(src_lang, tgt_lang, text) + text, **options)
        length, longest = encoded["input_ids"].shape[1], getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and length > longest:
            raise ValueError(
                f"the text has {length} tokens, and the model takes at most {longest}: split it, or pass "
                f"`truncation=True` to translate its beginning only. It starts with {text[:60]!r}"
            )
        inputs = {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}
        for name in TARGET_CODE:
            if encoded.get(name) is not None:
                # a tensor, because the collator of batches turns plain numbers into lists
                inputs[name] = torch.tensor([encoded[name]])
        return inputs

    def _forward(
        self,
        inputs: dict[str, torch.Tensor],
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        **generate_kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Translate a batch: `output_ids` `[batch, num_return_sequences, target]`."""
        settings = {**self._task_parameters(src_lang, tgt_lang), **generate_kwargs}
        settings.pop("prefix", None)
        pair = self._pair(src_lang, tgt_lang)
        if "decoder_start_token_id" in pair:
            settings.setdefault("decoder_start_token_id", pair["decoder_start_token_id"])
        if "posterior" in pair:
            posteriors = torch.full((len(inputs["input_ids"]),), pair["posterior"], device=inputs["input_ids"].device)
            settings.setdefault("posteriors", posteriors)
        for name in TARGET_CODE:
            if name in inputs:
                settings.setdefault(name, int(inputs.pop(name)[0]))
        settings.update(self._default_settings(settings))
        output = self.model.generate(**inputs, **settings)
        ids = getattr(output, "sequences", output)  # [batch * num_return_sequences, target]
        return {"output_ids": ids.view(len(inputs["input_ids"]), -1, ids.shape[-1])}

    def postprocess(
        self,
        outputs: dict[str, torch.Tensor],
        return_text: bool | None = None,
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """One source's translations as dicts."""
        records = []
        for ids in outputs["output_ids"][0]:
            record = {"translation_token_ids": ids} if return_tensors else {}
            if return_text or (return_text is None and not return_tensors):
                record["translation_text"] = self.tokenizer.decode(
                    ids, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
                )
            records.append(record)
        return records

    def source_limit(self) -> int | None:
        """Most tokens a truncated source keeps: what the model takes, or the tokenizer's own limit if it is less."""
        longest = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        limit = min(longest, self.tokenizer.model_max_length)
        return int(limit) if limit < 1e12 else None  # tokenizers write "no limit" as a very large number

    @property
    def _knows_pairs(self) -> bool:
        return bool(getattr(self.model.config, "translation_pairs", None))

    def _pair(self, src_lang: str | None, tgt_lang: str | None) -> dict[str, Any]:
        """What the config says of the language pair; {} where it says nothing of pairs."""
        return pair_settings(self.model.config, src_lang or self.task_languages[0], tgt_lang or self.task_languages[1])

    def _encode_with_codes(
        self, text: str, src_lang: str | None, tgt_lang: str | None, options: dict[str, Any]
    ) -> Mapping[str, Any]:
        """Let a multilingual tokenizer mark the languages, and leave it with the source language it had."""
        languages = {}
        for name, language, of_task in zip(
            ("src_lang", "tgt_lang"), (src_lang, tgt_lang), self.task_languages, strict=True
        ):
            language = language or of_task or self.tokenizer.init_kwargs.get(name)
            if language is None:
                raise ValueError(
                    f"the tokenizer knows several languages: pass `{name}=`, to pipeline() or to the call; "
                    f"known: {listing(self.codes)}"
                )
            if language.strip("_") not in self.codes:
                raise ValueError(f"unknown `{name}` {language!r}; known: {listing(self.codes)}")
            languages[name] = language
        before = self.tokenizer.src_lang, self.tokenizer.tgt_lang
        try:
            generation = set_languages(self.tokenizer, languages["src_lang"], languages["tgt_lang"])
            return {**self.tokenizer(text, **options), **generation}
        finally:
            self.tokenizer.src_lang, self.tokenizer.tgt_lang = before

    def _prefix(self, src_lang: str | None, tgt_lang: str | None, text: str) -> str:
        """What goes before the source: the target's tag, or the prefix that the model's config gives the task."""
        prefix = self._task_parameters(src_lang, tgt_lang).get("prefix") or ""
        if self.tags:
            if tgt_lang is not None and tgt_lang not in self.tags:
                raise ValueError(f"unknown `tgt_lang` {tgt_lang!r}; known: {listing(self.tags)}")
            tag = self.tags.get(tgt_lang or self.task_languages[1])
            return prefix if tag is None or text.startswith(tag) else f"{prefix}{tag} "
        if (src_lang or tgt_lang) and not prefix:
            logger.warning_once(
                "`src_lang` and `tgt_lang` are not used: the tokenizer knows no languages, so the model translates "
                "the one pair it was trained on"
            )
        return prefix

    def _task_parameters(self, src_lang: str | None, tgt_lang: str | None) -> dict[str, Any]:
        """The config's prefix and generation settings for the language pair."""
        config = self.model.config
        src_lang, tgt_lang = (src_lang or self.task_languages[0]), (tgt_lang or self.task_languages[1])
        task = f"translation_{src_lang}_to_{tgt_lang}" if src_lang and tgt_lang else self.task
        parameters = (getattr(config, "task_specific_params", None) or {}).get(task) or {}
        return {"prefix": getattr(config, "prefix", None), **parameters}

    def _default_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Beams and length limit, where neither `settings` nor a generation config says anything of them."""
        said = set(settings) | set(self.model.generation_config.to_diff_dict())
        if settings.get("generation_config") is not None:
            said |= set(settings["generation_config"].to_diff_dict())
        defaults = {}
        if "num_beams" not in said and not said & WITHOUT_BEAMS:
            defaults["num_beams"] = NUM_BEAMS
        if not said & {"max_length", "max_new_tokens"}:
            longest = getattr(self.model.config, "max_position_embeddings", None)
            defaults["max_new_tokens"] = min(MAX_NEW_TOKENS, longest or MAX_NEW_TOKENS)
        return defaults


class CheckedTexts(Dataset):
    """A dataset of strings that names the item that is none."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> str:
        return check(self.dataset[index], index)


def language_tags(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """`{language: tag}` of a tokenizer whose vocabulary has tags for target languages."""
    found = (TAG.fullmatch(token) for token in tokenizer.get_vocab())
    return {match[1] or match[2]: match[0] for match in found if match}


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None, so that a call leaves alone what the pipeline was made with."""
    return {name: value for name, value in options.items() if value is not None}


def is_map_style(inputs: Any) -> bool:
    """Whether `inputs` is a torch dataset that is read by index."""
    return isinstance(inputs, Dataset) and isinstance(inputs, Sized)


def checked(texts: Iterable[Any]) -> Iterator[str]:
    """Yield strings; raise at the first item that is none."""
    for position, text in enumerate(texts):
        yield check(text, position)


def check(text: Any, position: int) -> str:
    """A string as it is.

    Raises:
        ValueError: it is none; the message says where.
    """
    if not isinstance(text, str):
        hint = "; for a column of a dataset: KeyDataset(dataset, column)" if isinstance(text, Mapping) else ""
        raise ValueError(f"cannot translate item {position}, {describe(text)}; {ACCEPTED}{hint}")
    return text


def describe(value: Any) -> str:
    """Type and beginning of a value, for messages."""
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:60] + '…'}"


def listing(names: Iterable[str]) -> str:
    """Names for a message, sorted."""
    return ", ".join(sorted(names))
