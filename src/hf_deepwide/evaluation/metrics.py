"""Corpus scores of translations: sacreBLEU, chrF, and tokenised BLEU as multi-bleu.perl counts it.

Papers report these three scores. `bleu` (Post 2018) and `chrf` (Popović 2015) expect plain, detokenised text, and have
a signature that says how they were computed. `multi_bleu` only splits the text at its spaces. Compare it with a
paper's "tokenised BLEU" only if both sides are tokenised as in that paper. For plain text, `moses_bleu` first
tokenises both sides by Moses' rules, as most papers did before training.
"""

import logging
import re
import unicodedata
from collections.abc import Sequence
from importlib.metadata import version

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.tokenizers.tokenizer_base import BaseTokenizer

from ..errors import UserError, need, number_of, one_line, quote
from ..models.language_names import THREE_LETTERS
from .code_metrics import CODE_METRICS, build_code_metric

logger = logging.getLogger(__name__)

METRICS = ("bleu", "chrf", "multi_bleu")
MOSES = "moses_bleu"
ALL_METRICS = (*METRICS, MOSES, *CODE_METRICS)

# Three-letter codes (NLLB's zho_Hans) of languages for which sacreBLEU or Moses have rules under two-letter codes.
_SAME_BEGINNING = (
    *("asm", "cat", "deu", "ell", "eng", "fin", "fra", "guj", "hin", "hun", "ita", "kor", "lvs", "ory", "ron"),
    *("rus", "tam", "tel"),
)
_TWO_LETTERS = {
    **{three: two for two, three in THREE_LETTERS.items()},
    **{three: three[:2] for three in _SAME_BEGINNING},
    **{"lav": "lv", "cmn": "zh", "yue": "zh"},
}

# Characters that are spaces for Python's `str.split`, but not for Perl's byte-wise `split`. Each becomes a private-use
# character of its own, so that a no-break space, for example, stays inside its token as in multi-bleu.perl.
_UNICODE_SPACES = (
    "\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_KEEP_IN_TOKEN = {ord(space): 0xF0000 + ord(space) for space in _UNICODE_SPACES}


class MultiBLEU(BLEU):
    """BLEU on the text's own tokens, unsmoothed: the number that multi-bleu.perl prints (Papineni et al. 2002).

    `lowercase` lowers all letters of Unicode, as the papers' preprocessing does (Moses' lowercase.perl). The option
    `-lc` of multi-bleu.perl works on bytes and lowers only ASCII letters.
    """

    def __init__(self, lowercase: bool = False) -> None:
        super().__init__(lowercase=lowercase, force=True, tokenize="none", smooth_method="none")

    def _preprocess_segment(self, sent: str) -> str:
        return super()._preprocess_segment(sent.translate(_KEEP_IN_TOKEN))


class MosesTokenizer(BaseTokenizer):
    """Moses' tokenizer.perl, as sacremoses implements it, without escapes of characters: escapes change no score."""

    def __init__(self, language: str) -> None:
        self._moses = need("sacremoses", "corpora", f"the metric {MOSES}").MosesTokenizer(language)
        self._language = language

    def signature(self) -> str:
        """Return the package, its version, and the language, for the metric's signature."""
        return f"sacremoses-{version('sacremoses')}-{self._language}"

    def __call__(self, line: str) -> str:
        """Return the tokens of a line, with spaces between them."""
        return self._moses.tokenize(line, return_str=True, escape=False)


class MosesBLEU(BLEU):
    """BLEU on Moses' tokens of plain text, unsmoothed. Papers call it tokenised BLEU.

    A paper's own tokens can differ: fairseq's scripts for WMT also split at dashes (`-a`).
    """

    def __init__(self, language: str, lowercase: bool = False) -> None:
        super().__init__(lowercase=lowercase, force=True, tokenize="none", smooth_method="none")
        self.tokenizer = MosesTokenizer(language)
        self.tokenizer_signature = self.tokenizer.signature()

    def _preprocess_segment(self, sent: str) -> str:
        """Lower the text after tokenisation, as papers do: Moses uses the case of the next word to split a dot."""
        tokens = self.tokenizer(sent.rstrip())
        return tokens.lower() if self.lowercase else tokens


def build_metrics(
    names: Sequence[str] = METRICS,
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
    target_lang: str | None = None,
) -> dict[str, Metric]:
    """Return the sacreBLEU metric objects with these names. The arguments are those of `score`.

    Raises:
        UserError: a metric or a tokenizer does not exist, or its package is not installed; or no target language is
            given for `moses_bleu` or for the tokenizer "auto".
    """
    unknown = [name for name in names if name not in ALL_METRICS]
    if unknown or not names:
        raise UserError(f"metrics: {', '.join(unknown) or 'none given'}; accepted: {', '.join(ALL_METRICS)}")
    if tokenize != "auto" and tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"tokenize: {quote(tokenize)}; accepted: auto, {', '.join(BLEU.TOKENIZERS)}")
    if tokenize == "auto" and "bleu" in names and not target_lang:
        raise UserError(
            "tokenize: auto chooses sacreBLEU's tokenizer by the target language; give target_lang (--target_lang)"
        )
    language = re.split("[-_]", target_lang or "")[0].lower()  # zh for zh-CN and zh_Hans
    metrics: dict[str, Metric] = {}
    for name in names:
        if name in CODE_METRICS:
            metrics[name] = build_code_metric(name, lowercase)
        elif name == "chrf":
            metrics[name] = CHRF(lowercase=lowercase)
        elif name == "multi_bleu":
            metrics[name] = MultiBLEU(lowercase=lowercase)
        elif name == MOSES:
            if not language:
                raise UserError(
                    f"metrics: {MOSES} splits text by the rules of its language; give target_lang (--target_lang)"
                )
            metrics[name] = MosesBLEU(_TWO_LETTERS.get(language, language), lowercase)
        else:
            try:
                metrics[name] = BLEU(
                    lowercase=lowercase,
                    tokenize=None if tokenize == "auto" else tokenize,
                    trg_lang=_TWO_LETTERS.get(language, language),
                    force=True,
                )
            except (ImportError, RuntimeError, OSError) as error:  # the Japanese, Korean and SentencePiece tokenizers
                reason = one_line(error)
                raise UserError(f"tokenize: {tokenize} (target language {target_lang}): {reason}") from error
    return metrics


def check_parallel(
    hypotheses: Sequence[str],
    references: Sequence[str],
    names: tuple[str, str] = ("translations", "references"),
) -> None:
    """Refuse two sides that cannot be compared line by line. `names` are their names in messages, such as file names.

    Raises:
        UserError: a side is a single string instead of a list, or empty; or the numbers of lines differ.
    """
    for side, name in zip((hypotheses, references), names, strict=True):
        if isinstance(side, str):
            raise UserError(f"{name}: one string was given; a list of sentences is wanted")
        if len(side) == 0:
            raise UserError(f"{name}: empty; at least one sentence is needed for a score")
    if len(hypotheses) != len(references):
        raise UserError(
            f"{names[0]}: {number_of(len(hypotheses), 'line')}; {names[1]}: {number_of(len(references), 'line')}. "
            "Both must hold the same sentences in the same order, one a line"
        )


def _warn_of_references(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Warn of causes of too low scores: empty references, or the same letters in different Unicode forms."""
    empty = [number for number, reference in enumerate(references, start=1) if not reference.strip()]
    if empty:
        logger.warning("references: %s empty, the first is line %d", _are(len(empty)), empty[0])
    ours, theirs = (
        sum(not unicodedata.is_normalized("NFC", text) for text in texts) for texts in (hypotheses, references)
    )
    if (ours == 0) != (theirs == 0):
        side, other = ("translations", "references")[:: 1 if ours else -1]
        logger.warning(
            "%s: %s not in Unicode's form NFC, but all %s are. Equal letters then count as different, which lowers "
            "the scores; convert both sides to NFC (unicodedata.normalize)",
            *(side, _are(ours or theirs), other),
        )


def _are(lines: int) -> str:
    return f"{number_of(lines, 'line')} {'is' if lines == 1 else 'are'}"


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
    target_lang: str | None = None,
    metrics: Sequence[str] = METRICS,
) -> dict:
    """Score translations against one reference each.

    Args:
        hypotheses: the translations, one string for each sentence. `bleu` and `chrf` expect detokenised text.
        references: as many references as translations, in the same order.
        lowercase: lower both sides first, for all metrics (the signatures then contain `case:lc`).
        tokenize: sacreBLEU's tokenizer for `bleu`. "auto" lets sacreBLEU choose by `target_lang`: special tokenizers
            for Chinese, Japanese and Korean, else 13a.
        target_lang: the target language's code (zh, zh-CN, zho_Hans), used by the tokenizer "auto" and by
            `moses_bleu`.
        metrics: names of metrics among `ALL_METRICS`.

    Returns:
        `{"bleu": 0..100, "chrf": 0..100, "multi_bleu": 0..100, "sentences": n, "signature": {metric: text}}`,
        with the requested metrics.

    Raises:
        UserError: the two sides do not fit each other, or a setting is not accepted.
    """
    check_parallel(hypotheses, references)
    _warn_of_references(hypotheses, references)
    result: dict = {}
    signature: dict[str, str] = {}
    built = build_metrics(metrics, lowercase=lowercase, tokenize=tokenize, target_lang=target_lang)
    for name, metric in built.items():
        result[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        signature[name] = str(metric.get_signature())
    return {**result, "sentences": len(hypotheses), "signature": signature}
