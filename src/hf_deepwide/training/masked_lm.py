"""The trainer of masked language models: masks instead of targets, perplexity instead of BLEU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.monolingual import MaskingCollator, MonolingualArguments
from ..errors import prefixed
from .arguments import TranslationTrainingArguments
from .trainer import TokenBatchTrainer


@dataclass
class MaskedLMTrainingArguments(TranslationTrainingArguments):
    """The arguments of translation training, but the loss is the plain cross-entropy, as perplexity requires."""

    label_smoothing_factor: float = field(default=0.0, metadata={"help": "0; other values are refused."})


class MaskedLMTrainer(TokenBatchTrainer):
    """The trainer of a masked language model on sequences in several languages. Target tokens are the masked tokens.

    Args:
        model, args, tokenizer, train_dataset, eval_dataset: as in translation; `encode_texts` makes the datasets.
        data: the languages, and how they are sampled and masked.
    """

    counted = "masked tokens"

    def __init__(
        self,
        model: PreTrainedModel,
        args: MaskedLMTrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        *,
        data: MonolingualArguments,
    ) -> None:
        collator = MaskingCollator(tokenizer, data.mask_probability, args.order_seed, args.pad_to_multiple_of)
        super().__init__(model, args, tokenizer, train_dataset, eval_dataset, data=data, data_collator=collator)

    def validate(self, dataloader: DataLoader, prefix: str) -> dict[str, float]:
        """Return loss per masked token and perplexity (its exponential) in total, and perplexity by language."""
        metrics, sums = {}, []
        for language, language_loader in self.loaders_by_language(dataloader.dataset, prefix):
            sums.append(self.summed_loss(language_loader))
            metrics[f"{prefix}_perplexity_{language}"] = _perplexity(*sums[-1])
        loss, tokens = map(sum, zip(*sums, strict=True))
        return metrics | {f"{prefix}_loss": loss / tokens, f"{prefix}_perplexity": _perplexity(loss, tokens)}

    def loaders_by_language(self, rows: Dataset, split: str) -> Iterator[tuple[str, DataLoader]]:
        """Yield each language that has sentences in a split, and a loader of these sentences.

        Raises:
            UserError: a language has too few sentences to give each process a batch.
        """
        languages = np.asarray(rows["pair"][:])
        for index, language in enumerate(self.data.languages):
            chosen = np.flatnonzero(languages == index)
            if not len(chosen):
                continue
            with prefixed(f"{split}, {language}: "):
                loader = self.get_eval_dataloader(rows.select(chosen))
            yield language, loader


def _perplexity(loss: float, tokens: float) -> float:
    """Return exp(loss / tokens), or infinity if the model has diverged."""
    mean = loss / tokens
    return math.exp(mean) if not mean > 700 else math.inf
