"""Read a checkpoint of fairseq without running any code in it.

Such a file is a pickle. PyTorch reads it as tensors and plain values (`weights_only`). Older versions of fairseq also
save an `argparse.Namespace` of arguments, and meters of the training. A meter is read as an empty object.
"""

import argparse
import errno
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from ..errors import UNREADABLE, UserError, one_line, quote
from ..vanilla_form import Tensors

METERS = [f"fairseq.meters.{name}" for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")]
SAVE_AGAIN = (
    "If you trust the file, save it again where fairseq is installed: s = torch.load(FILE, weights_only=False); "
    "torch.save({'model': s['model'], 'args': s.get('args'), "
    "'cfg': s.get('cfg') and {k: s['cfg'][k] for k in ('model', 'task')}}, NEW)"
)


class Meter:
    """An empty stand-in for a meter of fairseq, whose values are not needed."""

    def __setstate__(self, state: object) -> None:
        """Discard the values of the meter."""


def read_checkpoint(path: str | os.PathLike) -> tuple[dict[str, Any], Tensors]:
    """Return the arguments and the weights in a checkpoint of fairseq.

    The arguments are read from `args` or `cfg`, and have the names of fairseq's command line.

    Raises:
        UserError: there is no such file; it is damaged; it holds more than tensors, plain values, a namespace and
            meters; it is no checkpoint of fairseq, or has no arguments.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; give a checkpoint of fairseq, such as checkpoint_best.pt")
    try:
        with torch.serialization.safe_globals([argparse.Namespace, *((Meter, name) for name in METERS)]):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its own message recommends unsafe reading
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise UserError(f"{path} cannot be read: it is damaged, or no file that PyTorch has written") from error
        raise UserError(
            f"{path} holds {found[1]}, and to read it could run any code; accepted are tensors, plain values and "
            f"argparse.Namespace. {SAVE_AGAIN}"
        ) from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # PyTorch seeks to a place before the start of a short file
            raise UserError(f"{path} cannot be read: it is damaged, or was cut off; copy it again") from error
        raise UserError(f"{path} cannot be read: {one_line(error) or type(error).__name__}") from error
    except UNREADABLE as error:
        raise UserError(
            f"{path} cannot be read: it is damaged, or no file that PyTorch has written "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise UserError(f"{path} is no checkpoint of fairseq: it has no weights under 'model'")
    return _arguments(path, state), _tensors(path, weights)


def _arguments(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments in `args`, or those of model and task in `cfg`; the task has language pairs and tokens."""
    if state.get("args") is not None:
        arguments = _plain(state["args"])
    else:
        config = _plain(state.get("cfg"))
        task = _plain(config.get("task"))
        arguments = task | _flat(_plain(config.get("model")))
        if "_name" in task:  # the model's own name has the same key
            arguments["task"] = task["_name"]
    if not arguments:
        raise UserError(
            f"{path} does not say what model it is: it has neither 'args' nor 'cfg'. Save it again with a dict of "
            "fairseq's arguments as 'args', such as {'encoder_attention_heads': 8, 'decoder_attention_heads': 8}"
        )
    return arguments


def _plain(arguments: Any) -> dict[str, Any]:
    """Return a namespace or a dict as a dict, and an empty dict for any other object."""
    fields = vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments
    return {str(name): value for name, value in fields.items()} if isinstance(fields, dict) else {}


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """Give the arguments of the two stacks, which newer configs nest, their names on the command line."""
    flat = dict(arguments)
    for stack in ("encoder", "decoder"):
        flat |= {f"{stack}_{name}": value for name, value in _plain(flat.pop(stack, None)).items()}
    return flat


def _tensors(path: Path, weights: dict[Any, Any]) -> Tensors:
    """Return the weights; check that each is a tensor with a name, and not larger than its storage in the file."""
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise UserError(f"{path}: 'model' holds {quote(name)}, which is not a plain tensor")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: {quote(name)} has more numbers than the file")
    return weights
