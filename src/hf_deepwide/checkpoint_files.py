"""Checks of a checkpoint's files, made before Transformers acts on these files.

A checkpoint may come from anybody. Its JSON files can name a pickle, a file elsewhere on the disk, or a program on the
Hub. They can ask for any amount of memory. Here the JSON files are read as text, and the weights as a list of shapes.
"""

import importlib.util
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils import cached_file

from .errors import UserError, quote
from .families import all_families
from .reading import read_json

CONFIG, WEIGHTS, ADAPTER_CONFIG, ADAPTER = (
    "config.json",
    "model.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
)
INDEX = f"{WEIGHTS}.index.json"
RESULTS = "results.json"  # the file that a run writes last
MARK = "run.json"  # the file by which `hf_deepwide.runs` marks the folder of a run
CTRANSLATE2, ONNX = "model.bin", "encoder.onnx"  # the files that mark an exported folder
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
DISTRIBUTED = "shard-*-model-*.safetensors"  # the files that Transformers writes from several processes
JSON_FILES = (CONFIG, "generation_config.json", "tokenizer_config.json", "tokenizer.json", ADAPTER_CONFIG)
ATTENTIONS = ("eager", "sdpa", "flex_attention")
ATTENTION_FIELDS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
KERNEL_FIELDS = ("use_kernels", "kernel_config", "experts_implementation", "_experts_implementation")
# A model may have more tensors and numbers than its file: a recipe may add layers, the file holds tied matrices only
# once, and tables of positions are computed.
TIMES, MORE_TENSORS, MORE_NUMBERS = 4, 4096, 2**26

Shapes = dict[str, list[int]]


def check_folder(folder: Path, weights: bool) -> None:
    """Check that a folder's JSON files can be read and, if `weights`, that it has weights that are no pickles.

    Raises:
        OSError: a file is damaged, missing, or in a form that is not loaded.
    """
    for name in JSON_FILES:
        if (folder / name).is_file():
            read_fields(folder / name)
    if not weights:
        return
    check_model(folder)
    model, adapter = ((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG))
    if model and adapter:
        raise OSError(f"the folder holds a model and an adapter ({ADAPTER_CONFIG}); give each a folder of its own")
    accepted = (ADAPTER,) if adapter else (WEIGHTS, INDEX)
    if any((folder / name).is_file() for name in accepted) or any(folder.glob(DISTRIBUTED)):
        return
    pickles = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
    if pickles:
        raise OSError(
            f"its weights are pickled ({pickles[0]}), and loading a pickle can run any code. If you trust its author, "
            "convert the weights to safetensors: load the folder with `from_pretrained` of the model's class in "
            "Transformers, and save it with `save_pretrained`"
        )
    raise OSError(f"the folder holds no weights: there is no {accepted[0]} in it")


def check_model(where: str | Path) -> None:
    """Check that a folder holds the config of a model or of an adapter; a Hub id is not looked up.

    Raises:
        OSError: the folder holds neither, or it was exported to another engine.
    """
    folder = Path(where)
    for file, engine in {CTRANSLATE2: "CTranslate2", ONNX: "ONNX"}.items():
        if (folder / file).is_file() and not any(folder.glob("*.safetensors")):
            raise OSError(
                f"the folder was exported to {engine}, and only that engine can run it: its README.md shows how. Give "
                "the folder that it was exported from"
            )
    if not folder.is_dir() or any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        return
    begun = ""
    if (folder / MARK).is_file() and not (folder / RESULTS).is_file():
        begun = ". Its training has not ended: give the command that began it again"
    raise OSError(f"the folder holds no model: there is no {CONFIG} in it{begun}")


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of a JSON file.

    Raises:
        OSError: the file is damaged, or does not hold an object with fields.
    """
    try:
        content = read_json(path)
    except ValueError as error:
        raise OSError(str(error)) from error
    if not isinstance(content, dict):
        raise OSError(f"{path.name} holds a {type(content).__name__}, not an object with fields")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of the config in a folder; `{}` if there is no config.

    Raises:
        UserError: the config is damaged.
    """
    return _fields_in(folder, CONFIG)


def read_results(run: Path) -> dict[str, Any]:
    """The fields of a run's `results.json`; `{}` if the run is not finished.

    Raises:
        UserError: the file is damaged.
    """
    return _fields_in(run, RESULTS)


def _fields_in(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_fields(folder / name) if (folder / name).is_file() else {}
    except OSError as error:
        raise UserError(f"{folder}: {error}") from error


def fields_of(name: str, file: str) -> dict[str, Any] | None:
    """The fields of a JSON file in a folder or of a Hub id; None if there is no such file."""
    path = find(name, file)
    return None if path is None else read_fields(path)


def check_config(fields: dict[str, Any], trust_remote_code: bool) -> None:
    """Check that a `config.json` names no program, no other file of weights and no class of another model type.

    Its dtype must be one of torch's, and its switches for outputs must be true or false.

    Raises:
        ValueError: a field breaks one of these rules.
    """
    for field in ("dtype", "torch_dtype"):
        dtype = fields.get(field)
        if isinstance(dtype, str) and not isinstance(getattr(torch, dtype.removeprefix("torch."), None), torch.dtype):
            raise ValueError(f"{CONFIG}: {field} is {quote(dtype)}, which is no type of torch's, such as float32")
    for field in ("return_dict", "output_attentions", "output_hidden_states"):
        if type(fields.get(field, True)) is not bool:
            raise ValueError(f"{CONFIG}: {field} is {quote(fields[field])}; accepted: true, false")
    if "transformers_weights" in fields:
        raise ValueError(
            f"{CONFIG}: transformers_weights is not accepted; remove it, and name the file of weights {WEIGHTS}"
        )
    if not trust_remote_code:
        for field, value in _all_fields(fields):
            if (field in ATTENTION_FIELDS and not _is_installed(value)) or (field in KERNEL_FIELDS and value):
                raise ValueError(
                    f"{CONFIG}: {field} is {quote(value)}, which may name a program on the Hub. Remove the field, or "
                    "allow such programs with trust_remote_code. Accepted without trust_remote_code: "
                    f"{', '.join(ATTENTIONS)}"
                )
    _check_architectures(fields)


def shapes(name: str) -> Shapes | None:
    """Names and shapes of all tensors in a folder or of a Hub id; None if the weights are not in the usual files.

    Raises:
        ValueError: the index is damaged, or names a file that is no safetensors or is not in the folder; or a tensor
            is in two files.
    """
    if Path(name).is_dir() and any(Path(name).glob(DISTRIBUTED)):
        return None
    single = find(name, WEIGHTS)
    if single is not None:
        return _shapes([single])
    index = find(name, INDEX)
    if index is None:
        return None
    files = _indexed(read_fields(index))
    if not Path(name).is_dir():
        return _shapes([path for path in (find(name, file) for file in files) if path is not None])
    for file in files:
        path = Path(name) / file
        if not _is_within(path.resolve(), Path(name)):
            raise ValueError(f"{INDEX} names {quote(file)}, which is a link that leads out of the folder")
        if not path.is_file():
            raise ValueError(f"{INDEX} names {quote(file)}, and there is no such file in the folder")
    return _shapes([Path(name) / file for file in files])


def check_size(build: Any, file: Shapes) -> None:
    """Build a model without memory for its weights, and check that it is not far larger than its file.

    Args:
        build: a function that builds the model.
        file: names and shapes of the tensors in the file.

    Raises:
        ValueError: the model is far larger.
    """
    numbers = sum(math.prod(shape) for shape in file.values())
    with torch.device("meta"), init.no_init_weights(), _at_most(TIMES * len(file) + MORE_TENSORS, len(file)):
        model = build()
    tensors = {id(tensor): tensor.numel() for tensor in (*model.parameters(), *model.buffers())}
    wanted = sum(tensors.values())
    if wanted > TIMES * numbers + MORE_NUMBERS:
        raise ValueError(
            f"its weights do not fit its config: the config asks for {quote(wanted)} numbers, and the file has "
            f"{numbers}"
        )


@contextmanager
def _at_most(limit: int, have: int) -> Iterator[None]:
    """Stop the building of a model at more than `limit` parameters; the message names `have`, the file's number."""
    count = 0

    def look(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        count += 1
        if count > limit:
            raise ValueError(
                f"its weights do not fit its config: the config asks for more than {limit} tensors, and the file has "
                f"{have}"
            )

    handle = register_module_parameter_registration_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _indexed(index: dict[str, Any]) -> list[str]:
    """The files that an index of weights names, each of them once."""
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        _no_index()
    if not all(isinstance(file, str) for file in weight_map.values()):
        _no_index()
    files = sorted(set(weight_map.values()))
    for file in files:
        path = PurePosixPath(file)
        if path.suffix != ".safetensors":
            raise ValueError(f"{INDEX} names {quote(file)}, and weights are read from safetensors alone")
        if path.is_absolute() or ".." in path.parts or set(file) & set("\\:\0"):
            raise ValueError(f"{INDEX} names {quote(file)}, which is not in the folder")
    return files


def _no_index() -> NoReturn:
    raise ValueError(f"{INDEX} is no index: it needs `weight_map`, from names to files, and `metadata`")


def _shapes(files: Iterable[Path]) -> Shapes:
    found: Shapes = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for key in sorted(tensors.keys()):
                if key in found:
                    raise ValueError(f"{quote(key)} is in two of its files")
                found[key] = tensors.get_slice(key).get_shape()
    return found


def find(name: str, file: str) -> Path | None:
    """The path of a file in a folder, or of a file that is fetched from a Hub id; None if there is no such file."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _is_within(path: Path, folder: Path) -> bool:
    """Return True if a resolved path is in a folder, or in the `blobs` that a snapshot in the Hub's cache links to."""
    home = folder.resolve()
    blobs = home.parents[1] / "blobs" if len(home.parents) > 1 and home.parent.name == "snapshots" else home
    return path.is_relative_to(home) or path.is_relative_to(blobs)


def _all_fields(fields: Any) -> Iterator[tuple[str, Any]]:
    """All fields of a config and of the configs that it contains."""
    waiting = [fields]
    while waiting:
        for key, value in waiting.pop().items():
            yield key, value
            if isinstance(value, dict):
                waiting.append(value)


def _is_installed(attention: Any) -> bool:
    """Return True if Transformers loads an attention implementation without the Hub."""
    if isinstance(attention, dict):
        return all(map(_is_installed, attention.values()))
    if isinstance(attention, str) and attention.startswith("flash_attention"):
        return "/" not in attention and importlib.util.find_spec("flash_attn") is not None
    return attention is None or attention in ATTENTIONS


def _check_architectures(fields: dict[str, Any]) -> None:
    """Refuse a config whose field `architectures` names a class of another model type than `model_type`."""
    model_type, architectures = fields.get("model_type"), fields.get("architectures")
    if not isinstance(architectures, list):
        return
    ours = {cls.__name__: cls for family in all_families().values() for cls in family.auto_classes.values()}
    for name in architectures:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Z]\w*", name):
            continue
        cls = ours.get(name) or getattr(transformers, name, None)
        config: Any = getattr(cls, "config_class", None)
        is_config = isinstance(config, type) and issubclass(config, PreTrainedConfig)
        if is_config and config.model_type != model_type:
            raise ValueError(
                f"{CONFIG}: model_type is {quote(model_type)}, but architectures names {name}, which is a "
                f"{config.model_type}; one of the two fields is wrong"
            )
