"""Look up the ids of whole Arrow columns by compiled kernels: values are read where they lie, and none becomes an object.

A directory of a vocabulary's hashes says where those with the same leading bits lie among its keys, so that a value is
found in a step or two. Without Numba there is no ColumnIds, and rows are read as prepare reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.read.value_index import HASH_SEED, ValueIndex
from pipeline.serving.artifact.raw_schema import RawFeature

LEAST_ROWS = 32  # that kernels read sooner than dictionaries of Python do


class ColumnIds:
    """Of features that have one value a row. For one caller at a time.

    `vocabularies` are the numbers in `index` of those features that are not hashed.
    """

    def __init__(self, features: Sequence[RawFeature], index: ValueIndex, vocabularies: Sequence[int]) -> None:
        self._features, self._index, self._vocabularies = features, index, vocabularies
        self._bits = np.uint64(index.number_bits)
        numbers = np.arange(max(vocabularies, default=-1) + 2, dtype=np.uint64)
        begins = np.searchsorted(index.keys, numbers[:-1] << (np.uint64(64) - self._bits))
        self._begins = [*begins.tolist(), len(index)]
        self._directories = [
            _directory_of(index.keys[begin:end] << self._bits)
            for begin, end in zip(self._begins, self._begins[1:], strict=False)
        ]
        for nothing in (
            pa.array([""]),
            pa.array([0]),
        ):  # loads the kernels, or compiles them: no request waits for that
            self.ids([nothing] * len(features))

    def ids(self, columns: Sequence[pa.Array]) -> NDArray[np.int64] | None:
        """Of each feature's column, of types that is_read(), one after the other: 0 for a missing, an empty or an unknown
        value. None where bytes are no text."""
        from pipeline.devices.cpu.kernels import columns as kernels

        num_rows = len(columns[0]) if columns else 0
        found = np.empty((len(columns), num_rows), np.int64)
        begins, lengths, hashes, *spare = np.empty((6, num_rows), np.uint64)
        for column, feature, number, ids in zip(columns, self._features, self._vocabularies, found, strict=True):
            held = _read(column, begins, lengths)
            seed = HASH_SEED if feature.hash_size is None else feature.hash_seed
            kernels.hash_column(begins, lengths, np.uint64(seed), hashes)
            if feature.hash_size is None:
                self._look_up(number, hashes, begins, lengths, spare, ids)
            else:
                kernels.hashed_ids(hashes, lengths, np.uint64(feature.hash_size), ids)
            if kernels.has_unchecked(begins, lengths, ids, feature.hash_size is None) and not _is_valid(column):
                return None
            del held
        return found.reshape(-1)

    def _look_up(
        self,
        number: int,
        hashes: NDArray[np.uint64],
        begins: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        spare: Sequence[NDArray[np.uint64]],
        ids: NDArray[np.int64],
    ) -> None:
        """Overwrites `hashes`."""
        from pipeline.devices.cpu.kernels import columns as kernels

        index, (directory, bits), (keys, words, sizes) = self._index, self._directories[number], spare
        if not len(index):
            ids[:] = 0
            return
        slots = np.empty(len(ids), np.int64)
        kernels.find_slots(hashes, np.uint64(number), self._bits, index.keys, self._begins[number], directory, bits, keys, slots)  # fmt: skip
        data, ends = np.uint64(index.texts.data.ctypes.data), index.texts.offsets
        kernels.listed_ids(keys, begins, lengths, index.keys, slots, index.row_ids, ends, data, words, sizes, ids)


def column_ids(
    features: Sequence[RawFeature], index: ValueIndex, vocabularies: Sequence[int], null_values: Sequence[str]
) -> ColumnIds | None:
    """None without Numba, and for rows that are not read so: lists, drawn bags, buckets, or hashed text that stands for a
    missing value."""
    plain = all(not each.multi_hot and each.bag_size == 1 and each.boundaries is None for each in features)
    if not plain or null_values or find_spec("numba") is None:
        return None
    return ColumnIds(features, index, vocabularies)


def _directory_of(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int32], np.uint64]:
    """[2^bits + 1]: how many of the ascending hashes are below those with each value of the leading `bits`; and bits."""
    bits = np.uint64(max(1, len(hashes).bit_length() - 1))
    counts = np.bincount((hashes >> (np.uint64(64) - bits)).astype(np.int64), minlength=1 << int(bits))
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), bits


def is_read(kind: pa.DataType) -> bool:
    """Whether columns of this type are read; others of text or numbers are read as prepare reads them."""
    return is_whole_number(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_whole_number(kind: pa.DataType) -> bool:
    """That int64 holds."""
    return pa.types.is_integer(kind) and kind != pa.uint64()


def _read(column: pa.Array, begins: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> object:
    """What must live as long as `begins`, which are addresses."""
    from pipeline.devices.cpu.kernels import columns as kernels

    assert is_read(column.type)
    if pa.types.is_integer(column.type):
        column = column.cast(pa.int64())
        digits = np.empty(len(column) * kernels.DIGITS, np.uint8)
        validity, numbers = (_address(buffer) for buffer in column.buffers())
        place = np.uint64(digits.ctypes.data)
        kernels.read_whole_numbers(column.offset, validity, numbers, digits, place, begins, lengths)
        return column, digits
    validity, bounds, data = (_address(buffer) for buffer in column.buffers())
    kind = kernels.LARGE_TEXT if pa.types.is_large_string(column.type) else kernels.TEXT
    kernels.read_texts(kind, column.offset, validity, bounds, data, begins, lengths)
    return column


def _address(buffer: pa.Buffer | None) -> np.uint64:
    return np.uint64(0 if buffer is None else buffer.address)


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return False
    return True
