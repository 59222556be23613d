"""Checks of a generation config: it may name only tokens and positions that the model has, and only real numbers."""

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from transformers import PreTrainedModel

from .errors import quote
from .models.plain_text import positions

IDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
)
COUNTS = {  # the smallest and the largest value that are accepted
    "max_length": (1, math.inf),
    "max_new_tokens": (1, math.inf),
    "min_length": (0, math.inf),
    "min_new_tokens": (0, math.inf),
    "num_beams": (1, 1000),
    "num_beam_groups": (1, 1),  # more need code from the Hub
    "num_return_sequences": (1, 1000),
    "no_repeat_ngram_size": (0, math.inf),
    "encoder_no_repeat_ngram_size": (0, math.inf),
    "top_k": (0, math.inf),
}
NUMBERS = (
    "length_penalty",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "diversity_penalty",
    "temperature",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "max_time",
)
SWITCHES = (
    "do_sample",
    "early_stopping",
    "use_cache",
    "remove_invalid_values",
    "renormalize_logits",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
)
# Search methods and stopping rules that translation does not use; most need code from the Hub, or a second model.
STRANGE = (
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "guidance_scale",
    "prefill_chunk_size",
    "stop_strings",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "exponential_decay_length_penalty",
    "token_healing",
)


def check_generation_fields(fields: dict[str, Any], vocabulary: float = math.inf) -> None:
    """Check the fields of a generation config.

    Raises:
        ValueError: a field has a wrong type, is out of range, or names a token outside the vocabulary; or it sets a
            method that translation does not use.
    """
    if fields.get("eos_token_id") == []:
        _refuse("eos_token_id", [], "an id, or several")
    for field in IDS:
        for index in _ids(field, fields.get(field)):
            if type(index) is not int or not 0 <= index < vocabulary:
                of = "" if vocabulary == math.inf else f", 0 to {vocabulary - 1}"
                _refuse(field, index, f"ids of the vocabulary{of}")
    for field, (least, most) in COUNTS.items():
        value = fields.get(field)
        if value is not None and not (type(value) is int and least <= value <= most):
            up_to = {least: "", math.inf: " or more"}.get(most, f" to {most}")
            _refuse(field, value, f"{least}{up_to}")
    for field in NUMBERS:
        value = fields.get(field)
        if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
            _refuse(field, value, "numbers")
    for field in SWITCHES:
        value = fields.get(field)
        if value is not None and type(value) is not bool and (field, value) != ("early_stopping", "never"):
            _refuse(field, value, "true, false")
    for field in STRANGE:
        if fields.get(field) not in (None, False):
            _refuse(field, fields[field], "nothing, as translation here does without it")


def check_generation(model: PreTrainedModel) -> list[str]:
    """Check the generation config of a model, and lower its maximum lengths to the positions that the model has.

    Returns:
        A warning for each length that was lowered.

    Raises:
        ValueError: see `check_generation_fields`; or the generation config has no `decoder_start_token_id`, and the
            model's config has one.
    """
    if not model.can_generate() or getattr(model, "generation_config", None) is None:
        return []
    head = model.get_output_embeddings()
    check_generation_fields(
        vars(model.generation_config), model.config.vocab_size if head is None else len(head.weight)
    )
    start = getattr(model.config, "decoder_start_token_id", None)
    if model.generation_config.decoder_start_token_id is None and start is not None:
        _refuse("decoder_start_token_id", None, f"the id in the config, {start}")  # else `generate` takes `<s>`
    return list(_fit(model.generation_config, positions(model.config)))


def _refuse(field: str, value: Any, accepted: str) -> NoReturn:
    raise ValueError(f"generation config: {field} holds {quote(value)}; accepted: {accepted}")


def _ids(field: str, value: Any) -> Iterator[Any]:
    """The ids in a field, which holds an id or lists of ids; of `sequence_bias`, the ids without their numbers."""
    if field == "sequence_bias" and isinstance(value, dict):
        value = list(value)
    elif field == "sequence_bias" and isinstance(value, list):
        value = [entry[0] if isinstance(entry, list) and len(entry) == 2 else entry for entry in value]
    elif field == "sequence_bias" and value is not None:
        _refuse(field, value, "lists of ids, each with a number")
    waiting = [] if value is None else [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | tuple):
            waiting.extend(value)
        else:
            yield value


def _fit(settings: Any, available: int | None) -> Iterator[str]:
    """Lower `max_length` and `max_new_tokens` to the model's positions, of which the start token takes one."""
    if available is None:
        return
    for field, most in (("max_length", available), ("max_new_tokens", max(available - 1, 1))):
        value = getattr(settings, field, None)
        if value is not None and value > most:
            setattr(settings, field, most)
            yield f"its generation config's {field} is {most} instead of {quote(value)}: it has {available} positions"
