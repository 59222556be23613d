"""One run from raw text to a scored model: `hf-deepwide train` for translation and masked language models.

The steps that differ between the two tasks are in `translation.py` and `masked_lm.py`. The folder of a run, and which
run may begin there, are in `run_folder.py`.
"""

import copy
import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, set_seed
from transformers.trainer_utils import IntervalStrategy

from ..analysis import gradient_norms, layer_utilization
from ..analysis.joint_weights import joined_stacks, plot_joint_weights
from ..analysis.layer_joints import layer_weights, plot_layer_weights, plot_solver_gates, solver_gates
from ..analysis.learning_curves import plot_learning_curves
from ..analysis.path_weights import path_weights, plot_path_weights
from ..card_text import CARD
from ..checkpoint_files import read_results
from ..data.encoding import check_lengths
from ..durable import saving, sha256_of, whole_files, write_whole
from ..loading import load_model, load_tokenizer, refusing_pickles
from ..models.plain_text import positions
from ..training.arguments import TranslationTrainingArguments
from ..training.checkpoints import checkpoints, forget_interrupted, load_state
from ..training.trainer import TokenBatchTrainer
from .averaging import average_checkpoints
from .facts import machine, training_facts, versions
from .recipe import RECIPE, Recipe
from .run_folder import Replacing, RunFolder, Start
from .task import Task
from .translation import Translation
from .warm_up import WarmUpFits, refuse_long_warm_up
from .written_files import (
    CURVES,
    GRADIENT_NORMS,
    JOINT_WEIGHTS,
    LAYER_UTILIZATION,
    LAYER_WEIGHTS,
    PATH_WEIGHTS,
    RESULTS,
    SOLVER_GATES,
)
from .yaml_values import to_yaml

logger = logging.getLogger(__name__)


def run_recipe(recipe: Recipe, overwrite: bool = False) -> dict[str, Any]:
    """Train a translation model by a recipe; see `run`."""
    return run(Translation(recipe), overwrite)


def run(task: Task, overwrite: bool = False) -> dict[str, Any]:
    """Make the tokenizer, train, and write the final weights, scores and model card. Resume an interrupted run.

    A finished run whose recipe has changed only in the section evaluation is scored again, and not trained. The
    results keep the recipe, versions and machine of the training. If other versions or another machine score the run,
    `scored` holds them.

    Returns:
        The content of `results.json`.

    Raises:
        UserError: the folder holds a finished run, or a run of another recipe, and `overwrite` is not set; another
            process uses the folder; or something in the data, the tokenizer or the recipe is wrong.
    """
    recipe, args, process = task.recipe, task.recipe.training_arguments(), PartialState()
    task.check(args)
    args.tell_of_idle_gpus()
    folder = RunFolder(recipe.output_dir)
    with folder.opened(recipe, args, overwrite, process) as start:
        if start.results is not None:  # the other sections stay: the run was trained with them
            kept = start.results["recipe"] | {"evaluation": recipe.values["evaluation"]}
            recipe = task.recipe = replace(recipe, values=kept)
        if start.results is None and start.checkpoint is None and args.max_steps > 0:
            refuse_long_warm_up(args, args.max_steps, recipe.source)  # before a tokenizer is trained
        if recipe.init_from is not None and _trained(args, folder, start) is None:
            task.check_base()  # before the corpus is read
        texts = task.read(args, start.ended, start.results is not None)
        tokenizer = make_tokenizer(task, texts, args, folder, start, process)
        model = make_model(task, tokenizer, args, folder, start)
        encoded = task.encode(texts, tokenizer, model)
        if start.results is None and start.checkpoint is None:
            limit_length(tokenizer, model, Path(args.output_dir), process)
        for split, dataset in encoded.items():
            check_lengths(dataset, split, model.config, recipe.data, args.pad_to_multiple_of)
        trainer = task.trainer(model, _without_evaluation(args) if start.ended else args, tokenizer, encoded, texts)
        if start.results is None:
            logger.info("%s: %s parameters", model.config.model_type, f"{model.num_parameters():,}")
            state, weights = train_to_the_end(trainer, args, folder, start, recipe, process)
            train, history = training_facts(folder.path, state, weights), state.log_history
        else:
            train, history = start.results["train"], None
        # read back from the folder, as a user will read it
        model = load_model(task.auto, folder.path, attn_implementation=args.attn_implementation)
        trainer.model = trainer.model_wrapped = model.to(args.device)
        here = {"versions": versions(), "machine": machine()}
        trained = {name: (start.results or here)[name] for name in here}
        scores = task.score(trainer, encoded, texts)
        if (earlier := (start.results or {}).get("digests")) and "digests" in scores:
            warn_of_other_texts(earlier, scores["digests"])
            scores["digests"] = earlier | scores["digests"]
        results = {
            **({"validation": start.results["validation"]} if "validation" in (start.results or {}) else {}),
            **scores,
            "parameters": model.num_parameters(),
            "train": train,
            "recipe": recipe.values,
            **trained,
            **({"scored": here} if here != trained else {}),
        }
        if process.is_main_process:
            with folder.refusing_unwritable_results():
                finish(task, folder, model, results, history)
        process.wait_for_everyone()
    return results


def warn_of_other_texts(earlier: dict[str, str], now: dict[str, str]) -> None:
    """Warn if a run is scored on other sentences than before, although its recipe names the same place."""
    for split in now:
        if earlier.get(split, now[split]) != now[split]:
            logger.warning("data.%s holds other sentences than when the run was scored before", split)


def make_tokenizer(
    task: Task,
    texts: dict[str, Any],
    args: TranslationTrainingArguments,
    folder: RunFolder,
    start: Start,
    process: PartialState,
) -> PreTrainedTokenizerBase:
    """Load or train the tokenizer on the first process. All processes then read it from the run's folder."""
    if start.results is not None or start.checkpoint is not None:
        return load_tokenizer(start.checkpoint or folder.path)
    if process.is_main_process:
        tokenizer = task.new_tokenizer(texts)
        place = Path(args.output_dir)
        with saving(place, "the tokenizer"), whole_files(place) as draft:
            tokenizer.save_pretrained(draft)
    process.wait_for_everyone()
    return load_tokenizer(args.output_dir)


def limit_length(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, place: Path, process: PartialState
) -> None:
    """Make `truncation=True` cut a text to the number of tokens that a model has positions for."""
    if (longest := positions(model.config)) is None or longest >= tokenizer.model_max_length:
        return
    tokenizer.model_max_length = longest
    if process.is_main_process:
        with saving(place, "the tokenizer"), whole_files(place) as draft:
            tokenizer.save_pretrained(draft)


def make_model(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    args: TranslationTrainingArguments,
    folder: RunFolder,
    start: Start,
) -> PreTrainedModel:
    """The model to train or score: from the run's checkpoint (then `model.init_from` is not needed), or a new one."""
    if (trained := _trained(args, folder, start)) is None:
        return task.new_model(tokenizer, args)
    set_seed(args.seed)
    return load_model(task.auto, trained, attn_implementation=args.attn_implementation).float()


def _trained(args: TranslationTrainingArguments, folder: RunFolder, start: Start) -> Path | None:
    """The folder that holds the whole model; None if there is none, or if LoRA also needs the base."""
    trained = folder.path if start.results is not None else start.checkpoint
    return None if args.lora_r and not start.ended else trained  # LoRA is resumed on top of the base


def _without_evaluation(args: TranslationTrainingArguments) -> TranslationTrainingArguments:
    """A copy of the arguments with which a trainer needs no validation split."""
    args = copy.copy(args)
    args.eval_strategy = IntervalStrategy.NO
    return args


def train_to_the_end(
    trainer: TokenBatchTrainer,
    args: TranslationTrainingArguments,
    folder: RunFolder,
    start: Start,
    recipe: Recipe,
    process: PartialState,
) -> tuple[TrainerState, str]:
    """Train from a checkpoint or from the start, and write the final weights to the run's folder.

    Returns:
        The trainer's state at the end, and a description of the weights.
    """
    checkpoint = start.checkpoint
    if start.ended:
        logger.info("training had ended at %s", checkpoint.name)
    else:
        if checkpoint is not None:
            logger.info("resuming from %s", checkpoint.name)
        trainer.saving.run_id = start.run_id
        trainer.add_callback(WarmUpFits(recipe.source))
        trainer.add_callback(Replacing(folder, process))
        with refusing_pickles(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    process.wait_for_everyone()
    state = load_state(checkpoints(folder.path)[-1])
    chosen, weights = folder.final_checkpoints(state, args)
    if process.is_main_process:
        average_checkpoints(chosen, folder.path)
    process.wait_for_everyone()
    return state, weights


def finish(
    task: Task, folder: RunFolder, model: PreTrainedModel, results: dict[str, Any], history: list[dict] | None
) -> None:
    """Write all files beside the final weights. `results.json` is written last, and marks the run as finished.

    If a call that scores a finished run again is interrupted, the old `results.json` stays. The call can be repeated.

    Args:
        task, folder, model, results: the task, the run's folder, the final model and its results.
        history: the log of the training; None where the model was scored again, not trained.
    """
    run, name = folder.path, task.recipe.name
    write_whole(run / RECIPE, to_yaml(task.recipe.values))
    if history is not None:
        plot_history(history, model, run, name)
    if layer_weights(model):
        plot_layer_weights(model, run / LAYER_WEIGHTS, name)
    if joined_stacks(model):
        plot_joint_weights(model, run / JOINT_WEIGHTS, name)
    if path_weights(model):
        plot_path_weights(model, run / PATH_WEIGHTS, name)
    keep_edited_card(run)
    task.write(run, model, results)
    results["card"] = sha256_of(run / CARD)
    write_whole(run / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    forget_interrupted(run)


def keep_edited_card(run: Path) -> None:
    """Rename the old card of a run that is scored again, if a user has edited it, for example to add a licence."""
    card, written = run / CARD, read_results(run).get("card")  # older versions did not save its checksum
    if card.is_file() and written is not None and sha256_of(card) != written:
        places = (run / f"README.edited-{number}.md" for number in itertools.count(1))
        kept = next(place for place in places if not place.exists())
        card.replace(kept)
        logger.warning("%s was changed since it was written; it is kept as %s", card, kept.name)


def plot_history(history: list[dict], model: PreTrainedModel, run: Path, name: str) -> None:
    """Draw the figures of a training log. This is not done when training ends, so that no interruption loses them."""
    plot_learning_curves(history, run / CURVES, name)
    if solver_gates(history)[0]:
        plot_solver_gates(history, run / SOLVER_GATES, name)
    if any(gradient_norms.KEY in entry for entry in history):
        gradient_norms.plot_gradient_norms({"": history}, run / GRADIENT_NORMS)
    if any(layer_utilization.KEY in entry for entry in history):
        names = layer_utilization.posterior_names(model.config)
        layer_utilization.plot_layer_utilization(history, run / LAYER_UTILIZATION, names)
