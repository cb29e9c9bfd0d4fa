"""Define the messages from a server to the process that writes its log: what was answered, as msgpack.

A request costs the server a few microseconds, because columns of values, scores and ids are sent as
they are, and ids once for all requests of a batch. The writing process makes rows of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from pipeline.extras.serving_log.log_files import About
from pipeline.serving.scoring.encoded import Cut, EncodedSpan, cut

SIZE_BYTES = 4  # before each message


class Settings(msgspec.Struct):
    """The settings of the writing process, as JSON on its command line."""

    folder: str
    rows_per_file: int
    flush_s: float
    max_bytes: int


class Report(msgspec.Struct):
    """What the writing process has done: requests in complete files, and requests that could not be
    written; files that were removed, and the size of all files.
    """

    written: int = 0
    lost: int = 0
    removed: int = 0
    num_bytes: int = 0


class Model(msgspec.Struct, array_like=True, tag=True):
    """A model whose requests have this number from here on. schema: of the raw columns, as an Arrow message."""

    number: int
    about: About
    schema: bytes


class CutBytes(msgspec.Struct, array_like=True):
    """A Cut with the bytes of its arrays."""

    kept: bytes
    batch_rows: int
    place: int
    dense: bytes
    lengths: bytes
    values: bytes


class Batch(msgspec.Struct, array_like=True, tag=True):
    """What rows were encoded as. The requests that follow, up to the next batch, have their rows in it."""

    cuts: list[CutBytes]


class Request(msgspec.Struct, array_like=True, tag=True):
    """A request. model: its number. delta: the last one applied. at_us: microseconds since 1970. begin: of its rows in the
    batch. rows: the raw columns in the order of the schema, each a list of values, or an Arrow stream.
    refused: row and reason. scores: float32 [num_rows, tasks].
    """

    model: int
    delta: int
    request_id: str
    at_us: int
    num_rows: int
    begin: int
    rows: list[list[Any]] | bytes
    refused: list[tuple[int, str]]
    scores: bytes


class Requests(NamedTuple):
    """Requests that follow each other, answered by one model, with the batch that has their rows."""

    batch: Batch
    requests: list[Request]


Message: TypeAlias = Model | Batch | Request
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return a message with its size. Raises ValueError or OverflowError for a value that it cannot hold."""
    body = _encoder.encode(message)
    return len(body).to_bytes(SIZE_BYTES, "little") + body


def read_messages(buffer: bytearray) -> Iterator[Message]:
    """Yield the complete messages, and remove them from the buffer."""
    begin = 0
    while (start := begin + SIZE_BYTES) <= len(buffer):
        end = start + int.from_bytes(buffer[begin:start], "little")
        if end > len(buffer):
            break
        yield _decoder.decode(memoryview(buffer)[start:end])
        begin = end
    del buffer[:begin]


def cut_bytes(spans: Sequence[EncodedSpan]) -> list[CutBytes]:
    return [
        CutBytes(
            each.kept.tobytes(), each.batch_rows, each.place, each.dense.tobytes(), each.lengths.tobytes(), each.values.tobytes(),
        )
        for each in cut(spans)
    ]  # fmt: skip


def cut_of(sent: CutBytes, num_features: int) -> Cut:
    kept = np.frombuffer(sent.kept, np.int64)
    return Cut(
        kept,
        sent.batch_rows,
        sent.place,
        np.frombuffer(sent.dense, np.float32).reshape(len(kept), -1),
        np.frombuffer(sent.lengths, np.int64).reshape(num_features, len(kept)),
        np.frombuffer(sent.values, np.int64),
    )
