"""A cache of encoded corpora: later runs with the same text and tokenizer need not encode the text again."""

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

LEAST_PAIRS = 100_000  # smaller corpora are encoded in seconds
MOST_BYTES = 20 * 2**30  # size of the cache; the corpora that were not used for the longest time are removed first
SHARE = 10  # a corpus is cached only if it takes at most 1 / SHARE of the free disk
DIGEST = "digest.txt"
FORMAT = "1"  # change the number when a change of the code gives other ids for the same text and tokenizer


def cache_folder() -> Path:
    """Return the folder of encoded corpora, which is within the cache of `datasets` (`HF_DATASETS_CACHE`)."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "hf_deepwide_encoded"


def kept_or_made(
    texts: Dataset, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], make: Callable[[], Dataset]
) -> Dataset:
    """Return the encoded pairs from the cache if they are there, else from `make`, and cache them.

    Without an entry in the cache, each process calls `make`, and only the first process of a machine writes the cache.
    Small corpora are encoded each time, and so are texts for a tokenizer whose content cannot be compared. Nothing is
    cached if the disk has little room, or cannot be written.

    Args:
        texts: the text to encode.
        tokenizer: the tokenizer that encodes it.
        settings: all other values on which the result depends, as JSON types.
        make: a function that encodes the text.
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
    if not PartialState().is_local_main_process:  # without a barrier: encoding may take longer than its timeout
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
    except OSError as error:  # also if another process has written the folder first
        logger.info("the encoded pairs are not kept in %s: %s", place.parent, error)
        return made
    logger.info("the encoded pairs are kept in %s, for the next run with the same text and tokenizer", place)
    return made


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return all settings on which the ids of a fast tokenizer depend; None for a slow or a random tokenizer."""
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
    """Return the dataset at a place; None if there is none. A damaged dataset is removed, and gives None."""
    if not place.is_dir():
        return None
    try:
        kept = Dataset.load_from_disk(str(place))
        whole = data_digest(kept) == (place / DIGEST).read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError):  # a file is missing or damaged
        whole = False
    if not whole:
        logger.warning("%s is damaged; it is removed, and the pairs are encoded again", place)
        _try(discard, place)
        return None
    _try(os.utime, place)
    return kept


def _try(change: Callable[[Path], None], place: Path) -> None:
    """Change a folder of the cache; only log it if that is not permitted: several users may share the cache."""
    try:
        change(place)
    except OSError as error:
        logger.info("%s stays as it is: %s", place, error)


def _free(place: Path) -> int:
    """Return the free bytes of the disk at the nearest parent folder that exists."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _make_room(folder: Path, needed: int) -> None:
    """Remove the corpora that were not used for the longest time, until `needed` more bytes are within the limit."""
    kept = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    # `rglob`, because the draft of a process that was killed is one folder deeper
    sizes = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in kept}
    for path in sorted(kept, key=lambda path: path.stat().st_mtime):
        if sum(sizes.values()) + needed <= MOST_BYTES:
            return
        _try(discard, path)
        del sizes[path]
