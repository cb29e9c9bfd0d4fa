"""Estimate the training memory of each shard, and enumerate TorchRec's sharding options with it.

TorchRec estimates the optimizer's state from the optimizer's class, which it reads from an
attribute of the parameter. Only one way of setting the optimizer leaves this attribute. So TorchRec
counts no state with fused_params, fp16 state for fp16 tables, and one of LAMB's two moments. Here
the state depends only on the optimizer's name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption, StorageReservation, Topology
from torchrec.distributed.types import ModuleSharder

from pipeline import devices
from pipeline.config.optimizers import find_optimizer
from pipeline.config.registry import from_extra
from pipeline.planner.cost_model import KEY_VALUE, CostModel, cache_load_factor

STATE_BYTES = 4  # FBGEMM and torch keep optimizer state in fp32 for any type of table
# A data_parallel table's gradient is dense and as large as the table; DDP reduces a copy of it.
DATA_PARALLEL_GRADIENT_COPIES = 2
# A dense parameter, gradient, DDP's bucket, two moments of Adam. 6 is TorchRec's factor.
DENSE_PARAMETER_COPIES = 6


def shard_state_bytes(optimizer_name: str, num_rows: int, num_columns: int) -> int:
    """Return the bytes of a shard's optimizer state. Every column shard has its own row-wise state."""
    entry = find_optimizer(optimizer_name)
    return STATE_BYTES * num_rows * (entry.state_per_element * num_columns + entry.state_per_row)


class CostedEnumerator(EmbeddingEnumerator):
    """Enumerate TorchRec's options with our costs and our estimate of training memory."""

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        optimizer_name: str,
        costs: CostModel,
    ) -> None:
        storage = EmbeddingStorageEstimator(topology=topology, constraints=constraints)
        super().__init__(topology, batch_size, constraints, [costs, storage])
        self._optimizer_name, self._in_tiers, self._costs = optimizer_name, costs.in_tiers, costs
        self._estimated: list[list[Shard]] = []

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Enumerate the options, without TorchRec's copies of all shards, which only a second call would need."""
        options = super().enumerate(module, sharders)
        self._last_stored_module = None  # the copies have no shards
        for option, shards in zip(options, self._estimated, strict=True):
            option.shards = shards
        # By name within a table, because the order decides between two equal options.
        tables = {name: index for index, name in enumerate(dict.fromkeys(option.fqn for option in options))}
        return sorted(options, key=lambda each: (tables[each.fqn], each.sharding_type, each.compute_kernel))

    def estimate_again(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Estimate costs and memory of additional options of the enumerated module."""
        self.populate_estimates(options)
        for option, shards in zip(options, self._estimated, strict=True):
            option.shards = shards
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        with _without_optimizer(sharding_options):
            super().populate_estimates(sharding_options)
        for option in sharding_options:
            self._add_training_memory(option)
        self._estimated = [option.shards for option in sharding_options]
        for option in sharding_options:
            option.shards = []

    def _add_training_memory(self, option: ShardingOption) -> None:
        for shard, of_weights in zip(option.shards, self._costs.weights_bytes(option).tolist(), strict=True):
            is_frozen = option.name in self._costs.frozen
            extra = 0 if is_frozen else shard_state_bytes(self._optimizer_name, *shard.size)
            if option.name in self._in_tiers:
                extra -= self._bytes_on_ssd(option, shard, extra)
            if option.compute_kernel == "dense" and not is_frozen:
                num_rows, num_columns = shard.size
                extra += DATA_PARALLEL_GRADIENT_COPIES * num_rows * num_columns * option.tensor.element_size()
            if option.compute_kernel == KEY_VALUE:
                extra += self._key_value_cache_bytes(option, shard)
            # State stays in host memory with its table, cached or not; an SSD table's is in HBM.
            has_hbm = devices.named(self._compute_device).has_own_memory
            in_hbm = has_hbm and option.compute_kernel in ("dense", "fused", KEY_VALUE)
            assert shard.storage is not None  # just estimated
            weights = math.ceil(of_weights)
            shard.storage.hbm += (weights if has_hbm else 0) + (extra if in_hbm else 0)
            shard.storage.ddr += (0 if has_hbm else weights) + (0 if in_hbm else extra)

    def _bytes_on_ssd(self, option: ShardingOption, shard: Shard, state_bytes: int) -> int:
        """Return the bytes of weights and optimizer state that are only on the SSD, because no slot holds them."""
        num_rows, num_columns = shard.size
        whole = num_rows * num_columns * option.tensor.element_size() + state_bytes
        table = self._in_tiers[option.name]
        memory_bytes = from_extra("tier_memory_bytes", f"tables.{table.config_name}.tiers")
        return whole - int(memory_bytes(table, num_rows, whole / max(num_rows, 1)))

    @staticmethod
    def _key_value_cache_bytes(option: ShardingOption, shard: Shard) -> int:
        """Return the bytes of a fifth of the rows, FBGEMM's default cache. TorchRec does not count this cache."""
        num_rows, num_columns = shard.size
        return math.ceil(cache_load_factor(option) * num_rows) * num_columns * option.tensor.element_size()


@contextmanager
def _without_optimizer(options: list[ShardingOption]) -> Iterator[None]:
    """Hide the attribute from which TorchRec counts optimizer state, so that state is not counted twice."""
    hidden = {}
    for option in options:
        if (classes := option.tensor.__dict__.pop("_optimizer_classes", None)) is not None:
            hidden[id(option.tensor)] = (option.tensor, classes)
    try:
        yield
    finally:
        for tensor, classes in hidden.values():
            tensor._optimizer_classes = classes


class KeepFree(StorageReservation):
    """Reserve a fraction of each rank's memory and the bytes that the dense part needs.

    TorchRec reserves no host memory, so a plan for CPU ranks would use all of it.
    """

    def __init__(self, fraction: float, dense_bytes: int) -> None:
        self._percentage = fraction  # TorchRec reads it for its texts and logs
        self._dense_bytes = dense_bytes
        self._reserved: Topology | None = None

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        reserved = copy.deepcopy(topology)
        for device in reserved.devices:
            device.storage.hbm, device.storage.ddr = usable_bytes(
                topology.compute_device, device.storage.hbm, device.storage.ddr, self._percentage, self._dense_bytes
            )
        self._reserved = reserved
        return reserved

    @property
    def last_reserved_topology(self) -> Topology | None:
        return self._reserved


def usable_bytes(
    compute_device: str, hbm_cap_bytes: int, ddr_cap_bytes: int, fraction: float, dense_bytes: int
) -> tuple[int, int]:
    """Return a rank's bytes of HBM and of host memory for tables. They are negative if the dense part is too large."""
    hbm, ddr = int((1 - fraction) * hbm_cap_bytes), int((1 - fraction) * ddr_cap_bytes)
    has_hbm = devices.named(compute_device).has_own_memory
    return (hbm - dense_bytes, ddr) if has_hbm else (0, ddr - dense_bytes)


def dense_part_bytes(model: nn.Module, table_parameters: list[nn.Parameter]) -> int:
    """Return the bytes that all parameters except tables need in training. Parameters may be on meta."""
    tables = {id(parameter) for parameter in table_parameters}
    dense = (parameter for parameter in model.parameters() if id(parameter) not in tables)
    return DENSE_PARAMETER_COPIES * sum(parameter.numel() * parameter.element_size() for parameter in dense)
