"""Share a model: a folder for the Hub that works in a process without this package.

    share("runs/mat", "to-upload")                 # the folder
    share("runs/mat", repo_id="me/mat")            # … and its upload

The folder holds weights (safetensors), config, generation config, tokenizer, model card, and the files of
`hf_deepwide.models` that the family needs. With `trust_remote_code=True`, `AutoModelForSeq2SeqLM` and
`pipeline("translation")` load it anywhere; where this package is imported they need no flag and run its code.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HFValidationError, HTTPError  # HTTPError: the HTTP library's, httpx or httpx2
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from .data.tokenizer import check_tokenizer
from .errors import UserError
from .loading import load_model, load_tokenizer
from .models.pipeline_translation import TranslationPipeline
from .registration import FAMILIES, Family

logger = logging.getLogger(__name__)

CARD = "README.md"
LINKED = {".png", ".svg", ".jpg", ".jpeg", ".gif", ".json", ".yaml", ".yml", ".txt", ".md"}  # what a card may refer to
OTHERS = "Models of transformers itself need no code: upload them with push_to_hub"
CUSTOM_PIPELINES = {
    "translation": {
        "impl": f"{TranslationPipeline.__module__.rpartition('.')[2]}.{TranslationPipeline.__name__}",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}
USE = """
import sys
sys.modules["hf_deepwide"] = None  # importing it fails
from transformers import AutoModel, pipeline
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
translator = pipeline("translation", model=sys.argv[1], trust_remote_code=True, device="cpu")
for loaded in (translator, translator.model, translator.model.config):
    assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
pairs = getattr(translator.model.config, "translation_pairs", None)
languages = dict(zip(("src_lang", "tgt_lang"), next(iter(pairs)).split("-"))) if pairs else {}
translator("1", **languages, max_length=4, num_beams=1)
"""


def share(
    model: str | os.PathLike | PreTrainedModel,
    folder: str | os.PathLike | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    repo_id: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> str:
    """Write a folder that loads without this package, upload it, or both.

    Args:
        model: a folder with a model of one of our families and its tokenizer (a finished run, a checkpoint), or the
            model itself, together with `tokenizer`.
        folder: where to write; None only together with `repo_id`.
        tokenizer: None: the one in `model`'s folder.
        repo_id: repository on the Hub, made if it does not exist.
        private: whether a new repository is private; None: the account's default.
        token: of the Hub; None: the one this machine is logged in with.
        commit_message: of the upload.
        overwrite: replace an earlier result of `share` in `folder`. Anything else is never replaced.
        verify: load the result and translate with it in a process that cannot import this package (some seconds).

    Returns:
        The folder, or the URL of the repository.

    Raises:
        UserError: a model that is not ours or is incomplete, no tokenizer, a folder that is in use, no way to the Hub.
        RuntimeError: the result does not load without the package; nothing is left in `folder` then.

    The model card is the one beside the model, else the one already in `folder`, else a minimal one.
    """
    if folder is None and repo_id is None:
        raise UserError("share: say where to: give a folder, a repo_id, or both")
    if repo_id is not None:
        _check_upload(repo_id)
    source = Path(model) if isinstance(model, (str, os.PathLike)) else None
    folder = None if folder is None else Path(folder)
    if folder is not None:
        _check_folder(folder, source, overwrite)
    model, family = _own(model) if source is None else _load(source)
    tokenizer = tokenizer if tokenizer is not None else _load_tokenizer(source)
    check_tokenizer(tokenizer, model.config)
    kept_card = _kept_card(source, folder)

    with _staging(folder) as staged:
        write_checkpoint(model, family, tokenizer, staged)
        if kept_card is None:
            minimal_card(model, repo_id or folder.as_posix()).save(staged / CARD)
        else:
            _copy_card(kept_card, staged)
        if verify:
            verify_folder(staged)
        location = str(folder)
        if folder is not None:
            _replace(folder, staged)
            logger.info("%s is ready for the Hub", folder)
        if repo_id is not None:
            location = _upload(folder or staged, repo_id, private, token, commit_message or f"Share {repo_id}")
            logger.info("uploaded to %s", location)
    return location


def write_checkpoint(model: PreTrainedModel, family: Family, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model with its tokenizer, its code, and the config entries by which the Auto classes find the code."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for cls in (*family.auto_classes.values(), TranslationPipeline):
        custom_object_save(cls, folder)  # the file that defines the class, and what it imports from its own folder
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = {
        auto_class: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
        for auto_class, cls in family.auto_classes.items()
    }
    config["custom_pipelines"] = CUSTOM_PIPELINES
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def minimal_card(model: PreTrainedModel, location: str) -> ModelCard:
    """A model card that says what the model is and how to load it from its repository or folder."""
    model_type = model.config.model_type
    data = ModelCardData(
        library_name="transformers", pipeline_tag="translation", tags=["translation", "hf_deepwide", model_type]
    )
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n# {location.rpartition('/')[2]}\n\n"
        f"A translation model of the family `{model_type}`, {model.num_parameters():,} parameters.\n\n"
        "```python\nfrom transformers import pipeline\n\n"
        f'translator = pipeline("translation", model="{location}", trust_remote_code=True)\n```\n\n'
        "The flag runs the code in this repository. It is not needed after `import hf_deepwide`.\n"
    )


def verify_folder(folder: str | os.PathLike) -> None:
    """Load a shared folder and translate with it in a process that cannot import this package.

    Raises:
        RuntimeError: that failed; the message ends with the process's own.
    """
    with tempfile.TemporaryDirectory() as modules:
        # its own cache of remote code, so that nothing is loaded from an earlier share and nothing is left behind
        environment = {**os.environ, "HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            [sys.executable, "-c", USE, str(Path(folder).resolve())],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"the shared folder does not load without hf_deepwide:\n{process.stderr[-3000:]}")


def _own(model: Any) -> tuple[PreTrainedModel, Family]:
    """A loaded model, which must be of this package, and not of a copy of its code in a checkpoint."""
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", None))
    if family is None or type(model) is not family.lm:
        accepted = ", ".join(family.lm.__name__ for family in FAMILIES.values())
        raise UserError(
            f"share: cannot share a {type(model).__module__}.{type(model).__name__}; accepted: a folder, or one of "
            f"hf_deepwide's {accepted}. {OTHERS}"
        )
    return model, family


def _load(source: Path) -> tuple[PreTrainedModel, Family]:
    """The model in a folder; nothing may be missing from its weights."""
    path = source / "config.json"
    if not path.is_file():
        raise UserError(f"share: {source} holds no model: there is no {path}")
    family = FAMILIES.get(_model_type(path))
    if family is None:
        raise UserError(
            f"share: {path}: model_type is {_model_type(path)!r}; accepted: {', '.join(FAMILIES)}. {OTHERS}"
        )
    return load_model(family.lm, source, f"share: {source} cannot be loaded"), family


def _model_type(config: Path) -> str | None:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"share: {config} is not valid JSON: {error}") from error
    return content.get("model_type") if isinstance(content, dict) else None


def _load_tokenizer(source: Path | None) -> PreTrainedTokenizerBase:
    if source is None:
        raise UserError("share: a model was given without its tokenizer; pass `tokenizer=`")
    if not any(source.glob("tokenizer*")):
        raise UserError(f"share: {source} holds no tokenizer; save it there, or pass `tokenizer=`")
    return load_tokenizer(source, f"share: the tokenizer in {source} cannot be loaded")


def _check_folder(folder: Path, source: Path | None, overwrite: bool) -> None:
    """An empty or new folder, or, with `overwrite`, one that `share` has written."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"share: {folder} is a file; give a folder")
    if source is not None and folder.exists() and source.exists() and folder.samefile(source):
        raise UserError(f"share: {folder} is where the model is; give another folder")
    if not _entries(folder):
        return
    if not overwrite:
        raise UserError(f"share: {folder} is not empty; give another folder, or overwrite an earlier share in it")
    config = folder / "config.json"
    written = {}
    with suppress(OSError, ValueError):
        written = json.loads(config.read_text(encoding="utf-8"))
    if written.get("custom_pipelines") != CUSTOM_PIPELINES or any(folder.glob("checkpoint-*")):
        raise UserError(f"share: {folder} was not written by share, so it is not replaced; give another folder")


def _entries(folder: Path) -> list[Path]:
    """What a folder holds, hidden files (a clone's .git) left out."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def _kept_card(source: Path | None, folder: Path | None) -> Path | None:
    """The card to keep."""
    cards = (place / CARD for place in (source, folder) if place is not None)
    return next((card for card in cards if card.is_file()), None)


def _copy_card(card: Path, folder: Path) -> None:
    """Copy a card, and the pictures and small text files beside it that it refers to."""
    shutil.copyfile(card, folder / CARD)
    root = card.parent.resolve()
    for target in re.findall(r"\]\(([^)\s#]+)", card.read_text(encoding="utf-8", errors="replace")):
        file = (root / target).resolve()
        if file.is_file() and file.suffix in LINKED and file.is_relative_to(root):
            copy = folder / file.relative_to(root)
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


@contextmanager
def _staging(folder: Path | None) -> Iterator[Path]:
    """An empty folder on the target's disk, gone afterwards: what fails half-way leaves no trace."""
    if folder is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".share-", dir=None if folder is None else folder.parent) as staging:
        staged = Path(staging) / "model"
        staged.mkdir()
        yield staged


def _replace(folder: Path, staged: Path) -> None:
    """Move what was staged into the folder, in place of what it holds."""
    for path in _entries(folder):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.mkdir(exist_ok=True)
    for path in staged.iterdir():
        shutil.move(path, folder / path.name)


def _check_upload(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"share: repo_id {repo_id!r}: {error}") from error
    if is_offline_mode():
        raise UserError("share: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or give only a folder")


def _upload(folder: Path, repo_id: str, private: bool | None, token: str | None, commit_message: str) -> str:
    """Make the repository if need be and upload the folder in one commit; the repository's URL."""
    api = HfApi(token=token)
    try:
        repository = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message=commit_message,
            ignore_patterns=[".*"],
        )
    except (OSError, HTTPError) as error:
        raise UserError(f"share: the upload to {repo_id} failed: {' '.join(str(error).split())}") from error
    return str(repository)
