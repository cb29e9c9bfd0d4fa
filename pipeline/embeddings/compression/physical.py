"""Turn logical tables into the plain tables that the EmbeddingBagCollection holds (stdlib only).

A compressed table `cat_3` is parts `cat_3__<part>` of features `<feature>__<part>`: to the planner, to sharding, to
checkpoints and quantization these are tables as all others. The ids of the parts are made by id_splitter, and the parts'
rows become the table's by composition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeline.config.tables import InitConfig
from pipeline.embeddings.compression.frequency_split import hot_and_cold
from pipeline.embeddings.compression.managed_collision import managed_part
from pipeline.embeddings.compression.part_frequencies import frequencies_of_block, frequencies_of_part, share_of_block
from pipeline.embeddings.compression.partitions import Digit, part_dims, partitions_of
from pipeline.embeddings.compression.sizes import (
    DIM_STEP,
    blocks_of,
    network_numbers,
    paths_of,
    projection_numbers,
    tensor_train_of,
)
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError


def physical_tables(tables: Sequence[Table]) -> list[Table]:
    """The plain tables of `tables`, in their order; a table that is not compressed is its own.

    Raises:
        ConfigError: settings that do not fit a table, or two tables of one name.
    """
    found: dict[str, Table] = {}
    for table in tables:
        for part in leaves(table):
            if part.name in found:
                raise ConfigError(
                    f"tables.{table.name} has a part {part.name!r}, and so is a table of tables.{found[part.name].config_name} "
                    "called; rename one of them"
                )
            found[part.name] = part
    return list(found.values())


def leaves(table: Table) -> list[Table]:
    """The plain tables of one table; parts may be compressed themselves."""
    if table.compression is None:
        return [table]
    return [leaf for part in PARTS[table.compression.kind](table) for leaf in leaves(part)]


def num_numbers(table: Table) -> int:
    """That a table takes: of its plain tables, and of the dense parameters beside them."""
    if table.compression is None:
        return table.num_embeddings * table.embedding_dim
    kind = table.compression.kind
    return sum(num_numbers(part) for part in PARTS[kind](table)) + DENSE_NUMBERS.get(kind, lambda _: 0)(table)


def check_compressed(table: Table) -> None:
    """Raises ConfigError where a table's compression does not fit it."""
    config = table.compression
    assert config is not None
    is_product = config.kind == "tensor_train" or (
        config.kind == "quotient_remainder" and config.operation == "multiply"
    )
    if is_product and table.init.kind == "zeros":
        raise ConfigError(
            f"tables.{table.name}: init.kind=zeros under {_describe(table)} would never train, for each factor's gradient is "
            "the product of the others; use another init or compression"
        )
    num_numbers(table)  # what lies beside the parts is checked too
    for part in leaves(table):
        if part.embedding_dim % DIM_STEP and part.sharding.sharding_types != ["data_parallel"]:
            raise ConfigError(
                f"tables.{table.name}.compression makes a part {part.name!r} of {part.embedding_dim} columns, and FBGEMM's "
                f"sharded tables want a multiple of {DIM_STEP}; use a larger embedding_dim or fewer parts, or "
                f"tables.{table.name}.sharding.sharding_types=[data_parallel]"
            )


def feature_of(feature: str, part: str, position: int | None = None) -> str:
    """The feature that a part of a table embeds; `position`: of an id in its bag, where ids are composed one by one."""
    return f"{feature}__{part}" if position is None else f"{feature}__{part}_{position}"


def part_of(
    table: Table,
    part: str,
    num_rows: int,
    dim: int,
    std: float,
    frequencies: RowFrequencies | None,
    *,
    share: float = 1.0,
    positions: bool = False,
) -> Table:
    """A part that looks up `share` of the table's ids; its rows are drawn with standard deviation `std`.

    Parts add up: a table's mean is the sum divided by the bag's length, after composing. `positions`: one feature for each
    place in a bag.
    """
    features, factors = [], []
    for index, (feature, factor) in enumerate(zip(table.feature_names, table.pooling_factors, strict=True)):
        places = places_of(table, index) if positions else [None]
        features += [feature_of(feature, part, place) for place in places]
        factors += [share * factor / len(places)] * len(places)
    return replace(
        table,
        name=f"{table.name}__{part}",
        num_embeddings=num_rows,
        embedding_dim=dim,
        feature_names=features,
        pooling="sum",
        init=drawn_with(table.init, std),
        pooling_factors=factors,
        frequencies=frequencies,
        compression=None,
        max_ids=[],
        part_of=table.config_name,
        rows_of=None,
    )


def places_of(table: Table, index: int) -> list[int] | list[None]:
    """The places in a bag of the table's feature number `index`; [None] where there is one id a sample.

    Raises:
        ConfigError: lists of any length.
    """
    config = table.compression
    assert config is not None
    limit = table.max_ids[index] if index < len(table.max_ids) else 1
    if limit is None:
        limit = config.max_ids_per_bag
    if limit is None:
        raise ConfigError(
            f"tables.{table.name}: feature {table.feature_names[index]!r} has lists, whose ids {_describe(table)} composes one "
            f"by one: say how long they get by tables.{table.name}.compression.max_ids_per_bag=<ids>, or use operation=add "
            "or concatenate, which pool first"
        )
    return [None] if limit == 1 else list(range(limit))


def composes_each_id(table: Table) -> bool:
    """Whether the parts of each id are composed before the bag is pooled; a sum of products is no product of sums."""
    config = table.compression
    assert config is not None
    if config.kind == "path_based":
        return True
    return config.kind == "quotient_remainder" and config.operation == "multiply" and len(partitions_of(table)) > 1


def row_std(table: Table) -> float:
    """The standard deviation of a full table's numbers as drawn."""
    init = table.init
    if init.kind == "zeros":
        return 0.0
    if init.kind == "normal":
        return init.scale or 1 / math.sqrt(table.embedding_dim)
    return (init.scale or 1 / math.sqrt(table.num_embeddings)) / math.sqrt(3)


def drawn_with(init: InitConfig, std: float) -> InitConfig:
    return (
        InitConfig("zeros") if not std else InitConfig(init.kind, std * (math.sqrt(3) if init.kind == "uniform" else 1))
    )


def _describe(table: Table) -> str:
    config = table.compression
    assert config is not None
    return f"operation={config.operation}" if config.kind == "quotient_remainder" else f"kind={config.kind}"


def _partition_parts(table: Table) -> list[Table]:
    """Composed rows have the spread that the table's init asks for."""
    partitions, config = partitions_of(table), table.compression
    assert config is not None
    dims, std = part_dims(table, len(partitions)), row_std(table)
    if len(partitions) > 1 and config.operation == "add":
        std /= math.sqrt(len(partitions))
    elif len(partitions) > 1 and config.operation == "multiply":
        std = std ** (1 / len(partitions))
    return [
        part_of(
            table, partition.part, partition.num_classes, dim, std,
            frequencies_of_part(table.frequencies, partition, table.num_embeddings), positions=composes_each_id(table),
        )
        for partition, dim in zip(partitions, dims, strict=True)
    ]  # fmt: skip


def _path_parts(table: Table) -> list[Table]:
    """The base table; the networks are dense parameters."""
    num_rows = paths_of(table).num_rows
    curve = frequencies_of_part(table.frequencies, Digit("remainder", num_rows), table.num_embeddings)
    return [part_of(table, "remainder", num_rows, table.embedding_dim, row_std(table), curve, positions=True)]


def _path_numbers(table: Table) -> int:
    paths = paths_of(table)
    return paths.num_buckets * network_numbers(table.embedding_dim, paths.hidden_size)


def _block_parts(table: Table) -> list[Table]:
    return [
        part_of(
            table, f"block_{index}", block.num_rows, block.dim, row_std(table),
            frequencies_of_block(table.frequencies, block.first, block.end),
            share=share_of_block(table.frequencies, block.first, block.end, table.num_embeddings),
        )
        for index, block in enumerate(blocks_of(table))
    ]  # fmt: skip


def _block_numbers(table: Table) -> int:
    return sum(projection_numbers(block, table.embedding_dim) for block in blocks_of(table))


# By kind: the parts of a table, and how many numbers lie beside them in dense parameters.
PARTS: dict[str, Callable[[Table], list[Table]]] = {
    "hash": _partition_parts,
    "quotient_remainder": _partition_parts,
    "path_based": _path_parts,
    "mixed_dimension": _block_parts,
    "tensor_train": lambda _: [],
    "frequency_split": hot_and_cold,
    "managed_collision": managed_part,
}
DENSE_NUMBERS: dict[str, Callable[[Table], int]] = {
    "path_based": _path_numbers,
    "mixed_dimension": _block_numbers,
    "tensor_train": lambda table: tensor_train_of(table).num_numbers,
}
