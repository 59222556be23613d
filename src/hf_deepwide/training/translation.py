"""The trainer of translation models: pairs of sentences, and BLEU beside the loss."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Seq2SeqTrainer

from ..data.arguments import DataArguments
from ..data.batches import TranslationCollator
from ..data.bpe_dropout import BPEDropout
from ..data.sampling import copies_by_rate
from ..data.subword_collator import Cut, SubwordCollator
from ..data.unigram_sampling import UnigramSampling
from ..evaluation.arguments import EvaluationArguments
from ..evaluation.scoring import translate_and_score
from ..evaluation.translate import translate
from ..models.plain_text import positions
from .arguments import TranslationTrainingArguments
from .trainer import TokenBatchTrainer


class TranslationTrainer(TokenBatchTrainer, Seq2SeqTrainer):
    """The trainer of any encoder-decoder model on encoded pairs. It validates by the loss and, if requested, by BLEU.

    It is a `Seq2SeqTrainer`, so code that requires one accepts it, and `generation_config` of the arguments is used.
    `translate` translates texts and `evaluate` validates, both in batches of a number of tokens.

    Args:
        model: the model; its `generation_config` is used as it is.
        args: the arguments.
        tokenizer: its tokenizer.
        train_dataset: the result of `data.encoding.encode`: a dataset, or a stream (which needs `max_steps`).
        eval_dataset: the encoded validation set.
        eval_texts: the validation set with the columns `source` and `target`, for `predict_with_generate`.
        evaluation: how validation is translated; the beam size is `args.generation_num_beams`, the metric is BLEU.
        data: the languages, and how often the sentences of each pair are seen.
        bpe_dropout: the probability with which training leaves out each merge of the tokenizer.
        unigram_alpha: the power of the probabilities by which training draws pieces of a Unigram tokenizer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TranslationTrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Any = None,
        eval_dataset: Dataset | None = None,
        eval_texts: Dataset | None = None,
        evaluation: EvaluationArguments | None = None,
        data: DataArguments | None = None,
        bpe_dropout: float = 0.0,
        unigram_alpha: float | None = None,
    ) -> None:
        start, multiple = model.config.decoder_start_token_id, args.pad_to_multiple_of
        super().__init__(
            model,
            args,
            tokenizer,
            train_dataset,
            eval_dataset,
            data=data or DataArguments(),
            data_collator=TranslationCollator(tokenizer, start, multiple),
        )
        cut: Cut | None = BPEDropout(tokenizer, bpe_dropout) if bpe_dropout else None
        cut = cut if unigram_alpha is None else UnigramSampling(tokenizer, unigram_alpha)
        if cut is not None:
            longest = self.data.max_length
            if (most := positions(model.config)) is not None:  # padding needs positions, too
                longest = min(longest, most // multiple * multiple)
            options = {"cut": cut, "seed": args.order_seed, "max_length": longest}
            self.train_collator = SubwordCollator(tokenizer, start, multiple, **options)
        self.eval_texts = eval_texts
        self.evaluation = dataclasses.replace(
            evaluation or EvaluationArguments(), num_beams=args.generation_num_beams or 1, metrics=["bleu"]
        )

    def copies(self) -> Any:
        """Return the copies of each row, by `synthetic_rate` if it is set, else by the sampling temperature."""
        if self.data.synthetic_rate is None:
            return super().copies()
        return copies_by_rate(self.train_dataset["synthetic"][:], self.data.synthetic_rate)

    def validate(self, dataloader: DataLoader, prefix: str) -> dict[str, float]:
        """Return the loss and, at every `generation_every`-th evaluation during training, BLEU."""
        metrics = super().validate(dataloader, prefix)
        if self.args.predict_with_generate and self.eval_texts is not None and prefix == "eval":
            number = 1 + sum("eval_loss" in entry for entry in self.state.log_history)
            if number % self.args.generation_every == 0:
                metrics |= self._bleu()
        return metrics

    def translate(
        self,
        sources: Sequence[str],
        evaluation: EvaluationArguments,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> list[str]:
        """Translate a share of the sources on each process. Return all translations, in order, on every process."""
        rank, world = self.args.process_index, self.args.world_size
        mine = sources[rank::world]
        share = translate(self.model, self.processing_class, mine, evaluation, source_lang, target_lang)
        if world == 1:
            return share
        shares = gather_object([share])
        translations = [""] * len(sources)
        for start, texts in enumerate(shares):
            translations[start::world] = texts
        return translations

    def _bleu(self) -> dict[str, float]:
        """Return BLEU on the validation set; for several language pairs, the mean and the BLEU of each pair."""
        scores, _ = translate_and_score(self.translate, self.eval_texts, self.data, self.evaluation)
        if "pairs" not in scores:
            return {"eval_bleu": scores["bleu"]}
        by_pair = {f"eval_bleu_{pair}": pair_scores["bleu"] for pair, pair_scores in scores["pairs"].items()}
        return {"eval_bleu": scores["average"]["bleu"], **by_pair}
