"""Means over language pairs and win ratios: by hand, against published figures, and as the script reports them."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.averages import group_means, groups, means, read_scores, win_ratio
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.scoring import average

ROOT = Path(__file__).parents[2]
ZHANG = ROOT / "benchmarks" / "opus100_zhang2020.tsv"
BLEU_4 = ["de", "zh", "br", "te"]
OURS = {"en-de": 24.0, "en-te": 10.0, "en-fr": 35.0, "de-en": 30.0, "te-en": 18.0, "fr-en": 39.0}
THEIRS = {"en-de": 20.0, "en-te": 12.0, "en-fr": 34.0, "de-en": 30.0, "te-en": 17.5, "fr-en": 38.0}


def test_matches_means_computed_by_hand():
    of_groups = groups(list(OURS), ["de", "te"])
    assert means(OURS, of_groups) == {
        "average": pytest.approx(156 / 6),
        "en-xx": pytest.approx(69 / 3),
        "xx-en": pytest.approx(87 / 3),
        "en-xx (de te)": pytest.approx(34 / 2),
        "xx-en (de te)": pytest.approx(48 / 2),
    }
    assert win_ratio(OURS, THEIRS, of_groups) == {
        "average": pytest.approx(100 * 4 / 6),  # en-te is lost, de-en is a tie
        "en-xx": pytest.approx(100 * 2 / 3),
        "xx-en": pytest.approx(100 * 2 / 3),
        "en-xx (de te)": 50.0,
        "xx-en (de te)": 50.0,
    }
    assert win_ratio(OURS, OURS, of_groups)["average"] == 0.0


def test_93_of_94_pairs_are_the_ratio_that_the_paper_prints():
    """The ratios 98.94 and 79.79 in Table 7 are 93 and 75 of 94 pairs."""
    theirs = {pair: bleu for pair, bleu in read_scores(ZHANG)["laln_lalt"].items() if pair.startswith("en-")}
    for won, printed in ((93, 98.94), (75, 79.79)):
        ours = {pair: bleu + (1 if place < won else 0) for place, (pair, bleu) in enumerate(theirs.items())}
        assert win_ratio(ours, theirs, groups(list(ours)))["average"] == pytest.approx(printed, abs=0.005)


@pytest.mark.parametrize(
    ("system", "printed"),
    [
        ("transformer", {"en-xx": 18.75, "xx-en": 27.02, "en-xx (de zh br te)": 14.73, "xx-en (de zh br te)": 22.50}),
        ("laln_lalt", {"en-xx": 20.81, "xx-en": 27.22, "en-xx (de zh br te)": 17.45, "xx-en (de zh br te)": 23.30}),
    ],
)
def test_published_scores_have_the_means_that_were_published(system, printed):
    """BLEU_94 and BLEU_4 in Table 7 of Xu et al. 2024, from the scores of each pair."""
    scores = read_scores(ZHANG)[system]
    of_groups = groups(list(scores), BLEU_4)
    assert {name: len(pairs) for name, pairs in of_groups.items()} == {
        "average": 188, "en-xx": 94, "xx-en": 94, "en-xx (de zh br te)": 4, "xx-en (de zh br te)": 4,
    }  # fmt: skip
    found = means(scores, of_groups)
    assert {name: found[name] for name in printed} == pytest.approx(printed, abs=0.0051)


@pytest.mark.parametrize(
    ("pairs", "languages", "expected"),
    [
        (["en-de", "en-fr"], [], ["average"]),
        (["en-de", "en-fr"], ["fr"], ["average", "average (fr)"]),
        (["en-de", "de-en"], ["de"], ["average", "average (de)"]),
        (["en-de", "de-en", "de-fr"], [], ["average", "de-xx", "xx-de"]),
        (["en-de", "fr-cs"], ["de", "cs"], ["average", "average (de cs)"]),
        (["en-de", "en-zh", "de-en"], ["zh"], ["average", "en-xx", "xx-en", "en-xx (zh)"]),
        (["en-zh-CN", "en-de"], ["zh-CN"], ["average", "average (zh-CN)"]),
    ],
)
def test_groups_are_what_the_pairs_allow(pairs, languages, expected):
    assert list(groups(pairs, languages)) == expected


def test_an_unknown_language_is_named():
    with pytest.raises(UserError, match=r"no language pair has sw; accepted: de, fr$"):
        groups(["en-de", "fr-en"], ["de", "sw"])


@pytest.mark.parametrize(("ours", "theirs"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)])
def test_a_score_that_is_not_finite_is_not_ranked(ours, theirs):
    with pytest.raises(UserError, match="a-b"):
        win_ratio({"a-b": ours}, {"a-b": theirs}, {"average": ["a-b"]})


def test_a_missing_score_is_named():
    with pytest.raises(UserError, match="no score of en-te"):
        win_ratio(OURS, {"en-de": 1.0, **{pair: 1.0 for pair in OURS if pair != "en-te"}}, groups(list(OURS)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("en-de\t3\n", ["line 1", "header"]),
        ("pair\tx\tx\n", ["line 1", "header"]),
        ("# a\npair\tx\nen-de\t3\t4\n", ["line 3", "2 scores of 1 systems"]),
        ("pair\tx\nen-de\tgood\n", ["line 2", "'good'"]),
        ("pair\tx\nen-de\tnan\n", ["line 2", "'nan'"]),
        ("pair\tx\nen-de\t1\nen-de\t2\n", ["line 3", "en-de", "twice"]),
        ("# nothing\n", ["no header"]),
    ],
)
def test_a_table_that_is_none_is_refused(text, words, tmp_path):
    path = tmp_path / "scores.tsv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_scores(path)
    for word in [str(path), *words]:
        assert word in str(error.value)


def test_a_runs_results_have_the_groups():
    scores = {pair: {"bleu": bleu, "chrf": 2 * bleu, "sentences": 5} for pair, bleu in OURS.items()}
    report = average(scores, EvaluationArguments(average_languages=["te"], metrics=["bleu", "chrf"]))
    assert report["average"] == pytest.approx({"bleu": 26.0, "chrf": 52.0})
    assert report["groups"]["xx-en"] == pytest.approx({"bleu": 29.0, "chrf": 58.0})
    assert report["groups"]["en-xx (te)"] == {"bleu": 10.0, "chrf": 20.0}
    assert "average" not in report["groups"]
    assert report["sentences"] == 30
    one_way = {pair: scores[pair] for pair in ("en-de", "en-fr")}
    assert "groups" not in average(one_way, EvaluationArguments(metrics=["bleu"]))


LINES = {
    "good": ["ein Hund läuft über die Wiese .", "zwei Männer sitzen auf einer Bank ."],
    "fair": ["ein Hund läuft über die Straße .", "zwei Männer sitzen auf einer Bank ."],
    "bad": ["ein Hund läuft .", "zwei Frauen stehen vor einem großen Haus ."],
}
QUALITY = {"en-de": "fair", "en-te": "bad", "de-en": "good", "te-en": "fair"}
PAIRS = list(QUALITY)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the script, in a folder with references, two systems' translations and a table."""
    monkeypatch.chdir(tmp_path)
    for pair, quality in QUALITY.items():
        for name, lines in (("ours", LINES[quality]), ("other", LINES["fair"]), ("reference", LINES["good"])):
            Path(f"{name}.{pair}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    table = "pair\tpaper\n" + "".join(f"{pair}\t50.0\n" for pair in PAIRS)
    Path("table.tsv").write_text(table, encoding="utf-8")

    def run(*words):
        script = str(ROOT / "scripts" / "evaluate_translation.py")
        given = ["--hypotheses", "ours.{pair}", "--reference", "reference.{pair}", "--metrics", "bleu", *words]
        monkeypatch.setattr(sys, "argv", [script, *given])
        runpy.run_path(script, run_name="__main__")

    return run


def test_the_script_reports_directions_and_win_ratios(run, capsys):
    run("--pairs", *PAIRS, "--average_languages", "te", "--compare", "other.{pair}", "--win_ratio", "table.tsv",
        "--bootstrap_samples", "20", "--trials", "20", "--output", "report.json")  # fmt: skip
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    bleu = {name: score(lines, LINES["good"], metrics=["bleu"])["bleu"] for name, lines in LINES.items()}
    assert bleu["bad"] < 50 < bleu["fair"] < bleu["good"]
    assert report["average"]["ours.{pair}"]["bleu"] == pytest.approx((2 * bleu["fair"] + bleu["bad"] + 100) / 4)
    assert report["groups"]["en-xx"]["ours.{pair}"]["bleu"] == pytest.approx((bleu["fair"] + bleu["bad"]) / 2)
    assert report["groups"]["xx-en"]["ours.{pair}"]["bleu"] == pytest.approx((bleu["fair"] + 100) / 2)
    assert report["groups"]["en-xx (te)"]["ours.{pair}"]["bleu"] == pytest.approx(bleu["bad"])
    assert report["groups"]["xx-en"]["other.{pair}"]["bleu"] == pytest.approx(bleu["fair"])
    assert report["win_ratio"]["paper"] == {
        "average": 75.0, "en-xx": 50.0, "xx-en": 100.0, "en-xx (te)": 0.0, "xx-en (te)": 100.0,
    }  # fmt: skip
    assert report["win_ratio"]["other.{pair}"]["average"] == 25.0, "the one that is good; equal ones are not won"
    shown = capsys.readouterr().out
    assert "ours.{pair} against paper, win ratio by bleu\n   75.00 % of 4 language pairs, average\n" in shown
    assert "ours.{pair}, xx-en over 2 language pairs" in shown
    assert "ours.{pair}, xx-en (te) over 1 language pair\n" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pairs", *PAIRS, "--average_languages", "sw"], "no language pair has sw; accepted: de, te"),
        (["--pairs", *PAIRS, "en-fr", "--win_ratio", "table.tsv"], "no score of en-fr"),
        (["--pairs", *PAIRS, "--win_ratio", "none.tsv"], "there is no file none.tsv"),
        (["--pairs", *PAIRS, "en-de"], "--pairs: en-de is named twice"),
        (["--pairs", *PAIRS, "--target_lang", "de"], "--target_lang 'de': --pairs names the languages"),
        (["--pairs", *PAIRS, "--compare", "paper", "--win_ratio", "table.tsv"], "rename one of the two"),
        (["--pairs", "en-de", "--compare", "{lang}.txt"], "--compare: '{lang}.txt' cannot be filled in ('lang')"),
        (["--win_ratio", "table.tsv"], "--win_ratio needs several language pairs"),
        (["--average_languages", "de"], "--average_languages needs several language pairs"),
        (["--pairs", "en-de", "en-fr"], "there is no file reference.en-fr"),
        (["--pairs", "en-de", "en-te", "--compare", "short.{target_lang}"], "short.te: 1 line;"),
        (["--pairs", *PAIRS, "--trials", "0"], "--trials belongs to the tests against other systems"),
        (["--pairs", *PAIRS, "--seed", "0"], "--seed belongs to the tests against other systems"),
    ],
)
def test_a_users_mistake_is_told_before_anything_is_scored(run, capsys, words, message):
    for language in ("de", "te"):
        lines = LINES["good"][: 1 if language == "te" else 2]
        Path(f"short.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.raises(SystemExit) as exit_:
        run(*words)
    shown = capsys.readouterr()
    assert exit_.value.code == 2
    assert message in shown.err.splitlines()[-1]
    assert "bleu" not in shown.out


def test_group_means_are_of_each_metric():
    scores = {pair: {"bleu": bleu, "chrf": bleu + 1} for pair, bleu in OURS.items()}
    found = group_means(scores, ["chrf", "bleu"])
    assert list(found) == ["average", "en-xx", "xx-en"]
    assert found["en-xx"] == pytest.approx({"chrf": 24.0, "bleu": 23.0})
