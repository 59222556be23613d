"""Accuracy, F1 and Matthews' correlation, as GLUE reports them, times 100."""

import numpy as np


def classification_scores(predicted: np.ndarray, expected: np.ndarray, classes: int) -> dict[str, float]:
    """Score predicted classes against the right ones, both `[rows]`, numbers from 0.

    With C[i, j] rows of class i that were predicted as j:

        accuracy = sum_i C[i, i] / sum C
        f1       = 2 tp / (2 tp + fp + fn) of class 1; of three or more classes the mean over classes
        matthews = Pearson's correlation of two binary variables, and its form for several classes (Gorodkin 2004)

    f1 is 0 of a class that is neither there nor predicted, and matthews 0 where one side has a single class.
    """
    table = np.zeros((classes, classes))
    np.add.at(table, (expected, predicted), 1)
    hits, there, said = np.diag(table), table.sum(1), table.sum(0)
    f1 = 2 * hits / np.maximum(there + said, 1)
    total = table.sum()
    spread = (total**2 - (said**2).sum()) * (total**2 - (there**2).sum())
    matthews = (hits.sum() * total - (there * said).sum()) / np.sqrt(spread) if spread else 0.0
    return {
        "accuracy": float(100 * hits.sum() / total),
        "f1": float(100 * (f1[1] if classes == 2 else f1.mean())),
        "matthews": float(100 * matthews),
    }
