"""Translations that are drawn at random instead of searched for: sources for back-translation.

Edunov et al. 2018 (arXiv 1808.09381) make synthetic sources by drawing each word from the model's distribution. Such
sources vary more than those of beam search, which always prefers the likeliest words.

A sentence has a row of random numbers of its own, which follows from the seed and its text. Translations therefore
depend neither on the batch nor on where an interrupted file was continued. Equal lines get equal translations, and
another seed gives other ones.
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
    """How words are drawn.

    Args:
        temperature: logits are divided by it; 1 draws from the model's own distribution, less prefers likely words.
        top_k: draw from so many likeliest words only; 0: from all, without restriction.
        seed: another seed draws other translations.

    Raises:
        UserError: a number out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        check_numbers(self, RANGES, "--")


class SamplingLogitsProcessor(LogitsProcessor):
    """Draws the next token of each row, and leaves only this token for greedy search to find.

    A row's token is the first at which the cumulative probability exceeds the row's random number of this step.

    Args:
        texts: the source of each row.
        steps: most tokens that are drawn.
        args: how.
    """

    def __init__(self, texts: Sequence[str], steps: int, args: SamplingArguments) -> None:
        self.args = args
        self._numbers = torch.from_numpy(np.stack([uniform(text, steps, args.seed) for text in texts]))
        self._step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[rows, V]` to 0 for the token that is drawn, and -inf for all others."""
        wide = scores.cpu() if scores.device.type == "mps" else scores  # Apple's GPUs have no float64
        logits = wide.double() / self.args.temperature  # [rows, V]
        if 0 < self.args.top_k < logits.shape[1]:
            least = logits.topk(self.args.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        cumulative = logits.softmax(-1).cumsum(-1)
        total = cumulative[:, -1:]  # 1 but for rounding
        number = self._numbers[:, self._step, None].to(total.device) * total
        number = number.minimum(total.nextafter(torch.zeros_like(total)))  # so that some token exceeds it
        self._step += 1
        drawn = torch.searchsorted(cumulative, number, right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn.to(scores.device), 0.0)


def uniform(text: str, steps: int, seed: int) -> np.ndarray:
    """Random numbers from 0 to 1, without 1, that follow from a text and a seed."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, np.uint32)]).random(steps)
