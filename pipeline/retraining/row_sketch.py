"""Sketch a window's raw rows to find rows that it shares with an earlier window, in any order.

The sketch keeps the smallest 64-bit hashes of the rows (bottom-k; Cohen & Kaplan 2007). Below the
threshold of two sketches both have all hashes, so the share of common hashes there estimates the
share of common rows.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.config.data import DataConfig
from pipeline.data.prepare.vocabulary import open_engine
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import find_format
from pipeline.data.sql import sql_path
from pipeline.runtime.storage import storage

SKETCH_SIZE = 1024
MEMORY_BYTES = 512 << 20


@dataclass(frozen=True)
class RowSketch:
    """A sketch. `hashes`: [<= SKETCH_SIZE] ascending uint64. complete: it has all distinct rows."""

    hashes: NDArray[np.uint64]

    @property
    def text(self) -> str:
        return self.hashes.astype(">u8").tobytes().hex()

    @classmethod
    def of(cls, text: str) -> RowSketch:
        return cls(np.frombuffer(bytes.fromhex(text), dtype=">u8").astype(np.uint64))

    def share_in(self, other: RowSketch) -> float:
        """Return the share of this window's distinct rows that `other` also has, within
        about 0.03.
        """
        if not len(self.hashes) or not len(other.hashes):
            return 0.0
        threshold = min(_reach(self), _reach(other))
        local = self.hashes[self.hashes <= threshold]
        return float(np.isin(local, other.hashes).mean()) if len(local) else 0.0


def _reach(sketch: RowSketch) -> np.uint64:
    """Return the value up to which the sketch has every hash."""
    full = len(sketch.hashes) == SKETCH_SIZE
    return np.uint64(sketch.hashes[-1]) if full else np.uint64(np.iinfo(np.uint64).max)


def sketch_rows(sources: list[Source], config: DataConfig, threads: int) -> RowSketch:
    """Sketch the rows with all their columns.

    MD5, because the hashes must be equal in every release of DuckDB.
    """
    with tempfile.TemporaryDirectory() as spill, closing(open_engine(spill, MEMORY_BYTES, threads)) as engine:
        found = engine.execute(
            f"SELECT DISTINCT hash FROM ({_hashes(sources, config)}) ORDER BY hash LIMIT {SKETCH_SIZE}"
        ).fetchnumpy()["hash"]
    return RowSketch(np.asarray(found, dtype=np.uint64))


def count_rows(sources: list[Source], config: DataConfig, threads: int) -> int:
    """Count lines of text without the header, or rows of Parquet."""
    with tempfile.TemporaryDirectory() as spill, closing(open_engine(spill, MEMORY_BYTES, threads)) as engine:
        query = f"SELECT count(*) FROM ({_hashes(sources, config)})"
        (number,) = engine.execute(query).fetchone() or (0,)
    return int(number)


def _hashes(sources: list[Source], config: DataConfig) -> str:
    paths = ", ".join(sql_path(os.path.abspath(storage.local_path(source.path))) for source in sources)
    return f"SELECT md5_number_lower(line) AS hash FROM ({find_format(config.format).sql_lines(paths)})"
