"""The joint subword vocabulary: a BPE that `AutoTokenizer` loads without this package.

One vocabulary serves both languages ("joint BPE", Sennrich et al. 2016, section 3.2). So names and numbers have the
same pieces on both sides, and the embeddings can be tied. The special tokens have the ids of fairseq, which the papers
use.
"""

import dataclasses
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from datasets import Dataset, IterableDataset
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import UserError, quote
from ..limits import Range, check_numbers
from ..loading import load_tokenizer
from ..models.language_pairs import target_vocabulary
from ..models.word_tokenizer import WordTokenizer, text_steps
from ..progress import shows_bars
from ..reading import folder_or_hub_id
from .arguments import Places
from .bpe_codes import SPECIAL_TOKENS, finish, tokenizer_from_codes
from .new_languages import CODE

logger = logging.getLogger(__name__)

Normalization = Literal["nfkc", "nfc", "none"]
PLACES = Places()  # relative paths start at the environment variable or the working directory
# Merges must not make such a piece from the letters of a text: it would have the id of the special token or tag.
LITERAL = r"<(?=(?:/?s|pad|unk|mask|2\w+)>)"
LONG_WORD = re.compile(r"\S{1000}")  # the time of training is quadratic in the length of the longest word
RANGES = {
    "min_frequency": Range(1, 10**12),
    "bpe_dropout": Range(0, 1),
    "unigram_alpha": Range(0, 1, excludes_least=True),
}
TRAINING_KEYS = ("vocab_size", "lowercase", "normalization", "split_digits", "min_frequency")  # for a new tokenizer
LARGEST = 10_000_000  # most entries of a vocabulary: memory for all entries is allocated before training


@dataclass
class TokenizerArguments:
    """The section `tokenizer` of a recipe.

    Args:
        path: an existing tokenizer, folder or Hub id. Then only the fields `bpe_dropout`, `unigram_alpha` and
            `new_languages` have an effect.
        codes: merges of subword-nmt or fastBPE, for text that is tokenised already. Then `path` must be null, and only
            `bpe_dropout` has an effect. Relative paths start where the paths of `data` start.
        words: whole words in place of subwords, and a vocabulary for each side (see `data.word_vocabulary`).
        vocab_size: entries of the vocabulary, the four special tokens included; with `words`, of the source
            vocabulary. A small corpus may not fill it, which is logged.
        target_vocab_size: with `words`, entries of the target vocabulary; None: as `vocab_size`.
        lowercase: convert source and target to lower case before any other step. Translations are then in lower case
            too.
        normalization: Unicode form of all text. "nfkc" also unifies widths, ligatures and unusual spaces ("½" becomes
            "1⁄2"). "nfc" only composes accents. "none" does not change the text.
        split_digits: one token per digit, so that the model can copy unseen numbers digit by digit.
        min_frequency: least number of occurrences for a pair of pieces to be merged or, with `words`, for a word to be
            in the vocabulary.
        bpe_dropout: in training each merge is left out with this probability (see `data.bpe_dropout`).
        unigram_alpha: in training the pieces of a Unigram tokenizer are drawn by their probabilities to the power of
            this number (see `data.unigram_sampling`); None: the most probable pieces.
        new_languages: language codes that the tokenizer at `path` lacks, each with the code of a related language, or
            None (see `data.new_languages`).
    """

    path: str | None = None
    codes: str | None = None
    words: bool = False
    vocab_size: int = 8000
    target_vocab_size: int | None = None
    lowercase: bool = False
    normalization: Normalization = "nfkc"
    split_digits: bool = False
    min_frequency: int = 2
    bpe_dropout: float = 0.0
    unigram_alpha: float | None = None
    new_languages: dict[str, str | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.normalization not in get_args(Normalization):
            accepted = ", ".join(get_args(Normalization))
            raise UserError(f"tokenizer.normalization is {quote(self.normalization)}; accepted: {accepted}")
        for name in ("vocab_size", "target_vocab_size"):
            size = getattr(self, name)
            if size is not None and not len(SPECIAL_TOKENS) < size <= LARGEST:
                raise UserError(
                    f"tokenizer.{name} is {quote(size)}; it must exceed the 4 special tokens, and be {LARGEST:,} at "
                    "most"
                )
        if self.path:
            self.path = folder_or_hub_id(self.path, "tokenizer.path")
        if self.path and self.codes:
            raise UserError("tokenizer.path and tokenizer.codes are both set; set the one that is meant")
        for code, related in self.new_languages.items():
            for language in (code, related):
                if language is not None and not (isinstance(language, str) and re.fullmatch(CODE, language)):
                    raise UserError(
                        f"tokenizer.new_languages: {quote(code)}: {quote(language)} is no code of a language; "
                        "accepted: letters, digits and _. Write the new code, and a related one that the tokenizer "
                        "knows, or null"
                    )
        if self.new_languages and not self.path:
            raise UserError("tokenizer.new_languages adds to a tokenizer with codes; set tokenizer.path to it")
        if self.unigram_alpha is not None and not self.path:
            raise UserError(
                "tokenizer.unigram_alpha is for Unigram tokenizers, and a new tokenizer is a BPE; set tokenizer.path, "
                "or bpe_dropout in place of unigram_alpha"
            )
        if self.unigram_alpha is not None and self.bpe_dropout:
            raise UserError(
                "tokenizer.bpe_dropout and tokenizer.unigram_alpha are both set; set the one that fits the tokenizer"
            )
        check_numbers(self, RANGES, "tokenizer.")
        self._check_words()

    def _check_words(self) -> None:
        if not self.words:
            if self.target_vocab_size is not None:
                raise UserError(
                    "tokenizer.target_vocab_size is set, and one vocabulary of subwords serves both sides; set "
                    "tokenizer.words: true, or leave target_vocab_size out"
                )
            return
        for name, alone in (("path", None), ("codes", None), ("split_digits", False), ("bpe_dropout", 0)):
            if getattr(self, name) != alone:
                raise UserError(f"tokenizer.words takes whole words as they are; leave tokenizer.{name} out")


def training_texts(dataset: Dataset | IterableDataset, limit: int | None = None) -> Iterator[str]:
    """Yield source and target of at most `limit` pairs (None: all pairs) for `train_tokenizer`; see `training_rows`.

    With several language pairs (a column `pair`) each text is yielded only once. Otherwise the texts of a language in
    all pairs would count once for each pair, and this language would get most of the vocabulary.
    """
    seen: set[bytes] = set()
    for row in training_rows(dataset, limit):
        for text in (row["source"], row["target"]):
            if "pair" in row:
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if digest in seen:
                    continue
                seen.add(digest)
            yield text


def training_rows(dataset: Dataset | IterableDataset, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield at most `limit` pairs (None: all pairs) for the training of a tokenizer.

    From a stream these are the first pairs. From a dataset they are drawn at random, and are always the same pairs.
    The first pairs of a dataset may have only one language pair or one domain.
    """
    if limit is not None and isinstance(dataset, Dataset) and limit < len(dataset):
        logger.info("the tokenizer is trained on %d of the %d pairs", limit, len(dataset))
        rows = np.random.default_rng(0).choice(len(dataset), limit, replace=False, shuffle=False)
        dataset = dataset.select(np.sort(rows))
    for number, row in enumerate(dataset):
        if limit is not None and number == limit:
            logger.info("the tokenizer is trained on the first %d pairs", limit)
            return
        yield row


def train_tokenizer(texts: Iterable[str], args: TokenizerArguments, tag: str | None = None) -> PreTrainedTokenizerFast:
    """Train a joint BPE on `texts`; the same texts in the same order always give the same tokenizer.

    The names of special tokens in `texts` are treated like any other text, and so is a `tag` that will be added. For
    the training, words are split after 1,000 characters.

    The tokenizer turns text into pieces and `</s>`. The ids are `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3. Decoding
    gives back the normalised text, spaces included. Nothing is saved: the caller calls `save_pretrained`.

    Raises:
        UserError: there is no text, or it has more distinct characters than `vocab_size` allows.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS["unk_token"], fuse_unk=True))
    steps = text_steps(args.lowercase, args.normalization)
    literals = [LITERAL, *([] if tag is None else [f"<(?={re.escape(tag[1:])})"])]
    tokenizer.normalizer = normalizers.Sequence(
        [*steps, *(normalizers.Replace(Regex(literal), "< ") for literal in literals)]
    )
    # "always" and not "first": a language tag strips the space after it, and the next word must begin with the mark
    # too.
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    digits = [pre_tokenizers.Digits(individual_digits=True)] if args.split_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([metaspace, *digits]) if digits else metaspace
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        min_frequency=args.min_frequency,
        special_tokens=list(SPECIAL_TOKENS.values()),
        show_progress=shows_bars(),  # in a log file, a bar would leave empty lines
    )
    tokenizer.train_from_iterator((LONG_WORD.sub(r"\g<0> ", text) for text in texts), trainer)
    tokenizer.normalizer = normalizers.Sequence(steps) if steps else None
    size = tokenizer.get_vocab_size()
    if size == len(SPECIAL_TOKENS):
        raise UserError("the tokenizer was given no text to train on")
    if size > args.vocab_size:
        raise UserError(
            f"tokenizer.vocab_size is {args.vocab_size}, but the text alone has {size - len(SPECIAL_TOKENS)} "
            f"distinct characters; accepted: {size} or more"
        )
    if size < args.vocab_size:
        logger.info("the text fills only %d of the %d entries asked for", size, args.vocab_size)
    return finish(tokenizer)


def load_or_train(
    args: TokenizerArguments,
    texts: Iterable[str],
    data: Places = PLACES,
    tag: str | None = None,
    needs: Sequence[str] = ("pad_token", "eos_token"),
) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `args.path`, make one from the merges `args.codes`, or train one on `texts`.

    Args:
        args: the section `tokenizer` of a recipe.
        texts: the training data, which is not read if there is a path.
        data: the section that determines where relative paths start.
        tag: a token that will be added; no text may become this token.
        needs: the special tokens that a loaded tokenizer must have.

    Raises:
        UserError: the tokenizer, its merges or the texts cannot be used, a special token is missing, or `words` is
            set.
    """
    if args.words:
        raise UserError("tokenizer.words makes a vocabulary for each side of a translation; leave it out here")
    if args.codes is not None:
        return tokenizer_from_codes(data.resolve(args.codes), texts)
    if args.path is None:
        return train_tokenizer(texts, args, tag)
    tokenizer = load_tokenizer(args.path, f"tokenizer.path {quote(args.path)}: no tokenizer could be loaded")
    for token in needs:
        if getattr(tokenizer, token) is None:
            raise UserError(f"tokenizer.path {quote(args.path)}: it has no {token}, which the model needs")
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise a `UserError` that lists all the ways in which `tokenizer` does not fit a model's `config`.

    Every id must have an embedding, also in a decoder with its own vocabulary, and the padding id too. Tokenizer and
    model must have the same ids for padding and for the end of a sentence. A model may have more embeddings than the
    tokenizer has entries. Only a model with a decoder needs `decoder_start_token_id`.
    """
    problems = []
    sizes = {
        "vocab_size": config.vocab_size,
        "decoder_vocab_size": getattr(config, "decoder_vocab_size", None),
    }
    entries = {"vocab_size": len(tokenizer), "decoder_vocab_size": len(target_vocabulary(tokenizer) or tokenizer)}
    if isinstance(tokenizer, WordTokenizer):
        # A config without the field has one matrix for both sides.
        sizes["decoder_vocab_size"] = sizes["decoder_vocab_size"] or config.vocab_size
    for field, size in sizes.items():
        if size is not None and entries[field] > size:
            problems.append(f"the tokenizer has {entries[field]} entries but the model's {field} is {size}")
    for field in ("pad_token_id", "eos_token_id"):
        theirs, ours = getattr(tokenizer, field), getattr(config, field)
        if theirs not in (ours if isinstance(ours, list) else [ours]):
            problems.append(f"{field} is {theirs} in the tokenizer and {ours} in the model")
    start, size = getattr(config, "decoder_start_token_id", None), sizes["decoder_vocab_size"] or sizes["vocab_size"]
    if config.is_encoder_decoder and tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= size:
        problems.append(f"pad_token_id is {tokenizer.pad_token_id}, and the decoder has {size} embeddings")
    if config.is_encoder_decoder and start is not None and not 0 <= start < size:
        problems.append(f"the model's decoder_start_token_id is {start}; it must be an id below {size}")
    if config.is_encoder_decoder and start is None and not problems:
        raise UserError(
            "the model's config has no decoder_start_token_id. Write it into config.json and generation_config.json: "
            "the id of the token that begins a translation in the decoder (in mBART, the code of the target language)"
        )
    if problems:
        raise UserError(
            "the tokenizer does not fit the model: " + "; ".join(problems) + ". Use the tokenizer the model was "
            "trained with, or a model configured from this tokenizer"
        )
