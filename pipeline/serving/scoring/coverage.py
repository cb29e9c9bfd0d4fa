"""Count the values that a model does not know: lookups of row 0, which unknown and missing values share.

An artifact says of each feature with a vocabulary how many lookups of the validation rows were of row 0. Rows of another kind
than the model was trained on show as a larger share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.serving.artifact.raw_schema import ROW_ZERO

RISE = 0.25  # above the share of the validation rows
MIN_LOOKUPS = 100
MAX_NAMED = 5
Counts = NDArray[np.int64]  # [2, features]: lookups, and those of row 0


def count_row_zero(values: NDArray[np.int64], offsets: NDArray[np.int64], num_rows: int) -> Counts:
    """Of ids as a KeyedJaggedTensor has them: values, and offsets [features * num_rows + 1]."""
    bounds = offsets[::num_rows]
    zeros = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values == 0, out=zeros[1:])
    counts, before = np.empty((2, len(bounds) - 1), np.int64), zeros[bounds]
    # np.diff and np.stack would take longer than the counting, for a request of one row.
    np.subtract(bounds[1:], bounds[:-1], out=counts[0])
    np.subtract(before[1:], before[:-1], out=counts[1])
    return counts


def by_feature(names: Sequence[str], counts: Counts, lookups: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Feature -> [lookups, those of row 0], of those that `lookups` of the manifest says have a vocabulary."""
    return {name: counts[:, number].tolist() for number, name in enumerate(names) if ROW_ZERO in lookups.get(name, {})}


def unusual(counts: Mapping[str, Sequence[int]], lookups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A phrase for each feature of whose values far more are unknown or missing than on the validation rows, the worst first."""
    found = []
    for name, (total, zeros) in counts.items():
        expected = float(lookups[name][ROW_ZERO])
        if total >= MIN_LOOKUPS and zeros / total > expected + RISE:
            found.append((zeros / total - expected, f"{name} {zeros / total:.1%} (validation rows: {expected:.1%})"))
    return [text for _, text in sorted(found, reverse=True)]


def warning(counts: Mapping[str, Sequence[int]], lookups: Mapping[str, Mapping[str, Any]]) -> str:
    """Empty where all is as usual."""
    texts = unusual(counts, lookups)
    if not texts:
        return ""
    more = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return (
        f"values that the model does not know, or none: {', '.join(texts[:MAX_NAMED])}{more}; are "
        "these rows of the kind that it "
        "was trained on, with the same spelling?"
    )
