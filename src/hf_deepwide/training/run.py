"""One run from raw text to a scored model with its card: what `scripts/train_translation.py` does.

A run lives in one folder. `run.json` says that it is one, and how it is run, `recipe.yaml` what it is, `checkpoint-*`
how far it has come, and `results.json`, written last, that it is finished.
"""

import json
import logging
import os
import platform
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, IterableDataset, disable_progress_bars
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerBase,
    TrainerState,
)

from ..analysis.path_weights import PLOT as PATH_WEIGHTS
from ..analysis.path_weights import path_weights, plot_path_weights
from ..data.batches import check_lengths, encode
from ..data.corpora import load_parallel
from ..data.languages import add_tags, set_codes
from ..data.tokenizer import load_or_train, training_texts
from ..durable import STAGING, remove, whole_files, write_whole
from ..errors import UserError
from ..loading import load_model, load_tokenizer, refusing_pickles
from ..reading import read_text
from .arguments import TranslationTrainingArguments
from .averaging import SIDE_FILES, average_checkpoints
from .build import build_model
from .callbacks import Throughput
from .checkpoints import (
    INTERRUPTED,
    REGULAR,
    WEIGHTS,
    check_weights,
    checkpoints,
    forget_interrupted,
    is_last,
    last_checkpoint,
    load_state,
    newest_whole,
)
from .faults import FAULTS
from .memory import bound_kernel_caches, keep_memory
from .model_card import write_model_card
from .plots import plot_learning_curves
from .recipe import MARK, NO_DIFFERENCE, RECIPE, Recipe, differences, read_mark
from .scoring import by_pair, translate_and_score
from .trainer import TranslationTrainer
from .yaml_values import LARGEST, parse_yaml, to_yaml

logger = logging.getLogger(__name__)

RESULTS, TRANSLATIONS, CURVES = "results.json", "translations.txt", "plots/learning_curves.png"
# Keys of the section training that are compared as they come out on this machine, once a run has begun (`resolved`).
RESOLVED = {"gradient_accumulation_steps", "bf16", "fp16", "attn_implementation"}
STREAM_TEXTS, DATASET_TEXTS = 1_000_000, 10_000_000  # most pairs that a tokenizer is trained on
SAMPLES = 5  # test sentences in the model card


def run_recipe(recipe: Recipe, overwrite: bool = False) -> dict[str, Any]:
    """Tokenizer, training, final weights, scores, model card. Goes on where an earlier call was interrupted.

    Returns:
        What `results.json` holds.

    Raises:
        UserError: the folder holds a finished run, or one of another recipe, and `overwrite` is not set; or
            something in the data, the tokenizer or the recipe is wrong.
    """
    args = recipe.training_arguments()
    _check_data(recipe, args)
    run, process = recipe.output_dir, PartialState()
    checkpoint = begin(recipe, args, overwrite, process)
    train_texts = load_parallel(recipe.data, "train")
    tokenizer = _tokenizer(recipe, train_texts, checkpoint, process)
    train_dataset = encode(train_texts, tokenizer, recipe.data, filter=True)
    validation_texts = validation = None
    if args.eval_strategy != "no":
        validation_texts = _in_memory(load_parallel(recipe.data, "validation"))
        validation = encode(validation_texts, tokenizer, recipe.data, filter=False)
    scored = recipe.data.test is not None or recipe.data.format == "phrases"
    test_texts = _in_memory(load_parallel(recipe.data, "test")) if scored else None

    model = build_model(recipe, tokenizer, args)
    for split, encoded in (("train", train_dataset), ("validation", validation)):
        if encoded is not None:
            check_lengths(encoded, split, model.config, recipe.data)
    trainer = TranslationTrainer(
        model=model,
        args=args,
        tokenizer=tokenizer,
        train_dataset=train_dataset,
        eval_dataset=validation,
        eval_texts=validation_texts,
        evaluation=recipe.evaluation,
        data=recipe.data,
    )
    if validation is not None:
        try:
            trainer.get_eval_dataloader()
        except UserError as error:
            raise UserError(f"data.validation: {error}") from error
    state, weights = train_to_the_end(trainer, checkpoint, run, process)
    # read back from the folder, as everybody else will
    model = load_model(AutoModelForSeq2SeqLM, run, attn_implementation=args.attn_implementation)
    trainer.model = model.to(args.device)
    results = {
        "parameters": model.num_parameters(),
        "train": training_facts(run, state, weights),
        "recipe": recipe.values,
        "versions": versions(),
        "machine": machine(),
    }
    samples: list[tuple[str, str, str]] = []
    if test_texts is not None:
        start = time.perf_counter()
        scores, translations = translate_and_score(trainer.translate, test_texts, recipe.data, recipe.evaluation)
        speed = len(test_texts) / (time.perf_counter() - start)
        results = {"test": scores, **results, "generation": {"sentences_per_second": speed}}
        texts = by_pair(test_texts, recipe.data)
        shown = SAMPLES if len(texts) == 1 else 1
        for pair, lines in translations.items():
            samples += zip(texts[pair]["source"][:shown], lines, texts[pair]["target"][:shown], strict=False)
            if process.is_main_process:
                name = TRANSLATIONS if recipe.data.pairs is None else f"translations.{pair}.txt"
                write_whole(run / name, "".join(f"{line}\n" for line in lines))
    if process.is_main_process:
        plot_learning_curves(state.log_history, run / CURVES, recipe.name)
        if path_weights(model):
            plot_path_weights(model, run / PATH_WEIGHTS, recipe.name)
        write_model_card(run, recipe, results, samples)
        write_whole(run / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        forget_interrupted(run)
    process.wait_for_everyone()
    return results


def begin(recipe: Recipe, args: TranslationTrainingArguments, overwrite: bool, process: PartialState) -> Path | None:
    """Open the folder of a run; returns the checkpoint that it goes on from, if there is one."""
    if process.is_main_process:
        _refuse_links(recipe.output_dir)
        open_run(recipe, args, overwrite)
        last_checkpoint(recipe.output_dir)  # sets damaged ones aside before the other processes look
    else:
        disable_progress_bars()
    process.wait_for_everyone()
    bound_kernel_caches()
    if args.keep_memory:
        keep_memory()
    return next(reversed(checkpoints(recipe.output_dir, REGULAR, INTERRUPTED)), None)  # it was found to be whole


def train_to_the_end(
    trainer: TranslationTrainer, checkpoint: Path | None, run: Path, process: PartialState
) -> tuple[TrainerState, str]:
    """Train from a checkpoint or from the start, and write the final weights to the run's folder.

    Returns:
        The trainer's state at the end, and what to call the weights.
    """
    if checkpoint is not None and is_last(load_state(checkpoint)):
        logger.info("training had ended at %s", checkpoint.name)
    else:
        if checkpoint is not None:
            logger.info("resuming from %s", checkpoint.name)
        with refusing_pickles(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    process.wait_for_everyone()
    state = load_state(checkpoints(run)[-1])
    chosen, weights = final_checkpoints(run, state, trainer.args)
    if process.is_main_process:
        average_checkpoints(chosen, run)
    process.wait_for_everyone()
    return state, weights


def open_run(recipe: Recipe, args: TranslationTrainingArguments, overwrite: bool) -> None:
    """Make the folder of a run, or see that going on in it is right; leave its mark and the recipe in it.

    With `overwrite` what an earlier run wrote is removed. A folder that is not a run's is never touched.
    """
    run = recipe.output_dir
    if run.exists() and not run.is_dir():
        raise UserError(f"training.output_dir: {run} is a file")
    mark, now = read_mark(run), {**resolved(args), "name": recipe.name}
    drafts = (f".{MARK}", f".{RECIPE}")
    if mark is None and run.is_dir() and any(path.name not in drafts for path in run.iterdir()):
        raise UserError(f"training.output_dir: {run} is not empty and holds no run; give another folder")
    if mark is not None and overwrite:
        _write_mark(run, now)  # an older version left none
        _clear(run)
    if (run / RESULTS).is_file():
        raise UserError(
            f"{run} holds a finished run ({RESULTS}); give another training.output_dir, or --overwrite to replace it"
        )
    if checkpoints(run, REGULAR, INTERRUPTED):
        newest = newest_whole(run)
        ended = newest is not None and is_last(load_state(newest))
        known = newest is not None and not ended and mark.keys() >= now.keys()
        _refuse_another_recipe(recipe, NO_DIFFERENCE | RESOLVED if known else NO_DIFFERENCE)
        if known:
            _refuse_another_start(run, mark, now)
        if ended:
            now |= mark
    run.mkdir(parents=True, exist_ok=True)
    _write_mark(run, now)
    write_whole(run / RECIPE, to_yaml(recipe.values))


def _refuse_links(run: Path) -> None:
    """What a run writes goes to its own folder, also where somebody else has prepared the folder."""
    for folder in (run / FAULTS, (run / CURVES).parent, run / "runs"):
        if folder.is_symlink():
            raise UserError(
                f"{folder} is a link, and a run writes and deletes within its own folder alone; remove the link, or "
                "give another training.output_dir"
            )


def _refuse_another_recipe(recipe: Recipe, apart_from: set[str]) -> None:
    """An unfinished run goes on by the recipe that it began with, `apart_from` some keys of the section training."""
    kept = recipe.output_dir / RECIPE
    earlier = parse_yaml(read_text(kept, "recipe", LARGEST), str(kept)) if kept.is_file() else None
    if not isinstance(earlier, dict) or not all(isinstance(keys, dict) for keys in earlier.values()):
        raise UserError(f"{kept} is no recipe, so what was trained here is not known; give another output_dir")
    if changes := differences(earlier, recipe.values, apart_from):
        raise UserError(
            f"{kept.parent} holds an unfinished run of another recipe ({'; '.join(changes)}). Resume it with its own "
            f"recipe ({kept}), give another training.output_dir, or --overwrite to start afresh"
        )


def _refuse_another_start(run: Path, mark: dict[str, Any], now: dict[str, Any]) -> None:
    """An unfinished run goes on with as many batches an update, as precise, and with the attention it began with."""
    compared = ("batches_per_update", "precision", "attention")
    if changes := [f"{name}: {mark[name]}, now {now[name]}" for name in compared if mark[name] != now[name]]:
        raise UserError(
            f"{run} holds an unfinished run that would go on otherwise than it began ({'; '.join(changes)}). "
            "Start as many processes, or set training.gradient_accumulation_steps, bf16 and attn_implementation "
            "such that nothing changes; or give another training.output_dir, or --overwrite to start afresh"
        )


def resolved(args: TranslationTrainingArguments) -> dict[str, Any]:
    """What a run trains depends on this, too, which follows from how it is started, and where."""
    return {
        "hf_deepwide": version("hf_deepwide"),
        "processes": args.world_size,
        "batches_per_update": args.world_size * args.gradient_accumulation_steps,
        "precision": f"{args.mixed_precision} autocast" if args.mixed_precision != "no" else "float32",
        "attention": args.attn_implementation,
    }


def _write_mark(run: Path, mark: dict[str, Any]) -> None:
    write_whole(run / MARK, json.dumps(mark, indent=2, ensure_ascii=False) + "\n")


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
    recipe: Recipe, texts: Dataset | IterableDataset, checkpoint: Path | None, process: PartialState
) -> PreTrainedTokenizerBase:
    """The tokenizer that is loaded or trained on the first process and read back from the run's folder by all."""
    run = recipe.output_dir
    if checkpoint is not None:
        return load_tokenizer(checkpoint)
    if process.is_main_process:
        limit = STREAM_TEXTS if isinstance(texts, IterableDataset) else DATASET_TEXTS
        tokenizer = load_or_train(recipe.tokenizer, training_texts(texts, limit), recipe.data)
        set_codes(tokenizer, recipe.data)
        add_tags(tokenizer, recipe.data)
        with whole_files(run) as draft:
            tokenizer.save_pretrained(draft)
    process.wait_for_everyone()
    return load_tokenizer(run)


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


def _clear(run: Path) -> None:
    """Remove what a run writes, and nothing else, but its mark: first what says that it is finished."""
    (run / RESULTS).unlink(missing_ok=True)
    shutil.rmtree(run / STAGING, ignore_errors=True)
    kinds = [f"{damaged}{kind}" for damaged in ("", "damaged-") for kind in (REGULAR, INTERRUPTED)]
    for folder in (*checkpoints(run, *kinds), *checkpoints(run / FAULTS, "step")):
        remove(folder)
    of_tensorboard = run.glob("runs/*/events.out.tfevents.*")
    names = (RECIPE, TRANSLATIONS, "README.md", WEIGHTS, *SIDE_FILES, CURVES, PATH_WEIGHTS)
    for file in (*(run / name for name in names), *run.glob("translations.*-*.txt"), *of_tensorboard):
        file.unlink(missing_ok=True)
    for folder in (*run.glob("runs/*"), run / "runs", run / "plots", run / FAULTS):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
