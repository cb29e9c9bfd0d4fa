"""Map hashed ids to rows on the rank that holds them, with TorchRec's MCH modules.

Each id in use has a separate row.

A table's rows are divided into buckets. Each bucket has a map, and a history of the ids since its
last eviction. Every eviction_interval steps, and when the history is full, the policy decides which
ids keep their row, which are evicted, and which get a free row. That row is initialized again, and
its optimizer state is set to zero. Ids without a row share the last row of their bucket. Maps and
histories are part of the checkpoint; each rank has a shard of the buckets.

With ManagedRows, an id without a row may have to occur several times, or to be sampled, before it
can get a row, and an id that does not occur may lose its row. Sampling uses hashes of id and step,
so it is the same on any rank and after a resume.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline import devices
from pipeline.checkpoint.changes import ShardPlace
from pipeline.embeddings.collection import Managed
from pipeline.embeddings.table import IDS_A_BUCKET, MANAGED, MANAGED_STATE, ManagedRows
from pipeline.runtime.errors import ShardingError

POLICIES: dict[str, Callable[[], MCHEvictionPolicy]] = {
    "lfu": LFU_EvictionPolicy,
    "lru": LRU_EvictionPolicy,
    "distance_lfu": DistanceLFU_EvictionPolicy,
}
MIN_HISTORY = 1024
FREE = torch.iinfo(torch.int64).max  # TorchRec's value instead of an id for a row without an id


class LocalTable(NamedTuple):
    """Hold the part of a table that FBGEMM has on this rank: [rows, dim] from `first_row` on, and
    the optimizer's states.
    """

    weight: torch.Tensor
    states: list[torch.Tensor]
    first_row: int


class ManagedTable:
    """Hold the buckets of one table that are on this rank; the first one has number `first_bucket`.

    A step looks up and counts the ids of all buckets at once, without waiting for a GPU. Only an
    eviction visits the buckets one by one.
    """

    def __init__(self, managed: ManagedRows, config: EmbeddingBagConfig, local: LocalTable, seed: int) -> None:
        self.managed, self._config, self._seed = managed, config, seed
        self._weight, self._states = local.weight, local.states
        self.first_bucket = local.first_row // managed.rows_a_bucket
        self.num_buckets = len(local.weight) // managed.rows_a_bucket
        sizes = state_sizes(managed)
        self._history_size = sizes["history"]
        # One number more than the state. A step writes excluded ids there. Selecting by a mask
        # would wait for the GPU to count the mask.
        self._padded = {
            name: torch.zeros(self.num_buckets * size + 1, dtype=torch.int64, device=local.weight.device)
            for name, size in sizes.items()
        }
        self.state = {name: padded[:-1] for name, padded in self._padded.items()}
        self._maps = [self._make_map(bucket) for bucket in range(self.num_buckets)]
        # called with the local rows that are initialized again
        self.on_initialized: Callable[[torch.Tensor], None] | None = None
        self.state_has_changed()

    def state_has_changed(self) -> None:
        """Drop cached values of `state`, because a checkpoint was loaded into it."""
        self._steps: int | None = None  # all buckets have the same count
        self._most_counted: int | None = None  # the length of the longest history
        # [rows] ascending: the ids of all maps, numbered as in remap()
        self._keys: torch.Tensor | None = None

    def _make_map(self, bucket: int) -> MCHManagedCollisionModule:
        """Make TorchRec's map of a bucket.

        Its tensors are views of `state`, so a checkpoint loads into them.
        """
        bucket_map = MCHManagedCollisionModule(
            zch_size=self.managed.rows_a_bucket,
            device=self._weight.device,
            eviction_policy=POLICIES[self.managed.policy](),
            eviction_interval=self.managed.eviction_interval,
        )  # its rows are numbered from the bucket's first row
        bucket_map._input_history_buffer_size = self._history_size
        initial = {
            "sorted_ids": bucket_map._mch_sorted_raw_ids,
            "rows": bucket_map._mch_remapped_ids_mapping,
            **bucket_map._mch_metadata,
        }
        for name, tensor in initial.items():
            self._of_bucket(name, bucket).copy_(tensor)
        bucket_map._mch_sorted_raw_ids = self._of_bucket("sorted_ids", bucket)
        bucket_map._mch_remapped_ids_mapping = self._of_bucket("rows", bucket)
        bucket_map._mch_metadata = {name: self._of_bucket(name, bucket) for name in bucket_map._mch_metadata}
        return bucket_map

    def _of_bucket(self, name: str, bucket: int) -> torch.Tensor:
        """Return a view of the bucket's part of `state[name]`."""
        whole = self.state[name]
        size = len(whole) // self.num_buckets
        return whole[bucket * size : (bucket + 1) * size]

    def remap(self, ids: torch.Tensor, training: bool) -> torch.Tensor:
        """Map [n] hashed ids, numbered from this rank's first bucket, to [n] local rows.

        In training, count the ids first.
        """
        buckets = ids // IDS_A_BUCKET
        if training:
            self._count(ids, buckets)
        is_known, places = self._find(ids)
        rows_within = torch.where(is_known, self.state["rows"][places], self.managed.rows_a_bucket - 1)
        return buckets * self.managed.rows_a_bucket + rows_within

    def _find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for [n] hashed ids whether each has a row, and the id's position in the maps."""
        if self._keys is None:
            of_buckets = self.state["sorted_ids"].view(self.num_buckets, -1)
            begins = torch.arange(self.num_buckets, device=ids.device)[:, None] * IDS_A_BUCKET
            # FREE is larger than any id
            self._keys = (of_buckets.clamp(max=IDS_A_BUCKET - 1) + begins).view(-1)
        places = torch.searchsorted(self._keys, ids).clamp_(max=len(self._keys) - 1)
        return (self._keys[places] == ids) & (self.state["sorted_ids"][places] != FREE), places

    def _count(self, ids: torch.Tensor, buckets: torch.Tensor) -> None:
        """Add a step's ids to the history. Evict if the history is full or the interval has
        passed.
        """
        if self._steps is None:
            self._steps = int(self.state["steps"][0])
        self._steps += 1
        self.state["steps"] += 1
        is_counted = self._seen(ids, buckets, self._steps)
        order = torch.argsort(buckets, stable=True)
        ids, buckets, is_counted = ids[order] % IDS_A_BUCKET, buckets[order], is_counted[order]
        counts = self.state["history_length"].new_zeros(self.num_buckets)
        counts.index_add_(0, buckets, is_counted.long())
        if self._have_room(counts, len(ids)):
            self._append(ids, buckets, is_counted, counts)
        else:
            for bucket in range(self.num_buckets):
                self._append_with_evictions(bucket, ids[(buckets == bucket) & is_counted])
            self._most_counted = None
        if self._steps % self.managed.eviction_interval == 0:
            for bucket in range(self.num_buckets):
                self._evict(bucket)
            self._most_counted = 0

    def _have_room(self, counts: torch.Tensor, num_ids: int) -> bool:
        """Return whether every history has space for its part of the step's ids.

        The counts are read from the device only if necessary.
        """
        if self._most_counted is not None and self._most_counted + num_ids <= self._history_size:
            self._most_counted += num_ids
            return True
        self._most_counted = int((self.state["history_length"] + counts).max())
        return self._most_counted <= self._history_size

    def _append(self, ids: torch.Tensor, buckets: torch.Tensor, is_counted: torch.Tensor, counts: torch.Tensor) -> None:
        """Append ids to the histories of all buckets.

        `ids` are numbered within their bucket and sorted by bucket.
        """
        first_of_bucket = counts.cumsum(0) - counts
        earlier = is_counted.cumsum(0) - 1 - first_of_bucket[buckets]  # ids of the same bucket
        places = buckets * self._history_size + self.state["history_length"][buckets] + earlier
        places = torch.where(is_counted, places, self.num_buckets * self._history_size)
        self._padded["history"][places] = ids
        self._padded["history_steps"].index_fill_(0, places, self._steps)  # type: ignore[arg-type]
        self.state["history_length"] += counts

    def _append_with_evictions(self, bucket: int, ids: torch.Tensor) -> None:
        assert self._steps is not None
        length = self._of_bucket("history_length", bucket)
        history, history_steps = self._of_bucket("history", bucket), self._of_bucket("history_steps", bucket)
        while len(ids):
            begin = int(length)
            added = ids[: self._history_size - begin]
            history[begin : begin + len(added)] = added
            history_steps[begin : begin + len(added)] = self._steps
            length += len(added)
            ids = ids[len(added) :]
            if len(ids):  # the history has no space for the remaining ids
                self._evict(bucket)

    def _seen(self, ids: torch.Tensor, buckets: torch.Tensor, step: int) -> torch.Tensor:
        """Store for each row the step in which it was last used.

        Return which ids are counted: all ids that have a row, and sampled ids.
        """
        managed = self.managed
        if managed.max_idle_steps is None and managed.admit_probability >= 1.0:
            return torch.ones_like(ids, dtype=torch.bool)
        is_known, places = self._find(ids)
        if managed.max_idle_steps is not None:
            rows = buckets * managed.rows_a_bucket + self.state["rows"][places]
            rows = torch.where(is_known, rows, len(self.state["last_seen"]))
            self._padded["last_seen"].index_fill_(0, rows, step)
        if managed.admit_probability >= 1.0:
            return torch.ones_like(is_known)
        return is_known | (_draws(ids % IDS_A_BUCKET, step) < managed.admit_probability)

    def _drop_rare(self, bucket: int, bucket_map: MCHManagedCollisionModule, length: int) -> int:
        """Remove ids without a row that occurred too rarely from the history.

        Return the new length.
        """
        least = self.managed.admit_count
        if least <= 1 or not length:
            return length
        history, history_steps = self._of_bucket("history", bucket), self._of_bucket("history_steps", bucket)
        ids, inverse, counts = torch.unique(history[:length], return_inverse=True, return_counts=True)
        is_known, _ = bucket_map._match_indices(bucket_map._mch_sorted_raw_ids, ids)
        kept = (is_known | (counts >= least))[inverse].nonzero().flatten()
        history[: len(kept)], history_steps[: len(kept)] = history[kept], history_steps[kept]
        return len(kept)

    def _expire(self, bucket: int, bucket_map: MCHManagedCollisionModule) -> None:
        """Free the rows of ids that have not occurred for max_idle_steps.

        TorchRec assigns free rows first, and the rows are then initialized again.
        """
        longest = self.managed.max_idle_steps
        if longest is None:
            return
        assert self._steps is not None
        ids, step = bucket_map._mch_sorted_raw_ids, self._steps
        last_seen = self._of_bucket("last_seen", bucket)[bucket_map._mch_remapped_ids_mapping]
        is_idle = (ids != FREE) & (step - last_seen > longest)
        if is_idle.any():
            ids[is_idle] = FREE
            for counts in bucket_map._mch_metadata.values():
                counts[is_idle] = 0
            bucket_map._sort_mch_buffers()

    @torch.no_grad()
    def _evict(self, bucket: int) -> None:
        """Apply the policy to the ids of the history, initialize the rows that have a new id, and empty the history."""
        assert self._steps is not None
        bucket_map, length = self._maps[bucket], self._of_bucket("history_length", bucket)
        self._expire(bucket, bucket_map)
        bucket_map._current_iter = self._steps
        bucket_map._history_accumulator = self._of_bucket("history", bucket)
        bucket_map._current_history_buffer_offset = self._drop_rare(bucket, bucket_map, int(length))
        bucket_map._history_metadata = {
            info.metadata_name: self._of_bucket("history_steps", bucket)
            for info in bucket_map._eviction_policy.metadata_info
            if info.is_history_metadata
        }
        if bucket_map._current_history_buffer_offset:
            bucket_map._coalesce_history()
            rows = bucket_map.evict()
            assert rows is not None
            if self.managed.max_idle_steps is not None:
                self._of_bucket("last_seen", bucket)[rows] = self._steps
            first_row = bucket * self.managed.rows_a_bucket
            self._initialize_rows(first_row + rows, self.first_bucket + bucket, self._steps)
        length.zero_()
        self._keys = None

    def _initialize_rows(self, rows: torch.Tensor, bucket: int, step: int) -> None:
        """Initialize rows from (seed, table, bucket, step), so that a resumed run gets the same
        weights.
        """
        text = f"{self._seed}/{self.managed.table}/{bucket}/{step}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        init_fn = self._config.init_fn
        assert init_fn is not None
        with devices.current().fork_rng():
            torch.manual_seed(seed)
            values = torch.empty(len(rows), self._weight.shape[1], device=self._weight.device)
            init_fn(values)
        self._weight[rows] = values.to(self._weight.dtype)
        for state in self._states:
            state[rows] = 0
        if self.on_initialized is not None:
            self.on_initialized(rows)


class ManagedTables:
    """Hold the managed tables of a sharded collection, and this rank's part of their maps.

    The object is False if there are no managed tables.
    """

    def __init__(
        self,
        sharded: ShardedEmbeddingBagCollection,
        configs: list[EmbeddingBagConfig],
        env: ShardingEnv,
        seed: int,
    ) -> None:
        self._group = env.process_group
        self._num_buckets: dict[str, int] = {}
        self._tables: dict[str, ManagedTable] = {}
        self._features: dict[str, str] = {}  # feature -> table
        self._sizes: dict[str, dict[str, int]] = {}
        local_tables = dict(_local_tables(sharded))
        for config in configs:
            if not isinstance(config.init_fn, Managed):
                continue
            managed = config.init_fn.rows
            _check_shards(managed, sharded.module_sharding_plan[config.name], env.world_size)
            self._features |= dict.fromkeys(config.feature_names, config.name)
            self._num_buckets[config.name] = managed.num_buckets
            if config.name in local_tables:
                self._tables[config.name] = ManagedTable(managed, config, local_tables[config.name], seed)
            self._sizes[config.name] = state_sizes(managed)

    def __bool__(self) -> bool:
        return bool(self._num_buckets)

    def watch_initialized(self, mark: Callable[[ShardPlace, torch.Tensor], None]) -> None:
        """Call `mark` with the rows of a shard that got another id and were initialized again. They
        are numbered from the shard's first row.
        """
        for name, table in self._tables.items():
            first_row = table.first_bucket * table.managed.rows_a_bucket
            table.on_initialized = partial(mark, ShardPlace(name, first_row, 0))

    def state_has_changed(self) -> None:
        for table in self._tables.values():
            table.state_has_changed()

    def num_hashed_ids(self, feature: str) -> int | None:
        """Return the number of hashed ids of a managed table's feature, or None if its table is not
        managed.
        """
        table = self._features.get(feature)
        return None if table is None else self._num_buckets[table] * IDS_A_BUCKET

    def partition(self, input_dist: RwSparseFeaturesDist, features: list[str]) -> None:
        """Send each rank the hashed ids of its own buckets, instead of TorchRec's row numbers."""
        sizes, world_size = input_dist._feature_block_sizes_tensor, input_dist._world_size
        for position, feature in enumerate(features):
            if (num_ids := self.num_hashed_ids(feature)) is not None:
                sizes[position] = num_ids // world_size

    def remap(self, features: KeyedJaggedTensor, training: bool) -> KeyedJaggedTensor:
        """Return the features that arrived at this rank, with the ids of managed features mapped to
        rows.
        """
        offsets = features.offset_per_key()
        by_table: dict[str, list[slice]] = {}
        for position, feature in enumerate(features.keys()):
            if feature in self._features:
                span = slice(offsets[position], offsets[position + 1])
                by_table.setdefault(self._features[feature], []).append(span)
        if not by_table:
            return features
        values = features.values().clone()
        for table, spans in by_table.items():
            ids = torch.cat([values[span] for span in spans])
            rows = self._tables[table].remap(ids, training)
            for span, part in zip(spans, rows.split([span.stop - span.start for span in spans]), strict=True):
                values[span] = part
        return _with_values(features, values)

    def state(self) -> dict[str, ShardedTensor]:
        """Collective: return `<table>.<name>` -> a tensor over all ranks' buckets, in their
        order.
        """
        tensors = {}
        for table, sizes in self._sizes.items():
            local = self._tables.get(table)
            for name, size in sizes.items():
                shards = [] if local is None else [_shard(local.state[name], local.first_bucket * size, self._group)]
                whole = torch.Size([self._num_buckets[table] * size])
                tensors[f"{table}.{name}"] = ShardedTensor._init_from_local_shards(
                    shards, whole, process_group=self._group
                )
        return tensors


def _draws(ids: torch.Tensor, step: int) -> torch.Tensor:
    """Return [n] float64 in [0, 1): a hash of each id and the step. Products of int64 may overflow."""
    words = (ids ^ (step * 0x2545F4914F6CDD1D % 2**63)) * -7046029254386353131
    words = (words ^ (words >> 29)) * -4658895280553007687
    words = (words ^ (words >> 32)) * -7723592293110705685
    return ((words >> 11) & (2**53 - 1)).double() / 2**53


def state_sizes(managed: ManagedRows) -> dict[str, int]:
    """Return for each name of the state how many numbers a bucket has.

    Ranks without a bucket of the table return the same.
    """
    history = max(MIN_HISTORY, managed.rows_a_bucket)
    policy = POLICIES[managed.policy]()
    rows = ["sorted_ids", "rows", *(info.metadata_name for info in policy.metadata_info if info.is_mch_metadata)]
    if managed.max_idle_steps is not None:
        rows.append("last_seen")  # of each row
    sizes = dict.fromkeys(rows, managed.rows_a_bucket)
    return {**sizes, "history": history, "history_steps": history, "history_length": 1, "steps": 1}


def _shard(tensor: torch.Tensor, offset: int, group: dist.ProcessGroup) -> Shard:
    placement = f"rank:{dist.get_rank(group)}/{tensor.device}"
    return Shard(tensor, ShardMetadata([offset], [len(tensor)], placement=placement))


def _check_shards(managed: ManagedRows, sharding: ParameterSharding, world_size: int) -> None:
    """Raise ShardingError if a bucket would be split between two ranks."""
    if sharding.sharding_type == "row_wise" and managed.num_buckets % world_size:
        raise ShardingError(
            f"table {managed.table!r} has {managed.num_buckets} buckets, which cannot be divided "
            f"evenly by {world_size} ranks; set compression.buckets to a multiple of the ranks (a "
            "run keeps its number of buckets for any number of ranks), or allow only table_wise"
        )


def _local_tables(sharded: ShardedEmbeddingBagCollection) -> Iterator[tuple[str, LocalTable]]:
    """Iterate over the tables of FBGEMM's modules on this rank, by name."""
    for lookup in sharded._lookups:
        for kernel in getattr(lookup, "_emb_modules", []):
            fbgemm = kernel.emb_module
            if not hasattr(fbgemm, "split_optimizer_states"):
                continue  # a replicated table
            states = fbgemm.split_optimizer_states()
            tables = kernel.config.embedding_tables
            for index, (table, weight) in enumerate(zip(tables, fbgemm.split_embedding_weights(), strict=True)):
                own = [state for state in states[index] if state is not None] if index < len(states) else []
                offsets = table.local_metadata.shard_offsets if table.local_metadata else [0]
                yield table.name, LocalTable(weight, own, offsets[0])


def _with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    is_variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        values,
        features.weights_or_none(),
        lengths=features.lengths(),
        stride=None if is_variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if is_variable else None,
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key(),
    )


def _is_no_hash(record: logging.LogRecord) -> bool:
    """Filter out TorchRec's warning about ids that are not rows, because hashed ids become rows
    only on arrival.
    """
    return f"__{MANAGED} has range" not in record.getMessage()


def add_managed_tables(
    sharded: ShardedEmbeddingBagCollection, configs: list[EmbeddingBagConfig], env: ShardingEnv, seed: int
) -> ManagedTables:
    """Collective: add the maps of `sharded`'s managed tables to its state_dict, next to its
    weights.
    """
    managed = ManagedTables(sharded, configs, env, seed)
    if managed:
        logging.getLogger("torchrec.sparse.jagged_tensor_validator").addFilter(_is_no_hash)
        state = managed.state()

        def save(module: nn.Module, destination: dict[str, Any], prefix: str, _: Any) -> None:
            destination.update({f"{prefix}{MANAGED_STATE}.{name}": value for name, value in state.items()})

        def load(module: nn.Module, source: dict[str, Any], prefix: str, *_: Any) -> None:
            managed.state_has_changed()
            for name, value in state.items():
                loaded = source.pop(f"{prefix}{MANAGED_STATE}.{name}", None)
                if loaded is None:
                    continue
                for shard, new in zip(value.local_shards(), loaded.local_shards(), strict=True):
                    if shard.tensor.data_ptr() != new.tensor.data_ptr():
                        shard.tensor.copy_(new.tensor)

        sharded._register_state_dict_hook(save)
        sharded._register_load_state_dict_pre_hook(load, with_module=True)
    return managed
