"""Refuse what TorchRec and FBGEMM would do wrong without an error, before memory is allocated."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline import devices
from pipeline.config.optimizers import Optimizer, all_optimizers
from pipeline.config.tables import entry_name
from pipeline.embeddings.collection import Managed
from pipeline.embeddings.limits import COLUMN_SHARDING_TYPES, KERNELS_OF_MANAGED_ROWS, SHARD_WIDTH
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ShardingError, did_you_mean
from pipeline.runtime.logs import get_logger

logger = get_logger(__name__)


def optimizer_class_of(weight: torch.Tensor) -> type | None:
    """Return the class that apply_sparse_optimizer attached to an unsharded table."""
    classes = getattr(weight, "_optimizer_classes", [])
    return classes[0] if classes else None


def _entry(fused: type) -> type[Optimizer]:
    return next(entry for entry in all_optimizers().values() if entry.fused == fused.__name__)


def check_sharding(module: EmbeddingBagCollection, params: dict[str, ParameterSharding]) -> None:
    """Raise ShardingError for a table whose plan and optimizer do not work on this device."""
    for config in module.embedding_bag_configs():
        weight = module.embedding_bags[config.name].weight
        sharding = params[config.name]
        if not weight.is_meta:
            raise ShardingError(
                f"table {entry_name(config.name)!r} has weights on {weight.device}, which sharding would drop; build it with "
                "device=torch.device('meta') and load weights after sharding"
            )
        if sharding.sharding_type == "data_parallel":
            _check_replicated(config.name, weight, config.data_type)
            continue
        _check_widths(config.name, sharding)
        if sharding.compute_kernel == "dense":
            raise ShardingError(
                f"table {entry_name(config.name)!r} is planned as {sharding.sharding_type} with "
                "the dense kernel, and checkpoints would mix up its optimizer state between "
                "ranks; use compute_kernel fused, or data_parallel"
            )
        _check_managed(config, sharding)
        if not devices.current().fbgemm_is_complete:
            _check_fused_on_cpu(config.name, weight, config.data_type)
        _warn_of_row_state(config.name, weight, sharding.sharding_type)


def _check_managed(config: EmbeddingBagConfig, sharding: ParameterSharding) -> None:
    if isinstance(config.init_fn, Managed) and sharding.compute_kernel not in KERNELS_OF_MANAGED_ROWS:
        raise ShardingError(
            f"table {entry_name(config.name)!r} is planned with kernel {sharding.compute_kernel}, "
            "and managed_collision writes the rows of evicted ids without the cache; plan again, "
            "or set "
            f"tables.{entry_name(config.name)}.sharding.compute_kernels=[fused_uvm]"
        )


def _check_widths(name: str, sharding: ParameterSharding) -> None:
    spec = sharding.sharding_spec
    assert isinstance(spec, EnumerableShardingSpec)
    for shard in spec.shards:
        if (width := shard.shard_sizes[1]) % SHARD_WIDTH:
            raise ShardingError(
                f"table {entry_name(name)!r} is planned as {sharding.sharding_type} with {width} "
                f"columns per shard, but FBGEMM needs a multiple of {SHARD_WIDTH}; change its "
                "embedding_dim or sharding.min_partition, or make it data_parallel"
            )


def _check_replicated(name: str, weight: torch.Tensor, data_type: DataType) -> None:
    if data_type != DataType.FP32 and optimizer_class_of(weight) is not None:
        raise ShardingError(
            f"table {entry_name(name)!r} is data_parallel in {data_type.value}, and its optimizer "
            "state would have the same type; use data_type fp32 (replicated tables are small), or "
            "remove data_parallel from its sharding.sharding_types"
        )


def _check_fused_on_cpu(name: str, weight: torch.Tensor, data_type: DataType) -> None:
    optimizer = optimizer_class_of(weight)
    if optimizer is None:
        return
    has_kernels = devices.current().has_kernels and find_spec("numba") is not None
    on_cpu = _entry(optimizer)
    if not on_cpu.fused_on_cpu and (on_cpu.cpu_kernel is None or not has_kernels):
        known = "SGD, Adagrad and row-wise Adagrad"
        hint = "train on a GPU" if on_cpu.cpu_kernel is None else "install Numba and set sharding.fast_cpu=true"
        raise ShardingError(
            f"table {entry_name(name)!r}: FBGEMM has no {optimizer.__name__} for sharded tables on CPU, only {known}; "
            f"{hint}, or use optimizer.sparse.name=rowwise_adagrad"
        )
    rule = getattr(weight, "update_rule", None)
    if rule is not None and rule.extras and not has_kernels:
        raise ShardingError(
            f"table {entry_name(name)!r}: FBGEMM ignores {rule.extras} on CPU; install Numba and "
            "set sharding.fast_cpu=true, or remove these settings"
        )
    if value := getattr(weight, "_optimizer_kwargs", [{}])[0].get("max_norm"):
        raise ShardingError(
            f"table {entry_name(name)!r}: FBGEMM ignores max_norm on CPU, here {value}; set it to 0, or train on a GPU"
        )
    if data_type == DataType.FP16 and not has_kernels:
        _warn_once(
            "table %r is fp16 on CPU, where FBGEMM does not round stochastically: an update below 1/2048 of a "
            "weight is lost; install Numba and keep sharding.fast_cpu=true, whose kernels do, or use data_type fp32",
            name,
        )


def _warn_of_row_state(name: str, weight: torch.Tensor, sharding_type: str) -> None:
    optimizer = optimizer_class_of(weight)
    if optimizer is None or sharding_type not in COLUMN_SHARDING_TYPES:
        return
    rule = getattr(weight, "update_rule", None)
    if rule is not None and rule.clip_norm:
        _warn_once(
            "table %r is %s: optimizer.sparse.gradient_clip_norm limits the norm of each column "
            "shard's part of a row; to limit the norm of the row, remove that type from its "
            "sharding.sharding_types, or use gradient_clip_value",
            name,
            sharding_type,
        )
    if _entry(optimizer).whole_rows:
        _warn_once(
            "table %r is %s: each column shard has a separate %s state, so the optimizer differs "
            "from that of the unsharded table; for exact training remove that type from its "
            "sharding.sharding_types",
            name,
            sharding_type,
            optimizer.__name__,
        )


def _warn_once(message: str, *values: object) -> None:
    """Log the warning on rank 0 only, because every rank checks the same plan."""
    if dist.get_rank() == 0:
        logger.warning(message, *values)


def check_plan_covers_tables(model: nn.Module, plan: ShardingPlan) -> None:
    """Raise ShardingError for a table that has no plan, or a plan for an unknown table."""
    collections = {name: child for name, child in model.named_modules() if isinstance(child, EmbeddingBagCollection)}
    for path, collection in collections.items():
        planned = set(plan.plan.get(path, {}))
        tables = {config.name for config in collection.embedding_bag_configs()}
        if missing := sorted(tables - planned):
            raise ShardingError(
                f"the plan lacks table(s) {', '.join(missing)} of {path!r}; search it again for this model"
            )
        if unknown := sorted(planned - tables):
            raise ShardingError(
                f"the plan shards table {unknown[0]!r}, which the model lacks{did_you_mean(unknown[0], tables)}; "
                "search it again for this model"
            )
    if unknown_paths := sorted(set(plan.plan) - set(collections)):
        raise ShardingError(
            f"the plan shards module {unknown_paths[0]!r}; the model's tables are in {sorted(collections)}"
        )


def check_plan_is_exact(model: nn.Module, plan: ShardingPlan, tables: list[Table]) -> None:
    """Raise ShardingError for column shards under a row-wise optimizer, unless the table's config names them."""
    by_name = {table.name: table for table in tables}
    for path, shardings in plan.plan.items():
        for name, sharding in shardings.items():
            optimizer = optimizer_class_of(model.get_parameter(f"{path}.embedding_bags.{name}.weight".lstrip(".")))
            if optimizer is None or not _entry(optimizer).whole_rows:
                continue
            kind = sharding.sharding_type
            if kind in COLUMN_SHARDING_TYPES and kind not in by_name[name].sharding.sharding_types:
                raise ShardingError(
                    f"the plan makes table {entry_name(name)!r} {kind}, but {optimizer.__name__} "
                    "has one state per row and would compute other updates; plan again without "
                    f"{kind}, or accept the change with "
                    f"tables.{by_name[name].config_name}.sharding.sharding_types=[{kind}]"
                )


def check_dense_layers_can_be_initialized(model: nn.Module) -> None:
    """Raise ShardingError for modules on meta that no code initializes."""
    for name, child in model.named_modules():
        if isinstance(child, EmbeddingBagCollection) or "embedding_bags" in name.split("."):
            continue
        own = [key for key, value in child.named_parameters(recurse=False) if value.is_meta]
        buffers = [key for key, value in child.named_buffers(recurse=False) if value.is_meta]
        if (own and not hasattr(child, "reset_parameters")) or buffers:
            raise ShardingError(
                f"{type(child).__name__} {name!r} has {(own + buffers)[0]!r} on the meta device, "
                "and nothing would initialize it; build everything except the tables on cpu"
            )
