"""Studies: which run is trained next, which setting is chosen, and what the pages show (the committed pages too)."""

import concurrent.futures
import dataclasses
import json
import math
import os
import re
import statistics
import sys
import threading
import time
import types
from hashlib import sha256
from itertools import islice
from pathlib import Path

import again
import cards
import comparison
import definition
import drawings
import numpy as np
import pages
import pytest
import records
import selection
import study as command
import torch
import trainings
import unfinished
import yaml
from definition import load_study, recipe_of, run_name
from digit_corpus import write_digits
from scipy.stats import ttest_ind, ttest_rel
from statsmodels.stats.weightstats import ttost_paired
from tiny_run import hold_out_few, tiny_values

from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.scoring import by_pair
from hf_deepwide.families import FAMILIES
from hf_deepwide.runs.compare import p_value
from hf_deepwide.runs.recipe import check_recipe, differences, load_recipe, packaged_recipes
from hf_deepwide.runs.run import run_recipe

FOLDER = Path(definition.__file__).parent
RESULTS = FOLDER.parent / "results"
DATA = FOLDER.parents[2] / "shared" / "data"
DEFINED = sorted(FOLDER.glob("*.yaml"))
STUDIES = [path for path in DEFINED if (RESULTS / path.stem).is_dir()]  # the other studies have no results yet
TUNED = "multi30k_en_de_tuned_"  # the prefix of the recipes for rows of the converged study
SMALL = """
recipe: {recipe}
model: {{family: vanilla_transformer, d_model: 16}}
overrides: {{training.max_steps: 40}}
search:
  - {{name: short, settings: [{{training.learning_rate: 0.001}}, {{training.learning_rate: 0.002}}],
      extend: true, overrides: {{training.max_steps: 10, training.warmup_steps: 5}}}}
  - {{settings: [{{model.dropout: 0.1}}, {{model.dropout: 0.3}}]}}
seeds: [1, 2]
baseline: plain
systems:
  plain: {{title: plain}}
  wide: {{title: wide, model: {{family: mat, attention_branches: 2}}}}
"""
RECIPE = """
model: {family: vanilla_transformer}
data: {train: train, validation: val, test: test}
tokenizer: {vocab_size: 100}
training: {warmup_steps: 4}
evaluation: {}
"""


@pytest.fixture
def small(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "small.yaml").write_text(SMALL.format(recipe=tmp_path / "recipe.yaml"))
    return load_study(tmp_path / "small.yaml")


def record(study, system, stage, setting, seed, loss, bleu=10.0, **more):
    return {
        "run": run_name(system, stage, setting, seed),
        "system": system.name,
        "stage": stage.name,
        "setting": setting,
        "seed": seed,
        "parameters": 3_000_000,
        "test": {"bleu": bleu, "chrf": 2 * bleu},
        "validation": {"loss": loss, "nll": loss - 1},
        "train": {"best_validation_loss": loss, "steps": 40, "validation_curve": [[20, loss + 1], [40, loss]]},
        **more,
    }


def test_a_search_goes_on_beyond_an_edge_and_then_to_the_next_stage(small):
    plain, short = small.systems[0], small.search[0]
    rate = "training.learning_rate"
    made = [record(small, plain, short, {rate: value}, 1, loss) for value, loss in ((0.001, 3.0), (0.002, 2.0))]
    assert [each[rate] for each in selection.settings_of(small, plain, 0, [])] == [0.001, 0.002]
    assert [each[rate] for each in selection.settings_of(small, plain, 0, made)] == [0.001, 0.002, 0.004]
    assert selection.settings_of(small, plain, 1, made) == []
    made.append(record(small, plain, short, {rate: 0.004}, 1, 2.5))
    assert len(selection.settings_of(small, plain, 0, made)) == 3
    assert selection.settings_of(small, plain, 1, made) == [
        {rate: 0.002, "model.dropout": 0.1},
        {rate: 0.002, "model.dropout": 0.3},
    ]


def test_trains_other_seeds_only_with_the_chosen_setting(small, tmp_path):
    plain, (short, full) = small.systems[0], small.search
    rate, dropout = "training.learning_rate", "model.dropout"
    made = [
        record(small, plain, short, {rate: rate_}, 1, loss) for rate_, loss in ((0.001, 3), (0.002, 2), (0.004, 3))
    ]
    made += [record(small, plain, full, {rate: 0.002, dropout: p}, 1, loss) for p, loss in ((0.1, 1.5), (0.3, 1.2))]
    records.write_records(tmp_path, made)
    workshop = command.Workshop(small, tmp_path / "runs", tmp_path, 1)
    assert [(run.setting, run.seed, run.stage.name) for run in workshop.missing([plain])] == [
        ({rate: 0.002, dropout: 0.3}, 2, "")
    ]
    recipe = recipe_of(small, plain, short, {rate: 0.001}, 1, tmp_path)
    assert recipe.values["training"]["max_steps"] == 10
    assert recipe.values["training"]["learning_rate"] == 0.001


def test_a_row_is_the_mean_over_seeds_with_its_standard_error(small, tmp_path):
    plain, wide = small.systems
    short, full = small.search
    rate, dropout = "training.learning_rate", "model.dropout"
    scores = {plain.name: [10.0, 12.0], wide.name: [13.0, 14.0]}
    made = [
        record(small, system, full, {rate: 0.002, dropout: 0.3}, seed, seed / 4, scores[system.name][seed - 1])
        for system in (plain, wide)
        for seed in small.seeds
    ]
    records.write_records(tmp_path, made)
    assert pages.write_pages(small, tmp_path) == "", "no search is finished"
    for system in (plain, wide):
        made += [record(small, system, short, {rate: r}, 1, loss) for r, loss in ((0.001, 3), (0.002, 2), (0.004, 3))]
        made.append(record(small, system, full, {rate: 0.002, dropout: 0.1}, 1, 1.5))
    records.write_records(tmp_path, made)
    text = pages.write_pages(small, tmp_path)
    rows = [line for line in text.splitlines() if line.startswith(("| plain |", "| wide |"))]
    _, wide_line, plain_line, _ = rows  # two rows in the table of losses, then two in the table of scores
    assert f"11.00 ± {statistics.stdev([10, 12]) / 2**0.5:.2f}" in plain_line
    assert f"| 0.375 ± {statistics.stdev([0.25, 0.5]) / 2**0.5:.3f} | -0.625 ± " in wide_line, "nats, smoothed and not"
    assert "| +0.000 | 1.0000 |" in wide_line
    assert (tmp_path / "learning_curves.png").is_file()


def test_translations_are_kept_with_their_run(small, tmp_path):
    lines = ["one", "", "two\u2028three"]
    for seed in (1, 2):
        made = record(small, small.systems[0], small.search[-1], {}, seed, 1.0)
        records.add_record(tmp_path, made, {made["run"]: [*lines, str(seed)]})
    assert [len(value) for value in records.read_translations(tmp_path).values()] == [4, 4]
    assert records.read_translations(tmp_path)[made["run"]] == [*lines, "2"]
    assert [each["seed"] for each in records.read_records(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"baseline": "none"}, "baseline"),
        ({"sistems": {}}, "sistems"),
        ({"systems": {"plain": {"title": "plain", "baseline": "other"}}}, "other"),
        ({"summary": ["plain", "fast"]}, "fast"),
        ({"cards": ["slow"], "corpus": "numbers"}, "slow"),
        ({"cards": ["plain"]}, "corpus"),
        ({"overrides": {"trainig.max_steps": 1}}, "trainig"),
        ({"systems": {"plain": {"title": "plain", "start": "later"}}}, "later"),
        ({"search": [{"settings": [{"model.dropout": 2}]}]}, "dropout"),
        ({"search": [{"settings": []}]}, "no settings"),
        ({"search": [{"settings": [{"model.dropout": 0.1}], "extend": True}]}, "extend"),
    ],
)
def test_a_wrong_study_is_refused(tmp_path, change, word):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    values = yaml.safe_load(SMALL.format(recipe=tmp_path / "recipe.yaml")) | change
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises((UserError, ValueError), match=word):
        load_study(tmp_path / "wrong.yaml")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_committed_table_is_made_of_the_records(path):
    study, results = load_study(path), RESULTS / path.stem
    made = records.read_records(results)
    rows = selection.chosen_rows(study, made)
    if made:
        assert (results / pages.SEARCH).read_text(encoding="utf-8") == pages.search_table(study, made)
    texts = pages.page_texts(study, rows, made, results)
    for file in ("docs/results.md", "README.md"):
        page = (FOLDER.parents[1] / file).read_text(encoding="utf-8")
        assert pages.with_tables(page, study, texts) == page
    if rows:
        assert (results / pages.TABLE).read_text(encoding="utf-8") == texts["study"]
    else:  # only a search has been made so far
        assert not (results / pages.TABLE).exists()


def test_figures_show_the_best_run_of_a_system_that_is_still_searched(small):
    plain, full = small.systems[0], small.search[1]
    made = [record(small, plain, full, {"model.dropout": rate}, 1, loss) for rate, loss in ((0.1, 3.0), (0.3, 2.0))]
    assert selection.chosen_rows(small, made) == {}
    assert selection.leading_rows(small, made) == {"plain": {1: made[1]}}
    assert selection.leading_rows(small, []) == {}


def test_the_grid_of_a_search_has_a_column_for_each_setting(small):
    (plain, wide), (short, full) = small.systems, small.search
    rate = "training.learning_rate"
    made = [record(small, plain, short, {rate: value}, 1, loss, test={}) for value, loss in ((0.002, 2), (0.001, 3))]
    made += [
        record(small, wide, short, {rate: 0.001}, 1, 1.5, test={}),
        record(small, wide, full, {rate: 0.001}, 1, 0.5),
    ]
    lost = record(small, wide, short, {rate: 0.004}, 1, 1, test={})
    made.append({key: value for key, value in lost.items() if key != "train"} | {"diverged": "at step 3"})
    assert pages.search_grid(small, made, -1).splitlines() == [
        "| system | parameters | learning_rate 0.001 |",
        "|---|---|---|",
        f"| {wide.title} | 3.00 M | 0.500; 10.00 |",
    ]
    assert pages.search_grid(small, made, 0).splitlines() == [
        "| system | parameters | learning_rate 0.001 | learning_rate 0.002 | learning_rate 0.004 |",
        "|---|---|---|---|---|",
        f"| {plain.title} | 3.00 M | 3.000 | 2.000 |  |",
        f"| {wide.title} | 3.00 M | 1.500 |  | diverged |",
    ]


def test_cards_show_the_runs_of_the_study_that_names_them():
    """Each family has one card, and its table has the score that the page of results shows."""
    made, folder = {}, FOLDER.parents[1] / "model_cards"
    for path in STUDIES:
        new = cards.cards(load_study(path), RESULTS / path.stem)
        assert made.keys() & new.keys() == set(), "two studies have a card of one family"
        made |= new
    assert set(made) == set(FAMILIES)
    assert {file.stem for file in folder.glob("*.md")} == {*made, "template"}
    page = (FOLDER.parents[1] / "docs/results.md").read_text(encoding="utf-8")
    for family, card in made.items():
        assert (folder / f"{family}.md").read_text(encoding="utf-8") == card
        scores = re.findall(r"^\| .* \| [\d.]+ M \| ([\d.]+ ± [\d.]+) \|", card, flags=re.MULTILINE)
        assert scores, family
        assert [score for score in scores if f"| {score} |" not in page] == [], family


def test_studies_have_records():
    """The tests below read these records, and would pass if there were none."""
    assert sum(len(records.read_records(RESULTS / path.stem)) for path in STUDIES) > 100


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_record_belongs_to_its_recipe(path):
    study = load_study(path)
    for made in records.read_records(RESULTS / path.stem):
        system = study.system(made["system"])
        stage = next(stage for stage in study.stages(system) if stage.name == made["stage"])
        recipe = recipe_of(study, system, stage, made["setting"], made["seed"], Path("runs"))
        ran = {section: dict(keys) for section, keys in made["recipe"].items()}
        for values in (ran, expected := recipe.values):
            values["model"].pop("init_from", None)  # paths to the base model, which differ between machines
            values["tokenizer"].pop("path", None)
        assert differences(ran, expected) == [], made["run"]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_kept_translations_have_the_score_of_their_run(path, monkeypatch):
    """Score up to three runs of a study again. Without the references (not in the repository), skip the test."""
    study, results = load_study(path), RESULTS / path.stem
    recipe = recipe_of(study, study.systems[0], study.search[-1], {}, 1, Path("runs"))
    translations = records.read_translations(results)
    kept = [made for made in records.read_records(results) if made["run"] in translations]
    if not kept:
        pytest.skip("the study keeps no translations")
    if not os.environ.get("HF_DEEPWIDE_DATA") and DATA.is_dir():
        monkeypatch.setenv("HF_DEEPWIDE_DATA", str(DATA))
    try:
        texts = load_parallel(recipe.data, "test")
    except UserError:
        pytest.skip("needs the corpora (HF_DEEPWIDE_DATA)")
    options = {"lowercase": recipe.evaluation.lowercase, "metrics": [study.metric]}
    for made in kept[:: math.ceil(len(kept) / 3)]:
        lines = iter(translations[made["run"]])  # those of one language pair after the other
        for pair, part in by_pair(texts, recipe.data).items():
            references = part["target"][:]
            scores = made["test"].get("pairs", {pair: made["test"]})[pair]
            found = score(list(islice(lines, len(references))), references, **options)
            assert found[study.metric] == pytest.approx(scores[study.metric]), (made["run"], pair)
        assert next(lines, None) is None


def test_records_belong_to_a_study():
    assert {folder.name for folder in RESULTS.iterdir() if folder.is_dir()} <= {path.stem for path in DEFINED}


@pytest.fixture
def made(small, tmp_path, monkeypatch):
    """A function that makes a study without training and returns its runs in order. `losses` gives a run's loss."""

    def make(losses, study=small):
        runs = []

        def train(workshop, run):
            runs.append(run)
            loss = losses(run)
            more = {"validation": {"loss": loss, "nll": loss - 1}}
            workshop._keep(record(study, run.system, run.stage, run.setting, run.seed, loss, **more), {})

        monkeypatch.setattr(command.Workshop, "_make", train)
        monkeypatch.setattr(command, "write_pages", lambda *_: "")  # figures take time
        command.Workshop(study, tmp_path / "runs", tmp_path / "results", 1).make(study.systems)
        return runs

    return make


def loss_of(run):
    """The loss is least at a rate of 0.002 and a dropout of 0.3. The wide system is one nat better than the plain."""
    rate, dropout = run.setting["training.learning_rate"], run.setting.get("model.dropout", 0)
    base = (run.system.name != "wide") + abs(rate - 0.002) * 100
    return 2 + base + abs(dropout - 0.3) + 0.01 * run.seed


def test_runs_systems_one_after_the_other(made):
    runs = made(loss_of)
    assert [run.system.name for run in runs] == ["plain"] * 6 + ["wide"] * 6
    assert [run.stage.name for run in runs[:6]] == ["short"] * 3 + [""] * 3
    assert [run.seed for run in runs[:6]] == [1] * 5 + [2]


def test_trains_more_seeds_of_baseline_and_close_systems(made, small):
    study = dataclasses.replace(small, close_seeds=[3, 4])
    far = made(loss_of, study)
    assert [run.seed for run in far if run.system.name == "plain"][-3:] == [2, 3, 4]
    assert {run.seed for run in far if run.system.name == "wide"} == {1, 2}


def test_a_close_system_has_more_seeds(made, small):
    study = dataclasses.replace(small, close_seeds=[3, 4])
    close = made(lambda run: loss_of(run) + (run.system.name == "wide"), study)
    assert {run.seed for run in close if run.system.name == "wide"} == {1, 2, 3, 4}


def test_a_system_starts_from_the_winner_of_another(made, small, tmp_path):
    wide = small.systems[1]
    search = [definition.Stage([{"model.drop_branch": 0.0}, {"model.drop_branch": 0.2}])]
    started = dataclasses.replace(wide, start="plain", start_rate=0.5, search=search)
    study = dataclasses.replace(small, systems=[small.systems[0], started])
    runs = [run for run in made(loss_of, study) if run.system.name == "wide"]
    winner = {"training.learning_rate": 0.001, "model.dropout": 0.3}
    assert [run.setting for run in runs[:2]] == [winner | {"model.drop_branch": rate} for rate in (0.0, 0.2)]
    assert [run.seed for run in runs] == [1, 1, 2]
    workshop = command.Workshop(study, tmp_path / "runs", tmp_path / "results", 1)
    name = workshop._start(runs[2], records.read_records(tmp_path / "results"))
    assert name == "plain_learning_rate-0.002_dropout-0.3_seed-2"
    recipe = recipe_of(study, started, search[0], runs[2].setting, 2, tmp_path / "runs", name)
    assert recipe.init_from == recipe.tokenizer.path == str(tmp_path / "runs" / name)


def test_the_order_is_shown_without_training(small, tmp_path):
    text = command.Workshop(small, tmp_path / "runs", tmp_path, 1).order(small.systems)
    assert text.index("plain_short_learning_rate-0.001_seed-1") < text.index("wide_short_learning_rate-0.001_seed-1")


def test_a_measured_study_shows_losses_first_with_the_seed_as_the_unit(made, small, tmp_path):
    study = dataclasses.replace(small, close_seeds=[3], margin=0.5)
    made(lambda run: loss_of(run) + 0.99 * (run.system.name == "wide"), study)
    rows = selection.chosen_rows(study, records.read_records(tmp_path / "results"))
    cells = pages.table_cells(study, rows, tmp_path / "results")
    losses = {name: [run["validation"]["loss"] for run in rows[name].values()] for name in rows}
    p = ttest_ind(losses["wide"], losses["plain"], equal_var=False).pvalue
    assert cells["wide"]["p (seeds)"] == cells["wide"]["p (Holm)"] == f"{p:.4f}"
    assert cells["wide"]["p (equal)"] == "< 0.0001"
    assert cells["wide"]["difference in loss"] == "-0.010"
    assert cells["plain"]["validation loss"] == f"3.020 ± {0.01 / 3**0.5:.3f}"
    assert cells["plain"]["not smoothed"].startswith("2.020")
    assert list(cells["plain"]).index("validation loss") < list(cells["plain"]).index("sacreBLEU")


def test_a_row_is_made_again_in_its_setting_and_set_beside(made, small, tmp_path):
    """With the new losses, the search would choose another setting. The row keeps its setting."""
    runs = made(loss_of)
    committed = records.read_records(tmp_path / "results")
    del runs[:]
    row = again.Again(small, small.systems[1], committed, tmp_path / "runs", tmp_path / "again", 1)
    for each in committed:
        each.setdefault("machine", {"processor": "P"})
    assert [(run.setting["model.dropout"], run.seed) for run in row.missing([])] == [(0.3, 1), (0.3, 2)]
    shifted = [each | {"validation": {"loss": each["validation"]["loss"] + 0.5}} for each in row.row.values()]
    row._keep(shifted[0], {})
    assert [run.seed for run in row.missing([])] == [2], "an interrupted row is continued"
    row._keep(shifted[1], {})
    row.make([row.system])
    assert runs == []
    losses = [each["validation"]["loss"] for each in row.row.values()]
    error = statistics.stdev(losses) / 2**0.5
    text = (tmp_path / "again" / again.PAGE).read_text()
    assert f"| committed | {statistics.mean(losses):.3f} ± {error:.3f} | 10.00 ± 0.00 | 1, 2 | P |" in text
    assert f"| made again | {statistics.mean(losses) + 0.5:.3f} ± {error:.3f} |" in text
    assert f"+0.5000 away, {0.5 / (error * 2**0.5):.1f} standard errors" in text
    assert records.read_records(tmp_path / "results") == [
        {key: value for key, value in each.items() if key != "machine"} for each in committed
    ]
    with pytest.raises(UserError, match="no row of plain"):
        again.Again(small, small.systems[0], committed[6:], tmp_path, tmp_path, 1)


@pytest.mark.parametrize("name", [name for name in packaged_recipes() if name.startswith(TUNED)])
def test_tuned_recipes_have_the_settings_that_the_search_has_chosen(name):
    study = load_study(FOLDER / "multi30k_converged.yaml")
    system = study.system(name.removeprefix(TUNED))
    setting = selection.winner(study, system, records.read_records(RESULTS / study.name))
    start = f"{TUNED}{system.start}" if system.start else None
    chosen = recipe_of(study, system, study.stages(system)[-1], setting, 1, Path("runs"), start)
    values = load_recipe(name).values
    if values["tokenizer"].get("codes", "") is None:  # null: this recipe does not read the file of merges of its base
        del values["tokenizer"]["codes"]
    assert differences(values, chosen.values) == []


VOCABULARY = 10_126  # the size of the tokenizer that is built from the corpus's merges


@pytest.mark.parametrize("system", load_study(FOLDER / "multi30k_converged.yaml").systems, ids=lambda each: each.name)
def test_the_systems_of_the_study_have_three_million_parameters(system):
    study = load_study(FOLDER / "multi30k_converged.yaml")
    fields = study.model | system.model
    family = FAMILIES[fields.pop("family")]
    with torch.device("meta"):
        model = family.lm(family.config(vocab_size=VOCABULARY, **fields))
    large = {"mat_proximal", "mat_scratch", "vanilla_large"}  # three times the attention, or plain of that size
    expected = 4.59e6 if system.name in large else 3.0e6
    assert model.num_parameters() == pytest.approx(expected, rel=0.02)


def test_every_system_of_the_study_is_searched_alike():
    """Each system has three rates, then three dropouts in full runs (`mat`: six settings).

    A system that starts from another system takes over that system's setting, and is not checked.
    """
    study = load_study(FOLDER / "multi30k_converged.yaml")
    ablations = {"depthwise_lstm_closed"}  # trained with the setting that the search of another system found
    for system in study.systems:
        stages = study.stages(system)
        if system.start is None and system.name not in ablations:
            assert [len(stage.settings) for stage in stages] == [3, 6 if system.name == "mat" else 3]
            assert stages[0].extend
            assert stages[0].overrides["training.num_train_epochs"] == 8


CONTROL = """
recipe: {folder}/recipe.yaml
overrides: {{data.test: [one, two]}}
model: {model}
search: [{{settings: [{{}}]}}]
seeds: [1, 2]
baseline: tiny
metric: multi_bleu
published: {{title: A paper, scores: {{one: 41.02, two: 33.36}}}}
systems: {{tiny: {{title: tiny}}}}
"""


def train_here(values, threads):
    """Train in this process: starting another process would take most of the test's time."""
    name = Path(values["training"]["output_dir"]).name
    run_recipe(check_recipe(values, name, name))


def test_a_study_trains_scores_and_starts_systems_from_winners(tmp_path, monkeypatch):
    """Train the winner here, then the system that starts from it in a process of its own."""
    folder = write_digits(tmp_path)
    values = tiny_values(folder / "x", "vanilla_transformer", max_steps=4, warmup_steps=2)
    values["data"] = {"root": str(folder), "train": "train", "validation": "val", "test": ["one", "two"]}
    values["tokenizer"] = {"vocab_size": 60}
    values["evaluation"]["metrics"] = ["multi_bleu", "chrf"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    search = [{"settings": [{"training.learning_rate": 0.002, "model.dropout": 0.2}]}]
    wider = {"family": "mat", "attention_branches": 2, "drop_granularity": "sentence", "drop_branch": 0.2}
    systems = {
        "plain": {"title": "plain"},
        "wide": {"title": "wide", "model": wider, "start": "plain", "start_rate": 0.5, "search": [{"settings": [{}]}]},
    }
    study = {"recipe": str(folder / "recipe.yaml"), "model": values["model"], "search": search, "seeds": [1]}
    study |= {"baseline": "plain", "metric": "multi_bleu", "systems": systems}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(study))
    study, results = load_study(folder / "tiny.yaml"), folder / "results"
    workshop = command.Workshop(study, folder / "runs", results, 2)
    with monkeypatch.context() as patch:
        patch.setattr(command, "train", train_here)
        workshop.make(study.systems[:1])
    workshop.make(study.systems)
    plain, wide = records.read_records(results)
    assert set(plain["test"]["sets"]) == {"one", "two"}
    assert wide["recipe"]["model"]["init_from"] == str(folder / "runs" / plain["run"])
    digest = sha256((folder / "runs" / plain["run"] / "model.safetensors").read_bytes()).hexdigest()
    assert plain["digests_of_weights"] == {"weights": digest}
    assert wide["digests_of_weights"]["started_from"] == digest != wide["digests_of_weights"]["weights"]
    assert (wide["setting"]["training.learning_rate"], wide["setting"]["model.dropout"]) == (0.001, 0.2)
    assert {run: len(lines) for run, lines in records.read_translations(results).items()} == {
        plain["run"]: 8,
        wide["run"]: 8,
    }
    assert "| wide |" in (results / pages.TABLE).read_text(encoding="utf-8")
    assert command.Workshop(study, folder / "runs", results, 1).missing(study.systems) == []

    # another machine has the records, but no run folders: the run that the system starts from is trained again
    records.write_records(results, [plain])
    monkeypatch.setattr(command, "train", train_here)
    workshop = command.Workshop(study, folder / "elsewhere", results, 1)
    workshop.make(study.systems)
    again = records.read_records(results)[1]
    assert again["recipe"]["model"]["init_from"] == str(folder / "elsewhere" / plain["run"])
    assert again["validation"] == wide["validation"]


def test_a_study_of_several_language_pairs_shows_each_and_the_layers_of_each(tmp_path, monkeypatch):
    hold_out_few(monkeypatch)
    monkeypatch.setattr(command, "train", train_here)
    latent = {"decoder_layers": 2, "latent_encoder": False, "layer_selection_init": 0.5}
    values = tiny_values(tmp_path / "x", "latent_depth", latent, max_steps=4, warmup_steps=2)
    values["data"] = {"format": "phrases", "pairs": ["de-en", "en-de"], "train_size": 150, "language_tag": "decoder"}
    values["data"]["posteriors"] = "target"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    study = {"recipe": str(tmp_path / "recipe.yaml"), "model": values["model"], "search": [{"settings": [{}]}]}
    study |= {
        "seeds": [1, 2],
        "baseline": "plain",
        "systems": {"plain": {"title": "plain"}, "other": {"title": "other"}},
    }
    (tmp_path / "languages.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    study, results = load_study(tmp_path / "languages.yaml"), tmp_path / "results"
    workshop = command.Workshop(study, tmp_path / "runs", results, 1)
    workshop._make(workshop.missing(study.systems[:1])[0])

    (made,) = records.read_records(results)
    assert made["chosen_layers"] == {"en": {"decoder": [0, 1]}, "de": {"decoder": [0, 1]}}
    folder = tmp_path / "runs" / made["run"]
    (kept,) = records.read_translations(results).values()
    assert kept == [line for pair in ("de-en", "en-de") for line in read_lines(folder / f"translations.{pair}.txt")]
    for system, seed, bleu in (("plain", 2, 10.0), ("other", 1, 20.0), ("other", 2, 22.0)):
        pairs = {"de-en": {"bleu": bleu, "chrf": 1.0}, "en-de": {"bleu": bleu + 2, "chrf": 1.0}}
        test = {"average": {"bleu": bleu + 1, "chrf": 1.0}, "pairs": pairs}
        run = run_name(study.system(system), study.search[0], {}, seed)
        records.add_record(results, made | {"run": run, "system": system, "seed": seed, "test": test}, {})
    lines = pages.write_pages(study, results).splitlines()
    head, _, _, other = lines[[line.startswith("| system") for line in lines].index(True, 1) :][:4]
    cells = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (head, other)), strict=True))
    assert (cells["sacreBLEU"], cells["de-en"], cells["en-de"]) == ("22.00 ± 1.00", "21.00 ± 1.00", "23.00 ± 1.00")
    assert "p (sentences)" not in head
    rows = selection.chosen_rows(study, records.read_records(results))
    assert "| other | 2 | de | decoder | 1 2 | 2 |" in pages.page_texts(study, rows, [made], results)["layers"]


def test_sentences_are_tested_again_where_translations_have_changed(small, tmp_path, monkeypatch):
    """A run that is made again keeps its name. Without translations (a partial clone), the old test stays."""
    calls, translations = [], {}
    monkeypatch.setattr(
        comparison, "compare_systems", lambda *args, **_: calls.append(args) or {"bleu": {"calls": len(calls)}}
    )
    monkeypatch.setattr(comparison, "load_parallel", lambda *_: {"target": ["x"]})
    monkeypatch.setattr(comparison, "read_translations", lambda _: translations)
    rows = {"plain": {1: {"run": "plain-1"}}, "wide": {1: {"run": "wide-1"}}}
    for lines, made in ((["a"], 1), (["a"], 1), (["b"], 2), (None, 2)):
        translations.clear()
        translations.update({} if lines is None else {"plain-1": ["r"], "wide-1": lines})
        comparison.compare(small, rows, tmp_path)
        assert len(calls) == made
        assert comparison.load_comparison(tmp_path)["wide"]["bleu"] == {"calls": made}


def test_sentences_are_tested_by_the_scores_of_the_runs(small, tmp_path, monkeypatch):
    """The tests use the tokenizer that the study sets for the score."""
    small.overrides["evaluation.tokenize"] = "char"
    translations, texts = {"plain-1": ["abcde", "cdef"], "wide-1": ["abcdef", "cdefg"]}, ["abcdef", "cdefh"]
    monkeypatch.setattr(comparison, "load_parallel", lambda *_: {"target": texts})
    monkeypatch.setattr(comparison, "read_translations", lambda _: translations)
    rows = {"plain": {1: {"run": "plain-1"}}, "wide": {1: {"run": "wide-1"}}}
    comparison.compare(small, rows, tmp_path)
    found = comparison.load_comparison(tmp_path)["wide"]["bleu"]
    scores = [score(translations[run], texts, tokenize="char")["bleu"] for run in ("wide-1", "plain-1")]
    assert [found[side]["score"] for side in ("system", "baseline")] == pytest.approx(scores)
    assert min(scores) > 50


DIVERGES = """
import json, sys
from pathlib import Path
import yaml
recipe = yaml.safe_load(Path(sys.argv[1]).read_text())
run = Path(recipe["training"]["output_dir"])
if recipe["model"]["dropout"] == 0.3:
    print("error: step 2: the loss is nan")
    sys.exit(3)
if recipe["model"]["dropout"] == 0.4:
    (run / "faults" / "step-2").mkdir(parents=True)  # it was skipped
    sys.exit("error: the disk is full")
run.mkdir(parents=True)
loss = recipe["model"]["dropout"]
(run / "results.json").write_text(json.dumps({
    "recipe": recipe, "parameters": 1, "validation": {"loss": loss, "nll": loss}, "train": {"steps": 9},
    "test": {"bleu": 1.0, "chrf": 2.0, "signature": {}},
}))
(run / "translations.txt").write_text("a\\n")
"""


def test_a_run_that_diverges_is_kept_and_the_study_goes_on(small, tmp_path, monkeypatch):
    """A run that fails for another reason (a full disk) leaves no record, and is made again."""
    (tmp_path / "train.py").write_text(DIVERGES)
    monkeypatch.setattr(trainings, "COMMAND", (sys.executable, tmp_path / "train.py"))
    dropouts = [{"model.dropout": value} for value in (0.3, 0.1, 0.4)]
    study = dataclasses.replace(
        small, systems=small.systems[:1], search=[definition.Stage(dropouts)], seeds=[1], close_seeds=[]
    )
    workshop = command.Workshop(study, tmp_path / "runs", tmp_path / "results", 1)
    monkeypatch.setattr(workshop, "report", lambda: "")
    with pytest.raises(UserError, match=r"1 runs failed: .*the disk is full"):
        workshop.make(study.systems)
    lost, found = records.read_records(tmp_path / "results")
    assert "the loss is nan" in lost["diverged"]
    assert selection.validation_loss(lost) == math.inf
    json.loads((tmp_path / "results" / records.RUNS).read_text().splitlines()[0], parse_constant=pytest.fail)
    assert [run.setting for run in workshop.missing(study.systems)] == [{"model.dropout": 0.4}]
    assert pages.diverged_runs(study, [lost]) == "\nDiverged: plain: dropout 0.3, seed 1.\n"
    worse = {**found, "setting": {"model.dropout": 0.4}, "validation": {"loss": 9.0}}
    assert selection.chosen_rows(study, [lost, found, worse]) == {"plain": {1: found}}
    all_lost = [{**lost, "setting": setting} for setting in dropouts]
    assert selection.chosen_rows(study, all_lost) == {}
    drawings.plot_curves(
        study, {}, tmp_path / "curves.png", [{**lost, "train": {"validation_curve": [[1, 2.0], [2, 3.0]]}}]
    )
    assert (tmp_path / "curves.png").is_file()


def test_runs_that_diverge_in_the_search_are_shown(small, tmp_path):
    """All rates of one system diverge here. The other system has a row."""
    (plain, wide), (short, full) = small.systems, small.search
    rates = [{"training.learning_rate": rate} for rate in (0.0005, 0.001, 0.002)]
    curve = {"steps": 9, "validation_curve": [[1, 2.0], [2, 9.0]]}
    lost = [record(small, wide, short, rate, 1, 0.0, diverged="nan", train=curve) for rate in rates]
    ended = [record(small, plain, short, rate, 1, 2.0 + number) for number, rate in enumerate(rates)]
    settings = [rates[0] | setting for setting in full.settings]
    below = [{"training.learning_rate": 0.00025}]
    ended += [record(small, plain, short, rate, 1, 3.0) for rate in below]
    ended += [record(small, plain, full, setting, 1, 2.0 + number) for number, setting in enumerate(settings)]
    for each in (*lost, *ended):
        records.add_record(tmp_path, each, {})
    text = pages.write_pages(small, tmp_path)
    assert "\nDiverged: wide: learning_rate 0.0005, seed 1 (short); learning_rate 0.001, seed 1 (short); " in text
    search = (tmp_path / pages.SEARCH).read_text()
    assert "| wide | short | learning_rate 0.002 | 1 | diverged |  |" in search
    assert search.count("| plain | ") == len(ended)


def test_a_system_can_have_a_baseline_of_its_own(made, small, tmp_path):
    """The difference and the test of the third system are computed against its own baseline."""
    plain, wide = small.systems
    third = dataclasses.replace(wide, name="third", title="third", baseline="wide")
    study = dataclasses.replace(small, systems=[plain, wide, third], costs=True)
    losses = {"plain": 2.0, "wide": 4.0, "third": 5.0}

    def loss(run):
        far = abs(run.setting["training.learning_rate"] - 0.001)
        return losses[run.system.name] + 0.01 * run.seed + run.setting.get("model.dropout", 0) + far

    made(loss, study)
    ended = records.read_records(tmp_path / "results")
    for each in ended:
        each["train"] |= {"steps": 60, "processor_minutes": 2.0, "peak_memory_bytes": 3 * 2**29}
    rows = selection.chosen_rows(study, ended)
    cells = pages.table_cells(study, rows, tmp_path / "results")
    assert {name: row["compared with"] for name, row in cells.items()} == {
        "plain": "",
        "wide": "plain",
        "third": "wide",
    }
    assert {name: row["difference in loss"] for name, row in cells.items()} == {
        "plain": "",
        "wide": "+2.000",
        "third": "+1.000",
    }
    own = [[each["validation"]["loss"] for each in rows[name].values()] for name in ("third", "wide")]
    assert cells["third"]["p (seeds)"] == p_value(ttest_ind(*own, equal_var=False).pvalue)
    assert cells["third"]["processor seconds an update, in all"] == "2.00"
    assert cells["third"]["peak memory, GiB"] == "1.5"


def test_systems_are_tested_by_what_their_runs_share(small, tmp_path):
    """Runs that start from the same trained model are tested in pairs, seed by seed, in comparisons and in the table.

    The p values are adjusted for all comparisons and systems that the study plans, even if they have no runs.
    """
    plain, wide = small.systems
    started = dataclasses.replace(wide, name="started", title="started", start="plain")
    pairs = [["wide", "plain"], ["started", "plain"], ["started", "absent"]]
    absent = dataclasses.replace(wide, name="absent", title="absent")
    study = dataclasses.replace(small, systems=[plain, wide, started, absent], comparisons=pairs)
    losses = {"plain": [2.0, 2.3, 2.5], "wide": [2.2, 2.6, 2.9], "started": [1.9, 2.15]}
    rows = {
        name: {seed: record(study, study.system(name), small.search[1], {}, seed, loss, 40 - loss * seed)
               for seed, loss in enumerate(values, start=1)}
        for name, values in losses.items()
    }  # fmt: skip
    first, second = pages.comparisons(study, rows).splitlines()[2:]
    p = ttest_ind(losses["wide"], losses["plain"], equal_var=False).pvalue
    paired = ttest_rel(losses["started"], losses["plain"][:2]).pvalue
    assert 3 * paired < 2 * p < 1, "so the smaller is corrected for three, and the larger for two"
    assert first.startswith(f"| wide | plain | Welch | 3 | +0.300 | {p_value(2 * p)} |")
    assert second.startswith(f"| started | plain | paired t | 2 | -0.125 | {p_value(3 * paired)} |")
    begun = rows | {"absent": {1: record(study, absent, small.search[1], {}, 1, 2.0, 40)}}
    assert pages.comparisons(study, begun).splitlines()[2:4] == [first, second], "one seed makes no test"
    cells = pages.table_cells(dataclasses.replace(study, margin=0.3), rows, tmp_path)
    own = [np.array(losses[name][:2]) for name in ("started", "plain")]
    assert cells["started"]["difference in loss"] == "-0.125", "of the seeds that both have"
    assert [cells[name]["p (seeds)"] for name in ("wide", "started")] == [p_value(p), p_value(paired)]
    assert [cells[name]["p (Holm)"] for name in ("wide", "started")] == [p_value(2 * p), p_value(3 * paired)]
    assert cells["started"]["p (equal)"] == p_value(3 * ttost_paired(*own, -0.3, 0.3)[0])
    about = [" ".join(pages.about_losses(study, each)) for each in (rows, {"plain": rows["plain"]})]
    assert ["pair runs of one seed" in text for text in about] == [True, False]
    assert pages.comparisons(small, rows) == ""
    apart = {"plain": {1: rows["plain"][1]}, "started": {2: rows["started"][2]}}
    assert pages.comparisons(study, apart) == "", "no seed is common to both"


def test_what_continues_a_run_is_drawn_and_counted_after_it(small, tmp_path, monkeypatch):
    plain, wide = small.systems
    started = dataclasses.replace(wide, name="started", start="plain")
    study = dataclasses.replace(small, systems=[plain, started])
    rows = {each.name: {1: record(study, each, small.search[1], {}, 1, 2.0)} for each in study.systems}
    figures = []
    monkeypatch.setattr(drawings, "save", lambda figure, path: figures.append(figure))
    drawings.plot_curves(study, rows, tmp_path / "curves.png")
    curves, ends = figures[0].axes
    assert [line.get_xdata().tolist() for line in curves.lines] == [[20, 40], [60, 80]]
    assert [label.get_text() for label in ends.get_yticklabels()] == [each.title for each in study.systems]
    assert [pages.updates_since_start(study, rows, name) for name in rows] == ["40", "40 + 40"]


def test_a_score_of_several_test_sets_says_so(small):
    """The score is computed over the sentences of all sets together. It is not the mean of the sets' scores."""
    (plain, _), stage = small.systems, small.search[1]
    one, several = ({"bleu": 1.0, "sentences": 2461, **more} for more in ({}, {"sets": {"first": {}, "second": {}}}))
    rows = [{"plain": {1: record(small, plain, stage, {}, 1, 2.0, test=test)}} for test in (one, several)]
    assert [pages.score_title(each, "bleu") for each in rows] == [
        pages.TITLES["bleu"],
        f"{pages.TITLES['bleu']}, all sets",
    ]
    about = [" ".join(pages.about_scores(small, each)) for each in rows]
    assert [" 2,461 sentences together" in text for text in about] == [False, True]


def test_a_validation_loss_that_is_no_number_is_a_divergence(small, tmp_path, monkeypatch):
    """The run ends without an error. Only its validation loss shows the divergence."""
    (tmp_path / "train.py").write_text(DIVERGES)
    monkeypatch.setattr(trainings, "COMMAND", (sys.executable, tmp_path / "train.py"))
    study = dataclasses.replace(
        small,
        systems=small.systems[:1],
        search=[definition.Stage([{"model.dropout": 0.1}])],
        seeds=[1],
        close_seeds=[],
    )
    workshop = command.Workshop(study, tmp_path / "runs", tmp_path / "results", 1)
    monkeypatch.setattr(workshop, "report", lambda: "")
    monkeypatch.setattr(command, "validation_loss", lambda results: math.nan)
    workshop.make(study.systems)
    (lost,) = records.read_records(tmp_path / "results")
    assert lost["diverged"] == "the validation loss is nan"


def test_a_row_says_how_many_of_its_seeds_diverged(made, small, tmp_path):
    made(loss_of, small)
    ended = records.read_records(tmp_path / "results")
    setting = selection.winner(small, small.systems[0], ended)
    (second,) = [each for each in ended if (each["system"], each["seed"], each["setting"]) == ("plain", 2, setting)]
    second["diverged"] = "nan"
    records.write_records(tmp_path / "results", ended)
    cells = pages.table_cells(small, selection.chosen_rows(small, ended), tmp_path / "results")
    assert cells["plain"]["seeds"] == "1 of 2, the others diverged"
    assert cells["wide"]["seeds"] == "2"


def test_gradient_norms_are_kept_at_a_few_moments(small, tmp_path, monkeypatch):
    history = [{"step": 1, "loss": 3.0, "gradient_norms": {"encoder": [1.23456, 2.0], "decoder": [3.0]}}]
    history += [{"step": 10 * n, "gradient_norms": {"encoder": [n, n], "decoder": [n]}} for n in range(1, 30)]
    kept = records.gradient_norms([*history, {"step": 300, "eval_loss": 1.0}])
    assert [each["step"] for each in kept] == [1, 60, 120, 170, 230, 290]
    assert kept[0] == {"step": 1, "encoder": [1.23, 2.0], "decoder": [3.0]}
    assert records.gradient_norms(history[:1]) == kept[:1]
    assert records.gradient_norms([]) == []
    run, lost = {"system": "plain", "gradient_norms": kept}, {"system": "wide", "diverged": "", "gradient_norms": kept}
    drawings.plot_gradient_norms(small, {"plain": {1: run}}, tmp_path / "norms.png", [lost])
    assert (tmp_path / "norms.png").is_file()
    figures = []
    monkeypatch.setattr(drawings, "save", lambda figure, path: figures.append(figure))
    drawings.plot_gradient_norms(
        small, {"plain": {1: run}}, tmp_path / "norms.png", [lost | {"gradient_norms": kept[:3]}]
    )
    assert [axis.get_title() for axis in figures[0].axes] == ["update 1", "update 120 to 290"]


def test_a_run_whose_base_diverges_is_kept_as_diverged(small, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(DIVERGES)
    monkeypatch.setattr(trainings, "COMMAND", (sys.executable, tmp_path / "train.py"))
    plain, wide = small.systems
    wide = dataclasses.replace(wide, base=plain)
    study = dataclasses.replace(
        small, systems=[wide], search=[definition.Stage([{"model.dropout": 0.3}])], seeds=[1], baseline="wide"
    )
    workshop = command.Workshop(study, tmp_path / "runs", tmp_path / "results", 1)
    monkeypatch.setattr(workshop, "report", lambda: "")
    workshop.make(study.systems)
    (lost,) = records.read_records(tmp_path / "results")
    assert lost["system"] == "wide"
    assert re.search(r"plain.* has failed: .*the loss is nan", lost["diverged"])
    assert workshop.missing(study.systems) == []


def test_where_all_rates_diverge_the_search_goes_down(small):
    plain, short = small.systems[0], small.search[0]
    rate = "training.learning_rate"
    lost = [record(small, plain, short, {rate: value}, 1, 0.0, diverged="nan") for value in (0.001, 0.002)]
    assert [each[rate] for each in selection.settings_of(small, plain, 0, lost)] == [0.001, 0.002, 0.0005]
    assert selection.best(lost, plain, short, 1) is None
    found = [*lost, record(small, plain, short, {rate: 0.0005}, 1, 2.0)]
    assert selection.best(found, plain, short, 1) == {rate: 0.0005}


def test_nothing_starts_from_a_run_that_diverged(small):
    plain, full = small.systems[0], definition.Stage([{"model.dropout": 0.1}])
    study = dataclasses.replace(small, search=[full])
    (setting,) = full.settings
    ended = [record(study, plain, full, setting, seed, 2.0) for seed in (1, 2)]
    assert selection.winners_run(study, "plain", 2, ended) == run_name(plain, full, setting, 2)
    ended[1]["diverged"] = "nan"
    assert selection.winners_run(study, "plain", 2, ended) is None


def test_a_start_is_made_once_for_the_runs_that_need_it(small, tmp_path, monkeypatch):
    at_work, together, starts = threading.Lock(), [], []

    def train(recipe, *, threads):
        if recipe != "the start's":
            return
        starts.append(recipe)
        together.append(not at_work.acquire(blocking=False))
        time.sleep(0.2)
        at_work.release()

    monkeypatch.setattr(command, "train", train)
    workshop = command.Workshop(small, tmp_path / "runs", tmp_path, 2)
    monkeypatch.setattr(workshop, "_start", lambda run, records: "start")
    monkeypatch.setattr(
        workshop, "_recipe_of_record", lambda name: types.SimpleNamespace(name="start", values="the start's")
    )
    runs = [command.Run(small.systems[0], small.search[0], {}, seed) for seed in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for made in [pool.submit(workshop._make, run) for run in runs]:
            assert isinstance(made.exception(), FileNotFoundError)  # no run has written results.json
    assert len(starts) == 2
    assert not any(together)


def test_a_finished_run_is_adopted_and_stands_beside_the_published_scores(tmp_path):
    folder = write_digits(tmp_path)
    values = tiny_values(folder / "runs" / "a", "vanilla_transformer", max_steps=4, warmup_steps=2, seed=1)
    values["data"] = {"root": str(folder), "train": "train", "validation": "val", "test": "one"}
    values["tokenizer"] = {"vocab_size": 60}
    values["evaluation"]["metrics"] = ["multi_bleu", "chrf"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    model = yaml.safe_dump(values["model"], default_flow_style=True).strip()
    (folder / "control.yaml").write_text(CONTROL.format(folder=folder, model=model))
    run_recipe(check_recipe(values, "a", "a"))

    study, results = load_study(folder / "control.yaml"), folder / "results"
    workshop = command.Workshop(study, folder / "runs", results, 1)
    workshop.adopt(folder / "runs" / "a")
    workshop.adopt(folder / "runs" / "a")  # adopting the run again changes nothing
    (kept,) = records.read_records(results)
    assert (kept["run"], kept["seed"], set(kept["test"]["sets"])) == ("tiny_seed-1", 1, {"one", "two"})
    assert kept["test"]["sentences"] == 8
    assert kept["validation"]["nll"] > 0
    (lines,) = records.read_translations(results).values()
    references = (folder / "two.de").read_text(encoding="utf-8").splitlines()
    assert kept["test"]["sets"]["two"]["chrf"] == score(lines[5:], references, metrics=["chrf"])["chrf"]

    scores = {1: {"one": 40.0, "two": 33.0}, 2: {"one": 41.0, "two": 34.0}}
    of_seeds = [{name: {"multi_bleu": value} for name, value in by_set.items()} for by_set in scores.values()]
    made = [kept | {"seed": seed, "test": {"sets": sets}} for seed, sets in zip(scores, of_seeds, strict=True)]
    records.write_records(results, made)
    text = pages.write_pages(study, results)
    assert f"| one | 41.02 | 40.50 | {statistics.stdev([40, 41]):.2f} | -0.52 | 40.00, 41.00 |" in text

    other = dataclasses.replace(study, model=study.model | {"d_model": 16})
    with pytest.raises(UserError, match="d_model"):
        command.Workshop(other, folder / "runs", results, 1).adopt(folder / "runs" / "a")
    with pytest.raises(UserError, match="no finished run"):
        workshop.adopt(folder)


@pytest.mark.parametrize("name", ["multi30k_deep_encoders", "multi30k_trained_joints"])
def test_a_study_of_joints_compares_like_with_like(name):
    """Systems have equal updates and equal sizes, except those in `larger`. Every warm-up ends within its run."""
    study = load_study(FOLDER / f"{name}.yaml")
    larger = {"mhc": 1.15, "depthwise_lstm": 1.15, "pre_norm_48": 1.65}
    sizes = {}
    for system in study.systems:
        fields = study.model | system.model
        family = FAMILIES[fields.pop("family")]
        with torch.device("meta"):
            sizes[system.name] = family.lm(family.config(vocab_size=VOCABULARY, **fields)).num_parameters()
        if system.name != "base":
            assert system.overrides == {}
            for own, shared in zip(study.stages(system), study.search, strict=True):
                common = {key: value for key, value in own.overrides.items() if not key.startswith("model.")}
                assert (own.name, common) == (shared.name, shared.overrides)
                if own.name:
                    assert own.settings == shared.settings
                else:  # the stage of full runs: the same first setting, and other values of the same keys
                    assert own.settings[0] == shared.settings[0]
                    assert {key for each in own.settings for key in each} == {
                        key for each in shared.settings for key in each
                    }
    plain = sizes["base" if "base" in sizes else study.baseline]
    assert [key for key, size in sizes.items() if not plain * 0.99 < size <= plain * larger.get(key, 1.01)] == []
    for stage in study.search:
        epochs = stage.overrides.get("training.num_train_epochs", study.overrides["training.num_train_epochs"])
        for setting in stage.settings:
            assert setting.get("training.warmup_steps", 0) < 220 * epochs, setting


def test_a_selection_for_each_language_is_compared_with_both_depths():
    """The widths are equal. One depth is that of all trained layers, the other that of the layers of one language."""
    study = load_study(FOLDER / "multi30k_languages.yaml")
    trained, used, latent = (study.model | system.model for system in study.systems)
    assert latent["decoder_layers"] == trained["decoder_layers"] == 2 * used["decoder_layers"]
    assert latent["target_decoder_layers"] == used["decoder_layers"]
    apart = set(latent.items()) ^ set(trained.items())
    width = {key for key, _ in apart if key.endswith(("dim", "heads", "d_model", "encoder_layers"))}
    assert width == set()
    rates = [study.stages(system)[0].settings for system in study.systems]
    dropouts = [study.stages(system)[-1].settings for system in study.systems]
    assert rates == [rates[0]] * 3
    assert dropouts == [dropouts[0]] * 3


def test_joints_start_from_the_baseline_at_convergence():
    """The base has the setting that the baseline's search chose, so the baseline's runs can be copied."""
    joints, converged = (load_study(FOLDER / f"multi30k_{name}.yaml") for name in ("trained_joints", "converged"))
    vanilla = converged.system("vanilla")
    chosen = selection.winner(converged, vanilla, records.read_records(RESULTS / converged.name))
    recipes = [
        recipe_of(study, system, study.stages(system)[-1], chosen, 2, Path("runs"))
        for study, system in ((joints, joints.system("base")), (converged, vanilla))
    ]
    assert differences(*(recipe.values for recipe in recipes)) == []
    assert joints.stages(joints.system("base"))[-1].settings == [chosen]


LOG = """step 100 of 400, epoch 0.5: loss 5.100, 900 target tokens/s, 0:01:00 left
step 200, epoch 1.0: validation loss 4.5000
step 400, epoch 2.0: validation loss 4.6250
"""


def test_the_curve_of_a_stopped_run_is_that_of_its_log():
    stopped, ended = (
        unfinished.read_log(LOG),
        unfinished.read_log(f"{LOG}runs/a holds the weights of checkpoint-200\n"),
    )
    assert stopped == {"curve": [[200, 1.0, 4.5], [400, 2.0, 4.625]], "trained_to_the_end": False}
    runs = [{"title": "A", "seed": seed, **run} for seed, run in enumerate((stopped, ended), start=1)]
    lines = unfinished.table({"study": "s", "machine": "a GPU", "runs": runs}).splitlines()
    assert lines[-2:] == [
        "| A | 1 | 4.500 | 1 | 2 | 4.625 | stopped |",
        "| A | 2 | 4.500 | 1 | 2 | 4.625 | ended by itself |",
    ]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/unfinished.json")), ids=lambda path: path.parent.name)
def test_the_table_of_stopped_runs_is_made_of_their_curves(path):
    report = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == unfinished.table(report)
