"""Checkpoints with a wrong config, weights, or other files are refused in one line, before anything is done."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from mistakes import SIZES, make_workspace
from model_cases import build
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedModel,
)

from hf_deepwide import (
    LatentDepthForMaskedLM,
    MATForConditionalGeneration,
    MATRobertaConfig,
    MATRobertaForSequenceClassification,
    VanillaTransformerForConditionalGeneration,
)
from hf_deepwide.errors import UserError
from hf_deepwide.loading import auto_class, load_config, load_model, load_tokenizer
from hf_deepwide.weight_checks import check_finite, is_finite

FAMILY = "vanilla_transformer"
SHARED, HEAD = "model.shared.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("made") / "workspace")


class Checkpoint:
    """A copy of a tiny checkpoint, which a test damages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def edit(self, name: str, **fields: object) -> None:
        path = self.folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    def config(self, **fields: object) -> None:
        self.edit("config.json", **fields)

    def generation(self, **fields: object) -> None:
        self.edit("generation_config.json", **fields)

    def weights(self, change) -> None:
        file = self.folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    def sharded(self, file: str = "model-1.safetensors", **fields: object) -> None:
        """Replace the weights by an index that names `file`. A safetensors `file` holds the weights."""
        path = self.folder / "model.safetensors"
        if (target := self.folder / file).suffix == ".safetensors" and not Path(file).is_absolute():
            path.rename(target)
        else:
            path.unlink()
        index = {"metadata": {}, "weight_map": {SHARED: file}, **fields}
        (self.folder / INDEX).write_text(json.dumps(index))

    def load(self, **options) -> PreTrainedModel:
        return load_model(AutoModelForSeq2SeqLM, self.folder, **options)


@pytest.fixture
def checkpoint(workspace, tmp_path):
    shutil.copytree(workspace / FAMILY, tmp_path / "model")
    return Checkpoint(tmp_path / "model")


def refused(load, *words: str) -> None:
    with pytest.raises(UserError) as refusal:
        load()
    said = str(refusal.value)
    assert "\n" not in said
    assert len(said) < 900
    for word in words:
        assert word in said


def untied(name: str):
    def change(tensors):
        tensors[name] = tensors[SHARED] + 0.5

    return change


def split(tensors):
    """Give the embeddings the names that a model with separate embeddings has."""
    shared = tensors.pop(SHARED)
    tensors["model.encoder.embed_tokens.weight"], tensors["model.decoder.embed_tokens.weight"] = shared, shared + 1


CONTRADICTIONS = {
    "a layer fewer": (lambda at: at.config(encoder_layers=0, decoder_layers=1), ["at least 1"]),
    "other layers": (lambda at: at.weights(lambda t: t.update(x=torch.ones(1))), ["not ask for", "x"]),
    "no biases": (lambda at: at.config(attention_bias=False), ["not ask for", "k_proj.bias"]),
    "post-norm": (lambda at: at.config(normalize_before=True), ["no weights for", "layer_norm"]),
    "embedding norm": (lambda at: at.config(layernorm_embedding=True), ["no weights for", "layer_norm"]),
    "learned positions": (lambda at: at.config(position_embedding_type="learned"), ["no weights", "positions"]),
    "untied head": (lambda at: at.config(tie_word_embeddings=False), ["no weights for lm_head.weight"]),
    "unshared": (lambda at: at.config(share_encoder_decoder_embeddings=False), ["no weights for", "embed_tokens"]),
    "another head": (lambda at: at.weights(untied(HEAD)), ["lm_head.weight differs from model.shared.weight"]),
    "another embedding": (lambda at: at.weights(untied("model.decoder.embed_tokens.weight")), ["the config ties"]),
    "two embeddings": (lambda at: at.weights(split), ["the config ties them"]),
    "another type": (lambda at: at.config(model_type="mat"), ["model_type is 'mat'", "VanillaTransformerFor"]),
    "a foreign type": (lambda at: at.config(model_type="bart"), ["model_type is 'bart'"]),
    "a quiet type": (lambda at: at.config(model_type="multipath_transformer", architectures=None), ["fc1.bias"]),
    "bigger": (lambda at: at.config(d_model=16), ["do not fit its config"]),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_weights_and_config_must_agree(name, checkpoint):
    spoil, words = CONTRADICTIONS[name]
    checkpoint.load()
    spoil(checkpoint)
    refused(checkpoint.load, *words)
    refused(lambda: MATForConditionalGeneration.from_base(checkpoint.folder), "cannot start from")


def test_a_layer_that_the_config_leaves_out_is_noticed(checkpoint):
    def add(tensors):
        tensors |= {
            key.replace("encoder.layers.0", "encoder.layers.1"): tensor.clone()
            for key, tensor in tensors.items()
            if "encoder.layers.0" in key
        }

    checkpoint.weights(add)
    refused(checkpoint.load, "not ask for", "model.encoder.layers.1.")
    assert checkpoint.load(accept_unexpected=lambda config: config.encoder_layers == 1).config.encoder_layers == 1
    refused(lambda: checkpoint.load(accept_unexpected=lambda config: False), "not ask for")
    checkpoint.config(encoder_layers=2)
    assert checkpoint.load().config.encoder_layers == 2


def test_a_class_of_another_type_is_refused(checkpoint):
    refused(lambda: load_model(MATForConditionalGeneration, checkpoint.folder), "vanilla_transformer", "mat")
    assert type(load_model(VanillaTransformerForConditionalGeneration, checkpoint.folder)).__name__.startswith("Van")


def test_a_masked_language_model_is_no_translation_model(workspace, tmp_path):
    config = load_config(workspace / "latent_depth")
    LatentDepthForMaskedLM(config).save_pretrained(tmp_path)
    words = ["no weights for", "A LatentDepthForMaskedLM is for pipeline('fill-mask')"]
    refused(lambda: load_model(AutoModelForSeq2SeqLM, tmp_path), *words)
    assert auto_class(tmp_path) is AutoModelForMaskedLM
    assert auto_class(workspace / "latent_depth") is AutoModelForSeq2SeqLM
    assert load_model(LatentDepthForMaskedLM, tmp_path).dense is not None


def test_what_older_checkpoints_hold_beside_weights_is_accepted(tmp_path):
    """Files converted from fairseq's models also hold version numbers and sinusoids."""
    sizes = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"}
    M2M100ForConditionalGeneration(M2M100Config(vocab_size=20, **sizes)).save_pretrained(tmp_path)
    at = Checkpoint(tmp_path)
    more = ("model.encoder.version", "model.decoder.version", "model.encoder.embed_positions.weights")
    copies = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", HEAD)
    at.weights(lambda t: t.update({name: t[SHARED].clone() for name in copies}))
    at.weights(lambda t: t.update({name: torch.ones(3) for name in more}))
    model = at.load()
    assert model.lm_head.weight is model.model.shared.weight


# files and programs that an index, a config, or an adapter names


def leads_out(at):
    at.sharded()
    outside = at.folder.parent / "outside.safetensors"
    (at.folder / "model-1.safetensors").rename(outside)
    (at.folder / "model-1.safetensors").symlink_to(outside)


def outside(file: str):
    def spoil(at):
        shutil.copyfile(at.folder / "model.safetensors", at.folder.parent / "outside.safetensors")
        at.sharded("kept.safetensors", weight_map={SHARED: file.format(at.folder.parent)})

    return spoil


NAMED = {
    "a pickle": (lambda at: at.sharded("pytorch_model.bin"), ["pytorch_model.bin", "safetensors alone"]),
    "above": (outside("../outside.safetensors"), ["../outside.safetensors", "not in the folder"]),
    "elsewhere": (outside("{}/outside.safetensors"), ["outside.safetensors", "not in the folder"]),
    "a link": (leads_out, ["model-1.safetensors", "out of the folder"]),
    "nothing": (lambda at: at.sharded(weight_map={SHARED: "no.safetensors"}), ["no.safetensors", "no such file"]),
    "a number": (lambda at: at.sharded(weight_map={SHARED: 3}), ["is no index"]),
    "a list": (lambda at: at.sharded(weight_map=[SHARED]), ["is no index"]),
    "no metadata": (lambda at: at.sharded(metadata=None), ["is no index"]),
    "half of it": (lambda at: (at.sharded(), (at.folder / INDEX).write_text("{")), ["index.json is damaged"]),
    "a kernel": (lambda at: at.config(attn_implementation="kernels-community/flash-attn2"), ["program on the Hub"]),
    "a hidden kernel": (lambda at: at.config(_attn_implementation="evil/kernel@main:run"), ["program on the Hub"]),
    "kernels": (lambda at: at.config(use_kernels=True), ["use_kernels", "program on the Hub"]),
    "a nested kernel": (lambda at: at.config(encoder={"attn_implementation": "a/b"}), ["program on the Hub"]),
    "no switch": (lambda at: at.config(return_dict=[]), ["return_dict", "true, false"]),
    "other weights": (lambda at: at.config(transformers_weights="adapter_model.bin"), ["transformers_weights"]),
    "two things": (lambda at: (at.folder / "adapter_config.json").write_text("{}"), ["a model and an adapter"]),
}


@pytest.mark.parametrize("name", NAMED)
def test_files_name_neither_programs_nor_pickles_nor_other_places(name, checkpoint):
    spoil, words = NAMED[name]
    spoil(checkpoint)
    refused(checkpoint.load, *words)


def test_an_honest_index_and_a_snapshot_of_the_hub_are_loaded(checkpoint, tmp_path):
    before = checkpoint.load().state_dict()
    checkpoint.sharded()
    assert all(torch.equal(tensor, before[name]) for name, tensor in checkpoint.load().state_dict().items())
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    shutil.copytree(checkpoint.folder, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    assert load_model(AutoModelForSeq2SeqLM, snapshot) is not None


def test_attention_that_needs_no_hub_may_be_named(checkpoint):
    checkpoint.config(attn_implementation="eager")
    assert checkpoint.load().config._attn_implementation == "eager"


def test_adapters_are_read_from_safetensors_and_their_bases_are_checked(checkpoint, tmp_path):
    adapted = get_peft_model(checkpoint.load(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = Checkpoint(tmp_path / "adapter")
    ids = {"input_ids": torch.tensor([[4, 5, 2]]), "decoder_input_ids": torch.tensor([[2, 4]])}
    with torch.no_grad():
        torch.testing.assert_close(adapter.load()(**ids).logits, adapted.eval()(**ids).logits)
    refused(lambda: load_config(adapter.folder), "an adapter of PEFT's, without its model", "merge_and_unload")
    for base, word in (
        (3, "base_model_name_or_path"),
        ("None", "write the folder or Hub id"),
        (str(tmp_path / "no"), "no such folder"),
    ):
        adapter.edit("adapter_config.json", base_model_name_or_path=base)
        refused(adapter.load, word)
    adapter.edit("adapter_config.json", base_model_name_or_path=str(checkpoint.folder))
    checkpoint.sharded("pytorch_model.bin")
    refused(adapter.load, "safetensors alone")
    (adapter.folder / "adapter_model.safetensors").rename(adapter.folder / "adapter_model.bin")
    refused(adapter.load, "pickled")


# numbers and sizes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(value, checkpoint):
    key = "model.decoder.layers.0.feed_forward.fc2.bias"
    checkpoint.weights(lambda tensors: tensors[key].__setitem__(3, value))
    refused(checkpoint.load, key, "NaN or infinite")
    refused(lambda: MATForConditionalGeneration.from_base(checkpoint.folder), key)
    assert checkpoint.load(accept_nonfinite=True) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_the_largest_numbers_are_numbers(dtype):
    tensor = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(tensor)
    tensor.view(-1)[7] = float("nan")
    assert not is_finite(tensor)
    model = torch.nn.BatchNorm1d(2)
    model.running_mean[1] = float("nan")
    with pytest.raises(ValueError, match="running_mean"):
        check_finite(model)


HUGE = {
    "layers": {"encoder_layers": 10**8},
    "vocabulary": {"vocab_size": 10**12, "decoder_vocab_size": 10**12},
    "width": {"encoder_ffn_dim": 10**11},
    "positions": {"max_position_embeddings": 10**12},
    "branches": {"attention_branches": 10**9},
    "beyond 64 bits": {"decoder_ffn_dim": 10**30},
    "a nested list": {"encoder_layers": json.loads("[" * 900 + "]" * 900)},
}


@pytest.mark.parametrize("name", HUGE)
def test_a_config_that_asks_for_far_more_than_the_file_has_takes_no_memory(name, checkpoint, monkeypatch):
    checkpoint.config(**HUGE[name])
    monkeypatch.setattr(AutoModelForSeq2SeqLM, "from_pretrained", None)  # is not called
    refused(checkpoint.load)
    refused(lambda: MATForConditionalGeneration.from_base(checkpoint.folder), "cannot start from")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", INDEX])
def test_deeply_nested_files_are_refused(file, checkpoint):
    if file == INDEX:
        checkpoint.sharded()
    (checkpoint.folder / file).write_text('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}")
    refused(checkpoint.load, file, "damaged")


# generation configs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("decoder_start_token_id", 10**6),
        ("decoder_start_token_id", "2"),
        ("forced_bos_token_id", -1),
        ("forced_bos_token_id", 2.0),
        ("eos_token_id", [2, 10**9]),
        ("eos_token_id", {"id": 2}),
        ("eos_token_id", []),
        ("decoder_start_token_id", None),
        ("pad_token_id", True),
        ("suppress_tokens", [5, 99999]),
        ("suppress_tokens", ["5"]),
        ("bad_words_ids", [[3], [99999]]),
        ("bad_words_ids", "none"),
        ("sequence_bias", [[[3, 99999], 1.0]]),
        ("sequence_bias", 5),
        ("max_length", "20"),
        ("max_length", 0),
        ("max_length", 20.5),
        ("max_new_tokens", "all"),
        ("num_beams", 10**9),
        ("num_beams", None),
        ("length_penalty", "long"),
        ("length_penalty", float("nan")),
        ("temperature", [1.0]),
        ("early_stopping", [True]),
        ("do_sample", "no"),
        ("cache_implementation", {}),
        ("return_dict_in_generate", [[[]]]),
        ("num_beam_groups", 2),
        ("force_words_ids", [[3]]),
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("use_mtp", True),
        ("stop_strings", [[[]]]),
    ],
)
def test_generation_configs_are_checked(field, value, checkpoint):
    checkpoint.generation(**{field: value})
    if (field, value) == ("num_beams", None):
        assert checkpoint.load().generation_config.num_beams in (None, 1)
    else:
        refused(checkpoint.load, field)


def test_a_generation_config_is_brought_down_to_the_positions_of_the_model(checkpoint, caplog):
    checkpoint.generation(max_length=10**6)
    model = checkpoint.load()
    assert model.generation_config.max_length == SIZES["max_position_embeddings"]
    assert "positions" in caplog.text
    model.generate(torch.tensor([[4, 5, 2]]), eos_token_id=None)


# tokenizers

TOKENIZERS = {
    "no object": lambda at: (at.folder / "tokenizer.json").write_text("{}"),
    "no model": lambda at: at.edit("tokenizer.json", model=None),
    "vocabulary a list": lambda at: at.edit("tokenizer.json", model={"type": "BPE", "vocab": [], "merges": 3}),
    "ids as text": lambda at: at.edit("tokenizer.json", model={"type": "WordLevel", "vocab": {"a": "b"}}),
    "negative id": lambda at: at.edit("tokenizer.json", model={"type": "WordLevel", "vocab": {"a": -1}}),
    "no unknown": lambda at: at.edit(
        "tokenizer.json", model={"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "?"}, added_tokens=[]
    ),
    "added number": lambda at: at.edit("tokenizer.json", added_tokens=7),
    "added id": lambda at: at.edit(
        "tokenizer.json",
        added_tokens=[{"id": 10**12, "content": "x", "special": True, "single_word": False, "lstrip": False,
                       "rstrip": False, "normalized": False}],
    ),
    "decoder": lambda at: at.edit("tokenizer.json", decoder={"type": "Nonsense"}),
    "class": lambda at: at.edit("tokenizer_config.json", tokenizer_class=["a"]),
    "unknown class": lambda at: at.edit("tokenizer_config.json", tokenizer_class="Nonsense", auto_map=3),
    "length as text": lambda at: at.edit("tokenizer_config.json", model_max_length="long"),
    "length a list": lambda at: at.edit("tokenizer_config.json", model_max_length=[64]),
    "length below one": lambda at: at.edit("tokenizer_config.json", model_max_length=-5),
    "length no number": lambda at: at.edit("tokenizer_config.json", model_max_length=float("nan")),
    "side": lambda at: at.edit("tokenizer_config.json", padding_side="middle"),
    "token a number": lambda at: at.edit("tokenizer_config.json", pad_token=5),
    "token a list": lambda at: at.edit("tokenizer_config.json", eos_token=["</s>"]),
    "token an object": lambda at: at.edit("tokenizer_config.json", eos_token={"a": 1}),
    "decoder of garbage": lambda at: at.edit("tokenizer_config.json", added_tokens_decoder=[1, 2]),
    "decoder of words": lambda at: at.edit("tokenizer_config.json", added_tokens_decoder={"x": "y"}),
    "more tokens a number": lambda at: at.edit("tokenizer_config.json", extra_special_tokens=5),
    "files list": lambda at: at.edit("tokenizer_config.json", model_input_names=5),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_are_checked(name, checkpoint):
    load_tokenizer(checkpoint.folder)
    TOKENIZERS[name](checkpoint)
    refused(lambda: load_tokenizer(checkpoint.folder), str(checkpoint.folder))


@pytest.fixture
def pauses(monkeypatch):
    """Make every connection fail, and `time.sleep` return at once. The list holds the seconds of each sleep."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("Name or service not known")

    waited: list[float] = []
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr("hf_deepwide.hub.constants.HF_HUB_OFFLINE", False)
    return waited


@pytest.mark.parametrize("load", [load_config, load_tokenizer, lambda name: load_model(AutoModelForSeq2SeqLM, name)])
def test_without_the_hub_an_unknown_name_is_refused_soon(load, pauses):
    refused(lambda: load("nobody/nothing"), "nobody/nothing", "connect")
    assert sum(pauses) <= 2


def test_without_the_hub_a_cached_model_is_loaded_soon(checkpoint, pauses, tmp_path, monkeypatch):
    """The cache holds a plain copy of the files: nothing in it records which files the repository does not have."""
    place = tmp_path / "cache" / "models--some--model"
    shutil.copytree(checkpoint.folder, place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert load_model(AutoModelForSeq2SeqLM, "some/model").num_parameters() == checkpoint.load().num_parameters()
    assert sum(pauses) <= 2


def test_a_cached_pickle_is_named(checkpoint, pauses, tmp_path, monkeypatch):
    """Transformers converts a pickle to safetensors only on the Hub, and advises to read the pickle."""
    place = tmp_path / "cache" / "models--some--model"
    shutil.copytree(checkpoint.folder, place / "snapshots" / "abc")
    (place / "snapshots" / "abc" / "model.safetensors").rename(place / "snapshots" / "abc" / "pytorch_model.bin")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    refused(lambda: load_model(AutoModelForSeq2SeqLM, "some/model"), "pickle", "save_pretrained")


def test_an_unfinished_run_is_no_model(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    for load in (load_config, lambda folder: load_model(AutoModelForSeq2SeqLM, folder)):
        refused(lambda load=load: load(tmp_path), "no config.json", "has not ended")


def test_a_model_for_another_task_is_named(tmp_path):
    """The error has one line, without Transformers' list of all suitable classes."""
    config = MATRobertaConfig(vocab_size=9, d_model=8, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8)
    MATRobertaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        load_model(AutoModelForSeq2SeqLM, tmp_path)
    told = str(error.value)
    assert all(word in told for word in (str(tmp_path), "mat_roberta", "pipeline('text-classification')"))
    assert "\n" not in told


def test_threads_load_at_the_same_time(tmp_path):
    """In threads, Transformers itself loses tied weights, and reports them as missing."""
    cases = ("vanilla", "latent-both")
    for case in cases:
        build(case).save_pretrained(tmp_path / case)
    with ThreadPoolExecutor(len(cases)) as pool:
        loading = [pool.submit(load_model, AutoModelForSeq2SeqLM, tmp_path / case) for case in 5 * cases]
    assert [type(each.result()) for each in loading] == 5 * [type(build(case)) for case in cases]


def test_adapters_that_name_code_or_hold_no_numbers_are_refused(checkpoint, tmp_path):
    adapted = get_peft_model(checkpoint.load(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = Checkpoint(tmp_path / "adapter")
    adapter.edit("adapter_config.json", megatron_config={"a": 1}, megatron_core="evil.module")
    refused(adapter.load, "megatron_config names code")
    adapter.edit("adapter_config.json", megatron_config=None, megatron_core=None, use_dora=True)
    refused(adapter.load, "use_dora is true", "merge_and_unload")
    adapter.edit("adapter_config.json", use_dora=False, revision="v1")
    refused(adapter.load, "revision is 'v1', and only the newest")
    adapter.edit("adapter_config.json", revision=None)
    path = adapter.folder / "adapter_model.safetensors"
    weights = load_file(path)
    next(iter(weights.values()))[0, 0] = float("nan")
    save_file(weights, path, {"format": "pt"})
    refused(adapter.load, "NaN or infinite")


def test_code_that_a_config_names_is_not_passed_on(tmp_path):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    BartForConditionalGeneration(BartConfig(vocab_size=40, **sizes, **heads)).save_pretrained(tmp_path / "bart")
    path = tmp_path / "bart" / "config.json"
    named = {"auto_map": {"AutoModel": "you/evil--evil.Evil"}, "custom_pipelines": {"x": {"impl": "evil.Evil"}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    load_model(AutoModelForSeq2SeqLM, tmp_path / "bart").save_pretrained(tmp_path / "again")
    assert "evil" not in (tmp_path / "again" / "config.json").read_text()
