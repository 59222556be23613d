"""The mean of several checkpoints' weights, which has less noise of the last steps than a single checkpoint."""

import filecmp
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from ..checkpoint_files import read_config, read_fields
from ..durable import check_output, is_empty_folder, is_same, saving, whole_files, whole_folder
from ..errors import UserError, one_line, quote
from ..models.saved_fields import LIMITS
from ..training.checkpoints import WEIGHTS
from ..training.checksums import read_checksums
from ..weight_checks import is_finite
from .recipe import read_mark

logger = logging.getLogger(__name__)

# The files that `save_pretrained` writes beside the weights, for any tokenizer. Other files of a training checkpoint
# are not copied.
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
    "sentencepiece.model",
    "spm.model",
    "spiece.model",
    "source.spm",
    "target.spm",
    "vocab.json",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "vocab_source.json",
    "vocab_target.json",
    "vocab.txt",
    "merges.txt",
    "bpe.codes",
    "dict.txt",
    "prophetnet.tokenizer",
)
# The side files that decide which token a row of the embeddings stands for.
VOCABULARY = [name for name in SIDE_FILES if not name.endswith(("config.json", "tokens_map.json", ".jinja"))]
# Config fields that may differ between checkpoints. They concern training, or the origin and storage of a model. All
# other fields decide what a model computes.
FREE = {
    *("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures", "auto_map"),
    *("custom_pipelines", "use_cache", *LIMITS),
    *("dropout", "attention_dropout", "activation_dropout", "classifier_dropout", "hidden_dropout_prob"),
    *("attention_probs_dropout_prob", "layer_drop", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"),
    *("drop_branch", "ffn_drop_branch", "drop_granularity", "drop_unit"),
    *("init_std", "initializer_range", "initialization", "forget_bias_init", "layer_selection_init"),
    *("layer_prior", "prior_select", "prior_skip", "soft_selection_steps", "temperature_anneal_steps"),
    *("kl_weight", "kl_anneal_steps", "kl_reduction", "kl_estimator", "layer_sharing_weight"),
    *("target_encoder_layers", "target_decoder_layers", "target_depth_weight", "target_depth_norm"),
    "target_depth_anneal_steps",
}


def average_checkpoints(checkpoints: Sequence[str | Path], output: str | Path) -> Path:
    """Write the mean of the checkpoints' weights to `output`, with the config and tokenizer of the last checkpoint.

    Weights are summed in float64; the mean has the dtype of the weights. Integer tensors must be equal and are copied.
    Tied weights are stored once in each checkpoint. They are averaged once, and are tied again when the mean is
    loaded. The mean of a single checkpoint is that checkpoint. Existing files of the same names are replaced. The
    weights are written last. Each file is written in full or not at all.

    Raises:
        UserError: no checkpoint is given, or one is given twice; a `model.safetensors` is missing, damaged, or holds
            NaN or infinity; the checkpoints are not of one model (names, shapes, dtypes, integer tensors, configs or
            vocabularies differ); `output` is one of the checkpoints; or the mean cannot be written.
    """
    folders = [Path(checkpoint) for checkpoint in checkpoints]
    if not folders:
        raise UserError("no checkpoints to average")
    for number, folder in enumerate(folders):
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder}: there is no {WEIGHTS}, so there is nothing to average")
        for other in folders[:number]:
            if is_same(folder, other):
                raise UserError(
                    f"{folder} is given twice, and would count twice in the mean; give each checkpoint once"
                )
            if filecmp.cmp(folder / WEIGHTS, other / WEIGHTS, shallow=False):
                logger.warning("%s and %s hold the same weights, which count twice in the mean", folder, other)
    output = Path(output)
    check_output(output, inputs=folders, overwrite=True)
    _check_configs(folders)
    _check_vocabularies(folders)
    _warn_of_other_runs(folders)
    files = [_opened(folder / WEIGHTS) for folder in folders]
    names = set(files[0].keys())
    for folder, file in zip(folders, files, strict=True):
        if set(file.keys()) != names:
            odd = sorted(names ^ set(file.keys()))
            raise UserError(
                f"{folder} and {folders[0]} are not checkpoints of one model: only one of them has {odd[0]}"
                + (f" (and {len(odd) - 1} others)" if len(odd) > 1 else "")
            )
    mean = {name: _mean(name, files, folders) for name in sorted(names)}
    new = not output.exists() or is_empty_folder(output)
    with saving(output), whole_folder(output) if new else whole_files(output, last=WEIGHTS) as draft:
        code = [path.name for path in folders[-1].glob("*.py")]  # named in the config of a shared model
        for name in (name for name in (*SIDE_FILES, *code) if (folders[-1] / name).is_file()):
            shutil.copyfile(folders[-1] / name, draft / name)
        save_file(mean, draft / WEIGHTS, metadata={"format": "pt"})
    logger.info("%s holds the weights of %s", output, ", ".join(folder.name for folder in folders))
    return output


def _warn_of_other_runs(folders: Sequence[Path]) -> None:
    """Warn if the checkpoints come from several trainings. Their mean is useful only if all began with one model."""
    saved = {training_of(folder) for folder in folders}
    if (trainings := len(saved - {None})) > 1:
        logger.warning(
            "the checkpoints come from %d trainings; their mean is of use only if all began with one trained model",
            trainings,
        )


def training_of(folder: Path) -> str | None:
    """Return the id of the training that made a checkpoint, or a run's final model; None if no id was saved."""
    try:
        saved = read_checksums(folder)
    except ValueError as error:
        raise UserError(f"{folder} is damaged: {one_line(error)}") from error
    return (saved or {}).get("run") or (read_mark(folder) or {}).get("id")


def _opened(weights: Path) -> Any:
    """Open a file of weights, so that its tensors can be read one by one."""
    try:
        return safe_open(weights, "pt")
    except SafetensorError as error:
        raise UserError(f"{weights} is damaged ({one_line(error)})") from error


def _check_configs(folders: Sequence[Path]) -> None:
    """Refuse checkpoints of models that compute different things, though their weights have the same names."""
    last = read_config(folders[-1])
    for folder in folders[:-1]:
        config = read_config(folder)
        fields = sorted((config.keys() | last.keys()) - FREE, key=lambda field: (field != "model_type", field))
        for field in fields if config and last else ():
            have, want = _value(config, field), _value(last, field)
            if have != want:
                raise UserError(
                    f"{folder} and {folders[-1]} are not checkpoints of one model: `{field}` is {quote(have)} in one "
                    f"and {quote(want)} in the other"
                )


def _value(config: dict[str, Any], field: str) -> Any:
    """A field of a saved config, or the default of its class: a checkpoint can be older than the field."""
    model_type = config.get("model_type")
    default = getattr(CONFIG_MAPPING[model_type], field, None) if model_type in CONFIG_MAPPING else None
    return config.get(field, default)


def _check_vocabularies(folders: Sequence[Path]) -> None:
    """Refuse checkpoints whose rows of embeddings stand for different tokens."""
    *others, last = folders
    ours = vocabulary(last) if others else {}
    for folder in others:
        theirs = vocabulary(folder)
        for name in ours:
            if name in theirs and ours[name] != theirs[name]:
                raise UserError(f"{folder} and {last} are not checkpoints of one model: their {name} differ")


def vocabulary(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's vocabulary files, by file name; {} if the checkpoint has no tokenizer.

    Raises:
        UserError: a file is damaged.
    """
    return {name: _vocabulary(folder / name) for name in VOCABULARY if (folder / name).is_file()}


def _vocabulary(file: Path) -> Any:
    """Return the content of a vocabulary file, without the padding and truncation that a tokenizer used last."""
    if file.name != "tokenizer.json":
        return file.read_bytes()
    try:
        fields = read_fields(file)
    except OSError as error:
        raise UserError(f"{file.parent}: {error}") from error
    return {name: value for name, value in fields.items() if name not in ("padding", "truncation")}


def _mean(name: str, files: Sequence, folders: Sequence[Path]) -> torch.Tensor:
    first = files[0].get_tensor(name)
    _check_finite(name, first, folders[0])
    total = first.double() if first.is_floating_point() else first
    for folder, file in zip(folders[1:], files[1:], strict=True):
        tensor = file.get_tensor(name)
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise UserError(
                f"{folder} and {folders[0]} are not checkpoints of one model: {name} is "
                f"{list(tensor.shape)} {tensor.dtype} in one and {list(first.shape)} {first.dtype} in the other"
            )
        if first.is_floating_point():
            _check_finite(name, tensor, folder)
            total += tensor
        elif not torch.equal(tensor, first):
            raise UserError(f"{folder} and {folders[0]} differ in {name}, which holds {first.dtype} and has no mean")
    return (total / len(files)).to(first.dtype) if first.is_floating_point() else first


def _check_finite(name: str, tensor: torch.Tensor, folder: Path) -> None:
    if tensor.is_floating_point() and not is_finite(tensor):
        raise UserError(f"{folder}: {name} holds numbers that are NaN or infinite, so there is no mean")
