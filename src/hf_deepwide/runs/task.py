"""The interface of a task: the text that a run reads, and the model that it makes, trains and scores."""

import logging
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training.arguments import TranslationTrainingArguments
from ..training.trainer import TokenBatchTrainer
from .recipe import Recipe

logger = logging.getLogger(__name__)

# Sentence pairs in the smallest corpus of Sennrich and Zhang 2019 (arXiv 1905.11901). A model with the usual settings
# learnt nothing from it. Even a model with settings for little text needs as much.
FEW = 5000


class Task:
    """The steps that differ between translation and masked language models.

    `run.py` calls the methods in the order of this class, except that it calls `new_model` before `encode`.

    Args:
        recipe: the recipe of the run.
    """

    auto: ClassVar[type]  # the class that loads the task's checkpoints

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def check(self, args: TranslationTrainingArguments) -> None:
        """Refuse a recipe whose sections contradict each other, before anything is read."""

    def check_base(self) -> None:
        """Refuse a base whose config shows that the model cannot be made from it. No text is read yet."""
        raise NotImplementedError

    def read(self, args: TranslationTrainingArguments, ended: bool, scored: bool = False) -> dict[str, Any]:
        """Read the text of each split that is needed, and report faulty text before a tokenizer is trained.

        Once training has `ended`, the training split is not needed. A run that was `scored` before is scored again
        with another section evaluation.
        """
        raise NotImplementedError

    def new_tokenizer(self, texts: dict[str, Any]) -> PreTrainedTokenizerBase:
        """The tokenizer that the recipe names, or one that is trained on the training split."""
        raise NotImplementedError

    def encode(
        self, texts: dict[str, Any], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
    ) -> dict[str, Dataset]:
        """Encode the splits as token ids, in the form that the model reads."""
        raise NotImplementedError

    def new_model(self, tokenizer: PreTrainedTokenizerBase, args: TranslationTrainingArguments) -> PreTrainedModel:
        """The model that a run starts with."""
        raise NotImplementedError

    def trainer(
        self,
        model: PreTrainedModel,
        args: TranslationTrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        encoded: dict[str, Dataset],
        texts: dict[str, Any],
    ) -> TokenBatchTrainer:
        """Make the trainer. Report a split that is too small for it."""
        raise NotImplementedError

    def score(self, trainer: TokenBatchTrainer, encoded: dict[str, Dataset], texts: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of `results.json` about the final model's quality."""
        raise NotImplementedError

    def write(self, folder: Path, model: PreTrainedModel, results: dict[str, Any]) -> None:
        """Write the task's own files in the folder, beside the model, figures and `results.json`."""


def warn_of_few(count: int, what: str, recipe: Recipe) -> None:
    """Warn of a small corpus if a model is trained on it from scratch."""
    if count < FEW and recipe.init_from is None:
        logger.warning(
            "%d %s are few: trained from scratch, the model will learn little more than frequent words and phrases, "
            "unless all text is of one narrow domain. Find more text, or start from a trained model "
            "(model.init_from)",
            count,
            what,
        )
