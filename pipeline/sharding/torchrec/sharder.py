"""Shard an EmbeddingBagCollection on meta. Fix or refuse what TorchRec 1.8 and 1.9 do wrong silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Protocol

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
from pipeline.checkpoint.changes import ShardPlace
from pipeline.checkpoint.stored_rows import StoredRows
from pipeline.config.registry import from_extra, if_installed
from pipeline.data.read.batch import ID_DTYPE, LENGTH_DTYPE
from pipeline.devices.cpu.host_exchange import HostExchange
from pipeline.embeddings.collection import Managed
from pipeline.embeddings.table import RowUpdates
from pipeline.runtime.errors import ShardingError
from pipeline.runtime.process.comms_wait import clock_awaitable, waiting
from pipeline.sharding.host_collectives import FeatureOrder, InOrder, exchange_on_host, skip_id_exchange
from pipeline.sharding.table_storage import StorageGroup, TierSettings, storage_groups
from pipeline.sharding.torchrec.cpu_tables import FusedLookup, fast_lookups, speed_up_cpu_tables
from pipeline.sharding.torchrec.fbgemm_lookups import divide_weights_of_means, freeze
from pipeline.sharding.torchrec.sharding_checks import check_sharding, optimizer_class_of
from pipeline.sharding.torchrec.sparse_optimizer import configure_fbgemm
from pipeline.sharding.torchrec.table_moments import tables_with_moments
from pipeline.sharding.torchrec.update_rule import UpdateRule

ROW_SHARDING_TYPES = ("row_wise", "table_row_wise")
MEAN, SUM = PoolingType.MEAN.value, PoolingType.SUM.value


class ManagedTables(Protocol):
    """The interface of a collection's tables whose ids get rows during training. An extra implements it."""

    def partition(self, input_dist: RwSparseFeaturesDist, features: list[str]) -> None:
        """Send each rank the ids that belong to the rank's part, instead of splitting by TorchRec's row numbers."""

    def remap(self, features: KeyedJaggedTensor, training: bool) -> KeyedJaggedTensor:
        """Return the features with ids replaced by rows."""

    def watch_initialized(self, mark: Callable[[ShardPlace, torch.Tensor], None]) -> None:
        """Call `mark` with the rows of a shard that get another id and therefore start from initial weights."""


class ShardedTables(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection with checks of the inputs and with this package's exchanges."""

    tables_without_optimizer: list[str]
    update_rules: dict[str, UpdateRule]  # by table
    row_updates: dict[str, RowUpdates]  # by table
    managed: ManagedTables | None = None
    has_tiers: bool = False  # whether any table has tiers, on any rank
    fused_lookup: FusedLookup | None = None  # of all tables, if one rank has them

    def __init__(self, *, exchange: HostExchange | None = None, **arguments: Any) -> None:
        # set first, because TorchRec's constructor calls init_data_parallel
        self.exchange = exchange
        weights = {name: bag.weight for name, bag in arguments["module"].embedding_bags.items()}
        self.row_updates = {name: getattr(weight, "row_updates", RowUpdates()) for name, weight in weights.items()}
        super().__init__(**arguments)
        freeze(self._lookups, self.row_updates)
        self._groups_of_lookups = [storage_groups(lookup) for lookup in self._lookups]
        order = FeatureOrder(self) if self.exchange is not None else None
        self._order = order if order is not None and order.is_complete and len(order.runs) > 1 else None

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor | LazyAwaitable[KeyedTensor]:
        """Collective: return pooled rows, or an awaitable of them. Raises ShardingError as input_dist does."""
        lookup = self.fused_lookup
        # TorchRec runs the first batch, because it checks names and ids.
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
        """Collective: send the ids to the ranks that hold the tables.

        Raises ShardingError if the dtype of ids or lengths is not the one that all ranks use.
        """
        _check_dtypes(features)
        if not devices.current().copies_batches:
            # A train pipeline may switch this on, which would free the caller's batch.
            self._free_features_storage_early = False
        if features.variable_stride_per_key():
            features = from_extra("in_order_of", "tables.*.compression.skip_empty_bags")(
                features, [name for sharding in self._embedding_shardings for name in sharding.feature_names()]
            )
        with _means_by_number_of_ids():
            awaitable: Awaitable[Awaitable[KJTList]] = super().input_dist(ctx, features)
        if self._has_mean_pooling_callback:
            # TorchRec adds 1e-6 to every length, also to the 1 of sums.
            ctx.divisor = ctx.divisor.round_().clamp_(min=1)
        return awaitable

    def prefetch_rows(self, features: KeyedJaggedTensor) -> None:
        """Start loading the rows of a coming batch on a single rank, if tables have tiers."""
        if not self.tiered_groups:
            return
        keys, offsets, values = features.keys(), features.offset_per_key(), features.values()
        spans = {name: slice(offsets[at], offsets[at + 1]) for at, name in enumerate(keys)}
        for groups, sharding in zip(self._groups_of_lookups, self._embedding_shardings, strict=True):
            for group in groups:
                names = group.names(sharding.feature_names())
                if all(name in spans for own in names for name in own):
                    group.lookup.prefetch_rows(
                        [torch.cat([values[spans[name]] for name in own]).numpy() for own in names]
                    )

    def prefetch_rows_on_rank(self, features: KJTList) -> None:
        """Start loading the rows of a coming batch on one of several ranks, from the ids that arrived here."""
        for groups, arrived in zip(self._groups_of_lookups, features, strict=True):
            for group in groups:
                group.prefetch_rows(arrived)

    @property
    def tiered_groups(self) -> list[StorageGroup]:
        """Return the groups of tables with tiers in all lookups on this rank."""
        return [group for groups in self._groups_of_lookups for group in groups]

    @staticmethod
    def _pre_load_state_dict_hook(self: ShardedTables, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Skip rows in tiers, which were loaded in place. TorchRec would load all of them into memory."""
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
        """Use no DDP for CPU ranks of one host, because GradientAverage averages their gradients.

        DDP refuses modules of which nothing is trained.
        """
        freeze(self._lookups, self.row_updates)
        pairs = zip(self._embedding_shardings, self._lookups, strict=True)
        replicated = [lookup for sharding, lookup in pairs if isinstance(sharding, DpPooledEmbeddingSharding)]
        if self.exchange is None and any(weight.requires_grad for each in replicated for weight in each.parameters()):
            super().init_data_parallel()

    def replicated_weights(self) -> list[nn.Parameter]:
        """Return the flat parameters of the data_parallel tables whose gradients are not averaged by DDP."""
        if self.exchange is None:
            return []
        pairs = zip(self._embedding_shardings, self._lookups, strict=True)
        replicated = [lookup for sharding, lookup in pairs if isinstance(sharding, DpPooledEmbeddingSharding)]
        plain = [lookup for lookup in replicated if not isinstance(lookup, DistributedDataParallel)]
        return [weight for lookup in plain for weight in lookup.parameters()]

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        for sharding, input_dist in zip(self._embedding_shardings, self._input_dists, strict=True):
            if self.managed and isinstance(input_dist, RwSparseFeaturesDist):
                self.managed.partition(input_dist, sharding.feature_names())
        if self._env.world_size == 1 and devices.current().has_kernels:
            skip_id_exchange(self._input_dists)
        if self.exchange is not None:
            exchange_on_host(self, self.exchange)

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Collective: look up the rows and send them to the ranks of the samples."""
        if self.managed:
            input = KJTList([self.managed.remap(features, self.training) for features in input])
        pooled: LazyAwaitable[KeyedTensor] = super().compute_and_output_dist(ctx, input)
        assert isinstance(pooled, (EmbeddingBagCollectionAwaitable, VariableBatchEmbeddingBagCollectionAwaitable))
        for part in pooled._awaitables:  # of each sharding
            clock_awaitable(part)
        if self._order is None or type(pooled) is not EmbeddingBagCollectionAwaitable or pooled.callbacks:
            return pooled  # the divisor of means uses TorchRec's order
        return InOrder(pooled, self._order)


class TimedTrainPipeline(TrainPipelineSparseDist[Any, Any]):
    """TorchRec's train pipeline. `comms_wait` measures how long it waits for splits and ids."""

    def wait_sparse_data_dist(self, context: TrainPipelineContext) -> None:
        with waiting():
            super().wait_sparse_data_dist(context)
        for name, request in context.input_dist_tensors_requests.items():
            request.wait = _clocked(request.wait)
            tables = self._tiered_tables.get(name)
            # wait for their ids now; their rows are loaded during this step's backward
            if tables is not None:
                arrived = request.wait()
                tables.prefetch_rows_on_rank(arrived)
                request.wait = partial(lambda value: value, arrived)

    @cached_property
    def _tiered_tables(self) -> dict[str, ShardedTables]:
        """Return the tables with tiers, by their module's name in the pipeline."""
        modules = [module for module in self._pipelined_modules if isinstance(module, ShardedTables)]
        forwards: list[tuple[Any, ShardedTables]] = [(module.forward, module) for module in modules]
        return {forward.name: module for forward, module in forwards if module.tiered_groups}


@contextmanager
def _means_by_number_of_ids() -> Iterator[None]:
    """Let TorchRec divide row-sharded MEAN bags by the number of ids, as FBGEMM does.

    TorchRec would divide by the sum of the weights.
    """
    torchrec_divisor = embeddingbag._create_mean_pooling_divisor
    embeddingbag._create_mean_pooling_divisor = lambda **given: torchrec_divisor(**given | {"weights": None})
    try:
        yield
    finally:
        embeddingbag._create_mean_pooling_divisor = torchrec_divisor


def _clocked(wait: Callable[[], Any]) -> Callable[[], Any]:
    def clocked() -> Any:
        with waiting():
            return wait()

    return clocked


def _check_dtypes(features: KeyedJaggedTensor) -> None:
    dtypes = (features.values().dtype, features.lengths().dtype)
    if dtypes != (ID_DTYPE, LENGTH_DTYPE):
        raise ShardingError(
            f"sparse_features have {dtypes[0]} ids and {dtypes[1]} lengths; every rank must send "
            f"{ID_DTYPE} ids and {LENGTH_DTYPE} lengths, because ids arrive as garbage if dtypes "
            "differ between ranks. Build batches with pipeline.data.read.batch.keyed_jagged_tensor"
        )


class TableSharder(EmbeddingBagCollectionSharder):
    """Shard tables by any type on any device, without initializing them. seed: for tables with managed rows."""

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
        # For cpu, TorchRec omits types that need a reduce-scatter, which gloo has.
        return super().sharding_types("cuda")

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTables:
        """Collective: shard the tables of `module`.

        Raises ShardingError if TorchRec would train this plan wrongly without an error.
        """
        here = devices.current()
        check_sharding(module, params)
        if self._tiers is not None:
            from_extra("check_tiers", "tables.*.tiers")(module, params, self._tiers)
        _give_each_parameter_its_own_kwargs(module)
        if here.fbgemm_is_complete:
            for name, weight in self.shardable_parameters(module).items():
                configure_fbgemm(name, weight)
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
        if any(isinstance(config.init_fn, Managed) for config in configs):
            add_managed_tables = from_extra("add_managed_tables", "tables.*.compression.kind=managed_collision")
            sharded.managed = add_managed_tables(sharded, configs, env, self._seed)
        if not here.fbgemm_is_complete:
            divide_weights_of_means(sharded._lookups)
        if here.has_kernels:
            # a plain list, which modules() does not enter
            speed_up_cpu_tables(sharded._lookups, sharded.update_rules)
        if (accept_variable_batches := if_installed("accept_variable_batches")) is not None:
            accept_variable_batches(sharded._lookups, sharded._output_dists)
        if here.has_kernels and env.world_size == 1:
            sharded.fused_lookup = _lookup_of_all(sharded)
        return sharded


def _lookup_of_all(sharded: ShardedTables) -> FusedLookup | None:
    """Return one lookup for all tables; None if kernels are missing or rows are changed after the lookup."""
    lookups = fast_lookups(sharded)
    changes = sharded.managed or sharded._has_mean_pooling_callback
    if not lookups or changes or (len(lookups) > 1 and any(lookup.tiered is not None for lookup in lookups)):
        return None
    names = [name for sharding in sharded._embedding_shardings for name in sharding.feature_names()]
    whole = FusedLookup(lookups, names)
    return whole if names == sharded._embedding_names and whole.dims == sharded._embedding_dims else None


def _give_each_parameter_its_own_kwargs(module: EmbeddingBagCollection) -> None:
    """Copy the kwargs of each table, because TorchRec renames `lr` in a dict that the tables share."""
    for weight in module.parameters():
        if hasattr(weight, "_optimizer_kwargs"):
            weight._optimizer_kwargs = [dict(kwargs) for kwargs in weight._optimizer_kwargs]


@contextmanager
def _pooled_as_sum(configs: list[EmbeddingBagConfig]) -> Iterator[None]:
    """Let MEAN tables under grid_shard pool by sum, because means of parts of a bag do not add up."""
    for config in configs:
        config.pooling = PoolingType.SUM
    try:
        yield
    finally:
        for config in configs:
            config.pooling = PoolingType.MEAN


@contextmanager
def _not_initialized(configs: list[EmbeddingBagConfig]) -> Iterator[None]:
    """Skip TorchRec's initialization of tables. initialize_tables does it instead."""
    init_fns = [config.init_fn for config in configs]
    for config in configs:
        config.init_fn = lambda weight: weight
    try:
        yield
    finally:
        for config, init_fn in zip(configs, init_fns, strict=True):
            config.init_fn = init_fn


def _fix_mean_pooling(
    sharded: ShardedTables,
    configs: list[EmbeddingBagConfig],
    grid_means: list[EmbeddingBagConfig],
    params: dict[str, ParameterSharding],
) -> None:
    """Let TorchRec divide row-sharded MEAN tables by the bags' lengths, and no other tables.

    TorchRec divides every feature that is not on its list of row-sharded SUM features. It lists no
    tables that are not sharded by rows. Here they are on the SUM list, so their divisor is 1.
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
        # There is one divisor per feature, so it must be the same for all tables of a feature.
        raise ShardingError(
            f"feature {sorted(twice)[0]!r} is in a row-sharded MEAN table and in a table of another pooling or sharding; "
            "give both tables the same, or use the feature in one table"
        )
