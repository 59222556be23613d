"""The command `hf-deepwide`: its help is quick, its recipes are found, and text of any length is translated."""

import errno
import fcntl
import io
import json
import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
import yaml
from safetensors.torch import save_file

import hf_deepwide_cli
from hf_deepwide.data.text_files import decode_line
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.stream import check_stream, translate_stream
from hf_deepwide.progress import shows_bars
from hf_deepwide.runs.classification import ClassificationRecipe
from hf_deepwide.runs.masked_lm import MaskedLMRecipe
from hf_deepwide.runs.recipe import PACKAGED, Recipe, differences, load_recipe, packaged_recipes, read_values
from hf_deepwide.runs.yaml_values import parse_yaml
from hf_deepwide_cli import packaged
from hf_deepwide_cli.packaged import header, whole

MAIN = ("-c", "from hf_deepwide_cli import main; main()")
LINES = ["drei", "", "eins zwei", "vier", "fünf\u2028sechs"]


def call(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", *words])
    hf_deepwide_cli.main()


def test_help_of_every_command_needs_no_torch():
    code = (
        "import sys, hf_deepwide_cli as cli\n"
        "for command in cli.COMMANDS:\n"
        "    sys.argv = ['hf-deepwide', command, '--help']\n"
        "    try:\n"
        "        cli.main()\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 0, command\n"
        "assert not {'torch', 'transformers', 'hf_deepwide'} & set(sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for command in hf_deepwide_cli.COMMANDS:
        assert f"hf-deepwide {command}" in ended.stdout


def test_a_wrong_command_names_the_nearest(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "trian")
    assert ended.value.code == 2
    assert "'train'" in capsys.readouterr().err


def test_an_unknown_option_ends_in_one_line_with_the_nearest(monkeypatch, capsys):
    for given, told in (("--beam", "did you mean --num_beams?"), ("--xyzzy", "`hf-deepwide translate --help` lists")):
        with pytest.raises(SystemExit) as ended:
            call(monkeypatch, "translate", "--model", "m", given, "5")
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: unrecognized arguments: ")
        assert told in line


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_deepwide_cli.compare.run", interrupted)
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "compare", "a", "b")
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_packaged_recipes_are_listed_and_copied_whole(monkeypatch, capsys, tmp_path):
    call(monkeypatch, "recipes")
    listed = capsys.readouterr().out
    assert "quickstart" in listed
    assert "base/" not in listed
    call(monkeypatch, "recipes", "multi30k_en_de_mat_scratch", "--copy", str(tmp_path))
    copied = tmp_path / "multi30k_en_de_mat_scratch.yaml"
    assert load_recipe(copied).values == load_recipe("multi30k_en_de_mat_scratch").values
    assert "extends" not in yaml.safe_load(copied.read_text(encoding="utf-8"))
    with pytest.raises(SystemExit):
        call(monkeypatch, "recipes", "multi30k_en_de_mat_scratch", "--copy", str(copied))
    assert "exists already" in capsys.readouterr().err


def test_recipes_shows_each_packaged_recipe_whole_with_its_comments():
    assert packaged.folder() == PACKAGED
    assert packaged.names() == packaged_recipes()
    for name in packaged.names():
        text = packaged.whole(PACKAGED / f"{name}.yaml")
        kinds = {"masked_lm": MaskedLMRecipe, "classification": ClassificationRecipe}
        kind = kinds.get(name.partition("/")[0], Recipe)
        shown = parse_yaml(text, name)
        assert differences(shown, read_values(PACKAGED / f"{name}.yaml", kind)) == [], name
        assert text.startswith("# ")
        assert text.count(" # ") > 20, name


def test_recipes_loads_no_pytorch(tmp_path):
    """Listing, showing and copying import neither PyTorch nor Transformers nor the library, so they are quick."""
    code = (
        "import sys; from hf_deepwide_cli import main; main(); "
        "assert not {'torch', 'transformers', 'hf_deepwide'} & set(sys.modules)"
    )
    for words in (
        [],
        ["quickstart"],
        ["multi30k_en_de_mat"],
        ["multi30k_en_de_mat", "--copy", str(tmp_path / "my.yaml")],
    ):
        ended = subprocess.run(
            [sys.executable, "-c", code, "recipes", *words], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout
    assert load_recipe(tmp_path / "my.yaml").values == load_recipe("multi30k_en_de_mat").values
    assert [file.name for file in tmp_path.iterdir()] == ["my.yaml"]


def test_a_copied_recipe_fits_two_files(monkeypatch, capsys, tmp_path):
    """Small files make small batches and a short warm-up; the model and the learning rate do not change."""
    files = [tmp_path / "my.de", tmp_path / "my.en"]
    for file in files:
        file.write_text("Das ist ein Satz mit acht Wörtern darin.\n" * 2_000, encoding="utf-8")
    copied = tmp_path / "small.yaml"
    call(monkeypatch, "recipes", "multi30k_en_de_vanilla", "--fit", *map(str, files), "--copy", str(copied))
    assert "2,000 pairs" in capsys.readouterr().err
    fitted, packaged = load_recipe(copied), load_recipe("multi30k_en_de_vanilla")
    said = {line.partition(" # ")[2] for line in whole(PACKAGED / "multi30k_en_de_vanilla.yaml").splitlines()}
    kept = {line.partition(" # ")[2] for line in copied.read_text(encoding="utf-8").splitlines()}
    assert kept < said, "comments stay, but for that on the number of epochs"
    assert len(said - kept) == 1
    assert fitted.values["model"] == packaged.values["model"]
    training = fitted.values["training"]
    assert training["learning_rate"] == packaged.values["training"]["learning_rate"]
    assert training["max_tokens"] < packaged.values["training"]["max_tokens"]
    steps = 2_000 * 14 / training["max_tokens"] * training["num_train_epochs"]
    assert steps / 20 < training["warmup_steps"] < steps / 5
    call(monkeypatch, "recipes", "iwslt14_de_en_mat", "--fit", *map(str, files), "--copy", str(tmp_path / "long.yaml"))
    long = load_recipe(tmp_path / "long.yaml")
    assert long.values["training"]["max_tokens"] >= long.data.max_length == 1024, "the longest pair fits into a batch"

    files[1].write_text("one line\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        call(monkeypatch, "recipes", "multi30k_en_de_vanilla", "--fit", *map(str, files))
    assert "2,000 lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "learns"),
    [
        ("wmt19_en_de_mat", True),
        ("multi30k_en_de_transformer_tiny", False),
        ("multi30k_en_de_mat", False),
        ("finetune_mbart", False),
        ("code_java_mat", False),
    ],
)
def test_a_fitted_recipe_trains_for_its_epochs(name, learns, monkeypatch, capsys, tmp_path):
    """In the number of updates that the recipe sets, small files would be read hundreds of times."""
    files = [tmp_path / "my.de", tmp_path / "my.en"]
    for file in files:
        file.write_text("Das ist ein Satz mit acht Wörtern darin.\n" * 2_000, encoding="utf-8")
    copied = tmp_path / "small.yaml"
    call(monkeypatch, "recipes", name, "--fit", *map(str, files), "--copy", str(copied))
    fitted, packaged = load_recipe(copied), load_recipe(name)
    training = fitted.training_arguments()
    assert training.max_steps == -1
    assert training.gradient_accumulation_steps == 1
    assert (training.eval_strategy, training.save_strategy) == ("epoch", "epoch")
    assert "eval_steps" not in fitted.values["training"]
    assert (fitted.values["tokenizer"] != packaged.values["tokenizer"]) is learns
    assert ("vocab_size" in header(copied.read_text(encoding="utf-8"))) is learns
    assert ("what to expect" in capsys.readouterr().err) is (packaged.init_from is None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("quickstart", "data.format: phrases does not read two"),
        ("wmt14_en_de_vanilla", "data.format: datasets does not"),
        ("multi30k_en_xx_vanilla", "data.pairs names several"),
    ],
)
def test_a_recipe_that_does_not_train_on_two_files_is_not_fitted(name, told, monkeypatch, capsys, tmp_path):
    file = tmp_path / "text"
    file.write_text("ein Satz\n" * 20, encoding="utf-8")
    with pytest.raises(SystemExit):
        call(monkeypatch, "recipes", name, "--fit", str(file), str(file))
    shown = capsys.readouterr()
    assert told in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        ("classification/mrpc", ClassificationRecipe),
        ("masked_lm/multi30k_masked_lm", MaskedLMRecipe),
        ("multi30k_en_de_vanilla", Recipe),
    ],
)
def test_a_copy_of_any_recipe_loads(base, kind, monkeypatch, capsys, tmp_path):
    """The recipe may also be in a user's own folder, whatever the folder's name."""
    (tmp_path / "base.yaml").write_text(packaged.whole(PACKAGED / f"{base}.yaml"), encoding="utf-8")
    mine, copied = tmp_path / "mine.yaml", tmp_path / "copy.yaml"
    mine.write_text("# Mine.\nextends: base.yaml\ntraining: {warmup_steps: 7}\n", encoding="utf-8")
    call(monkeypatch, "recipes", str(mine), "--copy", str(copied))
    assert load_recipe(copied, kind=kind).values == load_recipe(mine, kind=kind).values
    assert load_recipe(copied, kind=kind).values["training"]["warmup_steps"] == 7


def test_a_copy_is_merged_where_the_file_begins_with_a_mark_of_its_byte_order(monkeypatch, tmp_path):
    mine, copied = tmp_path / "mine.yaml", tmp_path / "copy.yaml"
    (tmp_path / "base.yaml").write_text(packaged.whole(PACKAGED / "quickstart.yaml"), encoding="utf-8")
    mine.write_bytes("\ufeff# Mine.\r\nextends: base.yaml\r\ntraining: {warmup_steps: 7}\r\n".encode())
    call(monkeypatch, "recipes", str(mine), "--copy", str(copied))
    assert copied.read_text(encoding="utf-8").startswith("# Mine.")
    assert load_recipe(copied).values == load_recipe(mine).values


def test_closed_streams_end_in_no_trace(monkeypatch):
    """A scheduler may start a command without standard input and output."""
    monkeypatch.setattr(sys, "stdout", None)
    assert hf_deepwide_cli.with_or_without_reader(lambda: print("lost", flush=True) or "done") == "done"
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed; name a file with --input"):
        check_stream("-", "-")


def test_a_full_disk_is_said_in_one_line_by_light_commands_too(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hf_deepwide_cli.recipes.run_light", full)
    monkeypatch.setattr("hf_deepwide_cli.recipes.run", full)
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "recipes", "quickstart")
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: the disk is full\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this device")
@pytest.mark.parametrize("start", [MAIN, ("-u", *MAIN)])
@pytest.mark.parametrize("words", [("--help",), ("--version",), ("recipes",), ("recipes", "quickstart")])
def test_printing_to_a_full_disk_ends_in_one_line(start, words):
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run([sys.executable, *start, *words], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (2, b"error: the disk is full\n")


@pytest.mark.parametrize("words", [("--help",), ("evaluate", "--help"), ("recipes", "quickstart")])
def test_what_a_terminal_has_no_letter_for_is_written_by_its_number(words):
    ended = subprocess.run(
        [sys.executable, *MAIN, *words],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"\\u2026" in ended.stdout


@pytest.mark.parametrize("name", ["classification/mrpc", "masked_lm/multi30k_masked_lm"])
def test_only_a_translation_recipe_fits_two_files(name, monkeypatch, capsys, tmp_path):
    for side in ("de", "en"):
        (tmp_path / f"my.{side}").write_text("ein Satz\n" * 20, encoding="utf-8")
    copied = tmp_path / "small.yaml"
    files = (str(tmp_path / "my.de"), str(tmp_path / "my.en"))
    with pytest.raises(SystemExit):
        call(monkeypatch, "recipes", name, "--fit", *files, "--copy", str(copied))
    assert "--fit: a recipe that trains a translation model is accepted" in capsys.readouterr().err
    assert not copied.exists()


EVALUATE = ("evaluate", "--hypotheses", "de", "--reference", "en", "--metrics", "chrf", "--output", "scores.json")


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (MAIN, ("recipes", "quickstart")),
        (("-u", *MAIN), ("recipes",)),
        (("-u", *MAIN), ("--help",)),
        (("-u", "-m", "hf_deepwide.cli"), EVALUATE),
    ],
)
def test_files_are_written_when_nobody_reads_what_is_printed(start, words, tmp_path):
    """Unbuffered, the first line notices that the reader has gone. Otherwise the end of the program notices it."""
    for name in ("de", "en"):
        (tmp_path / name).write_text("one line\n", encoding="utf-8")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, *start, *words]
    ended = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "scores.json").is_file() is (words == EVALUATE)


def test_the_schema_accepts_packaged_keys(monkeypatch, capsys):
    call(monkeypatch, "schema")
    schema = json.loads(capsys.readouterr().out)
    values = load_recipe("quickstart").values
    for section, keys in values.items():
        assert set(keys) <= set(schema["properties"][section]["properties"]), section
    assert schema["properties"]["data"]["properties"]["max_length"]["type"] == "integer"
    assert schema["properties"]["model"]["properties"]["drop_unit"]["enum"] == ["branch", "head", "chunk"]


@pytest.mark.parametrize(("kind", "recipe"), [("masked-lm", MaskedLMRecipe), ("classification", ClassificationRecipe)])
def test_the_schema_of_a_task_names_its_families(monkeypatch, capsys, kind, recipe):
    call(monkeypatch, "schema", kind)
    named = json.loads(capsys.readouterr().out)["properties"]["model"]["properties"]["family"]["examples"]
    assert "mat_roberta" in named
    assert set(named) <= set(recipe.families())


@pytest.mark.parametrize("kind", ["", "masked-lm", "classification"])
def test_the_schema_explains_the_keys_of_its_own_task(monkeypatch, capsys, kind):
    call(monkeypatch, "schema", *([kind] if kind else []))
    sections = json.loads(capsys.readouterr().out)["properties"]
    for section in ("data", "tokenizer", "training"):
        assert all("description" in told for told in sections[section]["properties"].values()), section
    assert ("pairs" in sections["data"]["properties"]["train"]["description"]) is (kind == "")
    assert sections["training"]["properties"]["learning_rate"]["description"].startswith("peak")
    smoothing = sections["training"]["properties"].get("label_smoothing_factor", {"description": ""})
    assert ("vocabulary" in smoothing["description"]) is (kind == "")
    assert ("bpe_dropout" in sections["tokenizer"]["properties"]["path"]["description"]) is (kind == "")
    assert ("depthwise_lstm" in sections["model"]["properties"]["family"]["description"]) is (kind == "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--num_beams", "0"), "error: --num_beams is 0; accepted: 1 or more"),
        (("--max_tokens", "0"), "error: --max_tokens is 0"),
        (("--precision", "fp8"), "error: --precision: 'fp8'; accepted: float32"),
    ],
)
def test_translate_names_its_options_and_no_keys_of_a_recipe(words, told, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "translate", "--model", "nowhere", *words)
    assert told in capsys.readouterr().err


def upper(lines, first_line):
    return [line.upper() for line in lines]


@pytest.mark.parametrize("buffer", [1, 2, 100])
def test_lines_keep_their_number_and_order(tmp_path, buffer):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(LINES), encoding="utf-8")  # the last line has no newline
    assert translate_stream(upper, str(source), str(target), buffer=buffer) == len(LINES)
    assert target.read_text(encoding="utf-8") == "".join(f"{line.upper()}\n" for line in LINES)


def test_an_interrupted_translation_is_continued(tmp_path):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    seen = []

    def fail_later(lines, first_line):
        seen.extend(lines)
        assert lines[0] == LINES[first_line - 1]
        if len(seen) > 2:
            raise KeyboardInterrupt
        return upper(lines, first_line)

    with pytest.raises(KeyboardInterrupt):
        translate_stream(fail_later, str(source), str(target), buffer=2)
    with target.open("a", encoding="utf-8") as file:
        file.write("HALF A LI")  # a killed process may leave this
    with pytest.raises(UserError, match="--resume"):
        translate_stream(upper, str(source), str(target))
    begins = []

    def told(lines, first_line):
        begins.append(first_line)
        return upper(lines, first_line)

    assert translate_stream(told, str(source), str(target), resume=True, buffer=1) == len(LINES) - 2
    assert begins == [*range(3, len(LINES) + 1)]
    assert target.read_text(encoding="utf-8").split("\n")[:-1] == upper(LINES, 1)
    assert translate_stream(upper, str(source), str(target), resume=True) == 0
    source.write_text("one line\n", encoding="utf-8")
    with pytest.raises(UserError, match="more than"):
        translate_stream(upper, str(source), str(target), resume=True)


@pytest.mark.parametrize("name", ["out.txt", "out.txt.gz"])
def test_two_processes_do_not_write_one_translation(tmp_path, name):
    """Another process may be writing when this one begins, or may have written since this one counted the lines."""
    source, target = tmp_path / "in.txt", tmp_path / name
    source.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    how = {"overwrite": True} if target.suffix == ".gz" else {"resume": True}

    def another_writes(lines, first_line):
        with target.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(UserError, match="another process is writing"):
                translate_stream(upper, str(source), str(target), **how)
        return upper(lines, first_line)

    assert translate_stream(another_writes, str(source), str(target), **how) == len(LINES)
    whole = target.read_bytes()
    if "overwrite" in how:
        return
    source.write_text("".join(f"{line}\n" for line in [*LINES, *LINES]), encoding="utf-8")

    def another_has_written(lines, first_line):
        target.write_bytes(whole + b"MEANWHILE\n")
        return upper(lines, first_line)

    with pytest.raises(UserError, match="has changed since this command began"):
        translate_stream(another_has_written, str(source), str(target), resume=True)
    assert target.read_bytes() == whole + b"MEANWHILE\n"


@pytest.mark.parametrize(
    "words",
    [["score", "--model", "none", "--source", "a", "--target", "a"], ["compare", "a", "b", "--reference", "a"]],
)
def test_an_output_that_cannot_be_written_is_told_before_the_work(words, monkeypatch, capsys, tmp_path):
    """The model does not exist, and the second file has another number of lines. The output is checked before them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("a\n")
    (tmp_path / "b").write_text("a\nb\n")
    (tmp_path / "folder").mkdir()
    for output, told in (("none/x", "none/x: there is no folder none; make it first"), ("folder", "is a folder")):
        with pytest.raises(SystemExit):
            call(monkeypatch, *words, "--output", output)
        assert told in capsys.readouterr().err


def test_an_input_is_never_the_output(tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("kept\n")
    (tmp_path / "link.txt").symlink_to(source)
    with pytest.raises(UserError, match="input"):
        translate_stream(upper, str(source), str(tmp_path / "link.txt"), overwrite=True)
    assert source.read_text() == "kept\n"
    with pytest.raises(UserError, match="is a folder; give the name of a file"):
        translate_stream(upper, str(source), str(tmp_path))


@pytest.mark.parametrize("how", [{"overwrite": True}, {"resume": True}])
@pytest.mark.parametrize("wrong", ["missing", "no text", "too long a target", "translator"])
def test_what_cannot_be_translated_leaves_the_output_as_it_was(tmp_path, how, wrong):
    source, target, kept = tmp_path / "in.txt", tmp_path / "out.txt", b"A\nB\nHALF A LI"
    target.write_bytes(kept)
    text = {"no text": b"a\nb\n" * 3000 + b"\xff\n", "too long a target": b"a\n", "translator": b"a\nb\nc\n"}
    if wrong in text:
        source.write_bytes(text[wrong])
    if wrong == "too long a target" and how == {"overwrite": True}:
        assert translate_stream(upper, str(source), str(target), **how) == 1
        return

    def refuse(lines, first_line):
        raise UserError("--target_lang xx: no such language")

    words = {"no text": "UTF-8", "too long a target": "2 lines, more than", "translator": "no such language"}
    with pytest.raises(UserError, match=words.get(wrong, "there is no file")):
        translate_stream(refuse if wrong == "translator" else upper, str(source), str(target), **how)
    assert target.read_bytes() == kept


def test_standard_input_and_output_and_compressed_files(tmp_path, monkeypatch, capfdbinary):
    source = tmp_path / "in.txt.gz"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"eins\n\nzwei")))
    translate_stream(upper, "-", str(source))
    translate_stream(lambda lines, _: lines, str(source), "-")
    sys.stdout.flush()
    assert capfdbinary.readouterr().out == b"EINS\n\nZWEI\n"


def test_no_bar_stands_between_translations_on_a_terminal(tmp_path, monkeypatch, capsysbinary):
    """No bar is shown if standard output and standard error are both a terminal."""
    (tmp_path / "in.txt").write_text("eins\nzwei\n")
    shown = []

    def translate(lines, first_line):
        shown.append(shows_bars())
        return lines

    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        translate_stream(translate, str(tmp_path / "in.txt"), "-", buffer=1)
    assert shown == [False, False, True, True]


def test_files_are_looked_at_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hf_deepwide.evaluation.checkpoint.load_any_translator", lambda *_: pytest.fail("loaded"))
    (tmp_path / "there.txt").write_text("a\n")
    there, missing = str(tmp_path / "there.txt"), str(tmp_path / "missing.txt")
    for words, told in (
        (("--input", there, "--output", there), "is also the input"),
        (("--input", missing), "there is no file"),
        (("--input", there, "--output", missing, "--resume", "--overwrite"), "give only one"),
    ):
        with pytest.raises(SystemExit):
            call(monkeypatch, "translate", "--model", "me/model", *words)
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plot", "curves", "a", "--outp", "b"), "are required: --output"),
        (("plot", "layers", "a", "--sead", "3"), "did you mean --seed?"),
        (("plot", "joints", "a", "--seed", "3"), "--seed 3; `hf-deepwide plot --help` lists"),
        (("train", "mine.yaml", "training.max_steps=5"), "to set a key, write --training.max_steps 5"),
        (("evaluate", "--hypotheses", "a", "--reference", "b", "--trials", "9"), "--trials belongs to"),
    ],
)
def test_options_that_do_not_fit_are_told_of(words, told, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, *words)
    assert told in capsys.readouterr().err


def test_an_empty_file_gives_an_empty_file(tmp_path):
    (tmp_path / "in.txt").write_text("")
    assert translate_stream(upper, str(tmp_path / "in.txt"), str(tmp_path / "out.txt")) == 0
    assert (tmp_path / "out.txt").read_text() == ""


def test_memory_does_not_grow_with_the_text(tmp_path):
    """At most one buffer of lines is in memory at a time."""
    source, output, count = tmp_path / "in.txt", tmp_path / "out.txt", 10_000
    source.write_text("x\n" * count)
    held, ahead = [], []

    def translate(lines, first_line):
        held.append(len(lines))
        ahead.append(read.call_count - 1 - count - sum(held))  # a first pass checks and counts the lines
        return lines

    with patch("hf_deepwide.data.text_files.decode_line", wraps=decode_line) as read:
        translate_stream(translate, str(source), str(output), buffer=64)
    assert (sum(held), max(held)) == (count, 64)
    assert read.call_count == 1 + 2 * count
    assert max(ahead) <= 64, "lines are read when they are due"


def test_a_mean_tells_of_the_card_that_it_leaves(monkeypatch, tmp_path, caplog):
    for name in ("one", "two", "out"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2,), float(len(name)))}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
    folders = [str(tmp_path / name) for name in ("one", "out")]
    call(monkeypatch, "average", *folders, "--output", str(tmp_path / "two"), "--overwrite")
    assert "still holds" not in caplog.text
    (tmp_path / "two" / "README.md").write_text("of another model", encoding="utf-8")
    call(monkeypatch, "average", *folders, "--output", str(tmp_path / "two"), "--overwrite")
    assert "two still holds README.md, which the mean has not written" in caplog.text


def test_a_fitted_recipe_counts_updates_and_checkpoints_anew(monkeypatch, tmp_path):
    """It saves one checkpoint an epoch and trains for fewer updates, so averaging and annealing are adapted."""
    files = [tmp_path / "my.de", tmp_path / "my.en"]
    for file in files:
        file.write_text("Das ist ein Satz mit acht Wörtern darin.\n" * 3_000, encoding="utf-8")
    fitted = {}
    for name in ("multi30k_en_de_transformer_tiny", "multi30k_en_de_tuned_latent_depth"):
        copied = tmp_path / f"{name}.yaml"
        call(monkeypatch, "recipes", name, "--fit", *map(str, files), "--copy", str(copied))
        fitted[name] = load_recipe(copied).values
    training, before = (
        fitted["multi30k_en_de_transformer_tiny"]["training"],
        load_recipe("multi30k_en_de_transformer_tiny").values["training"],
    )
    assert 0 < training["average_last"] <= training["num_train_epochs"] / 4 < before["average_last"]
    latent = fitted["multi30k_en_de_tuned_latent_depth"]["model"]
    assert 0 < latent["temperature_anneal_steps"] < 2_500
    assert latent["temperature_anneal_steps"] == pytest.approx(2 * latent["kl_anneal_steps"], abs=1)
