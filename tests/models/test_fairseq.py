"""Checkpoints of fairseq become models that compute the same, and files that could run code are refused."""

import argparse
import json
import os
import re
import sys
import types
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import naive_fairseq
import pytest
import torch
from fairseq_files import HEADS, NAIVE, SYMBOLS, TARGET_SYMBOLS, namespace, our_logits, random_weights, save
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide import from_fairseq
from hf_deepwide.errors import UserError

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "released.json").read_text(encoding="utf-8"))["models"]
EXACT = {"rtol": 0, "atol": 1e-12}


def their_names(ours, config):
    """Return weights under the names in the released MAT or its plain Transformer. See the golden files' README."""
    theirs = OrderedDict()
    for stack in ("encoder", "decoder"):
        theirs[f"{stack}.embed_tokens.weight"] = ours["model.shared.weight"]
        theirs[f"{stack}.version"] = torch.tensor([3.0])
    plain = "attention_branches" not in config
    attention_branches, ffn_branches = (config.get(f"{kind}_branches", 1) for kind in ("attention", "ffn"))
    for key, tensor in ours.items():
        name = key.removeprefix("model.")
        if "_proj." in name:
            prefix, part = name.rsplit(".", 1)
            attention, projection = prefix.rsplit(".", 1)
            columns = projection == "out_proj" and part == "weight"
            for branch, block in enumerate(tensor.chunk(attention_branches, 1 if columns else 0)):
                module = attention if plain else f"{attention}_branches.{branch}"
                if projection == "out_proj":
                    theirs[f"{module}.out_proj.{part}"] = block
                elif projection == "q_proj":
                    blocks = [ours[f"model.{attention}.{letter}_proj.{part}"] for letter in "qkv"]
                    fused = [of_letter.chunk(attention_branches)[branch] for of_letter in blocks]
                    theirs[f"{module}.in_proj_{part}"] = torch.cat(fused)
        elif ".feed_forward." in name:
            layer, _, linear, part = name.rsplit(".", 3)
            columns = linear == "fc2" and part == "weight"
            for branch, block in enumerate(tensor.chunk(ffn_branches, 1 if columns else 0)):
                theirs[f"{layer}.{linear}{'' if plain else f'_branches.{branch}'}.{part}"] = block
        elif name != "shared.weight":
            theirs[name] = tensor
    return theirs


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_the_mat_fork_gives_the_numbers_of_the_released_code(name, tmp_path):
    tensors = load_file(GOLDEN / "released.safetensors")
    of_case = {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}
    ours = {key.removeprefix("weights/"): t for key, t in of_case.items() if key.startswith("weights/")}
    config, released = CASES[name]["config"], CASES[name]["released_arguments"]
    arguments = {f"{stack}_normalize_before": released["normalize_before"] for stack in ("encoder", "decoder")}
    if "attention_branches" in config:
        arguments |= {f"{stack}_branches": released["branches"] for stack in ("encoder", "decoder")}
        arguments |= {f"{stack}_pffn_branches": released["pffn_branches"] for stack in ("encoder", "decoder")}
        arguments |= {key: released[key] for key in ("branch_dropout", "pffn_branch_dropout", "join_pffn")}
    path = save(tmp_path / "checkpoint.pt", namespace(**arguments), their_names(ours, config))

    model, tokenizer = from_fairseq(path)
    assert tokenizer is None
    assert model.config.model_type == ("mat" if "attention_branches" in config else "vanilla_transformer")
    for field, value in config.items():
        assert getattr(model.config, field) == value, field
    assert {key: t.tolist() for key, t in ours.items()} == {k: t.tolist() for k, t in model.named_parameters()}
    if not CASES[name]["training"]:
        model.set_attn_implementation("sdpa")
        output = model(
            input_ids=of_case["source"],
            attention_mask=(~of_case["source_padding"]).long(),
            decoder_input_ids=of_case["previous"],
        )
        real = ~of_case["target_padding"]
        torch.testing.assert_close(output.logits[real], of_case["logits"][real], **EXACT)


def test_unjoined_networks_of_the_mat_fork(tmp_path):
    """Without --join-pffn, both projections scale the sum of N branches by 1/N^2: two equal ones give half of one."""
    weights, branched = random_weights(), random_weights()
    for name in [name for name in weights if ".fc" in name]:
        weights[name] = weights[name] / 2
        for branch in range(2):
            branched[re.sub(r"(fc[12])", rf"\1_branches.{branch}", name)] = branched[name]
        del branched[name]
    branches = {f"{stack}_{name}": 1 for stack in ("encoder", "decoder") for name in ("branches", "pffn_branches")}
    branches |= {"encoder_pffn_branches": 2, "decoder_pffn_branches": 2}
    model, _ = from_fairseq(save(tmp_path / "checkpoint.pt", namespace(**branches), branched))
    assert (model.config.ffn_branches, model.config.join_ffn) == (2, False)
    golden = naive_fairseq.logits(weights, SimpleNamespace(**NAIVE), SOURCE, PREVIOUS)
    torch.testing.assert_close(our_logits(model, SOURCE, PREVIOUS), golden, **EXACT)


def test_a_converted_model_searches_by_the_rules_of_fairseq(tmp_path):
    """It never selects padding, and never the end as the first token, however probable they are."""
    model, _ = from_fairseq(save(tmp_path / "checkpoint.pt", namespace(), random_weights()))
    for likely in (model.config.pad_token_id, model.config.eos_token_id):
        bias = torch.zeros(model.config.decoder_vocab_size)
        bias[likely] = 100.0
        model.lm_head.bias = torch.nn.Parameter(bias)
        ids = model.float().generate(torch.tensor([SOURCE]), max_new_tokens=4)[0, 1:].tolist()
        assert model.config.pad_token_id not in ids
        assert ids[0] != model.config.eos_token_id


VARIANTS = {
    "post-norm": ({}, {}, {}),
    "pre-norm, one matrix for q, k and v": (
        {"pre_norm": True, "fused": True},
        {"encoder_normalize_before": True, "decoder_normalize_before": True, "activation_fn": "gelu_accurate"},
        {"pre_norm": True, "activation": "gelu_accurate"},
    ),
    "learned positions, norm of embeddings, two vocabularies, untied": (
        {"learned": 9, "embedding_norm": True, "shares": "none"},
        {
            "encoder_learned_pos": True, "decoder_learned_pos": True, "layernorm_embedding": True,
            "no_scale_embedding": True, "activation_fn": "gelu", "share_all_embeddings": False,
            "share_decoder_input_output_embed": False, "max_source_positions": 9, "max_target_positions": 9,
        },
        {"learned": True, "layernorm_embedding": True, "scale": False, "activation": "gelu"},
    ),
    "two vocabularies, the decoder's tied": (
        {"shares": "decoder"}, {"share_all_embeddings": False}, {},
    ),
}  # fmt: skip
SOURCE, PREVIOUS = [7, 4, 12, 5, 2], [2, 6, 10, 4]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_computes_what_fairseq_computes(variant, tmp_path):
    made_of, arguments, differs = VARIANTS[variant]
    weights = random_weights(**made_of)
    path = save(tmp_path / "checkpoint.pt", namespace(**arguments), weights)
    model, _ = from_fairseq(path)
    golden = naive_fairseq.logits(weights, SimpleNamespace(**NAIVE | differs), SOURCE, PREVIOUS)
    torch.testing.assert_close(our_logits(model, SOURCE, PREVIOUS), golden, **EXACT)
    assert (model.config.vocab_size, model.config.source_lang) == (SYMBOLS, "de")
    model.save_pretrained(tmp_path / "ours")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours", dtype="auto")
    torch.testing.assert_close(our_logits(loaded, SOURCE, PREVIOUS), golden, **EXACT)


def test_a_newer_file_keeps_its_arguments_in_a_config(tmp_path):
    weights = random_weights(pre_norm=True)
    stack = {"attention_heads": HEADS, "normalize_before": True}
    config = {"model": {"encoder": stack, "decoder": stack, "share_all_embeddings": True, "dropout": 0.25}}
    config["task"] = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
    model, _ = from_fairseq(save(tmp_path / "nested.pt", None, weights, cfg=config))
    golden = naive_fairseq.logits(weights, SimpleNamespace(**NAIVE | {"pre_norm": True}), SOURCE, PREVIOUS)
    torch.testing.assert_close(our_logits(model, SOURCE, PREVIOUS), golden, **EXACT)
    assert (model.config.dropout, model.config.target_lang) == (0.25, "en")
    arguments = namespace(encoder_normalize_before=True, decoder_normalize_before=True)
    model, _ = from_fairseq(save(tmp_path / "flat.pt", None, weights, cfg={"model": arguments}))
    torch.testing.assert_close(our_logits(model, SOURCE, PREVIOUS), golden, **EXACT)
    config["task"]["_name"] = "translation_from_pretrained_bart"
    with pytest.raises(UserError, match="its argument task is 'translation_from_pretrained_bart'"):
        from_fairseq(save(tmp_path / "mbart.pt", None, weights, cfg=config))


def test_names_and_arguments_of_older_versions_are_known(tmp_path, caplog):
    weights, old = random_weights(shares="none"), {}
    norms = {
        "encoder": {"self_attn": 0, "final": 1},
        "decoder": {"self_attn": 0, "encoder_attn": 1, "final": 2},
    }
    for name, tensor in weights.items():
        for stack, numbers in norms.items():
            for norm, number in numbers.items():
                if name.startswith(f"{stack}.layers."):
                    name = name.replace(f"{norm}_layer_norm", f"layer_norms.{number}")
        old[name] = tensor
    old["encoder.embed_positions.weights"] = torch.zeros(40, 8)
    arguments = namespace(
        share_all_embeddings=False, share_decoder_input_output_embed=False, relu_dropout=0.2, encoder_layerdrop=0.1,
        activation_dropout=0.0,
    )  # fmt: skip
    model, _ = from_fairseq(save(tmp_path / "old.pt", arguments, old))
    golden = naive_fairseq.logits(weights, SimpleNamespace(**NAIVE), SOURCE, PREVIOUS)
    torch.testing.assert_close(our_logits(model, SOURCE, PREVIOUS), golden, **EXACT)
    assert (model.config.activation_dropout, model.config.layer_drop) == (0.2, 0.0)
    assert "LayerDrop of 0.1 and 0.0" in caplog.text
    arguments.decoder_layerdrop = 0.1
    assert from_fairseq(save(tmp_path / "same.pt", arguments, old)).model.config.layer_drop == 0.1


def test_latent_depth_of_several_languages_selects_the_layers_of_each_pair(tmp_path):
    """Rows are those of the last pair with this source (for the encoder) or with this target (for the decoder)."""
    weights = random_weights(pre_norm=True)
    weights["encoder.layer_select.layer_logits"] = torch.tensor([[9.0, 9.0], [1.0, -1.0], [-1.0, 1.0]]).double()
    weights["decoder.layer_select.layer_logits"] = torch.tensor([[1.0, 1.0], [9.0, 9.0], [-2.0, 1.0]]).double()
    pairs = ["en-de", "en-fr", "cs-fr"]
    theirs = {f"models.{pair}.{name}": tensor for pair in pairs for name, tensor in weights.items()}
    arguments = namespace(
        task="multilingual_translation_latent_depth", arch="latent_multilingual_transformer", lang_pairs=pairs,
        encoder_normalize_before=True, decoder_normalize_before=True, encoder_latent_layer=True, soft_update=500,
        decoder_latent_layer=True, sampling_tau=5.0, sparsity_weight=0.1, anneal_updates=5000, target_layers=1,
        share_weight=0.1, prior="agged_posterior", source_lang=None, target_lang=None,
    )  # fmt: skip
    model, _ = from_fairseq(save(tmp_path / "checkpoint.pt", arguments, theirs))
    assert model.config.model_type == "latent_depth"
    assert model.config.translation_pairs == {pair: {"posterior": row} for row, pair in enumerate(pairs)}
    assert model.config.posterior_names == pairs
    assert (model.config.layer_prior, model.config.target_encoder_layers) == ("aggregated", 1)
    arguments.target_layers = 0  # then fairseq leaves out the term of layer sharing, too
    free = from_fairseq(save(tmp_path / "free.pt", arguments, theirs)).model.config
    assert (model.config.layer_sharing_weight, free.layer_sharing_weight) == (0.1, 0.0)
    arguments.soft_select = True  # then fairseq draws soft samples in generation
    soft = from_fairseq(save(tmp_path / "soft.pt", arguments, theirs)).model.config
    assert (free.inference_selection, soft.inference_selection) == ("hard", "tempered")
    selected = {"en-de": ([1, 0], [1, 1]), "en-fr": ([1, 0], [0, 1]), "cs-fr": ([0, 1], [0, 1])}
    for row, pair in enumerate(pairs):
        z = dict(zip(("encoder", "decoder"), selected[pair], strict=True))
        golden = naive_fairseq.logits(weights, SimpleNamespace(**NAIVE | {"pre_norm": True, "z": z}), SOURCE, PREVIOUS)
        torch.testing.assert_close(
            our_logits(model, SOURCE, PREVIOUS, posteriors=torch.tensor([row])), golden, **EXACT
        )


class Runs:
    """An object whose pickle runs a program when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "before PyTorch 1.6"])
@pytest.mark.parametrize("where", ["args", "model", "extra_state"])
def test_a_file_that_would_run_a_program_is_refused_and_runs_nothing(where, new_format, tmp_path):
    touched = tmp_path / "touched"
    state = {"args": namespace(), "model": random_weights(), "extra_state": {}}
    state[where] = {"x": Runs(touched)} if where != "args" else namespace(evil=Runs(touched))
    path = tmp_path / "checkpoint.pt"
    torch.save(state, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(UserError, match=r"system, and to read it could run any code; accepted are tensors") as error:
        from_fairseq(path)
    assert not touched.exists()
    assert "\n" not in str(error.value)
    torch.load(path, weights_only=False)  # without the check, the file runs its program
    assert touched.exists()


def save_with_object(path, monkeypatch, module_name, name):
    """A checkpoint that also holds an object of one of fairseq's classes."""
    module = types.ModuleType(module_name)
    cls = type(name, (), {"__module__": module_name})
    setattr(module, name, cls)
    monkeypatch.setitem(sys.modules, "fairseq", types.ModuleType("fairseq"))
    monkeypatch.setitem(sys.modules, module_name, module)
    item = cls()
    item.sum = 3.5
    extra = {"train_meters": OrderedDict(train_loss=item)}
    return save(path, namespace(), random_weights(), extra_state=extra)


@pytest.mark.parametrize("name", ["AverageMeter", "TimeMeter", "StopwatchMeter"])
def test_meters_of_old_versions_are_passed_over(name, tmp_path, monkeypatch):
    path = save_with_object(tmp_path / "checkpoint.pt", monkeypatch, "fairseq.meters", name)
    assert from_fairseq(path).model.config.vocab_size == SYMBOLS


@pytest.mark.parametrize("newer", [False, True], ids=["namespace", "config"])
def test_objects_of_fairseq_are_named_in_the_refusal(newer, tmp_path, monkeypatch):
    """The message contains code that saves the file without these objects."""
    path = save_with_object(tmp_path / "checkpoint.pt", monkeypatch, "fairseq.tasks", "Task")
    if newer:
        state = torch.load(path, weights_only=False)
        config = {"model": vars(state.pop("args")), "task": {"source_lang": "de", "target_lang": "en"}, "common": None}
        torch.save({**state, "args": None, "cfg": config}, path)
    with pytest.raises(UserError, match=r"holds fairseq.tasks.Task") as error:
        from_fairseq(path)
    lines = str(error.value).partition("where fairseq is installed: ")[2]
    exec(lines, {"torch": torch, "FILE": path, "NEW": tmp_path / "again.pt"})
    config = from_fairseq(tmp_path / "again.pt").model.config
    assert (config.vocab_size, config.target_lang) == (SYMBOLS, "en")


def without(name):
    return lambda weights: weights.pop(name)


def setting(name, tensor):
    return lambda weights: weights.__setitem__(name, tensor)


WRONG = {
    "unknown weight": (setting("decoder.layers.0.c_attn", torch.ones(2)), {}, "no place: decoder.layers.0.c_attn"),
    "lost weight": (without("encoder.layers.1.fc2.bias"), {}, "model.encoder.layers.1.feed_forward.fc2.bias"),
    "shape": (setting("encoder.layers.1.fc2.bias", torch.ones(3).double()), {}, r"fc2\.bias .*\[3\], .* \[8\]"),
    "not a tensor": (setting("encoder.x", [1]), {}, "encoder.x.*not a plain tensor"),
    "huge": (setting("encoder.x", torch.ones(1).expand(10**12)), {}, "more numbers than the file"),
    "third": (setting("encoder.layers.0.self_attn.in_proj_bias", torch.ones(7)), {}, "not three matrices"),
    "not finite": (setting("encoder.layers.1.fc2.bias", torch.full((8,), torch.nan).double()), {}, "NaN"),
    "tied and different": (
        setting("decoder.embed_tokens.weight", torch.ones(SYMBOLS, 8).double()), {}, "share .* and they differ",
    ),
    "branch missing": (
        setting("encoder.layers.0.fc1_branches.2.bias", torch.ones(12).double()), {}, "branch 1 is missing",
    ),
    "no layers": (
        lambda weights: [weights.pop(key) for key in list(weights) if "encoder.layers" in key],
        {},
        "no encoder layers",
    ),
    "no embeddings": (without("encoder.embed_tokens.weight"), {}, "no embeddings"),
    "heads": (None, {"encoder_attention_heads": None}, "encoder_attention_heads is None"),
    "heads do not divide": (None, {"encoder_attention_heads": 3}, "must divide"),
    "heads of a type": (None, {"decoder_attention_heads": "2"}, "decoder_attention_heads is '2'"),
    "norms": (None, {"encoder_normalize_before": True}, "encoder_normalize_before and decoder_normalize_before"),
    "pre-norm without last norm": (
        None, {"encoder_normalize_before": True, "decoder_normalize_before": True}, "it lacks weights",
    ),
    "activation": (None, {"activation_fn": "maxout"}, "activation_fn is 'maxout'; accepted: relu"),
    "another task": (None, {"task": "translation_multi_simple_epoch"}, r"task is 'translation_multi_simple"),
    "no positions": (None, {"no_token_positional_embeddings": True}, "no_token_positional_embeddings is True"),
    "dropout": (None, {"dropout": "much"}, "dropout is 'much'; 0.1 would be of the right type"),
    "a switch for a number": (None, {"max_source_positions": True}, "max_source_positions is True"),
    "a number for a switch": (None, {"share_all_embeddings": 1}, "share_all_embeddings is 1; False would be"),
    "a list for a name": (None, {"activation_fn": ["relu"]}, "activation_fn is"),
    "head of two names": (setting("decoder.embed_out", torch.ones(SYMBOLS, 8)), {}, "embed_out is there twice"),
    "no vector": (setting("encoder.layers.0.fc1.bias", torch.tensor(1.0)), {}, "no encoder layers"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_what_does_not_fit_is_refused_in_one_line(mistake, tmp_path):
    damage, arguments, message = WRONG[mistake]
    weights = random_weights()
    if damage is not None:
        damage(weights)
    path = save(tmp_path / "checkpoint.pt", namespace(**arguments), weights)
    with pytest.raises(UserError, match=message) as error:
        from_fairseq(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_language_pairs_with_weights_of_their_own_are_refused(tmp_path):
    weights = random_weights()
    theirs = {f"models.{pair}.{name}": t.clone() for pair in ("en-de", "en-fr") for name, t in weights.items()}
    theirs["models.en-fr.decoder.layers.1.fc1.bias"] += 1
    path = save(tmp_path / "checkpoint.pt", namespace(), theirs)
    with pytest.raises(UserError, match=r"en-fr: decoder.layers.1.fc1.bias.*--share-encoders"):
        from_fairseq(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"not a checkpoint", r"cannot be read: it is damaged, or no file that PyTorch has written$"),
        (b"hello", r"cannot be read: it is damaged, or no file that PyTorch has written \(\w+: "),
        (b"", "cannot be read"),
        ([1], "no checkpoint of fairseq"),
        ({"model": {}}, "no checkpoint of fairseq"),
        ({"model": {"encoder.x": torch.ones(1)}}, "neither 'args' nor 'cfg'"),
        ({"model": {"encoder.x": torch.ones(1)}, "args": argparse.Namespace()}, "neither 'args' nor 'cfg'"),
    ],
)
def test_what_is_no_checkpoint_of_fairseq_is_refused(content, message, tmp_path):
    path = tmp_path / "checkpoint.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(UserError, match=message):
        from_fairseq(path)


def test_a_file_that_ends_early_is_refused(tmp_path):
    path = save(tmp_path / "checkpoint.pt", namespace(), random_weights())
    content = path.read_bytes()
    for length in (5000, len(content) - 100):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match="cannot be read: it is damaged"):
            from_fairseq(path)


def test_the_vocabularies_may_differ_in_size(tmp_path):
    path = save(tmp_path / "checkpoint.pt", namespace(share_all_embeddings=False), random_weights(shares="decoder"))
    config = from_fairseq(path).model.config
    assert (config.vocab_size, config.decoder_vocab_size) == (SYMBOLS, TARGET_SYMBOLS)
