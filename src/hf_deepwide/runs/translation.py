"""The task of translation: train on pairs of sentences, score with sacreBLEU, and write a model card."""

import time
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..data.arguments import DataArguments
from ..data.corpora import load_parallel, load_whole
from ..data.digest import text_digest
from ..data.encoding import encode
from ..data.languages import add_tags, set_codes
from ..data.new_languages import add_codes
from ..data.tokenizer import load_or_train, training_rows, training_texts
from ..data.word_vocabulary import train_word_tokenizer
from ..durable import write_whole
from ..errors import UserError, prefixed
from ..evaluation.scoring import by_pair, score_sets, translate_and_score
from ..models.language_pairs import Languages
from ..models.word_tokenizer import WordTokenizer
from ..training.arguments import TranslationTrainingArguments
from ..training.translation import TranslationTrainer
from .build import build_model, check_base, new_rows, set_search
from .data_warnings import warn_of_capitals, warn_of_overlap, warn_of_unknown_tokens
from .model_card import write_model_card
from .recipe import Recipe
from .task import Task, warn_of_few
from .written_files import TRANSLATIONS, translations_file

STREAM_TEXTS, DATASET_TEXTS = 1_000_000, 10_000_000  # most pairs that a tokenizer is trained on
SAMPLES = 5  # test sentences in the model card


class Translation(Task):
    """Train a translation model, translate the test split and score the translations."""

    auto = AutoModelForSeq2SeqLM

    def check(self, args: TranslationTrainingArguments) -> None:
        """Refuse a recipe whose sections `data`, `tokenizer` and `training` contradict each other."""
        recipe = self.recipe
        needed = ["train"] if args.eval_strategy == "no" else ["train", "validation"]
        for split in needed if recipe.data.format != "phrases" else []:
            if getattr(recipe.data, split) is None:
                without = ", or set training.eval_strategy: no, load_best_model_at_end: false" * (split != "train")
                raise UserError(f"{recipe.source}: data.{split} is not set; say where it is{without}")
        if recipe.data.streaming:
            by_epochs = [name for name in ("eval_strategy", "save_strategy") if getattr(args, name) == "epoch"]
            needed_keys = ["max_steps: N"] * (args.max_steps <= 0)
            for name in by_epochs:
                needed_keys += [f"{name}: steps", f"{name.replace('strategy', 'steps')}: N"]
            if needed_keys:
                keys = ", ".join(needed_keys)
                raise UserError(
                    f"{recipe.source}: data.streaming: a stream has no length; set in the section training: {keys}"
                )
        if recipe.tokenizer.words:
            check_words(recipe)
        cuts = "bpe_dropout" if recipe.tokenizer.bpe_dropout else "unigram_alpha"
        if getattr(recipe.tokenizer, cuts) and args.dataloader_persistent_workers:
            raise UserError(
                f"{recipe.source}: training.dataloader_persistent_workers: tokenizer.{cuts} cuts words anew in each "
                "epoch, and workers that stay do not know of epochs; leave it out"
            )

    def check_base(self) -> None:
        """Check that the recipe's model can be made from the checkpoint `model.init_from`."""
        check_base(self.recipe)

    def read(
        self, args: TranslationTrainingArguments, ended: bool, scored: bool = False
    ) -> dict[str, Dataset | IterableDataset]:
        """Read the sentence pairs of each split. Splits that are evaluated are read into memory."""
        recipe, texts = self.recipe, {}
        if not ended:
            texts["train"] = load_parallel(recipe.data, "train")
            if recipe.data.format != "phrases" and isinstance(texts["train"], Dataset):
                warn_of_few(len(texts["train"]), "sentence pairs", recipe)
        if args.eval_strategy != "no" and not scored:  # scoring again does not change the losses
            texts["validation"] = load_whole(recipe.data, "validation")
        if recipe.data.test is not None or recipe.data.format == "phrases":
            texts["test"] = load_whole(recipe.data, "test")
            warn_of_capitals(texts["test"]["target"][:1000], recipe)
        if isinstance(texts.get("train"), Dataset) and recipe.data.format != "phrases":
            for split in ("validation", "test"):
                if split in texts:
                    warn_of_overlap(texts["train"], texts[split], split)
        if {"validation", "test"} <= texts.keys() and recipe.data.format != "phrases":
            warn_of_overlap(texts["validation"], texts["test"], "test", "validation")
        return texts

    def new_tokenizer(self, texts: dict[str, Dataset | IterableDataset]) -> PreTrainedTokenizerBase:
        """The tokenizer that the recipe names, or a new tokenizer, with the language codes and tags.

        Raises:
            UserError: a new language is not in the data, or cannot be added.
        """
        data, train = self.recipe.data, texts.get("train")
        limit = STREAM_TEXTS if isinstance(train, IterableDataset) else DATASET_TEXTS
        if self.recipe.tokenizer.words:
            return train_word_tokenizer(training_rows(train, limit), self.recipe.tokenizer)
        tokenizer = load_or_train(self.recipe.tokenizer, training_texts(train, limit), data, data.synthetic_tag)
        if new := self.recipe.tokenizer.new_languages:
            languages = {language for pair in data.language_pairs for language in pair}
            if unused := new.keys() - languages:
                raise UserError(f"tokenizer.new_languages: {min(unused)!r} is no language of the section data")
            add_codes(tokenizer, new)
        if isinstance(tokenizer, WordTokenizer):
            check_words(self.recipe)
        set_codes(tokenizer, data)
        add_tags(tokenizer, data)
        return tokenizer

    def encode(
        self, texts: dict[str, Dataset | IterableDataset], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
    ) -> dict[str, Dataset]:
        """Encode the splits that training needs. The test split is translated from text."""
        languages = Languages(model.config, model.generation_config, tokenizer)
        encoded = {
            split: encode(texts[split], tokenizer, self.recipe.data, filter=split == "train", languages=languages)
            for split in ("train", "validation")
            if split in texts
        }
        if isinstance(encoded.get("train"), Dataset) and not isinstance(tokenizer, WordTokenizer):
            warn_of_unknown_tokens(texts["train"], encoded["train"], tokenizer)
        return encoded

    def new_model(self, tokenizer: PreTrainedTokenizerBase, args: TranslationTrainingArguments) -> PreTrainedModel:
        """A new model, or the checkpoint `model.init_from`."""
        return build_model(self.recipe, tokenizer, args)

    def trainer(
        self,
        model: PreTrainedModel,
        args: TranslationTrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        encoded: dict[str, Dataset],
        texts: dict[str, Dataset | IterableDataset],
    ) -> TranslationTrainer:
        """Make the trainer. Check that the validation split gives every process a batch."""
        trainer = TranslationTrainer(
            model=model,
            args=args,
            tokenizer=tokenizer,
            train_dataset=encoded.get("train"),
            eval_dataset=encoded.get("validation"),
            eval_texts=texts.get("validation"),
            evaluation=self.recipe.evaluation,
            data=self.recipe.data,
            bpe_dropout=self.recipe.tokenizer.bpe_dropout,
            unigram_alpha=self.recipe.tokenizer.unigram_alpha,
        )
        if args.lora_r and "train" in encoded:
            trainer.lora.new_rows = new_rows(self.recipe, tokenizer)
        if "validation" in encoded:
            with prefixed("data.validation: "):
                trainer.get_eval_dataloader()
        return trainer

    def score(
        self, trainer: TranslationTrainer, encoded: dict[str, Dataset], texts: dict[str, Dataset | IterableDataset]
    ) -> dict[str, Any]:
        """Return the final model's validation losses, the scores of its test translations, and their speed.

        `digests` identify the sentences, and `compare` checks them.
        Several test sets are scored together, and each alone (`sets`).
        """
        evaluated = [split for split in ("validation", "test") if split in texts]
        results: dict[str, Any] = {"digests": {split: text_digest(texts[split]) for split in evaluated}}
        if "validation" in encoded:
            results["validation"] = trainer.validation_losses()
        self.samples: list[tuple[str, str, str]] = []
        self.translations: dict[str, list[str]] = {}
        if "test" not in texts:
            return results
        recipe, test = self.recipe, texts["test"]
        seconds = 0.0

        def timed(*args: Any) -> list[str]:
            nonlocal seconds
            begun = time.perf_counter()
            translations = trainer.translate(*args)
            seconds += time.perf_counter() - begun
            return translations

        scores, self.translations = translate_and_score(timed, test, recipe.data, recipe.evaluation)
        pairs = by_pair(test, recipe.data)
        shown = SAMPLES if len(pairs) == 1 else 1
        for pair, lines in self.translations.items():
            self.samples += zip(pairs[pair]["source"][:shown], lines, pairs[pair]["target"][:shown], strict=False)
        if recipe.data.test_sets:
            (lines,) = self.translations.values()
            scores["sets"] = score_sets(lines, test, recipe.data, recipe.evaluation)
        return {**results, "test": scores, "generation": {"sentences_per_second": len(test) / seconds}}

    def write(self, folder: Path, model: PreTrainedModel, results: dict[str, Any]) -> None:
        """Write the model's search settings, the translations and the model card."""
        recipe = self.recipe
        # The model translates as it was scored, even if the section evaluation has changed after training.
        if set_search(model, recipe):
            write_whole(folder / GENERATION_CONFIG_NAME, model.generation_config.to_json_string())
            write_whole(folder / CONFIG_NAME, model.config.to_json_string())
        files = translation_files(recipe.data)
        for pair, lines in self.translations.items():
            write_whole(folder / files[pair], "".join(f"{line}\n" for line in lines))
        write_model_card(folder, recipe, results, self.samples)


def translation_files(data: DataArguments) -> dict[str, str]:
    """Map each language pair to the file, in a run's folder, with its translations of the test split."""
    if data.pairs is None:
        return {f"{data.source_lang}-{data.target_lang}": TRANSLATIONS}
    return {pair: translations_file(pair) for pair in data.evaluated_pairs}


def check_words(recipe: Recipe) -> None:
    """Refuse keys that do not work with vocabularies of words, from `tokenizer.words` or `tokenizer.path`.

    Raises:
        UserError: the recipe sets `data.pairs` or a tag.
    """
    if recipe.data.pairs is not None:
        raise UserError(
            f"{recipe.source}: data.pairs: vocabularies of words are of one language pair; name it by "
            "data.source_lang and data.target_lang, and leave data.pairs out"
        )
    if recipe.data.synthetic_tag is not None:
        raise UserError(f"{recipe.source}: data.synthetic_tag: vocabularies of words take no tag; leave it out")
