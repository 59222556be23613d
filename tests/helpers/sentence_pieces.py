"""SentencePiece models trained on a few lines, and vocabulary files for tokenizers of Transformers."""

import json
from collections.abc import Iterable
from pathlib import Path

import sentencepiece


def train_pieces(folder: Path, lines: Iterable[str], vocab_size: int, name: str = "m") -> tuple[str, list[str]]:
    """Train a model; return the path of its file `folder/name.model`, and its pieces without the special ones."""
    (folder / "text").write_text("\n".join(lines), encoding="utf-8")
    prefix = str(folder / name)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=prefix, vocab_size=vocab_size, minloglevel=2
    )
    model = sentencepiece.SentencePieceProcessor(f"{prefix}.model")
    return f"{prefix}.model", [model.id_to_piece(number) for number in range(3, len(model))]


def write_vocabulary(path: Path, words: Iterable[str]) -> str:
    """Write a JSON file that maps each word to its index, and return the file's path."""
    path.write_text(json.dumps({word: number for number, word in enumerate(words)}), encoding="utf-8")
    return str(path)
