"""Sum weights by label and bucket of logits, so that AUC and AUPRC of any number of rows take the same
memory.

Rows of a bucket are treated as equal scores, and both metrics report an upper bound of the error
that this causes. It is only a bound, because rows with equal scores add to it and cause no error.
Buckets are the upper bits of a float32: BUCKETS_OF_OCTAVE of equal width between two powers of 2,
for magnitudes from 2**-12 to 2**8. Smaller and larger magnitudes are in the first and last bucket
of their sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.data.quality import Floats

MANTISSA_BITS, KEPT_BITS = 23, 14
BUCKETS_OF_OCTAVE = 1 << KEPT_BITS
LEAST, MOST = (int(np.array(edge, np.float32).view(np.int32)) for edge in (2.0**-12, 2.0**8))
BUCKETS_OF_SIGN = (MOST - LEAST) >> (MANTISSA_BITS - KEPT_BITS)
BUCKETS = 2 * BUCKETS_OF_SIGN


class Bounded(NamedTuple):
    """A metric, and the largest distance of the exact value from it."""

    value: float
    error: float


def bucket_of(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return [n] in 0 to BUCKETS - 1, ascending with the logit. NaN is in the last bucket."""
    positive_zeros = logits + np.float32(0.0)
    bits = positive_zeros.view(np.int32)
    magnitudes = np.clip(bits & 0x7FFFFFFF, LEAST, MOST - 1)
    steps = ((magnitudes - LEAST) >> (MANTISSA_BITS - KEPT_BITS)).astype(np.int64)
    is_below = (bits < 0) & ~np.isnan(logits)
    buckets: NDArray[np.int64] = np.where(is_below, BUCKETS_OF_SIGN - 1 - steps, BUCKETS_OF_SIGN + steps)
    return buckets


def _zeros() -> Floats:
    return np.zeros((2, BUCKETS))


@dataclass
class ScoreCounts:
    """Sum the weights of rows by label and bucket: `counts` [2, BUCKETS]. Counts of several ranks
    are added up.
    """

    counts: Floats = field(default_factory=_zeros)

    def add(self, logits: NDArray[np.float32], labels: NDArray[np.uint8], weights: NDArray[np.floating]) -> None:
        buckets = bucket_of(logits)
        for label in (0, 1):
            rows = labels == label
            self.counts[label] += np.bincount(buckets[rows], weights[rows], minlength=BUCKETS)

    def auc(self) -> Bounded:
        """Return AUC.

        A pair of unlike labels in one bucket counts 1/2, with an error of 1/2. NaN if all labels
        are equal.
        """
        negatives, positives = self._best_first()
        pairs = positives.sum() * negatives.sum()
        if not pairs:
            return Bounded(math.nan, 0.0)
        above = positives.cumsum() - positives
        undecided = (negatives * positives).sum() / 2
        return Bounded(float(((negatives * above).sum() + undecided) / pairs), float(undecided / pairs))

    def auprc(self) -> Bounded:
        """Return AUPRC and its error by the order of positives within a bucket.

        NaN without a positive.

        At best all positives of a bucket come before its negatives; at worst they come after.
        """
        negatives, positives = self._best_first()
        if not positives.sum():
            return Bounded(math.nan, 0.0)
        found = positives.cumsum()
        rows = (positives + negatives).cumsum()
        found_before, rows_before = found - positives, rows - positives - negatives

        def mean(precision: Floats) -> float:
            return float((precision * positives).sum() / positives.sum())

        def share(part: Floats, whole: Floats) -> Floats:
            return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)

        value = mean(share(found, rows))
        most = mean(share(found, rows_before + positives))
        least = mean(share(found_before, rows_before + negatives))
        return Bounded(value, max(most - value, value - least))

    def _best_first(self) -> tuple[Floats, Floats]:
        """Return the weight of label 0 and of label 1 by bucket, best first."""
        negatives, positives = self.counts[:, ::-1]
        return negatives, positives
