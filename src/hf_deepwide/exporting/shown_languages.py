"""The language pair that an exported folder's README translates, and the README's note on the other languages."""

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..card_text import literal
from ..models.language_pairs import Languages, added_codes, speaking, target_settings

START = "decoder_start_token_id"


class Shown(NamedTuple):
    """The parts of the README's code that select a language pair without this package."""

    settings: dict[str, str]  # the target's first token, as `decoder_start_token_id` or `forced_bos_token_id`
    arguments: str = ""  # further arguments of `AutoTokenizer.from_pretrained`, after the folder
    tag: str = ""  # a token or words to put before the source
    source_token: str = ""  # replaces the source's first token if `arguments` cannot name the language
    note: str = ""  # sentences about the other languages
    languages: tuple[str | None, str | None] = (None, None)  # as this package's pipeline accepts them

    @property
    def first(self) -> str | None:
        """The decoder token that selects the target language; None if no such token does."""
        return next(iter(self.settings.values()), None)


def shown_languages(languages: Languages, tokenizer: PreTrainedTokenizerBase, *, knows_start: bool = False) -> Shown:
    """Choose the pair for which the model was trained or saved, else its first pair.

    Args:
        languages: the languages of the model and its tokenizer.
        tokenizer: the model's tokenizer.
        knows_start: whether all pairs have the same start token, which the engine writes itself.
    """
    if languages.pairs:
        pairs = languages.pairs
        if knows_start:
            pairs = {pair: {name: marks[name] for name in marks if name != START} for pair, marks in pairs.items()}
        (pair, first), *_ = pairs.items()
        start = first.get(START)
        listed = "".join(f"- {'-'.join(each)}: {_marks(marks, tokenizer)}\n" for each, marks in pairs.items())
        return Shown(
            {} if start is None else {START: tokenizer.convert_ids_to_tokens(start)},
            tag=first.get("tag") or "",
            note=f"\nThese lines translate {'-'.join(pair)}. The pairs:\n\n{listed}",
            languages=(pair[0], pair[1]),
        )
    if languages.codes:
        return _of_codes(languages, tokenizer)
    if languages.tags:
        target = languages.config.target_lang if languages.trained is not None else next(iter(languages.tags))
        tags = dict(zip(languages.tags, tokenizer.convert_ids_to_tokens(list(languages.tags.values())), strict=True))
        note = f"\nThe tags of the target languages: {', '.join(tags.values())}.\n"
        return Shown({}, tag=tags[target], note=note, languages=(None, target))
    if languages.tasks:
        source, target = languages.trained or next(iter(languages.tasks))
        note = f"\nThese lines translate from {source} to {target}.\n"
        return Shown({}, tag=languages.choose(source, target).prefix, note=note, languages=(source, target))
    return Shown({})


def _of_codes(languages: Languages, tokenizer: PreTrainedTokenizerBase) -> Shown:
    added = added_codes(tokenizer)
    stock = sorted(languages.codes.keys() - added.keys())  # codes in the tokenizer class's own table
    trained = languages.trained_pairs
    if trained:
        source, target = trained[0]
    else:
        source = tokenizer.src_lang if tokenizer.src_lang in stock else stock[0]
        target = _saved_target(languages, source)
    with speaking(tokenizer, source, target):
        settings = {name: i for name, i in target_settings(tokenizer).items() if i is not None}
    note = f"\nThese lines translate from {source} to {target}.\n"
    if len(trained) > 1:
        note += f"\nThe model was trained on the pairs {', '.join(map('-'.join, trained))}.\n"
    note += f"\nThe languages of its tokenizer: {', '.join(sorted(languages.codes))}.\n"
    if added:
        tokens = ", ".join(f"`__{code}__`" for code in sorted(added))
        note += (
            f"\nThe tokenizer's class does not know {', '.join(sorted(added))}, which this model has learnt. To "
            f"translate from such a language, put its token ({tokens}) in the place of the source's first token.\n"
        )
    return Shown(
        {name: tokenizer.convert_ids_to_tokens(token_id) for name, token_id in settings.items()},
        "" if source in added else f", src_lang={literal(source)}",
        source_token=f"__{source}__" if source in added else "",
        note=note,
        languages=(source, target),
    )


def _saved_target(languages: Languages, source: str) -> str:
    """Return the target with which a model was saved, else the code with the highest id, which may have been added."""
    try:
        target = languages.choose(source).target_lang
    except ValueError:  # the model was saved without a target
        target = None
    others = {code: token_id for code, token_id in languages.codes.items() if code != source}
    return max(others, key=others.__getitem__, default=source) if target in (None, source) else str(target)


def _marks(settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text that names the tokens that select a language pair."""
    tag, start = settings.get("tag"), settings.get(START)
    marks = [f"`{tag}` before the source"] if tag else []
    marks += [] if start is None else [f"`{tokenizer.convert_ids_to_tokens(start)}` as the target's prefix"]
    return ", ".join(marks) or "no mark"


def packages(engine: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the packages that the README's code needs, as arguments of `pip install`."""
    pieces = any(hasattr(tokenizer, name) for name in ("sp_model", "spm_source"))
    return f"{engine} transformers{' sentencepiece' if pieces else ''}"
