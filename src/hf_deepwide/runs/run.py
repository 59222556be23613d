"""One run from raw text to a scored model with its card: what `scripts/train_translation.py` does.

What lies in its folder, and what may begin there, is in `run_folder.py`.
"""

import copy
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import GENERATION_CONFIG_NAME

from ..analysis.path_weights import path_weights, plot_path_weights
from ..data.batches import check_lengths, encode
from ..data.corpora import load_parallel
from ..data.languages import add_tags, set_codes
from ..data.tokenizer import load_or_train, training_texts
from ..durable import whole_files, why_not_written, write_whole
from ..errors import UserError
from ..evaluation.scoring import by_pair, translate_and_score
from ..loading import load_model, load_tokenizer, refusing_pickles
from ..training.arguments import TranslationTrainingArguments
from ..training.callbacks import Throughput, WarmUpFits
from ..training.checkpoints import check_weights, checkpoints, forget_interrupted, load_state
from ..training.trainer import TranslationTrainer
from .averaging import average_checkpoints
from .build import beam_search, build_model
from .model_card import write_model_card
from .plots import plot_learning_curves
from .recipe import RECIPE, Recipe, read_mark
from .run_folder import (
    CURVES,
    PATH_WEIGHTS,
    RESULTS,
    TRANSLATIONS,
    Replacing,
    Start,
    open_run,
    opened,
    resolved,
)
from .yaml_values import to_yaml

__all__ = ["CURVES", "RESULTS", "TRANSLATIONS", "open_run", "resolved", "run_recipe"]

logger = logging.getLogger(__name__)

STREAM_TEXTS, DATASET_TEXTS = 1_000_000, 10_000_000  # most pairs that a tokenizer is trained on
SAMPLES = 5  # test sentences in the model card
# The smallest corpus of Sennrich and Zhang 2019 (arXiv 1905.11901), from which a model that is set up as usual learnt
# nothing; even one that is made for little text needs it.
FEW = 5000


def run_recipe(recipe: Recipe, overwrite: bool = False) -> dict[str, Any]:
    """Tokenizer, training, final weights, scores, model card. Goes on where an earlier call was interrupted.

    A finished run of which only the section evaluation has changed is scored again, and not trained.

    Returns:
        What `results.json` holds.

    Raises:
        UserError: the folder holds a finished run, or one of another recipe, and `overwrite` is not set; another
            process has it; or something in the data, the tokenizer or the recipe is wrong.
    """
    args = recipe.training_arguments()
    _check_data(recipe, args)
    process = PartialState()
    with opened(recipe, args, overwrite, process) as start:
        return _run(recipe, args, start, process)


def _run(recipe: Recipe, args: TranslationTrainingArguments, start: Start, process: PartialState) -> dict[str, Any]:
    run = recipe.output_dir
    texts = _read(recipe, args, start)  # what is wrong with any of it is said before a tokenizer is trained
    tokenizer = _tokenizer(recipe, args, texts.get("train"), start, process)
    trainer = _trainer(recipe, args, texts, tokenizer, start)
    train = start.results and start.results["train"]
    if train is None:
        state, weights = train_to_the_end(trainer, args, start, recipe, process)
        train = training_facts(run, state, weights)
    # read back from the folder, as everybody else will
    model = load_model(AutoModelForSeq2SeqLM, run, attn_implementation=args.attn_implementation)
    trainer.model = model.to(args.device)
    results = {
        "parameters": model.num_parameters(),
        "train": train,
        "recipe": recipe.values,
        "versions": versions(),
        "machine": machine(),
    }
    samples: list[tuple[str, str, str]] = []
    translations: dict[str, list[str]] = {}
    if "test" in texts:
        begun = time.perf_counter()
        scores, translations = translate_and_score(trainer.translate, texts["test"], recipe.data, recipe.evaluation)
        speed = len(texts["test"]) / (time.perf_counter() - begun)
        results = {"test": scores, **results, "generation": {"sentences_per_second": speed}}
        pairs = by_pair(texts["test"], recipe.data)
        shown = SAMPLES if len(pairs) == 1 else 1
        for pair, lines in translations.items():
            samples += zip(pairs[pair]["source"][:shown], lines, pairs[pair]["target"][:shown], strict=False)
    if process.is_main_process:
        with telling_of_the_disk(run):
            (run / RESULTS).unlink(missing_ok=True)  # of an earlier evaluation, which is no longer what the rest is of
            write_whole(run / RECIPE, to_yaml(recipe.values))
            _write_generation_config(model, run, recipe)
            for pair, lines in translations.items():
                name = TRANSLATIONS if recipe.data.pairs is None else f"translations.{pair}.txt"
                write_whole(run / name, "".join(f"{line}\n" for line in lines))
            if start.results is None:
                plot_learning_curves(state.log_history, run / CURVES, recipe.name)
            if path_weights(model):
                plot_path_weights(model, run / PATH_WEIGHTS, recipe.name)
            write_model_card(run, recipe, results, samples)
            write_whole(run / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
            forget_interrupted(run)
    process.wait_for_everyone()
    return results


def _read(recipe: Recipe, args: TranslationTrainingArguments, start: Start) -> dict[str, Dataset | IterableDataset]:
    """The splits that are still needed."""
    texts: dict[str, Dataset | IterableDataset] = {}
    if not start.ended:
        texts["train"] = load_parallel(recipe.data, "train")
        if args.eval_strategy != "no":
            texts["validation"] = _in_memory(load_parallel(recipe.data, "validation"))
        if recipe.data.format != "phrases" and isinstance(texts["train"], Dataset):
            warn_of_few(len(texts["train"]), "sentence pairs", recipe)
    if recipe.data.test is not None or recipe.data.format == "phrases":
        texts["test"] = _in_memory(load_parallel(recipe.data, "test"))
    return texts


def warn_of_few(count: int, what: str, recipe: Recipe) -> None:
    """Say what to expect of a small corpus, where a model learns from nothing."""
    if count < FEW and recipe.init_from is None:
        logger.warning(
            "%d %s are few: a model that starts from nothing learns frequent words and phrases from them, and little "
            "more, unless the text is of a narrow kind. Find more text, or start from a trained model "
            "(model.init_from)",
            count,
            what,
        )


def _trainer(
    recipe: Recipe,
    args: TranslationTrainingArguments,
    texts: dict[str, Dataset | IterableDataset],
    tokenizer: PreTrainedTokenizerBase,
    start: Start,
) -> TranslationTrainer:
    """The trainer, with the data that training still needs; weights are a checkpoint's, where there is one."""
    encoded = {
        split: encode(texts[split], tokenizer, recipe.data, filter=split == "train")
        for split in ("train", "validation")
        if split in texts
    }
    if start.ended:  # the parent would ask for a validation set
        args = copy.copy(args)
        args.eval_strategy = IntervalStrategy.NO
    trained = recipe.output_dir if start.results is not None else start.checkpoint
    if trained is None:
        model = build_model(recipe, tokenizer, args)
    else:
        model = load_trained(AutoModelForSeq2SeqLM, trained, args)
    for split, dataset in encoded.items():
        check_lengths(dataset, split, model.config, recipe.data)
    trainer = TranslationTrainer(
        model=model,
        args=args,
        tokenizer=tokenizer,
        train_dataset=encoded.get("train"),
        eval_dataset=encoded.get("validation"),
        eval_texts=texts.get("validation"),
        evaluation=recipe.evaluation,
        data=recipe.data,
    )
    if "validation" in encoded:
        try:
            trainer.get_eval_dataloader()
        except UserError as error:
            raise UserError(f"data.validation: {error}") from error
    return trainer


def load_trained(auto: type, folder: Path, args: TranslationTrainingArguments) -> PreTrainedModel:
    """The model of a checkpoint of this run, to go on with: what it started from is no longer needed."""
    set_seed(args.seed)
    return load_model(auto, folder, attn_implementation=args.attn_implementation).float()


def train_to_the_end(
    trainer: TranslationTrainer,
    args: TranslationTrainingArguments,
    start: Start,
    recipe: Recipe,
    process: PartialState,
) -> tuple[TrainerState, str]:
    """Train from a checkpoint or from the start, and write the final weights to the run's folder.

    Returns:
        The trainer's state at the end, and what to call the weights.
    """
    run, checkpoint = recipe.output_dir, start.checkpoint
    if start.ended:
        logger.info("training had ended at %s", checkpoint.name)
    else:
        if checkpoint is not None:
            logger.info("resuming from %s", checkpoint.name)
        trainer.add_callback(WarmUpFits(recipe.source))
        trainer.add_callback(Replacing(run, process))
        with refusing_pickles(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    process.wait_for_everyone()
    state = load_state(checkpoints(run)[-1])
    chosen, weights = final_checkpoints(run, state, args)
    if process.is_main_process:
        average_checkpoints(chosen, run)
    process.wait_for_everyone()
    return state, weights


@contextmanager
def telling_of_the_disk(run: Path) -> Iterator[None]:
    """Say in words that what a run writes at its end cannot be written."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        why = why_not_written(error, run)
        if why is None:
            raise
        raise UserError(
            f"{run}: the results cannot be written: {why}. The training has ended, and is safe. Mend this (make room, "
            "or allow writing), and give the same command again"
        ) from error


def _write_generation_config(model: PreTrainedModel, run: Path, recipe: Recipe) -> None:
    """The model translates as it was scored, also where the section evaluation has changed after training."""
    config = model.generation_config
    if any(getattr(config, name) != value for name, value in beam_search(recipe).items()):
        config.update(**beam_search(recipe))
        write_whole(run / GENERATION_CONFIG_NAME, config.to_json_string())


def final_checkpoints(run: Path, state: TrainerState, args: TranslationTrainingArguments) -> tuple[list[Path], str]:
    """The checkpoints whose mean is the final model, and what to call it."""
    present = checkpoints(run)
    if args.average_last:
        chosen = present[-args.average_last :]
        if len(chosen) < args.average_last:
            logger.warning("the run has %d checkpoints; average_last asks for %d", len(chosen), args.average_last)
        for checkpoint in chosen:
            check_weights(checkpoint)
        return chosen, f"the mean of the checkpoints of steps {', '.join(_step(path) for path in chosen)}"
    best = run / f"checkpoint-{state.best_global_step}"
    if args.load_best_model_at_end and best in present:
        check_weights(best)
        metric = "BLEU" if args.metric_for_best_model.endswith("bleu") else "loss"
        return [best], f"the checkpoint of step {_step(best)}, the best in validation {metric}"
    if args.load_best_model_at_end:  # removed by hand, or step 0 of eval_on_start
        logger.warning("there is no %s, which was the best; the last one takes its place", best.name)
    return present[-1:], f"the last checkpoint, of step {_step(present[-1])}"


def _step(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix("checkpoint-")


def _check_data(recipe: Recipe, args: TranslationTrainingArguments) -> None:
    """What the sections `data` and `training` ask of each other, before anything is read."""
    needed = ["train"] if args.eval_strategy == "no" else ["train", "validation"]
    for split in needed if recipe.data.format != "phrases" else []:
        if getattr(recipe.data, split) is None:
            without = ", or set training.eval_strategy: no, load_best_model_at_end: false" * (split != "train")
            raise UserError(f"{recipe.source}: data.{split} is not set; say where it is{without}")
    if recipe.data.streaming and (args.max_steps <= 0 or "epoch" in (args.eval_strategy, args.save_strategy)):
        raise UserError(
            f"{recipe.source}: data.streaming: a stream has no length, so set training.max_steps, and eval_strategy "
            "and save_strategy to steps"
        )


def _tokenizer(
    recipe: Recipe,
    args: TranslationTrainingArguments,
    texts: Dataset | IterableDataset | None,
    start: Start,
    process: PartialState,
) -> PreTrainedTokenizerBase:
    """The tokenizer that is loaded or trained on the first process and read back from the run's folder by all."""
    if start.results is not None or start.checkpoint is not None:
        return load_tokenizer(start.checkpoint or recipe.output_dir)
    if process.is_main_process:
        limit = STREAM_TEXTS if isinstance(texts, IterableDataset) else DATASET_TEXTS
        tokenizer = load_or_train(recipe.tokenizer, training_texts(texts, limit), recipe.data)
        set_codes(tokenizer, recipe.data)
        add_tags(tokenizer, recipe.data)
        with whole_files(Path(args.output_dir)) as draft:
            tokenizer.save_pretrained(draft)
    process.wait_for_everyone()
    return load_tokenizer(args.output_dir)


def _in_memory(dataset: Dataset | IterableDataset) -> Dataset:
    """A split to evaluate on; of a stream, all of it."""
    return Dataset.from_list(list(dataset)) if isinstance(dataset, IterableDataset) else dataset


def training_facts(run: Path, state: TrainerState, weights: str) -> dict[str, Any]:
    """What `results.json` says of how the final weights came about."""
    mark = read_mark(run)  # as it was trained, perhaps not on this machine
    counted = Throughput(**state.stateful_callbacks["Throughput"]["args"])
    # a run that an older version of this library began may not have counted them
    later = {"data_share": counted.data_seconds / counted.seconds, "peak_memory_bytes": counted.peak_memory_bytes}
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    best = {
        f"best_validation_{name}": choose(entry[f"eval_{name}"] for entry in evaluations if f"eval_{name}" in entry)
        for name, choose in (("loss", min), ("bleu", max))
        if any(f"eval_{name}" in entry for entry in evaluations)
    }
    return {
        "steps": state.global_step,
        "epochs": state.epoch,
        "target_tokens": counted.target_tokens,
        "tokens_per_second": counted.target_tokens / counted.seconds,
        "minutes": counted.minutes,
        **{name: value for name, value in later.items() if value},
        **best,
        "validation_curve": [[entry["step"], entry["eval_loss"]] for entry in evaluations],
        "weights": weights,
        **{name: mark[name] for name in ("precision", "attention", "processes")},
    }


def versions() -> dict[str, str]:
    """Of Python and the packages that have a part in the results."""
    packages = ("hf_deepwide", "torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def machine() -> dict[str, Any]:
    """Processor, the cores this process may use, and graphics cards."""
    processor = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).is_file():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"processor": processor, "cores": cores, "gpus": gpus}
