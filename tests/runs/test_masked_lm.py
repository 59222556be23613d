"""Masked language models: masking, the files that a run leaves behind, perplexity against a plain sum."""

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from datasets.arrow_dataset import Column
from huggingface_hub import ModelCard
from model_cases import scramble
from readme_code import python_block, run_code
from safetensors.torch import load_file
from tiny_run import SCRIPT, run_script_here, write_recipe
from transformers import AutoModelForMaskedLM, AutoTokenizer, RobertaConfig, RobertaForMaskedLM, pipeline

from hf_deepwide import LatentDepthConfig, LatentDepthForMaskedLM, share
from hf_deepwide.data import monolingual
from hf_deepwide.data.monolingual import MaskingCollator, MonolingualArguments, encode_texts, read_texts
from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.errors import UserError
from hf_deepwide.runs import masked_lm
from hf_deepwide.runs.encoder_card import write_masked_lm_card
from hf_deepwide.runs.masked_lm import (
    MaskedLMRecipe,
    MaskedLMTrainer,
    MaskedLMTrainingArguments,
    new_model,
    run_masked_lm,
)
from hf_deepwide.runs.recipe import check_recipe, load_recipe, packaged_recipes

RECIPES = [name for name in packaged_recipes() if name.startswith("masked_lm/")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A few hundred phrases in two languages. German has fewer, with one empty and one long line."""
    folder = tmp_path_factory.mktemp("data")
    phrases = build_phrases("de", "en", train_size=240)
    for split, rows in (("train", phrases["train"]), ("heldout", phrases["test"].select(range(60)))):
        english, german = rows["target"][:], rows["source"][:]
        if split == "train":
            german = [*german[:160], "", "sehr " * 300]
        (folder / f"{split}.en").write_text("".join(f"{line}\n" for line in english), encoding="utf-8")
        (folder / f"{split}.de").write_text("".join(f"{line}\n" for line in german), encoding="utf-8")
    return folder


def values(data, run, **training):
    """The sections of a tiny recipe."""
    return {
        "model": {
            "family": "latent_depth", "d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32, "max_position_embeddings": 128, "dropout": 0.1, "inference_selection": "soft",
        },
        "data": {
            "root": str(data), "languages": ["en", "de"], "train": "train", "validation": "heldout",
            "test": "heldout", "posteriors": "language", "max_length": 100, "sampling_temperature": 2.0,
        },
        "tokenizer": {"vocab_size": 200},
        "training": {
            "output_dir": str(run), "seed": 3, "max_tokens": 1024, "num_train_epochs": 2, "learning_rate": 5e-3,
            "warmup_steps": 5, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 4, "logging_steps": 4,
            "load_best_model_at_end": False, "save_total_limit": 20, "bf16": False, "disable_tqdm": True, **training,
        },
    }  # fmt: skip


def recipe_of(*args, **training):
    return check_recipe(values(*args, **training), "tiny", "tiny.yaml", MaskedLMRecipe)


@pytest.fixture(scope="module")
def epochs_told():
    """The epochs that were passed to the collator in the run `finished`."""
    return []


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory, epochs_told):
    """The folder of a finished run, and its results."""
    run = tmp_path_factory.mktemp("mlm") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tell = MaskingCollator.set_epoch

    def listen(collator, epoch):
        epochs_told.append(epoch)
        tell(collator, epoch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskingCollator, "set_epoch", listen)
        results = run_masked_lm(recipe_of(data, run))
    torch.set_num_threads(threads)
    return run, results


def test_masks_are_drawn_anew_each_epoch(finished, epochs_told):
    assert epochs_told == [0, 1]


def test_what_a_run_leaves_behind(finished):
    run, returned = finished
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert results == returned
    assert results["validation"].keys() == {"perplexity", "perplexity_en", "perplexity_de"}
    assert 1 < results["test"]["perplexity"] < 150, "of a vocabulary of 201"
    assert {path.name for path in (run / "plots").iterdir()} == {"layer_utilization.png", "learning_curves.png"}
    model = AutoModelForMaskedLM.from_pretrained(run)
    assert type(model) is LatentDepthForMaskedLM
    assert (model.config.num_posteriors, model.config.posterior_names) == (2, ["en", "de"])
    assert AutoTokenizer.from_pretrained(run).mask_token == "<mask>"
    logged = [entry for entry in history(run) if "loss" in entry]
    assert {"reconstruction", "kl", "effective_depth_encoder", "layer_utilization"} <= logged[-1].keys()
    assert [len(row) for row in logged[-1]["layer_utilization"]["encoder"]] == [3, 3]


def test_the_card_has_the_perplexities(finished):
    run, results = finished
    card = ModelCard.load(run / "README.md")
    assert (card.data.pipeline_tag, card.data.language, card.data.metrics) == (
        "fill-mask",
        ["en", "de"],
        ["perplexity"],
    )
    found = [results["test"][name] for name in results["test"]]
    assert f"| test | {' | '.join(f'{perplexity:.2f}' for perplexity in found)} |" in card.text


def test_the_card_leaves_out_a_language_that_a_split_lacks(finished, data, tmp_path):
    _, results = finished
    lacking = {name: value for name, value in results["test"].items() if name != "perplexity_de"}
    shutil.copytree(finished[0], tmp_path / "run")
    write_masked_lm_card(tmp_path / "run", recipe_of(data, tmp_path / "run"), {**results, "test": lacking})
    cells = " | ".join(f"{lacking[name]:.2f}" if name in lacking else "" for name in results["validation"])
    assert f"| test | {cells} |" in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")


def test_the_card_says_how_to_choose_a_posterior_and_the_run_is_shared(finished, tmp_path, used_in_a_fork):
    """The card's code selects the posterior, as the pipeline has no argument for it."""
    run, _ = finished
    share(run, tmp_path / "shared")
    for folder in (run, tmp_path / "shared"):
        code = python_block((folder / "README.md").read_text()).replace("REPOSITORY", str(folder))
        found = run_code(code)
        assert len(found["fill_mask"]("am <mask> Mai", top_k=3)) == 3


def test_text_around_a_mask_has_the_pieces_that_it_has_around_a_word(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished[0])
    assert tokenizer.model_max_length == 128
    assert tokenizer("am <mask>.").tokens() == [*tokenizer.tokenize("am"), " <mask>", ".", "</s>"]
    assert tokenizer("<mask> Mai  ").tokens() == ["<mask>", *tokenizer("Mai").tokens()]


def history(run):
    newest = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]


def test_perplexity_is_that_of_the_masked_tokens_of_each_language(finished, data):
    """Compare with a sum over one sentence at a time, in float64."""
    run, results = finished
    model = AutoModelForMaskedLM.from_pretrained(run).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(run)
    rows = encode_texts(recipe_of(data, run).data, "test", tokenizer)
    totals = {0: [0.0, 0], 1: [0.0, 0]}
    with torch.no_grad():
        for row in rows:
            ids, posterior = torch.tensor([row["input_ids"]]), torch.tensor([row["posterior"]])
            log_p = model(input_ids=ids, posteriors=posterior).logits[0].log_softmax(-1)
            for position, label in enumerate(row["labels"]):
                if label != -100:
                    totals[row["pair"]][0] -= log_p[position, label].item()
                    totals[row["pair"]][1] += 1
    for name, (loss, tokens) in zip(("en", "de"), totals.values(), strict=True):
        assert results["test"][f"perplexity_{name}"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)
    loss, tokens = (sum(column) for column in zip(*totals.values(), strict=True))
    assert results["test"]["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=1e-4)


def test_an_interrupted_run_ends_with_the_same_weights(finished, data, tmp_path, caplog):
    """Bit for bit, with the same masks. The log must show the resume, as a run from step 0 ends the same."""
    torch.set_num_threads(1)
    reference, _ = finished
    steps = sorted(int(path.name.split("-")[1]) for path in reference.glob("checkpoint-*"))
    assert len(steps) > 3
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    for step in steps[2:]:
        shutil.rmtree(run / f"checkpoint-{step}")
    for name in ("results.json", "model.safetensors"):
        (run / name).unlink()
    text = (run / "recipe.yaml").read_text(encoding="utf-8").replace(str(reference), str(run))
    (run / "recipe.yaml").write_text(text, encoding="utf-8")
    caplog.set_level(logging.INFO, logger="hf_deepwide")
    run_masked_lm(recipe_of(data, run))
    assert f"resuming from checkpoint-{steps[1]}" in caplog.messages
    ours, theirs = load_file(run / "model.safetensors"), load_file(reference / "model.safetensors")
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_other_text_is_refused_on_resume(finished, data, tmp_path):
    reference, _ = finished
    run, other = tmp_path / "run", tmp_path / "data"
    shutil.copytree(reference, run)
    shutil.copytree(data, other)
    (run / "results.json").unlink()
    shutil.rmtree(sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[-1])
    recipe = recipe_of(other, run)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe.values, sort_keys=False), encoding="utf-8")
    (other / "train.de").write_text("ein anderer Satz\n" * 160, encoding="utf-8")
    with pytest.raises(UserError, match=r"the training data have changed"):
        run_masked_lm(recipe)


def test_the_script_and_the_pipeline(finished, data, tmp_path, capsys):
    run, _ = finished
    script = SCRIPT.with_name("train_masked_lm.py")
    path = write_recipe(tmp_path, values(data, run))
    with pytest.raises(SystemExit):
        run_script_here(script, str(path))
    assert "finished run" in capsys.readouterr().err
    overrides = ["--training.max_steps", "2", "--training.save_steps", "2", "--training.eval_strategy", "no"]
    overrides += ["--training.warmup_steps", "1"]
    one = ["--data.posteriors", "none", "--data.test", "null", "--training.output_dir", str(tmp_path / "one")]
    run_script_here(script, str(path), *overrides, *one)
    printed = capsys.readouterr().out
    assert "validation  perplexity de" in printed
    assert "test  " not in printed
    fill = pipeline("fill-mask", model=str(tmp_path / "one"))
    assert len(fill("am <mask> Mai", top_k=3)) == 3


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_text_is_read_before_a_tokenizer_is_trained(split, finished, data, tmp_path, monkeypatch):
    """The finished run that was to be overwritten stays, too."""
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    monkeypatch.setattr(masked_lm, "load_or_train", lambda *_: pytest.fail("a tokenizer was trained"))
    for language, text in (("en", b"one"), ("de", b"\xff")):
        (tmp_path / f"bad.{language}").write_bytes(text)
    wrong = values(data, run)
    wrong["data"][split] = str(tmp_path / "bad")
    with pytest.raises(UserError, match=r"bad\.de, line 1"):
        run_masked_lm(check_recipe(wrong, "tiny", "tiny.yaml", MaskedLMRecipe), overwrite=True)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_a_base_in_half_precision_is_trained_in_float32(finished, data, tmp_path):
    reference, _ = finished
    base = tmp_path / "base"
    AutoModelForMaskedLM.from_pretrained(reference, dtype=torch.bfloat16).save_pretrained(base)
    sections = values(data, tmp_path / "run")
    sections["model"] = {"family": "latent_depth", "init_from": str(base)}
    sections["tokenizer"] = {"path": str(reference)}
    recipe = check_recipe(sections, "tiny", "tiny.yaml", MaskedLMRecipe)
    model = new_model(recipe, AutoTokenizer.from_pretrained(reference), recipe.training_arguments())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_run_starts_from_a_base_of_its_family_or_of_one_that_it_is_made_from(finished, data, tmp_path):
    """A RoBERTa becomes a MAT with the same logits. A base of another family is refused."""
    reference, _ = finished
    tokenizer = AutoTokenizer.from_pretrained(reference)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = RobertaConfig(vocab_size=len(tokenizer), type_vocab_size=1, layer_norm_eps=1e-5, **ids, **sizes)
    base = scramble(RobertaForMaskedLM(config)).eval()
    base.save_pretrained(tmp_path / "base")

    def start(family: str) -> torch.nn.Module:
        sections = values(data, tmp_path / "run")
        sections["model"] = {"family": family, "init_from": str(tmp_path / "base")}
        sections["data"]["posteriors"] = "none"
        sections["tokenizer"] = {"path": str(reference)}
        recipe = check_recipe(sections, "tiny", "tiny.yaml", MaskedLMRecipe)
        return new_model(recipe, tokenizer, recipe.training_arguments()).eval()

    model, tokens = start("mat_roberta"), tokenizer("one two three", return_tensors="pt")["input_ids"]
    assert model.config.model_type == "mat_roberta"
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, base(tokens).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(
        UserError, match=r"tiny\.yaml: model\.init_from .* is a roberta; model\.family says latent_depth"
    ):
        start("latent_depth")


def test_a_base_is_refused_before_the_text_is_read(finished, data, tmp_path):
    reference, _ = finished
    sections = values(data, tmp_path / "run")
    sections["data"] |= {"train": "nowhere"}
    sections["tokenizer"] = {"path": str(reference)}
    for model, told in (
        ({"family": "latent_depth", "activation_function": "silu"}, "model.activation_function cannot be 'silu'"),
        ({"family": "mat_roberta"}, "it is a latent_depth; accepted: roberta"),
    ):
        sections["model"] = {**model, "init_from": str(reference)}
        with pytest.raises(UserError, match=told):
            run_masked_lm(check_recipe(sections, "tiny", "tiny.yaml", MaskedLMRecipe))


# Masking


@pytest.fixture(scope="module")
def tokenizer(finished):
    return AutoTokenizer.from_pretrained(finished[0])


def test_masks_are_berts(tokenizer):
    """15 % of real tokens are labels: 80 % <mask>, 10 % random, 10 % unchanged. All other tokens stay."""
    collator = MaskingCollator(tokenizer, 0.15)
    generator = torch.Generator().manual_seed(0)
    special = set(tokenizer.all_special_ids)
    rows = []
    for length in torch.randint(20, 60, (800,), generator=generator).tolist():
        ids = torch.randint(5, 190, (length,), generator=generator).tolist()
        rows.append({"input_ids": [*ids, tokenizer.eos_token_id], "posterior": length % 2})
    batch = collator(rows)
    originals = collator._pad([row["input_ids"] for row in rows], tokenizer.pad_token_id)
    assert batch["input_ids"].shape[1] % 8 == 0
    assert batch["posteriors"].tolist() == [row["posterior"] for row in rows]
    assert torch.equal(batch["attention_mask"], (originals != tokenizer.pad_token_id).long())
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], originals[chosen])
    assert torch.equal(batch["input_ids"][~chosen], originals[~chosen])
    assert not special & set(originals[chosen].tolist())
    real = sum(len(row["input_ids"]) - 1 for row in rows)
    assert chosen.sum() / real == pytest.approx(0.15, abs=0.01)
    seen = batch["input_ids"][chosen]
    masked = seen == tokenizer.mask_token_id
    assert masked.float().mean() == pytest.approx(0.8, abs=0.03)
    assert (seen == originals[chosen]).float().mean() == pytest.approx(0.1, abs=0.02)


def test_masks_change_with_epoch_and_seed_alone(tokenizer):
    row = {"input_ids": [*range(10, 90), tokenizer.eos_token_id]}
    one, other = MaskingCollator(tokenizer, 0.3, seed=1), MaskingCollator(tokenizer, 0.3, seed=2)
    first = one([row])["labels"]
    torch.rand(5)
    assert torch.equal(one([row])["labels"], first)
    assert not torch.equal(other([row])["labels"], first)
    one.set_epoch(1)
    assert not torch.equal(one([row])["labels"], first)
    one.set_epoch(0)
    assert torch.equal(one([row])["labels"], first)
    given = {**row, "labels": [-100] * 80 + [7]}
    assert one([given])["labels"][0, :81].tolist() == given["labels"]
    assert one([given])["input_ids"][0, :81].tolist() == row["input_ids"]


def test_masks_follow_the_seed_of_the_data(data, tokenizer, tmp_path):
    recipe = recipe_of(data, tmp_path / "run", seed=3, data_seed=5, eval_strategy="no")
    args = recipe.training_arguments()
    trainer = MaskedLMTrainer(new_model(recipe, tokenizer, args), args, tokenizer, data=recipe.data)
    rows = [{"input_ids": [*range(10, 90), tokenizer.eos_token_id]}]
    plain = MaskingCollator(tokenizer, recipe.data.mask_probability, 5, args.pad_to_multiple_of)
    assert torch.equal(trainer.data_collator(rows)["labels"], plain(rows)["labels"])


def test_columns_are_read_whole(data, tokenizer, tmp_path, monkeypatch):
    """Row by row, a column takes a thousand times as long."""
    recipe = recipe_of(data, tmp_path / "run")
    rows = encode_texts(recipe.data, "validation", tokenizer)
    args = recipe.training_arguments()
    trainer = MaskedLMTrainer(new_model(recipe, tokenizer, args), args, tokenizer, None, rows, data=recipe.data)
    monkeypatch.setattr(Column, "__iter__", lambda column: pytest.fail("row by row"))
    loaders = dict(trainer.loaders_by_language(rows, "validation"))
    sizes = {language: len(loader.dataset) for language, loader in loaders.items()}
    assert sizes == {language: rows["pair"][:].count(index) for index, language in enumerate(recipe.data.languages)}


def test_held_out_text_of_which_nothing_is_predicted_is_refused(data, tokenizer, tmp_path):
    """Such text would have no loss."""
    for language in ("en", "de"):
        (tmp_path / f"short.{language}").write_text("the cat\n")
    args = MonolingualArguments(["en", "de"], "short", "short", root=str(tmp_path), mask_probability=0.0001)
    with pytest.raises(UserError, match=r"data\.validation: no token in en, de was drawn to be predicted"):
        encode_texts(args, "validation", tokenizer)
    assert len(encode_texts(args, "train", tokenizer)) == 2

    (tmp_path / "long.en").write_text("the cat sleeps on the mat\n" * 20)
    (tmp_path / "long.de").write_text("the\n")  # the perplexity of this language would be undefined
    args = MonolingualArguments(["en", "de"], "long", "long", root=str(tmp_path), mask_probability=0.05)
    with pytest.raises(UserError, match=r"data\.validation: no token in de was drawn"):
        encode_texts(args, "validation", tokenizer)


def test_a_language_of_which_no_line_is_short_enough_is_refused(tokenizer, tmp_path):
    """The language would be evaluated, but never trained. Held-out lines that are too long are cut instead."""
    (tmp_path / "some.en").write_text("the cat\n")
    (tmp_path / "some.de").write_text("the cat sits on the mat and looks at the dog\n")
    args = MonolingualArguments(["en", "de"], "some", "some", root=str(tmp_path), max_length=8, mask_probability=0.9)
    with pytest.raises(UserError, match=r"data.train: no sequence in de has at most 8 tokens; raise data.max_length"):
        encode_texts(args, "train", tokenizer)
    assert encode_texts(args, "validation", tokenizer)["pair"][:] == [0, 1]


def test_text_is_encoded_in_parts(data, tokenizer, monkeypatch):
    args = MonolingualArguments(["en", "de"], "train", "heldout", "train", root=str(data), max_length=100)
    whole = {split: encode_texts(args, split, tokenizer) for split in ("train", "validation")}
    monkeypatch.setattr(monolingual, "CHUNK", 7)
    for split, rows in whole.items():
        assert encode_texts(args, split, tokenizer).to_dict() == rows.to_dict()


def test_lines_that_are_empty_or_too_long(data, tokenizer, caplog):
    caplog.set_level("INFO", "hf_deepwide")
    args = MonolingualArguments(
        ["en", "de"], "train", "heldout", "train", root=str(data), posteriors="language", max_length=100
    )
    texts = list(read_texts(args, "train"))
    assert len(texts) == 240 + 161
    train, test = encode_texts(args, "train", tokenizer), encode_texts(args, "test", tokenizer)
    assert len(train) == 240 + 160
    assert (len(test), max(test["source_length"])) == (240 + 161, 100)
    assert "train: 401 sequences read; 1 of more than 100 tokens left out" in caplog.text
    assert "test: 401 sequences read; 1 of more than 100 tokens cut" in caplog.text
    assert sorted(set(zip(train["pair"], train["posterior"], strict=True))) == [(0, 0), (1, 1)]
    assert "labels" not in train.column_names
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in train["input_ids"][:3]] == [
        text for _, text in texts[:3]
    ]


# Recipes


@pytest.mark.parametrize("name", RECIPES)
def test_packaged_recipes_load(name, tmp_path):
    recipe = load_recipe(name, ["--training.output_dir", str(tmp_path)], MaskedLMRecipe)
    arguments = recipe.training_arguments()
    assert arguments.label_smoothing_factor == 0
    LatentDepthConfig(**recipe.model_fields)


def test_recipes_of_table_2_have_its_parameters():
    """LL Table 2: 202, 372 and 712 million (201.857, 371.966 and 712.184 by closed form, without the posteriors)."""
    expected = {"24": 201.857, "48": 371.966, "96": 712.184}
    for layers, millions in expected.items():
        recipe = load_recipe(
            SCRIPT.parent / f"recipes/masked_lm/wikipedia25_masked_lm_{layers}.yaml", [], MaskedLMRecipe
        )
        with torch.device("meta"):
            model = LatentDepthForMaskedLM(LatentDepthConfig(vocab_size=40000, **recipe.model_fields))
        assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.002)
        assert len(recipe.data.languages) == 25


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        ("model", {"family": "mat"}, ["model.family", "'mat'", "'mat_roberta'"]),
        ("model", {"num_posteriors": 0}, ["num_posteriors", "got 0"]),
        ("data", {"languages": ["en", "en"]}, ["data.languages", "once"]),
        ("data", {"languages": []}, ["data.languages"]),
        ("data", {"posteriors": "target"}, ["data.posteriors", "language, none"]),
        ("data", {"mask_probability": 1.5}, ["data.mask_probability", "1.5"]),
        ("data", {"max_length": 1}, ["data.max_length", "1"]),
        ("data", {"sampling_temperature": 0.5}, ["data.sampling_temperature", "0.5"]),
        ("data", {"sampling_temperature": float("nan")}, ["data.sampling_temperature", "nan"]),
        ("data", {"train": None}, ["data.train", "not set"]),
        ("data", {"source_lang": "en"}, ["data", "'source_lang'"]),
        ("training", {"predict_with_generate": True}, ["training.predict_with_generate", "nothing is generated"]),
        ("training", {"dataloader_persistent_workers": True}, ["dataloader_persistent_workers", "each epoch"]),
        ("training", {"label_smoothing_factor": 0.1}, ["training.label_smoothing_factor", "cross-entropy"]),
    ],
)
def test_what_a_recipe_refuses(section, fields, words, tmp_path):
    sections = values(tmp_path, tmp_path / "run")
    sections[section] |= fields
    with pytest.raises(UserError) as error:
        check_recipe(sections, "tiny", "tiny.yaml", MaskedLMRecipe)
    for word in ["tiny.yaml", *words]:
        assert word in str(error.value)


def test_files_that_are_missing(data, tmp_path):
    with pytest.raises(UserError, match=r"no file .*nowhere\.en or nowhere\.en\.gz"):
        next(read_texts(MonolingualArguments(["en"], "nowhere", "heldout", root=str(data)), "train"))
    with pytest.raises(UserError, match=r"data\.test is not set"):
        next(read_texts(MonolingualArguments(["en"], "train", "heldout", root=str(data)), "test"))
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize(("split", "told"), [("validation", "data.validation, de"), ("test", "data.test, de")])
def test_a_language_with_too_little_text_for_the_processes_is_told_before_training(
    split, told, data, tmp_path, monkeypatch
):
    (tmp_path / "few.en").write_text("one\ntwo\n" * 10, encoding="utf-8")
    (tmp_path / "few.de").write_text("eins\n", encoding="utf-8")
    wrong = values(data, tmp_path / "run")
    wrong["data"][split] = str(tmp_path / "few")
    recipe = check_recipe(wrong, "tiny", "tiny.yaml", MaskedLMRecipe)
    monkeypatch.setattr(MaskedLMTrainingArguments, "world_size", 8)
    monkeypatch.setattr(MaskedLMTrainer, "train", lambda *_, **__: pytest.fail("it was trained"))
    with pytest.raises(UserError, match=f"^{told}: 1 pair cannot make a multiple of 8 batches"):
        run_masked_lm(recipe)
