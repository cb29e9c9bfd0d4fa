"""Read the values of one categorical column from Arrow's memory, and look them up, by kernels that Numba compiles.

The hash is data.raw.hashing's, bit for bit. Each kernel is one short loop over the column's rows, whose reads of memory do not
wait for each other. Addresses are of buffers that the caller holds; no byte behind a value's end is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

U, I64 = np.uint64, np.int64
TEXT, LARGE_TEXT, WHOLE_NUMBERS = 0, 1, 2  # kinds of columns: offsets of 32 or 64 bits, or int64
DIGITS = 24  # bytes for a whole number of 64 bits in decimal
HIGH_BITS, ALL = U(0x8080808080808080), U(0xFFFFFFFFFFFFFFFF)
STEP, FIRST, SECOND = U(0x9E3779B97F4A7C15), U(0xBF58476D1CE4E5B9), U(0x94D049BB133111EB)


def _reader(bits: int, extend: str) -> Any:
    """An intrinsic: the number of so many bits at an address, which need not be aligned."""

    @intrinsic
    def read(typing_context: Any, address: Any) -> tuple[Signature, Any]:
        def generate(context: Any, builder: Any, signature: Signature, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            number = builder.load(pointer, align=1)
            return number if bits == 64 else getattr(builder, extend)(number, ir.IntType(64))

        return (types.int64 if extend == "sext" else types.uint64)(types.uint64), generate

    return read


_byte, _int32, _word = _reader(8, "zext"), _reader(32, "sext"), _reader(64, "zext")


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _mix(state):  # type: ignore[no-untyped-def]
    state = state + STEP
    state = (state ^ (state >> U(30))) * FIRST
    state = (state ^ (state >> U(27))) * SECOND
    return state ^ (state >> U(31))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _word_of(address, count):  # type: ignore[no-untyped-def]
    """The first `count` bytes at the address, at most eight, little-endian."""
    if count >= U(8):
        return _word(address)
    word = U(0)
    for k in range(count):
        word |= _byte(address + U(k)) << U(8 * k)
    return word


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def read_texts(kind, offset, validity, bounds, data, begins, lengths):  # type: ignore[no-untyped-def]
    """Where each row's text begins, and its bytes; none where it is missing. validity 0: none is."""
    for i in range(len(begins)):
        row = U(offset + i)
        if kind == LARGE_TEXT:
            begin, end = _word(bounds + U(8) * row), _word(bounds + U(8) * (row + U(1)))
        else:
            begin, end = U(_int32(bounds + U(4) * row)), U(_int32(bounds + U(4) * (row + U(1))))
        is_valid = validity == U(0) or ((_byte(validity + (row >> U(3))) >> (row & U(7))) & U(1)) == U(1)
        begins[i] = data + begin
        lengths[i] = end - begin if is_valid else U(0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def read_whole_numbers(offset, validity, numbers, digits, place, begins, lengths):  # type: ignore[no-untyped-def]
    """As read_texts, of int64, which are written to `digits` [rows * DIGITS], that lies at `place`, in decimal."""
    for i in range(len(begins)):
        row = U(offset + i)
        is_valid = validity == U(0) or ((_byte(validity + (row >> U(3))) >> (row & U(7))) & U(1)) == U(1)
        number = _word(numbers + U(8) * row)
        is_negative = (number >> U(63)) == U(1)
        left = U(0) - number if is_negative else number
        last = i * DIGITS + DIGITS
        first = last
        while True:
            first -= 1
            digits[first] = np.uint8(U(48) + left % U(10))
            left //= U(10)
            if left == U(0):
                break
        if is_negative:
            first -= 1
            digits[first] = np.uint8(45)
        begins[i] = place + U(first)
        lengths[i] = U(last - first) if is_valid else U(0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def hash_column(begins, lengths, seed, hashes):  # type: ignore[no-untyped-def]
    """data.raw.hashing.hash_texts."""
    start = _mix(seed)
    for i in range(len(begins)):
        state, length, at = start, lengths[i], begins[i]
        left = length
        while left > U(0):
            state = _mix(state ^ _word_of(at, left))
            at += U(8)
            left = left - U(8) if left > U(8) else U(0)
        hashes[i] = _mix(state ^ length)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def hashed_ids(hashes, lengths, size, ids):  # type: ignore[no-untyped-def]
    """data.raw.hashing.hash_ids; 0 where a value is missing or empty."""
    for i in range(len(ids)):
        ids[i] = I64(hashes[i] % (size - U(1)) + U(1)) if lengths[i] > U(0) else I64(0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def find_slots(hashes, number, number_bits, keys, begin, directory, directory_bits, wanted, slots):  # type: ignore[no-untyped-def]
    """Of each hash its key as one of vocabulary `number`, whose keys begin at `begin`, and the first slot whose key is not below that."""
    last = len(keys) - 1
    for i in range(len(slots)):
        wanted[i] = number << (U(64) - number_bits) | hashes[i] >> number_bits
        slots[i] = min(begin + I64(directory[hashes[i] >> (U(64) - directory_bits)]), last)
    for i in range(len(slots)):
        hashes[i] = keys[slots[i]]  # no branch waits for this read, so that many of them are under way at once
    for i in range(len(slots)):
        found, slot, key = hashes[i], slots[i], wanted[i]
        while found < key and slot < last:
            slot += 1
            found = keys[slot]
        slots[i] = slot


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def listed_ids(wanted, begins, lengths, keys, slots, row_ids, ends, data, words, sizes, ids):  # type: ignore[no-untyped-def]
    """The id of the entry that has a value's key and its bytes, 0 where there is none; text `i` of the vocabularies lies at
    data + ends[i], and eight bytes behind the last one may be read."""
    for i in range(len(ids)):
        at = ends[slots[i]]
        sizes[i], words[i], ids[i] = U(ends[slots[i] + 1] - at), data + U(at), row_ids[slots[i]]
    for i in range(len(ids)):
        words[i] = _word(words[i])
    for i in range(len(ids)):
        slot, length = slots[i], lengths[i]
        if length == U(0) or keys[slot] != wanted[i]:
            ids[i] = 0
        elif (
            length != sizes[i]
            or length > U(8)
            or _word_of(begins[i], length) != words[i] & (ALL >> (U(64) - U(8) * length))
        ):
            ids[i] = _compared(wanted[i], begins[i], length, keys, slot, row_ids, ends, data)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _compared(key, begin, length, keys, slot, row_ids, ends, data):  # type: ignore[no-untyped-def]
    """Of entries of the key, from `slot` on, the id of that with these bytes, else 0."""
    while slot < len(keys) and keys[slot] == key:
        at = U(ends[slot])
        if U(ends[slot + 1]) - at == length:
            k, same = U(0), True
            while k < length and same:
                left = length - k
                same = _word_of(begin + k, left) == _word_of(data + at + k, left)
                k += U(8)
            if same:
                return I64(row_ids[slot])
        slot += 1
    return I64(0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def has_unchecked(begins, lengths, ids, is_listed):  # type: ignore[no-untyped-def]
    """Whether a value that no vocabulary vouches for has a byte that is no ASCII: it may be no UTF-8."""
    for i in range(len(ids)):
        if is_listed and ids[i] != 0:
            continue
        k, length = U(0), lengths[i]
        while k < length:
            if _word_of(begins[i] + k, length - k) & HIGH_BITS != U(0):
                return True
            k += U(8)
    return False
