"""Check a file of faiss before faiss reads it, because faiss trusts the sizes and positions in it.

faiss allocates as much memory as a header says, and uses the numbers in a graph as positions
without a check. The formats IxFI and IHNf are those of faiss/impl/index_write.cpp.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct("<4siqqq?i")  # name, dimensions, vectors, two unused numbers, is trained, metric
GRAPH = struct.Struct("<iiiii")  # entry point, highest level, and three settings of searches
LENGTH = struct.Struct("<Q")
INNER_PRODUCT = 0


class _File:
    """Bytes that are read from front to back. Raises ValueError if fewer bytes are left than requested."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._rest = content

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        if num_bytes > len(self._rest):
            raise ValueError(f"it has {len(self._rest)} bytes where it says {num_bytes}")
        found, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return found

    def numbers(self, kind: struct.Struct) -> tuple[Any, ...]:
        return kind.unpack(self.take(kind.size).tobytes())

    def vector(self, dtype: str) -> NDArray[Any]:
        (count,) = self.numbers(LENGTH)
        return self.take(count * np.dtype(dtype).itemsize).view(dtype)

    def header(self, name: bytes, num_items: int, dim: int) -> None:
        found, *sizes, _, _, is_trained, metric = self.numbers(HEADER)
        if (found, is_trained, metric) != (name, True, INNER_PRODUCT):
            raise ValueError(f"it is {found!r} by metric {metric}, not {name!r} of dot products")
        if sizes != [dim, num_items]:
            raise ValueError(f"it has {sizes[1]:,} vectors of {sizes[0]} numbers, not {num_items:,} of {dim}")

    def end(self) -> None:
        if len(self._rest):
            raise ValueError(f"it has {len(self._rest)} bytes too many")


def check_flat(content: NDArray[np.uint8], num_items: int, dim: int) -> None:
    """Raise ValueError unless the content is an IndexFlatIP of `num_items` vectors."""
    _flat(_File(content), num_items, dim)


def check_graph(content: NDArray[np.uint8], num_items: int, dim: int) -> None:
    """Raise ValueError unless the content is an IndexHNSWFlat of `num_items` vectors with valid links."""
    file = _File(content)
    file.header(b"IHNf", num_items, dim)
    file.vector("<f8")  # the share of each level
    first_of_level, levels, offsets = (file.vector(kind) for kind in ("<i4", "<i4", "<u8"))
    neighbours = file.vector("<i4")
    entry, highest, *_ = file.numbers(GRAPH)
    is_sound = (
        len(levels) == len(offsets) - 1 == num_items
        and (np.diff(first_of_level) >= 0).all()
        and first_of_level[0] >= 0
        and levels.min() >= 1
        and levels.max() < len(first_of_level)
        and offsets[0] == 0
        and offsets[-1] == len(neighbours)
        and (offsets[1:] >= offsets[:-1]).all()
        and (offsets[1:] - offsets[:-1] == first_of_level[levels].astype(np.uint64)).all()
        and (not len(neighbours) or (neighbours.min() >= -1 and neighbours.max() < num_items))
        and 0 <= entry < num_items
        and highest == levels[entry] - 1 == levels.max() - 1
        and _levels_fit(first_of_level, levels, offsets, neighbours)
    )
    if not is_sound:
        raise ValueError("its graph leads to vectors that it does not have")
    _flat(file, num_items, dim)


def _levels_fit(first_of_level: Any, levels: Any, offsets: Any, neighbours: Any) -> bool:
    """Return True if each link of a level leads to a vector that is in this level."""
    for level in range(1, int(levels.max())):
        begins = offsets[:-1][levels > level].astype(np.int64)
        own = np.arange(first_of_level[level], first_of_level[level + 1])
        linked = neighbours[(begins[:, None] + own).reshape(-1)]
        if (levels[linked[linked >= 0]] <= level).any():
            return False
    return True


def _flat(file: _File, num_items: int, dim: int) -> None:
    file.header(b"IxFI", num_items, dim)
    if (count := len(file.vector("<f4"))) != num_items * dim:
        raise ValueError(f"it has {count} numbers for {num_items} vectors of {dim}")
    file.end()
