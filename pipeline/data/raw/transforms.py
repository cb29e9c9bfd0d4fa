"""Transform the numbers of dense columns, alike in preparation and in serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Transform:
    """A missing value becomes 0, of standardize the mean.

    log1p takes negatives for 0, as DLRM does:
    https://github.com/facebookresearch/dlrm/blob/main/data_utils.py: X_int[X_int < 0] = 0, then log(X_int + 1).
    signed_log1p: sign(x) log(1 + |x|). standardize: (x - mean) / std, of the training rows.
    """

    kind: str
    mean: float = 0.0
    std: float = 1.0

    def __call__(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """One by one; NaN is a missing value."""
        if self.kind == "log1p":
            return np.log1p(np.fmax(values, 0.0)).astype(np.float32)  # fmax takes the number where the other is NaN
        if self.kind == "signed_log1p":
            values = np.copysign(np.log1p(np.abs(values)), values)
        elif self.kind == "standardize":
            values = (values - self.mean) / self.std
        return np.where(np.isnan(values), 0.0, values).astype(np.float32)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) if self.kind == "standardize" else {"kind": self.kind}


def transform_of(name: str, default: str, columns: Mapping[str, Mapping[str, Any]]) -> Transform:
    """Of a dense column: its own of `columns`, where it has one, as Transform.as_dict says it."""
    return Transform(**columns[name]) if name in columns else Transform(default)
