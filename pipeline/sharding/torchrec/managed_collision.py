"""Turn hashed ids that arrive at a rank into rows of its own: those in use have one each, by TorchRec's MCH modules.

Every bucket has a map and a history of the ids since it was last looked through. Then the policy says which ids keep their
row, which lose it, and who gets it: that row is drawn anew, and its optimizer state is zero. Ids without a row share the last
one of their bucket. All of it, the history too, is in the checkpoint, a shard of buckets to a rank.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.embeddings.collection import Managed
from pipeline.embeddings.compression.managed_collision import IDS_A_BUCKET, MANAGED
from pipeline.embeddings.table import ManagedRows
from pipeline.runtime.errors import ShardingError

POLICIES: dict[str, Callable[[], Any]] = {
    "lfu": LFU_EvictionPolicy,
    "lru": LRU_EvictionPolicy,
    "distance_lfu": DistanceLFU_EvictionPolicy,
}
STATE = "managed_rows"  # in the keys of a checkpoint
LEAST_HISTORY = 1024


class ManagedTable:
    """The buckets of one table that lie on this rank: `first_bucket` and those after it."""

    def __init__(
        self,
        managed: ManagedRows,
        config: EmbeddingBagConfig,
        first_bucket: int,
        num_buckets: int,
        weight: torch.Tensor,
        states: list[torch.Tensor],
        seed: int,
    ) -> None:
        self.managed, self._config, self._seed = managed, config, seed
        self.first_bucket, self.num_buckets = first_bucket, num_buckets
        self._weight, self._states = weight, states
        sizes = state_sizes(managed)
        self._history_size = sizes["history"]
        self.state = {
            name: torch.zeros(num_buckets * size, dtype=torch.int64, device=weight.device)
            for name, size in sizes.items()
        }
        self._maps = [self._make_map(index) for index in range(num_buckets)]

    def _make_map(self, index: int) -> MCHManagedCollisionModule:
        one = MCHManagedCollisionModule(
            zch_size=self.managed.rows_a_bucket,
            device=self._weight.device,
            eviction_policy=POLICIES[self.managed.policy](),
            eviction_interval=self.managed.eviction_interval,
        )  # its rows count from the bucket's first
        one._input_history_buffer_size = self._history_size
        # The map's tensors are views of the state, so that a checkpoint loads into them.
        own = {"sorted_ids": one._mch_sorted_raw_ids, "rows": one._mch_remapped_ids_mapping, **one._mch_metadata}
        for name, tensor in own.items():
            self._of_bucket(name, index).copy_(tensor)
        one._mch_sorted_raw_ids = self._of_bucket("sorted_ids", index)
        one._mch_remapped_ids_mapping = self._of_bucket("rows", index)
        one._mch_metadata = {name: self._of_bucket(name, index) for name in one._mch_metadata}
        return one

    def _of_bucket(self, name: str, index: int) -> torch.Tensor:
        whole = self.state[name]
        size = len(whole) // self.num_buckets
        return whole[index * size : (index + 1) * size]

    def remap(self, ids: torch.Tensor, training: bool) -> torch.Tensor:
        """[n] hashed ids, from this rank's first bucket on -> [n] rows of this rank. In training ids are counted first."""
        buckets, within = ids // IDS_A_BUCKET, ids % IDS_A_BUCKET
        rows = torch.empty_like(ids)
        for index, one in enumerate(self._maps):
            mine = buckets == index
            values = within[mine]
            if training:
                self._count(index, one, values)
            rows[mine] = index * self.managed.rows_a_bucket + self._look_up(one, values)
        return rows

    @staticmethod
    def _look_up(one: MCHManagedCollisionModule, values: torch.Tensor) -> torch.Tensor:
        found, places = one._match_indices(one._mch_sorted_raw_ids, values)
        rows = torch.full_like(values, one._zch_size - 1)
        rows[found] = one._mch_remapped_ids_mapping[places]
        return rows

    def _count(self, index: int, one: MCHManagedCollisionModule, values: torch.Tensor) -> None:
        steps, length = self._of_bucket("steps", index), self._of_bucket("history_length", index)
        history, history_steps = self._of_bucket("history", index), self._of_bucket("history_steps", index)
        steps += 1
        while len(values):
            begin = int(length)
            taken = values[: self._history_size - begin]
            history[begin : begin + len(taken)] = taken
            history_steps[begin : begin + len(taken)] = steps
            length += len(taken)
            values = values[len(taken) :]
            if len(values):  # there is no room for the others
                self._look_through(index, one)
        if int(steps) % self.managed.eviction_interval == 0:
            self._look_through(index, one)

    @torch.no_grad()
    def _look_through(self, index: int, one: MCHManagedCollisionModule) -> None:
        """The policy decides over the ids of the history; rows that change hands are drawn anew."""
        length = self._of_bucket("history_length", index)
        one._current_iter = int(self._of_bucket("steps", index))
        one._history_accumulator = self._of_bucket("history", index)
        one._current_history_buffer_offset = int(length)
        one._history_metadata = {
            info.metadata_name: self._of_bucket("history_steps", index)
            for info in one._eviction_policy.metadata_info
            if info.is_history_metadata
        }
        if one._current_history_buffer_offset:
            one._coalesce_history()
            rows = one.evict()
            assert rows is not None
            self._renew(index * self.managed.rows_a_bucket + rows, self.first_bucket + index, one._current_iter)
        length.zero_()

    def _renew(self, rows: torch.Tensor, bucket: int, step: int) -> None:
        text = f"{self._seed}/{self.managed.table}/{bucket}/{step}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        draw = self._config.init_fn
        assert draw is not None
        with torch.random.fork_rng(devices=[self._weight.device] if self._weight.is_cuda else []):
            torch.manual_seed(seed)
            values = torch.empty(len(rows), self._weight.shape[1], device=self._weight.device)
            draw(values)
        self._weight[rows] = values.to(self._weight.dtype)
        for state in self._states:
            state[rows] = 0


class ManagedTables:
    """Those of a sharded collection, with their part of its state."""

    def __init__(self, sharded: Any, configs: list[EmbeddingBagConfig], env: Any, seed: int) -> None:
        self._group, self._num_buckets = env.process_group, {}
        self._tables: dict[str, ManagedTable] = {}
        self._features: dict[str, str] = {}
        self._sizes: dict[str, dict[str, int]] = {}
        local = {table: (weight, states, first) for table, weight, states, first in _local_tables(sharded)}
        for config in configs:
            if not isinstance(config.init_fn, Managed):
                continue
            managed = config.init_fn.rows
            _check_shards(managed, sharded.module_sharding_plan[config.name], env.world_size)
            self._features |= dict.fromkeys(config.feature_names, config.name)
            self._num_buckets[config.name] = managed.num_buckets
            if config.name in local:
                weight, states, first_row = local[config.name]
                rows = managed.rows_a_bucket
                self._tables[config.name] = ManagedTable(
                    managed, config, first_row // rows, len(weight) // rows, weight, states, seed
                )
            self._sizes[config.name] = state_sizes(managed)

    def __bool__(self) -> bool:
        return bool(self._num_buckets)

    def virtual_rows(self, feature: str) -> int | None:
        """How many hashed ids a feature has; None: its table is not managed."""
        table = self._features.get(feature)
        return None if table is None else self._num_buckets[table] * IDS_A_BUCKET

    def remap(self, features: KeyedJaggedTensor, training: bool) -> KeyedJaggedTensor:
        """Of what has arrived at this rank: the ids of managed features become rows."""
        keys, begins = features.keys(), features.offset_per_key()
        by_table: dict[str, list[slice]] = {}
        for position, key in enumerate(keys):
            if key in self._features:
                place = slice(begins[position], begins[position + 1])
                by_table.setdefault(self._features[key], []).append(place)
        if not by_table:
            return features
        values = features.values().clone()
        for table, places in by_table.items():
            ids = torch.cat([values[place] for place in places])
            rows = self._tables[table].remap(ids, training)
            for place, part in zip(places, rows.split([place.stop - place.start for place in places]), strict=True):
                values[place] = part
        return _with_values(features, values)

    def state(self) -> dict[str, ShardedTensor]:
        """Collective. `<table>.<name>` -> over all ranks' buckets, in their order."""
        found = {}
        for table, sizes in self._sizes.items():
            mine = self._tables.get(table)
            for name, size in sizes.items():
                shards = [] if mine is None else [_shard(mine.state[name], mine.first_bucket * size, self._group)]
                whole = torch.Size([self._num_buckets[table] * size])
                found[f"{table}.{name}"] = ShardedTensor._init_from_local_shards(
                    shards, whole, process_group=self._group
                )
        return found


def state_sizes(managed: ManagedRows) -> dict[str, int]:
    """Numbers a bucket, by name; the same on ranks without a bucket of the table."""
    history = max(LEAST_HISTORY, managed.rows_a_bucket)
    policy = POLICIES[managed.policy]()
    rows = ["sorted_ids", "rows", *(info.metadata_name for info in policy.metadata_info if info.is_mch_metadata)]
    sizes = dict.fromkeys(rows, managed.rows_a_bucket)
    return {**sizes, "history": history, "history_steps": history, "history_length": 1, "steps": 1}


def _shard(tensor: torch.Tensor, offset: int, group: Any) -> Shard:
    placement = f"rank:{dist.get_rank(group)}/{tensor.device}"
    return Shard(tensor, ShardMetadata([offset], [len(tensor)], placement=placement))


def _check_shards(managed: ManagedRows, sharding: Any, world_size: int) -> None:
    """Raises ShardingError where a bucket would lie on two ranks."""
    if sharding.sharding_type == "row_wise" and managed.num_buckets % world_size:
        raise ShardingError(
            f"table {managed.table!r} has {managed.num_buckets} buckets, which {world_size} ranks cannot share out evenly; set "
            "compression.buckets to a multiple of the ranks (a run keeps its buckets, whatever its ranks), or allow "
            "table_wise alone"
        )


def _local_tables(sharded: Any) -> Iterable[tuple[str, torch.Tensor, list[torch.Tensor], int]]:
    """(table, its weights here, its optimizer's states here, its first row here) of FBGEMM's modules on this rank."""
    for lookup in sharded._lookups:
        for kernel in getattr(lookup, "_emb_modules", []):
            inner = kernel.emb_module
            if not hasattr(inner, "split_optimizer_states"):
                continue  # a replicated table
            states = inner.split_optimizer_states()
            tables = kernel.config.embedding_tables
            for index, (table, weight) in enumerate(zip(tables, inner.split_embedding_weights(), strict=True)):
                own = [state for state in states[index] if state is not None] if index < len(states) else []
                offsets = table.local_metadata.shard_offsets if table.local_metadata else [0]
                yield table.name, weight, own, offsets[0]


def _with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    uneven = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        values,
        features.weights_or_none(),
        lengths=features.lengths(),
        stride=None if uneven else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if uneven else None,
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key(),
    )


def deal_hashed_ids(input_dist: Any, features: list[str], managed: ManagedTables) -> None:
    """Let ranks get the hashed ids of their own buckets, where TorchRec deals out row numbers."""
    sizes, world_size = input_dist._feature_block_sizes_tensor, input_dist._world_size
    for position, feature in enumerate(features):
        if (num_ids := managed.virtual_rows(feature)) is not None:
            sizes[position] = num_ids // world_size


def _is_no_hash(record: logging.LogRecord) -> bool:
    """TorchRec warns of ids that are no rows; hashed ones are none until they arrive."""
    return f"__{MANAGED} has range" not in record.getMessage()


def add_managed_tables(sharded: Any, configs: list[EmbeddingBagConfig], env: Any, seed: int) -> ManagedTables:
    """Collective. The maps of `sharded`'s managed tables, in its state_dict beside its weights."""
    managed = ManagedTables(sharded, configs, env, seed)
    if managed:
        logging.getLogger("torchrec.sparse.jagged_tensor_validator").addFilter(_is_no_hash)
        state = managed.state()

        def save(module: nn.Module, destination: dict[str, Any], prefix: str, _: Any) -> None:
            destination.update({f"{prefix}{STATE}.{name}": value for name, value in state.items()})

        def load(module: nn.Module, source: dict[str, Any], prefix: str, *_: Any) -> None:
            for name, ours in state.items():
                theirs = source.pop(f"{prefix}{STATE}.{name}", None)
                if theirs is None:
                    continue
                for one, other in zip(ours.local_shards(), theirs.local_shards(), strict=True):
                    if one.tensor.data_ptr() != other.tensor.data_ptr():
                        one.tensor.copy_(other.tensor)

        sharded._register_state_dict_hook(save)
        sharded._register_load_state_dict_pre_hook(load, with_module=True)
    return managed
