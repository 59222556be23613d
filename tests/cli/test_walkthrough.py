"""The walkthrough from two text files to a shared model, with models that learn nothing, and mistakes on the way."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from hf_deepwide.errors import UserError, one_line_errors
from hf_deepwide.evaluation.metrics import score

SCRIPT = Path(__file__).parents[2] / "scripts" / "walkthrough.py"
TINY = [
    *("--model.d_model", "16", "--model.encoder_ffn_dim", "16", "--model.decoder_ffn_dim", "16"),
    *("--model.encoder_layers", "1", "--model.decoder_layers", "1", "--training.max_steps", "3"),
    *("--training.warmup_steps", "1"),
    *("--evaluation.num_beams", "1", "--evaluation.max_length_factor", "0", "--evaluation.max_length_offset", "8"),
]


@pytest.fixture
def walk(tmp_path, monkeypatch):
    """A function that runs the walkthrough in an empty folder, and returns its variables."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        return runpy.run_path(str(SCRIPT), run_name="__main__")

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the walkthrough sets its own hook
    return run


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def test_from_two_files_to_a_shared_model(walk, capsys):
    ended = walk("--phrases", "300", *TINY)
    folder = Path("runs", "walkthrough")
    splits = {name: [lines(folder / "data" / f"{name}.{lang}") for lang in ("de", "en")] for name in ended["splits"]}
    assert [len(source) for source, _ in splits.values()] == [240, 30, 30]
    translations = dict(zip(lines(folder / "phrases.de"), lines(folder / "phrases.en"), strict=True))
    pairs = [pair for sides in splits.values() for pair in zip(*sides, strict=True)]
    assert dict(pairs) == translations, "every pair is in one of the splits, and together"
    assert len(pairs) == len(translations)

    assert AutoConfig.from_pretrained(folder / "vanilla").model_type == "vanilla_transformer"
    mat = AutoConfig.from_pretrained(folder / "mat")
    assert (mat.model_type, mat.attention_branches, mat.d_model) == ("mat", 2, 16)
    results = {run: json.loads((folder / run / "results.json").read_text()) for run in ("vanilla", "mat")}
    assert results["mat"]["recipe"]["model"]["init_from"] == str(folder / "vanilla")
    bleu = {run: score(lines(folder / run / "translations.txt"), splits["test"][1])["bleu"] for run in results}
    assert ended["comparison"]["bleu"]["difference"] == pytest.approx(bleu["mat"] - bleu["vanilla"])
    assert (folder / "learning_curves.png").is_file()
    assert (folder / "to-upload" / "modeling_mat.py").is_file()
    assert ended["answer"].stdout.strip() == ended["translation"].strip(), "the shared model translates as ours"

    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/model.safetensors")}
    capsys.readouterr()
    with pytest.raises(UserError, match=r"other data.*--folder"):
        walk("--phrases", "299", *TINY)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/model.safetensors")} == before


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("a\n" * 60, "b\n" * 59, "de.txt: 60 lines; en.txt: 59 lines"),
        ("a\n" * 60, "b\n" * 60, "de.txt: 1 different sentences are too few"),
        ("a\n" * 60, None, "there is no file en.txt"),
    ],
)
def test_mistakes_in_the_files_are_told_before_anything_is_trained(walk, source, target, words):
    for name, text in (("de.txt", source), ("en.txt", target)):
        if text is not None:
            Path(name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        walk("--source", "de.txt", "--target", "en.txt")
    assert not Path("runs").exists()


STOP = ("--model.init_from", "./no", "--tokenizer.path", "./no")  # fails once the data are written


def make_corpus(count):
    Path("de.txt").write_bytes(b"".join(b"a \r b %d\n" % number for number in range(count)))
    Path("en.txt").write_bytes(b"".join(b"c %d\n" % number for number in range(count)))
    return "--source", "de.txt", "--target", "en.txt"


def test_a_stray_carriage_return_is_no_other_data(walk):
    corpus = make_corpus(60)
    for _ in range(2):
        with pytest.raises(UserError, match=r"'\./no'"):
            walk(*corpus, *STOP)


def test_refuses_a_wrong_option_before_writing(walk):
    with pytest.raises(UserError, match="unknown key 'foo'"):
        walk("--training.foo", "1")
    assert not Path("runs").exists()


@pytest.mark.parametrize("place", ["vanilla.yaml", "learning_curves.png", "data/train.de", "notes.txt"])
def test_leaves_foreign_folders_alone(walk, place):
    corpus = make_corpus(60)
    mine = Path("mine", place)
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for folder in ("mine", "mine/../mine"):
        with pytest.raises(UserError, match=r"exists already.*--overwrite"):
            walk(*corpus, "--folder", folder, *STOP)
    assert [path for path in Path("mine").rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


def test_the_corpus_is_never_written_over(walk):
    corpus = make_corpus(60)
    Path("data").mkdir()
    Path("de.txt").rename("data/train.de")
    before = Path("data/train.de").read_bytes()
    with pytest.raises(UserError, match="also an input"):
        walk("--source", "data/../data/train.de", *corpus[2:], "--folder", ".", "--overwrite", *STOP)
    assert Path("data/train.de").read_bytes() == before


def test_a_recipe_that_was_edited_is_not_written_over(walk):
    corpus = make_corpus(60)
    with pytest.raises(UserError, match=r"'\./no'"):
        walk(*corpus, *STOP)
    recipe = Path("runs/walkthrough/vanilla.yaml")
    written = recipe.read_text()
    recipe.write_text("mine")
    with pytest.raises(UserError, match=r"vanilla\.yaml.*--overwrite"):
        walk(*corpus, *STOP)
    assert recipe.read_text() == "mine"
    with pytest.raises(UserError, match=r"'\./no'"):
        walk(*corpus, *STOP, "--overwrite")
    assert recipe.read_text() == written


def test_settings_follow_from_the_size_of_the_corpus(walk, capsys):
    with pytest.raises(UserError, match=r"'\./no'"):
        walk(*make_corpus(60), *STOP)
    said = capsys.readouterr().out
    assert "What to expect of 48 pairs" in said
    training = yaml.safe_load(Path("runs/walkthrough/vanilla.yaml").read_text())["training"]
    updates = training["num_train_epochs"] * 48 * 8 / training["max_tokens"]
    assert 0 < training["warmup_steps"] <= updates / 4


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("line 7 is empty"), "error: line 7 is empty\n"),
        (OSError(28, "No space left", "x.txt"), "error: x.txt: the disk is full\n"),
    ],
)
def test_mistakes_end_a_script_of_cells_in_one_line(error, told, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    one_line_errors()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(type(error), error, None)
    assert ended.value.code == 2
    assert capsys.readouterr().err == told


def test_a_fault_of_a_script_of_cells_keeps_its_trace(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    one_line_errors()
    sys.excepthook(ZeroDivisionError, ZeroDivisionError("ours"), None)
    assert capsys.readouterr().err.rstrip().endswith("ZeroDivisionError: ours")
