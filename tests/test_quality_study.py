"""The quality study: committed studies keep their word, made-up results make the right pages, no run is made twice."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import cards
import kept_runs
import numpy as np
import pytest
import report
import speed
import study
import yaml
from paper_rows import parameters_of
from transformers import AutoConfig

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.significance import compare_systems

FOLDER = study.HERE
STUDIES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
EQUAL = [name for name in STUDIES if not name.startswith("ablation_")]  # whose rows may differ, and say so
SOURCES = ["A dog.", "Two dogs run.", "A man sleeps.", "The red house."]
REFERENCES = ["Ein kleiner Hund ist da.", "Zwei Hunde laufen jetzt.", "Ein Mann schläft dort.", "Das rote Haus steht."]

# --- the studies that are committed ---


def recipes(name):
    """Each run of a study: system, setting, recipe."""
    loaded = study.load_study(FOLDER / f"{name}.yaml")
    for system in loaded.systems:
        for each in (system, system.base):
            for setting in loaded.search if each else ():
                yield each, setting, study.recipe_of(loaded, each, setting, loaded.seeds[0], Path("runs"))


@pytest.mark.parametrize("name", STUDIES)
def test_runs_of_a_study_have_valid_recipes_and_folders_of_their_own(name):
    loaded = study.load_study(FOLDER / f"{name}.yaml")  # checks every recipe
    found = list(recipes(name))
    folders = [recipe.output_dir for _, _, recipe in found]
    assert len(set(folders)) == len(folders) == len(loaded.search) * sum(1 + bool(s.base) for s in loaded.systems)
    assert len({system.title for system in loaded.systems}) == len(loaded.systems)
    for system, setting, recipe in found:
        for key, value in {**loaded.overrides, **system.overrides, **setting}.items():
            section, _, key = key.partition(".")
            assert recipe.values[section][key] == value
        if recipe.init_from is None:
            assert recipe.tokenizer.vocab_size == 8000
        else:
            assert recipe.init_from == recipe.tokenizer.path
            assert Path(recipe.init_from) in folders


@pytest.mark.parametrize("name", EQUAL)
def test_systems_of_a_study_have_the_baselines_parameters_within_two_per_cent(name):
    loaded = study.load_study(FOLDER / f"{name}.yaml")
    counts = {
        system.name: parameters_of(
            AutoConfig.for_model(recipe.family, vocab_size=8000, **recipe.model_fields), seq2seq=True
        )
        for system, _, recipe in recipes(name)
        if system in loaded.systems
    }
    assert len(counts) == len(loaded.systems)
    baseline = counts[loaded.baseline]
    assert {name: count for name, count in counts.items() if abs(count / baseline - 1) > 0.02} == {}


@pytest.mark.parametrize("name", STUDIES)
def test_a_model_and_its_base_are_trained_for_as_long_as_the_others(name):
    loaded = study.load_study(FOLDER / f"{name}.yaml")
    for system in loaded.systems:
        if system.base:
            epochs = [each.overrides["training.num_train_epochs"] for each in (system, system.base)]
            assert sum(epochs) == loaded.overrides["training.num_train_epochs"]


@pytest.mark.parametrize("name", STUDIES)
def test_warm_up_is_the_same_part_of_every_training(name):
    parts = {
        system.name: recipe.values["training"]["warmup_steps"] / recipe.values["training"]["num_train_epochs"]
        for system, _, recipe in recipes(name)
    }
    assert len(set(parts.values())) == 1, parts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.pop("search"), "search"),
        (lambda values: values["systems"]["vanilla"].update(modell={}), "modell"),
        (lambda values: values.update(baseline="plain"), "'plain' is not among the systems"),
        (lambda values: values["systems"]["mat"]["model"].update(attention_branch=2), "attention_branches"),
        (lambda values: values["overrides"].update({"trainig.seed": 2}), "trainig.seed is in no section"),
    ],
)
def test_what_is_wrong_in_a_study_is_said_in_a_line(tmp_path, change, words):
    values = yaml.safe_load((FOLDER / "multi30k.yaml").read_text(encoding="utf-8"))
    values["recipe"] = str(FOLDER / values["recipe"])
    change(values)
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(UserError, match=words):
        study.load_study(tmp_path / "wrong.yaml")


# --- a study of three systems and two settings, and results that are made up ---


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The study, with a test set of four sentences."""
    monkeypatch.setenv("HF_DEEPWIDE_DATA", str(tmp_path / "data"))
    test = tmp_path / "data" / "multi30k" / "test_2016_flickr"
    test.parent.mkdir(parents=True)
    for language, lines in (("en", SOURCES), ("de", REFERENCES)):
        test.with_suffix(f".{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    values = {
        "recipe": str(FOLDER / "../../scripts/recipes/multi30k_en_de_vanilla.yaml"),
        "model": {"family": "vanilla_transformer", "d_model": 16},
        "overrides": {"training.num_train_epochs": 2},
        "search": [{"training.learning_rate": rate, "model.dropout": 0.1} for rate in (0.001, 0.002)],
        "seeds": [1, 2, 10],
        "baseline": "vanilla",
        "corpus": "Sentences of nobody, under no licence.",
        "systems": {
            "vanilla": {"title": "vanilla Transformer"},
            "mat": {
                "title": "MAT",
                "model": {"family": "mat"},
                "base": {"overrides": {"training.num_train_epochs": 1}},
            },
            "latent": {"title": "latent depth", "model": {"family": "latent_depth"}, "prune": True},
        },
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return study.load_study(tmp_path / "small.yaml")


@pytest.fixture
def folders(tmp_path):
    return study.Folders(tmp_path / "runs", tmp_path / "results", tmp_path / "cards", threads=1)


def results_of(recipe, bleu=30.0, loss=3.0):
    """A `results.json`."""
    return {
        "test": {
            "bleu": bleu, "chrf": bleu + 20, "multi_bleu": bleu - 1, "sentences": 4,
            "signature": {metric: f"of {metric}|x" for metric in ("bleu", "chrf", "multi_bleu")},
        },
        "parameters": 3_000_000,
        "train": {
            "steps": 1120, "epochs": 8.0, "target_tokens": 3_500_000, "tokens_per_second": 100 * bleu,
            "data_share": 0.01, "minutes": 20.0, "peak_memory_bytes": 2**30, "best_validation_loss": loss,
            "weights": "the last", "precision": "f32", "attention": "sdpa", "processes": 1,
        },
        "recipe": recipe.values,
        "versions": {"torch": "2"},
        "machine": {"processor": "abacus", "cores": 2, "gpus": []},
        "generation": {"sentences_per_second": bleu},
    }  # fmt: skip


def keep(of_study, folders, system, setting, seed, translations=None, pruned=None, **facts):
    """Put a run's results and translations where `make_run` puts them."""
    system = next(each for each in of_study.systems if each.name == system)
    recipe = study.recipe_of(of_study, system, of_study.search[setting], seed, folders.runs)
    folder = folders.results / system.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{recipe.name}.json").write_text(json.dumps(results_of(recipe, **facts)), encoding="utf-8")
    if pruned:
        small = {
            "parameters": 2_000_000,
            "layers": {"encoder": 4, "decoder": 3},
            "test": results_of(recipe, pruned)["test"],
        }
        (folder / f"pruned_{recipe.name}.json").write_text(json.dumps(small), encoding="utf-8")
    if translations:
        text = "".join(f"{line}\n" for line in translations)
        (folder / f"{recipe.name}.txt").write_text(text, encoding="utf-8")


def test_the_best_setting_is_that_of_the_first_seed_among_those_tried(small, folders):
    def best():
        return kept_runs.best_setting(small, kept_runs.load_results(small, folders.results), small.search)

    keep(small, folders, "vanilla", 0, 1, loss=3.0)
    assert best() == {"vanilla": small.search[0]}
    keep(small, folders, "vanilla", 1, 1, loss=2.9)
    keep(small, folders, "vanilla", 0, 2, loss=2.0)  # of another seed
    keep(small, folders, "mat", 0, 2)  # not tried with the first seed
    assert best() == {"vanilla": small.search[1]}
    assert list(report.page(small, folders.results)[0]) == ["vanilla"]


def test_rows_are_of_settings_that_all_systems_were_tried_with(small, folders):
    """While the search goes on, a system that is ahead in it has no more settings to choose from than the others."""
    keep(small, folders, "vanilla", 0, 1, bleu=30.0, loss=3.0)
    keep(small, folders, "vanilla", 1, 1, bleu=35.0, loss=2.0)
    keep(small, folders, "mat", 0, 1, loss=3.0)
    summary, _ = report.page(small, folders.results)
    assert summary["vanilla"]["bleu"]["mean"] == 30.0
    assert summary["vanilla"]["settings_tried"] == summary["mat"]["settings_tried"] == 1
    keep(small, folders, "mat", 1, 1, loss=4.0)
    summary, _ = report.page(small, folders.results)
    assert summary["vanilla"]["bleu"]["mean"] == 35.0
    assert summary["mat"]["setting"]["learning rate"] == small.search[0]["training.learning_rate"]
    assert summary["vanilla"]["settings_tried"] == summary["mat"]["settings_tried"] == 2


def test_a_row_is_of_the_studys_seeds_with_the_best_setting(small, folders):
    scores = {10: 33.0, 1: 30.0, 2: 31.5}
    for seed, bleu in scores.items():
        keep(small, folders, "vanilla", 0, seed, bleu=bleu, loss=3.0)
    keep(small, folders, "vanilla", 1, 1, bleu=99.0, loss=3.1)
    keep(small, folders, "vanilla", 0, 4, bleu=29.0, loss=3.0)
    summary, text = report.page(small, folders.results)
    row = summary["vanilla"]
    assert row["seeds"] == [1, 2, 10]
    assert row["bleu"]["mean"] == pytest.approx(np.mean([30.0, 31.5, 33.0]))
    assert row["bleu"]["standard_error"] == pytest.approx(np.std([30.0, 31.5, 33.0], ddof=1) / np.sqrt(3))
    assert "| vanilla Transformer | 3.00 M | 31.50 ± 0.87 | 51.50 ± 0.87 |  |  | 3 | 0.001, 0.1 (2 of 2) |" in text
    assert "99" not in text


def test_rows_that_were_made_again_are_told_below_the_table(small, folders):
    """Beside their means, with how far they are away and how far they may be; with all signs; and nothing pruned."""
    table = {"vanilla": [30.0, 31.5, 33.0], "mat": [29.0, 30.0, 31.6], "latent": [31.0, 32.0, 33.0]}
    again = {"vanilla": 29.0, "mat": 29.5, "latent": 33.1}
    for name, scores in table.items():
        for seed, bleu in zip((1, 2, 10, 4), [*scores, again[name]], strict=True):
            pruned = {"pruned": bleu} if name == "latent" else {}
            keep(small, folders, name, 0, seed, bleu=bleu, **pruned)
    _, text = report.page(small, folders.results)
    assert text.partition("| made again |")[2].splitlines()[2:5] == [
        "| vanilla Transformer | 4 | 29.00 | 31.50 ± 0.87 |  |  |",
        "| MAT | 4 | 29.50 | 30.20 ± 0.76 | +0.50 | -1.30 ± 0.15 |",
        "| latent depth | 4 | 33.10 | 32.00 ± 0.58 | +4.10 | +0.50 ± 0.29 |",
    ]
    # away from the mean by 2.50, 0.70 and 1.10; one more draw and the mean of three have 1.73, 1.51 and 1.15
    words = (
        "Made again with seed 4, 2 of 3 systems came out no further from the table's mean than its standard error "
        "lets one expect of one more seed, 3 no further than twice that; the furthest, vanilla Transformer, has 29.00 "
        "where the table has 31.50 ± 0.87; 1 of 2 differences from the baseline are in the table's direction."
    )
    expected = {name: np.std(scores, ddof=1) * np.sqrt(1 + 1 / 3) for name, scores in table.items()}
    assert [round(value, 2) for value in expected.values()] == [1.73, 1.51, 1.15]
    assert text.endswith(f"\n\n{words}\n")
    assert words in report.overview(small, folders.results).replace("\n", " ")


def test_a_row_that_was_made_again_without_the_baseline_has_no_difference(small, folders):
    for seed, bleu in ((1, 30.0), (2, 32.0), (4, 31.5)):
        keep(small, folders, "mat", 0, seed, bleu=bleu)
    keep(small, folders, "vanilla", 0, 1)
    text = report.page(small, folders.results)[1]
    assert "| MAT | 4 | 31.50 | 31.00 ± 1.00 |  |  |" in text
    assert "Made again with seed 4, 1 of 1 systems came out no further" in text
    assert "direction" not in text


def test_a_row_without_an_error_that_was_made_again_is_shown_without_a_word(small, folders):
    for seed in (1, 4):
        keep(small, folders, "vanilla", 0, seed, bleu=30.0 + seed)
    text = report.page(small, folders.results)[1]
    assert text.endswith("\n| vanilla Transformer | 4 | 34.00 | 31.00 |  |  |\n")
    assert "Made again" not in report.overview(small, folders.results)


def test_a_single_seed_has_no_error(small, folders):
    keep(small, folders, "vanilla", 0, 1)
    summary, text = report.page(small, folders.results)
    assert summary["vanilla"]["bleu"]["standard_error"] is None
    assert "| 30.00 | 50.00 |  |  | 1 | 0.001, 0.1 (1 of 2) | 3.00 |\n" in text
    assert "Made again" not in text


def test_rows_of_pruned_models(small, folders):
    keep(small, folders, "latent", 0, 1, loss=3.0, pruned=28.0)
    _, text = report.page(small, folders.results)
    assert "| latent depth, pruned | 2.00 M | 28.00 | 48.00 |  |  | 1 | layers left: 4 + 3 |" in text
    keep(small, folders, "latent", 1, 1, loss=2.9)  # better, and still to be pruned
    _, text = report.page(small, folders.results)
    assert "pruned" not in text
    assert "| 0.002, 0.1 (2 of 2) |" in text


def test_a_grid_shows_the_scores_by_two_keys_of_the_model(small, folders):
    """A row for each value of the first, a column for each of the second; a system with a base is no part of it."""
    assert report.grid(small, {}, {}) == ""
    mats = [
        study.System(
            f"mat_{branches}_{rate}", f"{branches}, {rate}", {"attention_branches": branches, "drop_branch": rate}
        )
        for branches, rate in ((1, 0.0), (1, 0.1), (2, 0.0))
    ]
    proximal = dataclasses.replace(mats[2], name="proximal", base=small.systems[0])
    model = {**small.model, "family": "mat"}
    small = dataclasses.replace(
        small, model=model, grid=("attention_branches", "drop_branch"), baseline="mat_1_0.0", systems=[*mats, proximal]
    )
    assert "attention" not in report.overview(small, folders.results)
    for system, bleu in (("mat_1_0.0", 31.0), ("mat_2_0.0", 32.0), ("proximal", 35.0), ("mat_1_0.1", 33.0)):
        keep(small, folders, system, 0, 1, bleu=bleu)
    keep(small, folders, "mat_1_0.1", 0, 2, bleu=34.0)
    expected = (
        "\n\n| sacreBLEU: attention branches, by drop branch | 0.0 | 0.1 |\n|---|---|---|\n"
        "| 1 | 31.00 | 33.50 ± 0.50 |\n| 2 | 32.00 |  |\n"
    )
    assert report.page(small, folders.results)[1].endswith(expected)
    assert expected in report.overview(small, folders.results)
    assert "speed" not in report.overview(small, folders.results)  # it was not measured


def test_every_run_is_listed_with_its_setting_and_seed(small, folders):
    keep(small, folders, "mat", 1, 1, bleu=28.0, loss=3.3)
    keep(small, folders, "vanilla", 1, 10, bleu=31.0)
    keep(small, folders, "vanilla", 1, 2, bleu=32.0)
    keep(small, folders, "vanilla", 0, 4, bleu=30.0, loss=3.1234)  # of a seed that is not the study's
    text = report.every_run(small, kept_runs.load_results(small, folders.results))
    head, rows = text.split("|---" * 11 + "|\n")
    assert "A setting is learning rate, dropout." in head
    assert "\nsacreBLEU `of bleu|x`  \nchrF `of chrf|x`  \n" in head
    assert rows.splitlines() == [
        "| vanilla Transformer | 0.001, 0.1 | 4 | 3,000,000 | 30.00 | 50.00 | 3.123 | f32 | 3,000 | 30.0 | 1.0 GiB |",
        "| vanilla Transformer | 0.002, 0.1 | 2 | 3,000,000 | 32.00 | 52.00 | 3.000 | f32 | 3,200 | 32.0 | 1.0 GiB |",
        "| vanilla Transformer | 0.002, 0.1 | 10 | 3,000,000 | 31.00 | 51.00 | 3.000 | f32 | 3,100 | 31.0 | 1.0 GiB |",
        "| MAT | 0.002, 0.1 | 1 | 3,000,000 | 28.00 | 48.00 | 3.300 | f32 | 2,800 | 28.0 | 1.0 GiB |",
    ]


def test_results_of_a_setting_that_is_not_searched_are_not_counted(small, folders):
    keep(small, folders, "vanilla", 0, 1)
    (file,) = (folders.results / "vanilla").iterdir()
    run = json.loads(file.read_text(encoding="utf-8"))
    run["recipe"]["training"]["learning_rate"] = 0.5
    file.write_text(json.dumps(run), encoding="utf-8")
    assert kept_runs.load_results(small, folders.results) == {}


def test_p_is_of_all_seeds_of_both_systems(small, folders, monkeypatch):
    """Of the translations of both by all seeds; not made again; and not shown where it is of other runs."""
    monkeypatch.setattr(report, "plot", lambda *_: None)
    good, bad = REFERENCES, [line.replace("ein", "kein").replace("Hund", "Tier") for line in REFERENCES]
    worse = ["Kein Haus ist da.", *REFERENCES[1:3], "Das Haus stand."]
    for seed, ours, theirs in ((1, good, bad), (2, worse, good)):
        keep(small, folders, "mat", 0, seed, translations=ours)
        keep(small, folders, "vanilla", 0, seed, translations=theirs)
    report.report(small, folders.results)
    expected = compare_systems([*bad, *good], [*good, *worse], REFERENCES, metrics=["bleu", "chrf"], runs=2)
    comparison = json.loads((folders.results / "comparison.json").read_text(encoding="utf-8"))
    assert comparison["mat"]["bleu"] == expected["bleu"]
    assert comparison["mat"]["chrf"] == expected["chrf"]
    p = f"{expected['bleu']['p_randomization']:.4f}"
    row = f"| MAT | 3.00 M | 30.00 ± 0.00 | 50.00 ± 0.00 | +0.00 ± 0.00 | {p} | 2 |"
    assert row in report.page(small, folders.results)[1]

    def again(*args, **kwargs):
        raise AssertionError("compared again")

    monkeypatch.setattr(kept_runs, "compare_to_baseline", again)
    report.report(small, folders.results)
    keep(small, folders, "mat", 0, 2, bleu=31.0)  # made once more, with another score
    assert "p" not in report.page(small, folders.results)[0]["mat"]
    keep(small, folders, "mat", 0, 2)
    assert "p" in report.page(small, folders.results)[0]["mat"]
    keep(small, folders, "mat", 1, 1, loss=9.0)
    for seed in (1, 2):  # the baseline's row is now of other runs, whose translations are not here
        keep(small, folders, "vanilla", 1, seed, loss=1.0)
    report.report(small, folders.results)
    assert "p" not in report.page(small, folders.results)[0]["mat"]


def test_the_difference_is_taken_seed_by_seed(small, folders):
    for seed, baseline, ours in ((1, 30.0, 31.0), (2, 34.0, 33.5)):
        keep(small, folders, "vanilla", 0, seed, bleu=baseline)
        keep(small, folders, "mat", 0, seed, bleu=ours)
    keep(small, folders, "vanilla", 0, 10, bleu=90.0)  # a seed that the other has not
    difference = report.page(small, folders.results)[0]["mat"]["difference"]
    assert difference["values"] == [1.0, -0.5]
    assert difference["standard_error"] == pytest.approx(np.std([1.0, -0.5], ddof=1) / np.sqrt(2))
    assert "difference" not in report.page(small, folders.results)[0]["vanilla"]


def test_how_much_of_a_study_is_done_is_said_until_it_is(small, folders):
    for name in ("vanilla", "mat", "latent"):
        for setting, loss in ((0, 2.0), (1, 3.0)):
            keep(small, folders, name, setting, 1, loss=loss)
    keep(small, folders, "mat", 0, 2)
    keep(small, folders, "mat", 1, 2)  # of a setting that is not the best
    words = "The study is not done: 6 of the 6 runs of the search and 1 of the 6 with other seeds are."
    assert words in report.overview(small, folders.results).replace("\n", " ")
    for name in ("vanilla", "mat", "latent"):
        for seed in (2, 10):
            keep(small, folders, name, 0, seed)
    assert "not done" not in report.overview(small, folders.results)


def test_systems_for_which_the_test_set_would_choose_otherwise_are_counted(small, folders):
    for name, scores in (("vanilla", (30.0, 31.0)), ("mat", (31.0, 30.0))):
        for setting, loss in ((0, 2.0), (1, 3.0)):
            keep(small, folders, name, setting, 1, loss=loss, bleu=scores[setting])
    keep(small, folders, "mat", 1, 2, bleu=99.0)  # of another seed than the first, with which settings are tried
    words = "Validation loss chose among 2 settings; of 1 of these 2 systems another one has the better score"
    assert words in report.overview(small, folders.results).replace("\n", " ")
    keep(small, folders, "vanilla", 0, 1, loss=2.0, bleu=31.0)
    assert "another one" not in report.overview(small, folders.results).replace("\n", " ")


def test_systems_that_were_still_learning_are_counted(small, folders):
    keep(small, folders, "vanilla", 0, 1)
    keep(small, folders, "mat", 0, 1)
    assert "still" not in report.overview(small, folders.results)
    file = next((folders.results / "mat").iterdir())
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"the last"', '"the checkpoint of step 1120, the best in validation loss"'))
    words = "Of 1 of these 2 systems the last checkpoint is the best"
    assert words in report.overview(small, folders.results).replace("\n", " ")
    file.write_text(text.replace('"the last"', '"the checkpoint of step 112, the best in validation loss"'))
    assert "still" not in report.overview(small, folders.results)


def test_speeds_are_shown_of_the_runs_that_are_in_the_table(small, folders):
    keep(small, folders, "vanilla", 0, 1, loss=3.0)
    run = study.run_name(small.systems[0], small.search[0], 1)
    times = {
        "training": {"by_baseline": 1.25, "tokens_per_second": 2500.0},
        "generation": {"by_baseline": 1.5, "tokens_per_second": 1600.0},
    }

    def shown(parameters):
        measured = {"vanilla": {"run": run, "parameters": parameters, **times}}
        timed = {"machine": {"processor": "an abacus", "threads": 1}, "precision": "bfloat16", "systems": measured}
        (folders.results / "speed.json").write_text(json.dumps(timed), encoding="utf-8")
        text = report.overview(small, folders.results)
        assert "Speeds: training in bfloat16, translating in float32, one core of an abacus." in " ".join(text.split())
        table = report.page(small, folders.results)[1]
        assert ("| 3.00 | 2,500 | 1,600 |\n" in table) == ("| 1.25 x | 1.50 x |" in text)
        return "| 1.25 x | 1.50 x |" in text

    assert not shown(2_900_000)  # the run was made again, and has pruned other layers
    assert shown(3_000_000)
    keep(small, folders, "vanilla", 1, 1, loss=2.0)  # another setting is the best now
    assert "| vanilla Transformer | 3.00 M | 30.00 |  |  | 1 |  |  |" in report.overview(small, folders.results)


def test_memory_is_shown_of_the_runs_that_are_in_the_table(small, folders):
    keep(small, folders, "vanilla", 0, 1, loss=3.0)
    run = study.run_name(small.systems[0], small.search[0], 1)
    weighed = {"vanilla": {"run": run, "parameters": 3_000_000, "peak_memory_bytes": 3 * 2**29}}
    report_of = {"precision": "float32", "systems": weighed}
    (folders.results / "memory.json").write_text(json.dumps(report_of), encoding="utf-8")
    assert "| 3.00 | 1.50 GiB |\n" in report.page(small, folders.results)[1]
    keep(small, folders, "vanilla", 1, 1, loss=2.0)  # another setting is the best now
    assert "| 2.00 |  |\n" in report.page(small, folders.results)[1]


def test_models_that_are_timed_are_those_of_the_results():
    """Also what pruning leaves of them, which the untrained models are told."""
    loaded = study.load_study(FOLDER / "multi30k.yaml")
    rows = kept_runs.chosen(loaded, kept_runs.load_results(loaded, FOLDER / "results" / "multi30k"))[1]
    runs = {name: of_seeds[1] for name, of_seeds in rows.items()}
    models, pruned = speed.make_models(runs, vocabulary=8000, attention="sdpa")
    assert {name: model.num_parameters() for name, model in (models | pruned).items()} == {
        name: run["parameters"] for name, run in runs.items()
    }
    assert len(pruned) == 2
    changed = {**runs["vanilla"], "parameters": 3}
    with pytest.raises(
        UserError, match=r"vanilla_learning_rate.* has 3 parameters, and a model by its recipe now has"
    ):
        speed.untrained(changed, vocabulary=8000, attention="sdpa")


def test_runs_that_end_while_a_page_is_written_are_on_the_next(small, folders, monkeypatch):
    keep(small, folders, "vanilla", 0, 1)
    load = kept_runs.load_results

    def load_and_end(*args):
        loaded = load(*args)
        keep(small, folders, "mat", 0, 1)
        return loaded

    monkeypatch.setattr(report, "load_results", load_and_end)
    monkeypatch.setattr(cards, "load_results", load_and_end)
    assert "MAT" not in report.overview(small, folders.results)
    (folders.results / "mat" / f"{study.run_name(small.systems[1], small.search[0], 1)}.json").unlink()
    assert list(cards.model_cards(small, folders.results)) == ["quality_small_vanilla.md"]


def test_p_of_some_of_the_seeds_says_so(small, folders):
    """As where a seed was added without the translations of the others; it is never that of other runs."""
    for seed in (1, 2):
        keep(small, folders, "vanilla", 0, seed)
        keep(small, folders, "mat", 0, seed)
    rows = kept_runs.chosen(small, kept_runs.load_results(small, folders.results))[1]
    ps = {"bleu": {"p_randomization": 0.25}, "chrf": {"p_randomization": 0.75}}
    tested = {"mat": {**kept_runs.compared(small, rows, "mat"), **ps}}
    (folders.results / "comparison.json").write_text(json.dumps(tested), encoding="utf-8")
    assert "| +0.00 ± 0.00 | 0.2500 | 2 |" in report.page(small, folders.results)[1]
    keep(small, folders, "mat", 0, 10)
    assert "| +0.00 ± 0.00 | 0.2500 (seeds 1, 2) | 3 |" in report.page(small, folders.results)[1]
    assert "| 0.7500 (seeds 1, 2) |" in cards.model_cards(small, folders.results)["quality_small_mat.md"]
    keep(small, folders, "mat", 0, 2, bleu=31.0)
    assert "p" not in report.page(small, folders.results)[0]["mat"]


# --- what is run, and what is not run again ---


@pytest.fixture
def trained(monkeypatch):
    """Training, replaced: it leaves results and says which runs were made. Systems in `fail` fail."""
    made = []

    def run(command, *, env, stdout, **_):
        recipe = yaml.safe_load(Path(command[-1]).read_text(encoding="utf-8"))
        folder = Path(recipe["training"]["output_dir"])
        made.append(folder.name)
        if folder.name.startswith(tuple(run.fail)):
            print("error: no such file", file=stdout)
            return subprocess.CompletedProcess(command, 2)
        loss = recipe["training"]["learning_rate"] * 1000
        folder.mkdir()
        results = results_of(study.check_recipe(recipe, folder.name, folder.name), loss=loss)
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
        (folder / "translations.txt").write_text("".join(f"{line}\n" for line in REFERENCES), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0)

    run.fail = ["nothing"]
    monkeypatch.setattr(study.subprocess, "run", run)
    test = {"bleu": 1.0, "chrf": 2.0, "signature": {}}
    pruned = {"parameters": 1, "layers": {"encoder": 1, "decoder": 1}, "test": test}
    monkeypatch.setattr(study, "score_pruned", lambda recipe: (pruned, REFERENCES))
    monkeypatch.setattr(report, "plot", lambda *_: None)
    monkeypatch.setattr(
        kept_runs, "compare_to_baseline", lambda _, systems, *__, **___: dict.fromkeys(systems, tested)
    )
    tested = {metric: {"p_randomization": 0.5} for metric in ("bleu", "chrf")}
    return made, run.fail


def names(of_study, *runs):
    """Folders of runs that are given as (system, setting, seed)."""
    systems = {each.name: each for system in of_study.systems for each in (system, system.base) if each}
    return sorted(study.run_name(systems[name], of_study.search[setting], seed) for name, setting, seed in runs)


def test_each_run_is_made_once(small, folders, trained, capsys):
    made, _ = trained
    study.make_study(small, small.systems, None, 2, folders)
    systems = ("vanilla", "mat", "mat_base", "latent")
    search = [(name, setting, 1) for name in systems for setting in (0, 1)]
    assert sorted(made) == names(small, *search, *((name, 0, seed) for name in systems for seed in (2, 10)))
    said = capsys.readouterr().out
    assert "6 of 6 runs have ended\n" in said
    assert "1 of 6 runs have ended, about " in said
    table = (folders.results / "table.md").read_text(encoding="utf-8")
    assert table.count("| 30.00 ± 0.00 | 50.00 ± 0.00 |") == 3
    assert table.count("| latent depth, pruned | 0.00 M | 1.00 ± 0.00 |") == 1
    for file in ("vanilla/vanilla", "latent/latent", "latent/pruned_latent"):
        translations = folders.results / f"{file}_{names(small, ('vanilla', 0, 2))[0].removeprefix('vanilla_')}.txt"
        assert translations.read_text(encoding="utf-8").splitlines() == REFERENCES
    made.clear()
    study.make_study(small, small.systems, None, 2, folders)
    assert made == []


def test_a_study_goes_on_where_none_of_its_runs_are(small, folders, trained):
    """On another machine: from the results, but for a model that was not pruned yet."""
    made, _ = trained
    study.make_study(small, small.systems, None, 2, folders)
    shutil.rmtree(folders.runs)
    made.clear()
    (name,) = names(small, ("latent", 1, 1))
    (folders.results / "latent" / f"pruned_{name}.json").unlink()
    study.make_study(small, small.systems, None, 2, folders)
    assert made == [name]


def test_a_run_has_its_time_from_start_to_end_unless_it_was_resumed(small, folders, trained):
    """With that of its base; of a run, or a base, that had begun before nobody has seen all."""
    mat = small.systems[1]
    kept = {}
    for seed, before in ((1, None), (2, mat.base), (3, mat)):
        if before is not None:
            study.train(study.recipe_of(small, before, small.search[0], seed, folders.runs), 1)
        study.make_run(small, mat, small.search[0], seed, folders)
        (name,) = names(small, ("mat", 0, seed))
        kept[seed] = json.loads((folders.results / "mat" / f"{name}.json").read_text(encoding="utf-8"))
    assert [seed for seed, run in kept.items() if run.get("wall_minutes", 0.0) > 0.0] == [1]


def test_a_row_is_made_again_from_the_committed_results(small, folders, trained):
    """With another seed."""
    made, _ = trained
    for setting, loss in ((0, 3.0), (1, 2.9)):
        keep(small, folders, "vanilla", setting, 1, loss=loss)
    study.make_study(small, small.systems[:1], [4], 1, folders)
    assert made == names(small, ("vanilla", 1, 4))
    assert "| vanilla Transformer | 4 | 30.00 | 30.00 |" in (folders.results / "table.md").read_text(encoding="utf-8")


def test_a_run_of_another_recipe_is_not_taken_for_this_one(small, folders, trained):
    recipe = study.recipe_of(small, small.systems[0], small.search[0], 1, folders.runs)
    study.train(recipe, 1)
    recipe.values["training"]["num_train_epochs"] = 3
    with pytest.raises(UserError, match=r"another recipe \(training.num_train_epochs: 2, now 3\)"):
        study.train(recipe, 1)


def test_results_of_another_recipe_are_not_taken_for_this_one(small, folders, trained):
    keep(small, folders, "vanilla", 0, 1)
    changed = dataclasses.replace(small, overrides={"training.num_train_epochs": 3})
    with pytest.raises(UserError, match=r"seed-1.json is of another recipe \(training.num_train_epochs: 2, now 3\)"):
        study.make_study(changed, changed.systems, None, 1, folders)


def test_a_run_that_fails_keeps_no_other_from_being_made(small, folders, trained):
    made, fail = trained
    fail[:] = ["mat_base"]
    with pytest.raises(UserError, match=r"2 of 6 runs: mat_base_.* has failed: error: no such file"):
        study.make_study(small, small.systems, None, 1, folders)
    search = [(name, setting, 1) for name in ("vanilla", "mat_base", "latent") for setting in (0, 1)]
    assert sorted(made) == names(small, *search)
    assert list(report.page(small, folders.results)[0]) == ["vanilla", "latent", "pruned_latent"]


def test_pages_are_made_of_the_results_alone(small, folders, tmp_path, monkeypatch, capsys):
    keep(small, folders, "vanilla", 0, 1)
    monkeypatch.delenv("HF_DEEPWIDE_DATA")
    script = [str(FOLDER / "study.py"), str(tmp_path / "small.yaml"), "--report", "--results", str(folders.results)]
    monkeypatch.setattr(sys, "argv", script)
    study.main()
    table = (folders.results / "table.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"{table}\n"
    assert json.loads((folders.results / "summary.json").read_text())["vanilla"]["bleu"]["mean"] == 30.0
    assert (folders.results / "bleu_by_parameters.png").is_file()
    assert (folders.results / "model_cards" / "quality_small_vanilla.md").is_file()


# --- model cards ---


def test_a_card_says_what_all_seeds_say(small, folders):
    for seed, bleu in ((1, 30.0), (2, 31.0)):
        keep(small, folders, "vanilla", 0, seed, bleu=bleu)
        keep(small, folders, "latent", 0, seed, bleu=bleu + 1, pruned=bleu)
    summary, _ = report.page(small, folders.results)
    _, rows = kept_runs.chosen(small, kept_runs.load_results(small, folders.results))
    pair = {name: kept_runs.compared(small, rows, name) for name in summary}
    tested = {"bleu": {"p_randomization": 0.0312}, "chrf": {"p_randomization": 0.5}}
    comparison = {name: {**of, **tested} for name, of in pair.items() if name != "vanilla"}
    (folders.results / "comparison.json").write_text(json.dumps(comparison), encoding="utf-8")
    found = cards.model_cards(small, folders.results)
    assert sorted(found) == ["quality_small_latent.md", "quality_small_vanilla.md"]
    card = found["quality_small_latent.md"]
    for words in (
        "# quality_small_latent\n",
        "benchmarks/quality/small.yaml --systems vanilla latent --results my_results\n",
        "| latent depth | 3.00 M | 31.50 ± 0.50 | 0.0312 | 51.50 ± 0.50 | 0.5000 |\n",
        "| latent depth, pruned to 4 + 3, 4 + 3 layers | 2.00 M | 30.50 ± 0.50 | 0.0312 |",
        "| vanilla Transformer | 3.00 M | 30.50 ± 0.50 |  | 50.50 ± 0.50 |  |\n",
        "| sacreBLEU | 31.00 | `of bleu\\|x` |",
        "## Data\n\nSentences of nobody, under no licence.\n",
        "learning rate 0.001, dropout 0.1, the best in validation loss of the 1 (of 2)",
        "The model of seed 1, with other runs beside it, generates 31.0 sentences a second; its training, in 1.0 GiB",
        "see the licence of the data above.\n",
    ):
        assert words in card
    assert "--systems vanilla --results my_results\n" in found["quality_small_vanilla.md"]
    assert "for whoever trained it" not in card
    assert not [sentence for sentence in [*SOURCES, *REFERENCES] if sentence in card]


def test_a_study_that_says_nothing_of_its_corpus_has_no_cards(small, folders):
    keep(small, folders, "vanilla", 0, 1)
    silent = study.Study(**{**vars(small), "corpus": None})
    assert cards.model_cards(silent, folders.results) == {}


def test_the_committed_cards_are_what_the_results_say():
    committed = {
        file.name: file.read_text(encoding="utf-8") for file in (study.ROOT / "model_cards").glob("quality_*")
    }
    made = {}
    for name in STUDIES:
        made |= cards.model_cards(study.load_study(FOLDER / f"{name}.yaml"), FOLDER / "results" / name)
    assert committed == made, "run benchmarks/quality/study.py STUDY --report, and commit model_cards/quality_*"
