"""Open local and remote files for pyarrow, and read slices of raw numbers from them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipeline.runtime.storage import storage


def open_input(path: str) -> pa.NativeFile:
    """A pyarrow file to read from. Bytes are read, not mapped: mapped pages count as memory."""
    return pa.OSFile(path) if storage.is_local(path) else pa.PythonFile(storage.open_file(path, "rb"), mode="r")


def read_numbers(path: str, first: int, count: int) -> np.ndarray:
    """[count] int32 of a file of them, from number `first` on."""
    with storage.open_file(path, "rb") as file:
        file.seek(4 * first)
        return np.frombuffer(file.read(4 * count), np.int32)
