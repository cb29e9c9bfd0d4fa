"""Hold the codebooks of semantic ids, and compute the codes of vectors by residual quantization.

Level by level, a vector's code is the number of the nearest row of the level's codebook, and the
row is subtracted from the vector (residual k-means, as in TIGER, arXiv 2305.05065, section 3.1,
but learnt by k-means instead of an autoencoder).
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.runtime.errors import ConfigError

MAX_NUMBERS = 4_000_000  # the codebooks are a part of dataset.json and of artifacts
AT_ONCE = 4096  # rows whose distances are computed at once
Vectors = NDArray[Any]


@dataclass(frozen=True)
class Codebooks:
    """rows: [num_levels, num_codes, width]. They are numbers of float16, so that a file is exact."""

    rows: NDArray[np.float64]

    def codes(self, vectors: Vectors) -> NDArray[np.int64]:
        """Map vectors [n, width] to codes [n, num_levels]. Of equally near rows the first one counts."""
        found = np.empty((len(vectors), len(self.rows)), np.int64)
        for first in range(0, len(vectors), AT_ONCE):
            rest = vectors[first : first + AT_ONCE].astype(np.float64)
            for level, rows in enumerate(self.rows):
                codes = nearest(rest, rows)
                found[first : first + AT_ONCE, level] = codes
                rest -= rows[codes]
        return found

    def to_text(self) -> str:
        numbers = base64.b64encode(self.rows.astype("<f2").tobytes()).decode()
        return json.dumps({"shape": list(self.rows.shape), "float16": numbers})

    @staticmethod
    def of_text(text: str, key: str) -> Codebooks:
        """Read the result of to_text. Raises ConfigError for other text."""
        try:
            values = json.loads(text)
            levels, codes, width = (int(size) for size in values["shape"])
            content = base64.b64decode(values["float16"], validate=True)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{key} is not a file of codebooks ({str(error)[:100]}); write it by semantic_ids"
            ) from None
        if min(levels, codes, width) < 1 or len(content) != 2 * levels * codes * width:
            raise ConfigError(
                f"{key} has {len(content):,} bytes for the shape {[levels, codes, width]}; write it again by semantic_ids"
            )
        rows = np.frombuffer(content, "<f2").astype(np.float64).reshape(levels, codes, width)
        if not np.isfinite(rows).all():
            raise ConfigError(f"{key} has numbers that are not finite; write it again by semantic_ids")
        return Codebooks(rows)


def nearest(vectors: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the number of the nearest row for each vector, [n]."""
    distances = (rows**2).sum(axis=1) - 2.0 * vectors @ rows.T  # without |vector|^2, which is the same for all rows
    return distances.argmin(axis=1)
