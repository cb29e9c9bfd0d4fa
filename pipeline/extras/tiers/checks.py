"""Refuse tables with tiers that would not train exactly, before memory is allocated."""

from __future__ import annotations

from importlib.util import find_spec

from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline import devices
from pipeline.config.tables import entry_name
from pipeline.embeddings.collection import Managed
from pipeline.runtime.errors import ShardingError
from pipeline.sharding.table_storage import TierSettings
from pipeline.sharding.torchrec.sharding_checks import optimizer_class_of


def check_tiers(
    module: EmbeddingBagCollection,
    params: dict[str, ParameterSharding],
    tiers: TierSettings,
) -> None:
    """Raise ShardingError for a table with tiers that would not train exactly."""
    for config in module.embedding_bag_configs():
        if config.name in tiers.slots and (problem := _tiers_problem(config, module, params)):
            raise ShardingError(
                f"table {entry_name(config.name)!r} has tiers.slots={tiers.slots[config.name]:g}, and {problem}"
            )


def _tiers_problem(
    config: EmbeddingBagConfig,
    module: EmbeddingBagCollection,
    params: dict[str, ParameterSharding],
) -> str:
    """Return why the table cannot have tiers and how to fix it, or an empty string if it can."""
    weight = module.embedding_bags[config.name].weight
    rule, optimizer = getattr(weight, "update_rule", None), optimizer_class_of(weight)
    if devices.current().has_own_memory:
        return "tiers are for CPU ranks; on GPUs use sharding.compute_kernels=[fused_uvm_caching]"
    if not devices.current().has_kernels or find_spec("numba") is None:
        return "tiers need Numba and sharding.fast_cpu=true"
    if params[config.name].sharding_type == "data_parallel":
        return "a replicated table is completely in memory; remove data_parallel from its sharding.sharding_types"
    if config.data_type != DataType.FP32:
        return (
            f"its data_type is {config.data_type.value.lower()}, whose rounding depends on the "
            "position of a row; use fp32"
        )
    if isinstance(config.init_fn, Managed):
        return "managed_collision moves rows itself; remove one of the two settings"
    if optimizer is not None and (rule is None or rule.kind not in range(5)):
        return f"{optimizer.__name__} has no CPU kernel; use sgd, adagrad, rowwise_adagrad, adam or adamw"
    if rule is not None and rule.all_rows:
        return "optimizer.sparse.update_rows changes every row at every step; set it to touched"
    return ""
