"""`compare` on run folders: validation losses first, Holm's correction, equivalence, and the JSON file."""

import json
import random
import re
import sys
from functools import partial
from unittest.mock import Mock

import pytest
import sacrebleu
import yaml
from datasets import Dataset

from hf_deepwide.data.digest import text_digest
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.seeds import equivalence, holm, welch
from hf_deepwide.runs import compare
from hf_deepwide.runs.compare import Comparison, compare_runs, p_value, parse_margins, report
from hf_deepwide_cli import main

LOSSES = {"plain": [2.10, 2.14, 2.12], "wide": [2.01, 2.05], "deep": [2.11, 2.15, 2.10]}


@pytest.fixture(autouse=True)
def few_trials(monkeypatch):
    """Make the tests over sentences short: they take seconds, and have tests of their own."""
    monkeypatch.setattr(compare, "randomization", partial(compare.randomization, trials=19))
    monkeypatch.setattr(compare, "clustered_bootstrap", partial(compare.clustered_bootstrap, samples=19))


@pytest.fixture
def runs(tmp_path):
    """Folders of runs, with only those files of a training that are compared."""
    draw = random.Random(0)
    references = [" ".join(draw.choices("abcdefgh", k=9)) for _ in range(12)]
    (tmp_path / "reference").write_text("".join(f"{line}\n" for line in references))
    for name, losses in LOSSES.items():
        for seed, loss in enumerate(losses, start=1):
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            lines = [" ".join(w if draw.random() > 0.2 else "x" for w in line.split()) for line in references]
            (folder / "translations.txt").write_text("".join(f"{line}\n" for line in lines))
            (folder / "tokenizer.json").write_text("{}")
            results = {
                "validation": {"loss": loss, "nll": loss - 0.5},
                "recipe": {"training": {"label_smoothing_factor": 0.1}},
            }
            (folder / "results.json").write_text(json.dumps(results))
    return tmp_path


def systems(folder):
    return [",".join(str(folder / f"{name}-{seed}") for seed in range(1, 1 + len(LOSSES[name]))) for name in LOSSES]


def test_losses_stand_first_and_holm_allows_for_the_systems(runs):
    compared = compare_runs(systems(runs), str(runs / "reference"), ["chrf"], margins={"loss": 0.05})
    assert [each.metric for each in compared] == ["loss"] * 3 + ["nll"] * 3 + ["chrf"] * 3
    baseline, wide, deep = compared[:3]
    assert baseline.scores == LOSSES["plain"]
    assert wide.difference == pytest.approx(2.03 - 2.12)
    p_values = [welch(LOSSES[name], LOSSES["plain"]) for name in ("wide", "deep")]
    assert [wide.p_seeds, deep.p_seeds] == p_values
    assert [wide.p_holm, deep.p_holm] == holm(p_values)
    equal = [equivalence(LOSSES[name], LOSSES["plain"], 0.05) for name in ("wide", "deep")]
    assert [wide.p_equivalence, deep.p_equivalence] == holm(equal)
    assert deep.p_equivalence < wide.p_equivalence
    assert compared[6].interval is None
    assert compared[7].interval[0] < compared[7].difference < compared[7].interval[1]
    assert compared[7].p_sentences is None  # three runs against two
    assert compared[8].p_sentences is not None


def test_losses_of_two_vocabularies_of_words_are_compared(runs, caplog):
    """Runs on words have no tokenizer.json, but a vocabulary for each side."""
    for folder in runs.glob("*-*"):
        (folder / "tokenizer.json").unlink()
        for side in ("source", "target"):
            (folder / f"vocab_{side}.json").write_text('{"a": 0}')
    assert "loss" in {each.metric for each in compare_runs(systems(runs), str(runs / "reference"), ["bleu"])}
    (runs / "wide-2" / "vocab_target.json").write_text('{"b": 0}')
    assert {each.metric for each in compare_runs(systems(runs), str(runs / "reference"), ["bleu"])} == {"bleu"}
    assert "different tokenizers" in caplog.text


def test_losses_are_left_out_beside_a_file_of_translations(runs, caplog):
    files = [str(runs / f"{name}-1" / "translations.txt") for name in LOSSES]
    assert {each.metric for each in compare_runs(files, str(runs / "reference"), ["bleu"])} == {"bleu"}
    assert not caplog.text
    mixed = [str(runs / "plain-1"), files[1]]
    assert {each.metric for each in compare_runs(mixed, str(runs / "reference"), ["bleu"])} == {"bleu"}
    assert "not every system is the folder of a finished run" in caplog.text


def test_losses_of_two_tokenizers_are_not_compared(runs, caplog):
    (runs / "wide-2" / "tokenizer.json").write_text('{"truncation": {"max_length": 9}}')  # the tokens are the same
    assert "loss" in {each.metric for each in compare_runs(systems(runs), str(runs / "reference"), ["bleu"])}
    (runs / "wide-2" / "tokenizer.json").write_text('{"model": {}}')
    assert {each.metric for each in compare_runs(systems(runs), str(runs / "reference"), ["bleu"])} == {"bleu"}
    assert "different tokenizers" in caplog.text
    with pytest.raises(UserError, match="loss"):
        compare_runs(systems(runs), str(runs / "reference"), ["bleu"], margins={"loss": 0.1})


def test_smoothed_losses_of_two_smoothings_are_not_compared(runs):
    file = runs / "wide-2" / "results.json"
    results = json.loads(file.read_text())
    results["recipe"]["training"]["label_smoothing_factor"] = 0.2
    file.write_text(json.dumps(results))
    assert [each.metric for each in compare_runs(systems(runs), str(runs / "reference"), ["bleu"])][::3] == [
        "nll",
        "bleu",
    ]


def test_an_older_run_has_the_least_loss_of_its_curve(runs):
    for name, losses in LOSSES.items():
        for seed, loss in enumerate(losses, start=1):
            file = runs / f"{name}-{seed}" / "results.json"
            results = json.loads(file.read_text())
            del results["validation"]
            file.write_text(json.dumps(results | {"train": {"best_validation_loss": loss}}))
    compared = compare_runs(systems(runs), str(runs / "reference"), ["bleu"])
    assert [each.metric for each in compared][::3] == ["loss", "bleu"]
    assert compared[1].scores == LOSSES["wide"]


def test_the_command_prints_a_table_and_writes_json(runs, capsys, monkeypatch):
    output = runs / "comparison.json"
    arguments = ["compare", *systems(runs), "--reference", str(runs / "reference"), "--metrics", "bleu"]
    command = ["hf-deepwide", *arguments, "--equivalence", "bleu=3", "loss=0.1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    main()
    printed = capsys.readouterr().out
    assert "standard error" in printed
    assert "0.1 (loss)" in printed
    entries = json.loads(output.read_text())
    assert [entry["metric"] for entry in entries] == ["loss"] * 3 + ["nll"] * 3 + ["bleu"] * 3
    assert entries[7]["margin"] == 3
    assert entries[0]["standard_error"] == pytest.approx(0.02 / 3**0.5)
    with pytest.raises(SystemExit):
        main()
    assert "exists already" in capsys.readouterr().err


def test_a_table_without_margins_has_no_column_for_them(runs):
    assert "equal" not in report(compare_runs(systems(runs), str(runs / "reference"), ["bleu"]))


@pytest.mark.parametrize("word", ["0.5", "bleu", "bleu=", "bleu=0", "bleu=inf", "rouge=1"])
def test_a_margin_that_is_no_metric_and_number_is_refused(word):
    with pytest.raises(UserError, match="METRIC=MARGIN"):
        parse_margins([word])


@pytest.fixture
def with_recipes(runs):
    """Add recipes and their data files to `runs`. Return a function that changes the recipe of a run."""
    text = (runs / "reference").read_text()
    for name in ("test", "other", "valid"):
        (runs / f"{name}.de").write_text(text if name != "other" else text.replace("a", "z"))
        (runs / f"{name}.en").write_text(text)

    def change(run: str, **keys: object) -> None:
        recipe = {
            "model": {"family": "vanilla_transformer"},
            "data": {
                "root": str(runs),
                "source_lang": "de",
                "target_lang": "en",
                "test": "test",
                "validation": "valid",
            },
            "training": {"output_dir": str(runs / run)},
        }  # fmt: skip
        for key, value in keys.items():
            section, _, name = key.partition("__")
            if name:
                recipe.setdefault(section, {})[name] = value
            else:
                recipe[section] = value
        (runs / run / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    for name in LOSSES:
        for seed in range(1, 1 + len(LOSSES[name])):
            change(f"{name}-{seed}")
    return change


@pytest.mark.parametrize("read", ["reference", "plain-1/results.json", "wide-2/recipe.yaml", "test.en"])
def test_nothing_that_is_compared_is_written_over(runs, with_recipes, monkeypatch, capsys, read):
    before = (runs / read).read_text()
    reference = ["--reference", str(runs / "reference")] if read == "reference" else []
    output = ["--output", str(runs / read), "--overwrite"]
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "compare", *systems(runs), *reference, *output])
    with pytest.raises(SystemExit):
        main()
    assert "is also an input" in capsys.readouterr().err
    assert (runs / read).read_text() == before


def test_runs_need_one_test_set(runs, with_recipes):
    """The sentences must be the same, not only their number. The name of the test set may differ."""
    compared = compare_runs(systems(runs), metrics=["bleu"])
    assert compared[-1].scores == compare_runs(systems(runs), str(runs / "reference"), ["bleu"])[-1].scores
    (runs / "again.de").write_text((runs / "test.de").read_text())
    (runs / "again.en").write_text((runs / "test.en").read_text())
    with_recipes("wide-2", data__test="again")
    assert compare_runs(systems(runs), metrics=["bleu"]) == compared
    with_recipes("wide-2", data__test="other")
    with pytest.raises(UserError, match=r"wide-2 was tested on other sentences than .*plain-1 \(other, .* and test, "):
        compare_runs(systems(runs))
    with_recipes("wide-2", data__source_lang="en", data__target_lang="de", data__test="other")
    with pytest.raises(UserError, match=r"\(other, en-de and test, de-en\); .* --reference FILE"):
        compare_runs(systems(runs))


def test_a_run_without_a_test_set_is_named(runs, with_recipes):
    for name, losses in LOSSES.items():
        for seed in range(1, 1 + len(losses)):
            with_recipes(f"{name}-{seed}", data__test=None)
    for chosen in (None, "test"):
        with pytest.raises(UserError, match=r"the test set of .*plain-. cannot be read: data\.test is not set"):
            compare_runs(systems(runs), metrics=["bleu"], test_set=chosen)


def test_damaged_results_are_named(runs, with_recipes):
    (runs / "plain-1" / "results.json").write_text('{"digests": ')
    with pytest.raises(UserError, match=r"plain-1: results\.json is damaged"):
        compare_runs(systems(runs), metrics=["bleu"])


def test_a_test_set_that_is_not_here_names_its_run_and_a_way_out(runs, with_recipes):
    """The file is missing, as in another folder than that of the training."""
    for language in ("de", "en"):
        (runs / f"test.{language}").rename(runs / f"elsewhere.{language}")
    for chosen in (None, "test"):
        with pytest.raises(UserError, match=r"the test set of .*plain-1 cannot be read: no file .* --reference FILE"):
            compare_runs(systems(runs), metrics=["bleu"], test_set=chosen)
    assert compare_runs(systems(runs), str(runs / "elsewhere.en"), metrics=["bleu"])


def test_a_chosen_test_set_may_stand_in_different_lists(runs, with_recipes):
    """Only the lines of the chosen set must be the same, at any place among a run's translations."""
    expected = compare_runs(systems(runs), metrics=["bleu"])
    lines = (runs / "other.en").read_text()
    for folder, sets in (("plain-1", ["test", "other"]), ("wide-2", ["other", "test"])):
        file = runs / folder / "translations.txt"
        file.write_text(file.read_text() + lines if sets[0] == "test" else lines + file.read_text())
        with_recipes(folder, data__test=sets)
    assert compare_runs(systems(runs), metrics=["bleu"], test_set="test") == expected
    with pytest.raises(UserError, match="plain-2 was tested on other sentences"):
        compare_runs(systems(runs), metrics=["bleu"])
    with pytest.raises(UserError, match=r"plain-2 was tested on test$"):
        compare_runs(systems(runs), metrics=["bleu"], test_set="other")
    (runs / "more").mkdir()
    for language in ("de", "en"):
        (runs / "more" / f"test.{language}").write_text((runs / f"other.{language}").read_text())
    with_recipes("wide-2", data__test=["other", "more/test"])
    with pytest.raises(
        UserError, match=r"wide-2 was tested on other sentences than .*plain-1 \(more/test, .* and test, "
    ):
        compare_runs(systems(runs), metrics=["bleu"], test_set="test")


def test_a_run_of_several_pairs_is_named(runs, with_recipes):
    multilingual = {"pairs": ["de-en", "en-de"], "source_lang": None, "target_lang": None, "test": "{pair}/test"}
    with_recipes("wide-2", **{f"data__{key}": value for key, value in multilingual.items()})
    with pytest.raises(UserError, match=r"wide-2 translates several language pairs"):
        compare_runs(systems(runs), metrics=["bleu"])


def test_phrases_are_one_test_set(runs, with_recipes):
    with_recipes("plain-1", data={"format": "phrases"})
    with pytest.raises(UserError, match=r"--test_set x: .*plain-1 was tested on phrases, which are one test set"):
        compare_runs(systems(runs), metrics=["bleu"], test_set="x")


def test_losses_of_two_validation_sets_are_not_compared(runs, with_recipes, caplog):
    with_recipes("deep-3", data__validation="other")
    assert {each.metric for each in compare_runs(systems(runs), metrics=["bleu"])} == {"bleu"}
    assert "different validation sets" in caplog.text


def note_digests(runs, **names):
    """Write into each run's results the digests of its validation and test sentences, as they are now."""
    for file in runs.glob("*-*/results.json"):
        texts = {
            split: {lang: (runs / f"{name}.{lang}").read_text().splitlines() for lang in ("de", "en")}
            for split, name in names.items()
        }
        digests = {
            split: text_digest(Dataset.from_dict({"source": sides["de"], "target": sides["en"]}))
            for split, sides in texts.items()
        }
        file.write_text(json.dumps(json.loads(file.read_text()) | {"digests": digests}))


def test_a_test_set_that_has_changed_is_no_reference(runs, with_recipes):
    note_digests(runs, test="test", validation="valid")
    compared = compare_runs(systems(runs), metrics=["bleu"])
    assert compare_runs(systems(runs), metrics=["bleu"], test_set="test") == compared
    lines = (runs / "test.en").read_text().splitlines()
    (runs / "test.en").write_text("".join(f"{line}\n" for line in reversed(lines)))
    for chosen in (None, "test"):
        with pytest.raises(UserError, match=r"plain-1 was tested on other sentences than data.test 'test' holds now"):
            compare_runs(systems(runs), metrics=["bleu"], test_set=chosen)
    assert compare_runs(systems(runs), str(runs / "reference"), metrics=["bleu"]) == compared


def test_losses_on_a_validation_set_that_has_changed_between_runs_are_not_compared(runs, with_recipes, caplog):
    note_digests(runs, test="test", validation="valid")
    file = runs / "deep-3" / "results.json"
    results = json.loads(file.read_text())
    file.write_text(json.dumps(results | {"digests": results["digests"] | {"validation": "another"}}))
    assert {each.metric for each in compare_runs(systems(runs), metrics=["bleu"])} == {"bleu"}
    assert "different validation sets" in caplog.text


def test_losses_are_left_out_where_a_run_has_none(runs, with_recipes, caplog):
    """The run has no validation set either, and none is looked for."""
    file = runs / "deep-3" / "results.json"
    results = json.loads(file.read_text())
    del results["validation"]
    file.write_text(json.dumps(results))
    with_recipes("deep-3", data__validation=None, training__eval_strategy="no")
    assert {each.metric for each in compare_runs(systems(runs), metrics=["bleu"])} == {"bleu"}
    assert "not every run has measured one" in caplog.text


def test_losses_are_left_out_where_one_is_no_number(runs, with_recipes, caplog):
    file = runs / "deep-3" / "results.json"
    results = json.loads(file.read_text())
    file.write_text(json.dumps(results | {"validation": results["validation"] | {"loss": float("nan")}}))
    assert {each.metric for each in compare_runs(systems(runs), metrics=["bleu"])} == {"bleu"}
    assert "deep-3 has one that is not finite" in caplog.text


def test_runs_on_streams_are_compared(runs, with_recipes):
    expected = compare_runs(systems(runs), metrics=["bleu"])
    for split in ("test", "valid"):
        pairs = zip(*((runs / f"{split}.{lang}").read_text().splitlines() for lang in ("de", "en")), strict=True)
        rows = [json.dumps({"de": de, "en": en}) for de, en in pairs]
        (runs / "rows").mkdir(exist_ok=True)
        (runs / "rows" / f"{'validation' if split == 'valid' else split}.jsonl").write_text("\n".join(rows))
    fields = {"format": "datasets", "name": str(runs / "rows"), "streaming": True, "validation": "validation"}
    for name in LOSSES:
        for seed in range(1, 1 + len(LOSSES[name])):
            with_recipes(f"{name}-{seed}", **{f"data__{key}": value for key, value in fields.items()})
    assert compare_runs(systems(runs), metrics=["bleu"]) == expected
    with_recipes("deep-3")  # the same sentences, in text files
    assert compare_runs(systems(runs), metrics=["bleu"]) == expected


def test_a_smoothing_that_is_not_written_down_is_the_usual_one(runs):
    file = runs / "wide-2" / "results.json"
    results = json.loads(file.read_text())
    del results["recipe"]["training"]["label_smoothing_factor"]
    file.write_text(json.dumps(results))
    assert "loss" in {each.metric for each in compare_runs(systems(runs), str(runs / "reference"), ["bleu"])}


def test_runs_are_scored_as_their_recipes_say(runs, with_recipes):
    settings = {"evaluation__tokenize": "char", "evaluation__lowercase": True, "evaluation__metrics": ["bleu"]}
    for name in LOSSES:
        for seed in range(1, 1 + len(LOSSES[name])):
            with_recipes(f"{name}-{seed}", **settings)
    compared = compare_runs(systems(runs))
    assert {each.metric for each in compared} == {"loss", "nll", "bleu"}
    references = (runs / "reference").read_text().splitlines()
    lines = (runs / "plain-2" / "translations.txt").read_text().splitlines()
    expected = sacrebleu.corpus_bleu(lines, [references], tokenize="char", lowercase=True).score
    assert compared[-3].scores[1] == pytest.approx(expected)
    assert "tok:char" in report(compared)
    assert "case:lc" in report(compared)
    assert "tok:13a" in report(compare_runs(systems(runs), tokenize="13a"))
    with_recipes("wide-2")
    with pytest.raises(UserError, match=r"evaluation\.\w+ is .* in .*plain-1 and .* in .*wide-2; choose one with --"):
        compare_runs(systems(runs))


def test_defaults_that_are_written_out_are_no_others(runs, with_recipes):
    expected = compare_runs(systems(runs))
    with_recipes("wide-2", evaluation__tokenize="13a", evaluation__lowercase=False)
    assert compare_runs(systems(runs)) == expected
    with_recipes("wide-2", evaluation__metrics=["chrf", "bleu"])
    with_recipes("deep-3", evaluation__metrics=["bleu", "chrf"])
    assert compare_runs(systems(runs)) == expected
    with_recipes("deep-3", evaluation__metrics=["bleu"])
    with pytest.raises(UserError, match=r"evaluation\.metrics is .*; choose one with --metrics"):
        compare_runs(systems(runs))


def test_two_codes_of_one_language_are_compared(runs, with_recipes):
    """Such as `en` and NLLB's `eng_Latn`. With `--tokenize auto`, both must select the same sacreBLEU tokenizer."""
    expected = compare_runs(systems(runs), metrics=["bleu"])
    for split in ("test", "valid"):
        (runs / f"{split}.eng_Latn").write_text((runs / f"{split}.en").read_text())
        (runs / f"{split}.zh").write_text((runs / f"{split}.en").read_text())
    with_recipes("wide-2", data__target_lang="eng_Latn")
    assert compare_runs(systems(runs), metrics=["bleu"]) == expected
    assert compare_runs(systems(runs), metrics=["bleu"], tokenize="auto")[-1].scores == expected[-1].scores
    with_recipes("wide-2", data__target_lang="zh")
    with pytest.raises(UserError, match=r"data\.target_lang is '13a' .* and 'zh' in .*wide-2; .* --tokenize"):
        compare_runs(systems(runs), metrics=["bleu"], tokenize="auto")


@pytest.mark.parametrize("again", ["{0},{0}/ {1}", "{0} {0}/", "{0},{1} {1},{2}"])
def test_no_run_counts_twice(runs, again):
    names = [str(runs / f"plain-{seed}") for seed in (1, 2, 3)]
    with pytest.raises(UserError, match="is named twice"):
        compare_runs(again.format(*names).split(), str(runs / "reference"))


def test_copies_of_a_training_are_not_several_seeds(runs, with_recipes, caplog):
    """Two copies may be compared as two systems, because a run can be translated in two ways."""
    for folder, own in (("plain-1", "x"), ("plain-2", "x"), ("plain-3", "y"), ("wide-1", "x")):
        (runs / folder / "run.json").write_text(json.dumps({"hf_deepwide": "0", "id": own}))
    one, two, three, other = (str(runs / name) for name in ("plain-1", "plain-2", "plain-3", "wide-1"))
    with pytest.raises(UserError, match=r"plain-1 and .*plain-2 hold one training"):
        compare_runs([f"{one},{two}", other], metrics=["bleu"])
    with_recipes("plain-1", training__seed=1)
    with_recipes("plain-3", training__seed=2)
    compare_runs([f"{one},{three}", other], metrics=["bleu"])
    assert "count as" not in caplog.text
    with_recipes("plain-3", training__seed=1)
    compare_runs([f"{one},{three}", other], metrics=["bleu"])
    assert "were trained with one seed" in caplog.text
    with_recipes("plain-3", training__seed=2, model__d_model=64)
    compare_runs([f"{one},{three}", other], metrics=["bleu"])
    assert "count as one system, and differ in more than their seed: model.d_model: not set, now 64" in caplog.text


def test_runs_that_were_translated_with_other_beams_are_pointed_out(runs, with_recipes, caplog):
    names = [str(runs / "plain-1"), str(runs / "wide-1")]
    compare_runs(names, metrics=["bleu"])
    assert "translated with" not in caplog.text
    with_recipes("wide-1", evaluation__num_beams=1)
    compare_runs(names, metrics=["bleu"])
    assert "were translated with different settings: num_beams 5 and 1" in caplog.text


def test_a_table_is_shown_although_its_file_cannot_be_written(runs, capsys, monkeypatch):
    monkeypatch.setattr("hf_deepwide.durable.write_whole", Mock(side_effect=UserError("no permission")))
    words = ["compare", *systems(runs)[:2], "--reference", str(runs / "reference"), "--output", str(runs / "x.json")]
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", *words, "--metrics", "chrf"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr()
    assert "chrf" in shown.out.lower()
    assert "no permission" in shown.err


def test_a_small_p_is_not_shown_as_zero():
    assert [p_value(p) for p in (None, 0.00004, 0.00006, 0.0144, 1.0)] == [
        "",
        "< 0.0001",
        "0.0001",
        "0.0144",
        "1.0000",
    ]


def test_a_difference_that_is_rounded_to_zero_has_no_minus():
    compared = [Comparison("a", "bleu", [20.0]), Comparison("b", "bleu", [20.0], -0.004, interval=(-0.001, 0.3))]
    shown = report(compared)
    assert "-0.00" not in shown
    assert re.search(r" \+0\.00 +\+0\.00 to \+0\.30", shown)
