"""Several test sets in one run: scores of each set and of all sentences, and validation losses of the model."""

import json
import math

import pytest
import torch
import yaml
from digit_corpus import SIZES, write_digits
from huggingface_hub import ModelCard
from tiny_run import tiny_values
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.corpora import load_parallel, local_files
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.loading import load_model, load_tokenizer
from hf_deepwide.runs.compare import compare_runs
from hf_deepwide.runs.recipe import check_recipe, load_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide_cli.train import train_translation


@pytest.fixture
def corpus(tmp_path):
    return write_digits(tmp_path)


def recipe(corpus, **training):
    values = tiny_values(corpus / "run", "vanilla_transformer", max_steps=4, warmup_steps=2, **training)
    values["data"] = {"root": str(corpus), "train": "train", "validation": "val", "test": ["one", "two"]}
    values["tokenizer"] = {"vocab_size": 60}
    values["evaluation"]["metrics"] = ["bleu", "chrf"]
    return values


def test_each_test_set_is_scored_alone_and_all_together(corpus, capsys):
    values = recipe(corpus, bf16=False)
    (corpus / "tiny.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    train_translation(str(corpus / "tiny.yaml"), [], overwrite=False)
    results = json.loads((corpus / "run" / "results.json").read_text(encoding="utf-8"))
    printed = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    begin = printed.index("one")
    assert printed[begin : begin + 6] == ["one", "one", "two", "two", "all together bleu", "all together chrf"]
    lines = (corpus / "run" / "translations.txt").read_text(encoding="utf-8").splitlines()
    references = [
        line for name in ("one", "two") for line in (corpus / f"{name}.de").read_text(encoding="utf-8").splitlines()
    ]
    assert results["test"]["sentences"] == len(lines) == 8
    assert results["test"]["chrf"] == score(lines, references, metrics=["chrf"])["chrf"]
    for name, part in (("one", slice(0, 5)), ("two", slice(5, 8))):
        expected = score(lines[part], references[part], metrics=["bleu", "chrf"])
        assert results["test"]["sets"][name] == expected
    for name in ("one", "two"):
        expected = results["test"]["sets"][name]["chrf"]
        compared = compare_runs([f"{corpus}/run", f"{corpus}/run/translations.txt"], metrics=["chrf"], test_set=name)
        assert [each.scores for each in compared] == [[expected], [expected]]
    with pytest.raises(UserError, match="was tested on one, two"):
        compare_runs([f"{corpus}/run", f"{corpus}/run/translations.txt"], metrics=["chrf"], test_set="three")
    card = ModelCard.load(corpus / "run" / "README.md")
    found = {(each.dataset_config, each.metric_type): each.metric_value for each in card.data.eval_results}
    assert set(found) == {(name, metric) for name in ("one", "two") for metric in ("sacrebleu", "chrf")}
    for name, sentences in (("one", 5), ("two", 3)):
        scores = results["test"]["sets"][name]
        assert found[name, "sacrebleu"] == round(scores["bleu"], 2)
        assert f"| {name} | {sentences} | {scores['bleu']:.2f} | {scores['chrf']:.2f} |" in card.text
    assert f"| all together | 8 | {results['test']['bleu']:.2f} | {results['test']['chrf']:.2f} |" in card.text

    model, tokenizer = load_model(AutoModelForSeq2SeqLM, corpus / "run"), load_tokenizer(corpus / "run")
    total = tokens = smooth = 0.0
    for line in range(SIZES["val"]):  # one sentence at a time
        pair = [
            (corpus / f"val.{language}").read_text(encoding="utf-8").splitlines()[line] for language in ("en", "de")
        ]
        batch = tokenizer(pair[0], text_target=pair[1], return_tensors="pt")
        with torch.no_grad():
            logits = model(**batch).logits[0].log_softmax(-1)
        total -= logits.gather(1, batch["labels"][0][:, None]).sum().item()
        smooth -= logits.mean(-1).sum().item()
        tokens += batch["labels"].numel()
    losses = results["validation"]
    assert losses["nll"] == pytest.approx(total / tokens, rel=1e-5)
    assert losses["loss"] == pytest.approx((0.9 * total + 0.1 * smooth) / tokens, rel=1e-5)
    assert results["train"]["processor_minutes"] > 0

    values["evaluation"]["num_beams"] = 2
    again = run_recipe(check_recipe(values, "tiny", "tiny.yaml"))
    assert again["validation"] == losses


def test_a_run_that_was_killed_while_it_was_scored_keeps_its_losses(corpus):
    first = run_recipe(check_recipe(recipe(corpus), "tiny", "tiny.yaml"))
    (corpus / "run" / "results.json").unlink()
    again = run_recipe(check_recipe(recipe(corpus), "tiny", "tiny.yaml"))
    assert again["validation"] == pytest.approx(first["validation"])
    assert math.isfinite(again["validation"]["nll"])


def test_places_of_test_sets(corpus):
    data = DataArguments(root=str(corpus), test=["one", "two"])
    assert load_parallel(data, "test")["test_set"][:] == [0] * 5 + [1] * 3
    assert [path.name for path in local_files(data, "test")] == ["one.en", "one.de", "two.en", "two.de"]
    assert list(DataArguments(test=["a/test", "b/test"]).test_sets) == ["a/test", "b/test"]
    assert list(DataArguments(test=["a/one", "b/two"]).test_sets) == ["one", "two"]
    assert DataArguments(test="one").test_sets == {}
    for wrong in ({"test": []}, {"test": ["one", "one"]}, {"test": ["one"], "pairs": ["en-de"]}):
        with pytest.raises(UserError, match=r"data\.test"):
            DataArguments(**wrong)


def test_a_recipe_file_may_list_test_sets(corpus, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(corpus)), encoding="utf-8")
    assert list(load_recipe(str(file)).data.test_sets) == ["one", "two"]
    assert list(load_recipe(str(file), ["--data.test", "[two]"]).data.test_sets) == ["two"]
