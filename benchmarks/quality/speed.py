"""Speed of a study's models beside its baseline: all in one process, taking turns.

    python benchmarks/quality/speed.py benchmarks/quality/multi30k.yaml --threads 1

The speeds that runs report of themselves were taken while other runs shared the machine. Here each system takes a
training step (forward, backward, clipping, AdamW; 256 sentences of 16 tokens, about the corpus's mean) and a
translation (float32; 32 sentences of 24 tokens, 4 beams, 40 tokens each) in each round; what counts is the median over
the rounds of the ratio to the baseline in the same round. Training has the precision, and both have the attention,
that runs have on this processor (`bf16: auto`). Models are of the committed results' recipes, untrained: their weights
have no part in speed, but for how many layers a latent depth has left, which is set as the results say.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kept_runs import PRUNED, chosen, folder_of, load_results, trained
from study import HERE, load_study
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel, set_seed

from hf_deepwide import prune
from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.training.arguments import TranslationTrainingArguments
from hf_deepwide.training.memory import keep_memory
from hf_deepwide.training.run import machine

sys.path.insert(0, str(HERE.parent))
from generation_speed import NEW_TOKENS, seconds_to_generate
from multipath_speed import take_turns
from training_speed import training_step

SENTENCES, LENGTH = 256, 16  # of a training batch
SOURCES, SOURCE_LENGTH, BEAMS = 32, 24, 4  # of a translation


def untrained(run: dict[str, Any], vocabulary: int, attention: str) -> PreTrainedModel:
    """A model of the size that a run has trained.

    Raises:
        UserError: it has another number of parameters: this code makes other models than that which made the results.
    """
    fields = {key: value for key, value in run["recipe"]["model"].items() if key not in ("family", "init_from")}
    config = AutoConfig.for_model(run["recipe"]["model"]["family"], vocab_size=vocabulary, **fields)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention)
    if model.num_parameters() != run["parameters"]:
        raise UserError(
            f"{folder_of(run)} has {run['parameters']:,} parameters, and a model by its recipe now has "
            f"{model.num_parameters():,}; make the run again"
        )
    return model


@torch.no_grad()
def select_layers(model: PreTrainedModel, layers: dict[str, int]) -> None:
    """Let a latent-depth model keep as many layers of each stack, the lowest."""
    for stack, selection in model.layer_selections.items():
        selection.layer_logits.fill_(-1.0)
        selection.layer_logits[:, : layers[stack]] = 1.0


def make_models(
    runs: dict[str, dict[str, Any]], vocabulary: int, attention: str
) -> tuple[dict[str, PreTrainedModel], dict[str, PreTrainedModel]]:
    """Name to model: the systems, and those that are pruned."""
    trainable = {name: run for name, run in runs.items() if not name.startswith(PRUNED)}
    models = {name: untrained(run, vocabulary, attention) for name, run in trainable.items()}
    pruned = {}
    for name in [name for name in runs if name not in models]:
        select_layers(models[trained(name)], runs[name]["layers"])
        pruned[name] = prune(models[trained(name)])
    return models, pruned


def as_runs_have() -> tuple[torch.dtype, str]:
    """Precision of training, and attention, that runs have on this processor."""
    training = TranslationTrainingArguments(bf16="auto", use_cpu=True)
    return torch.bfloat16 if training.bf16 else torch.float32, training.attn_implementation


def training_batch(vocabulary: int) -> dict[str, torch.Tensor]:
    """Words at random."""
    tokens = torch.randint(4, vocabulary, (2, SENTENCES, LENGTH))
    return {"input_ids": tokens[0], "attention_mask": torch.ones_like(tokens[0]), "labels": tokens[1]}


def main() -> None:
    """Build, take turns, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study, a YAML file")
    parser.add_argument(
        "--results", type=Path, help="of the study, and for speed.json; default: results/STUDY beside this file"
    )
    parser.add_argument("--rounds", type=int, default=7, help="measured turns of each system")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    study = load_study(args.study)
    results = args.results or HERE / "results" / study.name
    _, rows = chosen(study, load_results(study, results))
    if study.baseline not in rows:
        raise UserError(f"{results}: no run of the baseline has ended; train it by study.py first")
    runs = {name: of_seeds[study.seeds[0]] for name, of_seeds in rows.items()}
    vocabulary = study.recipe["tokenizer"]["vocab_size"]
    set_seed(0)
    precision, attention = as_runs_have()
    models, pruned = make_models(runs, vocabulary, attention)
    batch = training_batch(vocabulary)
    source = torch.randint(4, vocabulary, (SOURCES, SOURCE_LENGTH))
    translating = {
        name: partial(seconds_to_generate, model.eval(), source, BEAMS) for name, model in (models | pruned).items()
    }
    seconds = {"generation": take_turns(translating, args.rounds)}  # before training moves the weights
    training = {name: training_step(model.train(), batch, precision) for name, model in models.items()}
    seconds["training"] = take_turns(training, args.rounds)
    per_turn = {"generation": SOURCES * NEW_TOKENS, "training": SENTENCES * LENGTH}
    report = {
        "machine": machine() | {"threads": args.threads},
        "torch": torch.__version__,
        "precision": str(precision).removeprefix("torch."),
        "attention": attention,
        "rounds": args.rounds,
        "systems": {
            name: {"run": folder_of(runs[name]), "parameters": runs[name]["parameters"]}
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
