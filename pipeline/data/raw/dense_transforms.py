"""Transform numbers of dense columns, or replace them by bucket numbers. prepare and serve use the same code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True)
class Transform:
    """A transform of a dense column. A missing value becomes 0, or the mean if `kind` is standardize.

    log1p uses 0 for negative values, as DLRM does:
    https://github.com/facebookresearch/dlrm/blob/main/data_utils.py: X_int[X_int < 0] = 0, then
    log(X_int + 1). signed_log1p: sign(x) log(1 + |x|). standardize: (x - mean) / std of the
    training rows.
    """

    kind: str
    mean: float = 0.0
    std: float = 1.0

    def __call__(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Transform each value. NaN is a missing value."""
        if self.kind == "log1p":
            # fmax returns the number if the other argument is NaN
            return np.log1p(np.fmax(values, 0.0)).astype(np.float32)
        if self.kind == "signed_log1p":
            values = np.copysign(np.log1p(np.abs(values)), values)
        elif self.kind == "standardize":
            values = (values - self.mean) / self.std
        return np.where(np.isnan(values), 0.0, values).astype(np.float32)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) if self.kind == "standardize" else {"kind": self.kind}


def transform_of(name: str, default: str, columns: Mapping[str, Mapping[str, Any]]) -> Transform:
    """Return the transform of a dense column: its entry in `columns` (see Transform.as_dict),
    otherwise `default`."""
    return Transform(**columns[name]) if name in columns else Transform(default)


def bucket_numbers(values: NDArray[np.float64], boundaries: Sequence[float]) -> NDArray[np.int64]:
    """Return [n]: the number of boundaries that are at most the value; -1 if it is missing (NaN)."""
    numbers = np.searchsorted(np.asarray(boundaries, np.float64), values, side="right")
    return np.where(np.isnan(values), -1, numbers)


def bucket_texts(values: NDArray[np.float64], boundaries: Sequence[float]) -> list[str | None]:
    """Return [n]: each value's bucket number as text, as the vocabulary has it; None if the value
    is missing.
    """
    return [None if number < 0 else str(number) for number in bucket_numbers(values, boundaries).tolist()]


def bucket_column(values: pa.ChunkedArray, boundaries: Sequence[float]) -> pa.ChunkedArray:
    """Return the texts of bucket_texts for a column of numbers."""
    numbers = values.to_numpy().astype(np.float64)  # missing values become NaN
    return pa.chunked_array([pa.array(bucket_texts(numbers, boundaries), pa.string())])
