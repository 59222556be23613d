"""Encoded corpora, kept from one run to the next: the same text and the same tokenizer need not be encoded again."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import tokenizers
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..durable import discard, whole_folder
from ..models.word_tokenizer import WordTokenizer
from ..progress import bars_where_shown
from .digest import data_digest

logger = logging.getLogger(__name__)

LEAST_PAIRS = 100_000  # fewer are encoded in seconds
MOST_BYTES = 20 * 2**30  # of all that is kept; what was not used for the longest time goes first
SHARE = 10  # what is kept takes at most one part in so many of the free disk
DIGEST = "digest.txt"
FORMAT = "1"  # another number wherever the same text and tokenizer would be encoded otherwise


def cache_folder() -> Path:
    """Where encoded corpora are kept: within the cache of `datasets` (`HF_DATASETS_CACHE`)."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "hf_deepwide_encoded"


def kept_or_made(
    texts: Dataset, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], make: Callable[[], Dataset]
) -> Dataset:
    """What `make` returns, from the cache where it is there. Each of several processes makes it; the first keeps it.

    Small corpora, and tokenizers whose content cannot be compared, are encoded each time. Nothing is kept where the
    disk has little room, or cannot be written.

    Args:
        texts: the text that is encoded.
        tokenizer: what it is encoded with.
        settings: all else that the outcome depends on, as JSON has it.
        make: encodes.
    """
    content = tokenizer_content(tokenizer) if len(texts) >= LEAST_PAIRS else None
    if content is None:
        return make()
    parts = [FORMAT, tokenizers.__version__, data_digest(texts), content, json.dumps(settings, sort_keys=True)]
    place = cache_folder() / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    if (kept := _read(place)) is not None:
        logger.info("the encoded pairs come from %s", place)
        return kept
    made = make()
    if not PartialState().is_local_main_process:  # nobody waits: encoding may take longer than a barrier lasts
        return made
    if made.data.nbytes > MOST_BYTES:
        logger.info("the encoded pairs are not kept in %s: they are larger than all that is kept", place.parent)
        return made
    if made.data.nbytes * SHARE > _free(place):
        logger.info("the encoded pairs are not kept in %s: the disk has little room", place.parent)
        return made
    try:
        _make_room(place.parent, made.data.nbytes)
        with whole_folder(place) as draft, bars_where_shown():
            made.save_to_disk(draft)
            (draft / DIGEST).write_text(data_digest(made), encoding="utf-8")
    except OSError as error:  # also where another process has been faster
        logger.info("the encoded pairs are not kept in %s: %s", place.parent, error)
        return made
    logger.info("the encoded pairs are kept in %s, for the next run with the same text and tokenizer", place)
    return made


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """All that a fast tokenizer's ids depend on; None of a slow tokenizer, and of one that draws random numbers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    content = json.loads(backend.to_str())
    draws = content["model"].get("dropout") or content["model"].get("alpha")
    contents = [content]
    if isinstance(tokenizer, WordTokenizer):
        contents.append(json.loads(tokenizer.target_backend.to_str()))
    return None if draws else json.dumps([type(tokenizer).__name__, *contents], sort_keys=True)


def _read(place: Path) -> Dataset | None:
    """What is kept at a place; None, and it is removed, where it is damaged."""
    if not place.is_dir():
        return None
    try:
        kept = Dataset.load_from_disk(str(place))
        whole = data_digest(kept) == (place / DIGEST).read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError):  # what is there is not what was written
        whole = False
    if not whole:
        logger.warning("%s is damaged; it is removed, and the pairs are encoded again", place)
        _try(discard, place)
        return None
    _try(os.utime, place)
    return kept


def _try(change: Callable[[Path], None], place: Path) -> None:
    """Change what is kept, if it is ours: several people may share the cache."""
    try:
        change(place)
    except OSError as error:
        logger.info("%s stays as it is: %s", place, error)


def _free(place: Path) -> int:
    """Bytes of free disk at the nearest folder that exists."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _make_room(folder: Path, needed: int) -> None:
    """Remove what was not used for the longest time, until `needed` bytes more are within the limit."""
    kept = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    # below a folder, too: a process that was killed has left its draft there
    sizes = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in kept}
    for path in sorted(kept, key=lambda path: path.stat().st_mtime):
        if sum(sizes.values()) + needed <= MOST_BYTES:
            return
        _try(discard, path)
        del sizes[path]
