"""`scripts/evaluate_translation.py`, run as a user runs it."""

import gzip
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, NllbTokenizer
from watched_generation import watch_generation
from word_models import tiny_model, tiny_tokenizer

from hf_deepwide import VanillaTransformerForConditionalGeneration
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.checkpoint import load_translator
from hf_deepwide.evaluation.evaluate import print_comparisons
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.significance import compare_systems
from hf_deepwide.evaluation.translate import translate

SCRIPT = Path(__file__).parents[2] / "scripts" / "evaluate_translation.py"
SOURCES = ["w1 w2 w3 .", "w4 w5 n't w6 w7", "w8", "w9 w10 w11 w12 w13"] * 3
REFERENCES = ["w2 w3 w1 .", "w4 w5 n't w7 w6", "w8 ,", "w13 w12 w11 w10 w9"] * 3
BETTER = ["w2 w3 w1 .", "w4 w5 n't w7 w5", "w8 ,", "w13 w12 w11 w10"] * 3
SEARCH = ["--num_beams", "2", "--max_length_factor", "0", "--max_length_offset", "6"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with texts and a checkpoint, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, lines in (("sources", SOURCES), ("better", BETTER), ("worse", SOURCES), ("short", BETTER[:-1])):
        Path(f"{name}.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    with gzip.open("references.txt.gz", "wt", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in REFERENCES))
    tiny_model().save_pretrained("checkpoint")
    tiny_tokenizer().save_pretrained("checkpoint")
    return tmp_path


@pytest.fixture
def run(files, monkeypatch):
    """Return a function that runs the script with the given command-line arguments."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--reference", "references.txt.gz", *words])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return run


def test_scores_a_file(run, capsys):
    run("--hypotheses", "better.txt", "--output", "scores.json", "--lowercase")
    report = json.loads(Path("scores.json").read_text(encoding="utf-8"))
    expected = score(BETTER, REFERENCES, lowercase=True)
    assert report["systems"]["better.txt"] == expected
    assert report["settings"]["lowercase"] is True
    shown = capsys.readouterr().out
    assert f"{expected['bleu']:.2f}" in shown
    assert expected["signature"]["bleu"] in shown


def test_a_checkpoint_decodes_the_fast_way(run, monkeypatch):
    VanillaTransformerForConditionalGeneration.from_base(tiny_model()).save_pretrained("checkpoint")
    counts = watch_generation(monkeypatch)
    run("--model", "checkpoint", "--source", "sources.txt", *SEARCH)
    assert counts["twins"] == counts["generate"] > 0


def test_a_checkpoint_searches_as_its_generation_config_says(run):
    own = {"num_beams": 3, "length_penalty": 0.5, "early_stopping": False}
    limits = {"max_length_factor": 1.5, "max_length_offset": 4}
    GenerationConfig.from_pretrained("checkpoint", **own).save_pretrained("checkpoint")
    config = AutoConfig.from_pretrained("checkpoint")
    config.update(limits)
    config.save_pretrained("checkpoint")
    own |= limits
    short = ("--model", "checkpoint", "--source", "sources.txt", "--output", "scores.json", "--overwrite")
    longer = {"num_beams": 2, "max_length_offset": 9}
    for given, changed in (((), {}), (("--num_beams", "2", "--max_length_offset", "9"), longer)):
        run(*short, *given)
        report = json.loads(Path("scores.json").read_text(encoding="utf-8"))
        assert report["systems"]["checkpoint"]["search"] == own | changed
        assert report["settings"].keys() & own.keys() == changed.keys()


def test_scores_a_checkpoint_and_keeps_its_translations(run, capsys):
    run("--model", "checkpoint", "--source", "sources.txt", *SEARCH,
        "--output", "scores.json", "--translations", "out.txt", "--metrics", "chrf")  # fmt: skip
    args = EvaluationArguments(num_beams=2, max_length_factor=0, max_length_offset=6)
    model = AutoModelForSeq2SeqLM.from_pretrained("checkpoint")
    expected = translate(model, AutoTokenizer.from_pretrained("checkpoint"), SOURCES, args)
    assert Path("out.txt").read_text(encoding="utf-8").splitlines() == expected
    system = json.loads(Path("scores.json").read_text(encoding="utf-8"))["systems"]["checkpoint"]
    assert system["chrf"] == score(expected, REFERENCES)["chrf"]
    assert "bleu" not in system
    assert system["sentences_per_second"] == len(SOURCES) / system["seconds"]
    assert f"{system['sentences_per_second']:.2f} sentences a second" in capsys.readouterr().out


def test_a_model_of_one_pair_may_be_told_its_languages(run, caplog):
    """As with `translate`. A pair other than the model's gives a warning."""
    model = tiny_model()
    model.config.update({"source_lang": "de", "target_lang": "en"})
    model.save_pretrained("checkpoint")
    told = ("--model", "checkpoint", "--source", "sources.txt", *SEARCH, "--source_lang")
    run(*told, "de", "--target_lang", "en")
    assert "not used" not in caplog.text
    run(*told, "fr", "--target_lang", "en")
    assert "the languages fr-en are not used" in caplog.text


def test_translations_are_kept_if_scoring_fails(run, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("scoring")

    monkeypatch.setattr("hf_deepwide.evaluation.evaluate.score", fail)
    with pytest.raises(RuntimeError, match="scoring"):
        run("--model", "checkpoint", "--source", "sources.txt", *SEARCH, "--translations", "out.txt")
    assert len(Path("out.txt").read_text(encoding="utf-8").splitlines()) == len(SOURCES)


def test_a_checkpoint_is_loaded_once_for_all_pairs(run, monkeypatch):
    tiny_model().save_pretrained("other")
    tiny_tokenizer().save_pretrained("other")
    loaded = []

    def load(name, *options):
        loaded.append(name)
        return load_translator(name, *options)

    monkeypatch.setattr("hf_deepwide.evaluation.checkpoint.load_translator", load)
    for language in "ab":
        shutil.copy("sources.txt", f"{language}.source")
        shutil.copy("references.txt.gz", f"{language}.target.gz")
    short, tests = (*SEARCH, "--metrics", "chrf"), ("--bootstrap_samples", "9", "--trials", "9")
    files = ("--source", "{source_lang}.source", "--reference", "{target_lang}.target.gz")
    pairs = ("--pairs", "a-b", "b-a")
    run("--model", "checkpoint", "--compare", "other", *short, *tests, *files, *pairs, "--output", "both.json")
    assert loaded == ["checkpoint", "other"]
    run("--model", "checkpoint", "--source", "sources.txt", *short, "--output", "one.json")
    pairs = json.loads(Path("both.json").read_text(encoding="utf-8"))["pairs"]
    alone = json.loads(Path("one.json").read_text(encoding="utf-8"))["systems"]["checkpoint"]["chrf"]
    assert [pairs[pair]["systems"]["checkpoint"]["chrf"] for pair in ("a-b", "b-a")] == [alone, alone]


def test_a_compared_folder_without_a_checkpoint_is_told_before_translating(run, monkeypatch, capsys):
    Path("empty").mkdir()
    monkeypatch.setattr("hf_deepwide.evaluation.evaluate.translate", lambda *_, **__: pytest.fail("it translated"))
    with pytest.raises(SystemExit):
        run("--model", "checkpoint", "--compare", "empty", "--source", "sources.txt", *SEARCH)
    assert "error: empty cannot be loaded: " in capsys.readouterr().err


def test_an_adapter_is_evaluated_with_its_model(run):
    base = AutoModelForSeq2SeqLM.from_pretrained("checkpoint")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False))
    adapted.save_pretrained("adapter")
    tiny_tokenizer().save_pretrained("adapter")
    short = (
        "--source",
        "sources.txt",
        *SEARCH,
        "--bootstrap_samples",
        "9",
        "--trials",
        "9",
        "--output",
        "scores.json",
    )
    run("--model", "adapter", "--compare", "checkpoint", *short)
    first = json.loads(Path("scores.json").read_text(encoding="utf-8"))["systems"]
    run("--model", "checkpoint", "--compare", "adapter", *short, "--overwrite")
    second = json.loads(Path("scores.json").read_text(encoding="utf-8"))["systems"]
    assert first["adapter"]["chrf"] == second["adapter"]["chrf"] != second["checkpoint"]["chrf"]


def test_an_adapter_without_its_model_is_told_before_translating(run, monkeypatch, capsys):
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text('{"base_model_name_or_path": "gone/away/model"}')
    monkeypatch.setattr("hf_deepwide.evaluation.evaluate.translate", lambda *_, **__: pytest.fail("it translated"))
    with pytest.raises(SystemExit):
        run("--model", "checkpoint", "--compare", "adapter", "--source", "sources.txt", *SEARCH)
    assert "error: gone/away/model cannot be loaded: " in capsys.readouterr().err


def test_models_that_search_otherwise_are_pointed_out_once(run, caplog):
    shutil.copytree("checkpoint", "other")
    config = AutoConfig.from_pretrained("other")
    config.update({"max_length_factor": 1.0, "max_length_offset": 5})
    config.save_pretrained("other")
    for language in "ac":
        shutil.copy("sources.txt", f"{language}.source")
        shutil.copy("worse.txt", f"{language}.worse")
    short = ("--num_beams", "1", "--bootstrap_samples", "9", "--trials", "9", "--metrics", "chrf")
    files = ("--source", "{source_lang}.source", "--pairs", "a-b", "c-b")
    run("--model", "checkpoint", "--compare", "{source_lang}.worse", "other", *files, *short)
    told = "checkpoint and other were translated with different settings: max_length_factor 2.0 and 1.0, max_length_"
    assert caplog.text.count(told) == 1
    caplog.clear()
    run("--model", "checkpoint", "--compare", "{source_lang}.worse", "other", *files, *short, *SEARCH[2:])
    assert "different settings" not in caplog.text


def test_a_tokenizer_that_is_not_installed_is_told_before_translating(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    monkeypatch.setattr("hf_deepwide.evaluation.evaluate.translate", lambda *_, **__: pytest.fail("it translated"))
    auto = ["--tokenize", "auto", "--target_lang", "ja"]
    with pytest.raises(SystemExit):
        run("--model", "checkpoint", "--source", "sources.txt", *SEARCH, *auto)
    assert "error: tokenize: auto (target language ja): " in capsys.readouterr().err


def test_compares_systems(run, capsys):
    run("--hypotheses", "worse.txt", "--compare", "better.txt", "checkpoint", "--source", "sources.txt", *SEARCH,
        "--output", "scores.json", "--metrics", "bleu", "--bootstrap_samples", "200", "--trials", "300",
        "--seed", "5")  # fmt: skip
    report = json.loads(Path("scores.json").read_text(encoding="utf-8"))
    expected = compare_systems(SOURCES, BETTER, REFERENCES, samples=200, trials=300, seed=5, metrics=["bleu"])
    assert report["baseline"] == "worse.txt"
    assert report["comparisons"]["better.txt"] == expected
    assert report["comparisons"]["checkpoint"]["bleu"]["difference"] < 0
    assert f"{expected['bleu']['p_randomization']:.4f} (randomisation)" in capsys.readouterr().out


def test_a_p_is_never_printed_as_0(capsys):
    print_comparisons("a", {"b": {"bleu": {"difference": 1.0, "p_bootstrap": 1e-6, "p_randomization": 0.03}}})
    assert "p = < 0.0001 (bootstrap), 0.0300 (randomisation)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of --model (a checkpoint) and --hypotheses"),
        (["--hypotheses", "better.txt", "--model", "checkpoint"], "give one of --model"),
        (["--model", "checkpoint"], "checkpoint is a checkpoint: give its input with --source FILE"),
        (["--hypotheses", "better.txt", "--compare", "checkpoint"], "give its input with --source FILE"),
        (["--hypotheses", "better.txt", "--compare", "owner/name"], "owner/name is a checkpoint: give its input with"),
        (["--hypotheses", "better.txt", "--compare", "owner/name", "--source", "sources.txt"], "and from the Hub: "),
        (["--hypotheses", "better.txt", "--compare", "empty/name"], "there is no file empty/name"),
        (["--hypotheses", "missing.txt"], "there is no file missing.txt"),
        (["--hypotheses", "short.txt"], "short.txt: 11 lines; references.txt.gz: 12 lines"),
        (["--hypotheses", "better.txt", "--compare", "short.txt"], "short.txt: 11 lines"),
        (["--hypotheses", "better.txt", "--compare", "better.txt"], "--compare: better.txt is named twice"),
        (["--hypotheses", "better.txt", "--output", "worse.txt"], "worse.txt exists already; give another place"),
        (["--hypotheses", "better.txt", "--output", "no/s.json"], "there is no folder no; make it first"),
        (["--hypotheses", "better.txt", "--translations", "t.txt"], "--translations is for what --model translates"),
        (["--hypotheses", "better.txt", "--num_beams", "0"], "error: --num_beams is 0"),
        (["--hypotheses", "better.txt", "--num_beams", "7"], "--num_beams is about translating"),
        (["--hypotheses", "better.txt", "--compare", "no{x}.txt"], "there is no file no{x}.txt"),
        (["--hypotheses", "better.txt", "--num_beams", "7", "--pairs", "de-en"], "--num_beams is about translating"),
        (["--model", "checkpoint", "--source", "short.txt"], "short.txt: 11 lines"),
        (["--model", "empty", "--source", "sources.txt"], "empty cannot be loaded: "),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_line(run, capsys, words, message):
    Path("empty").mkdir()
    with pytest.raises(SystemExit) as exit_:
        run(*words)
    error = capsys.readouterr().err.splitlines()[-1]
    assert exit_.value.code == 2
    assert error.startswith("error: ")
    assert message in error
    assert Path("worse.txt").read_text(encoding="utf-8").splitlines() == SOURCES


MODEL = ["--model", "checkpoint", "--source", "sources.txt", *SEARCH]
PAIRS = ["--pairs", "xx-better", "xx-worse", "--reference", "{target_lang}.gz"]


@pytest.mark.parametrize(
    ("words", "harmed"),
    [
        (["--hypotheses", "better.txt", "--output", "references.txt.gz"], "references.txt.gz"),
        (["--hypotheses", "better.txt", "--output", "better.txt"], "better.txt"),
        (["--hypotheses", "better.txt", "--compare", "worse.txt", "--output", "./worse.txt"], "worse.txt"),
        ([*MODEL, "--translations", "sources.txt"], "sources.txt"),
        ([*MODEL, "--translations", "checkpoint/../sources.txt"], "sources.txt"),
        ([*MODEL, "--translations", "link.txt"], "sources.txt"),
        ([*MODEL, "--translations", "hard.txt"], "sources.txt"),
        ([*MODEL, "--output", "checkpoint/config.json"], "checkpoint/config.json"),
        ([*MODEL, "--output", "new.txt", "--translations", "./new.txt"], "sources.txt"),
        ([*MODEL, "--output", "checkpoint"], "checkpoint/config.json"),
        (["--hypotheses", "{pair}.txt", *PAIRS, "--output", "worse.txt"], "worse.txt"),
        ([*MODEL, *PAIRS, "--compare", "{target_lang}.txt", "--translations", "{target_lang}.txt"], "worse.txt"),
    ],
)  # fmt: skip
def test_overwrite_never_writes_over_what_is_read(run, capsys, words, harmed):
    Path("link.txt").symlink_to("sources.txt")
    Path("hard.txt").hardlink_to("sources.txt")
    for name in ("better", "worse"):
        Path(f"xx-{name}.txt").symlink_to(f"{name}.txt")
        Path(f"{name}.gz").symlink_to("references.txt.gz")
    before = Path(harmed).read_bytes()
    with pytest.raises(SystemExit) as exit_:
        run(*words, "--overwrite")
    assert exit_.value.code == 2
    assert Path(harmed).read_bytes() == before
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not Path("new.txt").exists()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (
            ["--hypotheses", "{pair}.txt"],
            "--reference: references.txt.gz would be the text of several languages (b, w)",
        ),
        (["--hypotheses", "better.txt", "--reference", "{target_lang}.gz"], "--hypotheses: better.txt would be"),
        (
            ["--hypotheses", "{pair}.txt", "--reference", "{pair}.gz", "--compare", "better.txt"],
            "--compare: better.txt",
        ),
    ],
)
@pytest.mark.parametrize("pairs", [["xx-b", "xx-w"], ["xx-zh-b", "xx-zh-w"]])
def test_one_text_is_not_of_several_languages(run, capsys, words, option, pairs):
    with pytest.raises(SystemExit):
        run(*words, "--pairs", *pairs)
    assert option.replace("(b, w)", f"({pairs[0][3:]}, {pairs[1][3:]})") in capsys.readouterr().err


def test_one_file_does_not_hold_the_translations_of_two_sources(run, capsys):
    for name in ("one.txt", "{target_lang}.txt"):
        with pytest.raises(SystemExit):
            run("--hypotheses", name, "--pairs", "de-en", "fr-en")
        assert "would be the translations of several language pairs (de-en, fr-en)" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--num_beams", "--max_tokens"])
def test_options_of_translating_are_for_checkpoints(run, capsys, option):
    with pytest.raises(SystemExit):
        run("--hypotheses", "better.txt", "--compare", "worse.txt", option, "3")
    assert f"error: {option} is about translating" in capsys.readouterr().err


def test_a_link_is_replaced_and_not_followed(run):
    Path("link.json").symlink_to("worse.txt")
    with pytest.raises(SystemExit):
        run("--hypotheses", "better.txt", "--output", "link.json")
    run("--hypotheses", "better.txt", "--output", "link.json", "--overwrite")
    assert Path("worse.txt").read_text(encoding="utf-8").splitlines() == SOURCES
    assert not Path("link.json").is_symlink()


def test_overwrite_replaces(run):
    Path("scores.json").write_text("old", encoding="utf-8")
    run("--hypotheses", "better.txt", "--output", "scores.json", "--overwrite")
    assert "systems" in json.loads(Path("scores.json").read_text(encoding="utf-8"))


def test_language_codes_reach_tokenizer_and_model(run):
    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", "w1"])}
    tokenizer = NllbTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=["deu_Latn", "eng_Latn"])
    tokenizer.save_pretrained("codes")
    model = tiny_model()
    model.save_pretrained("codes")
    languages = ["--source_lang", "deu_Latn", "--target_lang", "eng_Latn"]
    run("--model", "codes", "--source", "sources.txt", *SEARCH, "--translations", "out.txt", *languages)
    tokenizer.src_lang = "deu_Latn"
    model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids("eng_Latn")
    args = EvaluationArguments(num_beams=2, max_length_factor=0, max_length_offset=6)
    assert Path("out.txt").read_text(encoding="utf-8").splitlines() == translate(model, tokenizer, SOURCES, args)
    with pytest.raises(SystemExit):
        run("--model", "codes", "--source", "sources.txt", "--target_lang", "xx")
