"""Resolve the job's table configs against a data set (stdlib only).

`tables` in a job maps a table's name to its TableConfig. The entry `default` supplies the values
that other entries do not set. A table without feature_names embeds the feature with the table's
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.config.model import SequenceInput
from pipeline.config.tables import (
    DEFAULT,
    CompressionConfig,
    ConstraintConfig,
    InitConfig,
    TableConfig,
    expand_patterns,
    table_name,
)
from pipeline.data.dataset import Dataset
from pipeline.embeddings.compression.kind import Whole, compressed, kind_of
from pipeline.embeddings.physical import check_compressed, num_numbers
from pipeline.embeddings.row_frequencies import merge_frequencies
from pipeline.embeddings.table import Positions, RowUpdates, Table
from pipeline.runtime.errors import ConfigError, did_you_mean

LAST_RESORT = TableConfig(
    embedding_dim=64, pooling="sum", data_type="fp32", init=InitConfig(), l2=0.0, lr_factor=1.0, warmup_steps=0,
    frozen=False, sharding=ConstraintConfig(),
)  # fmt: skip


def resolve_tables(
    tables: dict[str, TableConfig],
    dataset: Dataset,
    multi_hot: dict[str, int] | None = None,
    auto_init: InitConfig = InitConfig("uniform"),  # noqa: B008  # never changed
    sequences: Sequence[SequenceInput] = (),
) -> list[Table]:
    """Return one table for each sparse feature of `dataset`, in the order of first features.

    A feature that no table names gets its own table; a sequence that shares another feature's ids
    uses its table. `multi_hot` replaces the pooling factors of features whose ids are sampled while
    reading. `auto_init` is for init.kind=auto. `sequences` are read by position; other sequences
    are pooled. Raises ConfigError.
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
        about = dataset.sparse_feature(feature).sequence
        shared = feature if about is None or about.shares is None else about.shares
        owner.setdefault(feature, owner.get(shared, shared))
    positions = resolve_positions(sequences, dataset)
    order = list(dict.fromkeys(owner[feature] for feature in known))
    found = []
    for name in order:
        config = named.get(name, TableConfig())
        given = config.feature_names or [feature for feature in known if feature == owner[feature] == name]
        sharing = [feature for feature in known if owner[feature] == name and feature not in given]
        members = replace(config, feature_names=[*given, *sharing])
        read = [positions[feature] for feature in members.feature_names if feature in positions]
        found.append(_resolve(name, members, default, dataset, multi_hot or {}, auto_init, read))
    return found


def resolve_positions(sequences: Sequence[SequenceInput], dataset: Dataset) -> dict[str, Positions]:
    """Return the positions by feature. Raises ConfigError if the data set does not have them."""
    held = {feature.name: feature.sequence for feature in dataset.sparse_features if feature.sequence is not None}
    found = {}
    for each in sequences:
        if each.feature not in held:
            raise ConfigError(
                f"the model reads {each.feature!r} by position, which is not a sequence of data set {dataset.name!r}"
                f"{did_you_mean(each.feature, held)}; it has {', '.join(held) or 'none'}: name it under data.columns.sequence"
            )
        max_length = held[each.feature].max_length
        if (each.num_positions or 0) > max_length:
            raise ConfigError(
                f"the model reads {each.num_positions} positions of {each.feature!r}, but the data set keeps {max_length}; read "
                "fewer, or prepare it with a larger max_length"
            )
        if each.search_in is not None:
            _check_search(each, dataset)
        found[each.feature] = Positions(each.feature, each.num_positions or max_length, each.search_in, each.search_for)
    return found


def _check_search(each: SequenceInput, dataset: Dataset) -> None:
    known = {feature.name: feature for feature in dataset.sparse_features}
    if missing := [name for name in (each.search_in, each.search_for) if name not in known]:
        raise ConfigError(
            f"the model searches {each.feature!r} by {missing[0]!r}, which is not a feature of data set {dataset.name!r}"
            f"{did_you_mean(str(missing[0]), known)}"
        )
    sequence = known[str(each.search_in)].sequence
    leader = known[each.feature].sequence
    assert leader is not None
    if sequence is None or (sequence.beside or each.search_in) != (leader.beside or each.feature):
        raise ConfigError(f"the model searches {each.feature!r} by {each.search_in!r}, which does not describe it")
    if sequence.shares != each.search_for:
        raise ConfigError(
            f"the model searches {each.search_in!r} for the id of {each.search_for!r}, but they do not share ids; prepare it "
            f"with data.columns.sequence.{each.search_in}.shares={each.search_for}"
        )


def _initial(init: InitConfig, auto: InitConfig) -> InitConfig:
    return replace(init, kind=auto.kind, scale=init.scale or auto.scale) if init.kind == "auto" else init


def _resolve(
    name: str,
    config: TableConfig,
    default: TableConfig,
    dataset: Dataset,
    multi_hot: dict[str, int],
    auto_init: InitConfig,
    positions: list[Positions],
) -> Table:
    features = [dataset.sparse_feature(feature) for feature in config.feature_names]
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
        updates=RowUpdates(
            pick("l2"),
            default.weight_decay if config.weight_decay is None else config.weight_decay,
            pick("lr_factor"),
            pick("warmup_steps"),
            pick("frozen"),
        ),
        sharding=pick("sharding"),
        pooling_factors=pooling_factors,
        frequencies=merge_frequencies(features, pooling_factors, multi_hot),
        max_ids=max_ids,
        positions=positions,
        tiers=config.tiers or default.tiers,
        is_weighted=any(feature.weighted for feature in features),
    )
    return _compressed(table, config.compression, default.compression)


def _compressed(table: Table, own: CompressionConfig | None, default: CompressionConfig | None) -> Table:
    """Return the table with its compression. The default's compression is used only if the table becomes smaller."""
    config = own or default
    if config is None or kind_of(config) is Whole or table.num_embeddings < config.min_rows:
        return table
    smaller = replace(table, compression=config)
    check_compressed(smaller)
    full = table.num_embeddings * table.embedding_dim
    may_stay_whole = own is None and compressed(smaller).is_for_size
    return table if may_stay_whole and num_numbers(smaller) >= full else smaller
