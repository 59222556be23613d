"""ONNX: onnxruntime decodes what `generate` decodes, with a cache, in batches of any size and length."""

import copy
import functools
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch
from model_cases import build, source
from readme_code import printed_by, python_block
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

import hf_deepwide
import hf_deepwide_cli
from hf_deepwide.errors import UserError
from hf_deepwide.exporting import onnx_folder
from hf_deepwide.exporting.opening import open_model
from hf_deepwide.loading import load_model

SMALL = {"encoder_layers": 1, "decoder_layers": 1}
# A trace takes seconds, so several parts of layers that do not affect each other are traced in one model.
CASES = {
    "branches, attention residuals, relative positions": (
        "mat-2-prenorm",
        SMALL | {"residual": "attention", "max_relative_position": 2},
    ),
    "normalised paths, transparent attention, sdu residuals": (
        "multipath-3-more",
        SMALL | {"decoder_layers": 2, "layer_aggregation": "transparent", "residual": "sdu"},
    ),
    "lstm": ("lstm-two", SMALL),
    "branched attention, routing": (
        "vanilla-weighted",
        SMALL | {"layer_aggregation": "em_routing", "routing_iterations": 2},
    ),
    "dynamic convolution, hierarchical aggregation": (
        "vanilla-dynamic",
        {"encoder_layers": 2, "decoder_layers": 2, "layer_aggregation": "hierarchical"},
    ),
    "luna": ("vanilla-luna", SMALL),
    "merged attention": ("vanilla-merged", SMALL),
    "hyper-connections": ("vanilla-mhc", SMALL | {"residual_streams": 2, "sinkhorn_iterations": 1, "ffn_branches": 1}),
}


@functools.cache
def sessions(folder):
    return [onnxruntime.InferenceSession(Path(folder) / f"{name}.onnx") for name in ("encoder", "decoder")]


def greedy(folder, batch, start, steps):
    """Decode greedily with the graphs in a folder, and return the tokens `[B, 1 + steps]`."""
    encoder, decoder = sessions(folder)
    mask = batch["attention_mask"].numpy()
    cross = encoder.run(None, {"input_ids": batch["input_ids"].numpy(), "attention_mask": mask})
    past, tokens = [tensor[:, :, :0] for tensor in cross], torch.full((len(mask), 1), start)
    for step in range(steps):
        inputs = [tokens[:, -1:].numpy(), mask, *past, *cross]
        names = [node.name for node in decoder.get_inputs()]
        logits, *past = decoder.run(None, dict(zip(names, inputs, strict=True)))
        assert past[0].shape[2] == step + 1
        tokens = torch.cat([tokens, torch.from_numpy(logits).argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_decodes_as_generate_does(case, tokenizer, tmp_path, monkeypatch, capsys):
    name, fields = CASES[case]
    model = build(name, **fields)
    model.generation_config.update(max_length=9)
    folder = hf_deepwide.export_onnx(model, tmp_path / "out", tokenizer=tokenizer)
    for lengths in ((7, 4, 5), (3,), (9, 2, 4, 1)):
        batch = source(lengths)
        found = model.generate(**batch, max_new_tokens=8)
        assert torch.equal(greedy(folder, batch, 2, 8), found)

    with torch.no_grad():
        altered = copy.deepcopy(model)
        for layer in altered.model.decoder.layers:  # all layers: the check must see a difference
            layer.encoder_attn.out_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="do not compute"):
        onnx_folder.check_logits(altered, Path(folder))

    with pytest.raises(UserError, match=r"exported to ONNX.*README\.md"):
        load_model(AutoModelForSeq2SeqLM, folder)  # the folder is only for onnxruntime

    monkeypatch.chdir(folder)
    said = printed_by(python_block((Path(folder) / "README.md").read_text()), capsys)
    text = tokenizer("One sentence each, in the source language.", return_tensors="pt")
    ids = model.generate(**text, eos_token_id=2)
    assert said == tokenizer.decode(ids[0], skip_special_tokens=True).strip()


@pytest.fixture(scope="module")
def posterior(tokenizer, tmp_path_factory):
    """A model of two posteriors, and the folder to which the command exports the second one, a plain Transformer."""
    folder = tmp_path_factory.mktemp("latent")
    fields = {"num_posteriors": 2, "posterior_names": ["de", "fr"], "inference_selection": "tempered"}
    model = build("latent-both", **fields, **SMALL)
    model.generation_config.update(max_length=9)
    with torch.no_grad():
        for stack in (model.model.encoder, model.model.decoder):
            stack.layer_selection.layer_logits.copy_(torch.randn(2, len(stack.layers)).mul(-4))
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    words = ["export", folder / "model", "--to", "onnx", "--output", folder / "out", "--language", "fr"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hf-deepwide", *map(str, words)])
        hf_deepwide_cli.main()
    return model, folder / "out"


def test_a_posterior_is_chosen_by_its_name(posterior):
    (model, folder), batch = posterior, source((7, 4, 5))
    german, french = (
        model.generate(**batch, posteriors=torch.full((3,), number), max_new_tokens=8) for number in (0, 1)
    )
    assert torch.equal(greedy(folder, batch, 2, 8), french)
    assert not torch.equal(german, french)


def test_the_readme_never_writes_what_the_model_must_not(posterior, tokenizer, monkeypatch, capsys):
    """For example, Marian's models must not write padding."""
    (model, folder), chosen = posterior, {"posteriors": torch.tensor([1]), "eos_token_id": 2}
    text = tokenizer("One sentence each, in the source language.", return_tensors="pt")
    usual = model.generate(**text, **chosen)
    bad = [[usual[0, 1].item()], [usual[0, 2].item(), 5]]
    never = {"bad_words_ids": bad[:1], "suppress_tokens": [usual[0, 2].item()]}
    monkeypatch.setattr(model.generation_config, "suppress_tokens", never["suppress_tokens"])
    monkeypatch.setattr(model.generation_config, "bad_words_ids", bad)
    readme = onnx_folder.readme(open_model(model, tokenizer, "fr"))  # another README for the same graphs
    code = python_block(readme)
    monkeypatch.chdir(folder)
    said = printed_by(code, capsys)
    ids = model.generate(**text, **chosen, **never)
    assert ids[0, 1] != usual[0, 1]
    assert said == tokenizer.decode(ids[0], skip_special_tokens=True).strip()
    words = "two dogs in the red water " * 20
    said = printed_by(code.replace("One sentence each, in the source language.", words), capsys)
    longest = tokenizer(words, truncation=True, max_length=model.config.max_position_embeddings, return_tensors="pt")
    ids = model.generate(**longest, **chosen, **never)
    assert said == tokenizer.decode(ids[0], skip_special_tokens=True).strip()


def test_a_missing_package_is_one_line(tokenizer, tmp_path, monkeypatch):
    for package in ("onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=rf"Python 3.11 .* needs {package}: .*hf_deepwide\[onnx\]"):
            hf_deepwide.export_onnx(build("vanilla"), tmp_path / "out", tokenizer=tokenizer)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"min_new_tokens": 1}, "min_new_tokens 1"),  # as `convert` writes it
        ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size 1"),
        ({"forced_eos_token_id": 0}, "forced_eos_token_id 0"),
        ({"bad_words_ids": [[5], [6, 7]]}, "bad_words_ids [[6, 7]]"),
        ({"min_length": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": [[5]]}, None),
    ],
)
def test_rules_that_are_left_out_are_told(rule, told, caplog):
    settings = GenerationConfig(**rule)
    onnx_folder.warn_of_lost_rules(settings)
    assert (told or "") in caplog.text
    assert bool(caplog.text) is (told is not None)
