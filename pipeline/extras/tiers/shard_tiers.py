"""Let FBGEMM's module hold the slots of tables with tiers, and show all of their rows to
TorchRec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.checkpoint.stored_rows import StoredRows
from pipeline.config.tables import head_rows, num_slots
from pipeline.sharding.table_storage import TierSettings

if TYPE_CHECKING:
    from pipeline.extras.tiers.tiered_lookup import ShardRows, TieredLookup

Specs = Sequence[tuple[Any, ...]]
Begins = NDArray[np.int64]


@dataclass(frozen=True)
class _Shard:
    name: str
    num_rows: int
    num_slots: int
    head: int


class ShardTiers:
    """Hold the shards of one FBGEMM module; None for a shard without tiers."""

    lookup: TieredLookup

    def __init__(self, settings: TierSettings, shards: list[_Shard | None]) -> None:
        self._settings, self._shards = settings, shards
        self._sources: list[ShardRows | None] = []

    @classmethod
    def of(cls, settings: TierSettings, keywords: Mapping[str, Any]) -> ShardTiers | None:
        """Return the storage for the arguments with which TorchRec builds the module, or None if
        none of its tables has tiers.
        """
        names = keywords.get("table_names") or []
        if not any(name in settings.slots for name in names):
            return None
        whole_rows = [info[0] for info in keywords["embedding_shard_info"]]
        shards = []
        for name, spec, rows in zip(names, keywords["embedding_specs"], whole_rows, strict=True):
            slots = num_slots(settings.slots[name], spec[0], rows) if name in settings.slots else 0
            head = head_rows(settings.heads.get(name, 0.0), slots)
            shards.append(_Shard(name, spec[0], slots, head) if slots and spec[0] else None)
        return cls(settings, shards)

    def slot_specs(self, specs: Specs) -> list[tuple[Any, ...]]:
        """Return specs in which FBGEMM's table has slots instead of rows."""
        return [
            (shard.num_slots, *spec[1:]) if shard else tuple(spec)
            for shard, spec in zip(self._shards, specs, strict=True)
        ]

    def open(self, weights: Sequence[torch.Tensor], states: Sequence[Sequence[torch.Tensor]], begins: Begins) -> None:
        """Open the stores. weights[t] and states[t] are the slots' weights and states of table t."""
        from pipeline.extras.tiers.row_store import RowStore, pool_rows
        from pipeline.extras.tiers.tiered_lookup import ShardRows, TieredLookup
        from pipeline.extras.tiers.tiered_table import TieredTable

        settings = self._settings
        tables: list[TieredTable | None] = []
        for index, (shard, weight) in enumerate(zip(self._shards, weights, strict=True)):
            if shard is None:
                tables.append(None)
                continue
            own = [weight, *(states[index] if index < len(states) else [])]
            own = [column.detach() for column in own]
            columns = [column.numpy().reshape(shard.num_slots, -1) for column in own]
            columns += [np.empty((shard.num_slots, 0), np.float32)] * (3 - len(columns))
            widths = [column.shape[1] for column in columns]
            store = RowStore(settings.folder, shard.name, shard.num_rows, widths, pool_rows(shard.num_slots))
            vectors = [column.dim() > 1 for column in own]
            tables.append(TieredTable(shard.name, columns, vectors, store, shard.head))
        self.lookup = TieredLookup(tables, begins)
        self._sources = [ShardRows(self.lookup, table) if table is not None else None for table in tables]

    def stored_weights(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._stored(index, 0, weight) for index, weight in enumerate(weights)]

    def stored_states(self, states: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [
            [self._stored(index, column, state) for column, state in enumerate(own, start=1)]
            for index, own in enumerate(states)
        ]

    def group(self, first_feature: int) -> TieredGroup:
        bounds = first_feature + self.lookup.feature_begins
        spans = [range(int(bounds[at]), int(bounds[at + 1])) for at in self.lookup.positions]
        return TieredGroup(self.lookup, spans)

    def _stored(self, index: int, column: int, slots: torch.Tensor) -> torch.Tensor:
        shard, source = self._shards[index], self._sources[index]
        if shard is None or source is None:
            return slots
        return StoredRows(source, column, 0, torch.Size([shard.num_rows, *slots.shape[1:]]))


@dataclass(frozen=True)
class TieredGroup:
    """Hold the tables with tiers of one FBGEMM module. features: the positions of each table's
    features in the lookup.
    """

    lookup: TieredLookup
    features: list[range]

    def prefetch_rows(self, features: KeyedJaggedTensor) -> None:
        """Start loading the rows of ids that have arrived for the complete lookup."""
        values, offsets = features.values().numpy(), features.offset_per_key()
        self.lookup.prefetch_rows([values[offsets[own.start] : offsets[own.stop]] for own in self.features])

    def names(self, features: Sequence[str]) -> list[list[str]]:
        return [[features[position] for position in own] for own in self.features]
