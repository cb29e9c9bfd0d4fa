"""Open local and remote files for pyarrow, and read slices of raw numbers from them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipeline.runtime.storage import storage


def open_input(path: str) -> pa.NativeFile:
    """Return a pyarrow file for reading. Bytes are read and not mapped, because mapped pages count as memory."""
    return pa.OSFile(path) if storage.is_local(path) else pa.PythonFile(storage.open_file(path, "rb"), mode="r")


def read_numbers(path: str, first: int, count: int) -> np.ndarray:
    """Return [count] int32 from a file of int32 numbers, beginning with number `first`."""
    with storage.open_file(path, "rb") as file:
        file.seek(4 * first)
        return np.frombuffer(file.read(4 * count), np.int32)
