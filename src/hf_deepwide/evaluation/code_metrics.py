"""Scores of generated code, as papers on code generation report them: sentence BLEU-4, and the share of valid code.

Both are means over sentences, times 100. They are sacreBLEU metrics, so the significance tests accept them, too.
The text of published code corpora may contain two markers: DCNL is a line break, and DCSP is a step of indentation.
"""

import ast
import html
import re
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from sacrebleu.metrics.base import Metric, Score, Signature

from ..errors import need

CODE_METRICS = ("sentence_bleu4", "valid_python", "valid_python_line", "valid_java")
INDENT = "\t"
BODY = INDENT + "pass"
LITERALS = {
    "_NUM": "0",
    "_STR": '""',
    "_BOOL": "true",
}  # the placeholders for literals in the published Java corpus
# Programs for lines that open a block and need more than a body, by the line's first word. HEAD stands for the line.
HEAD = "HEAD"
PROGRAMS = {
    **dict.fromkeys(("elif", "else"), f"if x:\n{BODY}\n{HEAD}\n{BODY}"),
    **dict.fromkeys(("except", "finally"), f"try:\n{BODY}\n{HEAD}\n{BODY}"),
    "try": f"{HEAD}\n{BODY}\nfinally:\n{BODY}",
    "match": f"{HEAD}\n{INDENT}case _:\n{INDENT}{BODY}",
    "case": f"match x:\n{INDENT}{HEAD}\n{INDENT}{BODY}",
}


class MeanOverSentences(Metric):
    """A metric that gives each sentence a number in [0, 1]. The score is the mean of the numbers, times 100."""

    class _Signature(Signature):
        """A signature that names the packages that computed the score."""

        def __init__(self, args: dict[str, Any]) -> None:
            super().__init__(args)
            self.info |= {"case": "lc" if args["lowercase"] else "mixed", **args["details"]}

    _SIGNATURE_TYPE = _Signature

    def __init__(self, name: str, lowercase: bool, **details: str) -> None:
        super().__init__()
        self.label, self.lowercase, self.details = name, lowercase, details

    def value(self, hypothesis: str, reference: str) -> float:
        """Return the number of one sentence, in [0, 1]."""
        raise NotImplementedError

    def _preprocess_segment(self, sent: str) -> str:
        return sent.lower() if self.lowercase else sent

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"reference": refs[0]}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict) -> list[float]:
        return [self.value(hypothesis, ref_kwargs["reference"]), 1.0]

    def _aggregate_and_compute(self, stats: list[list[float]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

    def _compute_score_from_stats(self, stats: list[float]) -> Score:
        return Score(self.label, float(100 * stats[0] / stats[1]))


class SentenceBLEU4(MeanOverSentences):
    """BLEU-4 of each sentence with smoothing method 4 of NLTK (Chen and Cherry 2014), on tokens split at spaces.

    An output of fewer than two tokens counts 0, as in the evaluation of MAT (section 5).
    """

    def __init__(self, lowercase: bool = False) -> None:
        bleu = need("nltk.translate.bleu_score", "code", "the metric sentence_bleu4")
        super().__init__("sentence_bleu4", lowercase, tok="none", smooth="method4", nltk=version("nltk"))
        self._bleu, self._smooth = bleu.sentence_bleu, bleu.SmoothingFunction().method4

    def value(self, hypothesis: str, reference: str) -> float:
        """Return the BLEU-4 of one sentence, in [0, 1]."""
        tokens = hypothesis.split()
        if len(tokens) < 2:
            return 0.0
        return float(self._bleu([reference.split()], tokens, smoothing_function=self._smooth))


class ValidCode(MeanOverSentences):
    """The share of outputs that a parser accepts ("PoV"). References do not matter."""

    def __init__(self, name: str, is_valid: Callable[[str], bool], lowercase: bool = False, **details: str) -> None:
        super().__init__(name, lowercase, **details)
        self._is_valid = is_valid

    def value(self, hypothesis: str, reference: str) -> float:
        """Return 1 for valid code, else 0."""
        return float(self._is_valid(hypothesis))


def build_code_metric(name: str, lowercase: bool) -> Metric:
    """Return the metric of `CODE_METRICS` with this name.

    Raises:
        UserError: the package of the metric is not installed.
    """
    if name == "sentence_bleu4":
        return SentenceBLEU4(lowercase)
    if name == "valid_python":
        return ValidCode(name, is_python, lowercase, parser="ast")
    if name == "valid_python_line":
        return ValidCode(name, is_python_line, lowercase, parser="ast")
    java = need("javalang", "code", "the metric valid_java")

    def is_java(text: str) -> bool:
        """Return True if a text begins with a member of a class. MAT's evaluation parses only this beginning."""
        code = re.sub(r"\b(?:_NUM|_STR|_BOOL)\b", lambda literal: LITERALS[literal[0]], plain_code(text))
        try:
            java.parse.parse_member_signature(code)
        except (java.parser.JavaSyntaxError, java.tokenizer.LexerError, RecursionError, StopIteration):
            return False
        return True

    return ValidCode(name, is_java, lowercase, javalang=version("javalang"))


def plain_code(text: str) -> str:
    """Turn a text with DCNL and DCSP into code. `<unk>` becomes the name UNK, as in MAT's evaluation."""
    text = text.replace("<unk>", "UNK")
    if "DCNL" not in text and "DCSP" not in text:
        return text
    lines = []
    for line in text.split("DCNL"):
        steps = re.match(r"(?:\s*DCSP\b)*", line)
        depth = steps[0].count("DCSP") if steps else 0
        rest = line[steps.end() if steps else 0 :].strip()
        lines.append(INDENT * depth + rest.replace("DCSP", INDENT))
    return "\n".join(lines)


def is_python(text: str) -> bool:
    """Return True if Python's parser accepts a text as a program.

    Text of published corpora is escaped for HTML (`&lt;` for `<`), and MAT's evaluation always removes the escapes.
    Other text has no escapes. So the parser first reads the text as it is. If this fails, it reads the text without
    escapes. An empty text is a program.
    """
    code = plain_code(text)
    return _parses(code) or _parses(html.unescape(code))


def is_python_line(text: str) -> bool:
    """Return True if a text is a program, or a line that becomes a program together with other lines.

    The line `if x:` is valid, because it needs only a body. `else:` and `try:` are valid, too, although they need
    further lines. An empty text is not valid.
    """
    code = plain_code(text).strip()
    return code != "" and (_is_program_or_head(code) or _is_program_or_head(html.unescape(code).strip()))


def _is_program_or_head(code: str) -> bool:
    candidates = [code]
    if code.endswith(":"):
        word = re.match(r"\w*", code)
        program = PROGRAMS.get(word[0] if word else "", f"{HEAD}\n{BODY}")
        candidates.append(program.replace(HEAD, code))
    elif code.startswith("@"):
        candidates.append(f"{code}\ndef f():\n{BODY}")
    return any(map(_parses, candidates))


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of invalid escapes in string literals of the code
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a NUL character
        return False
    return True
