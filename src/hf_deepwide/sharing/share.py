"""Share a model: a folder for the Hub that works in a process without this package.

    share("runs/mat", "to-upload")                 # the folder
    share("runs/mat", repo_id="me/mat")            # … and its upload
    share("runs/deep", "to-upload", as_="m2m_100")  # as a class of Transformers, without any code of ours

The folder holds weights (safetensors), config, generation config, tokenizer, model card, and the files of
`hf_deepwide.models` that the family needs. With `trust_remote_code=True`, the Auto classes and the pipeline of the
model's task load it anywhere. The pipeline is `pipeline("translation")`, `pipeline("fill-mask")` for a masked language
model, or `pipeline("text-classification")` for a classifier. After `import hf_deepwide` the flag is not needed, and
this package's code runs.

A model that computes exactly the same as a class of Transformers can be shared as this class. Then it needs neither
flag nor package. A translation model of Transformers, such as a fine-tuned NLLB, is shared unchanged.
"""

import copy
import glob
import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HFValidationError, HTTPError  # HTTPError: of the HTTP library, httpx or httpx2
from huggingface_hub.utils import validate_repo_id
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .. import card_text
from ..card_text import CARD
from ..checkpoint_files import ADAPTER_CONFIG, CONFIG, check_model, read_config
from ..data.tokenizer import check_tokenizer
from ..errors import UserError, one_line, prefixed, quote
from ..exporting.stock import as_stock
from ..families import EncoderFamily, Family, all_families
from ..loading import load_config, load_model, load_tokenizer
from ..models import remote_code
from ..models.language_pairs import added_codes
from ..models.word_tokenizer import WordTokenizer
from ..weight_checks import check_finite, check_weight_names
from .card import Transfer, linked, task_of, write_card
from .folder import check_target, files_in, refusing_unreadable, replace_files, staging
from .space import MODEL, write_space
from .use import verify_folder, verify_space

logger = logging.getLogger(__name__)

OTHERS = "Other models of transformers need no code: upload them with push_to_hub"


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
        model: a folder with a model and its tokenizer (a finished run, a checkpoint), or the model itself, together
            with `tokenizer`. The model belongs to one of our families, or is a translation model of Transformers. For
            a Space, it can also be a Hub id.
        folder: the folder to write. None is only allowed together with `repo_id`.
        tokenizer: the model's tokenizer. None: the tokenizer in `model`'s folder.
        repo_id: repository on the Hub, created if it does not exist.
        private: whether a new repository is private. None: the account's default.
        token: access token of the Hub. None: the token with which this machine is logged in.
        commit_message: commit message of the upload.
        overwrite: replace an earlier result of `share` in `folder`. Other files in it stay, and are not uploaded.
        verify: load the result and use it in a process that cannot import this package (some seconds). A Space runs
            with its own copy of this package.
        license: the Hub's name of the model's licence, such as apache-2.0, for the card. None: the card's licence is
            not changed.
        space: write a Hugging Face Space instead, which shows the model on the page of `hf_deepwide.demo`. A model
            from a folder is copied into the Space's folder `model`. A model on the Hub stays there, and the Space
            only refers to it.
        as_: `"m2m_100"`, `"marian"`, `"bart"` or `"mbart"`: write the model as this class of Transformers, with the
            same function and weights. Tools that support the class then need neither this package nor
            `trust_remote_code`. None: write a model of our family, with its code.

    Returns:
        The folder, or the URL of the repository.

    Raises:
        UserError: the model is of another kind, is incomplete, or does not fit the class `as_`; the tokenizer is
            missing; the folder is in use; the Hub cannot be reached.
        RuntimeError: the result does not load without the package. Then `folder` is unchanged.

    The model card is the card beside the model. Without it, the card in `folder` is kept if it is of the same weights
    and class; otherwise the card is a minimal one. A card in `folder` that a user has edited always stays. If the
    config in `folder` is then of another model, this is an error.
    """
    _check_call(folder, repo_id, private, commit_message, license, space, as_)
    source = Path(model) if isinstance(model, (str, os.PathLike)) else None
    hub_model = os.fspath(model) if space and source is not None and not source.exists() else None
    source = source if hub_model is None else None
    folder = None if folder is None else Path(folder)
    if "\0" in f"{source}{folder}":
        raise UserError("share: a path holds a NUL character; no folder has such a name")
    with refusing_unreadable(folder):
        earlier = {} if folder is None else check_target(folder, source, overwrite)
    content = _open(model, source, tokenizer, space, as_) if hub_model is None else None
    if hub_model is not None:
        _check_hub_model(hub_model)

    with refusing_unreadable(folder), staging(folder) as staged:
        if content is not None:
            target = (None, {}, None) if space else (folder, earlier, repo_id)
            transfer = Transfer(source, *target, license)
            _stage_model(staged / MODEL if space else staged, content, transfer, verify)
        if space:
            name = repo_id or hub_model or (source or folder or staged).resolve().as_posix()
            write_space(staged, name.rpartition("/")[2], hub_model, license)
            if verify:
                verify_space(staged, hub_model)
        names = files_in(staged)
        location = str(folder)
        if folder is not None:
            replace_files(folder, staged, earlier)
            logger.info("%s is ready for the Hub", folder)
        if repo_id is not None:
            place = folder or staged
            names |= {CARD, *linked(place / CARD)}
            kind = "space" if space else None
            location = _upload(place, names, repo_id, private, token, commit_message or f"Share {repo_id}", kind)
            logger.info("uploaded to %s", location)
    return location


class Content(NamedTuple):
    """A model that is shared, with its tokenizer, its task, and the family whose code is shared with it (or None)."""

    model: PreTrainedModel
    family: Family | EncoderFamily | None
    tokenizer: PreTrainedTokenizerBase
    task: str


def _check_call(
    folder: str | os.PathLike | None,
    repo_id: str | None,
    private: bool | None,
    commit_message: str | None,
    license: str | None,
    space: bool,
    as_: str | None,
) -> None:
    """Refuse arguments that contradict each other, before anything is read."""
    if folder is None and repo_id is None:
        raise UserError("share: say where to: give a folder, a repo_id, or both")
    if repo_id is None:
        for name, value in (("private", private), ("commit_message", commit_message)):
            if value is not None:
                raise UserError(f"share: {name} needs an upload to the Hub; give repo_id, or leave {name} out")
    if space and as_ is not None:
        raise UserError("share: a Space runs this package, so `as_` has no effect; leave out `as_` or `space`")
    if repo_id is not None:
        _check_upload(repo_id)
    if license is not None:
        card_text.check_license(license)


def _check_hub_model(name: str) -> None:
    """Refuse to make a Space for a model on the Hub that does not translate."""
    config = load_config(name, f"share: {name} is neither a folder nor a model on the Hub")
    if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise UserError(f"share: a Space shows models that translate, and {name} is a {config.model_type}")


def _open(
    model: Any, source: Path | None, tokenizer: PreTrainedTokenizerBase | None, space: bool, as_: str | None
) -> Content:
    """Load and check the model and the tokenizer. With `as_`, turn the model into this class of Transformers."""
    model, family = _own(model) if source is None else _load(source)
    task = task_of(model)
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
    if (family is None or as_ is not None) and type(tokenizer) is WordTokenizer:
        raise UserError(
            "share: models of classes of Transformers need no code, and the tokenizer of words does; share a model of "
            "one of our families, without `as_`"
        )
    if (family is None or as_ is not None) and (added := sorted(added_codes(tokenizer))):
        logger.warning(
            "share: without this package, the %s takes no src_lang or tgt_lang of the languages added to it: %s",
            *(type(tokenizer).__name__, ", ".join(added)),
        )
    if as_ is None:
        return Content(model, family, tokenizer, task)
    if family is None:
        raise UserError(f"share: the model is Transformers' {model.config.model_type} already; leave `as_` out")
    model = as_stock(model, as_)
    return Content(model, None, tokenizer, task)


def _stage_model(place: Path, content: Content, transfer: Transfer, verify: bool) -> None:
    """Write a model's folder with its card. With `verify`, load the folder and use the model."""
    place.mkdir(exist_ok=True)
    write_checkpoint(content.model, content.family, content.tokenizer, place)
    write_card(place, content.model, content.tokenizer, transfer)
    if verify:
        verify_folder(place, content.task)


def write_checkpoint(
    model: PreTrainedModel, family: Family | EncoderFamily | None, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Save a model with its tokenizer, its code, and the config entries by which the Auto classes find the code.

    A class of Transformers has no family and no code. Entries for code from elsewhere are removed from the config, the
    tokenizer config and the generation config.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in (CONFIG, "generation_config.json", "tokenizer_config.json"):
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


def _own(model: Any) -> tuple[PreTrainedModel, Family | EncoderFamily | None]:
    """Check a loaded model, and return it with its family. Its class must come from this package or Transformers."""
    config = getattr(model, "config", None)
    family = all_families().get(getattr(config, "model_type", ""))
    stock = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(config), None)
    if type(model) not in (family.tasks if family is not None else (stock,)):
        accepted = ", ".join(cls.__name__ for family in all_families().values() for cls in family.tasks)
        raise UserError(
            f"share: cannot share a {type(model).__module__}.{type(model).__name__}; accepted: a folder, one of "
            f"hf_deepwide's {accepted}, or a translation model of transformers. {OTHERS}"
        )
    try:
        check_weight_names(model)
        check_finite(model)
    except ValueError as error:
        raise UserError(f"share: cannot share the model: {one_line(error)}") from error
    return model, family


def _load(source: Path) -> tuple[PreTrainedModel, Family | EncoderFamily | None]:
    """Load the model in a folder, and return it with its family. No weights may be missing."""
    try:
        check_model(source)
    except OSError as error:
        raise UserError(f"share: {source}: {one_line(error)}") from error
    path = source / CONFIG
    if (source / ADAPTER_CONFIG).is_file() and not path.is_file():
        raise UserError(
            f"share: {source} holds an adapter, and no model; merge it into its model (`merge_and_unload()` of peft), "
            "and share the result"
        )
    if not path.is_file():
        raise UserError(f"share: {source} holds no model: there is no {path}")
    with prefixed("share: "):
        fields = read_config(source)
    model_type, prefix = str(fields.get("model_type")), f"share: {source} cannot be loaded"
    family = all_families().get(model_type)
    if family is None:
        if model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            return load_model(AutoModelForSeq2SeqLM, source, prefix), None
        raise UserError(
            f"share: {path}: model_type is {quote(model_type)}; accepted: {', '.join(all_families())}, and "
            f"translation models of transformers. {OTHERS}"
        )
    named = fields.get("architectures") or [None]
    cls = next((cls for cls in family.tasks if cls.__name__ in named), next(iter(family.tasks)))
    return load_model(cls, source, prefix), family


def _check_origin(tokenizer: Any) -> None:
    """Refuse a tokenizer whose class is not from Transformers, except `WordTokenizer`: its code is saved with it."""
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
        raise UserError(f"share: {source} holds no tokenizer; save it there by `tokenizer.save_pretrained`")
    return load_tokenizer(source, f"share: the tokenizer in {source} cannot be loaded")


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
    """Create the repository if needed, upload the named files in one commit, and return the repository's URL."""
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
