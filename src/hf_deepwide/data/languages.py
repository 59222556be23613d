"""Information about a sentence that the model receives: its languages, and whether its source is synthetic.

The model receives the languages through tags, posteriors of latent depth, or the tokenizer's own language codes.

A tag is one special token such as `<2de>`. On the source side it stands before the sentence (Johnson et al. 2017,
Google's Multilingual Neural Machine Translation System, section 3). On the decoder's side it replaces the first token
of all decoder inputs (the released code of Li et al. 2020).

The settings of a run are written into the model's config as `translation_pairs`. The pipeline and the evaluation read
them there; see `models/language_pairs.py`.
"""

from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..models.language_pairs import (
    control_ids,
    language_ids,
    language_tags,
    set_languages,
    target_vocabulary,
    targets_of_pairs,
)
from .arguments import DataArguments


def tag_of(language: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tag for translation into `language`: the tokenizer's own, such as `>>deu<<`, else `<2deu>`."""
    known = language_tags(tokenizer).get(language)
    return f"<2{language}>" if known is None else str(tokenizer.convert_ids_to_tokens(known))


def add_tags(tokenizer: PreTrainedTokenizerBase, args: DataArguments) -> int:
    """Add the missing tags of target languages and of synthetic pairs to the tokenizer, and return their number.

    The tags get the last ids. A tag includes the space after it. The word after the tag has the same pieces as at the
    beginning of a sentence.

    Raises:
        UserError: the tokenizer already uses the tag of synthetic pairs for another purpose.
    """
    tagged = args.pairs is not None and args.language_tag != "none" and not language_ids(tokenizer)
    tags = dict.fromkeys(tag_of(target, tokenizer) for _, target in args.language_pairs) if tagged else {}
    vocabulary = tokenizer.get_vocab()
    if args.synthetic_tag is not None:
        if args.synthetic_tag in vocabulary:
            synthetic_tag_id(tokenizer, args)
        tags[args.synthetic_tag] = None
    if not tags:
        return 0
    new = [AddedToken(tag, rstrip=True, normalized=False, special=True) for tag in tags if tag not in vocabulary]
    return tokenizer.add_special_tokens({"extra_special_tokens": new}, replace_extra_special_tokens=False)


def synthetic_tag_id(tokenizer: PreTrainedTokenizerBase, args: DataArguments) -> int | None:
    """Return the id of the token before synthetic sources; None: there is no such token.

    Raises:
        UserError: the tokenizer does not have the token, makes it from text, or uses it for another purpose.
    """
    tag = args.synthetic_tag
    if tag is None:
        return None
    number = tokenizer.get_vocab().get(tag)
    if number is None:
        raise UserError(f"data.synthetic_tag: the tokenizer has no token {tag}")
    if number not in control_ids(tokenizer):
        raise UserError(f"data.synthetic_tag: {tag} is a piece of text for the tokenizer; choose another tag")
    if tag in tokenizer.special_tokens_map.values():
        raise UserError(f"data.synthetic_tag: {tag} has another meaning for the tokenizer; choose another tag")
    return number


def set_codes(tokenizer: PreTrainedTokenizerBase, args: DataArguments) -> dict[str, int | None]:
    """Set the languages of a tokenizer with language codes (NLLB, mBART, M2M100); leave other tokenizers as they are.

    With several pairs, the tokenizer keeps a source or target language only if all pairs share it. Any other language
    must then be given for each translation.

    Returns:
        Fields of the generation config; see `set_languages`. With several targets they contain no target language.

    Raises:
        UserError: a language is not one of the codes, a field requires another way to mark languages, or the tokenizer
            has `legacy_behaviour`.
    """
    if not language_ids(tokenizer):
        return {}
    if getattr(tokenizer, "legacy_behaviour", False):
        raise UserError(
            "the tokenizer has legacy_behaviour=True and puts the language code after the text, but NLLB was trained "
            "with the code before the text. Load the tokenizer with legacy_behaviour=False, and save it again"
        )
    try:
        if args.pairs is None:
            return set_languages(tokenizer, args.source_lang, args.target_lang)
        first, *others = targets_of_pairs(tokenizer, args.language_pairs)
        sides = [dict.fromkeys(side) for side in zip(*args.language_pairs, strict=True)]
        set_languages(tokenizer, *(next(iter(side)) if len(side) == 1 else None for side in sides))
    except ValueError as error:
        where = "data.pairs" if args.pairs else "data.source_lang, data.target_lang"
        otherwise = (
            "the names of text files must end in this code"
            if args.format == "text"
            else "if the columns have other names, set data.source_field and data.target_field"
        )
        raise UserError(f"{where}: {error} ({otherwise}; to add a code, set tokenizer.new_languages)") from error
    for field, accepted in (("language_tag", ("source", "none")), ("posteriors", ("none",))):
        if (value := getattr(args, field)) not in accepted:
            raise UserError(
                f"data.{field} is {value}, but the {type(tokenizer).__name__} has language codes of its own, which "
                f"tell the model the target language; leave data.{field} out"
            )
    for name, side in zip(("src_lang", "tgt_lang"), sides, strict=True):
        if len(side) > 1:
            tokenizer.init_kwargs.pop(name, None)  # only keys of `init_kwargs` are saved
    if all(other == first for other in others):
        return first
    tokenizer.tgt_lang = None
    starts = {"decoder_start_token_id": tokenizer.eos_token_id} if "decoder_start_token_id" in first else {}
    return {"forced_bos_token_id": None, **starts}


def translation_pairs(args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, dict[str, Any]]:
    """Return `{pair: settings}` for a multilingual run; {} for other runs, and for a tokenizer with its own codes.

    The settings of a pair are `tag` (before the source), `decoder_start_token_id` and `posterior`, if the run uses
    them.

    Raises:
        UserError: the tokenizer lacks a tag, or the decoder has another vocabulary, which lacks the tag.
    """
    if args.pairs is None or language_ids(tokenizer):
        return {}
    names = args.posterior_names
    settings = {}
    for pair, (source_lang, target_lang) in zip(args.pairs, args.language_pairs, strict=True):
        tag, pair_settings = tag_of(target_lang, tokenizer), {}
        if args.language_tag != "none" and tag not in tokenizer.get_vocab():
            raise UserError(f"data.language_tag: the tokenizer has no token {tag} for the pair {pair}")
        if args.language_tag == "decoder" and target_vocabulary(tokenizer) is not None:
            raise UserError(
                f"data.language_tag is decoder, and the token {tag} is in the vocabulary of sources. The decoder has "
                "another vocabulary; accepted: source"
            )
        if args.language_tag == "source":
            pair_settings["tag"] = tag
        elif args.language_tag == "decoder":
            pair_settings["decoder_start_token_id"] = tokenizer.convert_tokens_to_ids(tag)
        if names:
            name = {"source": source_lang, "target": target_lang, "pair": pair}[args.posteriors]
            pair_settings["posterior"] = names.index(name)
        settings[pair] = pair_settings
    return settings
