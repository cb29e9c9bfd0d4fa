"""Average tables over hosts every few steps, while each host trains a replica of the tables.

Tables are sharded over the ranks of one host, and every host has a replica of them, so no lookup
leaves a host. Dense layers and data_parallel tables are all-reduced over all ranks at every step.
TorchRec's 2D environment separates the collectives. TorchRec's DMPCollection is not used, because
it does not run on CPU, its state has a form that checkpoints here do not support, and it averages
only the states of Adagrad (docs/adr/0018).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EnumerableShardingSpec, ShardingEnv2D, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizer

from pipeline import devices
from pipeline.checkpoint.tables import flatten
from pipeline.config.tables import entry_name
from pipeline.config.training import ParallelConfig
from pipeline.extras.embedding_sync import state
from pipeline.runtime.errors import ShardingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext

NUMBERS_AT_ONCE = 1 << 22  # of one all-reduce: 16 MiB
WHOLE_KERNELS = ("fused", "dense")
logger = get_logger(__name__)


def replicates(config: ParallelConfig, context: DistributedContext) -> bool:
    """Return whether each host trains a replica of the tables.

    Raises:
        ShardingError: the hosts run different numbers of ranks.
    """
    if context.world_size % context.local_world_size:
        raise ShardingError(
            f"parallel.embedding_sync={config.embedding_sync} keeps a replica of the tables on "
            f"every host, but {context.world_size} ranks do not fill hosts of "
            f"{context.local_world_size}; run equally many ranks on each"
        )
    if context.world_size == context.local_world_size:
        logger.warning(
            "parallel.embedding_sync=%s, but there is one host: nothing is averaged, and tables "
            "are sharded over its ranks",
            config.embedding_sync,
        )
        return False
    return True


def host_environment(context: DistributedContext) -> ShardingEnv2D:
    """Collective: shard over the ranks of this host, replicate over the ranks of the same local rank on all hosts."""
    world = dist.GroupMember.WORLD
    assert world is not None, "init_distributed comes first"
    size = context.local_world_size
    hosts = [list(range(first, first + size)) for first in range(0, context.world_size, size)]
    mesh = DeviceMesh(devices.current().device_type, hosts, mesh_dim_names=("replicate", "shard"))
    environment = ShardingEnv2D(
        sharding_pg=mesh.get_group("shard"),
        replica_pg=mesh.get_group("replicate"),
        global_pg=world,
        device_mesh=mesh,
        node_group_size=size,
        use_inter_host_allreduce=True,
    )
    # ShardedTensor, as from plain sharding, which checkpoints support
    environment.output_dtensor = False
    return environment


def plan_for_host(plan: ShardingPlan, context: DistributedContext) -> ShardingPlan:
    """Return the plan of one host's ranks, numbered from 0, for this rank's host.

    Raises:
        ShardingError: a table is in a cache or a key-value store, of which an average would see only a part.
    """
    local = copy.deepcopy(plan)
    first = context.rank - context.rank % context.local_world_size
    for tables in local.plan.values():
        for name, sharding in tables.items():
            if sharding.compute_kernel not in WHOLE_KERNELS:
                raise ShardingError(
                    f"table {entry_name(name)!r} is planned with kernel "
                    f"{sharding.compute_kernel}, but only complete replicas can be averaged; with "
                    "parallel.embedding_sync set "
                    f"tables.{entry_name(name)}.sharding.compute_kernels=[fused]"
                )
            if sharding.sharding_type == "data_parallel":
                continue
            sharding.ranks = [first + rank for rank in sharding.ranks]
            assert isinstance(sharding.sharding_spec, EnumerableShardingSpec)
            for shard in sharding.sharding_spec.shards:
                rank = shard.placement.rank()
                shard.placement = _remote_device(f"rank:{first + rank}/{devices.current().at(rank)}")
    return local


class TableReplicas:
    """Hold this host's replica of a model's sharded tables and their optimizer's state.

    There are `num_hosts` replicas, and this rank's replica has the number `host`. `equal` is true
    if all replicas are equal, which is possible after `after_step` or `average`.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: KeyedOptimizer | None,
        config: ParallelConfig,
        context: DistributedContext,
    ) -> None:
        environment = model._env
        assert isinstance(environment, ShardingEnv2D), "shard_model(replicated=True) comes first"
        self.num_hosts = context.world_size // context.local_world_size
        self.host = context.rank // context.local_world_size
        self.embedding_sync = config.embedding_sync
        self.equal = True
        self.num_syncs, self.payload_bytes, self.seconds = 0, 0, 0.0
        self._group, self._every = environment.replica_pg, config.sync_every_steps
        states = [model.state_dict(), optimizer.state_dict() if optimizer else {}]
        self._tensors = [tensor for each in states for tensor in _local_parts(flatten(each).values())]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that this rank contributes to one average."""
        return 4 * sum(tensor.numel() for tensor in self._tensors)

    def after_step(self, step: int) -> None:
        """Average the replicas if it is time. The call is then collective."""
        self.equal = False
        if self._every and step % self._every == 0:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Collective: set weights and optimizer states of all hosts to their mean. All hosts get equal bits."""
        device = devices.current()
        device.synchronize()  # the device may still run the step, and later the averages
        began = time.perf_counter()
        average_in_place(self._tensors, self._group, self.num_hosts)
        device.synchronize()
        self.equal = True
        self.num_syncs += 1
        self.payload_bytes += self.num_bytes
        self.seconds += time.perf_counter() - began

    def report(self) -> dict[str, float]:
        """Return values since the last report: number of averages, bytes that this rank sent for
        them (in a ring), seconds.
        """
        wire = 2 * (self.num_hosts - 1) / self.num_hosts * self.payload_bytes
        values = {"embedding_syncs": self.num_syncs, "embedding_sync_bytes": wire, "embedding_sync_s": self.seconds}
        self.num_syncs, self.payload_bytes, self.seconds = 0, 0, 0.0
        return values

    @torch.no_grad()
    def averaged(self, tensor: ShardedTensor) -> ShardedTensor:
        """Collective: return a copy of the tables with the mean over the hosts.

        It needs as much memory as this rank's part.
        """
        shards = [Shard(shard.tensor.detach().clone(), shard.metadata) for shard in tensor.local_shards()]
        average_in_place([shard.tensor for shard in shards], self._group, self.num_hosts)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, sharded_tensor_metadata=tensor.metadata(), process_group=tensor._process_group
        )

    def describe(self) -> dict[str, Any]:
        return state.describe_replicas(self)

    def state_to_save(self, tensors: dict[str, Any], *, average: bool = True) -> dict[str, Any]:
        return state.state_to_save(tensors, self, average=average)

    def state_to_load(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return state.state_to_load(tensors, self)

    def holds_own_tables(self, manifest: Mapping[str, Any]) -> bool:
        return state.holds_own_tables(manifest, self)


def _local_parts(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, ShardedTensor):
            yield from (shard.tensor.detach() for shard in value.local_shards() if shard.tensor.numel())


def average_in_place(tensors: list[torch.Tensor], group: dist.ProcessGroup | None, count: int) -> None:
    """Collective over `group` of `count` ranks: set tensors to their mean. All ranks must pass
    tensors of equal sizes.

    The sums are fp32.
    """
    pieces = [piece for tensor in tensors for piece in tensor.view(-1).split(NUMBERS_AT_ONCE)]
    while pieces:
        packed: list[torch.Tensor] = []
        size = 0
        while pieces and (not packed or size + pieces[0].numel() <= NUMBERS_AT_ONCE):
            packed.append(pieces.pop(0))
            size += packed[-1].numel()
        flat = torch.cat([piece.float() for piece in packed])
        dist.all_reduce(flat, group=group, async_op=True).wait()
        flat /= count
        for piece, mean in zip(packed, flat.split([piece.numel() for piece in packed]), strict=True):
            piece.copy_(mean)
