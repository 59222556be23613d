"""Every script's `--help`, and the two spellings of its options."""

import argparse
import runpy
import sys

import pytest
from mistakes import SCRIPTS

from hf_deepwide.errors import UserError
from hf_deepwide.runs.recipe import PACKAGED, load_recipe, parse_overrides
from hf_deepwide_cli import main
from hf_deepwide_cli.parser import Parser, split_overrides


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_help_does_nothing_but_help(script, tmp_path, monkeypatch, capsys):
    """`--help` ends with status 0 and writes no file. Its lines are short, and each option has both spellings."""
    shown = []
    print_help = argparse.ArgumentParser.print_help
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self: (shown.append(self), print_help(self)))
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the walkthrough sets its own hook
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ")
    assert max(map(len, printed.splitlines())) <= 120
    assert not any(tmp_path.iterdir())
    (parser,) = shown
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    for option in options:
        for other in (option[:2] + option[2:].replace("-", "_"), option[:2] + option[2:].replace("_", "-")):
            spelt = parser.spell(other) if isinstance(parser, Parser) else other
            assert parser._option_string_actions[spelt] is parser._option_string_actions[option]


def parser_of(*options):
    parser = Parser(allow_abbrev=False)
    parser.add_argument("place")
    for option in options:
        parser.add_argument(option)
    return parser


@pytest.mark.parametrize("words", ["x --repo-id=a_b-c", "x --repo_id a_b-c", "--repo-id a_b-c x"])
@pytest.mark.parametrize("option", ["--repo-id", "--repo_id"])
def test_accepts_dashes_and_underscores_in_option_names_only(option, words):
    parsed = parser_of(option).parse_args(words.split())
    assert (parsed.repo_id, parsed.place) == ("a_b-c", "x")


def test_quotes_an_unknown_option_as_given(capsys):
    with pytest.raises(SystemExit):
        parser_of("--repo-id").parse_args(["x", "--re_po-id", "y"])
    assert "--re_po-id" in capsys.readouterr().err


def test_overrides_have_both_spellings(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--training.max-steps", "3", "x-y", "--repo_id", "z", "--d-model=8"])
    parsed, overrides = split_overrides(parser_of("--repo-id"), sys.argv[1:])
    assert (parsed.place, parsed.repo_id) == ("x-y", "z")
    assert parse_overrides(overrides) == [("training.max_steps", 3), ("d_model", 8)]


def test_a_value_that_yaml_takes_for_a_comment_is_not_lost():
    with pytest.raises(UserError, match=r"""--data\.sentence1 "'#1 String'"$"""):
        parse_overrides(["--data.sentence1", "#1 String"])
    assert parse_overrides(["--data.sentence1", "'#1 String'"]) == [("data.sentence1", "#1 String")]


def test_an_option_is_no_value_of_another_one():
    with pytest.raises(UserError, match=r"--attention_branches has no value; write --attention_branches VALUE"):
        parse_overrides(["--attention_branches", "--drop_branch", "0.2"], "--field value")
    with pytest.raises(UserError, match=r"'0.2' is no override; write --field value"):
        parse_overrides(["0.2"], "--field value")


@pytest.mark.parametrize("words", [["x", "--repo-idd"], ["--repo-idd", "x"], ["x", "--repo_idd=3"]])
def test_a_slip_in_an_option_of_a_command_is_no_override(words, capsys):
    with pytest.raises(SystemExit):
        split_overrides(parser_of("--repo-id"), words)
    assert "did you mean --repo_id?" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_value_is_not_taken_for_null(value):
    """A shell passes an empty value for a variable that is not set."""
    with pytest.raises(
        UserError, match=r"--training\.output_dir is empty; .* --training\.output_dir null to unset it"
    ):
        parse_overrides(["--training.output_dir", value])
    assert parse_overrides(["--training.output_dir", "null"]) == [("training.output_dir", None)]


def test_a_folder_does_not_hide_a_packaged_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "other"):
        (tmp_path / name).mkdir()
    assert load_recipe("quickstart").values == load_recipe(PACKAGED / "quickstart.yaml").values
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "recipes", "quickstart"])
    main()
    assert "phrases" in capsys.readouterr().out
    with pytest.raises(UserError, match="other is a folder"):
        load_recipe("other")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("--max_steps", "an override names a section and a key, here --training.max_steps; the sections are model, "),
        (
            "--nonsense",
            "as in --training.max_steps 100; the sections are model, data, tokenizer, ",
        ),
        ("--trainig.max_steps", "unknown section 'trainig'; the nearest is 'training'"),
        ("--seed", "here --data.seed or --training.seed"),
        ("--training.lr", "the nearest is 'learning_rate'"),
        ("--model.attention_heads", "the nearest is 'encoder_attention_heads' or 'decoder_attention_heads'"),
        ("--training.freeze_encoder", "`hf-deepwide recipes reference` shows all"),
        ("--model.residual", "model.residual is no key of mat; families with this key: vanilla_transformer"),
    ],
)
def test_an_override_without_its_section_is_shown_with_it(override, told):
    with pytest.raises(UserError, match=told):
        load_recipe("quickstart", [override, "3"])
