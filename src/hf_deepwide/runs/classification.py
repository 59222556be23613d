"""The task of classification: fine-tune a trained encoder on labelled sentences, with several seeds.

    run/seed-1/   checkpoints of the first seed, and its results.json
    run/          the model of the seed with the median validation score; its card; results.json of all seeds

Transformers' own `Trainer` trains each seed. An interrupted run resumes at the seed and the checkpoint where it
stopped.
"""

import json
import logging
import shutil
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import EvalPrediction

from ..analysis.learning_curves import plot_runs
from ..checkpoint_files import RESULTS, read_results
from ..data.classification import ClassificationArguments, class_names, encode_rows, hold_out, read_splits
from ..data.digest import data_digest
from ..data.tokenizer import TokenizerArguments, load_or_train
from ..durable import discard, saving, whole_files, write_whole
from ..errors import UserError, quote
from ..evaluation.classification import classification_scores
from ..families import ENCODERS
from ..loading import load_config, load_model, refusing_pickles
from ..lock import locked
from ..models.plain_text import positions
from ..training.arguments import REFUSED
from ..training.checkpoints import checkpoints, is_last, last_checkpoint, load_state
from ..training.classification import METRICS, ClassificationTrainer, ClassificationTrainingArguments
from ..warm_start_roberta import order_of_labels
from .build import check_same_tokens
from .encoder_card import write_classifier_card
from .facts import machine, versions
from .figures import seed_histories
from .masked_lm import check_base
from .recipe import Recipe, read_mark
from .run_folder import NEW, has_begun
from .seeds_folder import SeedsFolder
from .warm_up import WarmUpFits
from .written_files import CURVES

logger = logging.getLogger(__name__)


@dataclass
class ClassificationRecipe(Recipe):
    """A recipe for classification. It has no section `evaluation`, and other keys in `data` and `training`."""

    task: ClassVar[str] = "classification"
    sections: ClassVar[dict[str, type | None]] = {
        "model": None,
        "data": ClassificationArguments,
        "tokenizer": TokenizerArguments,
        "training": ClassificationTrainingArguments,
    }
    refused: ClassVar[dict[str, str]] = {
        "seed": "set training.seeds",
        "bpe_dropout": "it is for training translation models",
        "unigram_alpha": "it is for training translation models",
        "new_languages": "it is for training translation models",
        "problem_type": "each sentence has one class",
        **dict.fromkeys(("id2label", "label2id", "num_labels"), "the classes are those of the data; see data.labels"),
        "resume_from_checkpoint": "an interrupted run is resumed by itself",
        **{name: REFUSED[name] for name in REFUSED if name.startswith("hub_")},
        "push_to_hub": REFUSED["push_to_hub"],
        "greater_is_better": "the largest score is the best one",
        "save_only_model": REFUSED["save_only_model"],
        "dataloader_drop_last": "each row is trained on in each epoch",
        "deepspeed": REFUSED["deepspeed"],
        "label_names": REFUSED["label_names"],
        **dict.fromkeys(
            ("prediction_loss_only", "batch_eval_metrics", "eval_do_concat_batches"),
            "scores are of all predictions of a split together; leave it out",
        ),
    }

    comments: ClassVar[dict[str, dict[str, str]]] = {
        "model": {"family": "mat_roberta, or a family of Transformers with a classifier"},
        "tokenizer": {"path": "the base's tokenizer, folder or Hub id; no other key of this section then matters"},
        "training": {
            "label_smoothing_factor": "probability that is spread over all classes",
            "bf16": "bfloat16 autocast",
        },
    }

    evaluation: None = None

    @classmethod
    def families(cls) -> list[str]:
        """Model types with a classifier: those of this library, and Transformers' own for comparison."""
        return sorted({str(config.model_type) for config in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING} - {"None"})


def run_classification(recipe: ClassificationRecipe, overwrite: bool = False) -> dict[str, Any]:
    """Train a classifier with each seed, and return the content of `results.json`.

    Raises:
        UserError: the folder holds a finished run, or a run of another recipe, and `overwrite` is not set; another
            process uses the folder; something in the data, the tokenizer or the recipe is wrong; or training diverged.
        Interrupted: a signal ended training. The run has been saved, and can be resumed.
    """
    args, process = cast(ClassificationTrainingArguments, recipe.training_arguments()), PartialState()
    if recipe.init_from is None:
        raise UserError(f"{recipe.source}: model.init_from is not set; name a trained encoder to start from")
    args.tell_of_idle_gpus()
    run, data = recipe.output_dir, cast(ClassificationArguments, recipe.data)
    folder = SeedsFolder(run)
    if process.is_main_process:
        folder.check_start(recipe, overwrite)
    check_base(recipe)  # before the corpus is read
    splits = read_splits(data)
    names = class_names(data, splits)  # includes classes that occur only in rows that are then held out
    splits = hold_out(data, splits)
    tokenizer = load_or_train(recipe.tokenizer, iter(()), needs=("pad_token",))
    check_same_tokens(recipe, tokenizer)
    model = _new_model(recipe, args, names, args.seeds[0])  # reports its faults before anything is written
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{recipe.source}: tokenizer.path {quote(recipe.tokenizer.path)} has {len(tokenizer):,} entries, and the "
            f"base, model.init_from {quote(recipe.init_from)}, has embeddings for {model.config.vocab_size:,}; set "
            "tokenizer.path to the base"
        )
    if longest := _longest(model):
        data.max_length = min(data.max_length, longest)
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)  # `truncation=True` cuts to this
    encoded = {split: encode_rows(data, rows, names, tokenizer) for split, rows in splits.items()}
    if process.is_main_process:
        run.mkdir(parents=True, exist_ok=True)
    process.wait_for_everyone()
    with locked(run) if process.is_main_process else nullcontext():
        try:
            if process.is_main_process:
                folder.begin(recipe, overwrite, {split: data_digest(rows) for split, rows in encoded.items()})
            results_by_seed = _train_all(recipe, args, names, tokenizer, encoded, process)
        finally:
            if process.is_main_process and read_mark(run / NEW) is not None and not has_begun(run / NEW):
                discard(run / NEW)  # the new run ended before it saved anything
        results = _summary(recipe, args, results_by_seed, names, model.num_parameters())
        if process.is_main_process:
            chosen = run / f"seed-{results['chosen_seed']}"
            with saving(run), whole_files(run) as draft:
                for file in chosen.iterdir():
                    if file.is_file() and file.name != RESULTS:
                        shutil.copyfile(file, draft / file.name)
            write_classifier_card(run, recipe, results)
            curves = seed_histories(results)
            if any(curves.values()):  # a recipe need not validate during training
                plot_runs(curves, run / CURVES)
            write_whole(run / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        process.wait_for_everyone()
    return results


def _new_model(recipe: Recipe, args: ClassificationTrainingArguments, names: list[str], seed: int) -> PreTrainedModel:
    """The trained encoder with a classification head; the seed determines the weights of a new head."""
    set_seed(seed)
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    base, fields = str(recipe.init_from), recipe.model_fields
    if (family := ENCODERS.get(recipe.family)) is not None:
        model = family.classifier.from_base(base, **fields, **labels)
    else:
        prefix = f"{recipe.source}: model.init_from {quote(base)}"
        model = load_model(
            AutoModelForSequenceClassification,
            base,
            prefix,
            may_lack=lambda _: True,
            accept_unexpected=lambda _: True,
            **fields,
            **labels,
        )
        if order := order_of_labels(load_config(base, prefix), model.config):
            _reorder_head(model, order, prefix)
    model.set_attn_implementation(args.attn_implementation)
    return model.float()


def _reorder_head(model: PreTrainedModel, order: list[int], prefix: str) -> None:
    """Reorder the rows of a trained head to the new labels; `order` holds the base's index of each label."""
    body = f"{model.base_model_prefix}."
    heads = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == len(order) and not name.startswith(body)
    ]
    if len(heads) != 1:
        raise UserError(f"{prefix} has the same labels in another order; give data.labels in the order of its config")
    with torch.no_grad():
        for parameter in heads[0].parameters():
            parameter.copy_(parameter[order])


def _longest(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a sequence. RoBERTa and similar models count positions from the padding id on."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return module.num_embeddings - module.padding_idx - 1
    return positions(model.config)


def _train_all(
    recipe: Recipe,
    args: ClassificationTrainingArguments,
    names: list[str],
    tokenizer: PreTrainedTokenizerBase,
    encoded: dict[str, Dataset],
    process: PartialState,
) -> dict[int, dict[str, Any]]:
    """Train with each seed; return the results of each. Once the first seed is trained, it replaces an older run."""
    run, results_by_seed = recipe.output_dir, {}
    for seed in args.seeds:
        process.wait_for_everyone()
        folder = (run / NEW if (run / NEW).is_dir() else run) / f"seed-{seed}"
        results_by_seed[seed] = _train(recipe, args, seed, folder, names, tokenizer, encoded, process)
        process.wait_for_everyone()
        if process.is_main_process:
            SeedsFolder(run).finish_replacing()
    return results_by_seed


def _train(
    recipe: Recipe,
    args: ClassificationTrainingArguments,
    seed: int,
    folder: Path,
    names: list[str],
    tokenizer: PreTrainedTokenizerBase,
    encoded: dict[str, Dataset],
    process: PartialState,
) -> dict[str, Any]:
    """Train with one seed, or resume its training; if it is finished, read its results."""
    if (folder / RESULTS).is_file():
        return read_results(folder)
    own = cast(ClassificationTrainingArguments, recipe.training_arguments())
    own.output_dir, own.seed = str(folder), seed
    if process.is_main_process:
        last_checkpoint(folder)  # sets damaged checkpoints aside before the other processes look
    process.wait_for_everyone()
    last = next(reversed(checkpoints(folder)), None)
    logger.info("seed %d%s", seed, f": resuming from {last.name}" if last else "")

    def scores(prediction: EvalPrediction) -> dict[str, float]:
        chosen = np.asarray(prediction.predictions).argmax(-1)
        return classification_scores(chosen, np.asarray(prediction.label_ids), len(names))

    trainer = ClassificationTrainer(
        _new_model(recipe, args, names, seed),
        own,
        DataCollatorWithPadding(tokenizer),
        train_dataset=encoded["train"],
        eval_dataset=encoded["validation"],
        processing_class=tokenizer,
        compute_metrics=scores,
    )
    trainer.add_callback(WarmUpFits(recipe.source))
    with refusing_pickles(last):
        if last is not None and is_last(load_state(last)):
            trainer.read_back(last)
        else:
            trainer.train(resume_from_checkpoint=str(last) if last else None)
    results: dict[str, Any] = {"seed": seed, "steps": trainer.state.global_step, "epochs": trainer.state.epoch}
    results["curve"] = [
        [entry["step"], *(entry[f"eval_{name}"] for name in ("loss", *METRICS))]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    ]
    for split in ("validation", "test"):
        if split in encoded:
            found = trainer.evaluate(encoded[split], metric_key_prefix=split)
            results[split] = {name: found[f"{split}_{name}"] for name in ("loss", *METRICS)}
    if process.is_main_process:
        with saving(folder), whole_files(folder) as draft:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(draft)
            tokenizer.save_pretrained(draft)
        write_whole(folder / RESULTS, json.dumps(results, indent=2) + "\n")
        for checkpoint in folder.glob("*checkpoint-*"):
            discard(checkpoint)
    return results


def _summary(
    recipe: Recipe,
    args: ClassificationTrainingArguments,
    results_by_seed: dict[int, dict[str, Any]],
    names: list[str],
    parameters: int,
) -> dict[str, Any]:
    """The content of `results.json`: median (as in GLUE papers), mean and standard deviation over seeds, and more."""
    summary: dict[str, Any] = {"labels": names, "seeds": list(results_by_seed.values())}
    for split in ("validation", "test"):
        rows = [result[split] for result in results_by_seed.values() if split in result]
        if rows:
            summary[split] = {
                name: {
                    "median": statistics.median(values := [row[name] for row in rows]),
                    "mean": statistics.mean(values),
                    "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
                }
                for name in ("loss", *METRICS)
            }
    ordered = sorted(results_by_seed, key=lambda seed: results_by_seed[seed]["validation"][args.metric_for_best_model])
    return {
        **summary,
        "chosen_seed": ordered[(len(ordered) - 1) // 2],
        "parameters": parameters,
        "recipe": recipe.values,
        "versions": versions(),
        "machine": machine(),
    }
