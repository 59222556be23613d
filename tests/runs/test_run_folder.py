"""The folder of a run: no user file is lost, one process works at a time, and a trained run can be finished."""

import errno
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate import PartialState
from mistakes import files
from safetensors.torch import load_file
from tiny_run import tiny_values
from transformers import GenerationConfig, Trainer

from hf_deepwide import lock
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.lock import LOCK, locked
from hf_deepwide.runs import translation
from hf_deepwide.runs.recipe import Recipe, check_recipe, read_mark
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.runs.run_folder import NEW, RENEWED, RunFolder
from hf_deepwide.runs.task import warn_of_few
from hf_deepwide.runs.warm_up import WarmUpFits
from hf_deepwide.runs.yaml_values import parse_yaml
from hf_deepwide.training.checkpoints import INTERRUPTED, checkpoints

WORDS = ["red", "green", "blue", "old", "new", "big", "small", "fast"]
TRAINING = {"max_steps": 8, "bf16": False, "max_tokens": 512}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with 60 training pairs, and 8 pairs for both validation and test."""
    folder = tmp_path_factory.mktemp("corpus")
    pairs = [f"{one} {two}\t{two.upper()} {one.upper()}\n" for one in WORDS for two in WORDS]
    for split, chosen in (("train", pairs[:60]), ("validation", pairs[-8:]), ("test", pairs[-8:])):
        (folder / f"{split}.tsv").write_text("".join(chosen), encoding="utf-8")
    return folder


def recipe(corpus: Path, run: Path, data: dict | None = None, **changes) -> Recipe:
    """A recipe of 8 steps. Mappings in `changes` change other sections; all other values change `training`."""
    training = {name: value for name, value in changes.items() if not isinstance(value, dict)}
    values = tiny_values(run, family="vanilla_transformer", **{**TRAINING, **training})
    files = {split: f"{split}.tsv" for split in ("train", "validation", "test")}
    languages = {"source_lang": "de", "target_lang": "en"}
    values["data"] = {"format": "tsv", "root": str(corpus), **languages, **files, "max_length": 32, **(data or {})}
    for section in ("model", "tokenizer", "evaluation"):
        values[section] = {**values[section], **changes.get(section, {})}
    return check_recipe(values, "tiny", "tiny.yaml")


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """The folder of a finished run. Tests work on copies, which `copy_of` makes."""
    run = tmp_path_factory.mktemp("finished") / "run"
    run_recipe(recipe(corpus, run))
    return run


def copy_of(finished: Path, tmp_path: Path, *without: str) -> Path:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for name in without:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    return run


# Overwriting


def wrong_base(corpus, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{", encoding="utf-8")
    return {"model": {"init_from": str(tmp_path / "base")}, "tokenizer": {"path": str(tmp_path / "base")}}


def bad_bytes(corpus, tmp_path):
    (tmp_path / "bad.tsv").write_bytes(b"ok\tok\n\xff\tno\n")
    return {"data": {"train": str(tmp_path / "bad.tsv")}}


LONG = {"warmup_steps": 99, "max_steps": -1, "num_train_epochs": 1}
MISTAKES = {  # changes of the recipe, and words in the error message
    "a missing file": (lambda corpus, tmp_path: {"data": {"test": "nowhere.tsv"}}, "nowhere.tsv"),
    "bytes that are not UTF-8": (bad_bytes, "UTF-8"),
    "a base that cannot be loaded": (wrong_base, "config.json is damaged"),
    "a warm-up that is too long": (lambda corpus, tmp_path: {"warmup_steps": 9}, "warmup_steps is 9"),
    "a warm-up longer than the epochs": (lambda corpus, tmp_path: LONG, "warmup_steps is 99"),
    "a model that is too short": (
        lambda corpus, tmp_path: {"model": {"max_position_embeddings": 2}},
        "the model takes 2",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_leaves_the_run_that_was_to_be_overwritten(name, corpus, finished, tmp_path):
    run = copy_of(finished, tmp_path)
    before, (changes, words) = files(run), MISTAKES[name]
    with pytest.raises(UserError, match=words):
        run_recipe(recipe(corpus, run, **changes(corpus, tmp_path)), overwrite=True)
    assert files(run) == before
    assert not (run / NEW).exists()


def test_a_warm_up_longer_than_max_steps_is_refused_before_a_tokenizer_is_trained(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(translation.Translation, "new_tokenizer", lambda *_: pytest.fail("trains a tokenizer"))
    with pytest.raises(UserError, match="warmup_steps is 9"):
        run_recipe(recipe(corpus, tmp_path / "run", warmup_steps=9))


def assert_like_undisturbed(run: Path, undisturbed: Recipe):
    """Check that the run has the same weights and files as an undisturbed run."""
    run_recipe(undisturbed)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run, undisturbed.output_dir))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert files(run).keys() == files(undisturbed.output_dir).keys()


def overwrite_until(step: int, act: Callable[[], None], new: Recipe, monkeypatch, ends: type[BaseException]):
    """Begin a run that replaces an older run. Call `act` before a step, which ends the run with `ends`."""
    original = Trainer.training_step

    def training_step(trainer, *args, **kwargs):
        if trainer.state.global_step == step:
            act()
        return original(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", training_step)
        with pytest.raises(ends):
            run_recipe(new, overwrite=True)


@pytest.mark.parametrize("step", [3, 4])
def test_the_old_run_stays_until_the_new_one_has_a_checkpoint(step, corpus, finished, tmp_path, monkeypatch):
    """The new run ends before its first checkpoint, or right after it. Then the same command finishes it."""
    run = copy_of(finished, tmp_path)
    before, new = files(run), recipe(corpus, run, seed=4)
    overwrite_until(step, Mock(side_effect=KeyboardInterrupt), new, monkeypatch, ends=KeyboardInterrupt)
    if step == 3:
        assert files(run) == before
        with pytest.raises(UserError, match="holds a finished run"):
            run_recipe(new)
        run_recipe(new, overwrite=True)
    else:
        assert not (run / "results.json").exists()
        assert [path.name for path in checkpoints(run)] == ["checkpoint-4"]
        run_recipe(new)
    assert_like_undisturbed(run, recipe(corpus, tmp_path / "reference", seed=4))


def test_a_signal_before_the_first_checkpoint_keeps_the_old_run(corpus, finished, tmp_path, monkeypatch):
    """The user may not have meant to overwrite. If the new run is started again, it goes on from the signal."""
    run = copy_of(finished, tmp_path)
    before, new = files(run), recipe(corpus, run, seed=4)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    try:
        overwrite_until(2, lambda: os.kill(os.getpid(), signal.SIGINT), new, monkeypatch, ends=SystemExit)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert {name: digest for name, digest in files(run).items() if not name.startswith(NEW)} == before
    with pytest.raises(UserError, match="holds a finished run"):
        run_recipe(recipe(corpus, run, seed=5))
    scored_again = recipe(corpus, run)
    scored_again.evaluation.num_beams = scored_again.values["evaluation"]["num_beams"] = 2
    with pytest.raises(UserError, match=r"holds an interrupted run .*Resume the interrupted run"):
        run_recipe(scored_again)
    assert [path.name for path in checkpoints(run / NEW, INTERRUPTED)] == ["interrupted-3"]
    run_recipe(new)
    assert_like_undisturbed(run, recipe(corpus, tmp_path / "reference", seed=4))


class Killed(BaseException):
    """An exception that no code catches."""


class Blow:
    """Raise `Killed` when the disk is to be changed for the n-th time."""

    def __init__(self, number: int, patch: pytest.MonkeyPatch) -> None:
        self.left = number
        for name in ("unlink", "rename", "replace", "rmdir"):
            patch.setattr(Path, name, self.counted(getattr(Path, name)))
        patch.setattr(shutil, "rmtree", self.counted(shutil.rmtree))

    def counted(self, original: Callable) -> Callable:
        def change(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return original(*args, **kwargs)

        return change


def put_two_runs(run: Path) -> dict[str, str]:
    """Write an old run, a new run with a checkpoint, and user files. Return the files that must be left in the end."""
    mine = {"notes.txt", ".model.safetensors", "plots/mine.png", "checkpoint-old/x", "faults/notes"}
    old = {"results.json", "README.md", "model.safetensors", ".saving-model.safetensors", "plots/path_weights.png"}
    old |= {"plots/selection_samples.png", "plots/run_layer_utilization.png"}  # drawn by `hf-deepwide plot`
    old |= {"checkpoint-4/a", "faults/step-3/x", "translations.txt", "runs/then/events.out.tfevents.1"}
    new = {"checkpoint-4/b", "run.json", "recipe.yaml", "faults/step-1/x", "tokenizer.json"}
    new |= {"runs/now/events.out.tfevents.2"}
    for name in (*old, *mine, *(f"{NEW}/{name}" for name in new), "run.json", "recipe.yaml"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("new" if name.startswith(NEW) else "old", encoding="utf-8")
    return dict.fromkeys(new, "new") | dict.fromkeys(mine, "old")


def test_continues_an_interrupted_replacement(tmp_path, monkeypatch):
    """Kill before the n-th change of the disk, for all n. In the end the new run and the user files are complete."""
    number, killed = 0, True
    while killed:
        run = tmp_path / f"run{number}"
        expected = put_two_runs(run)
        with monkeypatch.context() as patch:
            Blow(number, patch)
            try:
                RunFolder(run).finish_replacing()
                killed = False
            except Killed:
                number += 1
        RunFolder(run).finish_replacing()
        assert {name: (run / name).read_text(encoding="utf-8") for name in files(run)} == expected
        assert not (run / NEW).exists()
        assert not (run / RENEWED).exists()
    assert number > 20


def same(tmp_path, run):
    return run


def linked(tmp_path, run):
    (tmp_path / "link").symlink_to(run)
    return tmp_path / "link"


def spelt(tmp_path, run):
    return run / ".." / "run" / "."


def within(tmp_path, run):
    return run / "checkpoint-4"


def around(tmp_path, run):
    return run.parent


@pytest.mark.parametrize("key", ["init_from", "path"])
@pytest.mark.parametrize(
    "place", [same, linked, spelt, lambda _, run: run / "checkpoint-4", lambda _, run: run.parent]
)
def test_a_run_does_not_replace_what_it_starts_from(place, key, corpus, finished, tmp_path):
    run = copy_of(finished, tmp_path)
    given = str(place(tmp_path, run))
    before = files(tmp_path)
    tokenizer = given if key == "path" else str(finished)
    wrong = recipe(
        corpus, run, model={"init_from": given} if key == "init_from" else {}, tokenizer={"path": tokenizer}
    )
    with pytest.raises(UserError, match=rf"output_dir: .*{key} .* the run would replace what it starts from"):
        run_recipe(wrong, overwrite=True)
    assert files(tmp_path) == before


# The lock


def test_a_second_start_is_refused(corpus, tmp_path):
    run = tmp_path / "run"
    first, second = recipe(corpus, run), recipe(corpus, run, seed=4)
    with RunFolder(run).opened(first, first.training_arguments(), False, PartialState()):
        before = files(run)
        for overwrite in (False, True):
            with pytest.raises(UserError) as error:
                run_recipe(second, overwrite)
            assert files(run) == before
            for word in (str(run), f"process {os.getpid()} ", os.uname().nodename, time.strftime("%Y-%m-%d")):
                assert word in str(error.value)
    assert not (run / LOCK).exists()


def test_another_recipe_begins_anew_where_there_is_no_checkpoint(corpus, tmp_path, caplog):
    run = tmp_path / "run"
    first, second = recipe(corpus, run), recipe(corpus, run, seed=4)
    RunFolder(first.output_dir).open(first, first.training_arguments(), overwrite=False)
    (run / "vocab.json").touch()  # from another kind of tokenizer
    caplog.set_level(logging.INFO, logger="hf_deepwide")
    RunFolder(second.output_dir).open(second, second.training_arguments(), overwrite=False)
    assert "training.seed: 3, now 4" in caplog.text
    assert {path.name for path in run.iterdir()} == {"run.json", "recipe.yaml"}
    assert "seed: 4" in (run / "recipe.yaml").read_text(encoding="utf-8")


def test_a_lock_ends_with_its_process(tmp_path):
    """The lock ends even if the process was killed, and a worker that it had forked lives on."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(tmp_path):
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            os.write(writing, str(worker).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    worker = int(os.read(reading, 20))
    assert (tmp_path / LOCK).is_file()
    with locked(tmp_path):
        os.kill(worker, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("holder", "told"),
    [
        ({"pid": os.getpid()}, rf"process {os.getpid()} on .*If that process has ended, remove"),
        ({"pid": 2**22 + 1}, None),
        ({"pid": os.getpid(), "started": "2001-01-01T00:00:00+00:00"}, None),  # another process had this id
        ({"pid": 7, "host": "elsewhere"}, "process 7 on elsewhere"),
        ({"pid": "x"}, None),
    ],
    ids=["alive", "dead", "another with its number", "another host", "no number"],  # fixed, for pytest's workers
)
def test_a_file_system_without_locks(holder, told, tmp_path, monkeypatch):
    def flock(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    holder = {"host": os.uname().nodename, "started": lock._now(), **holder}
    (tmp_path / LOCK).write_text(json.dumps(holder), encoding="utf-8")
    if told is None:
        with locked(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text(encoding="utf-8"))["pid"] == os.getpid()
        return
    with pytest.raises(UserError, match=told), locked(tmp_path):
        pass
    assert json.loads((tmp_path / LOCK).read_text(encoding="utf-8")) == holder


def test_a_lock_does_not_follow_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    (tmp_path / LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="is a link"), locked(tmp_path):
        pass
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "mine"


def test_a_lock_is_no_pipe(tmp_path):
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(UserError, match="is a pipe"), locked(tmp_path):
        pass


@pytest.mark.parametrize("make", [Path.touch, lambda path: (path.mkdir(), (path / "mine").touch())])
def test_keeps_foreign_files_named_like_a_new_run(make, corpus, finished, tmp_path):
    run = copy_of(finished, tmp_path)
    make(run / NEW)
    before = files(run)
    with pytest.raises(UserError, match="was not made by a run"):
        run_recipe(recipe(corpus, run, seed=4), overwrite=True)
    assert files(run) == before


def test_a_model_without_its_checkpoints_is_left_alone(corpus, finished, tmp_path):
    run = copy_of(finished, tmp_path, "results.json", "checkpoint-4", "checkpoint-8")
    before = files(run)
    for seed in (3, 4):
        with pytest.raises(UserError, match="holds a model"):
            run_recipe(recipe(corpus, run, seed=seed))
        assert files(run) == before


# Finishing


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr(Trainer, "train", lambda *_, **__: pytest.fail("it was trained"))
    monkeypatch.setattr(translation, "build_model", lambda *_: pytest.fail("a model was made"))


@pytest.mark.parametrize("without", [(), ("checkpoint-4", "checkpoint-8"), ("results.json", "model.safetensors")])
def test_another_evaluation_scores_again(without, corpus, finished, tmp_path, no_training):
    """A finished run, with or without its checkpoints, and a run whose training has ended."""
    run = copy_of(finished, tmp_path, *without)
    earlier = json.loads((finished / "results.json").read_text(encoding="utf-8"))
    again = recipe(corpus, run, evaluation={"num_beams": 2, "metrics": ["chrf"]})
    results = run_recipe(again)
    assert json.loads((run / "results.json").read_text(encoding="utf-8")) == results
    assert results["train"] == earlier["train"]
    assert "bleu" not in results["test"]
    references = load_parallel(again.data, "test")["target"][:]
    assert results["test"]["chrf"] == score(list(read_lines(run / "translations.txt")), references)["chrf"]
    assert results["recipe"]["evaluation"]["num_beams"] == 2
    assert GenerationConfig.from_pretrained(run).num_beams == 2
    assert "num_beams: 2" in (run / "recipe.yaml").read_text(encoding="utf-8")
    assert "num_beams: 2" in (run / "README.md").read_text(encoding="utf-8")
    assert (run / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    assert read_mark(run) == read_mark(finished)
    with pytest.raises(UserError, match="holds a finished run"):
        run_recipe(again)


def test_scoring_again_says_that_the_test_set_has_changed(corpus, finished, tmp_path, no_training, caplog):
    run, file = copy_of(finished, tmp_path), corpus / "test.tsv"
    run_recipe(recipe(corpus, run, evaluation={"num_beams": 2}))
    assert "other sentences" not in caplog.text
    earlier = json.loads((run / "results.json").read_text(encoding="utf-8"))["digests"]
    text = file.read_text(encoding="utf-8")
    try:
        file.write_text("".join(reversed(text.splitlines(keepends=True))), encoding="utf-8")
        results = run_recipe(recipe(corpus, run, evaluation={"num_beams": 3}))
    finally:
        file.write_text(text, encoding="utf-8")  # other tests read this file
    assert "data.test holds other sentences than when the run was scored before" in caplog.text
    assert results["digests"]["test"] != earlier["test"]
    assert results["digests"]["validation"] == earlier["validation"]


def test_an_edited_card_is_kept_when_a_run_is_scored_again(corpus, finished, tmp_path, no_training, caplog):
    run = copy_of(finished, tmp_path)
    run_recipe(recipe(corpus, run, evaluation={"num_beams": 2}))
    assert not list(run.glob("README.edited*")), "nobody has changed it"
    edited = (run / "README.md").read_text(encoding="utf-8") + "Licence: MIT\n"
    for number in (1, 2):
        (run / "README.md").write_text(edited, encoding="utf-8")
        run_recipe(recipe(corpus, run, evaluation={"num_beams": 2 + number}))
        assert (run / f"README.edited-{number}.md").read_text(encoding="utf-8") == edited
    assert "it is kept as README.edited-2.md" in caplog.text
    assert "Licence: MIT" not in (run / "README.md").read_text(encoding="utf-8")


def test_scoring_again_keeps_the_record_of_the_training(corpus, finished, tmp_path, monkeypatch, no_training):
    run, elsewhere = copy_of(finished, tmp_path), {"processor": "another one", "cores": 9, "gpus": []}
    earlier = json.loads((finished / "results.json").read_text(encoding="utf-8"))
    monkeypatch.setattr("hf_deepwide.runs.run.machine", lambda: elsewhere)
    results = run_recipe(recipe(corpus, run, gradient_accumulation_steps=4, evaluation={"num_beams": 2}))
    assert results["recipe"] == earlier["recipe"] | {"evaluation": earlier["recipe"]["evaluation"] | {"num_beams": 2}}
    assert parse_yaml((run / "recipe.yaml").read_text(encoding="utf-8"), "recipe.yaml") == results["recipe"]
    assert {name: results[name] for name in ("versions", "machine")} == {
        name: earlier[name] for name in ("versions", "machine")
    }
    assert "scored" not in earlier
    assert results["scored"]["machine"] == elsewhere
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "gradient_accumulation_steps" not in card
    assert "another one" not in card


@pytest.mark.parametrize("beams", [1, 2])
def test_scoring_again_can_be_interrupted(beams, corpus, finished, tmp_path, monkeypatch, no_training):
    """Interrupt it, without checkpoints. Then the same recipe finishes, or the earlier recipe restores its scores."""
    run = copy_of(finished, tmp_path, "checkpoint-4", "checkpoint-8")
    with monkeypatch.context() as patch:
        patch.setattr(translation, "write_model_card", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe(corpus, run, evaluation={"num_beams": 2}))
    again = recipe(corpus, run, evaluation={"num_beams": beams})
    results = run_recipe(again)
    assert results["recipe"]["evaluation"]["num_beams"] == beams
    assert GenerationConfig.from_pretrained(run).num_beams == beams
    with pytest.raises(UserError, match="holds a finished run"):
        run_recipe(again)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"train": {}}'])
def test_refuses_broken_results(text, corpus, finished, tmp_path, no_training):
    run = copy_of(finished, tmp_path)
    (run / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="holds a finished run"):
        run_recipe(recipe(corpus, run, evaluation={"num_beams": 2}))


def test_refuses_other_changes_of_a_finished_run(corpus, finished, tmp_path, no_training):
    run = copy_of(finished, tmp_path)
    before = files(run)
    with pytest.raises(UserError, match="holds a finished run"):
        run_recipe(recipe(corpus, run, weight_decay=0.1, evaluation={"num_beams": 2}))
    assert files(run) == before


def test_a_full_disk_at_the_end_is_one_line(corpus, finished, tmp_path, monkeypatch, no_training):
    """`results.json` is written last, so the next start repeats whatever could not be written in full."""
    run = copy_of(finished, tmp_path, "results.json")
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(translation, "write_model_card", full)
        with pytest.raises(UserError, match=r"cannot be written: No space left.*again$"):
            run_recipe(recipe(corpus, run))
    assert not (run / "results.json").exists()
    run_recipe(recipe(corpus, run))
    assert (run / "translations.txt").read_bytes() == (finished / "translations.txt").read_bytes()


TOKENIZERS_FULL = "No space left on device (os error 28)"  # an `Exception` of the library `tokenizers`


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), Exception(TOKENIZERS_FULL)])
def test_a_full_disk_under_a_tokenizer_is_one_line(error, corpus, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", Mock(side_effect=error))
        with pytest.raises(UserError, match=r"run: the tokenizer cannot be saved: No space left"):
            run_recipe(recipe(corpus, run))
    assert sorted(path.name for path in run.iterdir()) == ["recipe.yaml", "run.json"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "hf_deepwide.training.trainer.TokenBatchTrainer._save", Mock(side_effect=Exception(TOKENIZERS_FULL))
        )
        with pytest.raises(UserError, match=r"checkpoint-4 cannot be saved: No space left"):
            run_recipe(recipe(corpus, run))
    assert run_recipe(recipe(corpus, run))["train"]["steps"] == 8


def test_resumes_without_the_base(corpus, finished, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(finished, base)
    options = {"model": {"init_from": str(base)}, "tokenizer": {"path": str(base)}}
    run = tmp_path / "run"
    run_recipe(recipe(corpus, run, **options))
    reference = load_file(run / "model.safetensors")
    shutil.rmtree(base)
    for name in ("results.json", "model.safetensors"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoint-8")
    run_recipe(recipe(corpus, run, **options))
    ours = load_file(run / "model.safetensors")
    assert [name for name in reference if not torch.equal(ours[name], reference[name])] == []


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_a_tokenizer_of_another_model_is_refused(place, corpus, finished, tmp_path, monkeypatch):
    """The tokenizer has the same tokens, but the ids of two are swapped. The base is a folder, or on the Hub."""
    base = str(finished)
    if place == "hub":
        cached = tmp_path / "cache" / "models--some--model"
        shutil.copytree(finished, cached / "snapshots" / "abc")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("abc")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        base = "some/model"
    other = shutil.copytree(finished, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second, *_ = (token for token in vocabulary if len(token) == 1 and token.isalpha())
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    options = {"model": {"init_from": base}, "tokenizer": {"path": str(other)}}
    with pytest.raises(UserError, match=f"is not the tokenizer of the base.*the token '[{first}{second}]' has the id"):
        run_recipe(recipe(corpus, tmp_path / "run", **options))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_splits_are_read_before_the_tokenizer_is_trained(split, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "load_or_train", lambda *_: pytest.fail("a tokenizer was trained"))
    (tmp_path / "bad.tsv").write_bytes(b"ok\tok\n\xff\tno\n")
    for file in ("nowhere.tsv", "bad.tsv"):
        with pytest.raises(UserError, match=file):
            run_recipe(recipe(corpus, tmp_path / "run", {split: str(tmp_path / file)}))


# What to expect


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"warmup_steps": 9}, True),
        ({"warmup_steps": 8}, False),
        ({"warmup_steps": 0.5}, False),
        ({"warmup_steps": 9, "lr_scheduler_type": "constant"}, False),
    ],
)
def test_a_warm_up_beyond_the_training_is_refused(options, refused, corpus, tmp_path):
    fits = WarmUpFits("tiny.yaml")
    args = recipe(corpus, tmp_path, **options).training_arguments()
    for step in (0, 4):
        state = SimpleNamespace(max_steps=8, global_step=step)
        if refused and step == 0:
            with pytest.raises(UserError, match=r"tiny\.yaml: training\.warmup_steps is 9, and .* 8 steps.* to 0.1,"):
                fits.on_train_begin(args, state, None)
        else:
            fits.on_train_begin(args, state, None)  # or a run that has already begun


@pytest.mark.parametrize(("count", "base", "told"), [(3000, None, True), (3000, "base", False), (5000, None, False)])
def test_warns_of_few_sentences(count, base, told, caplog):
    warn_of_few(count, "sentence pairs", SimpleNamespace(init_from=base))
    assert ("3000 sentence pairs are few" in caplog.text) == told
