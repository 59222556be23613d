"""A tokenizer of whole words, with one vocabulary for sources and another for targets.

Code is given as tokens with spaces between them. The MAT experiments on code (section 5) split only at these spaces.
The vocabulary of each side holds its most frequent words. All other words are `<unk>`.

Spaces are exact: two spaces in a row have an empty word between them. By default a word keeps its case and its
letters. So decoding restores each text whose words are all in the vocabulary.

This file is saved with each tokenizer. So it imports only tokenizers and transformers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerFast

BOS, PAD, EOS, UNK = SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3 of both vocabularies
SPACE = " "
FORMS = {"nfkc": normalizers.NFKC, "nfc": normalizers.NFC}


class WordTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that maps words to ids, with separate ids for sources and targets.

    The argument `text` is encoded as a source, and `text_target` as a target. `decode` expects target ids, because a
    model generates target ids. Decoding keeps `<unk>`, as a word that the model has written.

    `len`, `get_vocab` and the conversions between tokens and ids use the source vocabulary. There each word begins
    with the space before it, so that no word of a text is a special token.

    Args:
        source_words, target_words: the words of each side; ids follow their order.
        source_vocab_file, target_vocab_file: JSON files with these lists, for loading a saved tokenizer.
        lowercase: convert both sides to lower case.
        normalization: Unicode form of both sides: nfkc, nfc or none.
        kwargs: as for `PreTrainedTokenizerFast`.

    Raises:
        ValueError: a list or a file is missing or invalid, or `normalization` is unknown.
    """

    vocab_files_names = {"source_vocab_file": "vocab_source.json", "target_vocab_file": "vocab_target.json"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self,
        source_words: Sequence[str] | None = None,
        target_words: Sequence[str] | None = None,
        source_vocab_file: str | None = None,
        target_vocab_file: str | None = None,
        lowercase: bool = False,
        normalization: str = "none",
        **kwargs: Any,
    ) -> None:
        self.source_words = _words(source_words, source_vocab_file, self.vocab_files_names["source_vocab_file"])
        self.target_words = _words(target_words, target_vocab_file, self.vocab_files_names["target_vocab_file"])
        steps = text_steps(lowercase, normalization)
        self._tokenizer = _backend(self.source_words, steps)
        self._target_backend = _backend(self.target_words, steps)
        self._on_target_side = False
        special = {"bos_token": BOS, "pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
        fixed = {"clean_up_tokenization_spaces": False, "lowercase": lowercase, "normalization": normalization}
        super().__init__(**{"padding_side": "right", **special, **kwargs, **fixed})

    @property
    def target_vocab_size(self) -> int:
        """Entries of the target vocabulary, the special tokens included."""
        return len(SPECIAL) + len(self.target_words)

    @property
    def target_encoder(self) -> dict[str, int]:
        """The target vocabulary, `{entry: id}`. Marian's tokenizer has an attribute of the same name."""
        return self._target_backend.get_vocab()

    @property
    def target_backend(self) -> Tokenizer:
        """The backend that encodes targets; `backend_tokenizer` encodes sources."""
        return self._target_backend

    def _switch_to_target_mode(self) -> None:
        self._on_target_side = True

    def _switch_to_input_mode(self) -> None:
        self._on_target_side = False

    def _encode_plus(self, *args: Any, **kwargs: Any) -> BatchEncoding:
        if not self._on_target_side:
            return super()._encode_plus(*args, **kwargs)
        source = self._tokenizer
        self._tokenizer = self._target_backend
        try:
            return super()._encode_plus(*args, **kwargs)
        finally:
            self._tokenizer, self._on_target_side = source, False

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        if isinstance(token_ids, dict):
            token_ids = token_ids["input_ids"]
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return _text(ids, self.target_words, skip_special_tokens)

    def decode_source(self, token_ids: Sequence[int]) -> str:
        """Decode source ids to text, as `decode` does for target ids. Special tokens except `<unk>` are left out."""
        return _text(token_ids, self.source_words, skip_special_tokens=True)

    def _save_pretrained(
        self,
        save_directory: str,
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        written = []
        for (_, name), words in zip(
            self.vocab_files_names.items(), (self.source_words, self.target_words), strict=True
        ):
            path = Path(save_directory) / f"{prefix}{name}"
            path.write_text(json.dumps(words, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
            written.append(str(path))
        return (*file_names, *written)


WordTokenizer.register_for_auto_class()  # so that this file is saved with the tokenizer, and named in its config


def text_steps(lowercase: bool, normalization: str) -> list[normalizers.Normalizer]:
    """Return the normalizers that change a text before it is split into words.

    Raises:
        ValueError: the `normalization` is unknown.
    """
    if normalization not in (*FORMS, "none"):
        raise ValueError(f"normalization is {normalization!r}; accepted: {', '.join(FORMS)}, none")
    steps = [] if normalization == "none" else [FORMS[normalization]()]
    return [*steps, normalizers.Lowercase()] if lowercase else steps


def _text(ids: Sequence[int], words: Sequence[str], skip_special_tokens: bool) -> str:
    """Decode the ids of one side, whose vocabulary is `words`, to text."""
    left_out = {SPECIAL.index(token) for token in (BOS, PAD, EOS)} if skip_special_tokens else set()
    return SPACE.join(_word(number, words) for number in ids if number not in left_out)


def _word(number: int, words: Sequence[str]) -> str:
    if number < len(SPECIAL):
        return SPECIAL[number]
    place = number - len(SPECIAL)
    return words[place] if place < len(words) else UNK


def _words(words: Sequence[str] | None, file: str | None, name: str) -> list[str]:
    """Return the words of one side. They are checked, because a file may come from any source."""
    if words is None:
        if file is None:
            raise ValueError(f"the tokenizer's file {name} is missing")
        words = json.loads(Path(file).read_text(encoding="utf-8"))
    is_list = isinstance(words, list | tuple) and all(isinstance(word, str) and SPACE not in word for word in words)
    if not is_list or len(set(words)) < len(words):
        raise ValueError(f"{name} must be a list of different words without spaces")
    return list(words)


def _backend(words: list[str], steps: list[normalizers.Normalizer]) -> Tokenizer:
    """Make a tokenizer that splits a text before each space; a space put before the text makes all words alike."""
    entries = (*SPECIAL, *(SPACE + word for word in words))
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Prepend(SPACE)])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" [^ ]*"), "isolated")
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, vocabulary[EOS])]
    )
    return backend
