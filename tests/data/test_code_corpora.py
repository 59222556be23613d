"""Corpora of code: how their text is changed, and that the code stays the same program."""

import ast
import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from hf_deepwide.cli import main
from hf_deepwide.data.arguments import ROOT_VARIABLE, DataArguments
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.prepared import code as code_corpora
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.code_metrics import plain_code

DATA = Path(os.environ.get(ROOT_VARIABLE) or "absent")
SNIPPETS = [
    "sum(d * 10 ** i for i, d in enumerate(x[::-1]))",
    "if ('a  b' in d):\n    pass",
    "def f(x):\n    if x:\n\n        return {'a': 1,\n                'b': 2}\n    # no\n    return x\nf(1)\n",
    "for i in x:\n\tfor j in i:\n\t\tprint(j)\n\tprint(i)",
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_marked_code_is_one_line_of_the_same_program(code):
    line = code_corpora.marked(code)
    assert "\n" not in line
    assert ast.dump(ast.parse(plain_code(line))) == ast.dump(ast.parse(code))


def test_marks_stand_for_line_breaks_and_steps():
    assert code_corpora.marked(SNIPPETS[1]) == "if ( 'a  b' in d ) : DCNL DCSP pass"
    assert code_corpora.marked(SNIPPETS[3]) == (
        "for i in x : DCNL DCSP for j in i : DCNL DCSP DCSP print ( j ) DCNL DCSP print ( i )"
    )
    assert code_corpora.marked("x = (1\ny, $") == "x = ( 1 DCNL y , $", "what Python cannot tokenise"


def test_english_is_cut_at_signs():
    assert code_corpora.words("  set self.model_name to 'x'.") == "set self . model_name to ' x ' ."


def zipped(path: Path, lines: list[str]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_django_is_split_in_order_without_outer_spaces(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(code_corpora, "DJANGO", {"train": 2, "valid": 1, "test": 1})
    zipped(tmp_path / "all.anno.gz", ["  one.", "  two", "three", "four"])
    zipped(tmp_path / "all.code.gz", ["    if  x :", " y = ' a  b '", "z", "w\u2028 "])
    command = ["data", "django", "--source", str(tmp_path), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", *command])
    main()
    printed = capsys.readouterr().out
    assert "train: 2 pairs" in printed
    assert f"hf-deepwide train code_django_mat --data.root {tmp_path / 'out'}\n" in printed
    root = str(tmp_path / "out")
    data = DataArguments(root=root, source_lang="nl", target_lang="py", train="django/train", test="django/test")
    train = load_parallel(data, "train")
    assert (train["source"][:], train["target"][:]) == (["one .", "two"], ["if  x :", "y = ' a  b '"])
    assert load_parallel(data, "test")["target"][:] == ["w\u2028"]
    with pytest.raises(SystemExit):
        main()
    assert "django exists already" in capsys.readouterr().err
    for wrong, words in ((["--bpe"], "--bpe: django"), (["--source", "nowhere"], "there is no such folder")):
        monkeypatch.setattr(sys, "argv", ["hf-deepwide", *command, *wrong])
        with pytest.raises(SystemExit):
            main()
        assert words in capsys.readouterr().err
    zipped(tmp_path / "all.code.gz", ["x"])
    with pytest.raises(UserError, match=r"all\.anno has 4 and all\.code 1 lines"):
        code_corpora.django(tmp_path)


def test_conala_holds_out_the_last_training_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(code_corpora, "CONALA_VALID", 1)
    for split, count in (("train", 3), ("test", 1)):
        zipped(tmp_path / f"{split}.nl.gz", [f"{split} {number}" for number in range(count)])
        zipped(tmp_path / f"{split}.code.json.gz", [json.dumps(f"if x:\n  y({number})") for number in range(count)])
    splits = code_corpora.conala(tmp_path)
    assert splits["valid"] == [("train 2", "if x : DCNL DCSP y ( 2 )")]
    assert (len(splits["train"]), len(splits["test"])) == (2, 1)
    for wrong, words in (("x = 1", "line 1: no JSON string"), ("1", "line 1: no JSON string"), ('"a"', "has 1 lines")):
        zipped(tmp_path / "train.code.json.gz", [wrong])
        with pytest.raises(UserError, match=words):
            code_corpora.conala(tmp_path)


@pytest.mark.skipif(not (DATA / "conala").is_dir(), reason="needs the corpora (HF_DEEPWIDE_DATA)")
def test_published_corpora_keep_their_programs():
    django, conala = code_corpora.django(DATA / "django_code"), code_corpora.conala(DATA / "conala")
    assert {split: len(pairs) for split, pairs in django.items()} == code_corpora.DJANGO
    assert {split: len(pairs) for split, pairs in conala.items()} == {"train": 2178, "valid": 200, "test": 500}
    with gzip.open(DATA / "conala" / "test.code.json.gz", "rt", encoding="utf-8") as file:
        published = [json.loads(line) for line in file]
    for code, (_, line) in zip(published, conala["test"], strict=True):
        assert ast.dump(ast.parse(plain_code(line))) == ast.dump(ast.parse(code))
