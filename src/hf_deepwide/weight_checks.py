"""What weights of a checkpoint must be: finite, of the names and shapes of its config, and tied as the config says.

Transformers only warns if a checkpoint breaks one of these rules.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .errors import some


def check_shapes(mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]], what: str) -> None:
    """Refuse tensors of other shapes than the model has: name, the file's shape and the model's.

    Raises:
        ValueError: names the first tensor.
    """
    if found := sorted(mismatched):
        (key, theirs, ours), *rest = found
        more = f" (and {len(rest)} more)" if rest else ""
        raise ValueError(f"{what}: {key} has the shape {list(theirs)} instead of {list(ours)}{more}")


def check_finite(model: torch.nn.Module) -> None:
    """Refuse a model with weights that are NaN or infinite.

    Raises:
        ValueError: names the first tensor.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ValueError(f"{name} holds numbers that are NaN or infinite; the training that wrote it has failed")


def check_weight_names(model: PreTrainedModel) -> None:
    """Refuse a loaded model whose weights a new model of its config does not have: an adapter renames some of them.

    Transformers would save or copy them all the same, and start at random what it does not find.

    Raises:
        ValueError: see `check_tensors`.
    """
    check_tensors(model.state_dict(), type(model), model.config)


def check_surplus(names: Set[str], cls: type[PreTrainedModel], config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Refuse names of tensors that a new model does not have; returns the new model's tensors, without memory.

    Raises:
        ValueError: names some.
    """
    with torch.device("meta"):
        asked = cls(copy.deepcopy(config)).state_dict()
    if surplus := names - asked.keys():
        raise ValueError(
            f"it has weights that its config does not ask for: {some(surplus)}; merge adapters "
            "(`merge_and_unload()` of PEFT's PeftModel) and undo quantisation first"
        )
    return asked


def check_tensors(
    tensors: Mapping[str, torch.Tensor], cls: type[PreTrainedModel], config: PreTrainedConfig, without: str = ""
) -> None:
    """Refuse tensors that are not those of a new model, which is built without memory.

    Args:
        tensors: name to tensor.
        cls: the model's class.
        config: its config.
        without: a name that does not count, such as that of a matrix that is there under other names.

    Raises:
        ValueError: names some, or one of another shape.
    """
    asked = check_surplus(tensors.keys(), cls, config)
    asked.pop(without, None)
    if lacking := asked.keys() - tensors.keys():
        raise ValueError(f"it lacks weights that its config asks for: {some(lacking)}")
    for key, like in asked.items():
        if (shape := tensors[key].shape) != like.shape:
            raise ValueError(f"{key} has the shape {list(shape)}, and its config asks for {list(like.shape)}")


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no number is NaN or infinite. A finite sum shows it at once; large numbers may have an infinite sum."""
    tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch adds no numbers of 8 bits
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def check_tying(model: PreTrainedModel, loaded: Set[str]) -> list[str]:
    """See that what the config ties is tied: Transformers leaves apart what differs in the file.

    For a Marian it is known which matrix is right. Marian NMT and Transformers before 5 have only one matrix where the
    config ties two; a second matrix in the file is left over from conversion. It is tied again, and a warning is
    returned. `loaded` are the names of the weights that the file has.
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
