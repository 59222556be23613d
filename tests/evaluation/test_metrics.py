"""Scores against naive transcriptions of their formulas, and hand-computed values."""

import math
import random
import re
import socket
import sys

import evaluate
import pytest
from naive_metrics import naive_bleu, naive_chrf
from tiny_run import tiny_values

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation import metric_path
from hf_deepwide.evaluation.metrics import _UNICODE_SPACES, METRICS, score
from hf_deepwide.runs.recipe import check_recipe


def corpus(seed, sentences=60):
    """Versions of sentences with errors, and the sentences. The vocabulary is small, so that n-grams repeat."""
    rng = random.Random(seed)
    words = ["der", "Hund", "läuft", "ÜBER", "die", "Straße", "10\xa0%", "a\u2009b", ",", ".", "Haus\u3000"]
    references = [" ".join(rng.choices(words, k=rng.randint(1, 14))) for _ in range(sentences)]
    hypotheses = [
        " ".join(word if rng.random() < 0.8 else rng.choice(words) for word in line.split(" ") if rng.random() < 0.9)
        for line in references
    ]
    return hypotheses, references


@pytest.mark.parametrize("seed", range(5))
def test_multi_bleu_is_the_formula_on_ascii_separated_tokens(seed):
    hypotheses, references = corpus(seed)
    assert "" in hypotheses or seed  # empty translations are part of the test
    assert score(hypotheses, references)["multi_bleu"] == pytest.approx(naive_bleu(hypotheses, references), abs=1e-9)


def test_moses_bleu_is_the_formula_on_the_tokens_of_moses():
    """The expected tokens are written out. By the language's rules an abbreviation keeps its dot. & is unchanged."""
    hypotheses = ["Der Hund, z.B. Bello, läuft.", "Haus & Hof sind schön!", 'Er sagt: "Nein".']
    references = ["Der Hund, z.B. Bello, läuft schnell.", "Haus & Hof waren schön!", 'Er sagt: "Ja".']
    tokens = [
        ["Der Hund , z.B. Bello , läuft .", "Haus & Hof sind schön !", 'Er sagt : " Nein " .'],
        ["Der Hund , z.B. Bello , läuft schnell .", "Haus & Hof waren schön !", 'Er sagt : " Ja " .'],
    ]
    found = score(hypotheses, references, metrics=["moses_bleu", "multi_bleu"], target_lang="deu_Latn")
    assert found["moses_bleu"] == pytest.approx(naive_bleu(*tokens), abs=1e-9)
    assert found["multi_bleu"] != pytest.approx(found["moses_bleu"], abs=1)
    signature = found["signature"]["moses_bleu"]
    assert re.search(r"tok:sacremoses-[\d.]+-de\b", signature)
    with pytest.raises(UserError, match="moses_bleu splits text by the rules of its language"):
        score(hypotheses, references, metrics=["moses_bleu"])
    lowered = [[line.lower() for line in side] for side in tokens]
    again = score(hypotheses, references, metrics=["moses_bleu"], target_lang="de", lowercase=True)
    assert again["moses_bleu"] == pytest.approx(naive_bleu(*lowered), abs=1e-9)


def test_moses_bleu_lowers_tokens_and_not_text():
    """As in papers. In lowercased text, Moses would not split the dot from `left.`, as a small letter follows."""
    sides = (["He left. Then she came home."], ["He left. Then she came back home."])
    tokens = (["he left . then she came home ."], ["he left . then she came back home ."])
    found = score(*sides, metrics=["moses_bleu"], target_lang="en", lowercase=True)
    assert found["moses_bleu"] == pytest.approx(naive_bleu(*tokens), abs=1e-9)


def test_moses_bleu_names_the_package_that_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(UserError, match=r"hf_deepwide\[corpora\]"):
        score(["a"], ["a"], metrics=["moses_bleu"], target_lang="de")


@pytest.mark.parametrize("seed", range(3))
def test_lowercase_is_scoring_lowercased_text(seed):
    hypotheses, references = corpus(seed)
    lowered = [line.lower() for line in hypotheses], [line.lower() for line in references]
    hypotheses = [line.upper().replace("SS", "ß") for line in hypotheses]
    result = score(hypotheses, references, lowercase=True)
    assert result["multi_bleu"] == pytest.approx(naive_bleu(*lowered), abs=1e-9)
    assert result["bleu"] == score(*lowered)["bleu"]
    assert result["chrf"] == score(*lowered)["chrf"]
    assert all("case:lc" in signature for signature in result["signature"].values())


@pytest.mark.parametrize("seed", range(3))
def test_chrf_is_its_formula(seed):
    hypotheses, references = (
        [line.translate({ord(s): None for s in _UNICODE_SPACES}) for line in side] for side in corpus(seed)
    )
    assert score(hypotheses, references)["chrf"] == pytest.approx(naive_chrf(hypotheses, references), abs=1e-9)


def test_hand_computed_values():
    one_wrong = score(["a b c d e"], ["a b c d f"])  # 4/5 * 3/4 * 2/3 * 1/2 = 1/5
    assert one_wrong["multi_bleu"] == pytest.approx(100 * 0.2**0.25)
    too_short = score(["a b c d"], ["a b c d e f"])
    assert too_short["multi_bleu"] == pytest.approx(100 * math.exp(1 - 6 / 4))
    assert score(["the the the the the the the"], ["the cat is on the mat"])["multi_bleu"] == 0
    assert score([""], ["a b"])["multi_bleu"] == 0


def test_bleu_tokenises_as_mteval_13a():
    plain = ['"No," he said, "it\'s 3.5% of $1,000."', "Dogs (big ones) run!"]
    split = ['" No , " he said , " it\'s 3.5 % of $ 1,000 . "', "Dogs ( big ones ) run !"]
    references = ['"No," she said: "it\'s 3.5% of $2,000."', "Dogs (small ones) run!"]
    references_split = ['" No , " she said : " it\'s 3.5 % of $ 2,000 . "', "Dogs ( small ones ) run !"]
    result = score(plain, references)
    assert result["bleu"] == pytest.approx(naive_bleu(split, references_split), abs=1e-9)
    assert result["multi_bleu"] != result["bleu"]
    assert "tok:13a" in result["signature"]["bleu"]
    assert "version:" in result["signature"]["bleu"]


def test_auto_tokenizer_follows_the_target_language():
    hypotheses, references = ["这是一个测试。"], ["这是一次测试。"]
    chinese = score(hypotheses, references, tokenize="auto", target_lang="zh")
    assert "tok:zh" in chinese["signature"]["bleu"]
    assert chinese["bleu"] > score(hypotheses, references)["bleu"]
    assert "tok:13a" in score(hypotheses, references, tokenize="auto", target_lang="de")["signature"]["bleu"]


@pytest.mark.parametrize("code", ["zh-CN", "zh_Hans", "zho_Hant", "ZH"])
def test_auto_tokenizer_knows_a_language_by_the_first_part_of_its_code(code):
    assert "tok:zh" in score(["这是"], ["这是"], tokenize="auto", target_lang=code)["signature"]["bleu"]


@pytest.mark.parametrize(
    "data", [{"target_lang": "ja-JP"}, {"pairs": ["en-de", "en-ja"]}, {"target_lang": "kor_Hang"}]
)
def test_a_tokenizer_that_is_not_installed_is_told_before_training(data, tmp_path, monkeypatch):
    for package in ("MeCab", "mecab_ko"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ko_mecab", raising=False)
    values = tiny_values(tmp_path)
    values["data"] = {"format": "jsonl", "train": "x", **data}
    values["evaluation"]["tokenize"] = "auto"
    with pytest.raises(UserError, match=r"^tiny.yaml: evaluation.tokenize: auto \(target language (ja|kor)"):
        check_recipe(values, "tiny", "tiny.yaml")
    values["evaluation"]["metrics"] = ["chrf"]
    assert check_recipe(values, "tiny", "tiny.yaml"), "which needs no tokenizer"


def test_all_of_pythons_other_spaces_are_known():
    spaces = {character for character in map(chr, range(0x110000)) if character.isspace()}
    assert spaces - set(" \t\n\r\v\f") == set(_UNICODE_SPACES)


def test_only_the_metrics_asked_for():
    result = score(["a b"], ["a b"], metrics=["chrf"])
    assert result.keys() == {"chrf", "sentences", "signature"}
    assert result["signature"].keys() == {"chrf"}


@pytest.mark.parametrize(
    ("hypotheses", "references", "settings", "message"),
    [
        (["a"] * 3, ["a"] * 4, {}, "translations: 3 lines; references: 4 lines"),
        ([], [], {}, "translations: empty"),
        (["a"], [], {}, "references: empty"),
        ("a b", ["a b"], {}, "translations: one string"),
        (["a"], ["a"], {"metrics": ["bleu", "ter"]}, "metrics: ter; accepted: bleu, chrf, multi_bleu"),
        (["a"], ["a"], {"metrics": []}, "metrics: none given"),
        (["a"], ["a"], {"tokenize": "auto"}, "tokenize: auto chooses .* by the target language; give target_lang"),
        (["a"], ["a"], {"tokenize": "13b"}, "tokenize: '13b'; accepted: auto, none, zh, 13a"),
    ],
)
def test_user_errors(hypotheses, references, settings, message):
    with pytest.raises(UserError, match=message):
        score(hypotheses, references, **settings)


def test_evaluate_module_loads_without_a_network(monkeypatch, tmp_path):
    def refuse(*_):
        raise AssertionError("the metric went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    metric = evaluate.load(metric_path(), cache_dir=str(tmp_path))
    hypotheses, references = corpus(0)
    assert metric.compute(predictions=hypotheses, references=references) == score(hypotheses, references)
    lowercased = metric.compute(predictions=hypotheses, references=references, lowercase=True, metrics=METRICS[:1])
    assert lowercased == score(hypotheses, references, lowercase=True, metrics=METRICS[:1])


@pytest.mark.parametrize(("two", "three"), [("de", "deu_Latn"), ("fr", "fra_Latn"), ("it", "ita_Latn")])
def test_moses_has_the_same_rules_for_codes_of_three_letters(two, three):
    """By the language's rules abbreviations keep their dot, and an apostrophe stays with the word on one side."""
    texts = ["Das ist z. B. Dr. Maier , ca. 3 km weit", "l'eau d'un lac, c.-à-d. ici", "l'acqua dell'anno, ecc. qui"]
    others = [text.replace("ca. 3", "ca . 3").replace("l'", "l '") for text in texts]
    scores = [score(texts, others, metrics=["moses_bleu"], target_lang=code)["moses_bleu"] for code in (two, three)]
    assert scores[0] == scores[1]
    english = score(texts, others, metrics=["moses_bleu"], target_lang="en")["moses_bleu"]
    assert scores[0] != english


@pytest.mark.parametrize("side", ["translations", "references"])
def test_another_unicode_form_is_pointed_out(side, caplog):
    """In another form, the same letters count as different letters."""
    nfc, nfd = ["\u1ecdm\u1ecd", "a"], ["o\u0323mo\u0323", "a"]
    score(nfc, nfc)
    score(nfd, nfd)
    assert caplog.text == ""
    score(*((nfc, nfd) if side == "references" else (nfd, nfc)))
    assert f"{side}: 1 line is not in Unicode's form NFC" in caplog.text


def test_empty_references_are_pointed_out(caplog):
    score(["a", "b", "c"], ["a", "", " "])
    assert "references: 2 lines are empty, the first is line 2" in caplog.text
