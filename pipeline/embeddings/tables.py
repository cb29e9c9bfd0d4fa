"""Resolve the job's table configs against a data set (stdlib only).

`tables` in a job maps a table's name to its TableConfig; the entry `default` supplies what a table
leaves unset. A table without feature_names embeds the feature of its own name.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.compression import CompressionConfig
from pipeline.config.tables import DEFAULT, ConstraintConfig, InitConfig, TableConfig, expand_patterns, table_name
from pipeline.data.dataset import Dataset
from pipeline.embeddings.compression.kind import Whole, compressed, kind_of
from pipeline.embeddings.physical import check_compressed, num_numbers
from pipeline.embeddings.row_frequencies import merge_frequencies
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError, did_you_mean

LAST_RESORT = TableConfig(
    embedding_dim=64, pooling="sum", data_type="fp32", init=InitConfig(), l2=0.0, sharding=ConstraintConfig()
)


def resolve_tables(
    tables: dict[str, TableConfig],
    dataset: Dataset,
    multi_hot: dict[str, int] | None = None,
    auto_init: InitConfig = InitConfig("uniform"),  # noqa: B008  # never changed
) -> list[Table]:
    """Every sparse feature of `dataset` gets exactly one table; tables come in the order of their first feature.

    Features that no table names get a table of their own. `multi_hot` replaces the pooling factor of
    features whose ids are multiplied on the fly. `auto_init` is how tables of init.kind=auto begin.

    Raises:
        ConfigError: a feature that the data set lacks or that two tables claim, fewer rows than the
            data's cardinality, num_embeddings in `default`.
    """
    tables = expand_patterns(tables, dataset.sparse_feature_names)
    default = tables.get(DEFAULT, TableConfig())
    if default.num_embeddings is not None or default.feature_names:
        raise ConfigError(
            "tables.default sets what tables leave unset; num_embeddings and feature_names belong to one table"
        )
    known = dataset.sparse_feature_names
    owner: dict[str, str] = {}
    named = {name: config for name, config in tables.items() if name != DEFAULT}
    for name, config in named.items():
        for feature in config.feature_names or [name]:
            if feature not in known:
                raise ConfigError(
                    f"tables.{name} embeds feature {feature!r}, which data set {dataset.name!r} does not have "
                    f"({len(known)} sparse features){did_you_mean(feature, known)}"
                )
            if feature in owner:
                raise ConfigError(
                    f"feature {feature!r} is in tables {owner[feature]!r} and {name!r}; name it in one of them"
                )
            owner[feature] = name
    for feature in known:
        owner.setdefault(feature, feature)
    order = list(dict.fromkeys(owner[feature] for feature in known))
    return [
        _resolve(name, named.get(name, TableConfig()), default, dataset, multi_hot or {}, auto_init) for name in order
    ]


def _initial(init: InitConfig, auto: InitConfig) -> InitConfig:
    return InitConfig(auto.kind, init.scale or auto.scale) if init.kind == "auto" else init


def _resolve(
    name: str,
    config: TableConfig,
    default: TableConfig,
    dataset: Dataset,
    multi_hot: dict[str, int],
    auto_init: InitConfig,
) -> Table:
    features = [dataset.sparse_feature(feature) for feature in config.feature_names or [name]]
    cardinality = max(feature.cardinality for feature in features)
    num_embeddings = cardinality if config.num_embeddings is None else config.num_embeddings
    if num_embeddings < cardinality:
        raise ConfigError(
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
    max_ids = [None if feature.multi_hot else multi_hot.get(feature.name, 1) for feature in features]
    table = Table(
        name=table_name(name),
        num_embeddings=num_embeddings,
        embedding_dim=pick("embedding_dim"),
        feature_names=[feature.name for feature in features],
        pooling=pick("pooling"),
        data_type=pick("data_type"),
        init=_initial(pick("init"), auto_init),
        l2=pick("l2"),
        sharding=pick("sharding"),
        pooling_factors=pooling_factors,
        frequencies=merge_frequencies(features, pooling_factors, multi_hot),
        max_ids=max_ids,
    )
    return _compressed(table, config.compression, default.compression)


def _compressed(table: Table, own: CompressionConfig | None, default: CompressionConfig | None) -> Table:
    """With its compression; tables.default's leaves out tables that it would not make smaller, but for a split."""
    config = own or default
    if config is None or kind_of(config) is Whole or table.num_embeddings < config.min_rows:
        return table
    smaller = replace(table, compression=config)
    check_compressed(smaller)
    full = table.num_embeddings * table.embedding_dim
    may_stay_whole = own is None and compressed(smaller).is_for_size
    return table if may_stay_whole and num_numbers(smaller) >= full else smaller
