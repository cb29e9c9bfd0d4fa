"""Unpack zlib streams of files within a limit, because a few kilobytes of zlib may stand for gigabytes."""

from __future__ import annotations

import zlib


def unpack_zlib(content: bytes, most_bytes: int) -> bytes:
    """Raise ValueError if `content` is not one whole zlib stream, or if it holds more than `most_bytes`."""
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(content, most_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(unpacked) > most_bytes:
        raise ValueError(f"{len(content)} bytes unpack to more than {most_bytes}")
    if not stream.eof or stream.unused_data:
        raise ValueError(f"{len(content)} bytes are not one whole zlib stream")
    return unpacked
