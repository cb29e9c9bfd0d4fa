"""Replace compressed tables by the plain tables that store them; count and check these tables (stdlib only)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeline.config.registry import components
from pipeline.embeddings.compression.kind import compressed
from pipeline.embeddings.table import SHARD_WIDTH, Table, by_position
from pipeline.runtime.errors import ConfigError

HEAD_OF_SLOTS = 0.5  # for a table in tiers whose rows are sorted by descending frequency
# Settings that are already determined by the sizes of the parts.
SIZES = (
    "kind",
    "min_rows",
    "ratio",
    "num_rows",
    "bases",
    "num_partitions",
    "max_ids_per_bag",
    "assignments",
    "assignments_file",
)


def physical_tables(tables: Sequence[Table]) -> list[Table]:
    """Return the plain tables that store `tables`, in order. Raises ConfigError if settings do not fit."""
    found: dict[str, Table] = {}
    for table in tables:
        for part in leaves(table):
            if part.name in found:
                raise ConfigError(
                    f"tables.{table.config_name} has a part {part.name!r}, which is also the name of a table of tables.{found[part.name].config_name}"
                    "; rename one of them"
                )
            found[part.name] = part
    return list(found.values())


def leaves(table: Table) -> list[Table]:
    """Return the plain tables that store a table. Its parts may also be compressed."""
    if table.compression is None:
        return [_in_memory_or_tiers(by_position(table))]
    return [leaf for part in compressed(table).parts() for leaf in leaves(part)]


def _in_memory_or_tiers(table: Table) -> Table:
    """Return the table without tiers if it is small or replicated, otherwise unchanged."""
    is_replicated = table.sharding.sharding_types == ["data_parallel"]
    if table.tiers is None:
        return table
    slots = table.tiers.slots
    fits = slots == 1 or slots >= table.num_embeddings or table.num_embeddings < table.tiers.min_rows
    if fits or is_replicated:
        return replace(table, tiers=None)
    if table.tiers.head is not None:
        return table
    in_order = table.frequencies is not None and table.frequencies.by_row
    return replace(table, tiers=replace(table.tiers, head=HEAD_OF_SLOTS if in_order else 0.0))


def num_numbers(table: Table) -> int:
    """Return how many numbers a table stores in its plain tables and in dense parameters."""
    if table.compression is None:
        return table.num_embeddings * table.embedding_dim
    kind = compressed(table)
    return sum(num_numbers(part) for part in kind.parts()) + kind.num_dense_numbers()


def check_compressed(table: Table) -> None:
    """Raise ConfigError if a table's compression does not fit it."""
    kind = compressed(table)
    _check_weights(table)
    if table.positions and not kind.fits_sequences:
        fitting = [name for name, each in components("compression").items() if each.fits_sequences]
        raise ConfigError(
            f"tables.{table.config_name}.compression.kind={kind.config.kind} with the sequence {table.positions[0].feature!r}, whose "
            f"{table.positions[0].num_positions} positions it would split and compose one by one; use "
            f"{' or '.join(sorted(fitting))}"
        )
    if kind.is_product and table.init.kind == "zeros":
        raise ConfigError(
            f"tables.{table.config_name}: init.kind=zeros under {kind.setting} would never train because each factor's gradient is "
            "the product of all other factors; use another init or compression"
        )
    if table.updates.l2 and not leaves(table):
        raise ConfigError(
            f"tables.{table.config_name}.l2={table.updates.l2:g} applies to rows, but {kind.setting} has only dense parameters; use model.l2, "
            f"and tables.{table.config_name}.l2=0"
        )
    if table.init.file is not None:
        raise ConfigError(
            f"tables.{table.config_name}.init.file={table.init.file} has a vector for each id, but {kind.setting} composes or shares "
            f"rows; set tables.{table.config_name}.compression.kind=none"
        )
    if table.updates.frozen and (kind.num_dense_numbers() or any(part.managed for part in leaves(table))):
        raise ConfigError(
            f"tables.{table.config_name}.frozen=true keeps rows unchanged, but {kind.setting} also trains dense parameters or gives "
            f"rows to other ids; use tables.{table.config_name}.compression.kind=none or hash"
        )
    num_numbers(table)  # also checks the dense parameters
    for part in leaves(table):
        if part.embedding_dim % SHARD_WIDTH and part.sharding.sharding_types != ["data_parallel"]:
            raise ConfigError(
                f"tables.{table.config_name}.compression makes a part {part.name!r} of {part.embedding_dim} columns, but FBGEMM's "
                f"sharded tables need a multiple of {SHARD_WIDTH}; use a larger embedding_dim or fewer parts, or "
                f"tables.{table.config_name}.sharding.sharding_types=[data_parallel]"
            )


def _check_weights(table: Table) -> None:
    """Check the table, and its parts that are also compressed."""
    kind = compressed(table)
    if table.is_weighted and not kind.carries_weights:
        fitting = [name for name, each in components("compression").items() if each.carries_weights]
        raise ConfigError(
            f"tables.{table.config_name}.compression: kind={kind.config.kind} would lose the weights of the table's ids "
            f"(data.columns.weighted); use {' or '.join(sorted(fitting))}"
        )
    for part in kind.parts() if table.is_weighted else ():
        if part.compression is not None:
            _check_weights(part)


def signatures(tables: Iterable[Table]) -> dict[str, str]:
    """Return table -> signature. If the signature changes, the rows of the table's parts belong to other ids."""
    return {table.name: signature(table) for table in tables if table.compression is not None}


def signature(table: Table) -> str:
    kind = compressed(table)
    settings = {name: value for name, value in kind.config.to_dict().items() if name not in SIZES}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for classes in kind.assignments():
        digest.update(",".join(map(str, classes)).encode())
    parts = ", ".join(describe_parts(table)) or "dense parameters"
    return f"{kind.config.kind} of {table.num_embeddings:,} ids in {parts} (settings {digest.hexdigest()[:8]})"


def describe_parts(table: Table) -> list[str]:
    """Describe each plain table by the name of the part, its rows and its columns."""
    return [
        f"{part.name.removeprefix(table.name + '__')} {part.num_embeddings:,} x {part.embedding_dim}"
        for part in leaves(table)
    ]
