"""Share a model: a folder for the Hub that works in a process without this package.

    share("runs/mat", "to-upload")                 # the folder
    share("runs/mat", repo_id="me/mat")            # … and its upload
    share("runs/deep", "to-upload", as_="m2m_100")  # as a class of Transformers, without any code of ours

The folder holds weights (safetensors), config, generation config, tokenizer, model card, and the files of
`hf_deepwide.models` that the family needs. With `trust_remote_code=True`, the Auto classes and the pipeline of the
model's task load it anywhere: `pipeline("translation")`, of a masked language model `pipeline("fill-mask")`, of a
classifier `pipeline("text-classification")`. After `import hf_deepwide` they need no flag and run this package's code.
A model that computes exactly what a class of Transformers computes can be shared as this class. Then it needs neither
flag nor package.
"""

import copy
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HFValidationError, HTTPError  # HTTPError: the HTTP library's, httpx or httpx2
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import card_text
from .data.tokenizer import check_tokenizer
from .durable import Writing, publish, write_whole
from .errors import UserError, one_line, quote
from .exporting.stock import STOCK, as_stock
from .families import EncoderFamily, Family, all_families
from .loading import check_finite, load_config, load_model, load_tokenizer
from .models import remote_code
from .models.word_tokenizer import WordTokenizer
from .space import MODEL, write_space

logger = logging.getLogger(__name__)

CARD, CONFIG = "README.md", "config.json"
MANIFEST = ".hf_deepwide_share.json"  # what `share` has written in a folder: {"files": {path: [SHA-256, …]}}
LINKED = {".png", ".svg", ".jpg", ".jpeg", ".gif", ".json", ".yaml", ".yml", ".txt", ".md"}  # what a card may refer to
OTHERS = "Models of transformers itself need no code: upload them with push_to_hub"
# What an earlier version, which kept no manifest, wrote apart from the card and what the card refers to.
UNLISTED = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
            "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")  # fmt: skip
KINDS = {  # what a card calls a model, by its task
    "translation": "A translation model",
    "fill-mask": "A masked language model",
    "text-classification": "A model that classifies texts",
}
USE_STOCK = """
import sys
sys.modules["hf_deepwide"] = None  # importing it fails
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, tokenizer = (cls.from_pretrained(sys.argv[1]) for cls in (AutoModelForSeq2SeqLM, AutoTokenizer))
assert type(model).__module__.startswith("transformers.models."), type(model)
model.generate(**tokenizer("1", return_tensors="pt"), max_length=4, num_beams=1)
"""
USE = """
import sys
sys.modules["hf_deepwide"] = None  # importing it fails
from transformers import AutoModel, pipeline
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
translator = pipeline("translation", model=sys.argv[1], trust_remote_code=True, device="cpu")
for loaded in (translator, translator.model, translator.model.config):
    assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
pairs = getattr(translator.model.config, "translation_pairs", None)
codes = [*translator.languages.codes]
chosen = next(iter(pairs)).split("-") if pairs else codes[:1] + codes[-1:]
translator("1", **dict(zip(("src_lang", "tgt_lang"), chosen)), max_length=4, num_beams=1)
"""
USE_ENCODER = """
import sys
sys.modules["hf_deepwide"] = None  # importing it fails
from transformers import AutoModel, pipeline
folder, task = sys.argv[1:]
AutoModel.from_pretrained(folder, trust_remote_code=True)
use = pipeline(task, model=folder, trust_remote_code=True, device="cpu")
for loaded in (use.model, use.model.config):
    assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
use(use.tokenizer.mask_token if task == "fill-mask" else "1")
"""
USE_SPACE = """
import pathlib, sys
from hf_deepwide.demo import systems
assert pathlib.Path(systems.__file__).is_relative_to(pathlib.Path.cwd()), systems.__file__
systems.load_systems([sys.argv[1]])
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
    license: str | None = None,
    space: bool = False,
    as_: str | None = None,
) -> str:
    """Write a folder that loads without this package, upload it, or both.

    Args:
        model: a folder with a model of one of our families and its tokenizer (a finished run, a checkpoint), or the
            model itself, together with `tokenizer`. For a Space also a Hub id.
        folder: where to write; None only together with `repo_id`.
        tokenizer: None: the one in `model`'s folder.
        repo_id: repository on the Hub, made if it does not exist.
        private: whether a new repository is private; None: the account's default.
        token: of the Hub; None: the one this machine is logged in with.
        commit_message: of the upload.
        overwrite: replace an earlier result of `share` in `folder`. Files of anybody else stay, and are not uploaded.
        verify: load the result and translate with it in a process that cannot import this package (some seconds).
        license: the Hub's name of the model's licence, such as apache-2.0, for the card; None: leave the card as it
            is.
        space: write a Hugging Face Space instead, which shows the model on the page of `hf_deepwide.demo`. A model
            from a folder is copied into the Space's folder `model`. A model on the Hub stays there, and the Space
            names it.
        as_: `"m2m_100"`, `"marian"`, `"bart"` or `"mbart"`: write the model as this class of Transformers, with the
            same function and weights. Tools that know the class then need neither this package nor
            `trust_remote_code`. None: as a model of our family, with its code.

    Returns:
        The folder, or the URL of the repository.

    Raises:
        UserError: the model is not ours, is incomplete, or does not fit the class `as_`; the tokenizer is missing; the
            folder is in use; the Hub cannot be reached.
        RuntimeError: the result does not load without the package; then `folder` stays empty.

    The model card is the one beside the model, else the one already in `folder`, else a minimal one. A card in
    `folder` that somebody has edited stays.
    """
    if folder is None and repo_id is None:
        raise UserError("share: say where to: give a folder, a repo_id, or both")
    if space and as_ is not None:
        raise UserError("share: a Space runs this package, so that `as_` is of no use in it; leave one of the two out")
    if repo_id is not None:
        _check_upload(repo_id)
    if license is not None:
        card_text.check_license(license)
    source = Path(model) if isinstance(model, (str, os.PathLike)) else None
    hub_model = os.fspath(model) if space and source is not None and not source.exists() else None
    source = source if hub_model is None else None
    folder = None if folder is None else Path(folder)
    if "\0" in f"{source}{folder}":
        raise UserError("share: a path holds a NUL character; no folder has such a name")
    with _telling(folder):
        earlier = {} if folder is None else _check_folder(folder, source, overwrite)
    task = "translation"
    if hub_model is not None:
        load_config(hub_model, f"share: {hub_model} is neither a folder nor a model on the Hub")
    else:
        model, family = _own(model) if source is None else _load(source)
        task = _task(model)
        if task != "translation" and (space or as_ is not None):
            what = "a Space shows" if space else "`as_` takes"
            raise UserError(f"share: {what} models that translate, and a {type(model).__name__} does not")
        tokenizer = tokenizer if tokenizer is not None else _load_tokenizer(source)
        _check_origin(tokenizer)
        check_tokenizer(tokenizer, model.config)
        if task == "fill-mask" and tokenizer.mask_token is None:
            raise UserError(
                "share: the tokenizer has no mask token, and a masked language model needs one; use the tokenizer the "
                "model was trained with"
            )
        if as_ is not None:
            if type(tokenizer) is WordTokenizer:
                raise UserError("share: `as_` needs no code, and the tokenizer of words does; leave `as_` out")
            model = as_stock(model, as_)

    with _telling(folder), _staging(folder) as staged:
        place = staged / MODEL if space else staged
        if hub_model is None:
            place.mkdir(exist_ok=True)
            write_checkpoint(model, family if as_ is None else None, tokenizer, place)
            if space:
                _write_card(place, source, None, {}, model, None, license)
            else:
                _write_card(place, source, folder, earlier, model, repo_id, license)
            if verify:
                verify_folder(place, task)
        if space:
            name = repo_id or hub_model or (source or folder or staged).resolve().as_posix()
            write_space(staged, name.rpartition("/")[2], hub_model, license)
            if verify:
                verify_space(staged, hub_model)
        names = _files(staged)
        location = str(folder)
        if folder is not None:
            _replace(folder, staged, earlier)
            logger.info("%s is ready for the Hub", folder)
        if repo_id is not None:
            place = folder or staged
            names |= {CARD, *_linked(place / CARD)}
            kind = "space" if space else None
            location = _upload(place, names, repo_id, private, token, commit_message or f"Share {repo_id}", kind)
            logger.info("uploaded to %s", location)
    return location


def write_checkpoint(
    model: PreTrainedModel, family: Family | EncoderFamily | None, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Save a model with its tokenizer, its code, and the config entries by which the Auto classes find the code.

    A class of Transformers has no family and no code.

    What model, tokenizer and generation config say of code from elsewhere is left out.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("generation_config.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            own = ("auto_map",) if type(tokenizer) is WordTokenizer and name == "tokenizer_config.json" else ()
            elsewhere = {"auto_map", "custom_pipelines"}.difference(own)
            kept = {key: value for key, value in content.items() if key not in elsewhere}
            path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if family is None:
        return
    config = copy.deepcopy(model.config)
    config.auto_map = {name: remote_code.reference(cls) for name, cls in family.auto_classes.items()}
    config.save_pretrained(folder)


def minimal_card(model: PreTrainedModel, name: str, repo_id: str | None = None) -> ModelCard:
    """A model card that says what the model is and how to load it from its repository."""
    model_type = model.config.model_type
    task = _task(model)
    data = ModelCardData(library_name="transformers", pipeline_tag=task, tags=[task, "hf_deepwide", model_type])
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n# {card_text.text(name)}\n\n"
        f"{KINDS[task]} of the family `{model_type}`, {model.num_parameters():,} parameters.\n\n"
        f"{card_text.block(_use(model, repo_id), 'python')}\n"
    )


def _use(model: PreTrainedModel, repo_id: str | None) -> str:
    """The lines of a card that load a model."""
    stock = model.config.model_type in STOCK
    return card_text.use_of_stock(repo_id) if stock else card_text.use_of_share(repo_id, _task(model))


def _task(model: PreTrainedModel) -> str:
    """The pipeline's task of a model; a class of Transformers that `share` writes translates."""
    family = all_families().get(model.config.model_type)
    return "translation" if family is None else family.tasks[type(model)]


def verify_folder(folder: str | os.PathLike, task: str = "translation") -> None:
    """Load a shared folder and use it for its task in a process that cannot import this package.

    Raises:
        RuntimeError: that failed; the message ends with the process's own.
    """
    use = USE if task == "translation" else USE_ENCODER
    use = USE_STOCK if _model_type(Path(folder) / CONFIG) in STOCK else use
    with tempfile.TemporaryDirectory() as modules:
        # its own cache of remote code, so that nothing is loaded from an earlier share and nothing is left behind
        environment = {**os.environ, "HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            [sys.executable, "-c", use, str(Path(folder).resolve()), *([task] if use == USE_ENCODER else [])],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"the shared folder does not load without hf_deepwide:\n{process.stderr[-3000:]}")


def verify_space(folder: Path, hub_model: str | None) -> None:
    """Let the code in a Space's folder load its model and translate, in a process of its own.

    Raises:
        RuntimeError: that failed; the message ends with the process's own.
    """
    process = subprocess.run(
        [sys.executable, "-B", "-c", USE_SPACE, hub_model or MODEL],
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"the Space does not load its model:\n{process.stderr[-3000:]}")


def _own(model: Any) -> tuple[PreTrainedModel, Family | EncoderFamily]:
    """A loaded model, which must be of this package, and not of a copy of its code in a checkpoint."""
    family = all_families().get(getattr(getattr(model, "config", None), "model_type", ""))
    if family is None or type(model) not in family.tasks:
        accepted = ", ".join(cls.__name__ for family in all_families().values() for cls in family.tasks)
        raise UserError(
            f"share: cannot share a {type(model).__module__}.{type(model).__name__}; accepted: a folder, or one of "
            f"hf_deepwide's {accepted}. {OTHERS}"
        )
    try:
        check_finite(model)
    except ValueError as error:
        raise UserError(f"share: cannot share the model: {one_line(error)}") from error
    return model, family


def _load(source: Path) -> tuple[PreTrainedModel, Family | EncoderFamily]:
    """The model in a folder; nothing may be missing from its weights."""
    path = source / CONFIG
    if not path.is_file():
        raise UserError(f"share: {source} holds no model: there is no {path}")
    family = all_families().get(str(_model_type(path)))
    if family is None:
        raise UserError(
            f"share: {path}: model_type is {quote(_model_type(path))}; accepted: {', '.join(all_families())}. {OTHERS}"
        )
    named = _fields(path).get("architectures") or [None]
    cls = next((cls for cls in family.tasks if cls.__name__ in named), next(iter(family.tasks)))
    return load_model(cls, source, f"share: {source} cannot be loaded"), family


def _model_type(config: Path) -> str | None:
    return _fields(config).get("model_type")


def _fields(config: Path) -> dict[str, Any]:
    """What a config file says; nothing if it holds no fields."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"share: {config} is not valid JSON: {one_line(error)}") from error
    return content if isinstance(content, dict) else {}


def _check_origin(tokenizer: Any) -> None:
    """See that a tokenizer needs no code but that of Transformers, or ours, which is saved with it."""
    known = type(tokenizer) is WordTokenizer or type(tokenizer).__module__.partition(".")[0] == "transformers"
    if not known or not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(
            f"share: the tokenizer is a {type(tokenizer).__module__}.{type(tokenizer).__name__}, whose code does not "
            "come with Transformers; accepted are Transformers' own tokenizers, and the WordTokenizer of hf_deepwide"
        )


def _load_tokenizer(source: Path | None) -> PreTrainedTokenizerBase:
    if source is None:
        raise UserError("share: a model was given without its tokenizer; pass `tokenizer=`")
    if not any(source.glob("tokenizer*")):
        raise UserError(f"share: {source} holds no tokenizer; save it there, or pass `tokenizer=`")
    return load_tokenizer(source, f"share: the tokenizer in {source} cannot be loaded")


def _check_folder(folder: Path, source: Path | None, overwrite: bool) -> dict[str, list[str]]:
    """See that a folder is empty or new, or, with `overwrite`, that `share` has written in it.

    Returns:
        The files in it that `share` wrote, and nobody has changed since, with their digests.
    """
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"share: {folder} is a link to nothing; give a folder")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"share: {folder} is a file; give a folder")
    if source is not None and folder.exists() and source.exists():
        if folder.samefile(source):
            raise UserError(f"share: {folder} is where the model is; give another folder")
        if folder.resolve() in source.resolve().parents:
            raise UserError(f"share: the model lies inside {folder}; give another folder")
    if not _entries(folder):
        return {}
    if not overwrite:
        raise UserError(f"share: {folder} is not empty; give another folder, or overwrite an earlier share in it")
    listed = _manifest(folder)
    if listed is None:
        raise UserError(f"share: {folder} was not written by share, so it is not replaced; give another folder")
    return {name: digests for name, digests in listed.items() if _digest(folder, name) in digests}


def _manifest(folder: Path) -> dict[str, list[str]] | None:
    """The files that `share` wrote in a folder, with the digests they had, or None if it wrote none there.

    Of an earlier version, which kept no manifest, they are the files whose names are its own.
    """
    path = folder / MANIFEST
    if path.is_file() and not path.is_symlink():
        content = _read_json(path)
        files = content.get("files") if isinstance(content, dict) else None
        if not isinstance(files, dict) or not all(isinstance(digests, list) for digests in files.values()):
            raise UserError(f"share: {path} is damaged, so nothing tells what share wrote there; give another folder")
        return files
    config = _read_json(folder / CONFIG)
    ours = isinstance(config, dict) and config.get("custom_pipelines") == remote_code.CUSTOM_PIPELINES
    pipeline = remote_code.CUSTOM_PIPELINES["translation"]["impl"].partition(".")[0]
    # The newer code writes a manifest, or was saved by somebody who trained the model; so did who left the others.
    trained = [Path(remote_code.__file__).name, "training_args.bin", "trainer_state.json"]
    if not ours or not (folder / f"{pipeline}.py").is_file() or any((folder / name).exists() for name in trained):
        return None
    if any(folder.glob("checkpoint-*")):
        return None
    code = [path.name for path in remote_code.HERE.glob("*.py") if (folder / path.name).is_file()]
    names = {*code, *(path.name for pattern in UNLISTED for path in folder.glob(pattern) if path.is_file())}
    return _digests(folder, names)


def _read_json(path: Path) -> Any:
    """What a JSON file holds, or None if there is no such file, or no JSON in it."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None


def _digests(folder: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """The digests of files in a folder, by name, as a manifest lists them; links are left out."""
    digests = ((name, _digest(folder, name)) for name in sorted(names))
    return {name: [digest] for name, digest in digests if digest is not None}


def _digest(folder: Path, name: str) -> str | None:
    """The SHA-256 of a file in a folder, or None if there is none, or it, or what leads to it, is a link."""
    path, relative = folder / name, Path(name)
    inside = relative.parts and not relative.is_absolute() and ".." not in relative.parts
    linked = any((folder / part).is_symlink() for part in (relative, *relative.parents[:-1]))
    if not inside or linked or not path.is_file():
        return None
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _entries(folder: Path) -> list[Path]:
    """What a folder holds, hidden files (a clone's .git) left out."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def _files(folder: Path) -> set[str]:
    """The files in a folder and its subfolders, by their path in it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _write_card(
    staged: Path,
    source: Path | None,
    folder: Path | None,
    earlier: dict[str, list[str]],
    model: PreTrainedModel,
    repo_id: str | None,
    license: str | None,
) -> None:
    """Write the model card, and what it refers to, unless somebody has put or edited a card in the target folder."""
    beside = None
    if source is not None and (source / CARD).is_file():
        if _is_inside(source / CARD, source):
            beside = source / CARD
        else:
            logger.warning("share: %s is a link to elsewhere, so it is left out", source / CARD)
    there = None if folder is None or not (folder / CARD).is_file() else folder / CARD
    if there is not None and CARD not in earlier:
        logger.warning("share: %s stays, as share did not write it so; remove it to have it written anew", there)
        _copy_linked(there, staged, earlier)
        return
    card = beside or there
    if card is None:
        name = (repo_id or (folder or staged).resolve().as_posix()).rpartition("/")[2]
        text = str(minimal_card(model, name, repo_id))
    else:
        try:
            text = card.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"share: {card}: byte {error.start + 1} is not UTF-8 text") from error
        _copy_linked(card, staged, None if card == beside else earlier)
    stock = model.config.model_type in STOCK
    (staged / CARD).write_text(card_text.for_repository(text, repo_id, license, stock), encoding="utf-8")


def _copy_linked(card: Path, staged: Path, among: Container[str] | None) -> None:
    """Copy what a card refers to: all of it, or what is `among` some names."""
    for name in _linked(card):
        if (among is None or name in among) and not (staged / name).exists():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(card.parent / name, staged / name)


def _linked(card: Path) -> set[str]:
    """The pictures and small text files beside a card that it refers to, by their path.

    Files that Transformers reads (of tokens, configs, adapters) lie at the top and are no such files.
    """
    names: set[str] = set()
    if not card.is_file():
        return names
    for target in re.findall(r"\]\(([^)\s#]+)", card.read_text(encoding="utf-8", errors="replace")):
        path = Path(os.path.normpath(target))
        file = card.parent / path
        readable = len(path.parts) > 1 or path.suffix not in (".json", ".txt") or path.name == "results.json"
        plain = not path.is_absolute() and not any(part.startswith(".") for part in path.parts) and "\0" not in target
        if plain and readable and path.suffix in LINKED and _is_file_inside(file, card.parent):
            names.add(path.as_posix())
    return names - {CARD}


def _is_file_inside(path: Path, folder: Path) -> bool:
    """True if a path leads to a file in a folder; the system may also refuse it, as too long for a name."""
    try:
        return _is_inside(path, folder) and path.is_file()
    except OSError:
        return False


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


@contextmanager
def _telling(folder: Path | None) -> Iterator[None]:
    """Say what cannot be written, or read, in one line."""
    place = Path(tempfile.gettempdir()) if folder is None else folder
    with Writing(place) as writing:
        yield
    if writing.why is not None:
        where = one_line(getattr(writing.error, "filename", None) or place, 200)
        raise UserError(f"share: {where} cannot be written: {writing.why}") from writing.error


@contextmanager
def _staging(folder: Path | None) -> Iterator[Path]:
    """An empty folder on the target's disk, gone afterwards: what fails half-way leaves no trace."""
    if folder is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".share-", dir=None if folder is None else folder.parent) as staging:
        staged = Path(staging) / "model"
        staged.mkdir()
        yield staged


def _replace(folder: Path, staged: Path, earlier: dict[str, list[str]]) -> None:
    """Move what was staged into the folder, in place of what `share` wrote there earlier.

    A new folder is there in whole or not at all. In one that exists, the config goes first and comes last: if this
    process is killed in between, the folder cannot be loaded, and sharing again completes it.

    Raises:
        UserError: a file of somebody else is in the way; nothing has changed then.
    """
    new = _digests(staged, _files(staged))
    for name in new:
        _check_way(folder, name, earlier)
    if not folder.exists():
        _write_manifest(staged, new)
        publish(staged, folder)
        return
    for name in new:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    _write_manifest(folder, {name: earlier.get(name, []) + new.get(name, []) for name in sorted({*earlier, *new})})
    for name in filter(_is_config, {*earlier, *new}):
        (folder / name).unlink(missing_ok=True)
    for name in sorted(new, key=_is_config):
        publish(staged / name, folder / name)
    for name in earlier.keys() - new.keys():
        (folder / name).unlink(missing_ok=True)
        for parent in Path(name).parents[:-1]:
            if not any((folder / parent).iterdir()):
                (folder / parent).rmdir()
    _write_manifest(folder, new)


def _is_config(name: str) -> bool:
    """True of the file without which a model cannot be loaded, also of the model in a Space."""
    return Path(name).name == CONFIG


def _check_way(folder: Path, name: str, earlier: dict[str, list[str]]) -> None:
    """See that a file can be written without loss: there is none of its name, or `share` wrote it."""
    for part in (*Path(name).parents[:-1], Path(name)):
        path = folder / part
        ours = name in earlier if part == Path(name) else path.is_dir() and not path.is_symlink()
        if (path.exists() or path.is_symlink()) and not ours:
            raise UserError(
                f"share: {path} was not written by share, or has been changed since, and would be replaced; move it "
                "away, or give another folder"
            )


def _write_manifest(folder: Path, files: dict[str, list[str]]) -> None:
    content = {"hf_deepwide": version("hf_deepwide"), "files": files}
    write_whole(folder / MANIFEST, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _check_upload(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"share: repo_id {quote(repo_id)}: {one_line(error)}") from error
    if is_offline_mode():
        raise UserError("share: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or give only a folder")


def _upload(
    folder: Path,
    names: set[str],
    repo_id: str,
    private: bool | None,
    token: str | None,
    commit_message: str,
    kind: str | None = None,
) -> str:
    """Make the repository if need be and upload the named files in one commit; the repository's URL."""
    sdk = "gradio" if kind == "space" else None
    api = HfApi(token=token)
    try:
        repository = api.create_repo(repo_id, private=private, exist_ok=True, repo_type=kind, space_sdk=sdk)
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message=commit_message,
            allow_patterns=[glob.escape(name) for name in sorted(names)],
            repo_type=kind,
        )
    except (OSError, HTTPError) as error:
        raise UserError(f"share: the upload to {repo_id} failed: {one_line(error)}") from error
    return str(repository)
