"""Files and folders appear complete or not at all, and never replace an input."""

import gzip
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_deepwide.durable import (
    STAGING,
    check_output,
    check_output_file,
    draft_of,
    remove,
    saving,
    whole_file,
    whole_files,
    whole_folder,
    write_whole,
)
from hf_deepwide.errors import UserError, quote
from hf_deepwide.evaluation.stream import check_stream
from hf_deepwide.sharing.folder import check_target


def test_an_existing_output_is_refused_unless_overwriting(tmp_path):
    output = tmp_path / "out.txt"
    check_output(output)
    output.write_text("kept")
    with pytest.raises(UserError, match=r"exists already.*--overwrite"):
        check_output(output, option="--overwrite")
    check_output(output, overwrite=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="exists already"):
        check_output(tmp_path / "dangling")
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty")


def test_a_folder_that_is_read_only_is_refused_before_the_work(tmp_path, monkeypatch):
    """Replace `os.access`, because the user who runs the tests (root) may be allowed to write everywhere."""
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: bool(asked.append((path, mode))))
    for refuse in (
        lambda: check_output(tmp_path / "new" / "model"),
        lambda: check_output_file(tmp_path / "scores.json"),
        lambda: check_stream("-", str(tmp_path / "out.txt")),
        lambda: check_target(tmp_path / "shared", None, False),
    ):
        with pytest.raises(UserError, match=f"no permission to write in {tmp_path}"):
            refuse()
    assert set(asked) == {(tmp_path, os.W_OK | os.X_OK)}


@pytest.mark.parametrize("spelling", ["in.txt", "./sub/../in.txt", "link.txt", "hard.txt"])
def test_an_input_is_never_the_output(tmp_path, spelling):
    source = tmp_path / "in.txt"
    source.write_text("kept")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.txt").symlink_to(source)
    os.link(source, tmp_path / "hard.txt")
    with pytest.raises(UserError, match="also an input"):
        check_output(tmp_path / spelling, inputs=[tmp_path / "other", source], overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("spelling", [".", "new/.."])
def test_an_output_without_a_name_is_refused(spelling, overwrite, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=r"is no name for .* such as .*new"):
        check_output(Path(spelling), overwrite=overwrite)
    (tmp_path / "empty" / "sub").mkdir()
    check_output(Path("."), overwrite=True)  # the files of the current folder are replaced one by one
    with pytest.raises(UserError, match="exists already"):
        check_output(Path("."))


def test_a_deletion_that_was_killed_does_not_hinder_the_next(tmp_path):
    left = tmp_path / STAGING / "deleted-run" / "sub"
    left.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    remove(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no folder .*/no/where"):
        write_whole(tmp_path / "no" / "where" / "recipe.yaml", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_draft_follows_no_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    draft_of(tmp_path / "note.txt").symlink_to(victim)
    (tmp_path / "note.txt").symlink_to(victim)
    write_whole(tmp_path / "note.txt", "new")
    assert victim.read_text() == "kept"
    assert (tmp_path / "note.txt").read_text() == "new"
    assert not (tmp_path / "note.txt").is_symlink()


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    write_whole(tmp_path / "lines.gz", "ä\n")
    assert gzip.decompress((tmp_path / "lines.gz").read_bytes()).decode() == "ä\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this device")
@pytest.mark.parametrize("numbers", [1, 100_000])
def test_torch_on_a_full_disk_is_one_line(numbers):
    with pytest.raises(UserError, match="a file could not be written to its end"), saving(Path("run")):
        torch.save(torch.zeros(numbers), "/dev/full")


def test_a_hidden_file_of_the_same_name_stays(tmp_path):
    (tmp_path / ".env").write_text("kept")
    write_whole(tmp_path / "env", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {".env": "kept", "env": "new"}


def test_leaves_nothing_after_a_failure(tmp_path):
    (tmp_path / "file").write_text("old")

    def fail(open_draft, name):
        with open_draft(tmp_path / name) as draft:
            (draft / "part" if draft.is_dir() else draft).write_text("half")
            raise OSError("full")

    for open_draft, name in ((whole_file, "file"), (whole_folder, "folder")):
        with pytest.raises(OSError, match="full"):
            fail(open_draft, name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"
    with whole_folder(tmp_path / "folder") as draft:
        (draft / "part").write_text("all")
    assert (tmp_path / "folder" / "part").read_text() == "all"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_quoted_value_is_one_short_line():
    for value in ("x" * 10**6, 10**10_000, [10**10_000], {"a": [{"b": ["c"] * 99}]}, "two\nlines", float("nan")):
        text = quote(value)
        assert "\n" not in text
        assert len(text) <= 100
    assert quote(12) == "12"
    assert quote("a") == "'a'"


def test_nested_aliases_are_quoted_at_once():
    value: list = ["lol"]
    for _ in range(60):
        value = [value] * 9  # 9 ** 60 leaves
    assert len(quote(value)) <= 100


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_device_or_pipe_is_not_replaced(name, tmp_path):
    """Test with a pipe, which is treated like /dev/null, and with a link to the pipe."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(UserError, match="pipe"):
        check_output(tmp_path / name, overwrite=True)
    with pytest.raises(UserError, match="pipe"):
        write_whole(tmp_path / name, "text")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_the_links_to_open_files_are_refused():
    with pytest.raises(UserError, match="/dev/stdout"):
        check_output(Path("/dev/stdout"), overwrite=True)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o700])
@pytest.mark.parametrize("writer", [whole_folder, whole_files])
def test_weights_are_readable_for_those_who_may_read_the_folder(writer, mode, tmp_path):
    """A library makes the weights readable for their owner alone. The modes of other files do not change."""
    before = os.umask(0o777 - mode)
    try:
        with writer(tmp_path / "run") as draft:
            save_file({"w": torch.zeros(1)}, draft / "model.safetensors")
            (draft / "program").touch(0o700)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").iterdir()}
    assert modes == {"model.safetensors": mode & 0o666, "program": 0o700}


@pytest.fixture
def events(monkeypatch):
    """The files that reach the disk (fsync) and the names that are given (rename), in order."""
    seen, fsync, rename = [], os.fsync, Path.rename

    def seen_fsync(file):
        seen.append(("on disk", Path(os.readlink(f"/proc/self/fd/{file}")).name))
        return fsync(file)

    def seen_rename(path, target):
        seen.append(("named", target.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "rename", seen_rename)
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells the names of open files")
def test_a_power_cut_leaves_no_name_without_its_contents(events, tmp_path):
    with whole_folder(tmp_path / "run") as draft:
        (draft / "part").write_text("all")
    assert events == [("on disk", "part"), ("on disk", "run"), ("named", "run"), ("on disk", tmp_path.name)]


def test_the_file_that_tells_that_all_are_there_is_named_last(events, tmp_path):
    with whole_files(tmp_path, last="model") as draft:
        for name in ("config", "model", "tokenizer"):
            (draft / name).touch()
    assert [name for what, name in events if what == "named"] == ["config", "tokenizer", "model"]
