"""Load what translates: a checkpoint in float32 or an exported folder, with its tokenizer, on a device."""

import os

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError, one_line
from ..loading import load_model, load_tokenizer
from ..models.language_pairs import language_ids
from .engine import Engine, is_engine


def load_translator(
    checkpoint: str | os.PathLike, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load an encoder-decoder model and its tokenizer. The weights become float32, whatever their dtype in the file.

    Args:
        checkpoint: a folder or a Hub id.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        UserError: the model or the tokenizer cannot be loaded; or the tokenizer has more entries than the model has
            embeddings.
    """
    model = load_model(AutoModelForSeq2SeqLM, checkpoint, dtype=torch.float32, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
    # The length of M2M100's tokenizer does not include its language codes, whose ids follow the vocabulary.
    entries = max(len(tokenizer), *(token_id + 1 for token_id in language_ids(tokenizer).values()), 0)
    if entries > (embeddings := len(model.get_input_embeddings().weight)):
        raise UserError(f"{checkpoint}: its tokenizer has {entries} entries and its model {embeddings} embeddings")
    return model, tokenizer


def load_any_translator(
    where: str | os.PathLike, device: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel | Engine, PreTrainedTokenizerBase]:
    """Load a checkpoint as `load_translator` does, or a folder that was exported to CTranslate2, on the device.

    Raises:
        UserError: see `load_translator`, `Engine` and `device_of`.
    """
    if is_engine(where):
        engine = Engine(where, None if device is None else device_of(device))
        return engine, engine.tokenizer
    model, tokenizer = load_translator(where, trust_remote_code)
    return model.to(device_of(device)), tokenizer


def device_of(name: str | None) -> torch.device:
    """Return the device with this name. None: an accelerator if there is one, else the CPU.

    Raises:
        UserError: this machine has no such device. The message names the option `--device`.
    """
    if name is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without this kind of device
        raise UserError(f"--device {name}: {one_line(error)}") from error
    return torch.device(name)
