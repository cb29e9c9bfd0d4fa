"""Look up the ids of whole Arrow columns by compiled kernels: no value becomes a Python object.

A directory of a vocabulary's hashes tells where the keys with the same leading bits begin, so that a value is found in
a step or two. Without Numba there is no ColumnIds, and rows are read as prepare reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.raw.hashing import texts_of
from pipeline.data.read.value_index import HASH_SEED, ValueIndex
from pipeline.serving.artifact.raw_schema import RawFeature

MIN_ROWS = 32  # fewer rows are read faster by dictionaries of Python


class ColumnIds:
    """Look up features that have one value in each row. For one caller at a time.

    `vocabularies` are the numbers in `index` of the features that are not hashed.
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
        self.ids([pa.array([""])] * len(features))  # loads the kernels or compiles them, before a request waits

    def ids(self, columns: Sequence[pa.Array]) -> NDArray[np.int64] | None:
        """Return the ids of each feature's column, one column after the other: 0 for a missing, empty or unknown value.

        The columns are of types that is_read(). Returns None if bytes are not text.
        """
        from pipeline.devices.cpu.kernels import columns as kernels

        if not columns:
            return np.empty(0, np.int64)
        try:
            values = pa.concat_arrays([column.cast(pa.string()) for column in columns])
            values = values.fill_null("") if values.null_count else values
            values.validate(full=True)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            return None
        texts, num_rows = texts_of([values]), len(columns[0])
        hashes, slots = np.empty(len(texts), np.uint64), np.empty(len(texts), np.int64)
        ids, index = np.empty(len(texts), np.int64), self._index
        known = index.keys, index.row_ids, index.texts.all_words, index.texts.offsets
        for column, (feature, number) in enumerate(zip(self._features, self._vocabularies, strict=True)):
            span = column * num_rows, (column + 1) * num_rows
            seed = HASH_SEED if feature.hash_size is None else feature.hash_seed
            kernels.hash_values(texts.all_words, texts.offsets, np.uint64(seed), hashes, *span)
            if feature.hash_size is None:
                directory = self._directories[number]
                kernels.find_slots(hashes, *directory, self._begins[number], slots, *span)
                kernels.listed_ids(
                    (texts.all_words, texts.offsets, hashes), slots, known, (np.uint64(number), self._bits), ids, *span
                )
            else:
                kernels.hashed_ids(texts.offsets, hashes, np.uint64(feature.hash_size), ids, *span)
        return ids


def column_ids(
    features: Sequence[RawFeature], index: ValueIndex, vocabularies: Sequence[int], null_values: Sequence[str]
) -> ColumnIds | None:
    """Return None without Numba, and for rows that need more: lists, drawn bags, buckets, null_values."""
    plain = all(not each.multi_hot and each.bag_size == 1 and each.boundaries is None for each in features)
    if not plain or null_values or find_spec("numba") is None:
        return None
    return ColumnIds(features, index, vocabularies)


def _directory_of(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int32], np.uint64]:
    """[2^bits + 1]: the number of the ascending hashes below each value of the leading `bits`; and bits."""
    bits = np.uint64(max(1, len(hashes).bit_length() - 1))
    counts = np.bincount((hashes >> (np.uint64(64) - bits)).astype(np.int64), minlength=1 << int(bits))
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), bits


def is_read(kind: pa.DataType) -> bool:
    """Return whether ColumnIds reads columns of this type. Other types are read as prepare reads them."""
    return is_whole_number(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_whole_number(kind: pa.DataType) -> bool:
    """Return whether int64 holds the type's numbers."""
    return pa.types.is_integer(kind) and kind != pa.uint64()
