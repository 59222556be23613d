"""Accuracy, F1 and Matthews' correlation times 100, as GLUE reports them."""

import numpy as np


def classification_scores(predicted: np.ndarray, expected: np.ndarray, classes: int) -> dict[str, float]:
    """Score predicted classes against the right classes. Both are `[rows]`, and classes are numbers from 0.

    C[i, j] is the number of rows of class i that were predicted as class j:

        accuracy = sum_i C[i, i] / sum C
        f1       = 2 tp / (2 tp + fp + fn) of class 1; of three or more classes the mean over classes
        matthews = Pearson's correlation of two binary variables, and its form for several classes (Gorodkin 2004)

    f1 is 0 for a class that is neither expected nor predicted. matthews is 0 if one side has a single class.
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
