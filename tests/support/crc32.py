"""Choose four bytes so that changed content keeps its CRC-32, as anyone can who may write to a file."""

from __future__ import annotations

import zlib


def with_same_crc32(changed: bytes, at: int, original: bytes) -> bytes:
    """Return `changed` with the four bytes from `at` on chosen so that its CRC-32 is that of `original`.

    For one length a CRC-32 is linear in the bits: each of the 32 bits flips a fixed set of bits of
    the result, and Gaussian elimination finds which of them to set.
    """
    head, tail = changed[:at], changed[at + 4 :]
    begin = zlib.crc32(head)

    def crc_with(number: int) -> int:
        return zlib.crc32(tail, zlib.crc32(number.to_bytes(4, "little"), begin))

    base = crc_with(0)
    rows: list[tuple[int, int]] = []  # (bits that are flipped, bits of the four bytes that flip them)
    for bit in range(32):
        flips, chosen = crc_with(1 << bit) ^ base, 1 << bit
        for other, others in rows:
            if flips ^ other < flips:
                flips, chosen = flips ^ other, chosen ^ others
        rows.append((flips, chosen))
        rows.sort(reverse=True)
    wanted, number = zlib.crc32(original) ^ base, 0
    for flips, chosen in rows:
        if wanted ^ flips < wanted:
            wanted, number = wanted ^ flips, number ^ chosen
    result = head + number.to_bytes(4, "little") + tail
    assert zlib.crc32(result) == zlib.crc32(original) and len(result) == len(changed)
    return result
