"""Killed, stopped by a signal, or out of disk at any moment: the run ends as an undisturbed run, bit for bit.

`benchmarks/resume_matrix.py` tests all moments under all circumstances. The tests here are some of each kind.
"""

import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from interruptions import FULL, Blow, Runs, difference, write_case
from safetensors.torch import save_file

from hf_deepwide.durable import remove, why_not_written, write_whole
from hf_deepwide.errors import UserError
from hf_deepwide.runs.averaging import average_checkpoints
from hf_deepwide.runs.run_folder import read_id
from hf_deepwide.training.checkpoints import checkpoints, last_checkpoint, problem, rotate
from hf_deepwide.training.checksums import read_checksums
from hf_deepwide.training.history import load_history

KILLS = [
    ("in generation", 3, "resuming from checkpoint-8"),
    ("between epochs", 3, "resuming from checkpoint-12"),
    ("optimizer half written", 7, "checkpoint-8 was being saved when the run was interrupted"),
    ("old checkpoint half deleted", 2, "resuming from checkpoint-16"),
    ("checksums not yet named", 2, "checkpoint-8 was being saved when the run was interrupted"),
    ("results not yet named", 1, "training had ended at checkpoint-20"),
]


@pytest.fixture(scope="module")
def runs():
    with Runs() as server:
        yield server


@pytest.fixture(scope="module")
def case(runs, tmp_path_factory):
    """A function that returns a recipe with some options, its run folder, and the folder of the undisturbed run."""
    folder, references = tmp_path_factory.mktemp("resume"), {}

    def make(**options) -> tuple[Path, Path, Path]:
        alone = {key: value for key, value in options.items() if key != "dataloader_num_workers"}  # changes nothing
        key = json.dumps(alone)
        if key not in references:
            recipe, references[key] = write_case(folder, f"reference{len(references)}", **alone)
            codes, output = runs.run(recipe, processes=options.get("processes", 1))
            assert set(codes) == {0}, output
        number = sum(1 for _ in folder.glob("run*.yaml"))
        return *write_case(folder, f"run{number}", **options), references[key]

    return make


def assert_whole(run: Path) -> None:
    """Check that each folder with the name of a checkpoint is a complete checkpoint of this run."""
    kept, run_id = checkpoints(run, "checkpoint", "interrupted"), read_id(run)
    assert [(path.name, why) for path in kept if (why := problem(path, run_id))] == []
    assert {read_checksums(path)["run"] for path in kept} <= {run_id}


@pytest.mark.parametrize(("moment", "count", "said"), KILLS)
def test_resumes_after_a_kill_at_any_moment(moment, count, said, runs, case):
    recipe, run, reference = case()
    assert runs.run(recipe, blow=Blow(moment, count))[0] == [-signal.SIGKILL]
    assert_whole(run)
    codes, output = runs.run(recipe)
    assert codes == [0], output
    assert said in output
    assert difference(run, reference) == []
    assert not (run / ".saving").exists()


def test_starts_anew_after_kills_before_anything_is_saved(runs, case):
    """Each start finds the files that the killed start before it has left."""
    recipe, run, reference = case()
    for moment in ("mark not yet named", "recipe not yet named", "tokenizer not yet named"):
        codes, output = runs.run(recipe, blow=Blow(moment))
        assert codes == [-signal.SIGKILL], output
        assert "resuming from" not in output
        assert_whole(run)
    codes, output = runs.run(recipe)
    assert codes == [0], output
    assert "resuming from" not in output
    assert difference(run, reference) == []
    assert not (run / ".saving").exists()


@pytest.mark.parametrize(
    ("options", "blow", "status", "left"),
    [
        # the average is of the same last three checkpoints as in the undisturbed run
        ({"average_last": 3, "save_total_limit": 4}, Blow("in a step", 14, number=15), 143, "interrupted-14"),
        ({"average_last": 3, "save_total_limit": 4}, Blow("in evaluation", 3, number=2), 130, None),
        # evaluating and saving by epoch: at the end of an epoch, both are done before the run stops
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, Blow("in a step", 12, number=15), 143, "checkpoint-12"),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, Blow("in a step", 9, number=15), 143, "interrupted-9"),
        # schedulers also signal the workers
        ({"dataloader_num_workers": 2}, Blow("in a step", 9, number=15, to_group=True), 143, "interrupted-9"),
    ],
)
def test_saves_and_exits_on_a_signal(options, blow, status, left, runs, case):
    recipe, run, reference = case(**options)
    codes, output = runs.run(recipe, blow=blow)
    assert codes == [status], output
    assert "Traceback" not in output
    name = signal.Signals(blow.number).name
    assert f"{name} ended the run after step" in output
    assert "Give the same command again" in output
    assert_whole(run)
    newest = last_checkpoint(run)
    assert left in (None, newest.name)
    assert len(load_history(run)) == len(load_history(newest))
    codes, output = runs.run(recipe)
    assert codes == [0], output
    assert f"resuming from {newest.name}" in output
    # After a stop between two logs, the first logged loss is the mean of fewer steps.
    assert [each for each in difference(run, reference) if ": loss of step" not in each] == []
    assert checkpoints(run, "interrupted") == []


@pytest.mark.parametrize(
    ("blow", "left"),
    [(Blow("optimizer half written", 7, rank=0), None), (Blow("in a step", 10, rank=1, number=15), "interrupted-10")],
)
def test_two_processes(blow, left, runs, case, tmp_path):
    two = {"bf16": False, "max_tokens": 1024, "processes": 2}
    recipe, run, reference = case(**two)
    codes, output = runs.run(recipe, processes=2, blow=blow)
    assert codes == [143, 143] if left else codes[blow.rank] == -signal.SIGKILL, output
    assert_whole(run)
    assert left is None or last_checkpoint(run).name == left
    codes, output = runs.run(recipe)
    assert (codes, "batches_per_update: 2, now 1" in output) == ([2], True), output
    newest = last_checkpoint(run).name
    codes, output = runs.run(recipe, processes=2)
    assert codes == [0, 0], output
    assert f"resuming from {newest}" in output
    assert_whole(run)
    assert difference(run, reference) == []


def test_a_stream(runs, case):
    recipe, run, reference = case(data={"streaming": True, "shuffle_buffer": 100})
    assert runs.run(recipe, blow=Blow("in a step", 15))[0] == [-signal.SIGKILL]
    codes, output = runs.run(recipe)
    assert codes == [0], output
    assert "resuming from checkpoint-12" in output
    assert difference(run, reference) == []


@pytest.mark.parametrize("options", [{}, {"dataloader_num_workers": 1}])
def test_bpe_dropout(options, runs, case):
    recipe, run, reference = case(tokenizer={"bpe_dropout": 0.2}, **options)
    assert difference(case()[2], reference)  # BPE-dropout changes the weights
    assert runs.run(recipe, blow=Blow("in a step", 14))[0] == [-signal.SIGKILL]
    codes, output = runs.run(recipe)
    assert codes == [0], output
    assert "resuming from checkpoint-12" in output
    assert difference(run, reference) == []


@pytest.mark.parametrize(("moment", "count"), [("checkpoint just named", 2), ("in generation", 4)])
def test_a_full_disk(moment, count, runs, case):
    """Writing the weights fails, or torch's own files, whose error differs: one line is printed, nothing is lost."""
    recipe, run, reference = case()
    codes, output = runs.run(recipe, blow=Blow(moment, count, number=FULL))
    assert codes == [2], output
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    step = checkpoints(run)[-1].name
    assert "cannot be saved: File too large" in line
    assert f"The run is safe up to {step}. " in line
    assert_whole(run)
    assert not (run / ".saving").exists()
    assert runs.run(recipe)[0] == [0]
    assert difference(run, reference) == []


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "trainer_state.json", "model.safetensors"])
def test_a_file_cut_short(name, case, tmp_path, caplog):
    _, _, reference = case()
    for step in (16, 20):
        shutil.copytree(reference / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    (tmp_path / "damaged-checkpoint-20").mkdir()  # set aside earlier
    (tmp_path / "damaged-checkpoint-20" / "file").touch()
    file = tmp_path / "checkpoint-20" / name
    file.write_bytes(file.read_bytes()[:-10])
    assert last_checkpoint(tmp_path).name == "checkpoint-16"
    assert f"{name} is damaged" in caplog.text
    assert (tmp_path / "damaged-checkpoint-20" / name).is_file()


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step in (4, 8, 12, 16, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "interrupted-110").mkdir()
    rotate(tmp_path, 3, str(tmp_path / "checkpoint-4"))
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-16", "checkpoint-100"]
    rotate(tmp_path, 1, str(tmp_path / "checkpoint-4"))
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-100"]
    rotate(tmp_path, None, None)
    rotate(tmp_path, 0, None)
    rotate(tmp_path, 1, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-100", "interrupted-110"]


@contextmanager
def unprivileged():
    """Give up root's rights for a while: root may write everywhere, but the user `nobody` (65534) may not."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_read_only_folder(tmp_path):
    """The error message gives the reason, whichever library reports it. Existing files stay."""
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    save_file({"a": torch.ones(3)}, source / "model.safetensors")
    (source / "model.safetensors").chmod(0o644)
    output.mkdir()
    (output / "model.safetensors").write_bytes(b"old")
    above = [folder for folder in tmp_path.parents if folder.name.startswith(("pytest-", "popen-"))]
    for folder in (*above, tmp_path, source):
        folder.chmod(0o755)
    output.chmod(0o555)
    with unprivileged():
        with pytest.raises(UserError, match=r"output: the model cannot be saved: Permission denied"):
            average_checkpoints([source], output)
        with pytest.raises(PermissionError):
            write_whole(output / "results.json", "{}")
        with pytest.raises(RuntimeError) as error:
            torch.save({}, output / "optimizer.pt")
    assert why_not_written(error.value, output) == "Permission denied"
    assert why_not_written(RuntimeError("CUDA out of memory"), output) is None
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]
    assert (output / "model.safetensors").read_bytes() == b"old"


def test_removes_checkpoints_completely(tmp_path):
    (tmp_path / "checkpoint-4" / "optimizer_0").mkdir(parents=True)
    remove(tmp_path / "checkpoint-4")
    assert list(tmp_path.iterdir()) == []
