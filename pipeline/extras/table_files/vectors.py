"""Read vectors by value from a Parquet file, or from a .npy file whose row number is the value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.config.tables import InitConfig
from pipeline.data.raw.value_types import is_list, plain, to_text
from pipeline.runtime.errors import ConfigError, DataError, did_you_mean
from pipeline.runtime.storage import storage

AT_ONCE = 1 << 16  # rows
Vectors = NDArray[np.float32]


def read_vectors(init: InitConfig, key: str) -> Iterator[tuple[pa.Array, Vectors]]:
    """Yield (values as text [n], vectors [n, width]) in the order of init.file. Rows without a
    value or a vector are left out. `key` is the setting, for errors. Raises ConfigError if the file
    or its columns are missing, DataError if it has no finite vectors of one width."""
    assert init.file is not None
    if not storage.is_file(init.file):
        raise ConfigError(f"{key}={init.file}: there is no such file")
    path = storage.local_path(init.file)
    try:
        for values, vectors in _of_npy(path) if path.endswith(".npy") else _of_parquet(path, init, key):
            if not np.isfinite(vectors).all():
                first = values[int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])]
                raise DataError(
                    f"{init.file}: the vector of {str(first)!r} has a number that is not finite; correct it"
                )
            yield values, vectors
    except (pa.ArrowException, OSError, ValueError, EOFError) as error:
        if isinstance(error, (ConfigError, DataError)):
            raise
        raise DataError(f"{init.file} cannot be read ({' '.join(str(error).split())[:200]})") from None


def _of_npy(path: str) -> Iterator[tuple[pa.Array, Vectors]]:
    numbers = np.load(path, mmap_mode="r", allow_pickle=False)
    if numbers.ndim != 2 or numbers.dtype.kind != "f":
        raise DataError(
            f"{path} has {numbers.dtype} numbers of shape {list(numbers.shape)}; write floating-point numbers as "
            "[number of vectors, columns], where the row number is the value of the id"
        )
    for first in range(0, len(numbers), AT_ONCE):
        vectors = np.asarray(numbers[first : first + AT_ONCE], np.float32)
        yield pa.array(np.arange(first, first + len(vectors))).cast(pa.string()), vectors


def _of_parquet(path: str, init: InitConfig, key: str) -> Iterator[tuple[pa.Array, Vectors]]:
    with pq.ParquetFile(path) as file:
        columns = {"value_column": init.value_column, "vector_column": init.vector_column}
        names = file.schema_arrow.names
        for setting, name in columns.items():
            if name not in names:
                raise ConfigError(
                    f"{init.file} has no column {name!r}, only {', '.join(names)}{did_you_mean(name, names)}; set "
                    f"{key.removesuffix('file')}{setting}"
                )
        width = 0
        for batch in file.iter_batches(batch_size=AT_ONCE, columns=list(columns.values())):
            values = to_text(plain(pa.chunked_array([batch[init.value_column]]))).combine_chunks()
            vectors = batch[init.vector_column]
            if not is_list(vectors.type):
                raise DataError(f"{init.file}: column {init.vector_column!r} has {vectors.type}, not lists of numbers")
            has_both = pc.and_(values.is_valid(), vectors.is_valid())
            values, vectors = values.filter(has_both), vectors.filter(has_both)
            if len(values):
                width = width or len(vectors[0])
                yield values, _matrix(init.file, values, vectors, width)


def _matrix(path: str | None, values: pa.Array, vectors: Any, width: int) -> Vectors:
    """Return lists of `width` numbers as [n, width]. Raises DataError for other lists."""
    wrong = pc.not_equal(pc.list_value_length(vectors), width).to_numpy(zero_copy_only=False)
    if wrong.any() or not width:
        first = int(np.flatnonzero(wrong)[0]) if wrong.any() else 0
        raise DataError(
            f"{path}: the vector of {str(values[first])!r} has {len(vectors[first])} numbers, the first vector has "
            f"{width}; write vectors of one width"
        )
    flat = pc.list_flatten(vectors).cast(pa.float32())
    if flat.null_count:
        raise DataError(f"{path} has vectors with missing numbers; leave out the vector, or write 0")
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(-1, width)
