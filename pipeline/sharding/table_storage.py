"""Define the interface of tables whose rows are stored outside memory. An extra implements the storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class TierSettings:
    """Settings of tables with tiers.

    slots: the share of a table's rows that have a slot, or the number of slots if above 1. folder:
    a folder on a local SSD. heads: the share of a shard's slots that is reserved for its first
    rows.
    """

    slots: Mapping[str, float]
    folder: str
    heads: Mapping[str, float] = field(default_factory=dict)


@dataclass
class TierStats:
    """Hold statistics since the start. They count training only, except for the reads and writes.

    rows: distinct rows per batch. missed: rows without a slot when they were first resolved.
    stall_seconds: how long the training thread waited for rows.
    """

    lookups: int = 0
    missed_lookups: int = 0
    rows: int = 0
    missed_rows: int = 0
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    written_rows: int = 0
    stall_seconds: float = 0.0

    def __add__(self, other: TierStats) -> TierStats:
        return TierStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: TierStats) -> TierStats:
        return TierStats(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


class PinnedSlots(Protocol):
    """Hold the slots that a batch uses until its backward has finished."""

    def release(self) -> None: ...


class StorageLookup(Protocol):
    """Look up slots of the tables of one FBGEMM module. Rows without a slot are loaded before the lookup."""

    def to_slots(
        self, indices: NDArray[np.int64], offsets: NDArray[np.int64], training: bool
    ) -> tuple[NDArray[np.int64], PinnedSlots]: ...

    def prefetch_rows(self, ids: Sequence[NDArray[np.int64]]) -> None:
        """Start loading the rows of a coming batch. ids: one array for each stored table."""

    def stats(self) -> TierStats: ...


class StorageGroup(Protocol):
    """Hold the stored tables of one FBGEMM module in a lookup of TorchRec."""

    @property
    def lookup(self) -> StorageLookup: ...

    def prefetch_rows(self, features: KeyedJaggedTensor) -> None:
        """Start loading the rows of ids that have arrived for the complete lookup."""

    def names(self, features: Sequence[str]) -> list[list[str]]:
        """Return the names of the features of each stored table. features: all features of the lookup."""


class TableStorage(Protocol):
    """Store the shards of one FBGEMM module, which holds slots instead of rows."""

    @property
    def lookup(self) -> StorageLookup: ...

    def slot_specs(self, specs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return FBGEMM's specs with slots instead of rows."""

    def open(
        self, weights: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]], begins: NDArray[np.int64]
    ) -> None:
        """Open the stores. weights[t] and states[t] are the slots' weights and states of table t."""

    def stored_weights(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all rows of each table's shard."""

    def stored_states(self, states: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]: ...

    def group(self, first_feature: int) -> StorageGroup:
        """Return the group. first_feature: the module's first feature in its lookup."""


def storage_groups(lookup: nn.Module) -> list[StorageGroup]:
    """Return the groups of one of TorchRec's grouped lookups."""
    groups, first = [], 0
    kernels: Any = getattr(lookup, "_emb_modules", [])
    for kernel in kernels:
        storage: TableStorage | None = getattr(kernel.emb_module, "tiers", None)
        if storage is not None:
            groups.append(storage.group(first))
        first += kernel.config.num_features()
    return groups
