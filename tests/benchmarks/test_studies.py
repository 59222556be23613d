"""Studies: what is trained next, which setting is chosen, and what the pages say, the committed ones too."""

import statistics
from pathlib import Path

import definition
import pages
import pytest
import records
import selection
import study as command
import yaml
from definition import load_study, recipe_of, run_name

from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.runs.recipe import differences

FOLDER = Path(definition.__file__).parent
RESULTS = FOLDER.parent / "results"
DATA = FOLDER.parents[2] / "shared" / "data"
STUDIES = sorted(FOLDER.glob("*.yaml"))
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


def test_other_seeds_are_trained_of_the_chosen_setting_alone(small, tmp_path):
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
    full = small.search[-1]
    setting = {"training.learning_rate": 0.002, "model.dropout": 0.3}
    scores = {plain.name: [10.0, 12.0], wide.name: [13.0, 14.0]}
    made = [
        record(small, system, full, setting, seed, 1.0, scores[system.name][seed - 1])
        for system in (plain, wide)
        for seed in small.seeds
    ]
    records.write_records(tmp_path, made)
    text = pages.write_pages(small, tmp_path)
    plain_line, wide_line = (next(line for line in text.splitlines() if f"| {name} |" in line) for name in scores)
    assert f"11.00 ± {statistics.stdev([10, 12]) / 2**0.5:.2f}" in plain_line
    assert f"+2.50 ± {statistics.stdev([3, 2]) / 2**0.5:.2f}" in wide_line
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
        ({"summary": ["plain", "fast"]}, "fast"),
        ({"overrides": {"trainig.max_steps": 1}}, "trainig"),
        ({"search": [{"settings": [{"model.dropout": 2}]}]}, "dropout"),
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
    rows = selection.chosen_rows(study, records.read_records(results))
    assert (results / pages.TABLE).read_text(encoding="utf-8") == pages.table(study, rows, results)
    texts = pages.table(study, rows, results), pages.summary(study, rows, results)
    for file in ("docs/results.md", "README.md"):
        page = (FOLDER.parents[1] / file).read_text(encoding="utf-8")
        assert pages.with_tables(page, study, *texts) == page


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_record_belongs_to_its_recipe(path):
    study = load_study(path)
    for made in records.read_records(RESULTS / path.stem):
        system = study.system(made["system"])
        stage = next(stage for stage in study.stages(system) if stage.name == made["stage"])
        recipe = recipe_of(study, system, stage, made["setting"], made["seed"], Path("runs"))
        ran = {section: dict(keys) for section, keys in made["recipe"].items()}
        for values in (ran, expected := recipe.values):
            values["model"].pop("init_from", None)  # paths of the base, which differ between machines
            values["tokenizer"].pop("path", None)
        assert differences(ran, expected) == [], made["run"]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_kept_translations_have_the_score_of_their_run(path, monkeypatch):
    """Three runs of a study; with the references, which are not in the repository, where they are at hand."""
    study, results = load_study(path), RESULTS / path.stem
    recipe = recipe_of(study, study.systems[0], study.search[-1], {}, 1, Path("runs"))
    if not recipe.data.resolve(f"{recipe.data.test}.{recipe.data.target_lang}.gz").is_file():
        monkeypatch.setenv("HF_DEEPWIDE_DATA", str(DATA))
    if not recipe.data.resolve(f"{recipe.data.test}.{recipe.data.target_lang}.gz").is_file():
        pytest.skip("needs the corpora (HF_DEEPWIDE_DATA)")
    references = load_parallel(recipe.data, "test")["target"][:]
    translations = records.read_translations(results)
    for made in [made for made in records.read_records(results) if made["run"] in translations][::30]:
        found = score(translations[made["run"]], references, lowercase=recipe.evaluation.lowercase)
        assert found[study.metric] == pytest.approx(made["test"][study.metric])


def test_every_study_has_its_records():
    assert {path.stem for path in STUDIES} == {folder.name for folder in RESULTS.iterdir() if folder.is_dir()}
