"""Say in a line what the rows of a compressed table's parts stand for: where it differs, they are another table's (stdlib only)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict

from pipeline.embeddings.compression.partitions import Given, partitions_of
from pipeline.embeddings.compression.physical import leaves
from pipeline.embeddings.table import Table

# Sizes are told by the parts themselves.
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


def signatures(tables: Iterable[Table]) -> dict[str, str]:
    """Of the compressed ones by name; empty where none is."""
    return {table.name: signature(table) for table in tables if table.compression is not None}


def signature(table: Table) -> str:
    config = table.compression
    assert config is not None
    settings = {name: value for name, value in asdict(config).items() if name not in SIZES}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    if config.scheme == "given":
        for partition in partitions_of(table):
            assert isinstance(partition, Given)
            digest.update(",".join(map(str, partition.classes)).encode())
    parts = [
        f"{part.name.removeprefix(table.name + '__')} {part.num_embeddings:,} x {part.embedding_dim}"
        for part in leaves(table)
    ]
    return f"{config.kind} of {table.num_embeddings:,} ids in {', '.join(parts) or 'dense parameters'} (settings {digest.hexdigest()[:8]})"
