"""Wrong checkpoints and arguments: the message of each script."""

import json

import pytest
import torch
from mistakes import SCRIPTS, Payload, spoilt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

SOURCE, REFERENCE = "corpus/test.en", "corpus/test.de"
VANILLA, LATENT, PATHS = "vanilla_transformer", "latent_depth", "multipath_transformer"
EVALUATE = ("evaluate_translation.py", "--source", SOURCE, "--reference", REFERENCE, "--num_beams", "1")
LOADERS = {
    "evaluate": (*EVALUATE, "--model", f"./{VANILLA}"),  # "./" marks a folder, so the Hub is not contacted
    "proximal": ("proximal_init.py", f"./{VANILLA}", "out"),
    "init_from": (
        "train_translation.py",
        "recipe.yaml",
        f"--model.init_from=./{VANILLA}",
        "--tokenizer.path=tokenizer",
    ),
    "share": ("share.py", VANILLA, "out", "--no-verify"),
    "prune": ("prune_latent_depth.py", f"./{LATENT}", "out"),
    "plot path weights": ("plot_path_weights.py", f"./{PATHS}", "--output", "out"),
}


def check(spoil, command, words, workspace, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_DEEPWIDE_DATA", raising=False)
    place = spoilt(spoil, workspace, tmp_path, capsys)
    said = place.error_of(*command)
    for word in words:
        assert word in said
    assert not (place.folder / "FIRED").exists()
    assert not (place.folder / "out").exists(), "nothing is left of what failed"


def pickled(at, model):
    at.remove(f"{model}/model.safetensors")
    torch.save(Payload(), at.folder / model / "pytorch_model.bin")


def foreign_code(at, model):
    at.edit_config(model, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForSeq2SeqLM": "evil.M"})
    at.put(f"{model}/evil.py", "open('FIRED', 'w')")


def lacking(at, model):
    file = at.folder / model / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.encoder.layers.0.feed_forward.fc1.bias"]
    save_file(tensors, file, metadata={"format": "pt"})


def poisoned(at, model):
    file = at.folder / model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.encoder.layers.0.feed_forward.fc1.bias"][2] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})


DAMAGE = {
    "missing": (lambda at, model: at.remove(model), ["no such folder"]),
    "without config": (lambda at, model: at.remove(f"{model}/config.json"), ["config.json"]),
    "weights cut": (lambda at, model: at.cut(f"{model}/model.safetensors"), ["its weights are damaged"]),
    "weights empty": (lambda at, model: at.put(f"{model}/model.safetensors", ""), ["its weights are damaged"]),
    "no weights": (lambda at, model: at.remove(f"{model}/model.safetensors"), ["there is no model.safetensors in it"]),
    "weights pickled": (pickled, ["its weights are pickled (pytorch_model.bin)", "can run any code", "safetensors"]),
    "weights lacking": (lacking, ["it has no weights for model.encoder.layers.0.feed_forward.fc1.bias"]),
    "weights too many": (lambda at, model: at.edit_config(model, attention_bias=False), ["does not ask for", "bias"]),
    "weights no numbers": (poisoned, ["encoder.layers.0.feed_forward.fc1.bias", "NaN"]),
    "weights of another size": (
        lambda at, model: at.edit_config(model, encoder_ffn_dim=32), ["do not fit its config", "fc1.bias has the"],
    ),
    "config cut": (lambda at, model: at.cut(f"{model}/config.json"), ["config.json"]),
    "config a list": (lambda at, model: at.put(f"{model}/config.json", "[]"), ["config.json"]),
    "config no text": (lambda at, model: at.put(f"{model}/config.json", b"\xff"), ["config.json"]),
    "wrong type": (lambda at, model: at.edit_config(model, d_model="wide"), ["Field 'd_model' expected int, got str"]),
    "out of range": (lambda at, model: at.edit_config(model, encoder_layers=-3), ["must be at least 1, got -3"]),
    "no dtype": (lambda at, model: at.edit_config(model, dtype="foo"), ["dtype is 'foo'"]),
    "generation config cut": (
        lambda at, model: at.cut(f"{model}/generation_config.json", 9), ["generation_config.json is damaged"],
    ),
    "unknown family": (lambda at, model: at.edit_config(model, model_type="nope"), ["nope"]),
    "code": (foreign_code, []),
}  # fmt: skip
# `evaluate` is tried with every kind of damage, and every other place with the most common kinds.
COMMON = {"missing", "weights cut", "weights pickled", "weights lacking", "weights too many", "weights no numbers"}
CASES = [(damage, place) for place in LOADERS for damage in DAMAGE if place == "evaluate" or damage in COMMON]
MESSAGES_OF_SHARE = {"missing": ["share: vanilla_transformer holds no model"]}


@pytest.mark.parametrize(("damage", "place"), CASES)
def test_checkpoints(damage, place, workspace, tmp_path, capsys, monkeypatch):
    spoil, words = DAMAGE[damage]
    command = LOADERS[place]
    model = next(name for name in (VANILLA, LATENT, PATHS) if name in " ".join(command))
    if place == "share":
        words = MESSAGES_OF_SHARE.get(damage, words)
    check(lambda at: spoil(at, model), command, [*words, model], workspace, tmp_path, capsys, monkeypatch)


def fault(report=None, tensors=None, raw=None):
    """Put the files of a run's fault beside the vanilla model. Some fields or tensors are changed (None: removed)."""

    def changed(values, changes):
        return {name: value for name, value in {**values, **(changes or {})}.items() if value is not None}

    def put(at):
        arguments = {"label_smoothing_factor": 0.1, "bf16": False, "fp16": False, "attn_implementation": "sdpa"}
        whole = {
            "step": 3, "what": "the loss is nan", "loss_scale": 1.0, "num_items_in_batch": 4, "processes": 1,
            "arguments": arguments, "batches": [{"rank": 0, "sentences": [{"source": "a", "target": "b"}] * 2}],
        }  # fmt: skip
        rows = torch.ones(2, 8, dtype=torch.int64)
        parts = dict.fromkeys(("input_ids", "attention_mask", "labels", "decoder_input_ids"), rows)
        generators = {"0.generators.cpu": torch.get_rng_state()}
        batch = changed({f"0.inputs.{name}": rows.clone() for name in parts} | generators, tensors)
        save_file(batch, at.folder / VANILLA / "rank-0.safetensors")
        at.put(f"{VANILLA}/fault.json", json.dumps(changed(whole, report)) if raw is None else raw)

    return put


def log(**entry):
    """Put a log of one entry where a run keeps its log."""
    return lambda at: at.put(
        "run/trainer_state.json", json.dumps({"log_history": [{"step": 1, "loss": 1.0, **entry}]})
    )


AVERAGE, COMPARE, SHARE = ("average_checkpoints.py",), ("compare_runs.py",), ("share.py",)
PROXIMAL, PRUNE = ("proximal_init.py",), ("prune_latent_depth.py",)
LAYERS, QUICKSTART, REPLAY = ("plot_layer_utilization.py",), ("quickstart.py",), ("replay_fault.py",)
FILES = ("evaluate_translation.py", "--reference", REFERENCE, "--hypotheses", SOURCE)
STATE = "run/trainer_state.json"

ARGUMENTS = {
    "average nothing": (None, AVERAGE, ["the following arguments are required: checkpoints"]),
    "average what is missing": (None, (*AVERAGE, "no", "--output", "out"), ["no: there is no model.safetensors"]),
    "average what is cut": (
        lambda at: at.cut(f"{VANILLA}/model.safetensors"), (*AVERAGE, VANILLA, "--output", "out"),
        ["vanilla_transformer", "weights are damaged"],
    ),
    "average two models": (
        None, (*AVERAGE, VANILLA, LATENT, "--output", "out"), ["are not checkpoints of one model"],
    ),
    "average into a folder in use": (None, (*AVERAGE, VANILLA, "--output", "corpus"), ["corpus exists already"]),
    "average into an input": (
        None, (*AVERAGE, LATENT, VANILLA, "--output", f"x/../{VANILLA}/.", "--overwrite"), ["is also an input"],
    ),
    "average one twice": (
        None, (*AVERAGE, LATENT, VANILLA, f"./{LATENT}", "--output", "out"), ["is given twice"],
    ),
    "average into a run": (
        lambda at: at.put("run/run.json", '{"hf_deepwide": "0"}'),
        (*AVERAGE, VANILLA, "--output", "run", "--overwrite"), ["run holds a run"],
    ),
    "average what its config does not describe": (
        lambda at: at.edit_config(VANILLA, attention_bias=False), (*AVERAGE, VANILLA, "--output", "out"),
        ["weights that its config does not ask for"],
    ),
    "average what is no number": (
        lambda at: poisoned(at, VANILLA), (*AVERAGE, VANILLA, "--output", "out"), ["fc1.bias", "NaN"],
    ),
    "average into a file": (None, (*AVERAGE, VANILLA, "--output", "recipe.yaml"), ["recipe.yaml"]),
    "average below a file": (
        None, (*AVERAGE, VANILLA, "--output", "recipe.yaml/x"), ["recipe.yaml is a file, not a folder"],
    ),
    "compare nothing": (None, (*COMPARE, "no", "--output", "out"), ["no holds no trainer_state.json"]),
    "compare what is cut": (
        lambda at: at.put(STATE, "{"), (*COMPARE, "run", "--output", "out"), [f"{STATE} is damaged"],
    ),
    "compare what is no state": (
        lambda at: at.put(STATE, '{"foo": 1}'), (*COMPARE, "run", "--output", "out"), [f"{STATE} is damaged, or not"],
    ),
    **{
        f"compare what is no {name}": (
            lambda at, name=name: at.put(STATE, json.dumps({"log_history": [{"step": 1, name: "x"}]})),
            (*COMPARE, "run", "--output", "out"), [f"{STATE} is damaged", "entry 1 of log_history"],
        )
        for name in ("eval_loss", "eval_accuracy", "eval_bleu_de-en", "solver_gate/1")
    },
    "compare without logs": (
        lambda at: at.put(STATE, '{"log_history": []}'), (*COMPARE, "run", "--output", "out"), ["nothing was logged"],
    ),
    "evaluate nothing": (None, ("evaluate_translation.py",), ["required: --reference"]),
    "evaluate two things": (None, (*FILES, "--model", VANILLA), ["give one of --model (a checkpoint) and"]),
    "evaluate without reference": (None, (*FILES, "--reference", "no"), ["there is no file no"]),
    "evaluate a folder as a file": (
        None, (*FILES, "--hypotheses", "corpus"), ["--hypotheses: corpus is a folder; a checkpoint"],
    ),
    "evaluate binary files": (
        lambda at: at.put("b", bytes(256)), (*FILES, "--hypotheses", "b"), ["b, line 1: a zero byte"],
    ),
    "evaluate unequal files": (
        lambda at: at.put("b", "x\n"), (*FILES, "--hypotheses", "b"), ["b: 1 line; corpus/test.de: 4 lines"],
    ),
    "evaluate into what exists": (None, (*FILES, "--output", "recipe.yaml"), ["recipe.yaml exists", "--overwrite"]),
    "evaluate into no folder": (None, (*FILES, "--output", "no/x"), ["there is no folder no; make it first"]),
    "evaluate over a folder": (None, (*FILES, "--output", "corpus", "--overwrite"), ["corpus is a folder"]),
    "evaluate into one file twice": (
        None, (*EVALUATE, "--model", VANILLA, "--output", "x", "--translations", "x"), ["are the same file"],
    ),
    "evaluate a path for a pair": (None, (*FILES, "--pairs", "../x-de"), ["--pairs: '../x-de' is no language pair"]),
    "evaluate on no device": (None, (*EVALUATE, "--model", VANILLA, "--device", "quantum"), ["--device quantum"]),
    "evaluate no beams": (None, (*FILES, "--num_beams", "-1"), ["--num_beams is -1"]),
    "evaluate no metric": (None, (*FILES, "--metrics", "foo"), ["metrics: foo; accepted: bleu, chrf, multi_bleu"]),
    "evaluate no trials": (None, (*FILES, "--compare", REFERENCE, "--trials", "0"), ["--trials is 0; accepted: 1"]),
    "evaluate an encoder": (None, (*EVALUATE, "--model", "bert"), ["bert cannot be loaded: it is a bert"]),
    "evaluate another vocabulary": (
        lambda at: at.edit_config(VANILLA, vocab_size=4000, decoder_vocab_size=4000), (*EVALUATE, "--model", VANILLA),
        ["do not fit its config", "instead of [4000, 8]"],
    ),
    "evaluate without tokenizer": (
        lambda at: at.remove(f"{VANILLA}/tokenizer.json", f"{VANILLA}/tokenizer_config.json"),
        (*EVALUATE, "--model", VANILLA), ["the folder holds no tokenizer"],
    ),
    "draw layers of nothing": (None, (*LAYERS, "no"), ["no holds no trainer_state.json"]),
    "draw layers of a vanilla model": (
        lambda at: at.put(f"{VANILLA}/trainer_state.json", '{"log_history": []}'), (*LAYERS, VANILLA),
        ["has no latent layers"],
    ),
    "draw weights of a vanilla model": (
        None, ("plot_path_weights.py", VANILLA, "--output", "x"), ["without learnable path weights"],
    ),
    "widen into a file": (None, (*PROXIMAL, VANILLA, "recipe.yaml"), ["recipe.yaml exists already"]),
    "widen an unknown field": (
        None, (*PROXIMAL, VANILLA, "out", "--atention_branches", "3"), ["nearest is 'attention_branches'"],
    ),
    "widen by none": (None, (*PROXIMAL, VANILLA, "out", "--attention_branches", "0"), ["must be at least 1, got 0"]),
    "widen another size": (None, (*PROXIMAL, VANILLA, "out", "--d_model", "32"), ["`d_model` cannot be 32"]),
    "widen an unknown family": (None, (*PROXIMAL, VANILLA, "out", "--family", "foo"), ["--family 'foo'", "mat"]),
    "widen an encoder": (None, (*PROXIMAL, "bert", "out"), ["its model type is 'bert'; accepted are"]),
    "prune a vanilla model": (None, (*PRUNE, VANILLA, "out"), ["only a latent-depth model can be pruned"]),
    "prune an unknown language": (None, (*PRUNE, LATENT, "out", "--language", "xx"), ["there is no posterior 'xx'"]),
    "prune into a folder in use": (None, (*PRUNE, LATENT, "corpus"), ["corpus exists already"]),
    "share what is too deep": (
        lambda at: at.put(f"{VANILLA}/config.json", "[" * 10**5), (*SHARE, VANILLA, "out"),
        ["share: vanilla_transformer: config.json is damaged"],
    ),
    "share nowhere": (None, (*SHARE, VANILLA), ["share: say where to"]),
    "share in place": (None, (*SHARE, VANILLA, VANILLA, "--overwrite"), ["is where the model is"]),
    "share over a folder": (None, (*SHARE, VANILLA, "corpus", "--overwrite"), ["was not written by share"]),
    "share under no name": (None, (*SHARE, VANILLA, "--repo-id", "a b/c/d"), ["share: repo_id 'a b/c/d'"]),
    "quickstart with an unknown key": (None, (*QUICKSTART, "--training.foo=1"), ["unknown key 'foo'"]),
    "quickstart without a value": (None, (*QUICKSTART, "--training.seed"), ["--training.seed has no value"]),
    "quickstart over a folder": (None, (*QUICKSTART, "--training.output_dir=corpus"), ["corpus is not empty"]),
    "replay nothing": (None, (*REPLAY, "corpus"), ["corpus holds no fault.json"]),
    "replay a folder named so": (lambda at: at.put("x/fault.json/y", ""), (*REPLAY, "x"), ["x holds no fault.json"]),
    "replay a file": (None, (*REPLAY, "recipe.yaml"), ["recipe.yaml holds no fault.json"]),
    **{
        f"replay {name}": (fault(**spoilt), (*REPLAY, VANILLA), [VANILLA, *words])
        for name, spoilt, words in (
            ("nothing at all", {"raw": ""}, ["fault.json is damaged"]),
            ("bytes", {"raw": b"\xff\0\x80"}, ["fault.json is damaged"]),
            ("depths", {"raw": "[" * 10**5}, ["fault.json is damaged"]),
            ("digits", {"raw": "9" * 10**4}, ["fault.json is damaged"]),
            ("a list", {"raw": "[1, 2]"}, ["not an object"]),
            ("a megabyte", {"raw": json.dumps("x" * 10**6)}, ["not an object"]),
            ("without step", {"report": {"step": None}}, ["there is no step"]),
            ("step 0", {"report": {"step": 0}}, ["step is 0"]),
            ("a step in words", {"report": {"step": "two"}}, ["step is 'two'"]),
            ("a NaN scale", {"report": {"loss_scale": float("nan")}}, ["loss_scale is nan"]),
            ("no tokens", {"report": {"num_items_in_batch": 0}}, ["num_items_in_batch is 0"]),
            ("no arguments", {"report": {"arguments": []}}, ["arguments is []"]),
            ("other arguments", {"report": {"arguments": {}}}, ["there is no label_smoothing_factor"]),
            ("no batches", {"report": {"batches": {}}}, ["batches is {}"]),
            ("no sentences", {"report": {"batches": [{"rank": 0}]}}, ["batch 1"]),
            ("other sentences", {"report": {"batches": [{"rank": 0, "sentences": [{}]}]}}, ["batch 1"]),
            ("too few batches", {"report": {"batches": []}}, ["holds 1 batches", "tells of 0"]),
            ("without labels", {"tensors": {"0.inputs.labels": None}}, ["there is no labels"]),
            ("a float", {"tensors": {"0.inputs.labels": torch.zeros(2, 8)}}, ["labels is torch.float32"]),
            ("another row", {"tensors": {"0.inputs.labels": torch.ones(3, 8).long()}}, ["[3, 8]"]),
            ("other widths", {"tensors": {"0.inputs.labels": torch.ones(2, 9).long()}}, ["different shapes"]),
            ("unknown tokens", {"tensors": {"0.inputs.input_ids": torch.full((2, 8), 999)}}, ["999"]),
            ("no generator", {"tensors": {"0.generators.cpu": None}}, ["random generator"]),
            ("half a generator", {"tensors": {"0.generators.cpu": torch.ones(3)}}, ["random generator"]),
            ("odd names", {"tensors": {"x": torch.ones(1)}}, ["tensor 'x'"]),
        )
    },
    "replay weights as batches": (
        lambda at: (fault()(at), at.cut(f"{VANILLA}/rank-0.safetensors")), (*REPLAY, VANILLA), ["is damaged"],
    ),
    "replay another process": (fault(), (*REPLAY, VANILLA, "--rank", "7"), ["nothing of process 7; accepted: 0"]),
    "replay a negative process": (fault(), (*REPLAY, VANILLA, "--rank=-1"), ["nothing of process -1"]),
    **{
        f"compare {name}": (spoil, (*COMPARE, "run", "--output", "out"), [STATE, *words])
        for name, spoil, words in (
            ("nothing at all", lambda at: at.put(STATE, ""), ["damaged"]),
            ("bytes", lambda at: at.put(STATE, b"\xff\0"), ["damaged"]),
            ("depths", lambda at: at.put(STATE, "[" * 10**5), ["damaged"]),
            ("a list", lambda at: at.put(STATE, "[]"), ["damaged"]),
            ("text", lambda at: at.put(STATE, '"text"'), ["damaged"]),
            ("a log in words", lambda at: at.put(STATE, '{"log_history": "x"}'), ["log_history is 'x'"]),
            ("a log of lists", lambda at: at.put(STATE, '{"log_history": [[]]}'), ["log_history is"]),
            ("other callbacks", lambda at: at.put(STATE, '{"stateful_callbacks": 3}'), ["damaged"]),
            ("no step at all", lambda at: at.put(STATE, '{"log_history": [{"loss": 1}]}'), ["entry 1"]),
            ("no step", log(step=None), ["log_history is"]),
            ("a NaN step", log(step=float("nan")), ["log_history is"]),
            ("a loss in words", log(loss="small"), ["entry 1", "'small'"]),
            ("a loss of digits", log(loss=10**400), ["entry 1"]),
            ("norms of nothing", log(gradient_norms={}), ["entry 1"]),
            ("norms in words", log(gradient_norms={"encoder": ["x"]}), ["entry 1"]),
            ("norms in depth", log(gradient_norms={"encoder": [[[1.0]]]}), ["entry 1"]),
            ("a table that is none", log(layer_utilization={"encoder": [[1.0], [1.0, 2.0]]}), ["entry 1"]),
        )
    },
    "compare onto a figure": (
        lambda at: (log()(at), at.put("mine/learning_curves.png", "mine")), (*COMPARE, "run", "--output", "mine"),
        ["mine/learning_curves.png exists already", "--overwrite"],
    ),
    "compare onto a link": (
        lambda at: (log()(at), at.put("mine/x", ""), (at.folder / "mine/learning_curves.png").symlink_to("gone")),
        (*COMPARE, "run", "--output", "mine"), ["mine/learning_curves.png exists already"],
    ),
    "compare into a file": (log(), (*COMPARE, "run", "--output", "recipe.yaml"), ["recipe.yaml"]),
    "draw weights onto a figure": (
        lambda at: at.put("mine/path_weights.png", ""), ("plot_path_weights.py", PATHS, "--output", "mine"),
        ["mine/path_weights.png exists already"],
    ),
    "draw weights over a folder": (
        lambda at: at.put("x/path_weights.png/y", ""),
        ("plot_path_weights.py", PATHS, "--output", "x", "--overwrite"),
        ["error: x/path_weights.png: this is a folder"],
    ),
    "draw layers onto a figure": (
        lambda at: (
            at.put(f"{LATENT}/trainer_state.json", '{"log_history": []}'), at.put("mine/selection_samples.png", ""),
        ),
        (*LAYERS, LATENT, "--output", "mine"), ["mine/selection_samples.png exists already"],
    ),
    "draw layers of another log": (
        lambda at: at.put(
            f"{LATENT}/trainer_state.json",
            '{"log_history": [{"step": 1, "layer_utilization": {"encoder": [[0.5], [0.5]]}}]}',
        ),
        (*LAYERS, LATENT, "--output", "out"), ["its log comes from another model"],
    ),
    "draw layers of a file": (None, (*LAYERS, "recipe.yaml"), ["recipe.yaml holds no trainer_state.json"]),
    "quickstart over another run": (
        lambda at: (
            at.put("run/recipe.yaml", (at.folder / "recipe.yaml").read_bytes()), at.put("run/results.json", "{}"),
            at.put("run/run.json", '{"hf_deepwide": "0"}'),
        ),
        (*QUICKSTART, "--training.output_dir=run"), ["run holds a finished run", "--overwrite"],
    ),
    "quickstart over no run": (
        lambda at: at.put("run/recipe.yaml", b"\xff"), (*QUICKSTART, "--training.output_dir", "run"),
        ["run/recipe.yaml"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name, workspace, tmp_path, capsys, monkeypatch):
    spoil, command, words = ARGUMENTS[name]
    check(spoil, command, words, workspace, tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("train_translation.py", "--training.max_steps 1 --overwrite no.yaml", "there is no recipe no.yaml"),
        ("train_translation.py", "--data.root ../data recipe.yaml --data.seed=-1", "data.seed is -1"),
        ("train_translation.py", "recipe.yaml --data.seed", "--data.seed has no value"),
        ("train_translation.py", "--data.seed --overwrite recipe.yaml", "--data.seed has no value"),
        ("train_translation.py", "classifcation recipe.yaml", "no task 'classifcation'; accepted: masked-lm, class"),
        ("train_translation.py", "classification recipe.yaml other.yaml", "one recipe is expected"),
        ("train_translation.py", "--data.root ../data", "the following arguments are required: recipe"),
        ("train_masked_lm.py", "--data.root ../data no.yaml", "there is no recipe no.yaml"),
        ("proximal_init.py", "--attention_branches 2 --family mat ./no out", "'./no': there is no such folder"),
        ("proximal_init.py", "--residual hyper ./no out", "mat has no such field; give --family vanilla_transformer"),
    ],
)
def test_overrides_may_stand_before_the_recipe(script, arguments, said, workspace, tmp_path, capsys, monkeypatch):
    check(None, (script, *arguments.split()), [said], workspace, tmp_path, capsys, monkeypatch)


def test_every_script_is_called_wrongly():
    called = {command[0] for command in (*LOADERS.values(), *(case[1] for case in ARGUMENTS.values()))}
    called |= {"train_masked_lm.py", "walkthrough.py"}  # tested in test_bad_input_recipes.py, test_walkthrough.py
    assert {path.name for path in SCRIPTS.glob("*.py")} == called


def test_no_permission(workspace, tmp_path, capsys, monkeypatch):
    """The missing permission is simulated, because the tests may run as root."""
    monkeypatch.chdir(tmp_path)
    place = spoilt(None, workspace, tmp_path, capsys)

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    assert place.error_of("train_translation.py", "recipe.yaml") == "error: run: no permission"
    assert json.loads((place.folder / VANILLA / "config.json").read_text())["model_type"] == VANILLA


WRITERS = {
    "widen": (*PROXIMAL, f"./{VANILLA}", "out"),
    "prune": (*PRUNE, f"./{LATENT}", "out", "--selection", "soft"),
    "average": (*AVERAGE, VANILLA, "--output", "out"),
}
FULL = "No space left on device (os error 28)"
FAILURES = {  # each library reports a full disk in its own way
    "safetensors": (
        "safetensors.torch.serialize_file",
        SafetensorError(f"I/O error: {FULL}"),
    ),
    "config": ("builtins.open", OSError(28, "No space left on device")),
    "tokenizers": ("transformers.PreTrainedTokenizerBase.save_pretrained", Exception(FULL)),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_no_part_of_a_model(writer, failure, workspace, tmp_path, capsys, monkeypatch):
    if (writer, failure) == ("average", "tokenizers"):
        failure = "safetensors"  # averaging copies the files of the tokenizer
    monkeypatch.chdir(tmp_path)
    place = spoilt(None, workspace, tmp_path, capsys)
    before = sorted(path.name for path in place.folder.iterdir())
    name, error = FAILURES[failure]
    write = open

    def fail(file, mode="r", *args, **kwargs):
        if failure != "config" or ("w" in str(mode) and "out" in str(file)):
            raise error
        return write(file, mode, *args, **kwargs)

    monkeypatch.setattr(name, fail)
    if name.startswith("safetensors"):
        monkeypatch.setattr("hf_deepwide.runs.averaging.save_file", fail)
    said = place.error_of(*WRITERS[writer])
    assert "out: the model cannot be saved: No space left" in said
    assert sorted(path.name for path in place.folder.iterdir()) == before
