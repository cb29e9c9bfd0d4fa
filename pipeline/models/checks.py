"""Check the sizes and features of a model config against the tables (stdlib only)."""

from __future__ import annotations

from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError, check_at_least


def check_layer_sizes(name: str, sizes: list[int], least: int = 1) -> None:
    if len(sizes) < least:
        raise ConfigError(f"{name}={sizes} needs at least {least} layer(s)")
    for size in sizes:
        check_at_least(f"each size in {name}", size, 1)


def check_one_dim(tables: list[Table]) -> int:
    """Return the embedding_dim of all tables. Raises ConfigError if tables differ or there are none."""
    if not tables:
        raise ConfigError(
            "the model reads tables of categorical features, and the data set has 0; name some in "
            "data.columns.sparse, or choose a model that reads dense features only, such as "
            "model=wide_deep"
        )
    dims = sorted({table.embedding_dim for table in tables})
    if len(dims) > 1:
        odd = next(table for table in tables if table.embedding_dim != tables[0].embedding_dim)
        raise ConfigError(
            f"the model wants one embedding_dim, the tables have {dims} (tables.{tables[0].config_name}: "
            f"{tables[0].embedding_dim}, tables.{odd.config_name}: {odd.embedding_dim}); set them alike"
        )
    return dims[0]


def check_least_dim(tables: list[Table], least: int, why: str) -> None:
    for table in tables:
        if table.embedding_dim < least:
            raise ConfigError(
                f"tables.{table.config_name}.embedding_dim={table.embedding_dim}, but {why}; set it to {least} at least"
            )


def dims_of_features(tables: list[Table]) -> dict[str, int]:
    """Return the embedding_dim of each feature's table."""
    return {feature: table.embedding_dim for table in tables for feature in table.feature_names}
