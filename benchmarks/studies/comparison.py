"""A study's tests over sentences: which runs they pair, and which results are kept."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from definition import Study, recipe_of
from records import PRUNED, read_translations
from selection import Rows, has_pairs

from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.durable import write_whole
from hf_deepwide.evaluation.significance import compare_systems

COMPARISON = "comparison.json"


def compare(study: Study, rows: Rows, results: Path) -> None:
    """Test each system against its baseline over sentences, on the seeds that both systems have.

    A test is kept if its translations have not changed, or are not on this machine. If the runs translate several
    language pairs, there is no test, because the score is a mean. `hf-deepwide compare` tests the translations of each
    pair.
    """
    if has_pairs(rows):
        return
    kept, translations = load_comparison(results), read_translations(results)
    comparison = {}
    for name in rows:
        pair = paired_runs(study, rows, name)
        if not pair["seeds"]:
            continue
        known = pair.items() <= kept.get(name, {}).items()
        if not all(run in translations for run in itertools.chain(*pair["runs"])):
            comparison |= {name: kept[name]} if known else {}
            continue
        pair["digest"] = digest_of(translations[run] for run in itertools.chain(*pair["runs"]))
        if known and kept[name].get("digest") == pair["digest"]:
            comparison[name] = kept[name]
        else:
            recipe = recipe_of(study, study.systems[0], study.search[-1], {}, study.seeds[0], Path("runs"))
            ours, theirs = ([line for run in runs for line in translations[run]] for runs in pair["runs"])
            tests = compare_systems(
                theirs,
                ours,
                load_parallel(recipe.data, "test")["target"][:],
                runs=len(pair["seeds"]),
                **recipe.evaluation.scoring(recipe.data.target_lang) | {"metrics": [study.metric, study.beside]},
            )
            comparison[name] = {**pair, **tests}
    if comparison:
        write_whole(results / COMPARISON, json.dumps(comparison, indent=1) + "\n")


def digest_of(texts: Iterable[list[str]]) -> str:
    """A short digest of texts, each a list of lines."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:16]


def load_comparison(results: Path) -> dict[str, dict[str, Any]]:
    """The paired tests that were made so far."""
    file = results / COMPARISON
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def baseline_of(study: Study, name: str) -> str | None:
    """The system that a row is compared with, if any. A pruned model has the baseline of its system."""
    return study.baseline_of(study.system(name.removeprefix(PRUNED)))


def paired_runs(study: Study, rows: Rows, name: str) -> dict[str, Any]:
    """The seeds that a system and its baseline share, and the names of the runs: the system's, then the baseline's."""
    theirs = rows.get(baseline_of(study, name) or "", {})
    seeds = sorted(rows[name].keys() & theirs.keys())
    return {"seeds": seeds, "runs": [[runs[seed]["run"] for seed in seeds] for runs in (rows[name], theirs)]}
