"""Refuse an Arrow stream whose rows need far more memory than the stream has bytes.

Three features of the format let a few bytes represent gigabytes: compressed buffers, dictionaries
(an index of one byte for a text of megabytes) and values without bytes of their own (nulls, bits).
Sizes are computed before memory is allocated for them.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

EXPANSION = 8  # times limits.body_mb: what the rows of a request may take in memory
VALUE_BYTES = 16  # of a value besides its text: an offset in Arrow, and its share of Python objects
TEXT_BYTES = 80  # of a number, a date or a boolean as text, at most: a decimal has 76 digits
LISTS = (pa.lib.Type_LIST, pa.lib.Type_LARGE_LIST, pa.lib.Type_FIXED_SIZE_LIST)
TEXTS = (pa.lib.Type_STRING, pa.lib.Type_LARGE_STRING, pa.lib.Type_BINARY, pa.lib.Type_LARGE_BINARY)


def is_flat(schema: pa.Schema) -> bool:
    """Return True if each row has one value in each column, and each value takes bytes of its own."""
    nested = (*LISTS, pa.lib.Type_DICTIONARY, pa.lib.Type_STRUCT)
    return all(kind.id not in nested for kind in schema.types)


def bytes_before_reading(table: pa.Table) -> int:
    """Return a lower bound of the bytes that the table needs. No buffer is read, so only lengths
    must be valid. A record batch refers to a complete dictionary, which is checked once for each
    batch.
    """
    return sum(_unread_bytes(chunk) for column in table.columns for chunk in column.chunks)


def _unread_bytes(array: pa.Array) -> int:
    kind = array.type.id
    if kind in LISTS:
        return VALUE_BYTES * len(array) + _unread_bytes(array.values)  # all values, also those before its offsets
    if kind == pa.lib.Type_STRUCT:
        return VALUE_BYTES * len(array) + sum(_unread_bytes(array.field(i)) for i in range(array.type.num_fields))
    dictionary = array.dictionary.get_total_buffer_size() if kind == pa.lib.Type_DICTIONARY else 0
    return VALUE_BYTES * len(array) + int(dictionary)


def text_bytes(table: pa.Table) -> int:
    """Return a number that is at least the bytes of all values as text. The table must be valid."""
    if is_flat(table.schema):
        return int(table.nbytes) + TEXT_BYTES * table.num_rows * table.num_columns  # columns may share bytes
    return sum(_text_bytes(chunk) for column in table.columns for chunk in column.chunks)


def _text_bytes(array: pa.Array) -> int:
    kind = array.type.id
    if kind in LISTS:
        return _text_bytes(array.values)
    if kind == pa.lib.Type_STRUCT:
        return sum(_text_bytes(array.field(i)) for i in range(array.type.num_fields))
    if kind in TEXTS:
        return int(array.nbytes)
    if kind == pa.lib.Type_DICTIONARY and array.type.value_type.id in TEXTS:
        # The index of each row selects a length, so no text is copied.
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    return len(array) * (0 if kind == pa.lib.Type_NA else _widest(array.type))


def _widest(kind: pa.DataType) -> int:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_short = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return TEXT_BYTES // 3 if is_short else TEXT_BYTES
