"""Nothing in a checkpoint, a corpus or a name is executed, or written outside the output folder."""

import ast
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import SCRIPTS, Payload
from tiny_run import tiny_recipe
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, pipeline

from hf_deepwide import MATForConditionalGeneration
from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.errors import UserError
from hf_deepwide.loading import load_config, load_model, load_tokenizer, refusing_pickles
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.shards import only_weights
from hf_deepwide.training.checkpoints import problem

PACKAGE = SCRIPTS.parent / "src" / "hf_deepwide"
UNSAFE = {  # (module, name) of functions and classes that run code which a file names
    *(("torch", "load"), ("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler")),
    *(("yaml", name) for name in ("Loader", "UnsafeLoader", "FullLoader", "unsafe_load", "full_load")),
}
# Only a call is unsafe. The package subclasses `Unpickler` with restrictions, and `torch.load` reads weights only.
CALLS = {("torch", "load"), ("pickle", "Unpickler")}
SOURCES = sorted([*PACKAGE.parent.rglob("*.py"), *SCRIPTS.glob("*.py")])


@pytest.fixture
def poisoned(workspace, tmp_path, monkeypatch):
    """A checkpoint with a payload in every pickle that the field's libraries have ever read."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "poisoned"
    shutil.copytree(workspace / "latent_depth", folder)
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "vocab.pkl",
                 "tokenizer.pkl", "pytorch_model.bin", "adapter_model.bin"):  # fmt: skip
        torch.save(Payload(), folder / name)
    return folder


def test_pickle_payload_runs_when_loaded(poisoned, tmp_path):
    torch.load(poisoned / "training_args.bin", weights_only=False)
    assert (tmp_path / "FIRED").exists()


def test_pickles_beside_safetensors_are_left_alone(poisoned, tmp_path):
    load_config(poisoned)
    load_tokenizer(poisoned)
    load_model(AutoModelForSeq2SeqLM, poisoned)
    load_model(AutoModelForMaskedLM, poisoned, may_lack=lambda config: True, accept_unexpected=lambda config: True)
    pipeline("translation", model=str(poisoned))("the dog", max_length=4)
    assert not (tmp_path / "FIRED").exists()


def test_pickles_in_place_of_safetensors_are_refused(poisoned, tmp_path):
    (poisoned / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"weights are pickled.*can run any code.*safetensors"):
        load_model(AutoModelForSeq2SeqLM, poisoned)
    with pytest.raises(UserError, match="latent_depth"):
        MATForConditionalGeneration.from_base(poisoned)
    shutil.copyfile(poisoned / "pytorch_model.bin", poisoned / "model.safetensors")
    with pytest.raises(UserError, match="weights are damaged"):
        load_model(AutoModelForSeq2SeqLM, poisoned)
    assert not (tmp_path / "FIRED").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"])
def test_resuming_loads_no_pickle(name, resumable, tmp_path, monkeypatch, caplog):
    """The checksums show that the file was replaced. Without checksums (an older version), reading refuses it."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(resumable, run)
    torch.save(Payload(), run / "checkpoint-1" / name)
    recipe = tiny_recipe(run, **RESUMABLE)
    if name == "training_args.bin":  # this file is never read
        run_recipe(recipe)
        assert "damaged" not in caplog.text
    else:
        assert f"{name} is damaged" in problem(run / "checkpoint-1")
        (run / "checkpoint-1" / "checksums.json").unlink()
        with pytest.raises(UserError, match=r"checkpoint-1: .*was not loaded.*Remove the folder"):
            run_recipe(recipe)
    assert not (tmp_path / "FIRED").exists()


@pytest.mark.parametrize("attribute", ["planner_data", "storage_data"])
def test_shards_that_name_code_are_refused(attribute, tmp_path, monkeypatch):
    """PyTorch's reader runs a payload in an index, or in a value that is no tensor. Our reader refuses both."""
    monkeypatch.chdir(tmp_path)
    honest, poisoned = tmp_path / "honest", tmp_path / "poisoned"
    state = {"weight": torch.randn(3, 2), "half": torch.ones(2, dtype=torch.bfloat16), "lr": 0.1, "betas": (0.9, 0.98)}
    checkpoint.save(state, checkpoint_id=honest)
    read = {**state, "weight": torch.zeros(3, 2), "lr": 0.0}
    with only_weights(tmp_path):
        checkpoint.load(read, checkpoint_id=honest)
    assert torch.equal(read["weight"], state["weight"])
    assert read["lr"] == 0.1

    shutil.copytree(honest, poisoned)
    metadata = checkpoint.FileSystemReader(poisoned).read_metadata()
    setattr(metadata, attribute, Payload())
    (poisoned / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="index of its shards"), refusing_pickles(poisoned):
        checkpoint.load(read, checkpoint_id=poisoned)
    assert not (tmp_path / "FIRED").exists()
    checkpoint.FileSystemReader(poisoned).read_metadata()
    assert (tmp_path / "FIRED").exists(), "the payload would have worked"


def test_values_beside_sharded_tensors_are_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save({"lr": Payload()}, checkpoint_id=tmp_path / "poisoned")
    with pytest.raises(CheckpointException, match=r"weights_only|Weights only"), only_weights(tmp_path):
        checkpoint.load({"lr": 0.1}, checkpoint_id=tmp_path / "poisoned")
    assert not (tmp_path / "FIRED").exists()


RESUMABLE = {
    "max_steps": 2,
    "warmup_steps": 1,
    "eval_strategy": "no",
    "save_steps": 1,
    "load_best_model_at_end": False,
}


@pytest.fixture(scope="module")
def resumable(tmp_path_factory):
    """An unfinished run of two steps. Its newest checkpoint is that of step 1."""
    run = tmp_path_factory.mktemp("resumable") / "run"
    run_recipe(tiny_recipe(run, **RESUMABLE))
    (run / "results.json").unlink()
    shutil.rmtree(run / "checkpoint-2")
    # a test may resume a copy of this run: another `output_dir` is no other recipe
    return run


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Each call in a tree, after the name of its function without module or object."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(getattr(node.func, "attr", getattr(node.func, "id", "")), node) for node in found]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_loading_goes_through_one_door(path):
    """Only `loading.py` calls `from_pretrained` with a file. No code unpickles or evaluates.

    Exception: the converter of fairseq reads pickles, with `weights_only=True`.
    """
    check_loading(path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "planted",
    [
        "torch.load(path)",
        "from torch import load",
        "import dill",
        "pickle.Unpickler(file).load()",
        "pickle.loads(content)",
        "np.load(path, allow_pickle=True)",
        "yaml.unsafe_load(text)",
        "yaml.load(text, yaml.Loader)",
        "AutoModel.from_pretrained(path)",
        "AutoConfig.from_pretrained(None, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_another_door_would_be_found(planted):
    with pytest.raises(AssertionError):
        check_loading(PACKAGE / "planted.py", planted)


def check_loading(path, text):
    """Assert the rules of `test_loading_goes_through_one_door` for the text of a file."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not {(node.module, each.name) for each in node.names} & UNSAFE, node.lineno
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            named = {getattr(node, "module", None), *(each.name for each in node.names)}
            assert not named & {"cloudpickle", "dill", "joblib", "shelve"}, node.lineno
        if isinstance(node, ast.Attribute):
            assert (getattr(node.value, "id", ""), node.attr) not in UNSAFE - CALLS, node.lineno
    for name, call in calls(tree):
        assert "allow_pickle" not in {keyword.arg for keyword in call.keywords}, call.lineno
        if name == "from_pretrained" and path.name != "loading.py":
            assert isinstance(call.args[0], ast.Constant), f"line {call.lineno}"
            assert call.args[0].value is None, f"line {call.lineno}"
        assert name not in {"eval", "exec", "system", "__import__"} or (name == "eval" and not call.args), call.lineno
        owner = getattr(getattr(call.func, "value", None), "id", "")
        if path.parent.name == "fairseq" and (owner, name) == ("torch", "load"):  # fairseq's files are pickles
            assert [k.value.value for k in call.keywords if k.arg == "weights_only"] == [True], call.lineno
            continue
        assert (owner, name) not in UNSAFE, call.lineno
        for keyword in call.keywords:
            if keyword.arg == "trust_remote_code":
                assert not isinstance(keyword.value, ast.Constant) or keyword.value.value is False, call.lineno


def test_loads_only_safetensors(monkeypatch, workspace):
    asked = {}

    class Auto(AutoModelForSeq2SeqLM):
        @staticmethod
        def from_pretrained(name, **options):
            asked.update(options)
            return AutoModelForSeq2SeqLM.from_pretrained(name, **options)

    load_model(Auto, workspace / "latent_depth")
    assert asked["use_safetensors"] is True
    assert asked["trust_remote_code"] is False


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(min_size=1, max_size=12) | st.sampled_from(["../x-de", "en-..", "a/b-c", "en-de\n", "-", "C:-x"]))
def test_a_pair_that_is_accepted_makes_a_plain_file_name(pair):
    try:
        accepted = DataArguments(pairs=[pair], train="{pair}/{source_lang}/train").pairs
    except UserError:
        return
    for name in accepted:
        assert Path(f"translations.{name}.txt").name == f"translations.{name}.txt"
        assert not set(name) & set("/\\\0\n:")
        assert ".." not in name


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(min_size=1, max_size=12) | st.sampled_from(["../de", "de/x", "..", ".de", "de\n", "~de"]))
def test_a_language_that_is_accepted_makes_a_plain_file_name(language):
    try:
        accepted = DataArguments(source_lang=language, target_lang="xx").source_lang
    except UserError:
        return
    assert Path(f"train.{accepted}").name == f"train.{accepted}"
    assert not accepted.startswith(".")
