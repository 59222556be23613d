"""Checks of a checkpoint's weights: they must be finite, and fit the config in names, shapes and tying.

Transformers only warns if a checkpoint breaks one of these rules.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .errors import some


def check_shapes(mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]], what: str) -> None:
    """Refuse a model and a file whose tensors have different shapes.

    Args:
        mismatched: name, shape in the file and shape in the model of each differing tensor.
        what: the beginning of the message.

    Raises:
        ValueError: there is such a tensor; the message names the first.
    """
    if found := sorted(mismatched):
        (key, theirs, ours), *rest = found
        more = f" (and {len(rest)} more)" if rest else ""
        raise ValueError(f"{what}: {key} has the shape {list(theirs)} instead of {list(ours)}{more}")


def check_finite(model: torch.nn.Module) -> None:
    """Refuse a model with weights that are NaN or infinite.

    Raises:
        ValueError: there are such weights; the message names the first tensor.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ValueError(f"{name} holds numbers that are NaN or infinite; the training that wrote it has failed")


def check_weight_names(model: PreTrainedModel) -> None:
    """Refuse a loaded model with other weights than a new model of its config; an adapter renames some weights.

    Transformers would save or copy such weights without an error, and start at random the weights that it misses.

    Raises:
        ValueError: see `check_tensors`.
    """
    check_tensors(model.state_dict(), type(model), model.config)


MERGE = "merge adapters (`merge_and_unload()` of PEFT's PeftModel) and undo quantisation first"  # loaded models


def check_surplus(
    names: Set[str], cls: type[PreTrainedModel], config: PreTrainedConfig, advice: str = MERGE
) -> dict[str, torch.Tensor]:
    """Refuse names of tensors that a new model does not have; return the new model's tensors, on the meta device.

    `advice` ends the message.

    Raises:
        ValueError: there are such names; the message lists some.
    """
    with torch.device("meta"):
        asked = cls(copy.deepcopy(config)).state_dict()
    if surplus := names - asked.keys():
        raise ValueError(f"it has weights that its config does not ask for: {some(surplus)}; {advice}")
    return asked


def check_tensors(
    tensors: Mapping[str, torch.Tensor],
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    without: str = "",
    advice: str = MERGE,
) -> None:
    """Refuse tensors with other names or shapes than in a new model, which is built on the meta device.

    Args:
        tensors: name to tensor.
        cls: the model's class.
        config: the model's config.
        without: a name that may be missing, such as the name of a matrix that `tensors` has under other names.
        advice: what to do about tensors that a new model does not have.

    Raises:
        ValueError: names or shapes differ; the message lists some names, or one tensor with its shape.
    """
    asked = check_surplus(tensors.keys(), cls, config, advice)
    asked.pop(without, None)
    if lacking := asked.keys() - tensors.keys():
        raise ValueError(f"it lacks weights that its config asks for: {some(lacking)}")
    for key, like in asked.items():
        if (shape := tensors[key].shape) != like.shape:
            raise ValueError(f"{key} has the shape {list(shape)}, and its config asks for {list(like.shape)}")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no number is NaN or infinite. A finite sum proves it; finite numbers may have an infinite sum."""
    tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch adds no numbers of 8 bits
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def check_tying(model: PreTrainedModel, loaded: Set[str]) -> list[str]:
    """Check that the matrices that the config ties are tied: Transformers does not tie them if the file's differ.

    For a Marian it is known which matrix is right. Marian NMT and Transformers before 5 have only one matrix where the
    config ties two. A second matrix in the file is left over from conversion, so it is tied again.

    Args:
        model: the loaded model.
        loaded: the names of the weights in the file.

    Returns:
        A warning if matrices were tied again.

    Raises:
        ValueError: tied matrices differ in another model.
    """
    wanted = model.get_expanded_tied_weights_keys(all_submodels=True)
    apart = sorted(wanted.keys() - model.all_tied_weights_keys.keys())
    if not apart:
        return []
    differ = f"{some(apart)} differs from {wanted[apart[0]]}, but the config ties them"
    sources = {wanted[key] for key in apart}
    if model.config.model_type != "marian" or not sources <= loaded:
        raise ValueError(
            f"its weights do not fit its config: {differ}. If each is meant, set `tie_word_embeddings` and "
            "`share_encoder_decoder_embeddings` to say so"
        )
    model.tie_weights()
    model.all_tied_weights_keys = wanted
    return [f"{differ}: tied again, as Marian has the second alone. If both are meant, untie them in the config"]
