"""The mean of several checkpoints' weights: what a run has learnt, with less of the last steps' noise."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..durable import whole_files, why_not_written
from ..errors import UserError
from .checkpoints import WEIGHTS

logger = logging.getLogger(__name__)

# What `save_pretrained` writes beside the weights, whatever the tokenizer; a training checkpoint's other files stay
# behind.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "source.spm",
    "target.spm",
    "vocab.json",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "vocab.txt",
    "merges.txt",
    "prophetnet.tokenizer",
)


def average_checkpoints(checkpoints: Sequence[str | Path], output: str | Path) -> Path:
    """Write the mean of the checkpoints' weights to `output`; config and tokenizer are those of the last one.

    Sums are in float64; the result has the dtype of the weights. Integer tensors must be equal and are copied.
    Tied weights are stored once in each checkpoint, are averaged once, and are tied again when the result is
    loaded. Of a single checkpoint the weights come out unchanged. The weights are written last, and each file is
    there in full or not at all.

    Raises:
        UserError: there is no checkpoint, one has no `model.safetensors`, or a damaged one, or they differ in names,
            shapes, dtypes, or an integer tensor: they are then not of one model; or the mean cannot be written.
    """
    folders = [Path(checkpoint) for checkpoint in checkpoints]
    if not folders:
        raise UserError("no checkpoints to average")
    for folder in folders:
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder}: there is no {WEIGHTS}, so there is nothing to average")
    files = []
    for folder in folders:
        try:
            files.append(safe_open(folder / WEIGHTS, "pt"))
        except SafetensorError as error:
            raise UserError(f"{folder / WEIGHTS} is damaged ({error})") from error
    names = set(files[0].keys())
    for folder, file in zip(folders, files, strict=True):
        if set(file.keys()) != names:
            odd = sorted(names ^ set(file.keys()))
            raise UserError(
                f"{folder} and {folders[0]} are not checkpoints of one model: only one of them has {odd[0]}"
                + (f" (and {len(odd) - 1} others)" if len(odd) > 1 else "")
            )
    mean = {name: _mean(name, files, folders) for name in sorted(names)}
    output = Path(output)
    try:
        with whole_files(output, last=WEIGHTS) as draft:
            code = [path.name for path in folders[-1].glob("*.py")]  # which the config of a shared model names
            for name in (name for name in (*SIDE_FILES, *code) if (folders[-1] / name).is_file()):
                shutil.copyfile(folders[-1] / name, draft / name)
            save_file(mean, draft / WEIGHTS, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{output}: the model cannot be saved: {why_not_written(error, output)}") from error
    logger.info("%s holds the weights of %s", output, ", ".join(folder.name for folder in folders))
    return output


def _mean(name: str, files: Sequence, folders: Sequence[Path]) -> torch.Tensor:
    first = files[0].get_tensor(name)
    total = first.double() if first.is_floating_point() else first
    for folder, file in zip(folders[1:], files[1:], strict=True):
        tensor = file.get_tensor(name)
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise UserError(
                f"{folder} and {folders[0]} are not checkpoints of one model: {name} is "
                f"{list(tensor.shape)} {tensor.dtype} in one and {list(first.shape)} {first.dtype} in the other"
            )
        if first.is_floating_point():
            total += tensor
        elif not torch.equal(tensor, first):
            raise UserError(f"{folder} and {folders[0]} differ in {name}, which holds {first.dtype} and has no mean")
    return (total / len(files)).to(first.dtype) if first.is_floating_point() else first
