"""The language pair that the lines in the README of an exported folder translate, and what is said of the others."""

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..card_text import literal
from ..models.language_pairs import Languages, added_codes, speaking, target_settings


class Shown(NamedTuple):
    """A language pair, as lines of code ask for it without this package."""

    settings: dict[str, int]  # `decoder_start_token_id` or `forced_bos_token_id`: the target's first token
    arguments: str = ""  # of `AutoTokenizer.from_pretrained`, behind the folder
    tag: str = ""  # a token before the source
    note: str = ""  # sentences on the other languages

    @property
    def first(self) -> int | None:
        """The id of the token by which the decoder is told the target language; None where it is not told."""
        return next(iter(self.settings.values()), None)


def shown_languages(languages: Languages, tokenizer: PreTrainedTokenizerBase) -> Shown:
    """The pair that the model was saved for, else its first one."""
    if languages.pairs:
        (pair, first), *_ = languages.pairs.items()
        start = first.get("decoder_start_token_id")
        listed = "".join(
            f"- {'-'.join(each)}: {_marks(marks, tokenizer)}\n" for each, marks in languages.pairs.items()
        )
        return Shown(
            {} if start is None else {"decoder_start_token_id": start},
            tag=first.get("tag") or "",
            note=f"\nThese lines translate {'-'.join(pair)}. The pairs:\n\n{listed}",
        )
    if languages.codes:
        return _of_codes(languages, tokenizer)
    if languages.tags:
        tags = tokenizer.convert_ids_to_tokens(list(languages.tags.values()))
        return Shown({}, tag=tags[0], note=f"\nThe tags of the target languages: {', '.join(tags)}.\n")
    return Shown({})


def _of_codes(languages: Languages, tokenizer: PreTrainedTokenizerBase) -> Shown:
    added = added_codes(tokenizer)
    stock = sorted(languages.codes.keys() - added.keys())  # those that the tokenizer's class knows without us
    source = tokenizer.src_lang if tokenizer.src_lang in stock else stock[0]
    try:
        target = languages.choose(source).target_lang
    except ValueError:  # the model was saved without a target
        target = None
    if target in (None, source):
        others = {code: i for code, i in languages.codes.items() if code != source}
        target = max(others, key=others.__getitem__, default=source)  # the newest: perhaps the model was made for it
    with speaking(tokenizer, source, target):
        settings = {name: i for name, i in target_settings(tokenizer).items() if i is not None}
    note = f"\nThese lines translate from {source} to {target}. The languages: {', '.join(sorted(languages.codes))}.\n"
    if added:
        tokens = ", ".join(f"`__{code}__`" for code in sorted(added))
        note += (
            f"\nThe tokenizer's class does not know {', '.join(sorted(added))}, which this model has learnt. To "
            f"translate from such a language, put its token ({tokens}) in the place of the source's first token.\n"
        )
    return Shown(settings, f", src_lang={literal(source)}", note=note)


def _marks(settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokens by which a language pair is asked for."""
    tag, start = settings.get("tag"), settings.get("decoder_start_token_id")
    marks = [f"`{tag}` before the source"] if tag else []
    marks += [] if start is None else [f"`{tokenizer.convert_ids_to_tokens(start)}` as the target's prefix"]
    return ", ".join(marks) or "no mark"


def packages(engine: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the lines need, as arguments of `pip install`."""
    pieces = any(hasattr(tokenizer, name) for name in ("sp_model", "spm_source"))
    return f"{engine} transformers{' sentencepiece' if pieces else ''}"
