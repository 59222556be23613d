"""What a run asks of its task: which text it reads, and which model it makes, trains and scores."""

import logging
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training.arguments import TranslationTrainingArguments
from ..training.trainer import TokenBatchTrainer
from .recipe import Recipe

logger = logging.getLogger(__name__)

# The smallest corpus of Sennrich and Zhang 2019 (arXiv 1905.11901), from which a model that is set up as usual learnt
# nothing; even one that is made for little text needs it.
FEW = 5000


class Task:
    """What translation and masked language models do differently; `run.py` calls the methods in their order here.

    Args:
        recipe: the recipe of the run.
    """

    auto: ClassVar[type]  # loads the task's checkpoints

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def check(self, args: TranslationTrainingArguments) -> None:
        """Refuse a recipe whose sections contradict each other, before anything is read."""

    def check_base(self) -> None:
        """Refuse the base of a model that is to be made, if its config says that it cannot be; nothing is read yet."""
        raise NotImplementedError

    def read(self, args: TranslationTrainingArguments, ended: bool, scored: bool = False) -> dict[str, Any]:
        """The text of each split that is needed; of the training split only before training has ended.

        A run that was `scored` before is scored again, by another section evaluation.

        Faulty text is reported here, before a tokenizer is trained.
        """
        raise NotImplementedError

    def new_tokenizer(self, texts: dict[str, Any]) -> PreTrainedTokenizerBase:
        """The tokenizer that the recipe names, or one that is trained on the training split."""
        raise NotImplementedError

    def encode(
        self, texts: dict[str, Any], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
    ) -> dict[str, Dataset]:
        """Splits as token ids, as the model reads them."""
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
        """The trainer; a split that is too small for it is reported here."""
        raise NotImplementedError

    def score(self, trainer: TokenBatchTrainer, encoded: dict[str, Dataset], texts: dict[str, Any]) -> dict[str, Any]:
        """What `results.json` holds of the final model's quality."""
        raise NotImplementedError

    def write(self, folder: Path, model: PreTrainedModel, results: dict[str, Any]) -> None:
        """Write what the task leaves in the folder beside the model, figures and `results.json`."""


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
