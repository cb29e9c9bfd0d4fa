"""Turn a table's compression into partitions of its ids: what class each id has in each of them (stdlib only).

Partitions are complementary where any two ids differ in at least one class (arXiv 1909.02107, definition 1): then the
composed row of every id is its own. A hash is a single partition whose classes several ids share.
"""

from __future__ import annotations

import ast
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from pipeline.embeddings.compression.bases import balanced_bases, bases_within, check_bases
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError

NUMPY_MAGIC = b"\x93NUMPY"
ARRAY_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


@dataclass(frozen=True)
class Digit:
    """The class of an id is (id // stride) % num_classes."""

    part: str
    num_classes: int
    stride: int = 1


@dataclass(frozen=True)
class Hashed:
    """The class of an id is a seeded hash of it, spread over num_classes."""

    part: str
    num_classes: int
    seed: int = 0


@dataclass(frozen=True)
class Given:
    """The class of an id is classes[id]."""

    part: str
    num_classes: int
    classes: Sequence[int] = field(repr=False)


Partition = Digit | Hashed | Given


def partitions_of(table: Table) -> list[Partition]:
    """Of a table whose compression is by partitions.

    Raises:
        ConfigError: settings that do not go together, or that leave two ids with one code.
    """
    config, num_ids = table.compression, table.num_embeddings
    assert config is not None
    if config.kind == "hash":
        return [Hashed("hash", _hash_rows(table), config.seed)]
    if config.scheme == "naive":
        return [Digit("naive", num_ids)]
    if config.scheme == "given":
        return _given(table)
    bases = _bases(table)
    if config.scheme == "chinese_remainder":
        return [Digit(f"mod_{base}", base) for base in bases]
    names = ["remainder", "quotient"] if len(bases) == 2 else [f"digit_{index}" for index in range(len(bases))]
    return [
        Digit(name, base, math.prod(bases[:index])) for index, (name, base) in enumerate(zip(names, bases, strict=True))
    ]


def part_dims(table: Table, num_parts: int) -> list[int]:
    """Columns of each part. Raises ConfigError where they do not compose to the table's."""
    config, dim = table.compression, table.embedding_dim
    assert config is not None
    key = f"tables.{table.name}.compression"
    if config.dims and len(config.dims) != num_parts:
        raise ConfigError(f"{key}.dims={config.dims} has {len(config.dims)} entries, and there are {num_parts} parts")
    if config.operation == "concatenate":
        if not config.dims and dim % num_parts:
            raise ConfigError(
                f"{key}: {num_parts} parts cannot share embedding_dim={dim} equally; make it a multiple of {num_parts}, or "
                f"set compression.dims to {num_parts} numbers that add up to {dim}"
            )
        dims = config.dims or [dim // num_parts] * num_parts
        if sum(dims) != dim:
            raise ConfigError(f"{key}.dims={dims} add up to {sum(dims)}, and concatenated they are to be {dim}")
        return list(dims)
    dims = config.dims or [dim] * num_parts
    if odd := [one for one in dims if one != dim]:
        raise ConfigError(
            f"{key}.dims={dims}: operation={config.operation} goes number by number, so every part needs the table's "
            f"embedding_dim={dim}, not {odd[0]}; leave dims out, or set operation=concatenate"
        )
    return list(dims)


def _hash_rows(table: Table) -> int:
    config, key = table.compression, f"tables.{table.name}.compression"
    assert config is not None
    if (config.num_rows is None) == (config.ratio is None):
        raise ConfigError(
            f"{key}: kind=hash wants one of num_rows (of the hashed table) and ratio (its part of the full one)"
        )
    num_rows = config.num_rows or max(1, int(table.num_embeddings / (config.ratio or 1)))
    if num_rows > table.num_embeddings:
        raise ConfigError(
            f"{key}.num_rows={num_rows:,}, but the table has {table.num_embeddings:,} ids: hashed into more rows they would "
            "still collide and take more memory; use fewer, or kind=none"
        )
    return num_rows


def _bases(table: Table) -> list[int]:
    config, num_ids = table.compression, table.num_embeddings
    assert config is not None
    key, coprime = f"tables.{table.name}.compression", config.scheme == "chinese_remainder"
    if config.bases:
        if config.ratio is not None:
            raise ConfigError(f"{key}: bases and ratio both say the sizes; leave one out")
        count = config.num_partitions or len(config.bases)
        if len(config.bases) != count or (config.scheme == "quotient_remainder" and count > 2) or count < 1:
            raise ConfigError(
                f"{key}.bases={config.bases} has {len(config.bases)} entries; scheme={config.scheme} with "
                f"num_partitions={config.num_partitions} wants "
                + (
                    "1 (the remainder's) or 2; more are scheme=generalised"
                    if config.scheme == "quotient_remainder"
                    else f"{count}"
                )
            )
        bases = list(config.bases)
        if config.scheme == "quotient_remainder" and len(bases) == 1:
            bases.append(-(-num_ids // bases[0]))
        check_bases(table.name, bases, num_ids, coprime)
        return bases
    count = config.num_partitions or 2
    if config.scheme == "quotient_remainder" and count > 2:
        raise ConfigError(f"{key}.num_partitions={count}: quotient and remainder are 2; more are scheme=generalised")
    if config.ratio is None:
        return balanced_bases(num_ids, count, coprime)
    width = max(part_dims(table, count))
    found = bases_within(num_ids, count, int(num_ids * table.embedding_dim / config.ratio / width), coprime)
    if found is None:
        least = sum(balanced_bases(num_ids, count, coprime)) * width
        raise ConfigError(
            f"{key}.ratio={config.ratio:g} is more than {count} partitions of {num_ids:,} ids can reach, which is "
            f"{num_ids * table.embedding_dim / least:.3g}; lower it, raise num_partitions with scheme=generalised, or leave "
            f"such tables out with min_rows={num_ids + 1}"
        )
    return found


def _given(table: Table) -> list[Partition]:
    config, num_ids = table.compression, table.num_embeddings
    assert config is not None
    key = f"tables.{table.name}.compression"
    if bool(config.assignments) == (config.assignments_file is not None):
        raise ConfigError(f"{key}: scheme=given wants one of assignments (lists of classes by id) and assignments_file")
    if config.bases or config.ratio is not None or config.num_partitions is not None:
        raise ConfigError(
            f"{key}: scheme=given takes its sizes from the assignments; leave out bases, ratio, num_partitions"
        )
    if config.assignments_file is not None:
        path = Path(config.assignments_file)
        if not path.is_file():
            raise ConfigError(f"{key}.assignments_file={path} is no file; write it with numpy.save, [partitions, ids]")
        stamp = path.stat()
        columns = _columns_of_file(
            str(path), (stamp.st_mtime_ns, stamp.st_size), num_ids, f"{key}.assignments_file={path}"
        )
    else:
        columns = tuple(array("q", column) for column in config.assignments)
        _check_given(f"{key}.assignments", columns, num_ids)
    return [Given(f"group_{index}", max(column) + 1, column) for index, column in enumerate(columns)]


def _check_given(what: str, columns: Sequence[Sequence[int]], num_ids: int) -> None:
    """Raises ConfigError unless every id has a class in each partition and no two ids have all classes in common."""
    for index, column in enumerate(columns):
        if len(column) != num_ids:
            raise ConfigError(f"{what}: partition {index} assigns {len(column):,} ids, and the table has {num_ids:,}")
        if (least := min(column)) < 0:
            raise ConfigError(f"{what}: partition {index} has a class {least}; classes count from 0")
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
    """Read and checked once, as long as the file's `stamp` stays."""
    columns = _read_columns(path, what)
    _check_given(what, columns, num_ids)
    return columns


def _read_columns(path: str, what: str) -> tuple[array[int], ...]:
    """The rows of a .npy file [partitions, ids] of integers, without numpy: jobs are checked where there is none."""
    wanted = f"{what} must be a .npy file [partitions, ids] of integers (numpy.save)"
    with open(path, "rb") as file:
        if file.read(6) != NUMPY_MAGIC:
            raise ConfigError(f"{wanted}; it is no .npy file")
        major = file.read(2)[0]
        (length,) = struct.unpack("<H", file.read(2)) if major == 1 else struct.unpack("<I", file.read(4))
        header = ast.literal_eval(file.read(length).decode("latin1"))
        shape, descr = header["shape"], str(header["descr"])
        if len(shape) != 2 or descr[0] not in "<|" or descr[1] not in "iu" or header["fortran_order"]:
            raise ConfigError(f"{wanted}; it holds {descr} of shape {list(shape)}")
        code = ARRAY_CODES[int(descr[2:])]
        columns = []
        for _ in range(shape[0]):
            column = array(code if descr[1] == "i" else code.upper())
            column.fromfile(file, shape[1])
            columns.append(column)
    return tuple(columns)
