"""Means of numbers that a model reports at intervals."""

from collections.abc import Callable

import torch


class RunningMeans:
    """Weighted means by name. They stay on the numbers' device, so that `add` needs no synchronisation."""

    def __init__(self) -> None:
        self.totals: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, name: str, value: torch.Tensor, weight: torch.Tensor | float = 1.0) -> None:
        """Add a scalar that is already multiplied by its weight; ignore it if it is not finite (a skipped step)."""
        total, weights = self.totals.get(name, (0.0, 0.0))
        is_finite = value.isfinite()
        self.totals[name] = total + value.detach().float().where(is_finite, 0.0), weights + weight * is_finite

    def reduce(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Sum over all processes, which have the same names; `reduce` sums one tensor `[names, 2]`."""
        if self.totals:
            sums = torch.stack(
                [torch.stack([total, torch.as_tensor(w).to(total)]) for total, w in self.totals.values()]
            )
            self.totals = {name: (row[0], row[1]) for name, row in zip(self.totals, reduce(sums), strict=True)}

    def take(self) -> dict[str, float]:
        """Return the means of the numbers added since the last call; NaN if none of them was finite."""
        means = {name: float(total / weight) for name, (total, weight) in self.totals.items()}
        self.totals.clear()
        return means
