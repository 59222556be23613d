"""Speed of a study's trained models beside its baseline: all in one process, taking turns.

    python benchmarks/quality/speed.py benchmarks/quality/multi30k.yaml --threads 1

The speeds that runs report of themselves were taken while other runs shared the machine. Here each system takes a
training step (forward, backward, clipping, AdamW; bf16; 256 sentences of 16 tokens, about the corpus's mean) and a
translation (float32; 32 sentences of 24 tokens, 4 beams, 40 tokens each) in each round; what counts is the median over
the rounds of the ratio to the baseline in the same round. Needs the runs of the study's first seed, each with the
setting that the search has chosen.
"""

import argparse
import json
import platform
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from kept_runs import PRUNED, best_setting, load_results, tried_by_all
from study import HERE, load_study, run_name
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide import prune
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.loading import load_model
from hf_deepwide.training.durable import write_whole
from hf_deepwide.training.memory import keep_memory

sys.path.insert(0, str(HERE.parent))
from generation_speed import NEW_TOKENS, seconds_to_generate
from multipath_speed import take_turns
from training_speed import training_step

SENTENCES, LENGTH = 256, 16  # of a training batch
SOURCES, SOURCE_LENGTH, BEAMS = 32, 24, 4  # of a translation


def main() -> None:
    """Load, take turns, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study, a YAML file")
    parser.add_argument("--runs", type=Path, default=Path("runs", "quality"), help="folder of the runs")
    parser.add_argument("--results", type=Path, help="folder for speed.json; default: results/STUDY beside this file")
    parser.add_argument("--rounds", type=int, default=7, help="measured turns of each system")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    study = load_study(args.study)
    results = args.results or HERE / "results" / study.name
    kept = load_results(study, results)
    chosen = best_setting(study, kept, tried_by_all(study, kept))
    models, pruned, runs = {}, {}, {}
    for system in study.systems:
        if system.name not in chosen:
            continue
        run = args.runs / study.name / run_name(system, chosen[system.name], study.seeds[0])
        if (run / "results.json").is_file():
            runs[system.name] = runs[f"{PRUNED}{system.name}"] = run.name
            models[system.name] = load_model(AutoModelForSeq2SeqLM, run, attn_implementation="eager")
            if system.prune:
                pruned[f"{PRUNED}{system.name}"] = prune(models[system.name])
    if study.baseline not in models:
        raise UserError(f"{args.runs / study.name}: no run of the baseline has ended; train it by study.py first")

    vocabulary = models[study.baseline].config.vocab_size
    tokens = torch.randint(4, vocabulary, (2, SENTENCES, LENGTH))
    batch = {"input_ids": tokens[0], "attention_mask": torch.ones_like(tokens[0]), "labels": tokens[1]}
    source = torch.randint(4, vocabulary, (SOURCES, SOURCE_LENGTH))
    translating = {
        name: partial(seconds_to_generate, model.eval(), source, BEAMS) for name, model in (models | pruned).items()
    }
    seconds = {"generation": take_turns(translating, args.rounds)}  # before training moves the weights
    training = {name: training_step(model.train(), batch, torch.bfloat16) for name, model in models.items()}
    seconds["training"] = take_turns(training, args.rounds)
    per_turn = {"generation": SOURCES * NEW_TOKENS, "training": SENTENCES * LENGTH}
    report = {
        "machine": f"{platform.machine()}, {args.threads} threads",
        "torch": torch.__version__,
        "rounds": args.rounds,
        "systems": {
            name: {"run": runs[name]}
            | {
                what: {
                    "tokens_per_second": per_turn[what] / statistics.median(of_system[name]),
                    "by_baseline": statistics.median(
                        theirs / ours for ours, theirs in zip(of_system[name], of_system[study.baseline], strict=True)
                    ),
                }
                for what, of_system in seconds.items()
                if name in of_system
            }
            for name in models | pruned
        },
    }
    write_whole(results / "speed.json", json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["systems"], indent=1))


if __name__ == "__main__":
    run_script(main)
