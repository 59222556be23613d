"""The section `evaluation` of a recipe: how sentences are translated and scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UserError, prefixed, quote
from ..limits import Range, check_numbers
from ..models.saved_fields import LIMITS
from .engine import Engine
from .metrics import ALL_METRICS, METRICS, build_metrics

AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEARCH = ("num_beams", "length_penalty", "early_stopping", *LIMITS)  # the search settings in a model's configs

RANGES = {
    "num_beams": Range(1, 1000),
    "length_penalty": Range(-1000, 1000),
    "max_length_factor": Range(0, 1000),
    "max_length_offset": Range(0, 1_000_000),
    "max_tokens": Range(1, 10**9),
    "bootstrap_samples": Range(1, 10_000_000),
}


@dataclass
class EvaluationArguments:
    """The section `evaluation` of a recipe: how test sentences are translated and scored."""

    num_beams: int = field(default=5, metadata={"help": "Beam size; 1 is greedy search."})
    length_penalty: float = field(
        default=1.0,
        metadata={"help": "Beam scores are log-probability / length**length_penalty: larger favours longer outputs."},
    )
    early_stopping: bool = field(
        default=True,
        metadata={"help": "Stop a sentence at num_beams finished hypotheses, as fairseq does."},
    )
    max_length_factor: float = field(
        default=2.0,
        metadata={
            "help": "A translation has at most max_length_factor * source tokens (rounded up to a multiple of 8) + "
            "max_length_offset tokens."
        },
    )
    max_length_offset: int = field(
        default=20, metadata={"help": "See max_length_factor; with factor 0 the limit itself."}
    )
    max_tokens: int = field(
        default=4096, metadata={"help": "Source tokens per batch, padding included; beams are not counted."}
    )
    precision: str = field(
        default="float32",
        metadata={"help": "float32 (no autocast), bfloat16 or float16."},
    )
    metrics: list[str] = field(
        default_factory=lambda: list(METRICS), metadata={"help": f"Which of {', '.join(ALL_METRICS)} to compute."}
    )
    lowercase: bool = field(default=False, metadata={"help": "Score without regard to case."})
    tokenize: str = field(
        default="13a", metadata={"help": "sacreBLEU's tokenizer; auto: chosen by the target language."}
    )
    average_languages: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Of several language pairs, those with one of these languages are averaged on their own, too, "
            "as de, zh, br and te in OPUS-100's BLEU_4."
        },
    )
    bootstrap_samples: int = field(
        default=1000, metadata={"help": "Resamples of the paired bootstrap when systems are compared."}
    )

    def __post_init__(self) -> None:
        check_numbers(self, RANGES, "evaluation.")
        if self.max_length_factor == self.max_length_offset == 0:
            raise UserError(
                f"evaluation.max_length_factor: {self.max_length_factor} with max_length_offset "
                f"{self.max_length_offset} leaves no room for a translation; accepted: not both 0"
            )
        if self.precision not in AUTOCAST:
            raise UserError(f"evaluation.precision: {quote(self.precision)}; accepted: {', '.join(AUTOCAST)}")
        with prefixed("evaluation."):
            # any language will do: the target language is not known here
            build_metrics(self.metrics, tokenize=self.tokenize, target_lang="en")

    def scoring(self, target_lang: str | None) -> dict[str, Any]:
        """Return the keyword arguments of `evaluation.metrics.score`."""
        return {
            "lowercase": self.lowercase, "tokenize": self.tokenize, "target_lang": target_lang,
            "metrics": self.metrics,
        }  # fmt: skip

    @classmethod
    def from_options(cls, **given: Any) -> "EvaluationArguments":
        """Make the arguments from command-line options. Error messages then name the option, not the recipe's key."""
        try:
            return cls(**given)
        except UserError as error:
            raise UserError(f"--{str(error).removeprefix('evaluation.')}") from None


def own_search(model: PreTrainedModel | Engine, **asked: Any) -> EvaluationArguments:
    """Return the search settings of the model's configs, which `pipeline` also uses.

    A setting that the configs lack has the default of a recipe.

    Args:
        model: the model.
        asked: settings to use instead. None keeps the model's value.
    """
    own = {name: getattr(model.generation_config, name, None) for name in SEARCH}
    if not isinstance(model, Engine):
        own |= {name: getattr(model.config, name, None) for name in LIMITS}
    if own["early_stopping"] is not None:
        own["early_stopping"] = own["early_stopping"] is True  # "never" keeps searching, too
    fields = own | {name: value for name, value in asked.items() if value is not None}
    return EvaluationArguments(**{name: value for name, value in fields.items() if value is not None})


def settings_apart(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the settings that differ between two systems, each as text with both values, for a warning."""
    return [f"{name} {ours[name]} and {theirs[name]}" for name in names if ours[name] != theirs[name]]
