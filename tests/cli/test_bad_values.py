"""Values of the right type and a wrong size, paths that are no files, and limits: the message, and when it comes."""

import copy
import dataclasses
import gzip
import json
import time
from functools import partial
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mistakes import SHORT, spoilt
from model_cases import CASES, config_of
from tiny_run import tiny_values
from transformers import CONFIG_MAPPING

from hf_deepwide.errors import UserError, quote
from hf_deepwide.families import FAMILIES
from hf_deepwide.runs.masked_lm import MaskedLMRecipe
from hf_deepwide.runs.recipe import Recipe, check_recipe
from hf_deepwide.runs.yaml_values import parse_yaml, to_yaml
from hf_deepwide.training.ranges import RANGES

TRAIN, MASKED = ("train_translation.py", "recipe.yaml"), ("train_masked_lm.py", "masked.yaml")
HUGE = [10**30, -(10**30), 1e30, -1e30, float("inf"), float("-inf"), float("nan")]


@pytest.fixture
def say(workspace, tmp_path, capsys, monkeypatch):
    """A function that returns a script's message for a spoilt workspace, after the checks of `Workspace.error_of`."""
    monkeypatch.chdir(tmp_path)  # restores the working directory afterwards
    monkeypatch.delenv("HF_DEEPWIDE_DATA", raising=False)

    def said(spoil, *arguments, call=TRAIN):
        script, *first = call
        return spoilt(spoil, workspace, tmp_path, capsys).error_of(script, *first, *arguments)

    return said


# Recipes: the text of `r.yaml`, words of the message

LAUGHS = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{', '.join(['*' + chr(97 + level)] * 9)}]\n" for level in range(15)
)
FEW_LAUGHS = "&a [x, x, x, x, x, x, x, x, x]"
for _name, _before in zip("bcd", "abc", strict=True):
    FEW_LAUGHS = f"&{_name} [{FEW_LAUGHS}{f', *{_before}' * 8}]"
RECIPES = {
    "aliases of aliases": (LAUGHS, ["r.yaml", "aliases", "1,000,000"]),
    "aliases as a value": (f"model: {{family: mat, d_model: {FEW_LAUGHS}}}", ["model.d_model", "whole number"]),
    "aliases as a list": (f"evaluation: {{metrics: {FEW_LAUGHS}}}\nmodel: {{family: mat}}", ["evaluation.metrics"]),
    "a cycle": ("model: &a {family: mat, d_model: [*a]}", ["r.yaml, line 1", "contains itself"]),
    "many levels": ("model: " + "[" * 100_000, ["r.yaml, line 1", "20 levels"]),
    "many levels by dashes": ("- " * 20_000, ["r.yaml, line 1", "20 levels"]),
    "a megabyte": ("# x\n" * 250_000, ["r.yaml", "250,000 bytes"]),
    "a number of many digits": ("model: {d_model: 1" + "0" * 10_000 + "}", ["r.yaml, line 1", "10,001 digits", "100"]),
    "a hexadecimal of many digits": ("model: {d_model: 0x" + "f" * 9000 + "}", ["r.yaml, line 1", "digits"]),
    "a tag": ("model: !!python/object/new:os.system [x]", ["r.yaml, line 1", "python/object"]),
    "a tag that does not fit": ("model: {family: mat, d_model: !!int many}", ["r.yaml, line 1", "'many'"]),
    "a binary tag": ("model: !!binary aGFsbG8=", ["r.yaml, line 1", "binary"]),
    "a long tag": ("model: !" + "x" * 9000 + " y", ["r.yaml, line 1", "tag"]),
    "an alias of nothing": ("model: *" + "x" * 9000, ["r.yaml, line 1", "alias"]),
    "a merge key": ("model: &m {family: mat}\ntraining: {<<: *m}", ["training", "'<<'"]),
    "a number for a key": ("model: {family: mat}\ntraining: {1: 2}", ["r.yaml, line 2", "the key 1 is no text"]),
    "nothing for a key": ("~: 1", ["r.yaml, line 1", "the key None is no text"]),
    "a long key": ("model: {family: mat}\ntraining: {" + "k" * 900 + ": 1}", ["training", "unknown key 'kkk"]),
    "a long value": ("model: {family: mat}\ntraining: {max_steps: " + "v" * 9000 + "}", ["training.max_steps", "vvv"]),
    "a zero byte by escape": ('data: {train: "a\\0b"}', ["r.yaml, line 1", "U+0000"]),
    "half a character": ('data: {train: "\\ud800"}', ["r.yaml, line 1", "U+D800"]),
    "UTF-16": ("model: {}".encode("utf-16"), ["r.yaml", "byte 1 is not UTF-8"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name, say):
    text, words = RECIPES[name]
    said = say(lambda at: at.put("r.yaml", text), call=(TRAIN[0], "r.yaml"))
    assert [word for word in words if word not in said] == []


# Arguments: words of the message, besides the name of the argument

ARGUMENTS = {
    "--training.max_steps=1:30": ["'1:30'", "whole number"],
    "--training.max_steps=0b1": ["'0b1'", "whole number"],
    "--training.max_steps=1_000": ["'1_000'", "whole number"],
    "--training.max_steps=2001-01-01": ["'2001-01-01'", "whole number"],
    "--training.max_steps==": ["'='", "whole number"],
    "--training.max_steps=1e3": ["1000.0", "whole number"],
    "--training.max_steps=true": ["True", "whole number"],
    "--training.max_steps=1" + "0" * 5000: ["5,001 digits"],
    "--training.learning_rate=1_0.5": ["'1_0.5'", "a number"],
    "--training.learning_rate=190:20:30.15": ["'190:20:30.15'", "a number"],
    "--training.warmup_steps=1e30": ["1e+30", "at most"],
    "--training.num_train_epochs=1e30": ["1e+30", "at most"],
    "--training.max_tokens=1" + "0" * 30: ["at most"],
    "--training.generation_num_beams=1000000000": ["1,000 at most"],
    "--training.eval_delay=.inf": ["inf", "at most"],
    "--training.max_grad_norm=.nan": ["nan", "at most"],
    "--training.neftune_noise_alpha=5": ["no noise", "model.dropout"],
    "--training.log_level=loud": ["'loud'", "passive"],
    "--training.gradient_checkpointing_kwargs={deep: 1}": ["deep"],
    "--training.accelerator_config={split_batches: true}": ["split_batches", "counted in tokens"],
    "--training.dataloader_persistent_workers=true": ["dataloader_num_workers"],
    "--training.output_dir=~nobody-of-this-name/run": ["~nobody-of-this-name", "home"],
    "--training.lr_scheduler_kwargs={" + "k" * 900 + ": 1}": ["lr_scheduler_type", "kkk"],
    "--training." + "x" * 5000 + "=1": ["unknown key"],
    "--model.encoder_layers=100000000": ["at most 10,000"],
    "--model.encoder_layers=1e3": ["1000.0", "whole number"],
    "--model.encoder_layers=true": ["True", "whole number"],
    "--model.encoder_attention_heads=1000000000": ["at most"],
    "--model.d_model=2000000": ["parameters", "1e+13"],
    "--model.d_model=200000": ["GiB", "machine"],
    "--model.init_std=.nan": ["nan"],
    "--model.vocab_size=1" + "0" * 12: ["at most"],
    "--model.eos_token_id=40000": ["0 to 32767"],
    "--model.return_dict=false": ["False", "True"],
    "--data.max_length=1" + "0" * 30: ["at most"],
    "--data.seed=1" + "0" * 30: ["less than"],
    "--data.root=~nobody-of-this-name": ["~nobody-of-this-name", "home"],
    "--tokenizer.min_frequency=1" + "0" * 30: ["at most"],
    "--evaluation.num_beams=1000000000": ["1,000 at most"],
    "--evaluation.length_penalty=1e300": ["1e+300", "at most"],
}


@pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda argument: argument[:50])
def test_arguments(argument, say):
    said = say(None, argument)
    name = argument.removeprefix("--").partition("=")[0].partition(".")[2][:30]
    assert [word for word in [name, *ARGUMENTS[argument]] if word not in said] == []


CONTRADICTIONS = {
    "the largest loss": (["greater_is_better=true"], ["greater_is_better", "loss"]),
    "the smallest score": (
        ["greater_is_better=false", "metric_for_best_model=bleu", "predict_with_generate=true"],
        ["greater_is_better", "bleu"],
    ),
    "no evaluation in time": (["eval_delay=100"], ["eval_delay", "2 steps"]),
    "an evaluation that is not saved": (
        ["eval_strategy=steps", "save_strategy=steps", "eval_steps=3", "save_steps=2"],
        ["eval_steps is 3", "save_steps 2"],
    ),
    "two rhythms": (
        ["eval_strategy=no", "save_strategy=steps"], ["eval_strategy is no", "save_strategy steps", "both to epoch"],
    ),
    "an evaluation of nothing": (
        ["eval_on_start=true", "eval_strategy=no", "load_best_model_at_end=false"], ["eval_on_start", "eval_strategy"],
    ),
    "a rate that rises": (
        ["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr: 1}"], ["min_lr", "learning_rate"],
    ),
    "a rate that is no number": (
        ["lr_scheduler_type=cosine_with_restarts", "lr_scheduler_kwargs={num_cycles: .inf}"], ["num_cycles", "inf"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions(name, say):
    arguments, words = CONTRADICTIONS[name]
    said = say(None, *(f"--training.{argument}" for argument in arguments))
    assert [word for word in words if word not in said] == []


# Files: how the workspace is spoilt, arguments, words of the message

JSONL = ["--data.format=jsonl", "--data.train=c.jsonl"]
TSV = ["--data.format=tsv", "--data.train=c.tsv"]


def compressed(at, content):
    at.remove("corpus/train.de")
    at.put("corpus/train.de.gz", gzip.compress(content, 1))


FILES = {
    "a pipe": (lambda at: at.pipe("corpus/train.de"), [], ["corpus/train.de", "a named pipe"]),
    "a pipe to validate on": (lambda at: at.pipe("corpus/valid.de"), [], ["corpus/valid.de", "a named pipe"]),
    "a pipe of pairs": (lambda at: at.pipe("c.tsv"), TSV, ["c.tsv", "a named pipe"]),
    "a pipe for a JSON file": (
        lambda at: at.pipe("c.json"), ["--training.accelerator_config=c.json"], ["accelerator_config", "a named pipe"],
    ),
    "a device": (lambda at: at.link("corpus/train.de", "/dev/zero"), [], ["corpus/train.de", "a device"]),
    "a bomb of lines": (lambda at: compressed(at, b"\n" * 6_000_000), [], ["train.de.gz, line", "100 times"]),
    "a bomb of one line": (lambda at: compressed(at, b"a" * 6_000_000), [], ["de.gz, line 1", "1,000,000"]),
    "a line of 20 MB": (lambda at: at.put("corpus/train.de", "ab " * 7_000_000), [], ["line 1", "1,000,000"]),
    "a word of 900 kB": (
        lambda at: at.put("corpus/train.de", "Hund\n" + "x" * 900_000 + "\n" * 29), [], ["line 2", "word of 900,000"],
    ),
    "a word in JSON": (
        lambda at: at.put("c.jsonl", json.dumps({"en": "x" * 90_000, "de": "y"})), JSONL, ["a word of 90,000"],
    ),
    "a zero byte in JSON": (
        lambda at: at.put("c.jsonl", '{"en": "\\u0000", "de": "y"}'), JSONL, ["c.jsonl, line 1", "zero byte"],
    ),
    "NaN in JSON": (lambda at: at.put("c.jsonl", '{"en": NaN, "de": "y"}'), JSONL, ["c.jsonl, line 1", "'en'"]),
    "many fields in JSON": (
        lambda at: at.put("c.jsonl", json.dumps({f"field {number}": 1 for number in range(9999)})), JSONL,
        ["c.jsonl, line 1", "no field 'en'"],
    ),
    "many columns": (
        lambda at: at.put("c.tsv", "\t".join(["column"] * 9999)), [*TSV, "--data.source_field=english"],
        ["c.tsv, line 1", "'english'"],
    ),
    "a wide character of UTF-16": (
        lambda at: at.put("corpus/train.de", b"Hund\n\xed\xa0\x80\n"), [], ["train.de, line 2", "byte 1 (0xed)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files(name, say):
    spoil, arguments, words = FILES[name]
    said = say(spoil, *arguments)
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("path", "words"), [("pipe", "a named pipe"), ("/dev/zero", "a device"), ("corpus", "a folder")]
)
def test_recipes_that_are_no_files(path, words, say):
    assert words in say(lambda at: at.pipe("pipe"), call=(TRAIN[0], path))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda at: at.pipe("corpus/train.de"), ["corpus/train.de", "a named pipe"]),
        (lambda at: at.put("corpus/train.de", "x" * 900_000), ["train.de, line 1", "a word of 900,000"]),
    ],
)
def test_files_of_masked_language_models(spoil, words, say):
    said = say(spoil, call=MASKED)
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/nowhere", ["HF_DEEPWIDE_DATA", "/nowhere", "which is nowhere"]),
        ("recipe.yaml", ["HF_DEEPWIDE_DATA", "'recipe.yaml', which is a file"]),
        ("~nobody-of-this-name", ["HF_DEEPWIDE_DATA", "~nobody-of-this-name"]),
    ],
)
def test_folders_of_data(value, words, say, monkeypatch):
    monkeypatch.setenv("HF_DEEPWIDE_DATA", value)
    said = say(None)
    assert [word for word in words if word not in said] == []


def test_a_recipe_that_extends_itself_by_another_spelling_is_refused(say):
    """Each step would make the path longer, so no path would come twice."""
    said = say(lambda at: at.put("r.yaml", "extends: ../workspace/r.yaml"), call=(TRAIN[0], "r.yaml"))
    assert "cannot extend itself" in said


# Input that is accepted

READ = {
    "010": 10, "-010": -10,
    "0o17": 15, "0x1F": 31, "1e-3": 0.001, "1.": 1.0, ".5": 0.5, "+1": 1, "-.inf": -float("inf"),
    "1:30": "1:30", "0b1": "0b1", "1_000": "1_000", "190:20:30.15": "190:20:30.15", "2001-01-01": "2001-01-01",
    "=": "=", "<<": "<<", "no": "no", "off": "off", "True": True, "~": None, "": None,
    "!!str 12": "12", "!!float 3": 3.0,
}  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_scalars_are_those_of_yaml_1_2(text):
    value = parse_yaml(text, "r.yaml")
    assert (type(value), value) == (type(READ[text]), READ[text])
    assert yaml.safe_load(to_yaml(READ[text])) == READ[text], "readers of YAML 1.1 see the same"


def test_aliases_that_make_little_are_read():
    assert parse_yaml("{a: &sizes [1, 2], b: *sizes, c: *sizes}", "r.yaml") == {"a": [1, 2], "b": [1, 2], "c": [1, 2]}


def test_large_models_that_are_real_are_accepted():
    """A Transformer of 1,000 layers, a wide one, and one with a vocabulary of two million."""
    config = FAMILIES["vanilla_transformer"].config
    deep = config(encoder_layers=1000, decoder_layers=1000, d_model=1024)
    wide = config(d_model=65_536, encoder_ffn_dim=262_144, decoder_ffn_dim=262_144, encoder_layers=48)
    many = config(vocab_size=2_000_000, max_position_embeddings=1_000_000)
    assert deep.least_parameters < wide.least_parameters < 10**13 > many.least_parameters


@pytest.mark.parametrize("case", CASES)
def test_the_least_parameters_are_less_than_there_are(case):
    config = config_of(case)
    model = FAMILIES[config.model_type].lm(config)
    there = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
    assert there / 5 < config.least_parameters <= there


# Every number has a limit


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_a_config_has_a_limit(family):
    cls = CONFIG_MAPPING[family]
    hints = get_type_hints(cls, localns={"torch": torch})
    numbers = [field.name for field in dataclasses.fields(cls) if _is_number(hints[field.name])]
    assert len(numbers) > 15
    for name in numbers:
        for value in [*HUGE, True]:
            value = int(value) if value in (1e30, -1e30) and "float" not in str(hints[name]) else value
            with pytest.raises(ValueError, match=name):
                cls(**{name: value})


@pytest.mark.parametrize("kind", [Recipe, MaskedLMRecipe])
def test_every_number_of_a_section_has_a_limit(kind, tmp_path):
    for section, cls in kind.sections.items():
        for name, hint in get_type_hints(cls).items() if cls else ():
            if not _is_number(hint) or name in kind.refused:
                continue
            assert section != "training" or name in RANGES
            for value in HUGE if section != "training" else []:
                if name == "sampling_temperature" and value > 0:
                    continue  # with an infinite temperature all pairs weigh the same
                fields = {"train": "x", "validation": "x", "languages": ["en"], "pairs": ["en-de"], name: value}
                known = {key: fields[key] for key in fields if key in get_type_hints(cls)}
                assert f"{section}.{name}" in (refusal(partial(cls, **known)) or f"{value} is accepted for {name}")


def _is_number(hint):
    words = {word.strip() for word in getattr(hint, "__name__", str(hint)).split("|")} | set(str(hint).split(" | "))
    return bool(words & {"int", "float"})


@pytest.mark.parametrize("value", [value for value in HUGE if value == value and abs(value) != float("inf")])
def test_every_number_of_the_training_arguments_is_within_its_range(value):
    assert [name for name, accepted in RANGES.items() if accepted.holds(value)] == []


# Any value for any key, and any text for a recipe

quick = settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**90), 10**90), st.floats(), st.text(max_size=8),
    st.sampled_from(["x" * 5000, "no", "steps", "loss", "/dev/zero", "~x", "auto", "{"]),
)  # fmt: skip
values_of_yaml = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = [
    *((family, "model", field.name) for family in (*FAMILIES, "marian", "bart") for field in
      dataclasses.fields(CONFIG_MAPPING[family])),
    *(("mat", section, field.name) for section, cls in Recipe.sections.items() if cls for field in
      dataclasses.fields(cls) if field.init),
]  # fmt: skip
VALUES = tiny_values(Path("run"))


def refusal(call):
    """The message of the `UserError` that a call raises, or None."""
    try:
        call()
    except UserError as error:
        return str(error)
    return None


def is_short(said, first):
    return said is None or (said.startswith(first) and len(said) <= SHORT and len(said.splitlines()) == 1)


@quick
@given(st.sampled_from(KEYS), values_of_yaml)
def test_any_value_of_any_key_is_refused_in_a_short_line_or_accepted(where, value):
    family, section, key = where
    values = copy.deepcopy(VALUES)
    values["model"] = {"family": family} if family in ("marian", "bart") else {**values["model"], "family": family}
    values[section][key] = value
    start = time.perf_counter()
    said = refusal(lambda: check_recipe(values, "any", "any.yaml").training_arguments())
    assert time.perf_counter() - start < 10
    assert is_short(said, "any.yaml: ")


@quick
@given(values_of_yaml)
def test_any_value_survives_its_own_yaml(value):
    text = to_yaml({"key": value})
    said = refusal(lambda: parse_yaml(text, "any.yaml"))
    if said is None:
        assert repr(parse_yaml(text, "any.yaml")["key"]) == repr(value)
    else:
        assert any(reason in said for reason in ("is no character", "unacceptable character", "digits"))


@quick
@given(st.text(alphabet="{}[]:,-&*!|>'\"%@ \n~ab01.e?<=\\x", max_size=60))
def test_any_text_is_read_or_refused_in_a_short_line(text):
    start = time.perf_counter()
    said = refusal(lambda: parse_yaml(text, "any.yaml"))
    assert time.perf_counter() - start < 5
    assert is_short(said, "any.yaml")


@quick
@given(values_of_yaml)
def test_any_value_is_quoted_on_a_short_line(value):
    assert len(quote(value)) <= 100
    assert quote(value).isprintable()
