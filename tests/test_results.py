"""Every figure of the README's results comes from a committed results file."""

import importlib.util
import json
from pathlib import Path

import pytest

from hf_deepwide.training.recipe import load_recipe

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("multi30k", ROOT / "benchmarks" / "multi30k.py")
multi30k = importlib.util.module_from_spec(spec)
spec.loader.exec_module(multi30k)


def test_the_table_is_what_the_results_say():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    printed = readme.partition(multi30k.BEGIN)[2].partition(multi30k.END)[0]
    assert printed == multi30k.table()


@pytest.mark.parametrize("run", multi30k.SYSTEMS)
def test_a_run_is_of_its_committed_recipe(run):
    """Nothing was changed between the recipe and the run but where it was written."""

    ran = json.loads((multi30k.RESULTS / f"{run}.json").read_text(encoding="utf-8"))["recipe"]
    recipe = load_recipe(str(ROOT / "scripts" / "recipes" / f"multi30k_en_de_{run}.yaml"), []).values
    for section, values in ran.items():
        ours = {**recipe[section]}
        for place in ("output_dir", "root"):
            values.pop(place, None)
            ours.pop(place, None)
        assert values == ours


def test_cards_hold_no_sentence_of_the_corpus():
    card = "a\n| source | translation | reference |\n|---|---|---|\n| Two dogs. | Zwei Hunde. | x |\n\n## b\n"
    assert "dogs" not in multi30k.card_without_samples(card)
