"""Language pairs: the settings that a tokenizer and a model need to translate a pair.

`translate`, the pipeline, the evaluation and validation in training all call `Languages.choose`. There are five kinds
of models:

- pairs: the config has `translation_pairs`, because the model was trained on several pairs:

      {"en-de": {"tag": "<2de>", "posterior": 0}, "en-fr": {"tag": "<2fr>", "posterior": 1}}

  Each pair has the keys that the model uses. `tag` is a token before the source that selects the target
  language. `decoder_start_token_id` is the decoder's first token, if the tag stands there. `posterior`
  is the posterior of a latent-depth model that chooses the layers. Any model's config can hold pairs, also
  configs of models from other packages;
- codes (NLLB, mBART, M2M100): the tokenizer marks the source. The target's code is the first token of the translation.
  With mBART it is the token that the decoder starts from;
- tags (Marian's `>>deu<<`, or `<2de>`): the vocabulary has a tag for each target language, which is put before the
  source;
- prefixes (T5): the config's `task_specific_params` hold a prefix of the source for each `translation_xx_to_yy`;
- none: one pair, which the config may name as `source_lang` and `target_lang`.

Without `translation_pairs`, a posterior is chosen by its name: the name of the pair, or of one of its languages.
"""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .language_names import nearest

logger = logging.get_logger(__name__)

SIDES = ("source", "target")
TARGET_CODE = ("forced_bos_token_id", "decoder_start_token_id")  # how the target language reaches `generate`
TAG = re.compile(r"<2(\w+)>|>>([\w-]+)<<")
CODE = re.compile(r"[A-Za-z]\w*")  # other special tokens of a tokenizer, such as <bt>, are no languages
ADDED_CODE = re.compile(r"__(\w+)__")
TASK = re.compile(r"translation_(.+)_to_(.+)")
LISTED = 20  # languages in a message
_SPEAKING = threading.RLock()  # one thread at a time: a tokenizer holds only one pair of languages
UNSAID = {"eng_Latn", "en", "en_XX"}  # defaults of `src_lang` in tokenizer classes: no one has set them


class Choice(NamedTuple):
    """The settings of the tokenizer and the model for one language pair."""

    settings: dict[str, Any]  # arguments of `generate`
    source_lang: str | None = None  # for a tokenizer with codes
    target_lang: str | None = None
    tag_id: int | None = None  # before the source
    prefix: str = ""  # words before the source
    posterior: int | None = None


class Languages:
    """The languages of one model and its tokenizer.

    Args:
        config, generation_config: the model's configs.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, config: Any, generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.generation_config, self.tokenizer = config, generation_config, tokenizer
        self.pairs = _pairs(config)
        self.codes = {} if self.pairs else language_ids(tokenizer)
        self.tags = {} if self.pairs or self.codes else language_tags(tokenizer)
        tasks = {TASK.fullmatch(name): of for name, of in (_get(config, "task_specific_params") or {}).items()}
        self.tasks = {match.groups(): of or {} for match, of in tasks.items() if match}
        self.control_ids = control_ids(tokenizer)

    @property
    def several(self) -> bool:
        """Whether a language has to be chosen: the model has pairs, codes, tags or prefixes."""
        return bool(self.pairs or self.codes or self.tags or self.tasks)

    @property
    def trained(self) -> tuple[str | None, str] | None:
        """The pair that this library trained the model on, if the model has tags or prefixes; else None."""
        source_lang, target_lang = _get(self.config, "source_lang"), _get(self.config, "target_lang")
        known = target_lang in self.tags or (not self.tags and (source_lang, target_lang) in self.tasks)
        return (source_lang, target_lang) if known else None

    @property
    def trained_pairs(self) -> list[tuple[str, str]]:
        """The pairs that this library trained the model on, if the model has codes."""
        pairs = _get(self.config, "trained_pairs")
        named = (str(pair).split("-", 1) for pair in (pairs if isinstance(pairs, list | tuple) else ()))
        split = [[code.strip("_") for code in pair] for pair in named]
        return [(pair[0], pair[1]) for pair in split if len(pair) == 2 and {*pair} <= self.codes.keys()]

    def check(self, source_lang: str | None = None, target_lang: str | None = None) -> None:
        """Check that the model has the given languages. They need not be a complete choice.

        Raises:
            ValueError: the model does not have a language, or the pair; the message names the most similar languages.
        """
        for language in (source_lang, target_lang):
            if language is not None and not isinstance(language, str):
                raise ValueError(
                    f"a language is given by its code, a string; the type here is {type(language).__name__}"
                )
        if source_lang is None and target_lang is None:
            return
        if self.pairs:
            _fitting(self.pairs, source_lang, target_lang, "the model was not trained on the language pair")
        elif self.codes:
            for side, language in zip(SIDES, (source_lang, target_lang), strict=True):
                self._code(side, language)
        elif self.tags:
            _known(target_lang, self.tags, "target language")
        elif self.tasks:
            _fitting(self.tasks, source_lang, target_lang, "the model's config has no prefix for the language pair")
        elif self._posterior(source_lang, target_lang) is None:
            self._compare(source_lang, target_lang)

    def choose(self, source_lang: str | None = None, target_lang: str | None = None) -> Choice:
        """Choose the settings of the tokenizer and the model for a pair.

        A missing language is the language that was saved with the tokenizer or the generation config, or that the
        model was trained on. It can be omitted, too, if all pairs with the other language have the same settings.

        Raises:
            ValueError: the model does not have the pair, or a language is missing that the settings depend on.
        """
        self.check(source_lang, target_lang)
        if self.pairs:
            return self._of_pair(pair_settings(self.config, source_lang, target_lang))
        if self.codes:
            choice = self._of_codes(source_lang, target_lang)
            return choice._replace(posterior=self._posterior(choice.source_lang, choice.target_lang))
        if source_lang is None and target_lang is None and self.trained is not None:
            source_lang, target_lang = self.trained
        task = self._of_task(source_lang, target_lang)
        prefix = task.pop("prefix", None) or _get(self.config, "prefix") or ""
        posterior = self._posterior(source_lang, target_lang)
        return Choice(task, tag_id=self.tags.get(target_lang), prefix=prefix, posterior=posterior)

    def decide(self, source_lang: str | None = None, target_lang: str | None = None) -> Choice:
        """Choose as `choose` does, for a caller that passes no `posteriors` to the model.

        Raises:
            ValueError: as `choose`; or the model has several posteriors, and the languages determine none of them.
        """
        choice = self.choose(source_lang, target_lang)
        count, names = _get(self.config, "num_posteriors") or 1, _get(self.config, "posterior_names")
        if count > 1 and choice.posterior is None:
            remedy = f"give the {_by_name(['target'])} or the {_by_name(['source'])}; known: {_listing(names or ())}"
            if not names:
                remedy = "write posterior_names into its config.json, and give one of them as the target language"
            raise ValueError(f"the model has {count} posteriors, and no language chooses one of them: {remedy}")
        return choice

    def tag_and_text(self, choice: Choice, text: str) -> tuple[int | None, str]:
        """Return the id of a text's tag, or None, and the text without the tag.

        Users of Marian's models write `>>deu<<` themselves. Such a tag is used unless `choice` has another one; then
        it remains part of the text.
        """
        match = TAG.match(text)
        written = self.tags.get(match[2]) if match and match[2] else None
        if written is not None and choice.tag_id in (None, written):
            return written, text[match.end() :].lstrip()
        if choice.tag_id is None and len(self.tags) > 1:
            logger.warning_once(
                f"no target language is given, so the model chooses one; the model knows {_listing(self.tags)}"
            )
        return choice.tag_id, text

    def _of_pair(self, settings: dict[str, Any]) -> Choice:
        tag, start = settings.get("tag"), settings.get("decoder_start_token_id")
        tag_id = None if tag is None else self.tokenizer.get_vocab().get(tag)
        if tag is not None and tag_id is None:
            raise ValueError(f"the tokenizer has no token {tag}, by which the model is asked for the language")
        starts = {} if start is None else {"decoder_start_token_id": start}
        return Choice(starts, tag_id=tag_id, posterior=settings.get("posterior"))

    def _of_codes(self, source_lang: str | None, target_lang: str | None) -> Choice:
        source, target = self._code("source", source_lang), self._code("target", target_lang)
        with _SPEAKING:  # wait while another thread has set the tokenizer's languages for a while
            source, target = source or self._saved_source(), target or self._saved_target()
        for side, language in zip(SIDES, (source, target), strict=True):
            if language is None:
                pairs = map("-".join, self.trained_pairs)
                known = f"trained on: {_listing(pairs)}" if self.trained_pairs else f"known: {_listing(self.codes)}"
                raise ValueError(f"the tokenizer knows several languages: give the {_by_name([side])}; {known}")
        with speaking(self.tokenizer, source, target):
            settings = target_settings(self.tokenizer)
        return Choice(settings, source, target)

    def _posterior(self, source_lang: str | None, target_lang: str | None) -> int | None:
        """Return the index of the posterior that is named after the pair or a language; None if there is none."""
        names = _get(self.config, "posterior_names") or []
        several = (_get(self.config, "num_posteriors") or 1) > 1
        asked = (f"{source_lang}-{target_lang}", target_lang, source_lang)
        return next((names.index(name) for name in asked if several and name in names), None)

    def _code(self, side: str, language: str | None) -> str | None:
        """Check a language code, and return it without the underscores that may be around it (`__de__`)."""
        bare = None if language is None else language.strip("_")
        _known(bare, self.codes, f"{side} language")
        return bare

    def _saved_source(self) -> str | None:
        saved, now = self.tokenizer.init_kwargs.get("src_lang"), self.tokenizer.src_lang
        if saved is None and now in UNSAID:
            return None
        return self._code("source", now)

    def _saved_target(self) -> str | None:
        saved, now = self.tokenizer.init_kwargs.get("tgt_lang"), self.tokenizer.tgt_lang
        # Some tokenizers set a missing target language to the source language when they encode a target.
        now = None if now == self.tokenizer.src_lang else now
        if now or saved:
            return self._code("target", now or saved)
        codes = {token_id: code for code, token_id in self.codes.items()}
        ids = (_get(self.generation_config, name) for name in ("forced_bos_token_id", "decoder_start_token_id"))
        return next((codes[token_id] for token_id in ids if token_id in codes), None)

    def _of_task(self, source_lang: str | None, target_lang: str | None) -> dict[str, Any]:
        if not self.tasks or self.tags or (source_lang is None and target_lang is None):
            return {}
        return dict(_only(self.tasks, source_lang, target_lang, "the model's config has no prefix for"))

    def _compare(self, source_lang: str | None, target_lang: str | None) -> None:
        """Warn if the languages differ from the one pair of the model, or if this pair is unknown."""
        known = _get(self.config, "source_lang"), _get(self.config, "target_lang")
        asked = f"{source_lang or '…'}-{target_lang or '…'}"
        if None in known:
            logger.warning_once(
                f"the languages {asked} are not used: neither the model's config nor the tokenizer knows languages, "
                "so the model translates the one pair it was trained on"
            )
        elif source_lang not in (None, known[0]) or target_lang not in (None, known[1]):
            logger.warning_once(
                f"the languages {asked} are not used: the model was trained to translate {known[0]}-{known[1]}"
            )


def task_languages(task: str | None) -> tuple[str | None, str | None]:
    """Return the languages in a task's name, `translation_xx_to_yy`; None twice for another task."""
    pair = TASK.fullmatch(task or "")
    return pair.groups() if pair else (None, None)


def pair_settings(config: Any, source_lang: str | None = None, target_lang: str | None = None) -> dict[str, Any]:
    """Return the settings of a language pair; {} if the config has no `translation_pairs`.

    A language can be missing if all pairs with the other language have the same settings.

    Raises:
        ValueError: the model does not have the pair, or a language is missing that the settings depend on.
    """
    pairs = _pairs(config)
    return _only(pairs, source_lang, target_lang, "the model was not trained on the language pair") if pairs else {}


def pairs_of_posterior(config: Any, posterior: int) -> dict[str, dict[str, Any]]:
    """Return the language pairs of one posterior, without the key `posterior`.

    They are for a model that has only the layers of this posterior. Pairs that name no posterior are included.
    """
    pairs = getattr(config, "translation_pairs", None) or {}
    return {
        pair: {key: value for key, value in settings.items() if key != "posterior"}
        for pair, settings in pairs.items()
        if settings.get("posterior", posterior) == posterior
    }


def language_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return `{code: id}` of a tokenizer that marks languages itself (NLLB, mBART, M2M100); {} for any other."""
    if not hasattr(tokenizer, "_build_translation_inputs"):
        return {}
    ids = getattr(tokenizer, "lang_code_to_id", None) or {
        str(token): tokenizer.convert_tokens_to_ids(str(token)) for token in tokenizer.extra_special_tokens
    }
    ids = {code.strip("_"): token_id for code, token_id in {**ids, **added_codes(tokenizer)}.items()}
    return {code: i for code, i in ids.items() if i != tokenizer.unk_token_id and CODE.fullmatch(code)}


def added_codes(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return `{code: id}` of the codes that users added to an M2M100 tokenizer; {} for any other.

    The class has a fixed table of codes, and an added code is only a token, such as `__gsw__`. This function writes
    the added codes into the tokenizer's tables, so that they can be its `src_lang` and `tgt_lang`.
    """
    table = getattr(tokenizer, "lang_code_to_token", None)
    if table is None:
        return {}
    tokens = ((ADDED_CODE.fullmatch(token), token_id) for token, token_id in tokenizer.get_added_vocab().items())
    added = {match[1]: token_id for match, token_id in tokens if match and match[1] not in tokenizer.lang_code_to_id}
    for code, token_id in added.items():
        token = table[code] = f"__{code}__"
        tokenizer.lang_token_to_id[token], tokenizer.id_to_lang_token[token_id] = token_id, token
    return added


def language_tags(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return `{language: id of its tag}` for the target languages that have a tag in the vocabulary."""
    found = ((TAG.fullmatch(token), token_id) for token, token_id in tokenizer.get_vocab().items())
    return {match[1] or match[2]: token_id for match, token_id in found if match}


def target_vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int] | None:
    """Return `{token: id}` of the targets, if the tokenizer has two vocabularies; else None.

    Word tokenizers and some of Marian's tokenizers have two vocabularies.
    """
    return getattr(tokenizer, "target_encoder", None)


def control_ids(tokenizer: PreTrainedTokenizerBase, target: bool = False) -> set[int]:
    """Return the ids that no text may be encoded to: special tokens, codes and tags.

    The unknown token is not among them: characters that the vocabulary lacks are encoded to it. With `target`, the ids
    are those of the `target_vocabulary`, if there is one: it has special tokens, and neither codes nor tags.
    """
    if target and (vocabulary := target_vocabulary(tokenizer)) is not None:
        special = (token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token)
        return {vocabulary[token] for token in special if token in vocabulary}
    ids = {*tokenizer.all_special_ids, *language_ids(tokenizer).values(), *language_tags(tokenizer).values()}
    return ids - {tokenizer.unk_token_id}


def make_codes_special(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the codes of an M2M100 tokenizer special tokens, as in published tokenizers.

    They are not in a tokenizer that was made by its class alone. Then the code at the beginning of a translation would
    be text.
    """
    codes = getattr(tokenizer, "lang_code_to_token", None)
    if codes and not {*codes.values()} <= {*tokenizer.all_special_tokens}:
        every = dict.fromkeys([*map(str, tokenizer.extra_special_tokens), *codes.values()])
        tokenizer.add_special_tokens({"extra_special_tokens": [*every]})


@contextmanager
def speaking(tokenizer: PreTrainedTokenizerBase, source_lang: str | None, target_lang: str | None) -> Iterator[None]:
    """Set the languages of a tokenizer with codes inside a `with` block, and restore them at its end.

    None leaves a language as it is. Both must be None for a tokenizer without codes. During the block, no other thread
    can set the languages of any tokenizer with this function.
    """
    if source_lang is None and target_lang is None:
        yield
        return
    with _SPEAKING:
        added_codes(tokenizer)
        before = tokenizer.src_lang, tokenizer.tgt_lang
        try:
            if source_lang is not None:
                tokenizer.src_lang = source_lang
            if target_lang is not None:
                tokenizer.tgt_lang = target_lang
            yield
        finally:
            tokenizer.src_lang, tokenizer.tgt_lang = before


def forget_unsaid(tokenizer: PreTrainedTokenizerBase) -> None:
    """Remove languages that nobody has set from the saved fields: Transformers saves the class's defaults."""
    for name in ("src_lang", "tgt_lang"):
        if tokenizer.init_kwargs.get(name, "said") is None and getattr(tokenizer, name, None) in (None, *UNSAID):
            tokenizer.init_kwargs.pop(name)


def set_languages(
    tokenizer: PreTrainedTokenizerBase, source_lang: str | None = None, target_lang: str | None = None
) -> dict[str, int | None]:
    """Set the languages of a tokenizer with language codes permanently: they are also saved with it.

    A source language that was added to an M2M100 tokenizer is neither set nor saved: the saved tokenizer could not be
    loaded. Then no source language is saved, and it has to be passed for each translation.

    Returns:
        See `target_settings`; {} without a target language, and for a tokenizer without codes.

    Raises:
        ValueError: a language is none of the tokenizer's codes.
    """
    codes = language_ids(tokenizer)
    if not codes:
        return {}
    source_lang, target_lang = (language and language.strip("_") for language in (source_lang, target_lang))
    for language in (source_lang, target_lang):
        _known(language, codes, "language code")
    if source_lang in added_codes(tokenizer):
        tokenizer.init_kwargs.pop("src_lang", None)
    elif source_lang is not None:
        tokenizer.src_lang = tokenizer.init_kwargs["src_lang"] = source_lang
    if target_lang is None:
        return {}
    tokenizer.tgt_lang = tokenizer.init_kwargs["tgt_lang"] = target_lang
    return target_settings(tokenizer)


def targets_of_pairs(
    tokenizer: PreTrainedTokenizerBase, pairs: Iterable[tuple[str, str]]
) -> list[dict[str, int | None]]:
    """Return the settings of generation for the target language of each pair; see `target_settings`.

    Raises:
        ValueError: a language is none of the tokenizer's codes.
    """
    codes, settings = language_ids(tokenizer), []
    for pair in pairs:
        for language in pair:
            _known(language.strip("_"), codes, "language code")
        with speaking(tokenizer, *(language.strip("_") for language in pair)):
            settings.append(target_settings(tokenizer))
    return settings


def target_settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the fields of a generation config for a tokenizer's target language.

    Most targets begin with their code, and generation forces it as the first token. Targets of mBART end with their
    code, and the decoder starts from it.
    """
    empty = tokenizer(text_target="")["input_ids"]  # the code and </s>, which surround every target
    if "Nllb" in type(tokenizer).__name__:  # in its legacy form the code follows </s>, and is forced, too
        return {"forced_bos_token_id": next(token for token in empty if token != tokenizer.eos_token_id)}
    if empty[-1] == tokenizer.eos_token_id:
        return {"forced_bos_token_id": empty[0]}
    return {"decoder_start_token_id": empty[-1], "forced_bos_token_id": None}


def _known(language: str | None, known: Iterable[str], what: str) -> None:
    if language is not None and language not in known:
        near = nearest(language, known)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown {what} {language[:60]!r}; {meant}known: {_listing(known)}")


def _fitting(
    pairs: dict[tuple[str, ...], Any], source_lang: str | None, target_lang: str | None, unknown: str
) -> dict[tuple[str, ...], Any]:
    """Return the pairs with the given languages; raise a ValueError that begins with `unknown` if there are none."""
    fitting = {
        languages: settings
        for languages, settings in pairs.items()
        if source_lang in (None, languages[0]) and target_lang in (None, languages[1])
    }
    if fitting:
        return fitting
    near = []
    for side, language in enumerate((source_lang, target_lang)):
        known = {languages[side] for languages in pairs}
        if language is not None and language not in known:
            near += nearest(language, known)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    asked = f"{(source_lang or '…')[:60]}-{(target_lang or '…')[:60]}"
    raise ValueError(f"{unknown} {asked}; {meant}known: {_listing(map('-'.join, pairs))}")


def _by_name(sides: list[str]) -> str:
    """Describe the languages of some sides, and how to pass them to a command and to a pipeline."""
    options = " ".join(f"--{side}_lang" for side in sides)
    arguments = ", ".join({"source": "src_lang", "target": "tgt_lang"}[side] for side in sides)
    return f"{' and the '.join(sides)} language ({options}; in a pipeline {arguments})"


def _only(
    pairs: dict[tuple[str, ...], dict[str, Any]], source_lang: str | None, target_lang: str | None, unknown: str
) -> dict[str, Any]:
    """Return the settings of the pair with the given languages; see `pair_settings`."""
    fitting = _fitting(pairs, source_lang, target_lang, unknown)
    first, *others = fitting.values()
    if any(settings != first for settings in others):
        sides = zip(SIDES, zip(*fitting, strict=True), strict=True)
        wanting = [side for side, languages in sides if len(set(languages)) > 1]
        raise ValueError(
            f"the model knows several language pairs: give the {_by_name(wanting)}; known: "
            f"{_listing(map('-'.join, pairs))}"
        )
    return first


def _pairs(config: Any) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the config's `translation_pairs`, by source and target language.

    Raises:
        ValueError: the field has another form.
    """
    pairs = _get(config, "translation_pairs") or {}
    if not isinstance(pairs, dict) or not all("-" in pair and isinstance(of, dict) for pair, of in pairs.items()):
        raise ValueError('the config\'s translation_pairs are not of the form {"en-de": {"tag": "<2de>"}}')
    return {tuple(pair.split("-", 1)): settings for pair, settings in pairs.items()}


def _get(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _listing(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
