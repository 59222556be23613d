"""Loading checkpoints that somebody else may have made: no pickles, no code, one message for whatever is wrong.

Weights come from safetensors alone, because unpickling a `pytorch_model.bin` can run anything; code that a repository
brings along is not run unless the caller says so. What is loaded must be complete: Transformers would fill what is
missing with random numbers, and say so in a warning.
"""

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .errors import UserError
from .shards import only_weights

logger = logging.getLogger(__name__)

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
TOKENIZERS = ("tokenizer*", "vocab*", "*.spm", "*.model")
SHOWN = 3  # names of tensors in a message


class _NoFolder(OSError):
    """Neither a folder nor a name that the Hub could know."""


def load_config(where: str | os.PathLike, told: str | None = None, trust_remote_code: bool = False) -> Any:
    """The config of a checkpoint: a folder or a Hub id.

    Args:
        where: the folder or Hub id.
        told: how messages begin; None: "WHERE cannot be loaded".
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        UserError: there is none, it is damaged, or it is of a model type that is not known.
    """
    with _telling(where, told) as name:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def load_model(
    auto: type,
    where: str | os.PathLike,
    told: str | None = None,
    *,
    may_lack: Callable[[PreTrainedConfig], bool] | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """The model of a checkpoint, from its safetensors.

    Args:
        auto: an Auto class, or a model class.
        where, told, trust_remote_code: as for `load_config`.
        may_lack: says of the loaded config whether weights may be missing, and then start at random, with a warning.
        options: further arguments of `from_pretrained`, fields of the config among them.

    Raises:
        UserError: nothing is there; weights are pickled, damaged, missing, or of other shapes than the config says.
    """
    options = {"use_safetensors": True, "trust_remote_code": trust_remote_code, **options}
    with _telling(where, told, weights=True) as name:
        model, info = auto.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        if info["mismatched_keys"]:
            key, theirs, ours = sorted(info["mismatched_keys"])[0]
            raise ValueError(
                f"its weights do not fit its config: {key} has the shape {list(theirs)} instead of {list(ours)}"
                + _others(len(info["mismatched_keys"]) - 1)
            )
        missing = sorted(info["missing_keys"])
        shown = ", ".join(missing[:SHOWN]) + _others(len(missing) - SHOWN)
        if missing and not (may_lack and may_lack(model.config)):
            raise ValueError(f"it has no weights for {shown}, which would start at random")
    if missing:
        logger.warning("%s has no weights for %s: they start at random", where, shown)
    return model


def load_tokenizer(
    where: str | os.PathLike, told: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint; arguments as for `load_config`.

    Raises:
        UserError: there is none, or its files are damaged.
    """
    with _telling(where, told) as name:
        folder = Path(name)
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
            raise OSError("the folder holds no tokenizer (tokenizer.json, tokenizer_config.json)")
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


@contextmanager
def refusing_pickles(checkpoint: Path | None) -> Iterator[None]:
    """Say so when a file of the checkpoint that a Trainer resumes from is refused: optimizer, schedule, shards.

    They are read by `torch.load(weights_only=True)`, which makes tensors and plain numbers and nothing else.
    """
    try:
        with nullcontext() if checkpoint is None else only_weights(checkpoint):
            yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{checkpoint}: its optimizer.pt, scheduler.pt or rng_state.pth, or the index of its shards, holds more "
            "than tensors and was not loaded, as that could run any code. Remove the folder; the run then goes on "
            "from the checkpoint before it"
        ) from error


@contextmanager
def _telling(where: str | os.PathLike, told: str | None, weights: bool = False) -> Iterator[str]:
    """Check a folder's files; turn what loading raises into one `UserError`, and its warnings into silence."""
    name = os.fspath(where)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its reports on weights come as tables; ours is the error
    try:
        _check_name(name)
        if Path(name).is_dir():
            _check_files(Path(name), weights)
        yield name
    except UserError:
        raise
    except SafetensorError as error:
        raise UserError(f"{told or f'{name} cannot be loaded'}: its weights are damaged ({error})") from error
    # What Transformers, huggingface_hub and tokenizers raise for files they can make no sense of.
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        if not Path(name).exists() and not isinstance(error, _NoFolder):
            reason = f"there is no such folder, and from the Hub: {reason}"
        raise UserError(f"{told or f'{name} cannot be loaded'}: {reason}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def _check_name(name: str) -> None:
    """Refuse what is neither a folder nor can be a Hub id, in our words: the Hub's are of ids alone."""
    if Path(name).is_dir():
        return
    if Path(name).exists():
        raise OSError("it is a file; give the folder of a checkpoint, or a Hub id")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise _NoFolder("there is no such folder") from error


def _check_files(folder: Path, weights: bool) -> None:
    """See that a checkpoint's JSON files are such, and that its weights are no pickles, before they are used."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise OSError(f"{name} is damaged, or no JSON ({error})") from error
        if not isinstance(content, dict):
            raise OSError(f"{name} holds a {type(content).__name__}, not an object with fields")
        for field in ("dtype", "torch_dtype"):
            dtype = content.get(field)
            if name == "config.json" and isinstance(dtype, str) and not _is_dtype(dtype):
                raise OSError(f"{name}: {field} is {dtype!r}, which is no type of torch's, such as float32")
    if not weights:
        return
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise OSError("the folder holds no model: there is no config.json in it")
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json")):
        return
    pickles = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
    if pickles:
        raise OSError(
            f"its weights are pickled ({pickles[0]}), and loading a pickle can run any code. If you trust whoever "
            "made it, write it anew as safetensors, by `AutoModel….from_pretrained(folder).save_pretrained(folder)`"
        )
    raise OSError("the folder holds no weights: there is no model.safetensors in it")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)


def _others(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""
