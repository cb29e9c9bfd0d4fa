"""Say what the embedding tables are, and resolve them against a data set (stdlib only).

`tables` in a job maps a table's name to its TableConfig; the entry `default` supplies what a table
leaves unset. A table without feature_names embeds the feature of its own name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from pipeline.checks import check_above, check_at_least, check_choice, did_you_mean
from pipeline.data.dataset import Dataset
from pipeline.embeddings.row_frequencies import RowFrequencies, merge_frequencies

DEFAULT = "default"
POOLINGS = ("sum", "mean")
DATA_TYPES = ("fp32", "fp16")
INITS = ("uniform", "normal", "zeros")
SHARDING_TYPES = (
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard",
)  # fmt: skip
COMPUTE_KERNELS = ("dense", "fused", "fused_uvm", "fused_uvm_caching", "key_value")


@dataclass
class InitConfig:
    """uniform: in [-scale, scale], scale None = 1/sqrt(num_embeddings); normal: std = scale, None = 1/sqrt(embedding_dim)."""

    kind: str = "uniform"
    scale: Optional[float] = None

    def __post_init__(self) -> None:
        check_choice("init.kind", self.kind, INITS)
        if self.scale is not None:
            check_above("init.scale", self.scale, 0.0)


@dataclass
class ConstraintConfig:
    """What the planner may choose for a table; empty lists allow all that the backend can do."""

    sharding_types: List[str] = field(default_factory=list)
    compute_kernels: List[str] = field(default_factory=list)
    min_partition: Optional[int] = None  # narrowest column shard

    def __post_init__(self) -> None:
        for value in self.sharding_types:
            check_choice("sharding.sharding_types", value, SHARDING_TYPES)
        for value in self.compute_kernels:
            check_choice("sharding.compute_kernels", value, COMPUTE_KERNELS)
        check_at_least("sharding.min_partition", self.min_partition, 1, allow_none=True)


@dataclass
class TableConfig:
    """One table. None means: as `tables.default` says, and for num_embeddings: as the data set's cardinality says."""

    num_embeddings: Optional[int] = None
    embedding_dim: Optional[int] = None
    feature_names: List[str] = field(default_factory=list)
    pooling: Optional[str] = None
    data_type: Optional[str] = None
    init: Optional[InitConfig] = None
    sharding: Optional[ConstraintConfig] = None

    def __post_init__(self) -> None:
        check_at_least("num_embeddings", self.num_embeddings, 1, allow_none=True)
        check_at_least("embedding_dim", self.embedding_dim, 1, allow_none=True)
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        if self.data_type is not None:
            check_choice("data_type", self.data_type, DATA_TYPES)


@dataclass(frozen=True)
class Table:
    """A table with nothing left open. `pooling_factors[i]` is the mean number of ids a sample of `feature_names[i]`.

    `frequencies` is None where no data say how lookups fall on rows.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: List[str]
    pooling: str
    data_type: str
    init: InitConfig
    sharding: ConstraintConfig
    pooling_factors: List[float]
    frequencies: Optional[RowFrequencies] = None


LAST_RESORT = TableConfig(
    embedding_dim=64, pooling="sum", data_type="fp32", init=InitConfig(), sharding=ConstraintConfig()
)


def rows_of_features(tables: Dict[str, TableConfig]) -> Dict[str, int]:
    """Feature name -> rows of its table, where the config says them."""
    return {
        feature: config.num_embeddings
        for name, config in tables.items()
        if config.num_embeddings is not None
        for feature in config.feature_names or [name]
    }


def resolve_tables(
    tables: Dict[str, TableConfig], dataset: Dataset, multi_hot: Optional[Dict[str, int]] = None
) -> List[Table]:
    """Every sparse feature of `dataset` gets exactly one table; tables come in the order of their first feature.

    Features that no table names get one of their own. `multi_hot` replaces the pooling factor of
    features whose ids are multiplied on the fly.

    Raises:
        ValueError: a feature that the data set lacks or that two tables claim, fewer rows than the
            data's cardinality, num_embeddings in `default`.
    """
    default = tables.get(DEFAULT, TableConfig())
    if default.num_embeddings is not None or default.feature_names:
        raise ValueError(
            "tables.default sets what tables leave unset; num_embeddings and feature_names belong to one table"
        )
    known = dataset.sparse_feature_names
    owner: Dict[str, str] = {}
    named = {name: config for name, config in tables.items() if name != DEFAULT}
    for name, config in named.items():
        for feature in config.feature_names or [name]:
            if feature not in known:
                raise ValueError(
                    f"tables.{name} embeds feature {feature!r}, which data set {dataset.name!r} does not have "
                    f"({len(known)} sparse features){did_you_mean(feature, known)}"
                )
            if feature in owner:
                raise ValueError(
                    f"feature {feature!r} is in tables {owner[feature]!r} and {name!r}; name it in one of them"
                )
            owner[feature] = name
    for feature in known:
        owner.setdefault(feature, feature)
    order = list(dict.fromkeys(owner[feature] for feature in known))
    return [_resolve(name, named.get(name, TableConfig()), default, dataset, multi_hot or {}) for name in order]


def _resolve(
    name: str, config: TableConfig, default: TableConfig, dataset: Dataset, multi_hot: Dict[str, int]
) -> Table:
    features = [dataset.sparse_feature(feature) for feature in config.feature_names or [name]]
    cardinality = max(feature.cardinality for feature in features)
    num_embeddings = cardinality if config.num_embeddings is None else config.num_embeddings
    if num_embeddings < cardinality:
        raise ValueError(
            f"tables.{name}.num_embeddings={num_embeddings} but the data's ids reach {cardinality - 1} "
            f"(cardinality {cardinality}); leave it unset, or prepare with a frequency threshold or "
            f"data.ids.max_size={num_embeddings}"
        )

    def pick(field_name: str):  # type: ignore[no-untyped-def]
        for source in (config, default, LAST_RESORT):
            if (value := getattr(source, field_name)) is not None:
                return value
        raise AssertionError(field_name)

    pooling_factors = [float(multi_hot.get(feature.name, feature.mean_pooling_factor)) for feature in features]
    return Table(
        name=name,
        num_embeddings=num_embeddings,
        embedding_dim=pick("embedding_dim"),
        feature_names=[feature.name for feature in features],
        pooling=pick("pooling"),
        data_type=pick("data_type"),
        init=pick("init"),
        sharding=pick("sharding"),
        pooling_factors=pooling_factors,
        frequencies=merge_frequencies(features, pooling_factors, multi_hot),
    )
