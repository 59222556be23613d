"""The studies of code: all systems are searched alike, and a small study runs from its corpus to its table."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import comparison
import definition
import pages
import pytest
import records
import study as command
import yaml
from definition import load_study, recipe_of

from hf_deepwide.models.word_tokenizer import WordTokenizer
from hf_deepwide.runs.build import new_config
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.runs.run import run_recipe

FOLDER = Path(definition.__file__).parent
NAMES = ["code_django", "code_conala"]
WORDS = WordTokenizer([f"s{number}" for number in range(4594)], [f"t{number}" for number in range(4887)])
CODE = ["if  x :", "x = f ( y )", "return x"] * 10


class Here(ThreadPoolExecutor):
    """An executor that runs each task at once, in the thread that submits it."""

    def submit(self, function, *arguments, **options):
        future = Future()
        future.set_result(function(*arguments, **options))
        return future


@pytest.mark.parametrize("name", NAMES)
def test_systems_have_the_shapes_of_the_paper_and_searches_of_one_length(name):
    study = load_study(FOLDER / f"{name}.yaml")
    shapes, searches = {}, set()
    for system in study.systems:
        stages = study.stages(system)
        recipe = recipe_of(study, system, stages[-1], stages[-1].settings[0], 1, Path("runs"))
        config = new_config(recipe, WORDS)
        shapes[system.name] = (
            config.d_model,
            config.attention_branches,
            config.encoder_layers,
            config.encoder_ffn_dim,
        )
        searches.add(
            tuple((len(stage.settings), stage.overrides.get("training.num_train_epochs")) for stage in stages)
        )
        assert recipe.evaluation.metrics == [study.metric, study.beside]
    assert shapes == {"vanilla": (512, 1, 3, 1024), "mat": (256, 4, 3, 1024)}
    assert len(searches) == 1
    assert study.seeds == [1, 2, 3]


def test_study_runs_from_corpus_to_table(tmp_path, monkeypatch):
    name = "code_django"
    for split in ("train", "valid", "test"):
        corpus = tmp_path / name.removeprefix("code_") / split
        corpus.parent.mkdir(exist_ok=True)
        corpus.with_suffix(".nl").write_text("".join(f"line {len(line)}\n" for line in CODE))
        corpus.with_suffix(".py").write_text("".join(f"{line}\n" for line in CODE))
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    values["overrides"] = {
        "data.root": str(tmp_path), "training.max_steps": 4, "training.warmup_steps": 2, "training.disable_tqdm": True,
        "training.max_tokens": 256, "evaluation.num_beams": 1, "evaluation.max_length_offset": 8,
    }  # fmt: skip
    values |= {"seeds": [1], "search": [{"settings": [{"model.dropout": 0.1}]}]}
    for system in values["systems"].values():
        system.pop("search", None)
        system["model"] |= {"d_model": 16}
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    study, results = load_study(path), tmp_path / "results"
    # test_studies.py tests the processes and threads in which a study trains
    monkeypatch.setattr(command, "train", lambda recipe, threads: run_recipe(check_recipe(recipe, "run", "run.yaml")))
    monkeypatch.setattr(command.concurrent.futures, "ThreadPoolExecutor", Here)
    command.Workshop(study, tmp_path / "runs", results, 1).make(study.systems)
    assert [record["system"] for record in records.read_records(results)] == ["vanilla", "mat"]
    _, head = (
        line for line in (results / pages.TABLE).read_text(encoding="utf-8").splitlines() if "| system |" in line
    )
    assert "sentence BLEU-4 | valid lines of Python, % |" in head
    assert "p (sentences)" in head
    assert set(comparison.load_comparison(results)["mat"]) >= {"sentence_bleu4", "valid_python_line"}
