"""`make quickstart`, the first command of README: it trains, scores, translates, and can be repeated."""

import json

from mistakes import SCRIPTS
from tiny_run import MODEL, run_script_here

SMALL = {
    **{f"model.{name}": value for name, value in MODEL.items()},
    **{
        "data.train_size": 300,
        "tokenizer.vocab_size": 200,
        "training.max_tokens": 512,
        "training.num_train_epochs": 1,
    },
    **{"training.warmup_steps": 2, "evaluation.num_beams": 1, "evaluation.max_length_factor": 0},
    **{"evaluation.max_length_offset": 8, "training.disable_tqdm": "true"},
}


def test_quickstart_can_be_repeated(tmp_path, capsys):
    run = tmp_path / "run"
    words = [f"--{key}={value}" for key, value in {**SMALL, "training.output_dir": run}.items()]
    results = []
    for _ in range(2):
        run_script_here(SCRIPTS / "quickstart.py", *words)
        printed = capsys.readouterr().out
        assert printed.count("(reference)") >= 6
        assert f"the checkpoint is {run}" in printed
        results.append(json.loads((run / "results.json").read_text(encoding="utf-8")))
    assert results[0]["test"] == results[1]["test"], "the second begins afresh, by the same seed"
    assert results[0]["train"]["steps"] == results[1]["train"]["steps"] > 0
    assert not (run / ".new").exists()
