"""Store a table as the classes of partitions of its ids, whose rows compose to an id's row (stdlib only; arXiv 1909.02107).

Partitions are complementary where any two ids differ in at least one class (definition 1 of the paper): then the composed
row of every id is its own. Digits of the id are such classes (quotient and remainder, their generalisation, and remainders
by coprime bases), and so may be classes that are given. Bases b1 .. bk tell n ids apart where b1 * ... * bk >= n, and for
remainders alone where they are also pairwise coprime (section 3).
"""

from __future__ import annotations

import ast
import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.compression import CompressionConfig
from pipeline.config.registry import register
from pipeline.embeddings.compression.kind import Bags, CompressionKind, Split
from pipeline.embeddings.row_frequencies import RowFrequencies, digit_frequencies
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SCHEMES = ("naive", "quotient_remainder", "generalised", "chinese_remainder", "given")
OPERATIONS = ("add", "multiply", "concatenate")
NUMPY_MAGIC = b"\x93NUMPY"
ARRAY_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


@dataclass(frozen=True)
class Digit:
    """The class of an id is (id // stride) % num_classes."""

    part: str
    num_classes: int
    stride: int = 1

    def classes_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        digits = ids // self.stride if self.stride > 1 else ids
        return digits % self.num_classes

    def frequencies(self, table: Table) -> RowFrequencies | None:
        return digit_frequencies(table.frequencies, self.num_classes, self.stride, table.num_embeddings)


@dataclass(frozen=True)
class Given:
    """The class of an id is classes[id]."""

    part: str
    num_classes: int
    classes: Sequence[int] = field(repr=False)

    def classes_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        import numpy as np

        return np.asarray(self.classes).astype(np.int64, copy=False)[ids]

    def frequencies(self, table: Table) -> RowFrequencies | None:
        """Unknown: no data say how lookups fall on given groups."""
        return None


Partition = Digit | Given


@register("compression", "quotient_remainder")
class QuotientRemainder(CompressionKind):
    """Each partition's classes are rows of a part; an id's rows are added, multiplied or concatenated."""

    fits_sequences = True
    carries_weights = True
    settings = (
        "ratio", "scheme", "bases", "num_partitions", "operation", "dims", "assignments", "assignments_file", "max_ids_per_bag",
    )  # fmt: skip

    @classmethod
    def check(cls, config: CompressionConfig) -> None:
        check_choice("compression.scheme", config.scheme, SCHEMES)
        check_choice("compression.operation", config.operation, OPERATIONS)
        check_at_least("compression.num_partitions", config.num_partitions, 2, allow_none=True)

    @cached_property
    def partitions(self) -> list[Partition]:
        """Raises ConfigError for settings that do not go together, or that leave two ids with one code."""
        table, scheme = self.table, self.config.scheme
        if scheme == "naive":
            return [Digit("naive", table.num_embeddings)]
        if scheme == "given":
            return [*_given(table, self.config)]
        bases = _bases(table, self.config)
        if scheme == "chinese_remainder":
            return [Digit(f"mod_{base}", base) for base in bases]
        names = ["remainder", "quotient"] if len(bases) == 2 else [f"digit_{index}" for index in range(len(bases))]
        return [
            Digit(name, base, math.prod(bases[:index]))
            for index, (name, base) in enumerate(zip(names, bases, strict=True))
        ]

    @property
    def is_product(self) -> bool:
        return self.config.operation == "multiply"

    @property
    def composes_each_id(self) -> bool:
        """A sum of products is no product of sums."""
        return self.is_product and len(self.partitions) > 1

    def parts(self) -> list[Table]:
        """Composed rows have the spread that the table's init asks for."""
        count, std = len(self.partitions), self.row_std()
        dims = part_dims(self.table, self.config, count)
        if count > 1 and self.config.operation == "add":
            std /= math.sqrt(count)
        elif count > 1 and self.config.operation == "multiply":
            std = std ** (1 / count)
        return [
            self.part(each.part, each.num_classes, dim=dim, std=std, frequencies=each.frequencies(self.table))
            for each, dim in zip(self.partitions, dims, strict=True)
        ]

    def split(self, index: int) -> Split:
        from pipeline.embeddings.bags import by_slot

        slots = [slot for slot in self.slots(index) if slot is not None]
        what = f"feature {self.table.feature_names[index]!r} of table {self.table.name!r}"

        def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
            for number, partition in enumerate(self.partitions):
                classes = bags._replace(ids=partition.classes_of(bags.ids))
                if number and self.is_product:  # a weight is one factor more, of the first part's row
                    classes = classes._replace(weights=None)
                if not slots:
                    yield self.feature(index, partition.part), classes
                else:
                    for slot, part in by_slot(classes, slots, what):
                        yield self.feature(index, partition.part, slot), part

        return split

    def id_features(self, index: int) -> list[str]:
        return [self.feature(index, self.partitions[0].part, slot) for slot in self.slots(index)]

    def compose(
        self,
        parameters: Mapping[str, torch.Tensor],
        pooled: Mapping[str, torch.Tensor],
        features: KeyedJaggedTensor,
        index: int,
    ) -> torch.Tensor:
        slots = self.slots(index)
        composed = self._compose_slot(pooled, index, slots[0])
        for slot in slots[1:]:
            composed = composed + self._compose_slot(pooled, index, slot)
        return composed

    def _compose_slot(self, pooled: Mapping[str, torch.Tensor], index: int, slot: int | None) -> torch.Tensor:
        import torch

        rows = [pooled[self.feature(index, partition.part, slot)] for partition in self.partitions]
        if self.config.operation == "concatenate":
            return torch.cat(rows, dim=1)
        composed = rows[0]
        for row in rows[1:]:
            composed = composed + row if self.config.operation == "add" else composed * row
        return composed

    @property
    def label(self) -> str:
        return f"{self.config.kind} {self.config.operation}" if len(self.partitions) > 1 else self.config.kind

    @property
    def setting(self) -> str:
        return f"operation={self.config.operation}"

    def least_numbers(self) -> int | None:
        """With balanced bases: k n^(1/k) D."""
        if (count := len(self.partitions)) < 2:
            return None
        return sum(balanced_bases(self.table.num_embeddings, count)) * max(part_dims(self.table, self.config, count))

    def assignments(self) -> Sequence[Sequence[int]]:
        return [partition.classes for partition in self.partitions if isinstance(partition, Given)]

    def embed_files(self) -> tuple[CompressionConfig, Sequence[Sequence[int]]]:
        if self.config.assignments_file is None:
            return self.config, []
        # A class each: scheme=given without assignments is refused.
        return replace(self.config, assignments_file=None, assignments=[[0]]), self.assignments()

    @classmethod
    def restore_files(cls, config: CompressionConfig, numbers: list[list[int]]) -> CompressionConfig:
        return replace(config, assignments=numbers)


def part_dims(table: Table, config: CompressionConfig, num_parts: int) -> list[int]:
    """Columns of each part. Raises ConfigError where they do not compose to the table's."""
    dim, key = table.embedding_dim, f"tables.{table.config_name}.compression"
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
    if odd := [each for each in dims if each != dim]:
        raise ConfigError(
            f"{key}.dims={dims}: operation={config.operation} goes number by number, so every part needs the table's "
            f"embedding_dim={dim}, not {odd[0]}; leave dims out, or set operation=concatenate"
        )
    return list(dims)


def _bases(table: Table, config: CompressionConfig) -> list[int]:
    num_ids = table.num_embeddings
    key, coprime = f"tables.{table.config_name}.compression", config.scheme == "chinese_remainder"
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
        check_bases(table.config_name, bases, num_ids, coprime)
        return bases
    count = config.num_partitions or 2
    if config.scheme == "quotient_remainder" and count > 2:
        raise ConfigError(f"{key}.num_partitions={count}: quotient and remainder are 2; more are scheme=generalised")
    if config.ratio is None:
        return balanced_bases(num_ids, count, coprime)
    width = max(part_dims(table, config, count))
    found = bases_within(num_ids, count, int(num_ids * table.embedding_dim / config.ratio / width), coprime)
    if found is None:
        least = sum(balanced_bases(num_ids, count, coprime)) * width
        raise ConfigError(
            f"{key}.ratio={config.ratio:g} is more than {count} partitions of {num_ids:,} ids can reach, which is "
            f"{num_ids * table.embedding_dim / least:.3g}; lower it, raise num_partitions with scheme=generalised, or leave "
            f"such tables out with min_rows={num_ids + 1}"
        )
    return found


def _given(table: Table, config: CompressionConfig) -> list[Given]:
    num_ids = table.num_embeddings
    key = f"tables.{table.config_name}.compression"
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


def check_bases(name: str, bases: Sequence[int], num_ids: int, coprime: bool) -> None:
    """Raises ConfigError where two ids would get the same code."""
    if (product := math.prod(bases)) < num_ids:
        raise ConfigError(
            f"tables.{name}.compression.bases={list(bases)} tell {product:,} ids apart, and the table has {num_ids:,}: "
            f"make their product at least that, e.g. {balanced_bases(num_ids, len(bases), coprime)}"
        )
    for left, right in combinations(bases, 2) if coprime else ():
        if (common := math.gcd(left, right)) > 1:
            raise ConfigError(
                f"tables.{name}.compression.bases={list(bases)}: {left} and {right} are not coprime (both are divisible by "
                f"{common}), so ids that differ by {math.lcm(left, right):,} would get one code; use e.g. "
                f"{balanced_bases(num_ids, len(bases), coprime)}, or scheme=generalised"
            )


def balanced_bases(num_ids: int, num_bases: int, coprime: bool = False) -> list[int]:
    """About num_ids ** (1 / num_bases) each: the fewest classes in all."""
    root = max(2, math.ceil(num_ids ** (1 / num_bases) - 1e-9))
    if not coprime:
        bases = [root] * (num_bases - 1)
        return [*bases, max(1, -(-num_ids // math.prod(bases)))]
    start = max(2, root - 2 * num_bases)
    while math.prod(found := coprime_from(start, num_bases)) < num_ids:
        start += 1
    return found


def bases_within(num_ids: int, num_bases: int, max_classes: int, coprime: bool = False) -> list[int] | None:
    """One large base and small others, together `max_classes` or little less; None where that is too few.

    The large one comes first. Small others mean that few ids share a class of it (the paper's enforced collisions).
    """
    least = sum(balanced_bases(num_ids, num_bases, coprime))
    if least > max_classes:
        return None
    small = 2
    while True:
        others = coprime_from(small, num_bases - 1) if coprime else [small] * (num_bases - 1)
        first = max_classes - sum(others)
        while coprime and first > 1 and any(math.gcd(first, other) > 1 for other in others):
            first -= 1
        if first > 1 and first * math.prod(others) >= num_ids:
            # The large base has taken what there was: the last small one may be smaller now.
            if not coprime:
                others[-1] = max(1, -(-num_ids // (first * math.prod(others[:-1]))))
            return [first, *others]
        if first <= small:  # rounding left no room for a large one
            return balanced_bases(num_ids, num_bases, coprime)
        small += 1


def coprime_from(start: int, count: int) -> list[int]:
    """`count` pairwise coprime numbers from `start` on, each the next that is coprime to those before."""
    found: list[int] = []
    candidate = start
    while len(found) < count:
        if all(math.gcd(candidate, other) == 1 for other in found):
            found.append(candidate)
        candidate += 1
    return found
