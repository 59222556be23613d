"""Tokens, passwords and keys in a recipe are used, but never written."""

import pickle
import shutil

import pytest
from tiny_run import tiny_values, write_recipe

from hf_deepwide.errors import UserError
from hf_deepwide.redaction import is_secret, take_secrets, with_secrets
from hf_deepwide.runs.recipe import load_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.training.arguments import TranslationTrainingArguments
from hf_deepwide.training.classification import ClassificationTrainingArguments

RESUMABLE = {
    "max_steps": 2,
    "warmup_steps": 1,
    "eval_strategy": "no",
    "save_steps": 1,
    "load_best_model_at_end": False,
}
SECRET = "hf_never-to-be-written"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("hub_token", True), ("token", True), ("apiKey", True), ("hubToken", True), ("wandbApiKey", True),
     ("userPassword", True), ("api_key", True), ("wandb-api-key", True),
     ("PASSWORD", True), ("client_secret", True), ("pad_token_id", False), ("max_tokens", False), ("monkey", False)],
)  # fmt: skip
def test_secrets_are_known_by_name(name, expected):
    assert is_secret(name) is expected
    values = {"a": {name: 1, "b": [{"c": {name: 2}}]}, "d": 3}
    public, secrets = take_secrets(values)
    assert (name in str(public)) is not expected
    assert with_secrets(public, secrets) == values
    assert (name in str(secrets)) is expected


def test_a_run_writes_no_secret(tmp_path, capfd):
    """Secrets from the recipe or an override reach no file and no output. A resumed run needs no secrets."""
    values = tiny_values(tmp_path / "run", **RESUMABLE, hub_token=SECRET, report_to="tensorboard")
    values["training"]["fsdp_config"] = {"limit_all_gathers": True, "api_key": f"{SECRET}2"}
    recipe = load_recipe(write_recipe(tmp_path, values), [f"--training.hub_token={SECRET}1"])
    args = recipe.training_arguments()
    assert (args.hub_token, args.fsdp_config["api_key"]) == (f"{SECRET}1", f"{SECRET}2")
    run_recipe(recipe)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"README.md", "recipe.yaml", "results.json", "run.json", "training_args.bin"} <= names
    assert any(name.startswith("events.out") for name in names)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in "".join(capfd.readouterr())
    assert SECRET not in repr(recipe)

    # an earlier version has kept the secret
    (tmp_path / "run" / "results.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    kept = tmp_path / "run" / "recipe.yaml"
    kept.write_text(kept.read_text().replace("training:", f"training:\n  hub_token: {SECRET}"))
    with pytest.raises(UserError) as error:
        run_recipe(load_recipe(tmp_path / "tiny.yaml", ["--training.seed=7"]))
    assert "training.seed" in str(error.value)
    assert SECRET not in str(error.value)
    del values["training"]["hub_token"], values["training"]["fsdp_config"]["api_key"]
    run_recipe(load_recipe(write_recipe(tmp_path, values)))
    assert SECRET not in kept.read_text()


@pytest.mark.parametrize("kind", [TranslationTrainingArguments, ClassificationTrainingArguments])
def test_training_arguments_are_written_without_secrets(kind, tmp_path):
    args = kind(output_dir=str(tmp_path), hub_token=SECRET, fsdp_config={"api_key": SECRET}, use_cpu=True)
    assert args.hub_token == SECRET
    written = [pickle.dumps(args).decode("latin-1"), str(args.to_dict()), args.to_json_string()]
    assert [text for text in written if SECRET in text] == []


def test_no_message_shows_a_secret(tmp_path):
    nested = {"gradient_checkpointing_kwargs": {"api_key": SECRET}}
    recipe = load_recipe(write_recipe(tmp_path, tiny_values(tmp_path / "run", **nested)))
    with pytest.raises(UserError, match="api_key") as error:
        recipe.training_arguments()
    assert SECRET not in str(error.value)
    for wrong in ({"hub_token": [SECRET]}, {"lr_scheduler_type": {"token": SECRET}}):
        with pytest.raises(UserError, match="is not accepted") as error:
            load_recipe(write_recipe(tmp_path, tiny_values(tmp_path / "run", **wrong)))
        assert SECRET not in str(error.value)
