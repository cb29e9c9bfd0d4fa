"""Partition ids by coprime remainders or by given classes (arXiv 1909.02107), for
kind=quotient_remainder.

Remainders by bases b1 .. bk distinguish n ids if the bases are pairwise coprime and b1 * ... * bk
>= n (section 3).
"""

from __future__ import annotations

import ast
import math
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.tables import CompressionConfig
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.extras.compression.quotient_remainder import Digit, Partition, bases_of
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUMPY_MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 4096
ARRAY_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


@dataclass(frozen=True)
class Given:
    """A given partition: the class of an id is classes[id]."""

    part: str
    num_classes: int
    classes: Sequence[int] = field(repr=False)

    def classes_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        import numpy as np

        return np.asarray(self.classes).astype(np.int64, copy=False)[ids]

    def frequencies(self, table: Table) -> RowFrequencies | None:
        """Return None, because the data do not contain how often given groups are looked up."""
        return None


def partitions_of(table: Table, config: CompressionConfig) -> Sequence[Partition]:
    """Return the partitions of scheme=given or chinese_remainder. Raises ConfigError if two ids have the same code."""
    if config.scheme == "given":
        return _given(table, config)
    bases = bases_of(table, config, balanced_bases, bases_within)
    check_bases(table.config_name, bases, table.num_embeddings)
    return [Digit(f"mod_{base}", base) for base in bases]


def _given(table: Table, config: CompressionConfig) -> list[Given]:
    num_ids = table.num_embeddings
    key = f"tables.{table.config_name}.compression"
    if bool(config.assignments) == (config.assignments_file is not None):
        raise ConfigError(f"{key}: scheme=given needs either assignments (lists of classes by id) or assignments_file")
    if config.bases or config.ratio is not None or config.num_partitions is not None:
        raise ConfigError(
            f"{key}: scheme=given takes its sizes from the assignments; remove bases, ratio, num_partitions"
        )
    if config.assignments_file is not None:
        path = Path(config.assignments_file)
        if not path.is_file():
            raise ConfigError(
                f"{key}.assignments_file={path} is not a file; write it with numpy.save, [partitions, ids]"
            )
        stamp = path.stat()
        columns = _columns_of_file(
            str(path), (stamp.st_mtime_ns, stamp.st_size), num_ids, f"{key}.assignments_file={path}"
        )
    else:
        columns = tuple(array("q", column) for column in config.assignments)
        _check_given(f"{key}.assignments", columns, num_ids)
    return [Given(f"group_{index}", max(column) + 1, column) for index, column in enumerate(columns)]


def _check_given(what: str, columns: Sequence[Sequence[int]], num_ids: int) -> None:
    """Raise ConfigError unless every id has a class in each partition and no two ids have equal
    classes in all partitions.
    """
    for index, column in enumerate(columns):
        if len(column) != num_ids:
            raise ConfigError(f"{what}: partition {index} assigns {len(column):,} ids, but the table has {num_ids:,}")
        if (least := min(column)) < 0:
            raise ConfigError(f"{what}: partition {index} has a class {least}; classes start at 0")
    first: dict[int, int] = {}
    bases = [max(column) + 1 for column in columns]
    for row, classes in enumerate(zip(*columns, strict=True)):
        code = 0
        for base, value in zip(bases, classes, strict=True):
            code = code * base + value
        if (other := first.setdefault(code, row)) != row:
            raise ConfigError(
                f"{what}: ids {other} and {row} have the same classes {list(classes)} in all {len(columns)} partitions, so "
                "they would share a row; partitions must be complementary (arXiv 1909.02107)"
            )


@lru_cache(maxsize=8)
def _columns_of_file(path: str, stamp: tuple[int, int], num_ids: int, what: str) -> tuple[array[int], ...]:
    """Read and check the file, but only once as long as its `stamp` does not change."""
    columns = _read_columns(path, what)
    _check_given(what, columns, num_ids)
    return columns


def _read_columns(path: str, what: str) -> tuple[array[int], ...]:
    """Read the rows of a .npy file [partitions, ids] of integers without numpy, because jobs are
    checked without it.
    """
    wanted = f"{what} must be a .npy file [partitions, ids] of integers (numpy.save)"
    with open(path, "rb") as file:
        if file.read(6) != NUMPY_MAGIC:
            raise ConfigError(f"{wanted}; it is not a .npy file")
        major = file.read(2)[0]
        (length,) = struct.unpack("<H", file.read(2)) if major == 1 else struct.unpack("<I", file.read(4))
        try:
            header = ast.literal_eval(file.read(min(length, MAX_HEADER_BYTES)).decode("latin1"))
            shape, descr, code = header["shape"], str(header["descr"]), ARRAY_CODES[int(str(header["descr"])[2:])]
        except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
            raise ConfigError(f"{wanted}; its header cannot be read: {str(error)[:100]}") from None
        if len(shape) != 2 or descr[0] not in "<|" or descr[1] not in "iu" or header["fortran_order"]:
            raise ConfigError(f"{wanted}; it has {descr} of shape {list(shape)}")
        values_bytes = os.fstat(file.fileno()).st_size - file.tell()
        if shape[0] * shape[1] * int(descr[2:]) != values_bytes:
            raise ConfigError(f"{wanted}; it has {values_bytes} bytes for {descr} of shape {list(shape)}")
        columns = []
        for _ in range(shape[0]):
            column = array(code if descr[1] == "i" else code.upper())
            column.fromfile(file, shape[1])
            columns.append(column)
    return tuple(columns)


def check_bases(name: str, bases: Sequence[int], num_ids: int) -> None:
    """Raise ConfigError if two ids would have the same code."""
    wanted = balanced_bases(num_ids, len(bases))
    if (product := math.prod(bases)) < num_ids:
        raise ConfigError(
            f"tables.{name}.compression.bases={list(bases)} distinguish {product:,} ids, but the "
            f"table has {num_ids:,}: make their product at least that, e.g. {wanted}"
        )
    for left, right in combinations(bases, 2):
        if (common := math.gcd(left, right)) > 1:
            raise ConfigError(
                f"tables.{name}.compression.bases={list(bases)}: {left} and {right} are not coprime (both are divisible by "
                f"{common}), so ids that differ by {math.lcm(left, right):,} would get one code; use e.g. "
                f"{wanted}, or scheme=generalised"
            )


def balanced_bases(num_ids: int, num_bases: int) -> list[int]:
    """Return coprime bases of about num_ids ** (1 / num_bases) each, which gives the fewest classes
    in total.
    """
    root = max(2, math.ceil(num_ids ** (1 / num_bases) - 1e-9))
    start = max(2, root - 2 * num_bases)
    while math.prod(found := coprime_from(start, num_bases)) < num_ids:
        start += 1
    return found


def bases_within(num_ids: int, num_bases: int, max_classes: int) -> list[int] | None:
    """Return one large base and several small bases, all coprime, with at most `max_classes` in
    total. Return None if this is not possible.
    """
    if sum(balanced_bases(num_ids, num_bases)) > max_classes:
        return None
    small = 2
    while True:
        others = coprime_from(small, num_bases - 1)
        first = max_classes - sum(others)
        while first > 1 and any(math.gcd(first, other) > 1 for other in others):
            first -= 1
        if first > 1 and first * math.prod(others) >= num_ids:
            return [first, *others]
        if first <= small:  # rounding left no space for a large base
            return balanced_bases(num_ids, num_bases)
        small += 1


def coprime_from(start: int, count: int) -> list[int]:
    """Return `count` pairwise coprime numbers from `start` on.

    Each is the next number that is coprime to all numbers before it.
    """
    found: list[int] = []
    candidate = start
    while len(found) < count:
        if all(math.gcd(candidate, other) == 1 for other in found):
            found.append(candidate)
        candidate += 1
    return found
