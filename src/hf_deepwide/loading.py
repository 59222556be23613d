"""Loading checkpoints from any author: no pickles, no foreign code, and one error message for every fault.

Weights come from safetensors alone, because unpickling a `pytorch_model.bin` can run any code. Code in a repository
runs only if the caller allows it. The weights must be exactly those that the config describes. Transformers would fill
missing weights with random numbers, ignore weights that the config does not ask for, and only warn.
"""

import logging
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from . import checkpoint_files
from .errors import UNREADABLE, UserError, one_line, quote, some
from .generation_fields import check_generation, check_generation_fields
from .hub import offline_where_unreachable
from .models.language_pairs import forget_unsaid, language_ids, make_codes_special
from .shards import only_weights
from .weight_checks import check_finite, check_shapes, check_tying

logger = logging.getLogger(__name__)

TOKENIZERS = ("tokenizer*", "vocab*", "*.spm", "*.model")
LEFT_OUT = re.compile(  # entries of fairseq's checkpoints that are no weights: version, computed positions, dummy
    r"(^|\.)(encoder|decoder)\.version$|\.embed_positions\.(weights|_float_tensor)$"
)
MOST_TOKENS = 2**31
_LOADING = threading.RLock()  # one thread at a time: loading changes state that all threads share
NO_FIELDS = ("use_safetensors", "trust_remote_code", "dtype", "attn_implementation")  # options, no config fields
WANTED = {
    "AutoModelForSeq2SeqLM": "a model that translates",
    "AutoModelForMaskedLM": "a masked language model",
    "AutoModelForSequenceClassification": "a classifier",
}
TASKS = {  # ends of class names, and the pipelines that take these classes
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForCausalLM": "text-generation",
}
May = Callable[[PreTrainedConfig], bool]
INNER = (LookupError, TypeError, AttributeError, AssertionError)  # errors that do not say what is wrong with a file


class _NoFolder(OSError):
    """Neither a folder nor a name that the Hub could know."""


def load_config(where: str | os.PathLike, prefix: str | None = None, trust_remote_code: bool = False) -> Any:
    """The config of a checkpoint: a folder or a Hub id.

    Args:
        where: the folder or Hub id.
        prefix: the beginning of error messages; None: "WHERE cannot be loaded".
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        UserError: the config is missing, damaged, or of an unknown model type; or `where` is an adapter, which has no
            config.
    """
    with _RefusingFaultyFiles(where, prefix) as name:
        checkpoint_files.check_model(name)
        fields = checkpoint_files.fields_of(name, checkpoint_files.CONFIG)
        if fields is None and checkpoint_files.find(name, checkpoint_files.ADAPTER_CONFIG) is not None:
            raise ValueError(
                "it is an adapter of PEFT's, without its model; merge the two (PEFT's `PeftModel.merge_and_unload()`) "
                "and save the result"
            )
        checkpoint_files.check_config(fields or {}, trust_remote_code)
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def check_checkpoint(where: str | os.PathLike, trust_remote_code: bool = False) -> None:
    """Check that there is a checkpoint whose config can be read; for an adapter, the config of its base model.

    Raises:
        UserError: see `load_config`.
    """
    with _RefusingFaultyFiles(where, None) as name:
        checkpoint_files.check_model(name)
        adapter = checkpoint_files.fields_of(name, checkpoint_files.ADAPTER_CONFIG)
        if adapter is not None and checkpoint_files.find(name, checkpoint_files.CONFIG) is None:
            where = _base_of(adapter)
    load_config(where, trust_remote_code=trust_remote_code)


def load_model(
    auto: type[Any],
    where: str | os.PathLike,
    prefix: str | None = None,
    *,
    may_lack: May | None = None,
    accept_unexpected: May | None = None,
    accept_nonfinite: bool = False,
    trust_remote_code: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """The model of a checkpoint, from its safetensors.

    Args:
        auto: an Auto class, or a model class.
        where, prefix, trust_remote_code: as for `load_config`.
        may_lack: a function of the loaded config: whether weights may be missing. Missing weights start at random,
            with a warning.
        accept_unexpected: a function of the loaded config: whether weights that the config does not ask for may be
            left out, with a warning.
        accept_nonfinite: accept weights that are NaN or infinite.
        options: further arguments of `from_pretrained`, which may include fields of the config.

    Raises:
        UserError: nothing is there. Weights are pickled, damaged, not finite, missing, not asked for, or of other
            shapes than in the config. Matrices that the config ties differ. The generation config asks for tokens
            that the model does not have.
    """
    options = {"use_safetensors": True, "trust_remote_code": trust_remote_code, **options}
    with _RefusingFaultyFiles(where, prefix, weights=True) as name:
        if (adapter := checkpoint_files.fields_of(name, checkpoint_files.ADAPTER_CONFIG)) is not None:
            return _load_adapted(auto, name, adapter, trust_remote_code, options)
        checkpoint_files.check_config(
            checkpoint_files.fields_of(name, checkpoint_files.CONFIG) or {}, trust_remote_code
        )
        check_generation_fields(checkpoint_files.fields_of(name, "generation_config.json") or {})
        config = _config(auto, name, options)
        file = checkpoint_files.shapes(name)
        if file is not None:
            _check_size(auto, config, file, options)
        model, info = auto.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        check_shapes(info["mismatched_keys"], "its weights do not fit its config")
        missing = sorted(info["missing_keys"])
        if missing and not (may_lack and may_lack(model.config)):
            raise ValueError(
                f"it has no weights for {some(missing)}, which would start at random{_other_task(auto, model.config)}"
            )
        unexpected = sorted(key for key in info["unexpected_keys"] if not LEFT_OUT.search(key))
        if unexpected and not (accept_unexpected and accept_unexpected(model.config)):
            raise ValueError(f"it has weights that its config does not ask for: {some(unexpected)}")
        retied = check_tying(model, (model.state_dict() if file is None else file).keys() - missing)
        if not accept_nonfinite:
            check_finite(model)
        corrected = check_generation(model)
    if missing:
        logger.warning("%s has no weights for %s: they start at random", where, some(missing))
    if unexpected:
        logger.warning("%s has weights for %s that are left out", where, some(unexpected))
    for warning in (*retied, *corrected):
        logger.warning("%s: %s", where, warning)
    if not trust_remote_code:  # a saved model must not refer to the code beside this checkpoint
        for field in ("auto_map", "custom_pipelines"):
            vars(model.config).pop(field, None)
    return model


def load_tokenizer(
    where: str | os.PathLike, prefix: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint; arguments as for `load_config`.

    Raises:
        UserError: there is no tokenizer, or its files are damaged.
    """
    with _RefusingFaultyFiles(where, prefix) as name:
        folder = Path(name)
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
            raise OSError(
                "the folder holds no tokenizer (tokenizer.json, tokenizer_config.json); copy that of the model there"
            )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        _check_tokenizer(tokenizer)
        forget_unsaid(tokenizer)
        make_codes_special(tokenizer)
        return tokenizer


def auto_class(where: str | os.PathLike) -> type[Any]:
    """The Auto class of a run's model: a masked language model or a model that translates."""
    masked = any(name.endswith("ForMaskedLM") for name in load_config(where).architectures or [])
    return AutoModelForMaskedLM if masked else AutoModelForSeq2SeqLM


@contextmanager
def refusing_pickles(checkpoint: Path | None) -> Iterator[None]:
    """Report a pickle that PyTorch refuses while a Trainer resumes from a checkpoint: optimizer, schedule, shards.

    These files are read by `torch.load(weights_only=True)`, which makes only tensors and plain numbers.

    Raises:
        UserError: a file holds more; the message names the checkpoint and the remedy.
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


class _RefusingFaultyFiles:
    """Check a folder's files, turn every error of loading into one `UserError`, and silence Transformers' warnings."""

    # The errors that Transformers, huggingface_hub, PEFT and torch raise for files that they cannot interpret.
    FAILURES = (*UNREADABLE, ImportError, SafetensorError, StrictDataclassError)

    def __init__(self, where: str | os.PathLike, prefix: str | None, weights: bool = False) -> None:
        self.name, self.weights = os.fspath(where), weights
        self.prefix = prefix or f"{self.name} cannot be loaded"

    def __enter__(self) -> str:
        self.hub = ExitStack()
        self.hub.enter_context(_LOADING)
        self.verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # it reports weights in tables; we raise an error
        try:
            _check_name(self.name)
            if Path(self.name).is_dir():
                checkpoint_files.check_folder(Path(self.name), self.weights)
            else:
                self.hub.enter_context(offline_where_unreachable())
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        transformers_logging.set_verbosity(self.verbosity)
        self.hub.close()
        if error is None or isinstance(error, UserError):
            return
        if isinstance(error, SafetensorError):
            raise UserError(f"{self.prefix}: its weights are damaged ({one_line(error)})") from error
        # The library `tokenizers` raises a plain `Exception`, or a Rust panic, which is no `Exception`.
        if isinstance(error, self.FAILURES) or type(error) is Exception or type(error).__name__ == "PanicException":
            reason = one_line(error) or type(error).__name__
            if isinstance(error, INNER):
                reason = (
                    f"Transformers cannot read its files ({type(error).__name__}: {reason}); if they are damaged, "
                    "download or copy them again"
                )
            if "use_safetensors" in reason:  # Transformers' message advises to read the pickle
                reason = (
                    "the Hub has its weights only as a pickle, and pickles are not read. With a connection, load the "
                    "model with `from_pretrained`, save it with `save_pretrained`, and give the new folder"
                )
            elif not Path(self.name).exists() and not isinstance(error, _NoFolder):
                reason = f"there is no such folder, and from the Hub: {reason}"
            raise UserError(f"{self.prefix}: {reason}") from error


def _load_adapted(
    auto: type, name: str, adapter: dict[str, Any], trust_remote_code: bool, options: dict[str, Any]
) -> PreTrainedModel:
    """Load the base model of a PEFT adapter, checked as any other model, and then the adapter into it."""
    base = _base_of(adapter)
    if adapter.get("use_dora"):
        raise ValueError(
            f"{checkpoint_files.ADAPTER_CONFIG}: use_dora is true, and DoRA is not loaded here; merge the adapter by "
            "PEFT (PeftModel.from_pretrained(model, adapter).merge_and_unload()), and save the model"
        )
    if adapter.get("revision") not in (None, "main"):
        raise ValueError(
            f"{checkpoint_files.ADAPTER_CONFIG}: revision is {quote(adapter['revision'])}, and only the newest "
            f"revision of {quote(base)} is loaded here; download the older one, and write its folder into "
            "base_model_name_or_path"
        )
    if adapter.get("megatron_config") and not trust_remote_code:
        raise ValueError(f"{checkpoint_files.ADAPTER_CONFIG}: megatron_config names code that would be run")
    if checkpoint_files.find(name, checkpoint_files.ADAPTER) is None:
        raise ValueError(f"the adapter has no {checkpoint_files.ADAPTER}, and pickles are not read")
    model = load_model(auto, base, **options)
    of_base = {id(parameter) for parameter in model.parameters()}
    info = model.load_adapter(name, ignore_mismatched_sizes=True)
    check_shapes(info.mismatched_keys, "the adapter does not fit its base")
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied parameter has several names
    loaded = {id(parameter) for key, parameter in parameters.items() if key not in info.missing_keys} - of_base
    for kind, keys in (
        ("no weights for", [key for key in info.missing_keys if id(parameters.get(key)) not in loaded]),
        ("weights that it does not ask for:", info.unexpected_keys),
    ):
        if keys:
            raise ValueError(f"the adapter has {kind} {some(sorted(keys))}")
    check_finite(model)
    _warn_of_untrained_codes(model, name, base)
    return model


def _base_of(adapter: dict[str, Any]) -> str:
    """The folder or Hub id of a PEFT adapter's base model."""
    base = adapter.get("base_model_name_or_path")
    if not isinstance(base, str) or base in ("", "None"):  # PEFT's entries for a model that came from no folder
        raise ValueError(
            f"{checkpoint_files.ADAPTER_CONFIG}: base_model_name_or_path does not name the base model; write the "
            "folder or Hub id of the base model there"
        )
    return base


def _warn_of_untrained_codes(model: PreTrainedModel, name: str, base: str) -> None:
    """Warn if the adapter's tokenizer has new languages and the adapter has no embeddings of them.

    PEFT does not save these embeddings with the adapter.
    """
    if any(checkpoint_files.find(place, "tokenizer_config.json") is None for place in (name, base)):
        return
    adapted, plain = (language_ids(load_tokenizer(place)) for place in (name, base))
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    new = adapted.keys() - plain.keys()
    if new and not any(type(table).__module__.startswith("peft.") for table in tables):
        logger.warning(
            "%s: its tokenizer has the languages %s, and %s has no embeddings of them: they were not saved with the "
            "adapter. Save the model with the new languages, and train the adapter on that",
            *(name, ", ".join(sorted(new)), base),
        )


def _config(auto: type, name: str, options: dict[str, Any]) -> PreTrainedConfig:
    """Load the config of a checkpoint with the fields in `options`; refuse it if `auto` has no model class for it."""
    fields = {key: value for key, value in options.items() if key not in NO_FIELDS}
    config = AutoConfig.from_pretrained(name, trust_remote_code=options["trust_remote_code"], **fields)
    known = getattr(auto, "_model_mapping", None)
    if known is None or type(config) in known or auto.__name__ in (getattr(config, "auto_map", None) or {}):
        return config
    wanted = WANTED.get(auto.__name__, auto.__name__)
    raise ValueError(f"it is a {config.model_type}; accepted here: {wanted}{_other_task(auto, config)}")


def _other_task(auto: type, config: PreTrainedConfig) -> str:
    """The end of a message that names the checkpoint's task, if its config names a class for another task."""
    for name in getattr(config, "architectures", None) or []:
        for end, task in TASKS.items():
            if name.endswith(end) and not auto.__name__.endswith(end):
                return f". A {name} is for pipeline({task!r})"
    return ""


def _check_size(auto: type, config: PreTrainedConfig, file: checkpoint_files.Shapes, options: dict[str, Any]) -> None:
    """Refuse a config that asks for far more weights than the file has, before memory is allocated."""
    trust = {"trust_remote_code": options["trust_remote_code"]}
    if getattr(config, "quantization_config", None) is not None:
        return  # its file has other tensors than the model
    own = getattr(auto, "config_class", None)
    if own is not None and type(config).model_type != own.model_type:
        raise ValueError(f"its model type is {type(config).model_type!r}; {auto.__name__} is a {own.model_type!r}")
    if hasattr(auto, "from_config"):
        checkpoint_files.check_size(lambda: auto.from_config(config, **trust), file)
    else:
        checkpoint_files.check_size(lambda: auto(config), file)


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer works: its settings have the right types, its ids are in range, and it takes a sentence.

    Raises:
        ValueError: a setting or an id is not accepted.
    """
    limit = tokenizer.model_max_length
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
        raise ValueError(f"its model_max_length is {quote(limit)}; a number of tokens is wanted")
    for side in ("padding_side", "truncation_side"):
        if getattr(tokenizer, side) not in ("left", "right"):
            raise ValueError(f"its {side} is {quote(getattr(tokenizer, side))}; accepted: left, right")
    for token, index in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True):
        if index is not None and not 0 <= index < MOST_TOKENS:
            raise ValueError(f"its special token {quote(token)} has the id {quote(index)}")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= max(len(tokenizer), 1) * 2 + 2**16:
        raise ValueError(f"its largest id is {quote(largest)}, but it has {len(tokenizer)} entries")
    ids = tokenizer("a 1")["input_ids"]
    tokenizer.decode(ids, skip_special_tokens=True)


def _check_name(name: str) -> None:
    """Refuse a name that is no folder and cannot be a Hub id; the Hub's own message is only about ids."""
    if Path(name).is_dir():
        return
    if Path(name).exists():
        raise OSError(
            "it is a file; give the folder of a checkpoint, or a Hub id (`hf-deepwide convert` makes a folder of a "
            "file of fairseq)"
        )
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise _NoFolder("there is no such folder") from error
