"""share(): its files work in a process without this package, and it writes no other files."""

import copy
import errno
import hashlib
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fine_tuning import fine_tune
from huggingface_hub import ModelCard, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from model_cases import JOINTS
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    pipeline,
)

import hf_deepwide
from hf_deepwide import LatentDepthForMaskedLM, MATRobertaForMaskedLM, MATRobertaForSequenceClassification
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.families import FAMILIES
from hf_deepwide.loading import load_model
from hf_deepwide.runs.averaging import average_checkpoints
from hf_deepwide.sharing.folder import MANIFEST, staging
from hf_deepwide.sharing.share import share
from hf_deepwide.sharing.use import verify_folder

SHARE = "hf_deepwide.sharing.share"
SCRIPT = Path(__file__).parents[2] / "scripts" / "share.py"
TEXTS = ["two dogs run", "a man in a red coat", "who is there"]
PROBE = [[5, 9, 7, 2]]
CARD = "---\nlibrary_name: transformers\n---\n\n# Mine\n\n![curves](plots/curves.png) [all](../x.txt) [log](run.log)\n"
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 48,
    "init_std": 0.6,
}
NEEDED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
ELSEWHERE = """
import json, sys
sys.modules["hf_deepwide"] = None
import torch
from transformers import (
    AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
)
sys.path.insert(0, sys.argv[1])
from fine_tuning import fine_tune
texts, probe, tune, load, joined = json.loads(sys.argv[2])
probe, result = torch.tensor(probe), {}
for source, target in tune:
    fine_tune(source, target)
    if source.endswith("latent_depth"):
        model = AutoModelForMaskedLM.from_pretrained(source, trust_remote_code=True)
        model.save_pretrained(target + "_mlm")
        AutoModelForMaskedLM.from_pretrained(target + "_mlm", trust_remote_code=True)
for folder in load:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
    body = AutoModel.from_pretrained(folder, trust_remote_code=True)
    translate = pipeline("translation", model=folder, trust_remote_code=True, device="cpu")
    with torch.no_grad():
        classes = [type(loaded) for loaded in (config, model, body, translate)]
        result[folder] = {
            "classes": [f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in classes],
            "logits": model(input_ids=probe, decoder_input_ids=probe).logits.tolist(),
            "hidden": body(input_ids=probe, decoder_input_ids=probe).last_hidden_state.tolist(),
            "ids": AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(texts)["input_ids"],
            "translations": translate(texts, batch_size=2),
            "by_object": pipeline("translation", model=model, tokenizer=translate.tokenizer, device="cpu")(texts),
        }
for folder in joined:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        logits = model(input_ids=probe, decoder_input_ids=probe).logits.tolist()
    result[folder] = {"class": type(model).__module__.split(".")[0], "logits": logits}
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*TEXTS, "the dogs sit in the red water", "a tree"] * 3, TokenizerArguments(vocab_size=70))


def family_of(name):
    """The family of a run. A run in `JOINTS` is named after its way to join layers, and has the vanilla family."""
    return FAMILIES["vanilla_transformer" if name in JOINTS else name]


def new_model(family, tokenizer, **fields):
    torch.manual_seed(1)
    # with layers weighted by 1/2, or a gate that keeps the embeddings, all texts would get the same translation
    apart = {"latent_depth": {"inference_selection": "hard"}, "depthwise_lstm": {"forget_bias_init": 0}}
    fields |= apart.get(family.config.model_type, {})
    model = family.lm(family.config(vocab_size=len(tokenizer), **SIZES, **fields)).eval()
    model.generation_config.update(num_beams=2, max_length=9)
    return model


def contents(folder):
    """The bytes of all files in a folder."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def runs(tokenizer, tmp_path_factory):
    """A finished run per family and per entry of `JOINTS`. Each also holds files that must not be shared."""
    folder = tmp_path_factory.mktemp("runs")
    for name in (*FAMILIES, *JOINTS):
        run = folder / name
        new_model(family_of(name), tokenizer, **JOINTS.get(name, {})).save_pretrained(run)
        tokenizer.save_pretrained(run)
        for litter in ("optimizer.pt", "training_args.bin", "run.log", "checkpoint-8/optimizer.pt", "plots/other.png"):
            (run / litter).parent.mkdir(exist_ok=True)
            (run / litter).write_text("litter")
        (run / "plots" / "curves.png").write_bytes(b"picture")
        (run / "README.md").write_text(CARD)
    (folder / "x.txt").write_text("outside")
    return folder


@pytest.fixture(scope="module")
def shared(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    for name in (*FAMILIES, *JOINTS):
        assert share(runs / name, folder / name, verify=False) == str(folder / name)
    return folder


@pytest.fixture(scope="module")
def tuned_and_loaded(shared, run_code, tmp_path_factory):
    """Folders of shared models that Transformers' Trainer fine-tuned, and results of a process without this package.

    That process has its own cache of remote code. The folders `with` come from this process, which has the package.
    """
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("without", "with")}
    for name in FAMILIES:
        fine_tune(shared / name, folders["with"] / name)
    tune = [(str(shared / name), str(folders["without"] / name)) for name in FAMILIES]
    load = [str(folder / name) for folder in (shared, *folders.values()) for name in FAMILIES]
    joined = [str(shared / name) for name in JOINTS]
    helpers, modules = Path(__file__).parents[1] / "helpers", tmp_path_factory.mktemp("modules")
    environment = {**os.environ, "HF_MODULES_CACHE": str(modules), "HF_HUB_OFFLINE": "1"}
    asked = json.dumps([TEXTS, PROBE, tune, load, joined])
    process = run_code(ELSEWHERE, helpers, asked, environment=environment)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    found = {
        kind: {name: result[str(folder / name)] for name in FAMILIES}
        for kind, folder in {"shared": shared, **folders}.items()
    }
    found["shared"] |= {name: result[str(shared / name)] for name in JOINTS}
    return folders, found


@pytest.fixture(scope="module")
def elsewhere(tuned_and_loaded):
    """The results of a process without this package, for the shared folders and for the fine-tuned folders."""
    return tuned_and_loaded[1]


@pytest.fixture(scope="module")
def tuned(tuned_and_loaded):
    """The folders of shared models that were fine-tuned in processes without this package and with it."""
    return tuned_and_loaded[0]


@pytest.fixture
def hub(monkeypatch):
    """A fake Hub that records what would be uploaded."""
    calls = []

    class FakeHub:
        def __init__(self, token=None):
            calls.append(("token", token))

        def create_repo(self, repo_id, **options):
            calls.append(("create_repo", repo_id, options))
            return RepoUrl(f"https://huggingface.co/{repo_id}")

        def upload_folder(self, *, repo_id, folder_path, allow_patterns, **options):
            names = {*filter_repo_objects(contents(folder_path), allow_patterns=allow_patterns)}
            calls.append(("upload_folder", repo_id, names, options))

    monkeypatch.setattr(f"{SHARE}.HfApi", FakeHub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return calls


@pytest.mark.parametrize("name", JOINTS)
def test_a_way_to_join_layers_loads_without_the_package(elsewhere, runs, name):
    found, probe = elsewhere["shared"][name], torch.tensor(PROBE)
    assert found["class"] == "transformers_modules"
    with torch.no_grad():
        logits = family_of(name).lm.from_pretrained(runs / name)(input_ids=probe, decoder_input_ids=probe).logits
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_works_without_the_package(elsewhere, runs, tokenizer, name):
    family, found = FAMILIES[name], elsewhere["shared"][name]
    names = [family.config.__name__, family.lm.__name__, family.model.__name__, "TranslationPipeline"]
    assert found["classes"] == [f"transformers_modules.{cls}" for cls in names]
    model, probe = family.lm.from_pretrained(runs / name), torch.tensor(PROBE)
    with torch.no_grad():
        logits = model(input_ids=probe, decoder_input_ids=probe).logits
        hidden = model.model(input_ids=probe, decoder_input_ids=probe).last_hidden_state
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.tensor(found["hidden"]), hidden, rtol=0, atol=1e-6)
    assert found["ids"] == tokenizer(TEXTS)["input_ids"]
    expected = []
    for text in TEXTS:
        ids = model.generate(tokenizer(text, return_tensors="pt")["input_ids"], num_beams=2, max_length=9)[0]
        expected.append({"translation_text": tokenizer.decode(ids, skip_special_tokens=True)})
    assert found["translations"] == found["by_object"] == expected
    assert len({record["translation_text"] for record in expected}) == len(TEXTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_needs_no_flag_where_the_package_is_imported(shared, elsewhere, name):
    family, folder = FAMILIES[name], shared / name
    for auto_class, cls in (
        (AutoConfig, family.config),
        (AutoModel, family.model),
        (AutoModelForSeq2SeqLM, family.lm),
    ):
        assert type(auto_class.from_pretrained(folder)) is cls
    for flag in ({}, {"trust_remote_code": True}):
        translate = pipeline("translation", model=str(folder), device="cpu", **flag)
        assert type(translate).__module__ == "hf_deepwide.models.pipeline_translation"
        assert translate(TEXTS) == elsewhere["shared"][name]["translations"]


@pytest.mark.parametrize("name", FAMILIES)
def test_shares_only_the_needed_files(shared, runs, name):
    folder = shared / name
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    code = {file for file in files if file.endswith(".py")}
    assert {f"modeling_{name}.py", f"configuration_{name}.py", "pipeline_translation.py"} <= code
    assert all((Path(hf_deepwide.__file__).parent / "models" / file).is_file() for file in code)
    assert not {f"modeling_{other}.py" for other in FAMILIES if other not in ("vanilla_transformer", name)} & code
    assert files - code == NEEDED | {"README.md", "plots/curves.png", MANIFEST}
    assert (folder / "README.md").read_text() == CARD
    ours, theirs = load_file(folder / "model.safetensors"), load_file(runs / name / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("kind", ["without", "with"])
@pytest.mark.parametrize("name", FAMILIES)
def test_survives_fine_tuning_elsewhere(elsewhere, shared, tuned, name, kind):
    """Every checkpoint that a plain Trainer saves of a shared model loads again, with and without this package."""
    folder, found = tuned[kind] / name, elsewhere[kind][name]
    assert {cls.partition(".")[0] for cls in found["classes"]} == {"transformers_modules"}
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model) is FAMILIES[name].lm
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(PROBE), decoder_input_ids=torch.tensor(PROBE)).logits
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, rtol=0, atol=1e-6)
    assert found["logits"] != elsewhere["shared"][name]["logits"]
    translate = pipeline("translation", model=str(folder), device="cpu")
    assert translate(TEXTS) == found["translations"]
    for saved in (folder, folder / "checkpoint-1"):
        config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
        assert config["custom_pipelines"].keys() == {"translation"}
        for entry in [*config["auto_map"].values(), config["custom_pipelines"]["translation"]["impl"]]:
            module = f"{entry.partition('.')[0]}.py"
            assert (saved / module).read_bytes() == (shared / name / module).read_bytes()
    assert {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"} <= config["auto_map"].keys()


def test_the_masked_language_model_survives_saving_elsewhere(tuned):
    model = AutoModelForMaskedLM.from_pretrained(tuned["without"] / "latent_depth_mlm")
    assert type(model) is FAMILIES["latent_depth"].masked_lm
    assert (tuned["without"] / "latent_depth_mlm" / "modeling_latent_depth_mlm.py").is_file()


def test_sharing_marks_no_class(shared, tokenizer, tmp_path):
    """The classes stay unchanged. A model from elsewhere, or a model that our tools load, is saved without code."""
    for name, family in FAMILIES.items():
        new_model(family, tokenizer).save_pretrained(tmp_path / name)
        load_model(family.lm, shared / name).save_pretrained(tmp_path / f"{name}_loaded")
        for folder in (tmp_path / name, tmp_path / f"{name}_loaded"):
            assert not list(folder.glob("*.py"))
            assert not {"auto_map", "custom_pipelines"} & json.loads((folder / "config.json").read_text()).keys()
        assert family.lm._auto_class is family.config._auto_class is None


def test_a_config_alone_keeps_its_model(shared, tmp_path):
    """Saving a config leaves it as it was, so that the model can still be made from it."""
    config = AutoConfig.from_pretrained(shared / "mat")
    before = dict(config.auto_map)
    config.save_pretrained(tmp_path)
    assert config.auto_map == before
    assert not hasattr(config, "custom_pipelines")
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is FAMILIES["mat"].lm


def test_the_mean_of_fine_tuned_checkpoints_keeps_the_code(tuned, tmp_path):
    average_checkpoints([tuned["with"] / "mat" / "checkpoint-1", tuned["with"] / "mat"], tmp_path / "mean")
    code = {path.name for path in (tuned["with"] / "mat").glob("*.py")}
    assert {"modeling_mat.py", "pipeline_translation.py"} <= code == {path.name for path in tmp_path.rglob("*.py")}


def test_a_model_in_memory_and_a_minimal_card(tokenizer, tmp_path):
    model = new_model(FAMILIES["mat"], tokenizer)
    share(model, tmp_path / "new" / "mine", tokenizer=tokenizer, verify=False)
    assert not {"auto_map", "custom_pipelines"} & set(model.config.to_dict())
    card = ModelCard.load(tmp_path / "new" / "mine" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "translation")
    assert "mat" in card.data.tags
    assert "# mine\n" in card.text
    assert "trust_remote_code=True" in card.text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine"]  # nothing of the staging is left
    again = AutoTokenizer.from_pretrained(tmp_path / "new" / "mine")
    assert again.decode(again(TEXTS[1])["input_ids"], skip_special_tokens=True) == TEXTS[1]


def test_encoders_are_shared_by_their_task(tokenizer, tmp_path, used_in_a_fork):
    for cls, task in (
        (MATRobertaForMaskedLM, "fill-mask"),
        (MATRobertaForSequenceClassification, "text-classification"),
        (LatentDepthForMaskedLM, "fill-mask"),
    ):
        run, folder = tmp_path / "run" / cls.__name__, tmp_path / cls.__name__
        config = cls.config_class(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SIZES)
        config.eos_token_id = tokenizer.eos_token_id
        torch.manual_seed(0)
        model = cls(config).eval()
        model.save_pretrained(run)
        tokenizer.save_pretrained(run)
        if task == "fill-mask":
            with pytest.raises(UserError, match="the tokenizer has no mask token"):
                share(run, folder, verify=False)
        masking = copy.deepcopy(tokenizer)
        masking.mask_token = "<unk>"
        masking.save_pretrained(run)
        # verifying loads the model in a process without this package; `tuned_and_loaded` does so for the latent model
        share(run, folder, verify=cls is not LatentDepthForMaskedLM)
        card = ModelCard.load(folder / "README.md")
        assert card.data.pipeline_tag == task
        assert f'pipeline("{task}", model="REPOSITORY", trust_remote_code=True)' in card.text
        again = pipeline(task, model=str(folder), device="cpu")
        assert type(again.model) is cls  # this package's own, without a flag
        with torch.no_grad():
            logits = (each(input_ids=torch.tensor(PROBE)).logits for each in (model, again.model))
            torch.testing.assert_close(*logits, rtol=0, atol=0)
        share(model, folder, tokenizer=masking, overwrite=True, verify=False)
        for option in ({"as_": "bart"}, {"space": True}):
            with pytest.raises(UserError, match=f"a {cls.__name__} does not"):
                share(run, tmp_path / "out", verify=False, **option)


def test_verifies_the_shared_folder(runs, tmp_path, monkeypatch):
    """Verifying starts a process that imports no code from the current folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "torch.py").write_text("raise SystemExit('code of others')")
    monkeypatch.chdir(tmp_path / "here")
    share(runs / "mat", tmp_path / "good", verify=True)

    def refuse(folder, task):
        raise RuntimeError("no")

    monkeypatch.setattr(f"{SHARE}.verify_folder", refuse)
    with pytest.raises(RuntimeError, match=r"^no$"):
        share(runs / "mat", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "here"]


def test_verifying_refuses_a_folder_that_lacks_code(shared, tmp_path, used_in_a_fork):
    broken = shutil.copytree(shared / "mat", tmp_path / "broken")
    (broken / "attention.py").unlink()
    with pytest.raises(RuntimeError, match=r"does not load without hf_deepwide[\s\S]*attention"):
        verify_folder(broken)


def test_a_model_of_several_posteriors_without_pairs_is_verified(tokenizer, tmp_path, used_in_a_fork):
    """Users pass `posteriors`. The pipeline has no language pairs from which to choose a posterior."""
    model = new_model(FAMILIES["latent_depth"], tokenizer, num_posteriors=3)
    share(model, tmp_path / "out", tokenizer=tokenizer)
    assert (tmp_path / "out" / "config.json").is_file()


def test_verifying_refuses_weights_that_would_start_at_random(shared, tokenizer, tmp_path, used_in_a_fork):
    small = {key: value for key, value in SIZES.items() if key.startswith(("d_model", "encoder", "decoder"))}
    bart = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **small))
    masked = LatentDepthForMaskedLM(LatentDepthForMaskedLM.config_class(vocab_size=len(tokenizer), **SIZES))
    masking = copy.deepcopy(tokenizer)
    masking.mask_token = "<unk>"
    shutil.copytree(shared / "mat", tmp_path / "mat")
    bart.save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    share(masked, tmp_path / "masked", tokenizer=masking, verify=False)
    for name, task in (("mat", "translation"), ("bart", "translation"), ("masked", "fill-mask")):
        path = tmp_path / name / "model.safetensors"
        tensors = load_file(path)
        key = next(key for key in tensors if key.endswith("q_proj.weight"))
        tensors[key.replace("q_proj", "q_proj.base_layer")] = tensors.pop(key)
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(RuntimeError, match=r"AssertionError: .*q_proj\.base_layer"):
            verify_folder(tmp_path / name, task)


def test_overwriting_replaces_what_share_wrote(runs, shared, tmp_path):
    folder = shutil.copytree(shared / "mat", tmp_path / "earlier")
    mine = {".git/config": "git", "thesis.txt": "years", "plots/mine.png": "drawn", "run/model.safetensors": "another"}
    for name, text in mine.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(UserError, match="is not empty"):
        share(runs / "mat", folder, verify=False)
    share(runs / "vanilla_transformer", folder, overwrite=True, verify=False)
    assert {name: (folder / name).read_text() for name in mine} == mine
    assert not (folder / "modeling_mat.py").exists()
    assert type(AutoModelForSeq2SeqLM.from_pretrained(folder)) is FAMILIES["vanilla_transformer"].lm
    (tmp_path / "run").mkdir()
    small = share(runs / "mat", tmp_path / "run" / "out", verify=False)
    (Path(small) / "plots" / "curves.png").write_text("mine")
    with pytest.raises(UserError, match=r"curves\.png was not written by share, or has been changed"):
        share(runs / "mat", small, overwrite=True, verify=False)
    assert (Path(small) / "plots" / "curves.png").read_text() == "mine"
    assert (Path(small) / "config.json").is_file()


def test_share_replaces_only_what_it_wrote(runs, shared, tuned, tmp_path):
    for other in ("work", "a_run", "fine_tuned"):
        if other == "fine_tuned":
            shutil.copytree(tuned["with"] / "mat", tmp_path / other)
            shutil.rmtree(tmp_path / other / "checkpoint-1")
            (tmp_path / other / "training_args.bin").unlink()
        (tmp_path / other).mkdir(exist_ok=True)
        (tmp_path / other / "thesis.txt").write_text("years")
        if other == "a_run":
            shutil.copyfile(runs / "mat" / "config.json", tmp_path / other / "config.json")
        before = contents(tmp_path / other)
        with pytest.raises(UserError, match="was not written by share"):
            share(runs / "mat", tmp_path / other, overwrite=True, verify=False)
        assert contents(tmp_path / other) == before
    folder = shutil.copytree(shared / "mat", tmp_path / "fine_tuned_in_place")
    (folder / "model.safetensors").write_text("trained for weeks")
    with pytest.raises(UserError, match=r"model\.safetensors was not written by share, or has been changed"):
        share(runs / "mat", folder, overwrite=True, verify=False)
    assert (folder / "model.safetensors").read_text() == "trained for weeks"


def test_the_source_stays(runs, shared, tmp_path):
    folder = shutil.copytree(shared / "mat", tmp_path / "earlier")
    source = shutil.copytree(runs / "mat", folder / "source")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="the model lies inside"):
        share(source, folder, overwrite=True, verify=False)
    with pytest.raises(UserError, match="is where the model is"):
        share(folder, folder / "source" / "..", overwrite=True, verify=False)
    assert contents(tmp_path) == before
    before = contents(source)
    inside = share(source, source / "to-upload", verify=False)
    share(source, inside, overwrite=True, verify=False)
    assert {name: data for name, data in contents(source).items() if not name.startswith("to-upload")} == before


def test_links_in_the_target_are_not_followed(runs, shared, tmp_path):
    folder = shutil.copytree(shared / "mat", tmp_path / "earlier")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "curves.png").write_bytes(b"picture")
    shutil.rmtree(folder / "plots")
    (folder / "plots").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="plots was not written by share"):
        share(runs / "mat", folder, overwrite=True, verify=False)
    manifest = json.loads((folder / MANIFEST).read_text())
    outside = tmp_path / "mine" / "curves.png"
    for name in ("../mine/curves.png", str(outside), "plots/curves.png"):
        manifest["files"][name] = [hashlib.sha256(b"picture").hexdigest()]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (runs / "no_card").mkdir()
    for name in NEEDED:
        shutil.copyfile(runs / "mat" / name, runs / "no_card" / name)
    share(runs / "no_card", folder, overwrite=True, verify=False)
    assert outside.read_bytes() == b"picture"


@pytest.mark.parametrize("at", ["model.safetensors", "pipeline_translation.py", "config.json"])
def test_a_share_that_is_killed_can_be_completed(runs, shared, tmp_path, monkeypatch, at):
    """Wherever the process was killed, the folder holds no model that loads, and a person's own files stay."""
    folder = shutil.copytree(shared / "mat", tmp_path / "earlier")
    (folder / "thesis.txt").write_text("years")

    class Killed(BaseException):
        pass

    def publish(draft, final):
        if final.name == at:
            raise Killed
        draft.rename(final)

    monkeypatch.setattr("hf_deepwide.sharing.folder.publish", publish)
    with pytest.raises(Killed):
        share(runs / "vanilla_transformer", folder, overwrite=True, verify=False)
    assert not (folder / "config.json").exists()
    monkeypatch.undo()
    share(runs / "vanilla_transformer", folder, overwrite=True, verify=False)
    assert (folder / "thesis.txt").read_text() == "years"
    expected = {name: data for name, data in contents(folder).items() if name not in ("thesis.txt", MANIFEST)}
    fresh = contents(Path(share(runs / "vanilla_transformer", tmp_path / "fresh", verify=False)))
    assert expected == {name: data for name, data in fresh.items() if name != MANIFEST}


def test_a_full_disk_leaves_the_target_as_it_was(runs, shared, tmp_path, monkeypatch):
    folder = shutil.copytree(shared / "mat", tmp_path / "earlier")
    before = contents(folder)

    def full(error):
        def fail(*_args, **_options):
            raise error

        return fail

    system = OSError(errno.ENOSPC, "No space left on device")
    tokenizers = Exception("No space left on device (os error 28)")  # as the tokenizers library words it
    for place, error in (
        ("share.write_checkpoint", system), ("share.write_card", system), ("folder._write_manifest", system),
        ("share.PreTrainedTokenizerBase.save_pretrained", tokenizers),
    ):  # fmt: skip
        monkeypatch.setattr(f"hf_deepwide.sharing.{place}", full(error))
        with pytest.raises(UserError, match="cannot be read or written: No space left"):
            share(runs / "vanilla_transformer", folder, overwrite=True, verify=False)
        with pytest.raises(UserError, match="cannot be read or written: No space left"):
            share(runs / "vanilla_transformer", tmp_path / "new", verify=False)
        monkeypatch.undo()
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["earlier"]


def test_a_card_already_in_the_folder_is_kept(runs, shared, tokenizer, tmp_path):
    """An edited card stays, with the pictures that it shows, even if a newer card lies beside the model."""
    for name, edited in (("edited", True), ("ours", False)):
        folder = shutil.copytree(shared / "mat", tmp_path / name)
        text = "# Edited\n![](plots/curves.png)\n" if edited else CARD
        (folder / "README.md").write_text(text)
        for model, tokens in ((new_model(FAMILIES["mat"], tokenizer), tokenizer), (runs / "mat", None)):
            share(model, folder, tokenizer=tokens, overwrite=True, verify=False)
            assert (folder / "README.md").read_text() == text
            assert (folder / "plots" / "curves.png").is_file()


def test_an_edited_card_of_another_model_is_refused(runs, shared, tmp_path):
    """The card describes a model of another family, and would be uploaded with this model."""
    folder = shutil.copytree(shared / "mat", tmp_path / "out")
    (folder / "README.md").write_text("# Edited\n")
    before = contents(folder)
    with pytest.raises(
        UserError, match=r"README\.md was edited, and is of another model \(model_type in config\.json"
    ):
        share(runs / "vanilla_transformer", folder, overwrite=True, verify=False)
    assert contents(folder) == before


def test_an_edited_card_takes_no_licence(shared, tokenizer, tmp_path):
    folder = shutil.copytree(shared / "mat", tmp_path / "out")
    (folder / "README.md").write_text("# Edited\n")
    before = contents(folder)
    with pytest.raises(UserError, match=r"--license: .*README\.md was edited, so it stays"):
        share(
            new_model(FAMILIES["mat"], tokenizer), folder, tokenizer=tokenizer, license="mit", overwrite=True,
            verify=False,
        )  # fmt: skip
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["mat", "vanilla_transformer"])
def test_a_card_of_another_model_is_not_kept(name, runs, tokenizer, tmp_path, caplog):
    """The earlier card describes other weights, so its scores, size, languages and licence are wrong here."""
    run = shutil.copytree(runs / "mat", tmp_path / "run")
    (run / "README.md").write_text(CARD.replace("# Mine", "# Mine\n\nBLEU 41.2"))
    share(run, tmp_path / "out", license="mit", verify=False)
    (run / "README.md").unlink()
    share(run, tmp_path / "out", overwrite=True, verify=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "BLEU 41.2" in card, "it is of the same weights"
    assert "mit" in card
    model = new_model(FAMILIES[name], tokenizer)
    model.model.encoder.layers[0].final_layer_norm.weight.data += 1
    share(model, tmp_path / "out", tokenizer=tokenizer, overwrite=True, verify=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"`{name}`, {model.num_parameters():,} parameters" in card
    assert "41.2" not in card
    assert "mit" not in card
    assert not (tmp_path / "out" / "plots").exists()
    assert "the earlier card named the licence mit, and this card names none; see --license" in caplog.text


def test_a_card_of_another_class_with_the_same_weights_is_not_kept(tokenizer, tmp_path):
    """A MAT with one branch has the weights of a vanilla model."""
    base = new_model(FAMILIES["vanilla_transformer"], tokenizer)
    for model in (base, hf_deepwide.MATForConditionalGeneration.from_base(base, attention_branches=1)):
        share(model, tmp_path / "out", tokenizer=tokenizer, overwrite=True, verify=False)
        assert f"`{model.config.model_type}`" in (tmp_path / "out" / "README.md").read_text()


def test_foreign_code_does_not_travel(runs, tokenizer, tmp_path, caplog):
    """References to code from elsewhere in a source's files are not shared, and symbolic links are not followed."""
    run, evil = shutil.copytree(runs / "mat", tmp_path / "run"), "you/evil--evil.Evil"
    impl = {"translation": {"impl": "evil.Evil", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}}
    for name, code in (
        ("config.json", {"auto_map": {"AutoConfig": "configuration_mat.MATConfig", "AutoModelForSeq2SeqLM": evil}}),
        ("generation_config.json", {"auto_map": {"AutoModel": evil}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [evil, evil]}}),
    ):
        content = json.loads((run / name).read_text()) | code | {"custom_pipelines": impl}
        (run / name).write_text(json.dumps(content))
    (run / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": evil}}))
    (run / "evil.py").write_text("raise SystemExit('evil')")
    links = ["processor_config.json", "evil.py", "./.share/../processor_config.json", f"{'x' * 5000}.png"]
    (run / "README.md").write_text("# Mine\n" + " ".join(f"[a]({link})" for link in links))
    folder = Path(share(run, tmp_path / "out", verify=False))
    good = contents(share(runs / "mat", tmp_path / "good", verify=False))
    assert contents(folder).keys() == good.keys() - {"plots/curves.png"}
    for name, content in contents(folder).items():
        assert b"evil" not in content or name == "README.md", name
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForSeq2SeqLM"] == "modeling_mat.MATForConditionalGeneration"

    (tmp_path / "secret").write_text("nobody's business")
    (run / "README.md").unlink()
    (run / "README.md").symlink_to(tmp_path / "secret")
    assert "business" not in (Path(share(run, tmp_path / "linked", verify=False)) / "README.md").read_text()
    assert "is a link to elsewhere" in caplog.text

    class Own(type(tokenizer)):
        pass

    own = Own(tokenizer_object=tokenizer._tokenizer, pad_token="<pad>", eos_token="</s>")
    with pytest.raises(UserError, match=r"test_share.Own, whose code does not come with Transformers"):
        share(new_model(FAMILIES["mat"], tokenizer), tmp_path / "own", tokenizer=own, verify=False)


def test_a_map_of_other_code_is_not_saved_again(shared, tmp_path):
    """A config that names code of another class, or from another place, is saved without code."""
    for number, auto_map in enumerate((
        {"AutoConfig": "evil.Evil"},
        {"AutoConfig": "configuration_latent_depth.LatentDepthConfig", "AutoModel": "modeling_mat.MATModel"},
        {"AutoConfig": ["configuration_mat.MATConfig"]},
        ["configuration_mat.MATConfig"],
        "evil",
    )):  # fmt: skip
        folder = tmp_path / str(number)
        config = json.loads((shared / "mat" / "config.json").read_text()) | {"auto_map": auto_map}
        FAMILIES["mat"].config(**config).save_pretrained(folder)
        assert contents(folder).keys() == {"config.json"}
        assert not {"auto_map", "custom_pipelines"} & json.loads((folder / "config.json").read_text()).keys()
    auto_map = {"AutoConfig": "configuration_mat.MATConfig", "AutoModel": "../../evil.Evil", "AutoX": "modeling_base"}
    AutoConfig.for_model("mat", auto_map=auto_map).save_pretrained(tmp_path / "partly")
    assert "evil" not in (tmp_path / "partly" / "config.json").read_text()


def test_upload(hub, runs, tmp_path):
    url = share(runs / "mat", repo_id="me/mat", private=True, token="t", commit_message="First", verify=False)
    assert url == "https://huggingface.co/me/mat"
    token, create, upload = hub
    assert token == ("token", "t")
    assert create[:2] == ("create_repo", "me/mat")
    assert create[2]["private"] is create[2]["exist_ok"] is True
    assert not create[2]["repo_type"]
    _, repo_id, names, options = upload
    assert (repo_id, options["commit_message"]) == ("me/mat", "First")
    assert NEEDED | {"README.md", "modeling_mat.py", "pipeline_translation.py", "plots/curves.png"} <= names
    assert not [name for name in names if Path(name).suffix in (".pt", ".bin", ".log")]
    share(runs / "mat", tmp_path / "kept", repo_id="me/mat", verify=False)
    assert hub[-1][2] == names == contents(tmp_path / "kept").keys() - {MANIFEST}
    (tmp_path / "kept" / "thesis.txt").write_text("private")
    share(runs / "mat", tmp_path / "kept", repo_id="me/mat", overwrite=True, verify=False)
    assert hub[-1][2] == names


def test_uploads_that_fail(hub, runs, monkeypatch):
    monkeypatch.setattr(f"{SHARE}.write_checkpoint", lambda *_: pytest.fail("nothing should be written before that"))
    with pytest.raises(UserError, match="repo_id 'a/b/c'"):
        share(runs / "mat", repo_id="a/b/c")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set.*unset it, or give only a folder"):
        share(runs / "mat", repo_id="me/mat")
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://localhost:9")
    with pytest.raises(UserError, match="the upload to me/mat failed: "):
        share(runs / "mat", repo_id="me/mat", token="t", verify=False)


def test_refuses_to_share_unfit_models(runs, tokenizer, tmp_path):
    small = {key: value for key, value in SIZES.items() if key.startswith(("d_model", "encoder", "decoder"))}
    bart = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **small))
    bart.save_pretrained(tmp_path / "bart")
    BertConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "bert")
    run = shutil.copytree(runs / "mat", tmp_path / "incomplete")
    weights = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**weights, "encoder_layers": 2}))
    bare = shutil.copytree(runs / "mat", tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    damaged = shutil.copytree(runs / "mat", tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"0" * 99)
    other = train_tokenizer(TEXTS, TokenizerArguments(vocab_size=40))
    model = new_model(FAMILIES["mat"], other)
    broken = new_model(FAMILIES["mat"], tokenizer)
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    (tmp_path / "exported").mkdir()
    for name in ("model.bin", "config.json"):
        (tmp_path / "exported" / name).write_text("{}")
    adapted = new_model(FAMILIES["mat"], tokenizer)
    get_peft_model(adapted, LoraConfig(r=2, target_modules=["q_proj"]))
    narrow = new_model(FAMILIES["mat"], tokenizer)
    narrow.model.encoder.layers[0].feed_forward.fc1 = torch.nn.Linear(SIZES["d_model"], 3)
    for source, options, message in (
        (tmp_path / "nowhere", {}, "holds no model: there is no .*config.json"),
        (tmp_path / "exported", {}, "was exported to CTranslate2.*Give the folder that it was exported from"),
        (tmp_path / "bert", {}, "model_type is 'bert'; accepted: vanilla_transformer, mat.*push_to_hub"),
        (tmp_path / "bart", {}, "holds no tokenizer"),
        (bart.model, {}, "cannot share a .*BartModel; accepted: a folder, one of .*MATFor"),
        (model.model, {}, "cannot share a .*MATModel"),
        (model, {}, "pass `tokenizer=`"),
        (model, {"tokenizer": tokenizer}, "does not fit the model"),
        (model, {"tokenizer": "a folder"}, "the tokenizer is a builtins.str"),
        (runs / "mat", {"license": 3}, "the licence '3'"),
        (runs / "mat", {"private": True}, "private needs an upload to the Hub"),
        (runs / "mat", {"commit_message": "First"}, "commit_message needs an upload"),
        (run, {}, "it has no weights for model.encoder.layers.1"),
        (bare, {}, "holds no tokenizer"),
        (damaged, {}, "damaged cannot be loaded"),
        (broken, {"tokenizer": tokenizer}, "NaN or infinite"),
        (adapted, {"tokenizer": tokenizer}, r"q_proj\.base_layer.*merge_and_unload"),
        (narrow, {"tokenizer": tokenizer}, r"fc1\.(weight|bias) has the shape \[3"),
        (tmp_path / "broken", {}, "NaN or infinite"),
    ):
        with pytest.raises(UserError, match=message):
            share(source, tmp_path / "out", verify=False, **options)
        assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="give a folder, a repo_id, or both"):
        share(runs / "mat")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "config.json")
    for folder, message in (("x" * 300, "too long"), ("a\0b", "NUL"), ("pipe", "was not written by share")):
        with pytest.raises(UserError, match=message):
            share(runs / "mat", tmp_path / folder, overwrite=True, verify=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        share(runs / "mat", tmp_path / "file")


def test_script(runs, tmp_path, monkeypatch, capsys):
    out = str(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["share.py", str(runs / "mat"), out, "--no-verify"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out == f"{out}\n"
    assert (tmp_path / "out" / "model.safetensors").is_file()
    for message in ("is not empty", "HF_HUB_OFFLINE is set"):
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(SCRIPT), run_name="__main__")
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: share: ")
        assert message in captured.err
        assert captured.err.count("\n") == 1
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr(sys, "argv", ["share.py", str(runs / "mat"), "--repo-id", "me/mat"])


def test_files_are_prepared_beside_the_folder_unless_it_is_another_disk(tmp_path, monkeypatch):
    """A program that reads the folder meanwhile, such as a sync, sees no draft."""
    folder = tmp_path / "out"
    folder.mkdir()
    with staging(folder) as staged:
        assert staged.parent.parent == tmp_path
    stat = Path.stat
    other = SimpleNamespace(st_dev=-1, st_mode=folder.stat().st_mode)
    monkeypatch.setattr(Path, "stat", lambda path, **asked: other if path == folder else stat(path, **asked))
    with staging(folder) as staged:
        assert staged.parent.parent == folder
    monkeypatch.undo()
    assert list(folder.iterdir()) == []


def test_hidden_files_that_a_card_names_do_not_travel(runs, tmp_path):
    """A person can edit the card and name private files in it, such as `.git` or `.env`."""
    source = shutil.copytree(runs / "mat", tmp_path / "source")
    for name in (".secret/token.png", "plots/.env.png", "plots/seen.png"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"picture")
    card = source / "README.md"
    named = "![](.secret/token.png) ![](plots/.env.png) ![](plots/seen.png)"
    card.write_text(card.read_text(encoding="utf-8") + named + "\n", encoding="utf-8")
    shared = Path(share(source, tmp_path / "shared", verify=False))
    assert (shared / "plots" / "seen.png").is_file()
    assert not (shared / ".secret").exists()
    assert not (shared / "plots" / ".env.png").exists()


def test_others_may_read_what_is_shared_once_more(runs, shared, tmp_path):
    """Safetensors writes files that only their owner can read."""
    folder = shutil.copytree(shared / "mat", tmp_path / "again")
    share(runs / "vanilla_transformer", folder, overwrite=True, verify=False)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir() if path.is_file()}
    assert modes["model.safetensors"] == modes["config.json"] != 0o600
