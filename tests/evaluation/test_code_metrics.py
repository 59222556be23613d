"""Scores of generated code: BLEU-4 of sentences against the published formula, and what counts as valid."""

import math
import sys
from collections import Counter

import pytest

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.code_metrics import is_python, is_python_line, plain_code
from hf_deepwide.evaluation.metrics import build_metrics, score
from hf_deepwide.evaluation.significance import compare_systems


def naive_bleu4(hypothesis: str, reference: str) -> float:
    """Chen and Cherry 2014, smoothing 4: the k-th count of 0 (k = 1, 2 …) becomes ln(length) / (5 * 2^k)."""
    said, right = hypothesis.split(), reference.split()
    if len(said) < 2:
        return 0.0
    product, zeros = 1.0, 0
    for n in range(1, 5):
        ours, theirs = (Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)) for words in (said, right))
        hits, there = sum(min(count, theirs[gram]) for gram, count in ours.items()), max(1, sum(ours.values()))
        if n == 1 and hits == 0:
            return 0.0
        if hits == 0:
            zeros += 1
            hits = math.log(len(said)) / (5 * 2**zeros)
        product *= hits / there
    brevity = 1.0 if len(said) > len(right) else math.exp(1 - len(right) / len(said))
    return brevity * product**0.25


PAIRS = [
    ("return x + y", "return x + y"),
    ("return x", "return self . x if self else y"),
    ("for i in range ( n ) :", "for j in range ( n ) :"),
    ("pass", "pass"),
    ("", "x = 1"),
    ("a b c d e f", "u v w x y z"),
    ("if x is None : return y", "if x is not None : return z"),
]


def test_sentence_bleu4_is_the_formulas_mean():
    hypotheses, references = zip(*PAIRS, strict=True)
    found = score(hypotheses, references, metrics=["sentence_bleu4"])
    expected = 100 * sum(naive_bleu4(*pair) for pair in PAIRS) / len(PAIRS)
    assert found["sentence_bleu4"] == pytest.approx(expected, rel=1e-9)
    assert "smooth:method4" in found["signature"]["sentence_bleu4"]
    assert naive_bleu4(*PAIRS[0]) == 1
    assert naive_bleu4(*PAIRS[3]) == 0, "one token counts 0"


@pytest.mark.parametrize(
    ("code", "valid"),
    [
        ("x = foo ( 1 , 'a' )", True),
        ("x = = 1", False),
        ("if x :", True),
        ("elif x :", True),
        ("else :", True),
        ("except ValueError :", True),
        ("finally :", True),
        ("try :", True),
        ("match x :", True),
        ("case 1 :", True),
        ("elsewhere :", False),
        ("try x :", False),
        ("cases :", False),
        ("@ property", True),
        ("def f ( self ) : DCNL DCSP if x : DCNL DCSP DCSP return 1 DCNL DCSP return 2", True),
        ("def f ( self ) : DCNL return 1", False),
        ("if x &lt; 1 :", True),
        ("x = ' &quot; '", True),
        ("x = ' &#39; '", True),
        ("x = &lt;", False),
        ("", False),
        ("x = '\0'", False),
        ("return (" + "(" * 200, False),
    ],
)
def test_a_valid_line_of_python_may_need_other_lines(code, valid):
    assert is_python_line(code) is valid


@pytest.mark.parametrize(
    ("code", "valid"),
    [
        ("x = foo ( 1 , 'a' )", True),
        ("x = = 1", False),
        ("if x :", False),
        ("def f ( x ) :", False),
        ("@ property", False),
        ("", True),
        ("def f ( self ) : DCNL DCSP if x : DCNL DCSP DCSP return 1 DCNL DCSP return 2", True),
        ("def f ( self ) : DCNL DCSP return DCSP 1", True),
        ("def f ( self ) : DCNL return 1", False),
        ("x = 1 &lt; 2", True),
        ("x = ' &#39; '", True),
        ("if x &lt; : pass", False),
    ],
)
def test_valid_python_is_a_program(code, valid):
    """As in MAT's evaluation, DCNL is a line break and DCSP a tab. HTML escapes may stay, or be replaced."""
    assert is_python(code) is valid


@pytest.mark.parametrize(
    ("code", "valid"),
    [
        ("int f ( int x ) { return x + 1 ; }", True),
        ("int f ( int x { return ;", False),
        ("void g ( ) { }", True),
        ("int f ( )", True),
        ("int f ( ) { } }", True),
        ("void g ( ) { } foo bar", True),
        ("static { }", False),
        ("", False),
        ("x = 1", False),
        ("<unk> f ( <unk> x ) { return _NUM ; }", True),
        ("int f ( ) { return - _NUM + _STR . length ( ) ; }", True),
        ("int _NUM ;", False),
        ("String s = 'ab", False),
        ("(" * 3000, False),
    ],
)
def test_valid_java_is_the_member_of_a_class(code, valid):
    """As in MAT's evaluation, code behind the member is not read."""
    assert score([code], [code], metrics=["valid_java"])["valid_java"] == 100 * valid


def test_markers_become_lines_and_steps():
    assert plain_code("def f ( ) : DCNL DCSP DCSP return 1 DCNL x = 2") == "def f ( ) :\n\t\treturn 1\nx = 2"
    assert plain_code("a b") == "a b"
    assert plain_code("a = <unk> DCNL b DCSP c") == "a = UNK\nb \t c"
    assert is_python("x = <unk> ( 1 )"), "an unknown word is a name"


def test_shares_of_valid_code_are_per_cent():
    java = ["int f ( int x ) { return x + 1 ; }", "int f ( int x { return ;", "void g ( ) { }"]
    assert score(java, java, metrics=["valid_java"])["valid_java"] == pytest.approx(200 / 3)
    python = ["x = 1", "x =", "y", "("]
    assert score(python, python, metrics=["valid_python"])["valid_python"] == 50


def test_sentences_are_tested_in_pairs():
    references = [reference for _, reference in PAIRS]
    ours = [hypothesis for hypothesis, _ in PAIRS]
    found = compare_systems(references, ours, references, metrics=["sentence_bleu4"], samples=50, trials=200)
    expected = 100 * sum(naive_bleu4(*pair) for pair in PAIRS) / len(PAIRS)
    assert found["sentence_bleu4"]["system"]["score"] == pytest.approx(expected)
    assert found["sentence_bleu4"]["difference"] < 0


def test_a_missing_package_is_one_line(monkeypatch):
    for package, metric in (("nltk.translate.bleu_score", "sentence_bleu4"), ("javalang", "valid_java")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=r"hf_deepwide\[code\]"):
            build_metrics([metric])
    with pytest.raises(UserError, match=r"accepted: .*valid_python"):
        build_metrics(["pov"])
    assert "valid_python" not in EvaluationArguments().metrics
