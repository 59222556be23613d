"""A multilingual run from recipe to card: its files, resuming, and its scores by the script."""

import json
import runpy
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import counted_updates, tiny_values
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from hf_deepwide import prune
from hf_deepwide.data import phrases
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.runs.build import build_model
from hf_deepwide.runs.model_card import card_of_results, write_model_card
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.training.checkpoints import checkpoints
from hf_deepwide.training.translation import TranslationTrainer

SCRIPT = Path(__file__).parents[2] / "scripts" / "evaluate_translation.py"
PAIRS = ["de-en", "en-de"]
LATENT = {"decoder_layers": 2, "latent_encoder": False, "layer_selection_init": 0.5, "inference_selection": "soft"}


def recipe(
    run: Path,
    family: str = "latent_depth",
    model: dict | None = None,
    data: dict | None = None,
    base: Path | None = None,
    **training,
):
    """A tiny recipe of two language pairs. The default is latent depth with a posterior for each target."""
    latent = LATENT if family == "latent_depth" else {}
    training = {"max_steps": 8, "predict_with_generate": True, "bf16": False} | training
    values = tiny_values(run, family=family, model={**latent, **(model or {})}, **training)
    values["data"] = {
        "format": "phrases", "pairs": PAIRS, "train_size": 200, "max_length": 128, "language_tag": "decoder",
        "posteriors": "target" if latent else "none", **(data or {}),
    }  # fmt: skip
    if base is not None:
        values["model"]["init_from"], values["tokenizer"] = str(base), {"path": str(base)}
    return check_recipe(values, "tiny", "tiny.yaml")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of 8 steps, and its results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("multilingual") / "run"
    results = run_recipe(recipe(run))
    yield run, results
    torch.set_num_threads(threads)


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def test_scores_are_those_of_each_pair(finished):
    run, results = finished
    test = results["test"]
    assert set(test) == {"sentences", "average", "pairs"}
    assert list(test["pairs"]) == PAIRS
    assert test["sentences"] == 2 * phrases.HELD_OUT
    for pair in PAIRS:
        references = build_phrases(*pair.split("-"), train_size=200)["test"]["target"][:]
        assert test["pairs"][pair] == score(lines(run / f"translations.{pair}.txt"), references)
    for metric, mean in test["average"].items():
        assert mean == pytest.approx(sum(test["pairs"][pair][metric] for pair in PAIRS) / 2)
    assert not (run / "translations.txt").exists()


def test_the_card_shows_a_pair_that_was_evaluated(finished, tmp_path):
    _, results = finished
    test = {**results["test"], "pairs": {"en-de": results["test"]["pairs"]["en-de"]}}
    one_way = recipe(tmp_path, data={"train_only_pairs": ["de-en"]})
    card = write_model_card(tmp_path, one_way, results | {"test": test}, [("one dog", "ein Hund", "ein Hund")])
    assert 'translator("one dog", src_lang="en", tgt_lang="de")' in card.read_text(encoding="utf-8")


def test_a_card_without_a_folder_needs_a_name(finished):
    _, results = finished
    values = results["recipe"]
    training = {key: value for key, value in values["training"].items() if key != "output_dir"}
    unnamed = results | {"recipe": values | {"training": training}}
    assert "# ours\n" in card_of_results(unnamed, "ours")
    with pytest.raises(UserError, match="give a name, as the recipe in the results sets no training"):
        card_of_results(unnamed)


def test_translations_are_the_models(finished):
    """Translate with the pipeline, from the run's folder alone, and with the pruned model of each language."""
    run, _ = finished
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    assert (model.config.num_posteriors, model.config.posterior_names) == (2, ["en", "de"])
    translator = pipeline("translation", model=str(run), device="cpu", max_new_tokens=8, num_beams=1)
    for pair in PAIRS:
        source_lang, target_lang = pair.split("-")
        sources = build_phrases(source_lang, target_lang, train_size=200)["test"]["source"][:3]
        expected = lines(run / f"translations.{pair}.txt")[:3]
        results = translator(sources, src_lang=source_lang, tgt_lang=target_lang)
        assert [" ".join(result["translation_text"].split()) for result in results] == [
            " ".join(line.split()) for line in expected
        ]
        small = prune(model, target_lang)
        tag = tokenizer.convert_tokens_to_ids(f"<2{target_lang}>")
        ids = small.generate(
            **tokenizer(sources[0], return_tensors="pt"), decoder_start_token_id=tag, max_new_tokens=8, num_beams=1
        )
        assert ids[0, 0] == tag
        assert tokenizer.decode(ids[0], skip_special_tokens=True).strip() == expected[0]


def test_log_and_card_speak_of_every_pair(finished):
    run, results = finished
    state = json.loads((checkpoints(run)[-1] / "trainer_state.json").read_text(encoding="utf-8"))
    evaluations = [entry for entry in state["log_history"] if "eval_bleu" in entry]
    assert evaluations
    for entry in evaluations:
        assert entry["eval_bleu"] == pytest.approx((entry["eval_bleu_de-en"] + entry["eval_bleu_en-de"]) / 2)
    card = (run / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlanguage:\n- de\n- en\n")
    for pair in PAIRS:
        assert f"| {pair} | {results['test']['pairs'][pair]['bleu']:.2f} |" in card
    assert f"| average | {results['test']['average']['bleu']:.2f} |" in card
    assert 'src_lang="de", tgt_lang="en")' in card
    assert not [word for word in ("{{", "None", "nan") if word in card]


def test_the_card_has_the_mean_of_each_group(finished, tmp_path):
    run, results = finished
    means = {"average": {"bleu": 26.0, "chrf": 52.0}, "groups": {"en-xx (te)": {"bleu": 10.0, "chrf": 20.0}}}
    card = write_model_card(tmp_path, recipe(run), {**results, "test": {**results["test"], **means}}, [])
    text = card.read_text(encoding="utf-8")
    assert "|\n| average | 26.00 | 52.00 |\n| en-xx (te) | 10.00 | 20.00 |\n\n" in text


def test_an_interrupted_run_ends_with_the_same_weights(finished, tmp_path):
    reference, results = finished
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    (run / "results.json").unlink()
    shutil.rmtree(run / "checkpoint-8")
    newest = max(int(path.name.removeprefix("checkpoint-")) for path in checkpoints(run))
    with counted_updates() as made:
        again = run_recipe(recipe(run))
    assert made == list(range(newest + 1, 9))
    assert again["test"] == results["test"]
    theirs = load_file(reference / "checkpoint-8" / "model.safetensors")
    for name, tensor in load_file(run / "checkpoint-8" / "model.safetensors").items():
        assert torch.equal(tensor, theirs[name])


def test_a_control_run(tmp_path):
    """A Marian model with tags on the source."""
    options = {"predict_with_generate": False, "max_steps": 2, "eval_strategy": "no", "load_best_model_at_end": False}
    options["warmup_steps"] = 1
    results = run_recipe(
        recipe(tmp_path / "run", family="marian", data={"language_tag": "source", "test": None}, **options)
    )
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").config
    assert config.translation_pairs == {"de-en": {"tag": "<2en>"}, "en-de": {"tag": "<2de>"}}
    assert results["train"]["steps"] == 2


def test_the_trainer_repeats_small_pairs(finished, tmp_path):
    """With 90 and 30 sentences and an infinite temperature, each epoch has 90 sentences of each pair."""
    tokenizer = AutoTokenizer.from_pretrained(finished[0])
    texts = build_phrases("de", "en", train_size=200)["train"]
    for pair, count in (("de-en", 90), ("en-de", 30)):
        for language, column in (("de", "source"), ("en", "target")):
            text = "".join(f"{line}\n" for line in texts[column][:count])
            (tmp_path / f"{pair}.{language}").write_text(text, encoding="utf-8")
    place = {
        "format": "text", "root": str(tmp_path), "train": "{pair}", "sampling_temperature": float("inf"),
        "train_size": 25_000,  # the default, because only the format `phrases` has this key
    }  # fmt: skip
    options = {"predict_with_generate": False, "eval_strategy": "no", "load_best_model_at_end": False}
    unequal = recipe(tmp_path / "run", data=place, **options)
    args = unequal.training_arguments()
    trainer = TranslationTrainer(
        build_model(unequal, tokenizer, args),
        args,
        tokenizer,
        train_dataset=encode(load_parallel(unequal.data, "train"), tokenizer, unequal.data, filter=True),
        data=unequal.data,
    )
    tags = [tokenizer.convert_tokens_to_ids(tag) for tag in ("<2en>", "<2de>")]
    loader = trainer.get_train_dataloader()
    first_tokens = torch.cat([batch["decoder_input_ids"][:, 0] for batch in loader])
    posteriors = torch.cat([batch["posteriors"] for batch in loader])
    assert [(first_tokens == tag).sum() for tag in tags] == [90, 90]
    assert torch.bincount(posteriors).tolist() == [90, 90]


def evaluate(*words: str) -> None:
    with patch.object(sys, "argv", [str(SCRIPT), *words]):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_script_scores_all_pairs(finished, tmp_path, capsys):
    run, results = finished
    for pair in PAIRS:
        texts = build_phrases(*pair.split("-"), train_size=200)["test"]
        for side, column in zip(pair.split("-"), ("source", "target"), strict=True):
            text = "".join(f"{line}\n" for line in texts[column])
            (tmp_path / f"{pair}.{side}").write_text(text, encoding="utf-8")
    evaluate(
        "--model", str(run), "--pairs", *PAIRS, "--source", str(tmp_path / "{pair}.{source_lang}"),
        "--reference", str(tmp_path / "{pair}.{target_lang}"), "--translations", str(tmp_path / "{pair}.out"),
        "--output", str(tmp_path / "all.json"), "--num_beams", "1", "--max_length_factor", "0",
        "--max_length_offset", "8", "--device", "cpu",
    )  # fmt: skip
    report = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert report["average"][str(run)] == pytest.approx(results["test"]["average"])
    for pair in PAIRS:
        assert lines(tmp_path / f"{pair}.out") == lines(run / f"translations.{pair}.txt")
        assert report["pairs"][pair]["systems"][str(run)]["bleu"] == results["test"]["pairs"][pair]["bleu"]
    assert "average over 2 language pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pairs", "deen"], "--pairs: 'deen' is no language pair"),
        (["--pairs", *PAIRS, "--translations", "out.txt"], "put {pair} into its name"),
    ],
)
def test_mistakes_in_pairs_are_one_line(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        evaluate("--model", str(tmp_path), "--reference", "r", "--source", "s", *words)
    assert message in capsys.readouterr().err


def test_a_language_aware_run_translates_with_each_languages_norms(tmp_path):
    """The whole way from recipe to pipeline. The decoder's norms of the two targets differ after training."""
    run = tmp_path / "run"
    fields = {"language_aware": True, "normalize_before": False, "decoder_attention": "merged"}
    run_recipe(recipe(run, "vanilla_transformer", fields, {"posteriors": "target"}))
    model = AutoModelForSeq2SeqLM.from_pretrained(run)
    assert (model.config.num_posteriors, model.config.posterior_names) == (2, ["en", "de"])
    scales = model.model.decoder.layers[0].final_layer_norm.language_scale
    assert not torch.equal(scales[0], scales[1])
    translator = pipeline("translation", model=str(run), device="cpu", max_new_tokens=8, num_beams=1)
    for pair in PAIRS:
        source_lang, target_lang = pair.split("-")
        sources = build_phrases(source_lang, target_lang, train_size=200)["test"]["source"][:3]
        results = translator(sources, src_lang=source_lang, tgt_lang=target_lang)
        expected = lines(run / f"translations.{pair}.txt")[:3]
        assert [" ".join(result["translation_text"].split()) for result in results] == [
            " ".join(line.split()) for line in expected
        ]


def test_the_model_follows_the_data(finished, tmp_path):
    run, _ = finished
    tokenizer = AutoTokenizer.from_pretrained(run)
    wrong = recipe(tmp_path, model={"num_posteriors": 3})
    with pytest.raises(UserError, match=r"model\.num_posteriors: 3 contradicts the section data"):
        build_model(wrong, tokenizer, wrong.training_arguments())
    alone = recipe(tmp_path, model={"layer_prior": "aggregated"}, data={"posteriors": "none"})
    with pytest.raises(UserError, match=r"model\.layer_prior: aggregated .* set data\.pairs and data\.posteriors"):
        build_model(alone, tokenizer, alone.training_arguments())
    fields = {"language_aware": True, "normalize_before": False}
    alike = recipe(tmp_path, family="vanilla_transformer", model=fields, data={"posteriors": "none"})
    with pytest.raises(UserError, match=r"model\.language_aware: true .* set data\.posteriors to target"):
        build_model(alike, tokenizer, alike.training_arguments())
    none = recipe(tmp_path, family="mat", data={"posteriors": "target"})
    with pytest.raises(UserError, match=r"data\.posteriors: a model of the family mat has none"):
        build_model(none, tokenizer, none.training_arguments())
    plain = recipe(tmp_path, family="vanilla_transformer", data={"posteriors": "target"})
    with pytest.raises(UserError, match=r"in a recipe: `data\.posteriors`.*`language_aware=True`"):
        build_model(plain, tokenizer, plain.training_arguments())


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"pairs": PAIRS[::-1]}, "posteriors of the recipe are de, en, and those of the base are en, de"),
        ({"pairs": ["de-en", "en-fr"]}, "posteriors of the recipe are en, fr, and those of the base are en, de"),
        ({"posteriors": "none"}, r"the base has 2 posteriors \(en, de\).*set data\.posteriors"),
        (
            {"language_tag": "source"},
            r"data\.language_tag is 'source'.* decoder's first; .*language_tag: decoder",
        ),
    ],
)
def test_a_base_keeps_its_posteriors_and_tags(data, told, finished, tmp_path):
    """With another order, a language would use the layers of another language."""
    run, _ = finished
    with pytest.raises(UserError, match=told):
        run_recipe(recipe(tmp_path / "tuned", data=data, base=run))


def test_a_base_is_trained_on_in_its_own_way(finished, tmp_path):
    run, _ = finished
    asked = recipe(tmp_path / "tuned", base=run)
    model = build_model(asked, AutoTokenizer.from_pretrained(run), asked.training_arguments())
    base = AutoModelForSeq2SeqLM.from_pretrained(run)
    assert model.config.posterior_names == base.config.posterior_names == ["en", "de"]
    assert model.config.translation_pairs == base.config.translation_pairs
