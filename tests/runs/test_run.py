"""The whole command: the files that it leaves behind, resuming bit for bit, and refusals."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_run import SCRIPT, run_script_here, tiny_recipe, tiny_values, write_recipe
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, TrainerCallback, TrainerState

from hf_deepwide.data import phrases
from hf_deepwide.errors import UserError
from hf_deepwide.runs.recipe import check_recipe, load_recipe, read_mark
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.runs.run_folder import RunFolder
from hf_deepwide.training.checkpoints import checkpoints, last_checkpoint, problem
from hf_deepwide.training.checksums import read_checksums, write_checksums
from hf_deepwide.training.preemption import Preemption
from hf_deepwide.training.trainer import TokenBatchTrainer

OPTIONS = {"predict_with_generate": True, "metric_for_best_model": "bleu", "early_stopping_patience": 50}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def blank_figures():
    """Draw figures: a run leaves one behind."""


@pytest.fixture(scope="module")
def undisturbed(one_thread, tmp_path_factory):
    """A finished run of 20 steps, with dropout and dropped branches, and its results."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    return run, run_recipe(tiny_recipe(run, **OPTIONS))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(ours: Path, theirs: Path) -> None:
    one, two = weights(ours), weights(theirs)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_what_a_run_leaves_behind(undisturbed):
    run, returned = undisturbed
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert results == returned
    assert {"bleu", "chrf", "multi_bleu", "sentences", "signature"} <= results["test"].keys()
    assert results["test"]["sentences"] == phrases.HELD_OUT
    assert "version:" in results["test"]["signature"]["bleu"]
    model = AutoModelForSeq2SeqLM.from_pretrained(run)
    assert results["parameters"] == sum(p.numel() for p in model.parameters())
    assert model.config.use_cache, "training switches the cache off, but not for those who load the model"
    assert model.generation_config.max_length == 128
    assert AutoTokenizer.from_pretrained(run)("ein").input_ids[-1] == model.config.eos_token_id
    train = results["train"]
    assert (train["steps"], round(train["epochs"], 2)) == (20, 3.33)
    assert train["tokens_per_second"] > 100
    assert train["peak_memory_bytes"] > 100 * 2**20
    assert results["generation"]["sentences_per_second"] > 1
    assert 0 < train["best_validation_loss"] < 6
    assert results["recipe"]["training"]["max_tokens"] == 1024
    assert results["machine"]["cores"] >= 1
    assert {"torch", "transformers", "hf_deepwide", "sacrebleu"} <= results["versions"].keys()
    assert len((run / "translations.txt").read_text(encoding="utf-8").splitlines()) == phrases.HELD_OUT
    assert (run / "plots" / "learning_curves.png").stat().st_size > 10_000


def test_the_checkpoint_with_the_best_bleu_is_the_model(undisturbed):
    run, results = undisturbed
    scores = {entry["step"]: entry["eval_bleu"] for entry in _history(run) if "eval_bleu" in entry}
    assert list(scores) == [4, 8, 12, 16, 20]
    best = max(scores, key=scores.get)
    assert scores[best] == results["train"]["best_validation_bleu"]
    assert_equal(run, run / f"checkpoint-{best}")
    assert results["train"]["weights"] == f"the checkpoint of step {best}, the best in validation BLEU"


def test_the_model_card(undisturbed):
    run, results = undisturbed
    card = (run / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlanguage:\n- de\n- en\n")
    assert not [word for word in ("{{", "None", "nan") if word in card]
    assert f"| sacreBLEU | {results['test']['bleu']:.2f} |" in card
    assert "https://arxiv.org/abs/2006.10270" in card
    assert "max_tokens: 1024" in card
    threads, cores = torch.get_num_threads(), results["machine"]["cores"]
    assert re.search(rf"\({threads} threads? of {cores} cores?; ", card)
    rows = [line for line in card.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}, "all tables have three columns"


def test_a_finished_run_is_left_alone(undisturbed):
    run, _ = undisturbed
    before = (run / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(UserError, match=r"finished run.*--overwrite"):
        run_recipe(tiny_recipe(run))
    assert (run / "model.safetensors").stat().st_mtime_ns == before


def test_another_recipe_does_not_resume(undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed[0], run)
    (run / "results.json").unlink()
    recipe = tiny_recipe(run, **OPTIONS, seed=4, weight_decay=0.1)
    with pytest.raises(UserError) as error:
        run_recipe(recipe)
    assert "training.seed: 3, now 4" in str(error.value)
    assert "training.weight_decay: not set, now 0.1" in str(error.value)
    assert "learning_rate" not in str(error.value)
    with pytest.raises(UserError, match="holds no run"):
        run_recipe(tiny_recipe(tmp_path), overwrite=True)


def test_a_kept_recipe_is_of_its_run(undisturbed, tmp_path):
    """In a run's folder, even a moved one, it has the run's name and folder. A copy elsewhere is a new recipe."""
    run = tmp_path / "moved"
    shutil.copytree(undisturbed[0], run)
    for name in ("results.json", "README.md"):
        (run / name).unlink()
    recipe = load_recipe(run / "recipe.yaml")
    assert (recipe.name, recipe.output_dir) == ("tiny", run)
    assert load_recipe(run / "recipe.yaml", ["--training.output_dir", "other"]).output_dir == Path("other")
    mark = read_mark(run) | {"attention": "another machine's"}
    (run / "run.json").write_text(json.dumps(mark), encoding="utf-8")
    assert run_recipe(recipe)["train"] == undisturbed[1]["train"] | {"attention": "another machine's"}
    assert "model-index:\n- name: tiny\n" in (run / "README.md").read_text(encoding="utf-8")
    (tmp_path / "copy").mkdir()
    shutil.copy(run / "recipe.yaml", tmp_path / "copy")
    assert load_recipe(tmp_path / "copy" / "recipe.yaml").name == "recipe"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("text", ["# mine\n{}", yaml.safe_dump(tiny_values(Path("run")))])
def test_a_recipe_in_the_output_folder_is_not_taken_for_a_runs(text, overwrite, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "translations.txt").touch()
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(UserError, match="is not empty and holds no run"):
        RunFolder(recipe.output_dir).open(recipe, recipe.training_arguments(), overwrite)
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "translations.txt"}
    assert (tmp_path / "recipe.yaml").read_text(encoding="utf-8") == text


def test_overwriting_removes_what_a_run_wrote_and_nothing_else(undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed[0], run)
    (run / "faults" / "step-3").mkdir(parents=True)
    (run / "damaged-checkpoint-3").mkdir()
    for name in ("source.spm", "vocab.json", "merges.txt", "translations.en-de.txt", "runs/now/events.out.tfevents.1"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    values = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    values["data"]["pairs"] = ["en-de", "de-en"]
    (run / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    mine = {"notes.txt", "my.model", "plots/mine.png", "runs/other/recipe.yaml", "checkpoint-old/x", "faults/notes"}
    mine.add("translations.newstest-2014.txt")
    for name in mine:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    recipe = tiny_recipe(run, seed=9)
    before = {path.relative_to(run) for path in run.rglob("*")}
    RunFolder(recipe.output_dir).open(recipe, recipe.training_arguments(), overwrite=True)
    assert {path.relative_to(run) for path in run.rglob("*") if ".new" not in path.parts} == before
    (run / ".new" / "checkpoint-4").mkdir()
    RunFolder(run).finish_replacing()
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert left == {"run.json", "recipe.yaml", *mine}
    assert not (run / "runs" / "now").exists()


def unfinished(undisturbed, run: Path, **mark) -> None:
    """Make a copy of the run that stopped at step 16, with changes in its mark (`run.json`)."""
    shutil.copytree(undisturbed[0], run)
    (run / "results.json").unlink()
    shutil.rmtree(run / "checkpoint-20")
    (run / "run.json").write_text(json.dumps(read_mark(run) | mark), encoding="utf-8")


@pytest.mark.parametrize(
    "mark", [{"batches_per_update": 2}, {"precision": "fp16 autocast"}, {"attention": "flash"}, {"padding": 64}]
)
def test_refuses_to_resume_with_other_batches_or_precision(mark, undisturbed, tmp_path):
    run = tmp_path / "run"
    unfinished(undisturbed, run, **mark)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    recipe = tiny_recipe(run, **OPTIONS)
    ((name, value),) = mark.items()
    with pytest.raises(UserError, match=rf"began with other settings: {name}: {value}, now .*\. Start"):
        RunFolder(recipe.output_dir).open(recipe, recipe.training_arguments(), overwrite=False)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    shutil.copytree(undisturbed[0] / "checkpoint-20", run / "checkpoint-20")  # training has ended: allow it
    RunFolder(recipe.output_dir).open(recipe, recipe.training_arguments(), overwrite=False)
    assert read_mark(run)[name] == value


def test_a_run_of_an_older_version_goes_on_with_the_padding_of_its_time(undisturbed, tmp_path):
    run = tmp_path / "run"
    unfinished(undisturbed, run)
    mark = read_mark(run)
    del mark["padding"]
    (run / "run.json").write_text(json.dumps(mark), encoding="utf-8")
    otherwise, as_then = (tiny_recipe(run, **OPTIONS, pad_to_multiple_of=multiple) for multiple in (16, 8))
    with pytest.raises(UserError, match="padding: 8, now 16"):
        RunFolder(run).open(otherwise, otherwise.training_arguments(), overwrite=False)
    RunFolder(run).open(as_then, as_then.training_arguments(), overwrite=False)
    assert read_mark(run)["padding"] == 8


def test_resumes_an_equivalent_recipe(undisturbed, tmp_path):
    """One process with twice the accumulation, instead of two; and automatic settings that are now explicit."""
    run = tmp_path / "run"
    unfinished(undisturbed, run, processes=2, batches_per_update=2)
    args = tiny_recipe(run, **OPTIONS).training_arguments()
    same = {"bf16": args.bf16, "attn_implementation": args.attn_implementation, "gradient_accumulation_steps": 2}
    recipe = tiny_recipe(run, **OPTIONS, **same)
    RunFolder(recipe.output_dir).open(recipe, recipe.training_arguments(), overwrite=False)
    assert [read_mark(run)[name] for name in ("processes", "batches_per_update")] == [1, 2]


def test_a_run_killed_after_training_is_only_finished(undisturbed, tmp_path):
    reference, results = undisturbed
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    (run / "results.json").unlink()
    (run / "model.safetensors").unlink()
    again = run_recipe(tiny_recipe(run, **OPTIONS))
    assert_equal(run, reference)
    assert again["train"] == results["train"], "nothing was trained again"
    assert again["test"] == results["test"]


@pytest.mark.parametrize("damage", ["cut", "remove"])
def test_a_damaged_best_checkpoint_is_told(damage, undisturbed, tmp_path, caplog):
    """Report it at the end of training and on resuming. Removing the folder, as the message advises, works."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed[0], run)
    (run / "results.json").unlink()
    best = run / "checkpoint-16"
    for state in run.glob("checkpoint-*/trainer_state.json"):  # make step 16 the best one
        said = json.loads(state.read_text(encoding="utf-8"))
        said |= {"best_model_checkpoint": str(best), "best_global_step": 16, "best_metric": 0.0}
        state.write_text(json.dumps(said), encoding="utf-8")
        saved = read_checksums(state.parent)
        write_checksums(state.parent, saved["data"], saved["run"])
    file = best / "model.safetensors"
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-10])
    recipe = tiny_recipe(run, **OPTIONS)
    told = rf"{best.name}: model\.safetensors is {'missing' if damage == 'remove' else 'damaged'}.* final model"
    state = TrainerState(best_model_checkpoint=str(best))
    ending = SimpleNamespace(preemption=Preemption(), state=state, saving=SimpleNamespace(run_id=None))
    with pytest.raises(UserError, match=told):
        TokenBatchTrainer._load_best_model(ending)
    with pytest.raises(UserError, match=told):
        run_recipe(recipe)
    shutil.rmtree(best)
    assert run_recipe(recipe)["train"]["weights"] == "the last checkpoint, of step 20"
    assert "the last one takes its place" in caplog.text
    assert_equal(run, run / "checkpoint-20")


@pytest.mark.parametrize("newest", [16, 20])
def test_a_run_of_an_older_version_goes_on(newest, undisturbed, tmp_path):
    """The older version counted fewer quantities, and kept no checksums."""
    run, later = tmp_path / "run", ("data_seconds", "peak_memory_bytes")
    shutil.copytree(undisturbed[0], run)
    (run / "results.json").unlink()
    for checkpoint in checkpoints(run):
        file = checkpoint / "trainer_state.json"
        state = json.loads(file.read_text(encoding="utf-8"))
        counted = state["stateful_callbacks"]["Throughput"]["args"]
        assert [counted.pop(name) > 0 for name in later] == [True, True]
        file.write_text(json.dumps(state), encoding="utf-8")
        (checkpoint / "checksums.json").unlink()
    if newest == 16:
        shutil.rmtree(run / "checkpoint-20")
    results = run_recipe(tiny_recipe(run, **OPTIONS))
    assert_equal(run, undisturbed[0])
    expected = {**undisturbed[1]["train"]}
    if newest == 20:
        expected = {name: value for name, value in expected.items() if name not in ("data_share", later[1])}
        assert results["train"] == expected
    assert results["train"].keys() == expected.keys()


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("model.safetensors", "cut", "model"),
        ("optimizer.pt", "cut", "optimizer"),
        ("scheduler.pt", "remove", "scheduler"),
        ("trainer_state.json", "cut", "trainer_state"),
        ("rng_state.pth", "remove", "random generators"),
        ("model.safetensors", "empty", "model"),
    ],
)
def test_damaged_checkpoints_are_set_aside(name, damage, told, undisturbed, tmp_path, caplog):
    for step in (16, 20):
        shutil.copytree(undisturbed[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    (tmp_path / ".saving" / "checkpoint-24").mkdir(parents=True)  # an interrupted save
    assert last_checkpoint(tmp_path).name == "checkpoint-20"
    file = tmp_path / "checkpoint-20" / name
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: -10 if damage == "cut" else 0])
    assert last_checkpoint(tmp_path).name == "checkpoint-16"
    assert re.search(rf"checkpoint-20.*{told}", caplog.text)
    assert (tmp_path / "damaged-checkpoint-20").is_dir()
    assert problem(tmp_path / "checkpoint-16") is None


def test_a_split_that_is_missing_is_told_before_the_folder_is_made(tmp_path):
    values = tiny_values(tmp_path / "run")
    values["data"] = {"format": "text", "root": str(tmp_path), "train": "train"}
    with pytest.raises(UserError, match=r"^tiny\.yaml: data\.validation is not set"):
        run_recipe(check_recipe(values, "tiny", "tiny.yaml"))
    assert not (tmp_path / "run").exists()


def test_averaged_weights(tmp_path):
    run = tmp_path / "run"
    results = run_recipe(tiny_recipe(run, average_last=3, max_steps=16, save_total_limit=None, family="marian"))
    kept = checkpoints(run)
    assert [path.name for path in kept] == ["checkpoint-4", "checkpoint-8", "checkpoint-12", "checkpoint-16"]
    last = [weights(path) for path in kept[-3:]]
    mean = weights(run)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, sum(each[name] for each in last) / 3, rtol=1e-6, atol=1e-7)
    assert "8, 12, 16" in results["train"]["weights"]


def _history(run: Path) -> list[dict]:
    state = json.loads((checkpoints(run)[-1] / "trainer_state.json").read_text(encoding="utf-8"))
    return state["log_history"]


def test_mistakes_end_with_one_line(tmp_path, capsys):
    recipe = write_recipe(tmp_path, tiny_values(tmp_path / "run"))
    with pytest.raises(SystemExit) as end:
        run_script_here(SCRIPT, str(recipe), "--training.learning_rat", "3")
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: .*'learning_rate'", line)
    assert not (tmp_path / "run").exists()


def test_the_averaging_script(undisturbed, tmp_path, capsys):
    run, _ = undisturbed
    script = SCRIPT.with_name("average_checkpoints.py")
    folders = [str(run / f"checkpoint-{step}") for step in (16, 20)]
    run_script_here(script, *folders, "--output", str(tmp_path / "mean"))
    one, two = (weights(Path(folder)) for folder in folders)
    for name, tensor in weights(tmp_path / "mean").items():
        torch.testing.assert_close(tensor, (one[name] + two[name]) / 2)
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean")
    AutoTokenizer.from_pretrained(tmp_path / "mean")
    with pytest.raises(SystemExit):
        run_script_here(script, *folders, "--output", str(tmp_path / "mean"))
    assert "exists already" in capsys.readouterr().err


def test_a_folder_that_is_removed_during_training_ends_the_run_in_one_line(tmp_path, monkeypatch):
    run = tmp_path / "run"

    class Remover(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                shutil.rmtree(run)

    monkeypatch.setattr("hf_deepwide.runs.run.WarmUpFits", lambda _: Remover())
    with pytest.raises(UserError, match=r"checkpoint-8 cannot be saved: the run's folder was removed, or moved away"):
        run_recipe(tiny_recipe(run, max_steps=12))
    assert not run.exists()


def test_a_run_that_was_killed_as_training_ended_still_has_its_figures(tmp_path, monkeypatch):
    """The run is killed after the last checkpoint, before the figures are drawn."""
    options = {"gradient_norms": True, "max_steps": 4, "eval_steps": 2, "save_steps": 2, "warmup_steps": 1}
    recipe = tiny_recipe(tmp_path / "run", family="latent_depth", **options)
    with monkeypatch.context() as patch:
        patch.setattr(TokenBatchTrainer, "_load_best_model", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe)
    assert not (tmp_path / "run" / "plots").exists()
    run_recipe(recipe)
    drawn = {path.name for path in (tmp_path / "run" / "plots").iterdir()}
    assert drawn == {"learning_curves.png", "gradient_norms.png", "layer_utilization.png"}
