"""Every figure of the README's results comes from a committed results file."""

import importlib.util
import json
from pathlib import Path

import pytest

from hf_deepwide.training.recipe import load_recipe

ROOT = Path(__file__).parent.parent


def benchmark(name):
    """A script of benchmarks/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


multi30k, latent_depth = benchmark("multi30k"), benchmark("latent_depth")
depthwise_lstm = benchmark("depthwise_lstm")


def test_the_table_is_what_the_results_say():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    printed = readme.partition(multi30k.BEGIN)[2].partition(multi30k.END)[0]
    assert printed == multi30k.table()


@pytest.mark.parametrize("part", ["one_to_many", "deep"])
def test_latent_depth_tables_are_what_the_results_say(part):
    report = json.loads((latent_depth.RESULTS / f"{part}.json").read_text(encoding="utf-8"))
    printed = (latent_depth.RESULTS / f"{part}.md").read_text(encoding="utf-8")
    assert printed == getattr(latent_depth, f"{part}_table")(report)
    assert printed in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("part", list(depthwise_lstm.TABLES))
def test_depthwise_lstm_tables_are_what_the_results_say(part):
    report = json.loads((depthwise_lstm.RESULTS / f"{part}.json").read_text(encoding="utf-8"))
    printed = (depthwise_lstm.RESULTS / f"{part}.md").read_text(encoding="utf-8")
    assert printed == depthwise_lstm.TABLES[part](report)
    assert printed in (ROOT / "README.md").read_text(encoding="utf-8")


def recipes_of_runs():
    """Name of each recipe, and what the committed results say was run."""
    for run in multi30k.SYSTEMS:
        results = json.loads((multi30k.RESULTS / f"{run}.json").read_text(encoding="utf-8"))
        yield f"multi30k_en_de_{run}", results["recipe"]
    report = json.loads((latent_depth.RESULTS / "one_to_many.json").read_text(encoding="utf-8"))
    for run, results in report["runs"].items():
        yield run, results["recipe"]


@pytest.mark.parametrize(("name", "ran"), recipes_of_runs())
def test_a_run_is_of_its_committed_recipe(name, ran):
    """Nothing was changed between the recipe and the run but where it was written."""

    recipe = load_recipe(str(ROOT / "scripts" / "recipes" / f"{name}.yaml"), []).values
    for section, values in ran.items():
        ours = {**recipe[section]}
        for place in ("output_dir", "root"):
            values.pop(place, None)
            ours.pop(place, None)
        assert values == ours


def test_cards_hold_no_sentence_of_the_corpus():
    card = "a\n| source | translation | reference |\n|---|---|---|\n| Two dogs. | Zwei Hunde. | x |\n\n## b\n"
    assert "dogs" not in multi30k.card_without_samples(card)
    for languages in ("", ', src_lang="en", tgt_lang="de"'):
        use = f'translator("Two dogs."{languages})\n# [{{"translation_text": "Zwei Hunde."}}]\n```\n'
        assert multi30k.card_without_samples(use) == "```\n"
