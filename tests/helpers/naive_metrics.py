"""BLEU and chrF as their papers write them."""

import math
from collections import Counter


def naive_bleu(hypotheses, references):
    """Papineni et al. 2002, section 2.3: BP * exp(mean over n of log p_n) with N = 4."""
    matched, proposed = [0] * 4, [0] * 4
    c = r = 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        # bytes split at ASCII spaces only, which is what a Perl script without `use utf8` does
        candidate, truth = hypothesis.encode().split(), reference.encode().split()
        c, r = c + len(candidate), r + len(truth)
        for n in range(1, 5):
            grams = [tuple(candidate[i : i + n]) for i in range(len(candidate) - n + 1)]
            known = Counter(tuple(truth[i : i + n]) for i in range(len(truth) - n + 1))
            matched[n - 1] += sum(min(count, known[gram]) for gram, count in Counter(grams).items())
            proposed[n - 1] += len(grams)
    if 0 in matched:
        return 0.0
    brevity = 1.0 if c > r else math.exp(1 - r / c)
    return 100 * brevity * math.exp(sum(math.log(m / p) for m, p in zip(matched, proposed, strict=True)) / 4)


def naive_chrf(hypotheses, references):
    """Popović 2015: F2 of character n-gram precision and recall averaged over n = 1..6, without spaces."""
    precision, recall = [], []
    for n in range(1, 7):
        matched = proposed = known = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            sides = [text.replace(" ", "") for text in (hypothesis, reference)]
            a, b = (Counter(side[i : i + n] for i in range(len(side) - n + 1)) for side in sides)
            matched += sum((a & b).values())
            proposed += sum(a.values())
            known += sum(b.values())
        precision.append(matched / proposed)
        recall.append(matched / known)
    p, r = sum(precision) / 6, sum(recall) / 6
    return 100 * 5 * p * r / (4 * p + r)
