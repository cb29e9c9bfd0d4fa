"""Divide the limits of memory and threads among the parts of a preparation. Report what DuckDB
lacked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import duckdb

from pipeline.data.raw.blocks import MAX_BLOCK_ROWS
from pipeline.runtime.errors import LimitError

# bytes of memory per byte of text while a block is parsed and encoded, in addition to its text
BYTES_A_TEXT_BYTE = 10
# Python, numpy, pyarrow and DuckDB, and the memory that they keep for reuse
PROCESS_BYTES = 300 << 20
BYTES_AN_ENGINE_THREAD = 128 << 20
MAX_BLOCK_BYTES = 8 << 20
MIN_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class Resources:
    """The resources that preparation may use. The sum of its parts stays within `memory_bytes`."""

    memory_bytes: int
    threads: int
    staging: str

    @property
    def engine_bytes(self) -> int:
        """Return DuckDB's memory limit: the memory that the process itself does not need.

        DuckDB exceeds its limit by a tenth (measured up to 30M values).
        """
        return max(BYTES_AN_ENGINE_THREAD, (self.memory_bytes - PROCESS_BYTES) * 7 // 10)

    @property
    def engine_threads(self) -> int:
        """Return the number of DuckDB's threads. Each needs memory before it spills."""
        return max(1, min(self.threads, self.engine_bytes // BYTES_AN_ENGINE_THREAD))

    def shard_threads(self, row_group_rows: int, num_columns: int) -> int:
        """Return how many shards may be written in parallel. For each shard a row group and several
        copies of a block are in memory.
        """
        a_shard = (row_group_rows + MAX_BLOCK_ROWS) * num_columns * 4 * 4
        return max(1, min(self.threads, self.memory_bytes // 2 // a_shard))

    @property
    def block_bytes(self) -> int:
        share = self.memory_bytes // 3 // (BYTES_A_TEXT_BYTE * (self.threads + 1))
        return max(MIN_BLOCK_BYTES, min(MAX_BLOCK_BYTES, share))


@contextmanager
def engine_errors(resources: Resources) -> Iterator[None]:
    """Raise LimitError if DuckDB lacks memory, and OSError if the disk is full."""
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise LimitError(
            f"memory_limit_gb={resources.memory_bytes / 2**30:g} is too little for {resources.threads} threads "
            f"(DuckDB: {str(error).splitlines()[0]}): raise it, or lower threads"
        ) from error
    except duckdb.IOException as error:
        text = " ".join(str(error).split())
        code = errno.ENOSPC if "No space left" in text or "max_temp_directory_size" in text else errno.EIO
        raise OSError(code, f"{os.strerror(code)} (DuckDB: {text[:200]})", resources.staging) from error
