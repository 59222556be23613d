"""One run from raw text in several languages to a masked language model and its perplexity on held-out text.

What a run leaves in its folder, how it goes on after an interruption and how its data come in batches is as in
translation (`run.py`, `trainer.py`); what differs is here.
"""

import json
import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from accelerate import PartialState
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..data.batches import check_lengths
from ..data.monolingual import MASK, MonolingualArguments, encode_texts, read_texts
from ..data.tokenizer import TokenizerArguments, check_tokenizer, load_or_train
from ..durable import whole_files, write_whole
from ..errors import UserError, one_line
from ..loading import load_model, load_tokenizer
from ..registration import FAMILIES
from ..training.arguments import REFUSED
from ..training.checkpoints import forget_interrupted
from ..training.masked_lm import MaskedLMTrainer, MaskedLMTrainingArguments
from .build import check_memory
from .plots import plot_learning_curves
from .recipe import Recipe
from .run import (
    load_trained,
    machine,
    telling_of_the_disk,
    train_to_the_end,
    training_facts,
    versions,
    warn_of_few,
)
from .run_folder import CURVES, RESULTS, Start, opened

logger = logging.getLogger(__name__)


@dataclass
class MaskedLMRecipe(Recipe):
    """A recipe for a masked language model: no section `evaluation`, and other keys in `data`."""

    sections: ClassVar[dict[str, type | None]] = {
        "model": None,
        "data": MonolingualArguments,
        "tokenizer": TokenizerArguments,
        "training": MaskedLMTrainingArguments,
    }
    refused: ClassVar[dict[str, str]] = REFUSED | dict.fromkeys(
        ("predict_with_generate", "generation_num_beams", "generation_every"), "nothing is generated"
    )
    refused["label_smoothing_factor"] = "perplexity is of the plain cross-entropy"
    refused["dataloader_persistent_workers"] = "masks are drawn anew each epoch; workers that stay do not know"

    evaluation: None = None

    @classmethod
    def families(cls) -> list[str]:
        """Model types with a masked language model."""
        return [name for name, family in FAMILIES.items() if family.masked_lm is not None]


def run_masked_lm(recipe: MaskedLMRecipe, overwrite: bool = False) -> dict[str, Any]:
    """Tokenizer, training, final weights, perplexity. Goes on where an earlier call was interrupted.

    Returns:
        What `results.json` holds.

    Raises:
        UserError: the folder holds a finished run, or one of another recipe, and `overwrite` is not set; or something
            in the data, the tokenizer or the recipe is wrong.
    """
    args = recipe.training_arguments()
    process = PartialState()
    with opened(recipe, args, overwrite, process) as start:
        return _run(recipe, args, start, process)


def _run(
    recipe: MaskedLMRecipe, args: MaskedLMTrainingArguments, start: Start, process: PartialState
) -> dict[str, Any]:
    run, data = recipe.output_dir, recipe.data
    needed = [
        split
        for split in ("train", "validation", "test")
        if getattr(data, split) is not None and not (split == "train" and start.ended)
    ]
    if start.checkpoint is None:
        for split in needed:  # what is wrong with the files is said before a tokenizer is trained
            for language in data.languages:
                data.file(split, language)
            if split != "train":
                deque(read_texts(data, split), maxlen=0)
        if process.is_main_process:
            tokenizer = load_or_train(recipe.tokenizer, (text for _, text in read_texts(data, "train")), data)
            if tokenizer.mask_token is None:
                tokenizer.add_special_tokens({"mask_token": MASK})
            with whole_files(Path(args.output_dir)) as draft:
                tokenizer.save_pretrained(draft)
    process.wait_for_everyone()
    tokenizer = load_tokenizer(start.checkpoint or args.output_dir)
    splits = {split: encode_texts(data, split, tokenizer) for split in needed}
    if "train" in splits:
        warn_of_few(len(splits["train"]), "sentences", recipe)
    if start.checkpoint is None:
        model = new_model(recipe, tokenizer, args)
    else:
        model = load_trained(AutoModelForMaskedLM, start.checkpoint, args)
    for split, encoded in splits.items():
        check_lengths(encoded, split, model.config, data)
    trainer = MaskedLMTrainer(model, args, tokenizer, splits.get("train"), splits["validation"], data=data)
    for split in [split for split in splits if split != "train"]:
        list(trainer.loaders_by_language(splits[split], f"data.{split}"))  # says now what is too small
    state, weights = train_to_the_end(trainer, args, start, recipe, process)
    # read back from the folder, as everybody else will
    model = load_model(AutoModelForMaskedLM, run, attn_implementation=args.attn_implementation)
    trainer.model = trainer.model_wrapped = model.to(args.device)
    perplexities = {
        split: {
            name.removeprefix(f"{split}_"): value
            for name, value in trainer.evaluate(splits[split], metric_key_prefix=split).items()
            if "perplexity" in name
        }
        for split in splits
        if split != "train"
    }
    results = {
        **perplexities,
        "parameters": model.num_parameters(),
        "train": training_facts(run, state, weights),
        "recipe": recipe.values,
        "versions": versions(),
        "machine": machine(),
    }
    if process.is_main_process:
        with telling_of_the_disk(run):
            plot_learning_curves(state.log_history, run / CURVES, recipe.name)
            write_whole(run / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
            forget_interrupted(run)
    process.wait_for_everyone()
    return results


def new_model(
    recipe: MaskedLMRecipe, tokenizer: PreTrainedTokenizerBase, args: MaskedLMTrainingArguments
) -> PreTrainedModel:
    """The model that a run starts with: new, or the checkpoint `init_from`, by the recipe's fields.

    Raises:
        UserError: fields that contradict the tokenizer, or a checkpoint that cannot be loaded.
    """
    set_seed(args.seed)
    names = recipe.data.posterior_names
    fields = recipe.model_fields
    if names:
        fields |= {"num_posteriors": len(names), "posterior_names": names}
    attention = {"attn_implementation": args.attn_implementation}
    try:
        if recipe.init_from is not None:
            model = load_model(AutoModelForMaskedLM, recipe.init_from, **fields, **attention)
        else:
            ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
            config = AutoConfig.for_model(recipe.family, **{"vocab_size": len(tokenizer), **ids, **fields})
            check_memory(config, recipe.source)
            model = AutoModelForMaskedLM.from_config(config, **attention)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(f"{recipe.source}: model: {one_line(error, 400)}") from error
    check_tokenizer(tokenizer, model.config)
    return model.float()  # as in `build_model`
