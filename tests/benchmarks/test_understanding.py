"""The report of `benchmarks/understanding.py`: what it reads, and what it computes from runs."""

import gzip
import json
import statistics
from pathlib import Path

import understanding
from scipy.stats import ttest_ind

PLAIN = [68.0, 69.0, 70.0, 71.0, 72.0]  # per cent, as runs write it


def write_run(runs, task, system, accuracy):
    folder = Path(understanding.fine_tuning(runs, task, system)["training"]["output_dir"])
    folder.mkdir(parents=True)
    scores = [{"accuracy": value, "f1": value / 2} for value in accuracy]
    seeds = [{"validation": score, "test": score} for score in scores]
    results = {"seeds": seeds, "parameters": 5_000_000, "machine": {}, "versions": {}}
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


def test_reads_the_sentences_of_texts_and_tables(tmp_path):
    (tmp_path / "text.en").write_text("one\ttwo\n", encoding="utf-8")
    (tmp_path / "train.tsv").write_text("sentence\tlabel\ngood film\t1\n", encoding="utf-8")
    (tmp_path / "mrpc").mkdir()
    (tmp_path / "mrpc" / "train.txt").write_text("Quality\t#1 String\t#2 String\n1\ta\tb\n", encoding="utf-8")
    assert list(understanding.sentences(tmp_path / "text.en")) == ["one\ttwo"]
    assert list(understanding.sentences(tmp_path / "train.tsv")) == ["good film"]
    assert list(understanding.sentences(tmp_path / "mrpc" / "train.txt")) == ["a", "b"]


def test_compares_finished_runs_with_plain_fine_tuning(tmp_path):
    """Holm's correction doubles the smaller of two p values. The larger p becomes at least this doubled value."""
    better, same = ([value + add for value in PLAIN] for add in (10, 0.1))
    for system, accuracy in zip(list(understanding.SYSTEMS)[:3], (PLAIN, better, same), strict=True):
        write_run(tmp_path, "mrpc", system, accuracy)
    for split, labels in (("train", "110"), ("test", "10111")):
        file = tmp_path / understanding.TASKS["mrpc"]["data"][split]
        file.parent.mkdir(exist_ok=True)
        with gzip.open(file, "wt", encoding="utf-8") as lines:
            lines.write("Quality\t#1 String\n" + "".join(f"{label}\ta\n" for label in labels))
    report = understanding.gather(tmp_path, list(understanding.TASKS), tmp_path)
    assert list(report["tasks"]) == ["mrpc"]
    small, large = (ttest_ind(ours, PLAIN, equal_var=False).pvalue for ours in (better, same))
    assert 2 * small < 0.0001
    rows = [line.split(" | ") for line in understanding.table(report).splitlines() if " M |" in line]
    (least,) = (line for line in understanding.table(report).splitlines() if "most frequent" in line)
    precision, recall = 4 / 5, 4 / 4
    f1 = 100 * 2 * precision * recall / (precision + recall)
    assert least == f"| the most frequent label |  | 80.00 | 80.00 | {f1:.2f} |  |  |"
    assert [row[2] for row in rows] == ["70.00", "80.00", "70.10"]
    assert rows[1][3] == f"80.00 ± {statistics.stdev(better):.2f}"
    assert [row[-1].strip(" |") for row in rows] == ["", "< 0.0001", f"{max(large, 2 * small):.4f}"]
    understanding.draw(report, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").is_file()


def test_systems_differ_in_branches_and_rate_alone(tmp_path):
    recipes = [understanding.fine_tuning(tmp_path, "sst2", system) for system in understanding.SYSTEMS]
    apart = [{**recipe["model"], "attention_branches": 0, "drop_branch": 0} for recipe in recipes]
    assert all(model == apart[0] for model in apart)
    assert len({recipe["training"]["output_dir"] for recipe in recipes}) == len(recipes)
