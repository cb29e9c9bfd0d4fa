"""Partition the ids of a table into classes several times, store a row for each class, and compose
an id's row from its classes' rows (stdlib only; arXiv 1909.02107).

Partitions are complementary if any two ids differ in at least one class (definition 1 of the
paper): then every id has a different composed row. Digits of the id give such partitions: quotient
and remainder, their generalisation, and remainders by coprime bases. Given classes may also be
complementary. Bases b1 .. bk distinguish n ids if b1 * ... * bk >= n; for remainders alone they
must also be pairwise coprime (section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from pipeline.config.registry import from_extra, register
from pipeline.config.tables import CompressionConfig
from pipeline.embeddings.compression.kind import Bags, CompressionKind, Split
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.extras.compression.digits import by_slot, digit_frequencies
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SCHEMES_OF_EXTRA = ("chinese_remainder", "given")  # pipeline/extras/compression
SCHEMES = ("naive", "quotient_remainder", "generalised", *SCHEMES_OF_EXTRA)
OPERATIONS = ("add", "multiply", "concatenate")


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


class Partition(Protocol):
    """Classes of ids. Each class is a row of one part."""

    @property
    def part(self) -> str: ...

    @property
    def num_classes(self) -> int: ...

    def classes_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]: ...

    def frequencies(self, table: Table) -> RowFrequencies | None: ...


@register("compression", "quotient_remainder")
class QuotientRemainder(CompressionKind):
    """Store the classes of each partition as rows of a part.

    An id's rows are added, multiplied or concatenated.
    """

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
        """Return the partitions. Raises ConfigError if settings contradict each other or give two ids the same code."""
        table, scheme = self.table, self.config.scheme
        if scheme == "naive":
            return [Digit("naive", table.num_embeddings)]
        if scheme in SCHEMES_OF_EXTRA:
            found: list[Partition] = from_extra("partitions_of", f"{self.key}.scheme={scheme}")(table, self.config)
            return found
        bases = bases_of(table, self.config, balanced_bases, bases_within)
        check_bases(table.config_name, bases, table.num_embeddings)
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
        """Return whether each id is composed before pooling: this is necessary for products, whose
        sum is not a product of sums.
        """
        return self.is_product and len(self.partitions) > 1

    def parts(self) -> list[Table]:
        """Return the parts. They are initialized so that composed rows have the variance of the table's init."""
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

        slots = [slot for slot in self.slots(index) if slot is not None]
        what = f"feature {self.table.feature_names[index]!r} of table {self.table.name!r}"

        def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
            for number, partition in enumerate(self.partitions):
                classes = bags._replace(ids=partition.classes_of(bags.ids))
                # a weight is one more factor, of the first part's row
                if number and self.is_product:
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
        """Return how many numbers the smallest table has: k n^(1/k) D with balanced bases."""
        if (count := len(self.partitions)) < 2:
            return None
        return sum(balanced_bases(self.table.num_embeddings, count)) * max(part_dims(self.table, self.config, count))

    def assignments(self) -> Sequence[Sequence[int]]:
        if self.config.scheme != "given":
            return []
        return [partition.classes for partition in self.partitions]  # type: ignore[attr-defined]

    def embed_files(self) -> tuple[CompressionConfig, Sequence[Sequence[int]]]:
        if self.config.assignments_file is None:
            return self.config, []
        # One class each, because scheme=given without assignments is refused.
        return replace(self.config, assignments_file=None, assignments=[[0]]), self.assignments()

    @classmethod
    def restore_files(cls, config: CompressionConfig, numbers: list[list[int]]) -> CompressionConfig:
        return replace(config, assignments=numbers)


def part_dims(table: Table, config: CompressionConfig, num_parts: int) -> list[int]:
    """Return the columns of each part. Raises ConfigError if the parts do not compose to the table's columns."""
    dim, key = table.embedding_dim, f"tables.{table.config_name}.compression"
    if config.dims and len(config.dims) != num_parts:
        raise ConfigError(f"{key}.dims={config.dims} has {len(config.dims)} entries, but there are {num_parts} parts")
    if config.operation == "concatenate":
        if not config.dims and dim % num_parts:
            raise ConfigError(
                f"{key}: {num_parts} parts cannot share embedding_dim={dim} equally; make it a multiple of {num_parts}, or "
                f"set compression.dims to {num_parts} numbers that add up to {dim}"
            )
        dims = config.dims or [dim // num_parts] * num_parts
        if sum(dims) != dim:
            raise ConfigError(f"{key}.dims={dims} add up to {sum(dims)}, but the concatenation must have {dim}")
        return list(dims)
    dims = config.dims or [dim] * num_parts
    if odd := [each for each in dims if each != dim]:
        raise ConfigError(
            f"{key}.dims={dims}: operation={config.operation} combines number by number, so every "
            "part needs the table's "
            f"embedding_dim={dim}, not {odd[0]}; remove dims, or set operation=concatenate"
        )
    return list(dims)


Balanced = Callable[[int, int], list[int]]  # (ids, bases)
Within = Callable[[int, int, int], list[int] | None]  # (ids, bases, total classes)


def bases_of(table: Table, config: CompressionConfig, balanced: Balanced, within: Within) -> list[int]:
    """Return the bases that the settings ask for. Raises ConfigError if the settings do not fit together."""
    num_ids, key = table.num_embeddings, f"tables.{table.config_name}.compression"
    if config.bases:
        if config.ratio is not None:
            raise ConfigError(f"{key}: bases and ratio both set the sizes; remove one")
        count = config.num_partitions or len(config.bases)
        if len(config.bases) != count or (config.scheme == "quotient_remainder" and count > 2) or count < 1:
            raise ConfigError(
                f"{key}.bases={config.bases} has {len(config.bases)} entries; scheme={config.scheme} with "
                f"num_partitions={config.num_partitions} needs "
                + (
                    "1 (the remainder's) or 2; more are scheme=generalised"
                    if config.scheme == "quotient_remainder"
                    else f"{count}"
                )
            )
        bases = list(config.bases)
        if config.scheme == "quotient_remainder" and len(bases) == 1:
            bases.append(-(-num_ids // bases[0]))
        return bases
    count = config.num_partitions or 2
    if config.scheme == "quotient_remainder" and count > 2:
        raise ConfigError(f"{key}.num_partitions={count}: quotient and remainder are 2; more are scheme=generalised")
    if config.ratio is None:
        return balanced(num_ids, count)
    width = max(part_dims(table, config, count))
    found = within(num_ids, count, int(num_ids * table.embedding_dim / config.ratio / width))
    if found is None:
        least = sum(balanced(num_ids, count)) * width
        raise ConfigError(
            f"{key}.ratio={config.ratio:g} is more than {count} partitions of {num_ids:,} ids can reach, which is "
            f"{num_ids * table.embedding_dim / least:.3g}; lower it, raise num_partitions with "
            f"scheme=generalised, or exclude such tables with min_rows={num_ids + 1}"
        )
    return found


def check_bases(name: str, bases: Sequence[int], num_ids: int) -> None:
    """Raise ConfigError if two ids would have the same code."""
    if (product := math.prod(bases)) < num_ids:
        raise ConfigError(
            f"tables.{name}.compression.bases={list(bases)} distinguish {product:,} ids, but the "
            f"table has {num_ids:,}: "
            f"make their product at least that, e.g. {balanced_bases(num_ids, len(bases))}"
        )


def balanced_bases(num_ids: int, num_bases: int) -> list[int]:
    """Return bases of about num_ids ** (1 / num_bases) each, which gives the fewest classes in
    total.
    """
    root = max(2, math.ceil(num_ids ** (1 / num_bases) - 1e-9))
    bases = [root] * (num_bases - 1)
    return [*bases, max(1, -(-num_ids // math.prod(bases)))]


def bases_within(num_ids: int, num_bases: int, max_classes: int) -> list[int] | None:
    """Return one large base and several small bases, with at most `max_classes` in total. Return
    None if this is not possible.

    The large base is first. If the other bases are small, few ids share a class of the large base
    (the paper's enforced collisions).
    """
    if sum(balanced_bases(num_ids, num_bases)) > max_classes:
        return None
    small = 2
    while True:
        others = [small] * (num_bases - 1)
        first = max_classes - sum(others)
        if first > 1 and first * math.prod(others) >= num_ids:
            # The large base takes what is available, so the last small base may be smaller now.
            others[-1] = max(1, -(-num_ids // (first * math.prod(others[:-1]))))
            return [first, *others]
        if first <= small:  # rounding left no space for a large base
            return balanced_bases(num_ids, num_bases)
        small += 1
