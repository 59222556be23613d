"""Translations by sampling instead of beam search, used as synthetic sources for back-translation.

Edunov et al. 2018 (arXiv 1808.09381) make synthetic sources by drawing each word from the model's distribution. Such
sources vary more than the results of beam search, which always prefers the likeliest words.

Each sentence has its own sequence of random numbers, which depends only on the seed and the sentence's text. So a
translation depends neither on the batch nor on where an interrupted file was continued. Equal lines get equal
translations, and another seed gives other translations.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LogitsProcessor

from ..limits import Range, check_numbers

RANGES = {
    "temperature": Range(0, 1000, excludes_least=True),
    "top_k": Range(0, 10_000_000),
    "seed": Range(0, 2**32, excludes_most=True),
}


@dataclass
class SamplingArguments:
    """The settings of sampling.

    Args:
        temperature: divisor of the logits. 1 draws from the model's own distribution; less than 1 prefers likely
            words.
        top_k: draw only from this many likeliest words. 0: draw from all words.
        seed: seed of the random numbers.

    Raises:
        UserError: a number is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        check_numbers(self, RANGES, "--")


class SamplingLogitsProcessor(LogitsProcessor):
    """A logits processor that draws the next token of each row, and leaves only this token to greedy search.

    The drawn token is the first at which the cumulative probability exceeds the row's random number of this step.

    Args:
        texts: the source text of each row.
        steps: most tokens that are drawn for a row.
        args: the settings of sampling.
    """

    def __init__(self, texts: Sequence[str], steps: int, args: SamplingArguments) -> None:
        self.args = args
        self._numbers = torch.from_numpy(np.stack([uniform(text, steps, args.seed) for text in texts]))
        self._step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Turn scores `[rows, V]` into 0 for the drawn token and -inf for all other tokens."""
        wide = scores.cpu() if scores.device.type == "mps" else scores  # Apple's GPUs have no float64
        logits = wide.double() / self.args.temperature  # [rows, V]
        if 0 < self.args.top_k < logits.shape[1]:
            least = logits.topk(self.args.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        cumulative = logits.softmax(-1).cumsum(-1)
        total = cumulative[:, -1:]  # 1, up to rounding
        number = self._numbers[:, self._step, None].to(total.device) * total
        number = number.minimum(total.nextafter(torch.zeros_like(total)))  # so that some token exceeds it
        self._step += 1
        drawn = torch.searchsorted(cumulative, number, right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn.to(scores.device), 0.0)


def uniform(text: str, steps: int, seed: int) -> np.ndarray:
    """Return `steps` random numbers in [0, 1), which depend only on a text and a seed."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, np.uint32)]).random(steps)
