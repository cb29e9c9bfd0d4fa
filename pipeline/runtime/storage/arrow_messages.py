"""Read the messages of an Arrow stream, to know the unpacked size of its buffers before memory is allocated."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

FILE_MAGIC = b"ARROW1\0\0"  # before the stream in an Arrow file


def has_compression(body: bytes) -> bool:
    """Return True if a buffer of the stream is compressed. Raise struct.error if a message is incomplete."""
    return any(_is_compressed(metadata, header) for metadata, header, _ in _batches(pa.py_buffer(body)))


def unpacked_bytes(stream: pa.Buffer) -> int:
    """Return the unpacked size that the stream states. Raise struct.error if a message is incomplete."""
    total = 0
    for metadata, header, body in _batches(stream):
        if not (begin := _field(metadata, header, 2)):
            continue
        begin += _unsigned(metadata, begin)
        is_compressed = _is_compressed(metadata, header)
        for number in range(_unsigned(metadata, begin)):
            offset, length = struct.unpack_from("<qq", metadata, begin + 4 + 16 * number)
            if is_compressed and length > 0:  # 8 bytes with the unpacked length come first, -1 for "as it is"
                (said,) = struct.unpack_from("<q", body, max(0, offset))
                length = length if said == -1 else said
            if length < 0 or offset < 0:
                raise struct.error(f"a buffer has {length} bytes at {offset}")
            total += length
    return total


def _batches(stream: pa.Buffer) -> Iterator[tuple[bytes, int, pa.Buffer]]:
    """Yield for each batch and dictionary: its metadata, the position of the RecordBatch in the
    metadata, and its body.

    The format is arrow/format/Message.fbs.
    """
    reader = pa.ipc.MessageReader.open_stream(stream)
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        if message.type not in ("record batch", "dictionary"):
            continue
        metadata = message.metadata.to_pybytes()
        header = _table_at(metadata, _unsigned(metadata, 0), 2)
        if message.type == "dictionary" and header:
            header = _table_at(metadata, header, 1)  # DictionaryBatch: id, data
        if header:
            yield metadata, header, message.body


def _is_compressed(metadata: bytes, header: int) -> bool:
    return bool(_field(metadata, header, 3))  # RecordBatch: length, nodes, buffers, compression


def _unsigned(data: bytes, position: int) -> int:
    return int(struct.unpack_from("<I", data, position)[0])


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
    return offset + _unsigned(data, offset) if offset else 0
