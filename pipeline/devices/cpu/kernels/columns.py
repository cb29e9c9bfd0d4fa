"""Hash text values and look them up in vocabularies, many at a time: compiled by Numba.

The hash equals data.raw.hashing bit for bit. Texts and vocabularies are data.raw.hashing.Texts:
`words` has a word of eight bytes for each position, so that a text is read eight bytes at a time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

U, I64 = np.uint64, np.int64
STEP, FIRST, SECOND = U(0x9E3779B97F4A7C15), U(0xBF58476D1CE4E5B9), U(0x94D049BB133111EB)
ALL = U(0xFFFFFFFFFFFFFFFF)
WORD_BYTES = 8


@njit(nogil=True, cache=True)
def _mix(state):  # type: ignore[no-untyped-def]
    state = state + STEP
    state = (state ^ (state >> U(30))) * FIRST
    state = (state ^ (state >> U(27))) * SECOND
    return state ^ (state >> U(31))


@njit(nogil=True, cache=True)
def _word(words, at, count):  # type: ignore[no-untyped-def]
    """Return the first `count` bytes at position `at` as a number. `count` is at most 8."""
    return words[at] if count >= WORD_BYTES else words[at] & (ALL >> U(8 * (WORD_BYTES - count)))


@njit(nogil=True, cache=True)
def hash_values(words, offsets, seed, hashes, begin, end):  # type: ignore[no-untyped-def]
    """Set hashes[i] to data.raw.hashing.hash_texts of text i, for texts begin..end."""
    start = _mix(seed)
    for i in range(begin, end):
        state = start
        for at in range(offsets[i], offsets[i + 1], WORD_BYTES):
            state = _mix(state ^ _word(words, at, offsets[i + 1] - at))
        hashes[i] = _mix(state ^ U(offsets[i + 1] - offsets[i]))


@njit(nogil=True, cache=True)
def find_slots(hashes, directory, directory_bits, first, slots, begin, end):  # type: ignore[no-untyped-def]
    """Set slots[i] to a position at or before the key of hashes[i]. first: the vocabulary's first position."""
    for i in range(begin, end):
        slots[i] = first + directory[hashes[i] >> (U(64) - directory_bits)]


@njit(nogil=True, cache=True)
def listed_ids(texts, slots, index, vocabulary, ids, begin, end):  # type: ignore[no-untyped-def]
    """Set ids[i] to the id of text i in a vocabulary, for texts begin..end. 0: unknown or empty.

    texts: words, offsets, hashes. index: keys, ids, words and offsets of all vocabularies
    (data.read.value_index.ValueIndex). vocabulary: the number of the vocabulary, and how many bits
    of a key such a number has.
    """
    words, offsets, hashes = texts
    keys, row_ids, known_words, known_offsets = index
    number, number_bits = vocabulary
    for i in range(begin, end):
        ids[i] = 0
        at, length = offsets[i], offsets[i + 1] - offsets[i]
        key = number << (U(64) - number_bits) | hashes[i] >> number_bits
        slot = slots[i]
        while slot < len(keys) and keys[slot] < key:
            slot += 1
        while length > 0 and slot < len(keys) and keys[slot] == key:
            other = known_offsets[slot]
            same, k = known_offsets[slot + 1] - other == length, 0
            while same and k < length:
                same = _word(words, at + k, length - k) == _word(known_words, other + k, length - k)
                k += WORD_BYTES
            if same:
                ids[i] = I64(row_ids[slot])
                break
            slot += 1


@njit(nogil=True, cache=True)
def hashed_ids(offsets, hashes, size, ids, begin, end):  # type: ignore[no-untyped-def]
    """Set ids[i] = data.raw.hashing.hash_ids of text i, for texts begin..end. 0: empty."""
    for i in range(begin, end):
        ids[i] = I64(hashes[i] % (size - U(1)) + U(1)) if offsets[i + 1] > offsets[i] else I64(0)
