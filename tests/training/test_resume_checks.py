"""Checkpoints that a run refuses or sets aside: other data, flipped bits, states and files from elsewhere."""

import errno
import gzip
import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import concatenate_datasets
from interruptions import write_case
from mistakes import Payload
from safetensors.torch import load_file
from tiny_run import tiny_corpus
from transformers import set_seed

from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.digest import data_digest
from hf_deepwide.durable import draft_of, remove
from hf_deepwide.errors import UserError
from hf_deepwide.runs.recipe import load_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.runs.run_folder import RunFolder
from hf_deepwide.training.checkpoints import (
    INTERRUPTED,
    REGULAR,
    check_weights,
    checkpoints,
    last_checkpoint,
    load_state,
    problem,
    rotate,
)
from hf_deepwide.training.checksums import read_checksums, write_checksums
from hf_deepwide.training.saving import Saving

SHORT = {
    "max_steps": 3,
    "warmup_steps": 1,
    "eval_steps": 1,
    "save_steps": 1,
    "save_total_limit": 5,
    "predict_with_generate": False,
}
CHECKSUMS, STATE = "checksums.json", "trainer_state.json"


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three steps, and its recipe."""
    folder = tmp_path_factory.mktemp("checks")
    recipe, run = write_case(folder, "run", **SHORT)
    run_recipe(load_recipe(recipe))
    return recipe, run


@pytest.fixture
def unfinished(finished, tmp_path):
    """A copy of the run in its own folder, without its last step, and its recipe."""
    folder = tmp_path / "work"
    shutil.copytree(finished[0].parent, folder)
    recipe = folder / "run.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace(str(finished[0].parent), str(folder)))
    run = folder / "run"
    shutil.rmtree(run / "checkpoint-3")
    (run / "results.json").unlink()
    (run / "recipe.yaml").write_text(
        (run / "recipe.yaml").read_text(encoding="utf-8").replace(str(finished[0].parent), str(folder))
    )
    return recipe, run


@pytest.fixture
def two(finished, tmp_path):
    """A folder with two checkpoints."""
    for step in (1, 2):
        shutil.copytree(finished[1] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    return tmp_path


def flip(path: Path, place: float = 0.5) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


def change_state(checkpoint: Path, **fields) -> None:
    """Change fields of the state, and remove the checksums that would show the change."""
    path = checkpoint / STATE
    state = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(state | fields), encoding="utf-8")
    (checkpoint / CHECKSUMS).unlink(missing_ok=True)


# Data


@pytest.mark.parametrize("split", ["train", "validation"])
def test_other_data_are_refused(split, unfinished):
    recipe, run = unfinished
    file = recipe.with_name(f"{split}.tsv")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[1:] + lines[:1]), encoding="utf-8")  # the same pairs in another order
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(UserError, match=rf"checkpoint-2: .*{split}.* data .*output_dir"):
        run_recipe(load_recipe(recipe))
    assert sorted(path.name for path in run.iterdir()) == before


def test_the_same_data_in_another_form_go_on(unfinished):
    recipe, _ = unfinished
    content = recipe.with_name("train.tsv").read_bytes()
    recipe.with_name("train.tsv").unlink()
    recipe.with_name("train.tsv.gz").write_bytes(gzip.compress(content))
    assert run_recipe(load_recipe(recipe))["train"]["steps"] == 3


def test_a_digest_is_of_content_alone(corpus):
    encoded, args = corpus.encoded, None
    digest = data_digest(encoded, args)
    pieces = [encoded.select(range(start, min(start + 70, len(encoded)))) for start in range(0, len(encoded), 70)]
    assert data_digest(concatenate_datasets(pieces), args) == digest
    assert data_digest(encoded.select([*range(len(encoded))]), args) == digest
    assert data_digest(encoded.select([1, 0, *range(2, len(encoded))]), args) != digest
    assert data_digest(encoded.select(range(len(encoded) - 1)), args) != digest

    def one_id(row, number):
        return {"labels": [row["labels"][0] + 1, *row["labels"][1:]]} if number == 150 else {}

    def shifted(row):  # the same numbers in a row, split differently between the columns
        return {"input_ids": row["input_ids"] + row["labels"][:1], "labels": row["labels"][1:]}

    assert data_digest(encoded.map(one_id, with_indices=True, features=encoded.features), args) != digest
    assert data_digest(encoded.map(shifted, features=encoded.features), args) != digest


def test_a_stream_is_known_by_its_files(finished, tmp_path):
    shutil.copyfile(finished[0].with_name("train.tsv"), tmp_path / "train.tsv")
    data = load_recipe(finished[0], ["--data.root", str(tmp_path), "--data.streaming", "true"]).data
    digests = []
    lines = (tmp_path / "train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    far = lines * 40  # 12,000 pairs; the last one is not among the first rows that are read
    for variant in (far, far, [*far[:-1], far[-1].replace("e", "a")], far + lines[:1]):
        (tmp_path / "train.tsv").write_text("".join(variant), encoding="utf-8")
        digests.append(data_digest(load_parallel(data, "train"), data))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


# Runs


@pytest.fixture(scope="module")
def other(finished):
    """Another run on the same data, whose checkpoints are whole."""
    recipe, run = write_case(finished[0].parent, "other", **SHORT, seed=4)
    run_recipe(load_recipe(recipe))
    return run


def ids(run: Path) -> set[str | None]:
    """The ids in a run's mark and checkpoints."""
    files = [(run / "run.json", "id"), *((path, "run") for path in run.glob("checkpoint-*/checksums.json"))]
    return {json.loads(path.read_text(encoding="utf-8")).get(key) for path, key in files}


def test_a_checkpoint_of_another_run_is_set_aside(unfinished, finished, other, caplog):
    recipe, run = unfinished
    shutil.copytree(other / "checkpoint-3", run / "checkpoint-3")
    assert problem(run / "checkpoint-3") is None
    assert run_recipe(load_recipe(recipe))["train"]["steps"] == 3
    (line,) = [each for each in caplog.messages if "not usable" in each]
    assert "checkpoint-3" in line
    assert "another run" in line
    assert (run / "damaged-checkpoint-3").is_dir()
    ours, left_alone = (load_file(each / "model.safetensors") for each in (run, finished[1]))
    assert all(torch.equal(ours[name], tensor) for name, tensor in left_alone.items())


@pytest.mark.parametrize(
    "options",
    [
        {"average_last": 2},
        {"average_last": 0, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
    ],
)
def test_the_final_model_is_not_made_of_another_run(options, two, finished, other):
    shutil.copyfile(finished[1] / "run.json", two / "run.json")
    state = load_state(two / "checkpoint-2")
    state.best_global_step = 1
    RunFolder(two).final_checkpoints(state, SimpleNamespace(**options))
    shutil.rmtree(two / "checkpoint-1")
    shutil.copytree(other / "checkpoint-1", two / "checkpoint-1")
    with pytest.raises(UserError, match=r"checkpoint-1: another run .* final model"):
        RunFolder(two).final_checkpoints(state, SimpleNamespace(**options))


def test_a_run_keeps_its_id_until_it_is_replaced(unfinished, other):
    recipe, run = unfinished
    (kept,) = ids(run)
    assert len(kept) == 32
    assert ids(other) not in ({kept}, {None})
    run_recipe(load_recipe(recipe))
    assert ids(run) == {kept}
    assert (run / "checkpoint-3").is_dir()
    run_recipe(load_recipe(recipe), overwrite=True)
    assert len(ids(run)) == 1
    assert ids(run) not in ({kept}, {None})


def test_a_run_of_an_older_version_goes_on_without_an_id(unfinished):
    recipe, run = unfinished
    mark = json.loads((run / "run.json").read_text(encoding="utf-8"))
    del mark["id"]
    (run / "run.json").write_text(json.dumps(mark), encoding="utf-8")
    for checkpoint in checkpoints(run):
        write_checksums(checkpoint, read_checksums(checkpoint)["data"])
    assert ids(run) == {None}
    assert run_recipe(load_recipe(recipe))["train"]["steps"] == 3
    assert ids(run) == {None}
    assert (run / "checkpoint-3").is_dir()


# Files


def test_a_flipped_bit_in_any_file_is_found(finished, tmp_path, caplog):
    run = tmp_path / "run"
    for step in (1, 2):
        shutil.copytree(finished[1] / f"checkpoint-{step}", run / f"checkpoint-{step}")
    names = sorted(path.name for path in (run / "checkpoint-2").iterdir())
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", STATE, CHECKSUMS} <= set(names)
    for name in names:
        copy = tmp_path / "copy"
        shutil.copytree(run / "checkpoint-2", copy / "checkpoint-2")
        for place in (0.02, 0.5, 0.98):
            flip(copy / "checkpoint-2" / name, place)
            found = problem(copy / "checkpoint-2")
            assert (found is None) == (name == "training_args.bin"), f"{name} at {place}"
            assert found is None or name == CHECKSUMS or name in found
            flip(copy / "checkpoint-2" / name, place)
        shutil.rmtree(copy)
    flip(run / "checkpoint-2" / "model.safetensors")
    with pytest.raises(UserError, match=r"checkpoint-2: model\.safetensors is damaged"):
        check_weights(run / "checkpoint-2")
    assert last_checkpoint(run).name == "checkpoint-1"
    assert len(caplog.messages) == 1
    assert "\n" not in caplog.text.strip()
    assert (run / "damaged-checkpoint-2").is_dir()


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
def test_checksums_of_archives_are_read_without_ours(name, finished, tmp_path):
    """Without `checksums.json`, as in checkpoints of older versions, the checksums of the archives find damage."""
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(finished[1] / "checkpoint-2", checkpoint)
    (checkpoint / CHECKSUMS).unlink()
    assert problem(checkpoint) is None
    path = checkpoint / name
    content = path.read_bytes()
    saved = torch.load(path, weights_only=False)
    tensor = saved["cpu"] if name == "rng_state.pth" else saved["state"][0]["exp_avg"]
    place = content.index(tensor.numpy().tobytes())
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert f"{name} is damaged" in problem(checkpoint)


def test_damage_to_what_is_averaged_is_told(two):
    state = load_state(two / "checkpoint-2")
    assert len(RunFolder(two).final_checkpoints(state, SimpleNamespace(average_last=2))[0]) == 2
    flip(two / "checkpoint-1" / "model.safetensors")
    with pytest.raises(UserError, match=r"checkpoint-1: .*is damaged.* final model"):
        RunFolder(two).final_checkpoints(state, SimpleNamespace(average_last=2))


def replace_generators(checkpoint):
    """Replace the random state by a valid state of another process, with as many bytes."""
    state = torch.load(checkpoint / "rng_state.pth", weights_only=False)
    state["cpu"] = torch.manual_seed(4).get_state()
    torch.save(state, checkpoint / "rng_state.pth")


ELSEWHERE = {
    "state of another step": lambda at: shutil.copyfile(at.with_name("checkpoint-1") / STATE, at / STATE),
    "generators of another process": replace_generators,
    "generators of more processes": lambda at: shutil.copyfile(at / "rng_state.pth", at / "rng_state_1.pth"),
    "generators of some processes": lambda at: (at / "rng_state.pth").rename(at / "rng_state_1.pth"),
    "a pickle": lambda at: torch.save(Payload(), at / "optimizer.pt"),
    "weights of another step": lambda at: shutil.copyfile(
        at.with_name("checkpoint-1") / "model.safetensors", at / "model.safetensors"
    ),
    "a scaler": lambda at: torch.save({"scale": 1.0}, at / "scaler.pt"),
    "an index of weights": lambda at: (at / "model.safetensors.index.json").write_text("{}"),
    "a file less": lambda at: (at / "generation_config.json").unlink(),
    "checksums that are none": lambda at: (at / CHECKSUMS).write_text("[1]"),
    "nested checksums": lambda at: (at / CHECKSUMS).write_text("[" * 100_000),
}
TAMPERED = {
    "step of another": {"global_step": 1},
    "negative step": {"global_step": -2},
    "huge step": {"global_step": 10**400},
    "step as text": {"global_step": "2"},
    "step as truth": {"global_step": True},
    "step not a number": {"global_step": float("nan")},
    "no epoch": {"epoch": float("inf")},
    "history of numbers": {"log_history": [1, 2]},
    "history of odd steps": {"log_history": [{"step": "x"}]},
    "callbacks as a list": {"stateful_callbacks": [1]},
    "control as text": {"stateful_callbacks": {"TrainerControl": "stop"}},
    "best as a list": {"best_model_checkpoint": ["/"]},
    "best step as text": {"best_global_step": "../x"},
    "a field too many": {"surprise": 1},
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_files_from_elsewhere_set_a_checkpoint_aside(name, two, caplog):
    ELSEWHERE[name](two / "checkpoint-2")
    assert last_checkpoint(two).name == "checkpoint-1"
    (line,) = caplog.messages
    assert "damaged-checkpoint-2" in line


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_state_sets_a_checkpoint_aside(name, two, caplog):
    """Find a changed state even if the checksums were removed, too."""
    change_state(two / "checkpoint-2", **TAMPERED[name])
    assert last_checkpoint(two).name == "checkpoint-1"
    (line,) = caplog.messages
    assert len(line) < 700


def test_a_checkpoint_under_another_step_is_set_aside(two, caplog):
    (two / "checkpoint-2").rename(two / "checkpoint-40")
    assert last_checkpoint(two).name == "checkpoint-1"
    assert "of step 2" in caplog.text


@pytest.mark.parametrize(
    "name", ["checkpoint-٤٢", "checkpoint-007", "checkpoint-1_000", "checkpoint-+4", "checkpoint- 4"]
)
def test_names_that_a_run_does_not_write_are_no_checkpoints(name, two):
    (two / "checkpoint-2").rename(two / name)
    assert [path.name for path in checkpoints(two, REGULAR, INTERRUPTED)] == ["checkpoint-1"]
    assert last_checkpoint(two).name == "checkpoint-1"
    assert (two / name).is_dir()


def test_a_pipe_in_a_checkpoint_is_not_waited_for(two):
    os.mkfifo(two / "checkpoint-2" / "notes.json")
    assert last_checkpoint(two).name == "checkpoint-2"
    (two / "checkpoint-2" / CHECKSUMS).unlink()
    assert last_checkpoint(two).name == "checkpoint-2"


def test_reports_damage_that_loads_without_an_error(unfinished):
    """Without checksums, as in an older version: the files can be read, but do not fit this run."""
    recipe, run = unfinished
    for name, content in (("rng_state.pth", {"python": 3}), ("optimizer.pt", {"state": {}})):
        shutil.copytree(run / "checkpoint-2", run / "copy")
        torch.save(content, run / "checkpoint-2" / name)
        (run / "checkpoint-2" / CHECKSUMS).unlink()
        with pytest.raises(UserError, match=r"checkpoint-2 does not fit this run .*[Rr]emove the folder"):
            run_recipe(load_recipe(recipe))
        shutil.rmtree(run / "checkpoint-2")
        (run / "copy").rename(run / "checkpoint-2")
    change_state(run / "checkpoint-2", stateful_callbacks={"Throughput": {"args": {"surprise": 1}}})
    with pytest.raises(UserError, match="checkpoint-2 does not fit this run"):
        run_recipe(load_recipe(recipe))


# Going on


def test_a_checkpoint_of_a_version_without_a_callback_goes_on(unfinished, finished):
    recipe, run = unfinished
    state = json.loads((run / "checkpoint-2" / STATE).read_text(encoding="utf-8"))["stateful_callbacks"]
    del state["LargestBatch"]
    change_state(run / "checkpoint-2", stateful_callbacks=state)
    assert run_recipe(load_recipe(recipe))["train"]["steps"] == 3
    resumed, whole = (load_file(folder / "model.safetensors") for folder in (run, finished[1]))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    state = json.loads((run / "checkpoint-3" / STATE).read_text(encoding="utf-8"))["stateful_callbacks"]
    assert state["LargestBatch"] == {"args": {"tokens": None}, "attributes": {}}


def test_fewer_processes_say_so(unfinished, caplog):
    recipe, run = unfinished
    newest = run / "checkpoint-2"
    (newest / "rng_state.pth").rename(newest / "rng_state_0.pth")
    shutil.copyfile(newest / "rng_state_0.pth", newest / "rng_state_1.pth")
    (newest / CHECKSUMS).unlink()
    with caplog.at_level(logging.WARNING):
        assert run_recipe(load_recipe(recipe))["train"]["steps"] == 3
    assert sum("2 processes saved" in line for line in caplog.messages) == 1


def test_the_best_checkpoint_of_another_place_is_left_alone(unfinished, tmp_path):
    recipe, run = unfinished
    outside = tmp_path / "outside" / "checkpoint-9"
    shutil.copytree(run / "checkpoint-1", outside)
    (outside / "model.safetensors").write_bytes(b"not to be read")
    for name in ("checkpoint-1", "checkpoint-2"):
        change_state(
            run / name, best_model_checkpoint=str(outside), best_metric=-5.0, best_global_step=9, log_history=[]
        )
    results = run_recipe(load_recipe(recipe))
    assert results["train"]["steps"] == 3
    assert results["train"]["weights"] == "the last checkpoint, of step 3"
    assert load_state(run / "checkpoint-3").best_model_checkpoint is None
    assert (outside / "model.safetensors").read_bytes() == b"not to be read"


# Links


@pytest.mark.parametrize("target", ["inside", "outside", "nowhere", "file"])
def test_a_checkpoint_that_is_a_link_is_set_aside(target, two, tmp_path_factory, caplog):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").write_text("mine", encoding="utf-8")
    place = two / "checkpoint-1" if target == "inside" else elsewhere / target
    if target == "outside":
        shutil.copytree(two / "checkpoint-2", place)
    there = sorted(place.rglob("*"))
    shutil.rmtree(two / "checkpoint-2")
    for name in ("checkpoint-2", "interrupted-0", "damaged-checkpoint-2"):
        (two / name).symlink_to(place, target_is_directory=True)
    assert last_checkpoint(two).name == "checkpoint-1"
    assert "checkpoint-2 is not usable" in caplog.text
    assert sorted(path.name for path in two.iterdir()) == [
        "checkpoint-1", "damaged-checkpoint-2", "damaged-interrupted-0"
    ]  # fmt: skip
    assert sorted(place.rglob("*")) == there
    assert (elsewhere / "file").read_text(encoding="utf-8") == "mine"


def test_a_link_that_appears_later_is_replaced(two, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    (two / "checkpoint-2" / "link").symlink_to(elsewhere)
    remove(two / "checkpoint-2")
    (two / "checkpoint-2").symlink_to(elsewhere)
    remove(two / "checkpoint-2")
    (two / ".saving").symlink_to(elsewhere)
    remove(two / "checkpoint-1")
    assert list(two.iterdir()) == []
    assert (elsewhere / "file").is_file()


def test_rotation_leaves_what_links_point_to(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (outside / "checkpoint-2").mkdir(parents=True)
    (outside / "checkpoint-2" / "file").touch()
    for step in (4, 6):
        (run / f"checkpoint-{step}").mkdir(parents=True)
    (run / "checkpoint-2").symlink_to(outside / "checkpoint-2")
    rotate(run, 1, str(outside / "checkpoint-2"))
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "checkpoint-6"]
    assert (outside / "checkpoint-2" / "file").is_file()


def test_nothing_is_written_through_a_link(finished, tmp_path):
    """Prepare a folder with a link in place of each file of a run, and of each draft."""
    recipe, done = finished
    run, mine = tmp_path / "run", tmp_path / "mine"
    mine.mkdir()
    names = [path.relative_to(done) for path in done.rglob("*") if path.is_file()]
    assert len([name for name in names if len(name.parts) == 1]) > 7
    run.mkdir()
    shutil.copyfile(done / "run.json", run / "run.json")
    for name in names:
        if name.parts[0].startswith("checkpoint-") or name.name == "results.json":
            continue  # their links are made below
        for planted in (name, draft_of(name)):
            precious = mine / str(planted).replace("/", "|")
            precious.write_text("{}", encoding="utf-8")
            (run / planted).parent.mkdir(exist_ok=True)
            (run / planted).unlink(missing_ok=True) if planted.name != "run.json" else None
            if not (run / planted).exists():
                (run / planted).symlink_to(precious)
    draft_of(run / "results.json").symlink_to(mine / "results")
    for name in (".saving", "checkpoint-1", "checkpoint-2", "interrupted-2"):
        (mine / name).mkdir()
        (mine / name / "file").write_text("precious", encoding="utf-8")
        (run / name).symlink_to(mine / name)
    before = {path: path.read_text(encoding="utf-8") for path in mine.rglob("*") if path.is_file()}
    again = load_recipe(recipe, ["--training.output_dir", str(run)])
    assert run_recipe(again)["train"]["steps"] == 3
    assert {path: path.read_text(encoding="utf-8") for path in mine.rglob("*") if path.is_file()} == before
    left = {path.name for path in run.rglob("*") if path.is_symlink()}
    assert all(name.startswith((".", "damaged-")) for name in left), left


def test_a_new_run_replaces_an_old_one_and_not_what_links_point_to(tmp_path):
    run, mine = tmp_path / "run", tmp_path / "mine"
    for folder in (run / ".new" / "checkpoint-4", run / "runs", run / "faults", mine):
        folder.mkdir(parents=True)
    for name in ("model.safetensors", "events.out.tfevents.1"):
        (mine / name).write_text("mine", encoding="utf-8")
    (run / ".new" / "run.json").write_text("{}", encoding="utf-8")
    (run / ".new" / "checkpoint-4" / "model.safetensors").write_text("new", encoding="utf-8")
    for name in ("checkpoint-4", "checkpoint-8", "runs/log", "faults/step-1", "damaged-checkpoint-1", "run.json"):
        (run / name).symlink_to(mine)
    (tmp_path / "empty").mkdir()
    (run / "runs" / "empty").symlink_to(tmp_path / "empty")
    RunFolder(run).finish_replacing()
    assert sorted(path.name for path in mine.iterdir()) == ["events.out.tfevents.1", "model.safetensors"]
    assert {path.read_text(encoding="utf-8") for path in mine.iterdir()} == {"mine"}
    assert (run / "checkpoint-4" / "model.safetensors").read_text(encoding="utf-8") == "new"


@pytest.mark.parametrize("name", ["plots", "runs", "faults"])
def test_folders_of_a_run_are_no_links(name, unfinished, tmp_path):
    recipe, run = unfinished
    shutil.rmtree(run / name, ignore_errors=True)
    (tmp_path / "mine").mkdir()
    (run / name).symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=f"{name} is a link"):
        run_recipe(load_recipe(recipe))


def test_rotation_keeps_the_best_and_the_newest(tmp_path):
    for step in (2, 4, 6, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    rotate(tmp_path, 1, str(tmp_path / "checkpoint-4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]


def test_another_number_of_processes_draws_numbers_that_were_not_drawn_before(tmp_path):
    for rank in (0, 1, 2):
        (tmp_path / f"rng_state_{rank}.pth").touch()

    def drawn(step, rank):
        args = SimpleNamespace(seed=1, process_index=rank, world_size=2)
        assert Saving(SimpleNamespace(args=args, state=SimpleNamespace(global_step=step)), None).reseeds(str(tmp_path))
        return tuple(torch.rand(3).tolist())

    set_seed(1)
    at_start = tuple(torch.rand(3).tolist())
    assert len({at_start, drawn(2, 0), drawn(2, 1), drawn(4, 0)}) == 4


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_disk_that_cannot_read_the_last_checkpoint(number, two, monkeypatch):
    """Damage sets the checkpoint aside. A file that may not be read is no damage, so nothing is renamed."""

    def first_difference(checkpoint, digests):
        if checkpoint.name == "checkpoint-2":
            raise OSError(number, os.strerror(number), str(checkpoint / "model.safetensors"))

    monkeypatch.setattr("hf_deepwide.training.checkpoints.first_difference", first_difference)
    if number == errno.EIO:
        assert last_checkpoint(two) == two / "checkpoint-1"
        assert (two / "damaged-checkpoint-2").is_dir()
    else:
        with pytest.raises(PermissionError):
            last_checkpoint(two)
        assert (two / "checkpoint-2").is_dir()
