"""Report savings and costs of compressed tables: bytes compared with the full table, and ids
that share rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.embeddings.compression.kind import CompressionKind, compressed
from pipeline.embeddings.physical import describe_parts, leaves, num_numbers
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.runtime.byte_counts import show_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_COUNTED = 1 << 26  # ids; only the most frequent ids of larger tables are counted
IDS_AT_ONCE = 1 << 20
ITEM_BYTES = {"fp32": 4, "fp16": 2}


@dataclass(frozen=True)
class Collisions:
    """Hold shares of the counted ids and of their lookups (None if lookups are unknown).

    `ids`: ids that share a row. `lookups`: lookups of such ids. `lookups_of_others`: lookups of ids
    that are not the most frequent id of their row; the row is trained mostly for the most frequent
    id.
    """

    counted: int
    ids: float
    lookups: float | None
    lookups_of_others: float | None


@dataclass(frozen=True)
class Savings:
    """Hold the savings of a compressed table, in bytes of weights without optimizer state."""

    table: str
    kind: str
    parts: str
    table_bytes: int
    full_bytes: int
    # bytes of the same number of partitions with balanced bases: k n^(1/k) D numbers
    least_bytes: int | None
    collisions: Collisions | None

    def line(self) -> str:
        text = (
            f"{self.table}: {self.kind}, {self.parts}; {show_bytes(self.table_bytes)} instead of {show_bytes(self.full_bytes)} "
            f"({self.full_bytes / self.table_bytes:.3g} x smaller)"
        )
        if self.least_bytes is not None:
            text += f", with balanced bases {show_bytes(self.least_bytes)}; every id has its own row"
        return text + (f"; {_collided(self.collisions)}" if self.collisions else "")


def savings_of(tables: Iterable[Table]) -> list[Savings]:
    """Measure the savings of the compressed tables. Counting shared rows takes 1 s for a hundred million ids."""
    return [_savings(table) for table in tables if table.compression is not None]


def report_savings(tables: Iterable[Table]) -> tuple[list[str], dict[str, Any]]:
    """Return lines for a log and values for a summary, both empty if no table is compressed."""
    savings = savings_of(tables)
    return describe_savings(savings), as_json(savings)


def describe_savings(savings: list[Savings]) -> list[str]:
    """Return lines for a log, [] if no table is compressed."""
    if not savings:
        return []
    small, full = sum(each.table_bytes for each in savings), sum(each.full_bytes for each in savings)
    head = f"compressed tables: {len(savings)}, {show_bytes(small)} instead of {show_bytes(full)} ({full / small:.3g} x smaller)"
    return [head, *(f"  {each.line()}" for each in savings)]


def as_json(savings: list[Savings]) -> dict[str, Any]:
    return {each.table: {key: value for key, value in asdict(each).items() if key != "table"} for each in savings}


def _savings(table: Table) -> Savings:
    kind = compressed(table)
    item, numbers, parts = ITEM_BYTES[table.data_type], num_numbers(table), leaves(table)
    in_tables = sum(part.num_embeddings * part.embedding_dim for part in parts)
    dense = [kind.describe_dense(numbers - in_tables)] if numbers > in_tables else []
    least = kind.least_numbers()
    return Savings(
        table=table.name,
        kind=kind.label,
        parts=", ".join([*describe_parts(table), *dense]),
        table_bytes=item * in_tables + 4 * (numbers - in_tables),
        full_bytes=item * table.num_embeddings * table.embedding_dim,
        least_bytes=None if least is None else item * least,
        collisions=_count(kind, parts),
    )


def _count(kind: CompressionKind, parts: list[Table]) -> Collisions | None:
    """Count the ids that share rows. Return None for a kind that gives each id a separate row."""
    import numpy as np

    table = kind.table
    if kind.shared_rows(np.zeros(0, np.int64)) is None:
        return None
    num_rows = parts[0].num_embeddings
    counted = min(table.num_embeddings, MAX_COUNTED)
    rows = np.zeros(num_rows, np.int64)
    first_of_row = np.full(num_rows, -1, np.int64)  # ids are sorted by descending frequency
    for begin in range(0, counted, IDS_AT_ONCE):
        ids = np.arange(begin, min(begin + IDS_AT_ONCE, counted))
        shared = kind.shared_rows(ids)
        assert shared is not None
        rows += np.bincount(shared, minlength=len(rows))
        seen, where = np.unique(shared, return_index=True)
        fresh = first_of_row[seen] < 0
        first_of_row[seen[fresh]] = ids[where[fresh]]
    ids_sharing = float(rows[rows > 1].sum() / counted)
    if table.frequencies is None or not table.frequencies.by_row:
        return Collisions(counted, ids_sharing, None, None)
    of_hottest = _lookups_of(first_of_row[rows > 0], table.frequencies)
    alone = _lookups_of(first_of_row[rows == 1], table.frequencies)
    total = float(_upto(np.array([float(counted)]), table.frequencies)[0])
    return Collisions(counted, ids_sharing, 1 - float(alone.sum()) / total, 1 - float(of_hottest.sum()) / total)


def _lookups_of(ids: NDArray[np.int64], frequencies: RowFrequencies) -> NDArray[np.float64]:
    return _upto(ids + 1.0, frequencies) - _upto(ids.astype("float64"), frequencies)


def _upto(ids: NDArray[np.floating[Any]], frequencies: RowFrequencies) -> NDArray[np.float64]:
    import numpy as np

    shares: NDArray[np.float64] = np.interp(ids, frequencies.rows, frequencies.shares)
    return shares


def _collided(found: Collisions) -> str:
    text = f"{100 * found.ids:.1f} % of ids share a row"
    if found.lookups is None or found.lookups_of_others is None:
        return text
    return (
        f"{text}, and {100 * found.lookups:.1f} % of lookups are theirs; {100 * found.lookups_of_others:.1f} % of lookups get "
        "a row whose most frequent id is another"
    )
