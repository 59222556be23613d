"""The task of masked language models: train on raw text in several languages, measure perplexity on held-out text."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..data.monolingual import MonolingualArguments, add_mask, encode_texts, read_texts
from ..data.tokenizer import TokenizerArguments, check_tokenizer, load_or_train
from ..errors import UserError, one_line, prefixed, quote
from ..families import ENCODERS, FAMILIES
from ..loading import load_config, load_model
from ..training.arguments import REFUSED
from ..training.lora import LoraArguments
from ..training.masked_lm import MaskedLMTrainer, MaskedLMTrainingArguments
from ..warm_start_roberta import check_encoder_config
from .bases import check_base_fields, check_posteriors
from .build import check_memory, check_same_tokens, posterior_fields
from .encoder_card import write_masked_lm_card
from .recipe import Recipe
from .run import run
from .task import Task, warn_of_few


@dataclass
class MaskedLMRecipe(Recipe):
    """A recipe for a masked language model. It has no section `evaluation`, and other keys in `data`."""

    task: ClassVar[str] = "masked language models"
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
    refused |= dict.fromkeys(("bpe_dropout", "unigram_alpha"), "masks already differ from epoch to epoch")
    refused |= dict.fromkeys(LoraArguments.__dataclass_fields__, "LoRA is for translation models")
    refused["new_languages"] = "a masked language model has no codes of languages"

    comments: ClassVar[dict[str, dict[str, str]]] = {
        "model": {"family": "latent_depth or mat_roberta"},
        "tokenizer": {"path": "an existing tokenizer, folder or Hub id; no other key of this section then matters"},
        "training": {"metric_for_best_model": "what is best: loss"},
    }

    evaluation: None = None

    @classmethod
    def families(cls) -> list[str]:
        """Model types with a masked language model."""
        return [name for name, family in FAMILIES.items() if family.masked_lm is not None] + [*ENCODERS]


def run_masked_lm(recipe: MaskedLMRecipe, overwrite: bool = False) -> dict[str, Any]:
    """Train a masked language model by a recipe; see `run.run`."""
    return run(MaskedLM(recipe), overwrite)


class MaskedLM(Task):
    """Train a masked language model, and measure its perplexity on the validation and test splits."""

    auto = AutoModelForMaskedLM

    def check_base(self) -> None:
        """Check that the recipe's model can be made from the checkpoint `model.init_from`."""
        check_base(self.recipe)

    def read(
        self, args: MaskedLMTrainingArguments, ended: bool, scored: bool = False
    ) -> dict[str, partial[Iterator[tuple[int, str]]]]:
        """Return the reader of each split. Check that all files exist, and that held-out files hold text."""
        data, texts = self.recipe.data, {}
        for split in ("train", "validation", "test"):
            if getattr(data, split) is None or (split == "train" and ended):
                continue
            texts[split] = partial(read_texts, data, split)
            for language in data.languages:
                data.file(split, language)
            if split != "train":
                deque(texts[split](), maxlen=0)
        return texts

    def new_tokenizer(self, texts: dict[str, partial[Iterator[tuple[int, str]]]]) -> PreTrainedTokenizerBase:
        """The tokenizer that the recipe names, or a new tokenizer, with a mask token."""
        tokenizer = load_or_train(self.recipe.tokenizer, (text for _, text in texts["train"]()), self.recipe.data)
        if tokenizer.mask_token is None:
            add_mask(tokenizer, is_new=self.recipe.tokenizer.path is None)
        return tokenizer

    def encode(
        self, texts: dict[str, Any], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
    ) -> dict[str, Dataset]:
        """Encode all splits. Held-out splits are masked here, once for all evaluations."""
        encoded = {split: encode_texts(self.recipe.data, split, tokenizer) for split in texts}
        if "train" in encoded:
            warn_of_few(len(encoded["train"]), "sentences", self.recipe)
        return encoded

    def new_model(self, tokenizer: PreTrainedTokenizerBase, args: MaskedLMTrainingArguments) -> PreTrainedModel:
        """A new model, or the checkpoint `model.init_from`."""
        return new_model(self.recipe, tokenizer, args)

    def trainer(
        self,
        model: PreTrainedModel,
        args: MaskedLMTrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        encoded: dict[str, Dataset],
        texts: dict[str, Any],
    ) -> MaskedLMTrainer:
        """Make the trainer. Check that each language of a held-out split gives every process a batch."""
        data = self.recipe.data
        trainer = MaskedLMTrainer(model, args, tokenizer, encoded.get("train"), encoded["validation"], data=data)
        for split, rows in encoded.items():
            if split != "train":
                deque(trainer.loaders_by_language(rows, f"data.{split}"), maxlen=0)
        return trainer

    def score(self, trainer: MaskedLMTrainer, encoded: dict[str, Dataset], texts: dict[str, Any]) -> dict[str, Any]:
        """The perplexity on the held-out splits, of all sequences and of each language."""
        return {
            split: {
                name.removeprefix(f"{split}_"): value
                for name, value in trainer.evaluate(rows, metric_key_prefix=split).items()
                if "perplexity" in name
            }
            for split, rows in encoded.items()
            if split != "train"
        }

    def write(self, folder: Path, model: PreTrainedModel, results: dict[str, Any]) -> None:
        """Write the model card."""
        write_masked_lm_card(folder, self.recipe, results)


def new_model(
    recipe: MaskedLMRecipe, tokenizer: PreTrainedTokenizerBase, args: MaskedLMTrainingArguments
) -> PreTrainedModel:
    """The model that a run starts with: a new model or the checkpoint `init_from`, with the recipe's fields.

    Raises:
        UserError: fields that contradict the tokenizer, or a checkpoint that cannot be loaded.
    """
    set_seed(args.seed)
    if recipe.init_from is None:
        model = _new(recipe, tokenizer)
    else:
        check_same_tokens(recipe, tokenizer)
        model = _from_checkpoint(recipe)
    model.set_attn_implementation(args.attn_implementation)
    check_tokenizer(tokenizer, model.config)
    return model.float()  # as in `build_model`


def _new(recipe: MaskedLMRecipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    fields = {"vocab_size": len(tokenizer), **ids, **recipe.model_fields, **posterior_fields(recipe)}
    try:
        config = AutoConfig.for_model(recipe.family, **fields)
        check_memory(config, recipe.source)
        return AutoModelForMaskedLM.from_config(config)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(f"{recipe.source}: model: {one_line(error, 400)}") from error


def _from_checkpoint(recipe: MaskedLMRecipe) -> PreTrainedModel:
    """The checkpoint `init_from`, converted if the recipe's family starts from other encoders."""
    base, fields = str(recipe.init_from), recipe.model_fields | posterior_fields(recipe)
    prefix = f"{recipe.source}: model.init_from {quote(base)}"
    check_base(recipe)
    with prefixed(f"{prefix}: "):
        if (family := ENCODERS.get(recipe.family)) is not None:
            return family.masked_lm.from_base(base, **fields)
        return load_model(AutoModelForMaskedLM, base, prefix, **fields)


def check_base(recipe: Recipe) -> None:
    """Check by its config that the base `init_from` can become the recipe's model.

    Raises:
        UserError: the base cannot become this model, or there is no such base.
    """
    base = str(recipe.init_from)
    prefix = f"{recipe.source}: model.init_from {quote(base)}"
    theirs = load_config(base, prefix)
    check_posteriors(prefix, theirs, getattr(recipe.data, "posterior_names", []))
    if recipe.family in ENCODERS:
        with prefixed(f"{prefix}: "):
            check_encoder_config(repr(base), theirs)
    elif theirs.model_type != recipe.family:
        raise UserError(f"{prefix} is a {theirs.model_type}; model.family says {recipe.family}")
    else:
        check_base_fields(prefix, theirs, recipe.model_fields)
