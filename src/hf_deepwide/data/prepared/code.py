"""Corpora of code, made from their published files: Django and CoNaLa.

The folder of a corpus has the files `train`, `valid` and `test` with the suffixes `.nl` (English) and `.py`. Each
line holds one side of one pair.

Only these things are changed:

- English is split into words and single signs, with a space between them. So `self.name` in a sentence has the same
  words as the code `self . name`.
- Django's code is tokenised already, with one example a line. The spaces before a line, which show its indentation in
  the original file, are removed. The split is the usual one, in order: 16,000, 1,000 and 1,805 lines.
- CoNaLa's code is split into Python's tokens by the module tokenize. A line break becomes DCNL, and each level of
  indentation becomes one DCSP, as in published corpora of code. The last 200 training pairs are the validation set.
"""

import io
import json
import re
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...durable import is_empty_folder, whole_folder
from ...errors import UserError, one_line
from ..text_files import find_file, read_lines

Pair = tuple[str, str]
SIGNS = re.compile(r"\w+|[^\w\s]")
DJANGO = {"train": 16_000, "valid": 1_000, "test": 1_805}
CONALA_VALID = 200
LAYOUT = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
BROKEN = (tokenize.TokenError, SyntaxError)  # a SyntaxError reports wrong indentation


def words(text: str) -> str:
    """Return English text with one space between its words and signs."""
    return " ".join(SIGNS.findall(text))


def marked(code: str) -> str:
    """Return code as one line of tokens, with DCNL for a line break and DCSP for a level of indentation.

    Code that Python cannot tokenise is split in the same way as English.
    """
    try:
        found = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except BROKEN:
        return " DCNL ".join(words(line) for line in code.splitlines())
    marks: list[str] = []
    depth, begins = 0, False
    for token in found:
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        if token.type in (tokenize.NEWLINE, tokenize.NL):
            marks += ["DCNL"] if token.string else []  # the last line may end without a line break
            begins = token.type == tokenize.NEWLINE or begins
        elif token.type not in LAYOUT:
            marks += ["DCSP"] * depth if begins else []
            marks.append(token.string.replace("\n", " DCNL "))
            begins = begins and token.type == tokenize.COMMENT  # a comment alone on its line
    while marks and marks[-1] == "DCNL":
        marks.pop()
    return " ".join(marks)


def django(source: Path) -> dict[str, list[Pair]]:
    """Return the pairs of each split of Django.

    Raises:
        UserError: a file is missing, or does not have the published number of lines.
    """
    english, code = (list(read_lines(find_file(source / name))) for name in ("all.anno", "all.code"))
    if not len(english) == len(code) == sum(DJANGO.values()):
        raise UserError(
            f"{source}: all.anno has {len(english)} and all.code {len(code)} lines; Django has {sum(DJANGO.values())}"
        )
    pairs = [(words(text), line.strip(" ")) for text, line in zip(english, code, strict=True)]
    splits, start = {}, 0
    for split, size in DJANGO.items():
        splits[split] = pairs[start : start + size]
        start += size
    return splits


def conala(source: Path) -> dict[str, list[Pair]]:
    """Return the pairs of each split of CoNaLa.

    Raises:
        UserError: a file is missing, a line of code is no JSON string, the two files of a split differ in length, or
            there are too few training pairs.
    """
    train, test = _conala_pairs(source, "train"), _conala_pairs(source, "test")
    if len(train) <= CONALA_VALID:
        raise UserError(
            f"{source}: {len(train)} training pairs; more than the {CONALA_VALID} for validation are needed"
        )
    return {"train": train[:-CONALA_VALID], "valid": train[-CONALA_VALID:], "test": test}


def _conala_pairs(source: Path, split: str) -> list[Pair]:
    path = find_file(source / f"{split}.code.json")
    english, code = list(read_lines(find_file(source / f"{split}.nl"))), []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            snippet = json.loads(line)
        except json.JSONDecodeError:
            snippet = None
        if not isinstance(snippet, str):
            raise UserError(f"{path}, line {number}: no JSON string; each line is one, with a snippet of code")
        code.append(marked(snippet))
    if len(english) != len(code):
        raise UserError(f"{path} has {len(code)} lines but {split}.nl has {len(english)}")
    return [(words(text), line) for text, line in zip(english, code, strict=True)]


@dataclass(frozen=True)
class CodeCorpus:
    """One corpus of code.

    Args:
        name: its name on the command line, and the name of its folder.
        what: a description.
        licence: the terms of use.
        splits: a function that reads the published files in a folder and returns the pairs of each split.
        example: a recipe that reads the corpus.
    """

    name: str
    what: str
    licence: str
    splits: Callable[[Path], dict[str, list[Pair]]]
    example: str

    def prepare(self, source: Path, output: Path) -> dict[str, int]:
        """Write the corpus into its folder in `output`, in full or not at all; return each split's number of pairs.

        Raises:
            UserError: the folder exists and is not empty, or a published file is missing or is not as expected.
        """
        target = output / self.name
        if target.exists() and not is_empty_folder(target):
            raise UserError(f"--output: {one_line(target)} exists already; remove it, or name another folder")
        splits = self.splits(source)
        with whole_folder(target) as draft:
            for split, pairs in splits.items():
                for side, lines in zip(("nl", "py"), zip(*pairs, strict=True), strict=True):
                    (draft / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return {split: len(pairs) for split, pairs in splits.items()}


CODE_CORPORA = {
    corpus.name: corpus
    for corpus in (
        CodeCorpus(
            name="conala",
            what="questions of Stack Overflow in English, and snippets of Python",
            licence="not stated",
            splits=conala,
            example="code_conala_mat",
        ),
        CodeCorpus(
            name="django",
            what="lines of Django's source, described in English",
            licence="MIT",
            splits=django,
            example="code_django_mat",
        ),
    )
}
