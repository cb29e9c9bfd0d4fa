"""Shard an EmbeddingBagCollection on meta, with TorchRec's silent traps fixed or refused.

Each trap below is in torchrec 1.8 and 1.9. All except the optimizer ones concern every plan that a planner may make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import embeddingbag
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    VariableBatchEmbeddingBagCollectionAwaitable,
)
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.train_pipeline import TrainPipelineContext, TrainPipelineSparseDist
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, QuantizedCommCodecs, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline import devices
from pipeline.checkpoint.stored_rows import StoredRows
from pipeline.data.read.batch import ID_DTYPE, LENGTH_DTYPE
from pipeline.devices.cpu.host_exchange import HostExchange
from pipeline.runtime.errors import ShardingError
from pipeline.runtime.process.comms_wait import clock_awaitable, waiting
from pipeline.sharding.collectives.host_dists import exchange_on_host, skip_id_exchange
from pipeline.sharding.table_storage import StorageGroup, TierSettings, storage_groups
from pipeline.sharding.torchrec.cpu_tables import fast_lookups, speed_up_cpu_tables, tables_with_moments
from pipeline.sharding.torchrec.feature_order import FeatureOrder, InOrder
from pipeline.sharding.torchrec.managed_collision import ManagedTables, add_managed_tables, partition_hashed_ids
from pipeline.sharding.torchrec.sharding_checks import check_sharding, check_tiers, optimizer_class_of
from pipeline.sharding.torchrec.sparse_optimizer import tell_fbgemm
from pipeline.sharding.torchrec.update_rule import UpdateRule
from pipeline.sharding.torchrec.variable_batches import (
    accept_variable_batches,
    in_order_of,
    reduce_scatter_variable_batches,
)
from pipeline.sharding.torchrec.weighted_means import divide_weights_of_means
from pipeline.sharding.torchrec.whole_lookup import WholeLookup

ROW_SHARDING_TYPES = ("row_wise", "table_row_wise")
MEAN, SUM = PoolingType.MEAN.value, PoolingType.SUM.value


class ShardedTables(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection, which checks what comes in and runs on this package's exchanges where they fit."""

    tables_without_optimizer: list[str]
    update_rules: dict[str, UpdateRule]  # by table
    managed: ManagedTables
    has_tiers: bool = False  # of any table, on whatever rank its rows are
    whole_lookup: WholeLookup | None = None  # of all tables, where one rank has them

    def __init__(self, *, exchange: HostExchange | None = None, **arguments: Any) -> None:
        self.exchange = exchange  # first: TorchRec's constructor calls init_data_parallel
        super().__init__(**arguments)
        self._groups_of_lookups = [storage_groups(lookup) for lookup in self._lookups]
        order = FeatureOrder(self) if self.exchange is not None else None
        self._order = order if order is not None and order.is_complete and len(order.runs) > 1 else None

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor | LazyAwaitable[KeyedTensor]:
        """Collective: the pooled rows as a KeyedTensor, or what becomes one. Raises ShardingError as input_dist does."""
        lookup = self.whole_lookup
        # The first batch goes TorchRec's way, which checks names and ids.
        if lookup is not None and not self._has_uninitialized_input_dist and not features.variable_stride_per_key():
            _check_dtypes(features)
            ordered = lookup.in_order(features)
            if ordered is not None:
                return KeyedTensor(self._embedding_names, self._embedding_dims, lookup(ordered))
        context = self.create_context()
        splits = self.input_dist(context, features)
        with waiting():
            ids = splits.wait().wait()
        return self.compute_and_output_dist(context, ids)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Collective.

        Raises:
            ShardingError: ids or lengths of another dtype than the one that all ranks have agreed on.
        """
        _check_dtypes(features)
        if not devices.current().copies_batches:
            # A train pipeline may switch this on; it would free the caller's batch, not a copy of it.
            self._free_features_storage_early = False
        if features.variable_stride_per_key():
            features = in_order_of(
                features, [name for sharding in self._embedding_shardings for name in sharding.feature_names()]
            )
        with _means_by_number_of_ids():
            awaitable: Awaitable[Awaitable[KJTList]] = super().input_dist(ctx, features)
        if self._has_mean_pooling_callback:
            # TorchRec adds 1e-6 to every length, also to the 1 of the tables that are not to be divided.
            ctx.divisor = ctx.divisor.round_().clamp_(min=1)
        return awaitable

    def look_ahead(self, features: KeyedJaggedTensor) -> None:
        """Begin to bring the rows of a coming batch of this one rank into slots, where tables have tiers."""
        if not self.tiered_groups:
            return
        keys, offsets, values = features.keys(), features.offset_per_key(), features.values()
        spans = {name: slice(offsets[at], offsets[at + 1]) for at, name in enumerate(keys)}
        for groups, sharding in zip(self._groups_of_lookups, self._embedding_shardings, strict=True):
            for group in groups:
                names = group.names(sharding.feature_names())
                if all(name in spans for own in names for name in own):
                    group.lookup.look_ahead([torch.cat([values[spans[name]] for name in own]).numpy() for own in names])

    def look_ahead_on_rank(self, features: KJTList) -> None:
        """As look_ahead, by what has arrived at this one of several ranks."""
        for groups, arrived in zip(self._groups_of_lookups, features, strict=True):
            for group in groups:
                group.look_ahead(arrived)

    @property
    def tiered_groups(self) -> list[StorageGroup]:
        """Of all lookups on this rank."""
        return [group for groups in self._groups_of_lookups for group in groups]

    @staticmethod
    def _pre_load_state_dict_hook(self: ShardedTables, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        """Stored rows were loaded where they lie: TorchRec would bring them together in memory."""
        for table in self.module_sharding_plan:
            key = f"{prefix}embedding_bags.{table}.weight"
            value = state_dict.get(key)
            if isinstance(value, ShardedTensor) and any(
                isinstance(shard.tensor, StoredRows) for shard in value.local_shards()
            ):
                del state_dict[key]
                self._skip_missing_weight_key.append(key)
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *args)

    def init_data_parallel(self) -> None:
        """Leave out DDP on the CPU ranks of one host, because GradientAverage averages their gradients."""
        if self.exchange is None:
            super().init_data_parallel()

    def replicated_weights(self) -> list[nn.Parameter]:
        """The flat parameters of the data_parallel tables, where no DDP averages their gradients."""
        if self.exchange is None:
            return []
        pairs = zip(self._embedding_shardings, self._lookups, strict=True)
        replicated = [lookup for sharding, lookup in pairs if isinstance(sharding, DpPooledEmbeddingSharding)]
        plain = [lookup for lookup in replicated if not isinstance(lookup, DistributedDataParallel)]
        return [weight for lookup in plain for weight in lookup.parameters()]

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        for sharding, input_dist in zip(self._embedding_shardings, self._input_dists, strict=True):
            if isinstance(input_dist, RwSparseFeaturesDist):
                partition_hashed_ids(input_dist, sharding.feature_names(), self.managed)
        if self._env.world_size == 1 and devices.current().has_kernels:
            skip_id_exchange(self._input_dists)
        if self.exchange is not None:
            exchange_on_host(self, self.exchange)

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Collective."""
        if self.managed:
            input = KJTList([self.managed.remap(features, self.training) for features in input])
        pooled: LazyAwaitable[KeyedTensor] = super().compute_and_output_dist(ctx, input)
        assert isinstance(pooled, (EmbeddingBagCollectionAwaitable, VariableBatchEmbeddingBagCollectionAwaitable))
        for part in pooled._awaitables:  # of each sharding
            clock_awaitable(part)
        if self._order is None or type(pooled) is not EmbeddingBagCollectionAwaitable or pooled.callbacks:
            return pooled  # a divisor of means goes by TorchRec's order
        return InOrder(pooled, self._order)


class ClockedSparseDist(TrainPipelineSparseDist[Any, Any]):
    """TorchRec's train pipeline, with its waits for splits and ids on the clock of comms_wait."""

    def wait_sparse_data_dist(self, context: TrainPipelineContext) -> None:
        with waiting():
            super().wait_sparse_data_dist(context)
        for name, request in context.input_dist_tensors_requests.items():
            request.wait = _clocked(request.wait)  # type: ignore[method-assign]
            tables = self._tiered_tables.get(name)
            if tables is not None:  # their ids are waited for now, and their rows come in beside this step's backward
                arrived = request.wait()
                tables.look_ahead_on_rank(arrived)
                request.wait = partial(_given, arrived)  # type: ignore[method-assign]

    @cached_property
    def _tiered_tables(self) -> dict[str, ShardedTables]:
        """By the name that the pipeline knows a module by."""
        modules = [module for module in self._pipelined_modules if isinstance(module, ShardedTables)]
        forwards: list[tuple[Any, ShardedTables]] = [(module.forward, module) for module in modules]
        return {forward.name: module for forward, module in forwards if module.tiered_groups}


def _given(value: Any) -> Any:
    return value


@contextmanager
def _means_by_number_of_ids() -> Iterator[None]:
    """Inside, TorchRec divides row-sharded MEAN bags by their number of ids, also where ids have weights.

    It would divide by the sum of the weights there, while FBGEMM, which divides in all other tables, goes by the number.
    """
    torchrec_divisor = embeddingbag._create_mean_pooling_divisor
    embeddingbag._create_mean_pooling_divisor = partial(_without_weights, torchrec_divisor)
    try:
        yield
    finally:
        embeddingbag._create_mean_pooling_divisor = torchrec_divisor


def _without_weights(divisor: Callable[..., torch.Tensor], **arguments: Any) -> torch.Tensor:
    return divisor(**arguments | {"weights": None})


def _clocked(wait: Callable[[], Any]) -> Callable[[], Any]:
    def clocked() -> Any:
        with waiting():
            return wait()

    return clocked


def _check_dtypes(features: KeyedJaggedTensor) -> None:
    dtypes = (features.values().dtype, features.lengths().dtype)
    if dtypes != (ID_DTYPE, LENGTH_DTYPE):
        raise ShardingError(
            f"sparse_features have {dtypes[0]} ids and {dtypes[1]} lengths; every rank must send {ID_DTYPE} ids and "
            f"{LENGTH_DTYPE} lengths, for where dtypes differ between ranks the ids arrive as garbage. "
            "Build batches with pipeline.data.read.batch.keyed_jagged_tensor"
        )


class TableSharder(EmbeddingBagCollectionSharder):
    """Shards tables by any sharding type on any device, and does not initialize their weights. `seed`: of managed rows."""

    def __init__(
        self,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        seed: int = 0,
        exchange: HostExchange | None = None,
        tiers: TierSettings | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)
        self._seed, self._exchange, self._tiers = seed, exchange, tiers

    def sharding_types(self, compute_device_type: str) -> list[str]:
        # Every device has what TorchRec offers on GPUs: on cpu it leaves out what needs a reduce-scatter, which gloo has.
        return super().sharding_types("cuda")

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTables:
        """Collective.

        Raises:
            ShardingError: the plan asks for what TorchRec would do wrongly without saying so.
        """
        here = devices.current()
        check_sharding(module, params)
        if self._tiers is not None:
            check_tiers(module, params, self._tiers)
        _give_each_parameter_its_own_kwargs(module)
        if here.fbgemm_is_complete:
            for name, weight in self.shardable_parameters(module).items():
                tell_fbgemm(name, weight)
        configs = module.embedding_bag_configs()
        grid_means = [
            config
            for config in configs
            if config.pooling == PoolingType.MEAN and params[config.name].sharding_type == "grid_shard"
        ]
        with _pooled_as_sum(grid_means), _not_initialized(configs), tables_with_moments(self._tiers):
            sharded = ShardedTables(
                module=module,
                table_name_to_parameter_sharding=params,
                env=env,
                fused_params=self.fused_params,
                device=device or here.torch_device,
                qcomm_codecs_registry=self.qcomm_codecs_registry,
                module_fqn=module_fqn,
                exchange=self._exchange,
            )
        _fix_mean_pooling(sharded, configs, grid_means, params)
        sharded.tables_without_optimizer = [
            name for name, weight in self.shardable_parameters(module).items() if optimizer_class_of(weight) is None
        ]
        weights = self.shardable_parameters(module).items()
        sharded.update_rules = {name: weight.update_rule for name, weight in weights if hasattr(weight, "update_rule")}
        sharded.has_tiers = self._tiers is not None and any(config.name in self._tiers.slots for config in configs)
        sharded.managed = add_managed_tables(sharded, configs, env, self._seed)
        if not here.fbgemm_is_complete:
            divide_weights_of_means(sharded._lookups)
        if here.has_kernels:
            speed_up_cpu_tables(sharded._lookups, sharded.update_rules)  # a plain list: modules() does not go by them
        accept_variable_batches(sharded._lookups)
        reduce_scatter_variable_batches(sharded._output_dists)
        if here.has_kernels and env.world_size == 1:
            sharded.whole_lookup = _lookup_of_all(sharded)
        return sharded


def _lookup_of_all(sharded: ShardedTables) -> WholeLookup | None:
    """What gives what the collection gives; None where not all tables have our kernels, or their rows are changed after."""
    lookups = fast_lookups(sharded)
    changes = sharded.managed or sharded._has_mean_pooling_callback
    if not lookups or changes or (len(lookups) > 1 and any(lookup.tiered is not None for lookup in lookups)):
        return None
    names = [name for sharding in sharded._embedding_shardings for name in sharding.feature_names()]
    whole = WholeLookup(lookups, names)
    return whole if names == sharded._embedding_names and whole.dims == sharded._embedding_dims else None


def _give_each_parameter_its_own_kwargs(module: EmbeddingBagCollection) -> None:
    """TorchRec renames `lr` inside the dict that apply_optimizer_in_backward was given, and all tables share it."""
    for weight in module.parameters():
        if hasattr(weight, "_optimizer_kwargs"):
            weight._optimizer_kwargs = [dict(kwargs) for kwargs in weight._optimizer_kwargs]


@contextmanager
def _pooled_as_sum(configs: list[EmbeddingBagConfig]) -> Iterator[None]:
    """Under grid_shard each rank sees some of a bag's rows: their mean is not a part of the bag's mean, their sum is."""
    for config in configs:
        config.pooling = PoolingType.SUM
    try:
        yield
    finally:
        for config in configs:
            config.pooling = PoolingType.MEAN


@contextmanager
def _not_initialized(configs: list[EmbeddingBagConfig]) -> Iterator[None]:
    """Skip TorchRec's own initialization from the rank's random state: initialize_tables is in its place."""
    init_fns = [config.init_fn for config in configs]
    for config in configs:
        config.init_fn = _keep
    try:
        yield
    finally:
        for config, init_fn in zip(configs, init_fns, strict=True):
            config.init_fn = init_fn


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _fix_mean_pooling(
    sharded: ShardedTables,
    configs: list[EmbeddingBagConfig],
    grid_means: list[EmbeddingBagConfig],
    params: dict[str, ParameterSharding],
) -> None:
    """Let TorchRec divide the sums of row-sharded MEAN tables by the bags' lengths, and no other table's.

    It divides every feature that is not on its list of row-sharded SUM features; tables that are not sharded
    by rows are on no list. Putting them on the SUM list makes their divisor 1.
    """
    features = sharded._pooling_type_to_rs_features
    for config in grid_means:
        features[MEAN].extend(config.feature_names)
    sharded._has_mean_pooling_callback = MEAN in features
    if not sharded._has_mean_pooling_callback:
        return
    for config in configs:
        if config not in grid_means and params[config.name].sharding_type not in ROW_SHARDING_TYPES:
            features[SUM].extend(config.feature_names)
    if twice := set(features[MEAN]) & set(features[SUM]):
        # The divisor goes by feature, so the tables of one feature cannot differ in it.
        raise ShardingError(
            f"feature {sorted(twice)[0]!r} is in a row-sharded MEAN table and in a table of another pooling or sharding; "
            "give both the same, or the feature to one table"
        )
