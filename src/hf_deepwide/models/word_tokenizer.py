"""Words without subwords: a tokenizer with a vocabulary for sources and another for targets.

Code comes as tokens with spaces between them. The experiments with MAT on code (section 5) cut it at these spaces and
nowhere else, and know the most frequent words of each side. All other words are `<unk>`.

Spaces are exact: two spaces in a row have an empty word between them, and a word keeps its case and its letters. So
decoding gives back each text whose words are known.

The file travels with each tokenizer that is saved: it imports tokenizers and transformers, and nothing else.
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
    """Sources and targets as ids of words, each side with ids of its own.

    Called with `text`, the tokenizer encodes sources; `text_target` gives targets. `decode` takes ids of targets, as a
    model generates them. `<unk>` is part of what is decoded, as a word that the model has written.

    `len`, `get_vocab` and the conversions between tokens and ids are of the source side. In them a word begins with
    the space before it, so that no word of a text is a special token.

    Args:
        source_words, target_words: the words of each side; ids follow their order.
        source_vocab_file, target_vocab_file: JSON files with these lists, where a saved tokenizer is loaded.
        lowercase: fold case on both sides.
        normalization: Unicode form of both sides: nfkc, nfc or none.
        kwargs: as for `PreTrainedTokenizerFast`.

    Raises:
        ValueError: a list or a file is missing, or holds something else; or `normalization` is not known.
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
        """The target vocabulary, `{entry: id}`, under the name that Marian's tokenizer has for it."""
        return self._target_backend.get_vocab()

    @property
    def target_backend(self) -> Tokenizer:
        """What encodes targets; `backend_tokenizer` encodes sources."""
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
        """The text of a source's ids, as `decode` gives that of a target's; special tokens are left out."""
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
    """What is done to a text before it is cut.

    Raises:
        ValueError: the `normalization` is not known.
    """
    if normalization not in (*FORMS, "none"):
        raise ValueError(f"normalization is {normalization!r}; accepted: {', '.join(FORMS)}, none")
    steps = [] if normalization == "none" else [FORMS[normalization]()]
    return [*steps, normalizers.Lowercase()] if lowercase else steps


def _text(ids: Sequence[int], words: Sequence[str], skip_special_tokens: bool) -> str:
    """The text of the ids of one side, which has these words."""
    left_out = {SPECIAL.index(token) for token in (BOS, PAD, EOS)} if skip_special_tokens else set()
    return SPACE.join(_word(number, words) for number in ids if number not in left_out)


def _word(number: int, words: Sequence[str]) -> str:
    if number < len(SPECIAL):
        return SPECIAL[number]
    place = number - len(SPECIAL)
    return words[place] if place < len(words) else UNK


def _words(words: Sequence[str] | None, file: str | None, name: str) -> list[str]:
    """The words of one side, checked: files may come from anywhere."""
    if words is None:
        if file is None:
            raise ValueError(f"the tokenizer's file {name} is missing")
        words = json.loads(Path(file).read_text(encoding="utf-8"))
    is_list = isinstance(words, list | tuple) and all(isinstance(word, str) and SPACE not in word for word in words)
    if not is_list or len(set(words)) < len(words):
        raise ValueError(f"{name} must be a list of different words without spaces")
    return list(words)


def _backend(words: list[str], steps: list[normalizers.Normalizer]) -> Tokenizer:
    """A tokenizer that cuts a text before each space. The space that is put before the text makes all words alike."""
    entries = (*SPECIAL, *(SPACE + word for word in words))
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Prepend(SPACE)])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" [^ ]*"), "isolated")
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, vocabulary[EOS])]
    )
    return backend
