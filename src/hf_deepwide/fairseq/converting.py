"""Convert a checkpoint of fairseq to a model and a tokenizer of ours: vanilla, MAT or latent depth.

The papers' code is built on fairseq: the MAT fork, and `examples/latent_depth`. The converted model computes the same
function as the checkpoint's model.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.bpe_codes import SPECIAL_TOKENS
from ..data.fairseq_dictionary import read_dictionary, tokenizer_of_dictionary
from ..errors import UserError, prefixed
from ..families import FAMILIES
from ..models.configuration_base import DeepWideConfig
from ..vanilla_form import DECODER, ENCODER, HEAD, SHARED, Tensors, tie
from ..weight_checks import check_finite, check_tensors
from .fields import LOGITS, check_tying, config_of
from .naming import one_of_many, rename
from .reading import read_checkpoint

logger = logging.getLogger(__name__)

UNKNOWN = list(SPECIAL_TOKENS.values()).index(SPECIAL_TOKENS["unk_token"])
NEVER = -100.0  # bias of tokens that the target's dictionary lacks: their probability is practically 0
LONGEST = 200  # fairseq's maximum length of a translation, in tokens


class Converted(NamedTuple):
    """The model and the tokenizer that a checkpoint of fairseq becomes."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def from_fairseq(
    path: str | os.PathLike,
    dictionary: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    codes: str | os.PathLike | None = None,
) -> Converted:
    """Return the model in a checkpoint of fairseq, and the tokenizer of its dictionary.

    No code in the file is run: only tensors, plain values and an `argparse.Namespace` are accepted. Each weight in the
    file must have a place in the model, and each place needs a weight. The model has the file's dtype.

    Two dictionaries become one vocabulary: the source's symbols, followed by the symbols that only the target has. A
    token that one side lacks gets this side's embedding of the unknown token, which fairseq would look up for it. A
    token that the target lacks is never generated.

    Args:
        path: the checkpoint, such as `checkpoint_best.pt`.
        dictionary: one file, such as `dict.en.txt`, or the source's and the target's file; None: make no tokenizer.
        codes: the merges of subword-nmt or fastBPE that split words into subwords; None: each symbol is a word.

    Raises:
        UserError: the file is damaged, holds other objects, or holds a model that our families cannot express; or the
            dictionary or the codes do not fit.
    """
    arguments, weights = read_checkpoint(path)
    with prefixed(f"{path}: "):
        weights, pairs = one_of_many(weights)
        tensors = rename(weights)
        settings = _select_posteriors(tensors, pairs)
        config = config_of(arguments, tensors)
        check_tying(config, tensors)
        try:  # each weight needs a place, and each place a weight
            advice = "save the checkpoint again with the arguments of its training"
            check_tensors(tensors, FAMILIES[config.model_type].lm, config, without=SHARED, advice=advice)
        except ValueError as error:
            raise UserError(f"its arguments do not fit its weights: {error}") from error
        tokenizer = None
        if dictionary is not None:
            files = [dictionary] if isinstance(dictionary, str | os.PathLike) else list(dictionary)
            tokenizer = _add_tokenizer(arguments, config, tensors, [Path(file) for file in files], codes)
        elif arguments.get("encoder_langtok"):
            logger.warning(
                "in training each source ended with the token of a language (encoder_langtok) in the place of </s>; "
                "the tokens are the last of the dictionary: %s",
                ", ".join(f"{token} {name}" for name, token in _language_ids(arguments, config.vocab_size).items()),
            )
        _start_from_language(arguments, tokenizer, config, settings)
        if len(pairs) > 1:
            config.translation_pairs = settings
        else:
            config.source_lang, config.target_lang = pairs[0].split("-") if pairs else _languages(arguments)
        if len(pairs) > 1 and config.model_type == "latent_depth":
            config.posterior_names = pairs
        cls = FAMILIES[config.model_type].lm
        tensors = {key: tensor.contiguous() for key, tensor in tie(tensors, config).items()}
        dtype = tensors[SHARED if SHARED in tensors else ENCODER].dtype
        model = cls.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
        try:
            check_finite(model)
        except ValueError as error:
            raise UserError(str(error)) from error
    model.generation_config.update(  # fairseq's defaults; it never generates padding, nor an empty translation
        num_beams=5,
        length_penalty=1.0,
        early_stopping=True,
        max_length=min(LONGEST, config.max_position_embeddings),
        min_new_tokens=1,
        bad_words_ids=[[config.pad_token_id]],
    )
    return Converted(model, tokenizer)


def _select_posteriors(tensors: Tensors, pairs: list[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of each language pair, and give the layer logits in `tensors` one row for each pair.

    In fairseq all pairs with the same source use the encoder's row of the last such pair. All pairs with the same
    target use the decoder's row of the last such pair. Other rows are never trained.
    """
    latent = {side: LOGITS.format(stack) for side, stack in enumerate(("encoder", "decoder"))}
    latent = {side: key for side, key in latent.items() if key in tensors}
    for side, key in latent.items():
        if len(pairs) > 1 and len(tensors[key]) != len(pairs):
            raise UserError(f"it has {len(tensors[key])} posteriors for {len(pairs)} language pairs")
        last = {pair.split("-")[side]: row for row, pair in enumerate(pairs)}
        rows = [last[pair.split("-")[side]] for pair in pairs]
        if pairs:
            tensors[key] = tensors[key][rows]
    return {pair: {"posterior": row} if latent else {} for row, pair in enumerate(pairs)}


def _languages(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the languages of a model with one pair; None twice if the arguments do not name both."""
    source, target = arguments.get("source_lang"), arguments.get("target_lang")
    return (source, target) if isinstance(source, str) and isinstance(target, str) else (None, None)


def _language_tokens(arguments: dict[str, Any]) -> list[str]:
    """Return the languages that have a token in the dictionaries, in the order of the tokens' ids."""
    if not (arguments.get("encoder_langtok") or arguments.get("decoder_langtok")):
        return []
    pairs = arguments.get("lang_pairs") or []
    names = pairs.split(",") if isinstance(pairs, str) else map(str, pairs if isinstance(pairs, list | tuple) else [])
    return sorted({language for pair in names for language in pair.split("-")})


def _language_ids(arguments: dict[str, Any], size: int) -> dict[str, int]:
    """Return the ids of the language tokens. fairseq appends them to the dictionary, which then has `size` symbols."""
    languages = _language_tokens(arguments)
    return {language: size - len(languages) + number for number, language in enumerate(languages)}


def _start_from_language(
    arguments: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    config: DeepWideConfig,
    settings: dict[str, dict[str, Any]],
) -> None:
    """Let the decoder begin with the token of the target language, if the model was trained in this way."""
    if not arguments.get("decoder_langtok"):
        return
    ids = _language_ids(arguments, config.decoder_vocab_size)
    if tokenizer is not None:  # its ids differ if it joins two dictionaries
        ids = {language: tokenizer.convert_tokens_to_ids(f"__{language}__") for language in ids}
    for pair, pair_settings in settings.items():
        if (start := ids.get(pair.split("-")[1])) is None:
            raise UserError(f"its arguments (lang_pairs) do not name {pair}, so the token of its target is unknown")
        pair_settings["decoder_start_token_id"] = start
        if len(settings) == 1:
            config.decoder_start_token_id = start


def _add_tokenizer(
    arguments: dict[str, Any],
    config: DeepWideConfig,
    tensors: Tensors,
    files: list[Path],
    codes: str | os.PathLike | None,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the dictionaries, and give the embeddings in `tensors` a row for each of its tokens."""
    if not 1 <= len(files) <= 2:
        raise UserError(f"{len(files)} dictionaries are given; accepted: one, or the source's and the target's")
    if arguments.get("encoder_langtok"):
        raise UserError(
            "its argument encoder_langtok puts a language token at the end of each source, which the tokenizers of "
            "this library cannot do; convert the model without a dictionary"
        )
    languages = _language_tokens(arguments)
    source, target = (read_dictionary(file, languages) for file in (files[0], files[-1]))
    for symbols, size, file in (
        (source, config.vocab_size, files[0]),
        (target, config.decoder_vocab_size, files[-1]),
    ):
        if len(symbols) != size:
            raise UserError(
                f"the dictionary {file} has {len(symbols)} symbols (the four special ones included), and the "
                f"checkpoint has {size} embeddings; give the dictionary of this model"
            )
    if config.share_encoder_decoder_embeddings and source != target:
        raise UserError("source and target share their embeddings, but the two dictionaries differ")
    symbols = list(dict.fromkeys([*source, *target]))
    tokenizer = tokenizer_of_dictionary(symbols, None if codes is None else Path(codes), languages)
    size = len(tokenizer)
    rows = {
        side: [row_of.get(symbol, UNKNOWN) for symbol in symbols] + [UNKNOWN] * (size - len(symbols))
        for side, row_of in (
            ("source", {symbol: row for row, symbol in enumerate(source)}),
            ("target", {symbol: row for row, symbol in enumerate(target)}),
        )
    }
    if size > len(source) or size > len(target):
        for key, side in ((ENCODER, "source"), (DECODER, "target"), (HEAD, "target")):
            tensors[key] = tensors[key][rows[side]]
        known = torch.tensor([row != UNKNOWN or number == UNKNOWN for number, row in enumerate(rows["target"])])
        tensors["lm_head.bias"] = torch.where(known, 0.0, NEVER).to(tensors[HEAD].dtype)
        config.lm_head_bias = True
        config.vocab_size = config.decoder_vocab_size = size
    return tokenizer
