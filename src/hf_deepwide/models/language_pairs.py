"""What a multilingual model must be told for a language pair.

The config of a model that was trained on several pairs holds them as `translation_pairs`:

    {"en-de": {"tag": "<2de>", "posterior": 0}, "en-fr": {"tag": "<2fr>", "posterior": 1}}

with, of each pair, those of these keys that the model uses:

- `tag`: a token before the source that asks for the target language;
- `decoder_start_token_id`: the decoder's first token, where the tag stands there;
- `posterior`: which of a latent-depth model's posteriors chooses the layers.

Any model's config can hold them, of this package or not.

A model that comes with a tokenizer of language codes (NLLB, mBART, M2M100) is told its pair by those: `set_languages`.
"""

import difflib
from typing import Any

from transformers import PreTrainedTokenizerBase


def pair_settings(config: Any, source_lang: str | None = None, target_lang: str | None = None) -> dict[str, Any]:
    """The settings of a language pair; {} of a model that was not trained on several.

    A language that is not given is the one that fits, if what there is to choose from comes to the same.

    Raises:
        ValueError: the model does not know the pair, or a language is missing that would decide.
    """
    pairs = getattr(config, "translation_pairs", None)
    if not pairs:
        return {}
    fitting = {}
    for pair, settings in pairs.items():
        languages = tuple(pair.split("-"))
        if source_lang in (None, languages[0]) and target_lang in (None, languages[1]):
            fitting[languages] = settings
    asked = f"{source_lang or '…'}-{target_lang or '…'}"
    if not fitting:
        raise ValueError(f"the model was not trained on the language pair {asked}; known: {', '.join(sorted(pairs))}")
    first, *others = fitting.values()
    if any(settings != first for settings in others):
        sides = zip(("source", "target"), zip(*fitting, strict=True), strict=True)
        wanting = [side for side, languages in sides if len(set(languages)) > 1]
        raise ValueError(
            f"the model knows several language pairs: say the {' and the '.join(wanting)} language; known: "
            f"{', '.join(sorted(pairs))}"
        )
    return first


def pairs_of_posterior(config: Any, posterior: int) -> dict[str, dict[str, Any]]:
    """The language pairs that are left to a model with the layers of one posterior, which then need not name it."""
    pairs = getattr(config, "translation_pairs", None) or {}
    return {
        pair: {key: value for key, value in settings.items() if key != "posterior"}
        for pair, settings in pairs.items()
        if settings.get("posterior", posterior) == posterior
    }


def language_codes(tokenizer: PreTrainedTokenizerBase) -> set[str] | None:
    """The codes of a tokenizer that marks languages itself, without underscores around them; else None."""
    if not hasattr(tokenizer, "_build_translation_inputs"):
        return None
    ids = getattr(tokenizer, "lang_code_to_id", None)
    if ids:
        return {code.strip("_") for code, token_id in ids.items() if token_id != tokenizer.unk_token_id}
    return {str(token).strip("_") for token in tokenizer.extra_special_tokens}


def set_languages(
    tokenizer: PreTrainedTokenizerBase, source_lang: str | None = None, target_lang: str | None = None
) -> dict[str, int | None]:
    """Tell a tokenizer with language codes its languages, which are also saved with it.

    Returns:
        What generation has to know of the target language, as fields of a generation config. Most targets begin with
        their code, which is then forced; those of mBART end with it, and the decoder starts from it. {} without a
        target language, and of a tokenizer without codes.

    Raises:
        ValueError: a language is none of its codes.
    """
    codes = language_codes(tokenizer)
    if codes is None:
        return {}
    for language in (source_lang, target_lang):
        if language is not None and language.strip("_") not in codes:
            nearest = ", ".join(difflib.get_close_matches(language, sorted(codes), cutoff=0))
            raise ValueError(
                f"{language!r} is no language code of the {type(tokenizer).__name__}; the nearest are {nearest}"
            )
    if source_lang is not None:
        tokenizer.src_lang = source_lang
    if target_lang is None:
        return {}
    tokenizer.tgt_lang = target_lang
    empty = tokenizer(text_target="")["input_ids"]  # the code and </s>, as they stand around every target
    if empty[-1] == tokenizer.eos_token_id:
        return {"forced_bos_token_id": empty[0]}
    return {"decoder_start_token_id": empty[-1], "forced_bos_token_id": None}


def with_tag(text: str, tag: str | None) -> str:
    """A source sentence behind its tag, if it has one and does not begin with it already."""
    return text if tag is None or text.startswith(tag) else f"{tag} {text}"
