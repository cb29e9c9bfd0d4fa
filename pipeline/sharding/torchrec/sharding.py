"""Shard a model by a plan into a DistributedModelParallel that trains."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import CommOp, ModuleSharder, QuantizedCommCodecs, ShardingEnv, ShardingPlan

from pipeline import devices
from pipeline.config.registry import from_extra
from pipeline.config.training import CommsConfig, ParallelConfig
from pipeline.devices.base import Device
from pipeline.devices.cpu.host_exchange import HostExchange
from pipeline.embeddings.limits import describe_comms, precisions
from pipeline.embeddings.table import Table
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.host_collectives import GradientAverage
from pipeline.sharding.table_storage import TierSettings
from pipeline.sharding.torchrec.sharder import ShardedTables, TableSharder
from pipeline.sharding.torchrec.sharding_checks import (
    check_dense_layers_can_be_initialized,
    check_plan_covers_tables,
    check_plan_is_exact,
)
from pipeline.sharding.torchrec.table_init import disable_huge_pages, initialize_tables

# Pooled rows are sent by all-to-all (table_wise, column_wise and similar, between hosts) or by
# reduce-scatter (row_wise and similar, within a host). Their gradients return by all-to-all and
# all-gather.
COLLECTIVES = {
    "all_to_all": CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    "reduce_scatter": CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
}
HOSTS_OF_DOMAIN = "TORCHREC_RESOLVED_POD_SIZE"
logger = get_logger(__name__)


def join_hosts(hosts_per_nvlink_domain: int) -> None:
    """Let table_row_wise and grid_shard treat this many hosts as one. Call it before shard_model.

    TorchRec reads it from the environment
    (torchrec.distributed.comm.get_topology_group_world_size).
    """
    os.environ[HOSTS_OF_DOMAIN] = str(hosts_per_nvlink_domain)


def make_codecs(comms: CommsConfig) -> dict[str, QuantizedCommCodecs] | None:
    """Return TorchRec's registry with two codecs for each collective, or None if nothing is
    quantized.

    Ids, lengths and the all-reduce of replicated parameters are never quantized.
    """
    registry: dict[str, QuantizedCommCodecs] = {}
    for name, (forward, backward) in precisions(comms).items():
        config = QCommsConfig(forward_precision=CommType(forward), backward_precision=CommType(backward))
        # device="cuda": for "cpu" the registry replaces bf16, which gloo supports, by fp16.
        registry |= get_qcomm_codecs_registry(config, [COLLECTIVES[name]], torch.device("cuda")) or {}
    return registry or None


def make_sharders(
    comms: CommsConfig, seed: int = 0, exchange: HostExchange | None = None, tiers: TierSettings | None = None
) -> list[ModuleSharder[nn.Module]]:
    """Return the sharders for planning and for shard_model."""
    return [TableSharder(make_codecs(comms), seed, exchange, tiers)]


def replicates(config: ParallelConfig, context: DistributedContext) -> bool:
    """Return whether each host trains a replica of the tables. Raises UserError if these hosts cannot."""
    if not config.has_replicas:
        return False
    return bool(from_extra("replicates", f"parallel.embedding_sync={config.embedding_sync}")(config, context))


def shard_model(
    model: nn.Module,
    plan: ShardingPlan,
    comms: CommsConfig,
    context: DistributedContext,
    *,
    seed: int = 0,
    tables: list[Table] | None = None,
    replicated: bool = False,
    initialize: bool = True,
    tier_folder: str | None = None,
) -> DistributedModelParallel:
    """Collective: shard tables by `plan`, replicate dense layers, initialize modules on meta.

    Initial weights depend on `seed` (equal on all ranks), not on plan or world size. If `tables`
    are given, column shards under a row-wise optimizer are refused unless the table's config names
    them. replicated: the plan is for one host, and every host has a replica
    (parallel.embedding_sync). tier_folder: folder of the rows of tables with tiers; None: all rows
    are in memory. initialize=False: tables are allocated but not initialized. Raises ShardingError.
    """
    check_plan_covers_tables(model, plan)
    check_dense_layers_can_be_initialized(model)
    if tables is not None:
        check_plan_is_exact(model, plan, tables)
    world = dist.GroupMember.WORLD
    assert world is not None, "init_distributed comes first"
    device = devices.current()
    exchange = device.exchange(context, comms.timeout_s) if comms.shared_memory else None
    environment: ShardingEnv = ShardingEnv.from_process_group(world)
    if replicated:
        environment = from_extra("host_environment", "parallel.embedding_sync")(context)
        plan = from_extra("plan_for_host", "parallel.embedding_sync")(plan, context)
    with device.fork_rng():
        sharded = DistributedModelParallel(
            model,
            env=environment,
            device=context.device,
            plan=plan,
            sharders=make_sharders(comms, seed, exchange, _tier_settings(tables or [], tier_folder)),
            init_data_parallel=False,
            init_parameters=False,
            # Steps run the same graph, so DDP need not search for unused parameters.
            data_parallel_wrapper=_AverageOverRanks(exchange),
        )
        # Only now, because how many random numbers the tables used depends on the plan.
        torch.manual_seed(seed)
        sharded.init_parameters = True
        sharded.init_data_parallel()
    disable_huge_pages(sharded)
    if initialize:
        initialize_tables(sharded, seed)
    _log(comms, exchange, device)
    return sharded


def _tier_settings(tables: list[Table], folder: str | None) -> TierSettings | None:
    in_tiers = {table.name: table.tiers for table in tables if table.tiers is not None}
    if not in_tiers or folder is None:
        return None
    heads = {name: tiers.head or 0.0 for name, tiers in in_tiers.items()}
    return TierSettings({name: tiers.slots for name, tiers in in_tiers.items()}, folder, heads=heads)


class _AverageOverRanks(DefaultDataParallelWrapper):
    """Use DDP, except for a single rank, which does not need it, and for ranks with a HostExchange."""

    def __init__(self, exchange: HostExchange | None) -> None:
        super().__init__(static_graph=True)
        self._exchange = exchange

    def _ddp_wrap(
        self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device, ddp_ignore_param_names: set[str]
    ) -> None:
        if dist.get_world_size() == 1:  # the environment's world size may be that of one host
            dmp._dmp_wrapped_module.to(device)
        elif self._exchange is not None:
            dmp._dmp_wrapped_module.to(device)
            tables = [module for module in dmp.modules() if isinstance(module, ShardedTables)]
            layers = [weight for name, weight in dmp.named_parameters() if name not in ddp_ignore_param_names]
            replicated = [weight for collection in tables for weight in collection.replicated_weights()]
            if trained := [weight for weight in (*layers, *replicated) if weight.requires_grad]:
                GradientAverage(trained, self._exchange)
        else:
            super()._ddp_wrap(dmp, env, device, ddp_ignore_param_names)


def _log(comms: CommsConfig, exchange: HostExchange | None, device: Device) -> None:
    if not device.has_torchrec_layers and dist.get_world_size() == 1:
        return  # nothing is exchanged
    how = "; ranks of this host exchange through shared memory" if exchange else ""
    if device.has_torchrec_layers:
        how = "; sharding.fast_cpu=false: kernels and exchanges are those of TorchRec, FBGEMM and DDP"
    logger.info("comms: %s%s", ", ".join(f"{name} {what}" for name, what in describe_comms(comms).items()), how)
