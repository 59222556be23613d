"""share(space=True): the app starts from the code and the model in its folder, and answers."""

import os
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import requires
from pathlib import Path

import httpx
import pytest
import yaml
from demo_models import save
from huggingface_hub import HfApi, RepoUrl
from huggingface_hub.repocard import metadata_load

from hf_deepwide import MATConfig, MATRobertaConfig
from hf_deepwide.errors import UserError
from hf_deepwide.sharing.share import share
from hf_deepwide.sharing.space import GRADIO, PACKAGE
from hf_deepwide.sharing.use import verify_space
from hf_deepwide_cli import main

SHARE = "hf_deepwide.sharing.share"
CONSTRAINTS = PACKAGE.parents[1] / "constraints.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("runs") / "mat", "mat", attention_branches=2)


@pytest.fixture(scope="module")
def space(folder, tmp_path_factory):
    return share(folder, tmp_path_factory.mktemp("out") / "space", space=True, license="apache-2.0", verify=False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answer_of(process, url, patience=300):
    """The first response of the page's server."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        assert process.poll() is None, "the app has ended"
        try:
            return httpx.get(url, trust_env=False)
        except httpx.TransportError:
            time.sleep(0.3)
    raise AssertionError("the app does not answer")


def test_the_app_starts_and_answers(space, tmp_path):
    """The app runs in another folder than it was written to, with the copy of this package in the Space."""
    moved = shutil.copytree(space, tmp_path / "moved")
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, "-B", str(moved / "app.py")],
        env={**environment, "GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        answer = answer_of(process, f"http://127.0.0.1:{port}/")
        config = httpx.get(f"http://127.0.0.1:{port}/config", trust_env=False).json()
    finally:
        process.terminate()
        output = process.communicate(timeout=60)[0]
    assert answer.status_code == 200, output
    labels = {component["props"].get("label") for component in config["components"]}
    assert {"Translation", "Beams"} <= labels
    assert any("2 attention branches" in str(component["props"].get("value")) for component in config["components"])


def test_writes_the_metadata_of_a_space(space):
    fields = metadata_load(f"{space}/README.md")
    pinned = {line.partition("==")[0]: line.partition("==")[2] for line in CONSTRAINTS.read_text().splitlines()}
    assert fields["sdk"] == "gradio"
    assert fields["sdk_version"] == GRADIO == pinned["gradio"]
    assert fields["app_file"] == "app.py"
    assert fields["license"] == "apache-2.0"
    assert "models" not in fields
    needed = Path(space, "requirements.txt").read_text().split("\n")
    assert any(line.startswith("torch>=") for line in needed)
    assert set(needed) - {"", "sentencepiece"} <= set(requires("hf_deepwide"))
    assert "sentencepiece" in needed
    assert not any("extra" in line for line in needed)


def test_a_space_is_tried_out_before_it_is_there(folder, tmp_path, monkeypatch, request):
    tried = []
    monkeypatch.setattr(f"{SHARE}.verify_folder", lambda place, task: tried.append(place.name))
    share(folder, tmp_path / "space", space=True)
    assert tried == ["model"], "as a share of its own"
    assert not list((tmp_path / "space").rglob("*.pyc"))
    (tmp_path / "space" / "model" / "config.json").unlink()
    request.getfixturevalue("used_in_a_fork")
    with pytest.raises(RuntimeError, match=r"there is no config\.json"):
        verify_space(tmp_path / "space", None)


def test_an_edited_space_is_not_replaced(folder, tmp_path):
    space = tmp_path / "space"
    share(folder, space, space=True, verify=False)
    with pytest.raises(UserError, match="not empty"):
        share(folder, space, space=True, verify=False)
    share(folder, space, space=True, verify=False, overwrite=True)
    (space / "app.py").write_text("# mine")
    with pytest.raises(UserError, match="changed since"):
        share(folder, space, space=True, verify=False, overwrite=True)
    assert (space / "app.py").read_text() == "# mine"


def test_a_model_on_the_hub_stays_there(tmp_path, monkeypatch):
    asked = []

    def config_of(name, told):
        asked.append(name)
        return MATConfig()

    monkeypatch.setattr(f"{SHARE}.load_config", config_of)
    monkeypatch.setattr(sys, "argv", ["share", "me/mat", str(tmp_path / "space"), "--space", "--no-verify"])
    main("share")
    assert asked == ["me/mat"]
    assert metadata_load(tmp_path / "space" / "README.md")["models"] == ["me/mat"]
    assert "serve(['me/mat'])" in (tmp_path / "space" / "app.py").read_text()
    assert not (tmp_path / "space" / "model").exists()


def test_a_model_on_the_hub_must_translate(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{SHARE}.load_config", lambda name, told: MATRobertaConfig())
    with pytest.raises(UserError, match=r"models that translate, and me/bert is a mat_roberta"):
        share("me/bert", tmp_path / "space", space=True, verify=False)
    assert not (tmp_path / "space").exists()


def test_refuses_a_space_without_a_model(tmp_path):
    with pytest.raises(UserError, match="neither a folder nor"):
        share(tmp_path / "no" / "such" / "folder", tmp_path / "space", space=True)
    assert not (tmp_path / "space").exists()


def test_a_space_is_uploaded_as_a_space(folder, tmp_path, monkeypatch):
    calls = {}

    def create(self, repo_id, **options):
        calls["create"] = options
        return RepoUrl(f"https://huggingface.co/spaces/{repo_id}")

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **options: calls.update(upload=options))
    monkeypatch.setattr(f"{SHARE}.is_offline_mode", lambda: False)
    share(folder, repo_id="me/demo", space=True, verify=False)
    assert calls["create"]["repo_type"] == calls["upload"]["repo_type"] == "space"
    assert calls["create"]["space_sdk"] == "gradio"
    assert {"app.py", "requirements.txt", "README.md", "model/config.json", "hf_deepwide/demo/page.py"} <= set(
        calls["upload"]["allow_patterns"]
    )


def test_a_title_stays_a_title(tmp_path, folder):
    odd = shutil.copytree(folder, tmp_path / "a: [b] # <i>")
    share(odd, tmp_path / "space", space=True, verify=False)
    text = (tmp_path / "space" / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["title"] == "a: [b] # <i>"
    assert "<i>" not in text.split("---\n")[2]
