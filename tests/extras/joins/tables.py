"""Write rows, and tables of versions to join to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BEGIN = 1_760_000_000  # seconds since 1970


def write_tables(folder: Path, num_rows: int = 3000, num_items: int = 300, versions: int = 6) -> None:
    """Write rows.parquet, items.parquet and users.parquet.

    Items and users change with time. `clicks` is noise, except for the last version of an item,
    which says the label that the item mostly has: a leak.
    """
    generator = np.random.default_rng(5)
    item = generator.integers(0, num_items + 3, num_rows)  # three of them are in no table
    user = generator.integers(0, 25, num_rows)
    time = BEGIN + np.sort(generator.integers(0, 10_000, num_rows))
    luck = generator.random(num_items + 3) < 0.5
    click = np.where(generator.random(num_rows) < 0.9, luck[item], ~luck[item]).astype(np.int64)
    pq.write_table(pa.table({"click": click, "item": item, "user": user, "ts": time}), folder / "rows.parquet")
    rows: list[dict[str, Any]] = []
    for number in range(num_items):
        for version in range(versions):
            rows.append({
                "item": number, "written_at": BEGIN + 10_000 * version // versions + int(generator.integers(0, 300)),
                "genre": f"g{(number + version) % 7}" if number % 5 else None,
                "tags": [f"t{tag}:{tag / 4}" for tag in range((number + version) % 4)], "price": float(number * version) if version else None,
                "clicks": float(generator.integers(0, 3)) if version < versions - 1 else float(1 + luck[number]),
            })  # fmt: skip
    generator.shuffle(rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "items.parquet")
    users = [
        {"user": number, "seen_from": BEGIN - 5 + 1500 * version, "history": generator.integers(0, num_items, 8 * version).tolist(),
         "emb": generator.random(3).tolist()}
        for number in range(25) for version in range(6)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(users), folder / "users.parquet")


def join_beforehand(folder: Path) -> Path:
    """Write joined.parquet, the rows with both tables joined as of each row's time, by DuckDB."""
    rows, items, users = (f"read_parquet('{folder / name}.parquet')" for name in ("rows", "items", "users"))
    path = folder / "joined.parquet"
    duckdb.sql(
        f"""COPY (SELECT r.*, i.genre, i.price, i.clicks, i.tags, u.history, u.emb
            FROM (SELECT *, row_number() OVER () AS number FROM {rows}) r
            ASOF LEFT JOIN {items} i ON r.item = i.item AND r.ts >= i.written_at
            ASOF LEFT JOIN {users} u ON r.user = u.user AND r.ts >= u.seen_from
            ORDER BY r.number) TO '{path}' (FORMAT parquet)"""
    )
    return path
