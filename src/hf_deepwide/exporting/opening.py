"""Load a model and its tokenizer for an export; a latent-depth model is pruned to one posterior."""

import copy
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.tokenizer import check_tokenizer
from ..errors import UserError, quote
from ..families import FAMILIES
from ..loading import load_config, load_model, load_tokenizer
from ..models.plain_text import source_limit
from ..models.word_tokenizer import WordTokenizer
from ..prune import is_prunable, prune
from ..vanilla_form import FOREIGN

logger = logging.getLogger(__name__)

NEUTRAL: dict[str, tuple[float, ...]] = {  # a rule to the values with which it has no effect
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
    "min_length": (0, 1),  # the length includes the decoder's first token
}


class Opened(NamedTuple):
    """A model to export in its own dtype, its tokenizer, and its `model_type` before pruning or conversion."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    model_type: str

    @property
    def longest(self) -> int:
        """The most tokens of a translation, according to the generation config."""
        settings = self.model.generation_config
        return settings.max_new_tokens or (settings.max_length or self.model.config.max_position_embeddings) - 1

    def save_tokenizer(self, folder: Path) -> None:
        """Save the tokenizer with the model's limit of source tokens, as the folder has no config with this limit."""
        cutting = copy.deepcopy(self.tokenizer)
        cutting.model_max_length = source_limit(self.model.config, cutting)
        cutting.save_pretrained(folder)


def open_model(
    model: str | os.PathLike | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    language: int | str | None = None,
) -> Opened:
    """Return the model and the tokenizer to export. Latent depth is pruned. A model that is passed is not changed.

    Args:
        model: a folder, a Hub id, or a loaded model. It belongs to one of our families, or is a Marian, BART, mBART,
            M2M100 or NLLB model. A model of these types becomes a vanilla model that computes the same function.
        tokenizer: the model's tokenizer, required for a loaded model; None: the tokenizer saved with the model.
        language: name or index of the posterior, if a latent-depth model has several.

    Raises:
        UserError: the model cannot be loaded, or is of another type; there is no tokenizer, or it does not fit; the
            posterior is missing or unknown; the model has norms for each language; or its two configs disagree.
    """
    if isinstance(model, str | os.PathLike):
        prefix = f"cannot export {quote(os.fspath(model))}"
        load_config(model, prefix)  # refuses an adapter, which has no config: it cannot be exported with its model
        loaded = load_model(AutoModelForSeq2SeqLM, model, prefix, dtype="auto")
        tokenizer = load_tokenizer(model, prefix) if tokenizer is None else tokenizer
    else:
        loaded, prefix = model, f"cannot export the {type(model).__name__}"
    model_type = getattr(getattr(loaded, "config", None), "model_type", None)
    if model_type in FOREIGN:
        loaded = FAMILIES["vanilla_transformer"].lm.from_base(loaded)
    family = FAMILIES.get(getattr(getattr(loaded, "config", None), "model_type", None))
    if family is None or type(loaded) is not family.lm:
        accepted = ", ".join(family.lm.__name__ for family in FAMILIES.values())
        raise UserError(
            f"{prefix}: it is a {type(loaded).__name__}; accepted: hf_deepwide's {accepted}, and {', '.join(FOREIGN)}"
        )
    if tokenizer is None:
        raise UserError(f"{prefix}: it was given without its tokenizer; pass `tokenizer=`")
    if isinstance(tokenizer, WordTokenizer):
        raise UserError(
            f"{prefix}: its tokenizer has a vocabulary of words for each side, and an engine has one for both; "
            "accepted: tokenizers of subwords"
        )
    if is_prunable(loaded):
        loaded = prune(loaded, language)
    elif language is not None:
        raise UserError(
            f"{prefix}: it has no posteriors, so `language` {quote(language)} chooses nothing; leave it out"
        )
    if getattr(loaded.config, "language_aware", False):
        raise UserError(
            f"{prefix}: each of its languages has its own norms (`language_aware`), and an export is not told the "
            "language; use the model itself, or `hf-deepwide share`"
        )
    check_tokenizer(tokenizer, loaded.config)
    _check_ends(prefix, loaded)
    return Opened(loaded, tokenizer, str(model_type))


def _check_ends(prefix: str, model: PreTrainedModel) -> None:
    """Check that the generation config has the same start and end tokens as the config.

    `generate` reads the generation config, and engines read the config.

    Raises:
        UserError: a token differs.
    """
    for field in ("decoder_start_token_id", "eos_token_id"):
        searched, described = getattr(model.generation_config, field), getattr(model.config, field)
        if searched is not None and _as_set(searched) != _as_set(described):
            raise UserError(
                f"{prefix}: {field} is {quote(described)} in its config and {quote(searched)} in its generation "
                "config; set both alike"
            )


def _as_set(ids: int | list[int] | None) -> set[int]:
    return set(ids) if isinstance(ids, list) else set() if ids is None else {ids}


def warn_of_rules(settings: GenerationConfig, names: Sequence[str], what: str, **parts: Any) -> None:
    """Log which rules of a generation config an export leaves out.

    Args:
        settings: the generation config.
        names: names of the rules that are left out.
        what: name of the engine or program that leaves the rules out.
        parts: name of another rule to the part of its value that is left out.
    """
    rules = [
        f"{name} {quote(value)}"
        for name, value in {**{name: getattr(settings, name, None) for name in names}, **parts}.items()
        if value is not None and value != [] and value not in NEUTRAL.get(name, ())
    ]
    if rules:
        logger.warning(
            "%s does not know these rules of the generation config, and leaves them out: %s", what, "; ".join(rules)
        )
