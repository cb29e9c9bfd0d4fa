"""Refuse an Arrow stream whose rows would take far more memory than its bytes.

Three things let a few bytes stand for gigabytes: compressed buffers, dictionaries (an index of one byte for a text of
megabytes) and values without bytes of their own (nulls, bits). Sizes are computed before memory is allocated for them.
"""

from __future__ import annotations

import struct

import pyarrow as pa
import pyarrow.compute as pc

EXPANSION = 8  # times limits.body_mb: what the rows of a request may take in memory
VALUE_BYTES = 16  # of a value besides its text: an offset in Arrow, and its share of Python objects
NUMBER_BYTES = 25  # of a number, a date or a boolean as text, at most
DECIMAL_BYTES = 80


def bytes_before_reading(table: pa.Table) -> int:
    """Return a lower bound of what the table becomes. No buffer is read: only lengths have to be valid.

    A record batch refers to a whole dictionary, which is checked once for each batch.
    """
    return sum(_unread_bytes(chunk) for column in table.columns for chunk in column.chunks)


def _unread_bytes(array: pa.Array) -> int:
    if _is_list(array.type):
        return VALUE_BYTES * len(array) + _unread_bytes(array.values)  # all values, also those before its offsets
    dictionary = array.dictionary.get_total_buffer_size() if pa.types.is_dictionary(array.type) else 0
    return VALUE_BYTES * len(array) + int(dictionary)


def text_bytes(table: pa.Table) -> int:
    """Return the bytes of all values of a valid table as text."""
    return sum(_text_bytes(chunk) for column in table.columns for chunk in column.chunks)


def _text_bytes(array: pa.Array) -> int:
    if _is_list(array.type):
        return _text_bytes(array.values)
    if pa.types.is_dictionary(array.type):
        values = array.dictionary
        if not _is_text(values.type):
            return _widest(values.type) * len(array)
        # The index of each row selects a length, so no text is copied.
        return pc.sum(pc.binary_length(values).cast(pa.int64()).take(array.indices)).as_py() or 0
    if _is_text(array.type):
        return pc.sum(pc.binary_length(array).cast(pa.int64())).as_py() or 0
    return _widest(array.type) * len(array)


def _widest(kind: pa.DataType) -> int:
    if pa.types.is_null(kind):
        return 0
    return DECIMAL_BYTES if pa.types.is_decimal(kind) else NUMBER_BYTES


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def has_compression(body: bytes) -> bool:
    """Return whether a buffer of the stream is compressed. Raise struct.error if a message is torn."""
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return False
        if message.type in ("record batch", "dictionary") and _is_compressed(
            message.metadata.to_pybytes(), message.type
        ):
            return True


def _is_compressed(metadata: bytes, kind: str) -> bool:
    """Return whether a message's RecordBatch has a `compression` (arrow/format/Message.fbs)."""
    header = _table_at(metadata, struct.unpack_from("<I", metadata, 0)[0], 2)
    if kind == "dictionary" and header:
        header = _table_at(metadata, header, 1)  # DictionaryBatch: id, data
    return bool(header and _field(metadata, header, 3))  # RecordBatch: length, nodes, buffers, compression


def _field(data: bytes, table: int, number: int) -> int:
    """Return the position of a flatbuffer table's field, or 0 if the field is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise struct.error("a table points before the message")
    size = struct.unpack_from("<H", data, vtable)[0]
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0] if 6 + 2 * number <= size else 0
    return table + offset if offset else 0


def _table_at(data: bytes, table: int, number: int) -> int:
    offset = _field(data, table, number)
    return offset + int(struct.unpack_from("<I", data, offset)[0]) if offset else 0
