"""Define the interface of a model that predicts and serves: a version, raw columns, and scores of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import pyarrow as pa

from pipeline.config.columns import ColumnsConfig
from pipeline.data.raw.blocks import QuarantinedRow
from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.task_quality import ServedTask


@dataclass(frozen=True)
class ColumnLists:
    """`columns` are in the order of `schema`, with one value per row: number, text, list of text, or None."""

    schema: pa.Schema
    columns: Sequence[Sequence[Any]]
    num_rows: int

    def slice(self, begin: int, length: int) -> ColumnLists:
        if begin == 0 and length >= self.num_rows:
            return self
        columns = [column[begin : begin + length] for column in self.columns]
        return ColumnLists(self.schema, columns, max(0, min(length, self.num_rows - begin)))

    def to_table(self) -> pa.Table:
        """Return the rows as a table. Raises ServingError for text that is not valid Unicode."""
        arrays = [pa.array(column, field.type) for field, column in zip(self.schema, self.columns, strict=True)]
        return pa.table(arrays, schema=self.schema)


Rows: TypeAlias = pa.Table | ColumnLists


def names_of(rows: Rows) -> list[str]:
    return list(rows.schema.names)


@dataclass(frozen=True)
class UserItems:
    """The items that one user is scored with. They mean a full row for each item, and have the
    same scores.

    `user`: one row with the columns of the user. `items`: a row for each item, with all other columns.
    """

    user: Rows
    items: Rows

    def __post_init__(self) -> None:
        if self.user.num_rows != 1:
            raise ServingError(f"the user has {self.user.num_rows} rows: give one row for all its items")
        if not self.items.num_rows:
            raise ServingError("the user has no items: give at least one item")
        of_user = set(names_of(self.user))
        if both := [name for name in names_of(self.items) if name in of_user]:
            raise ServingError(
                f"column {both[0]!r} is given for the user and for the items: leave it out of one of them"
            )

    @property
    def num_rows(self) -> int:
        return int(self.items.num_rows)

    def slice(self, begin: int, length: int) -> UserItems:
        return self if length >= self.num_rows and not begin else UserItems(self.user, self.items.slice(begin, length))

    def to_table(self) -> pa.Table:
        """Return the full rows."""
        first, items = pa.array(np.zeros(self.num_rows, np.int64)), as_table(self.items)
        columns = {name: as_table(self.user)[name].take(first) for name in names_of(self.user)}
        return pa.table({**columns, **{name: items[name] for name in items.column_names}})


@dataclass(frozen=True)
class JoinedRows:
    """Rows of several requests, not all of which are full rows."""

    parts: tuple[Rows | UserItems, ...]

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    def slice(self, begin: int, length: int) -> JoinedRows:
        chosen, first = [], 0
        for part in self.parts:
            start, end = max(begin, first), min(begin + length, first + part.num_rows)
            if start < end:
                chosen.append(part.slice(start - first, end - start))
            first += part.num_rows
        return JoinedRows(tuple(chosen))

    def to_table(self) -> pa.Table:
        tables = [as_table(part) for part in self.parts]
        names = tables[0].column_names
        return concat_rows([with_text(table, names).select(names) for table in tables])


MAX_DIVISIONS = 16  # divisions of the columns into columns of users and of items, which are kept
AnyRows: TypeAlias = Rows | UserItems | JoinedRows


def as_table(rows: AnyRows) -> pa.Table:
    return rows if isinstance(rows, pa.Table) else rows.to_table()


def with_text(table: pa.Table, names: Collection[str]) -> pa.Table:
    """Return the table with the whole numbers of these columns as text, spelled as prepare does."""
    numbers = {field.name for field in table.schema if pa.types.is_integer(field.type)}.intersection(names)
    if not numbers:
        return table
    schema = pa.schema([field.with_type(pa.string()) if field.name in numbers else field for field in table.schema])
    return table.cast(schema)


def join_rows(parts: Sequence[AnyRows]) -> AnyRows:
    """Join the rows of several requests."""
    if len(parts) == 1:
        return parts[0]
    if not any(isinstance(part, UserItems | JoinedRows) for part in parts):
        return concat_rows(cast(Sequence[Rows], parts))
    return JoinedRows(tuple(chain.from_iterable(getattr(part, "parts", (part,)) for part in parts)))


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Join rows of one schema. A category column may have whole numbers in some parts and text in others."""
    if len(parts) == 1:
        return parts[0]
    lists = [part for part in parts if isinstance(part, ColumnLists)]
    if len(lists) < len(parts):
        tables = [as_table(part) for part in parts]
        if any(table.schema != tables[0].schema for table in tables):
            tables = [with_text(table, table.column_names) for table in tables]
        return pa.concat_tables(tables)
    columns = [list(chain.from_iterable(columns)) for columns in zip(*(part.columns for part in lists), strict=True)]
    return ColumnLists(lists[0].schema, columns, sum(part.num_rows for part in lists))


LeftOut: TypeAlias = Mapping[str, Sequence[int]]  # column -> numbers of the rows that have no value in it
CountIds: TypeAlias = Callable[
    [str, int, int], None
]  # key, ids that were looked up, those among them that were not found
Filled = TypeVar("Filled", bound=AnyRows)


class FeatureTables(Protocol):
    """Tables of raw columns by id. Several threads may use them."""

    def asked(self, columns: ColumnsConfig) -> ColumnsConfig:
        """Return `columns`, and the ids that a request may have in addition."""
        ...

    def fillable(self, names: Collection[str]) -> set[str]:
        """Return the columns that rows may leave out if they have the columns `names`."""
        ...

    def fill(self, rows: Filled, left_out: LeftOut | None = None, count: CountIds | None = None) -> Filled:
        """Return the rows with the columns that they lack and their ids determine. An unknown id has missing
        values. left_out: cells of columns that the rows have, which are filled too.
        """
        ...


def tables_of(scorer: object) -> FeatureTables | None:
    """Return the feature tables of a scorer; None if it has none."""
    tables: FeatureTables | None = getattr(scorer, "feature_tables", None)
    return tables


def asked_columns(scorer: Scorer) -> ColumnsConfig:
    """Return the columns that a request may have."""
    tables = tables_of(scorer)
    return scorer.columns if tables is None else tables.asked(scorer.columns)


SCORE = "score"


class ScoredRows(Protocol):
    """`scores` float32 [num_rows] or [num_rows, tasks]. A refused row has NaN; its `line` counts from 1."""

    @property
    def scores(self) -> np.ndarray: ...

    @property
    def bad_rows(self) -> Sequence[QuarantinedRow]: ...

    @property
    def row_zero(self) -> Mapping[str, Sequence[int]]:
        """Return feature -> lookups, and lookups of row 0, which means unknown and missing values."""


class Scorer(Protocol):
    """A model that scores rows. Only one thread may call score()."""

    @property
    def version(self) -> str: ...

    @property
    def columns(self) -> ColumnsConfig: ...

    @property
    def tasks(self) -> Sequence[ServedTask]:
        """Return what the columns of scores are; empty if there is one score per row, a probability."""
        ...

    def score(self, rows: AnyRows) -> ScoredRows:
        """Score rows, which have schema_of(self.columns). A retriever takes Queries of such rows."""
        ...

    def unusual(self, row_zero: Mapping[str, Sequence[int]]) -> str:
        """Return a warning if far more values are unknown than in the validation rows; otherwise ""."""
        ...


def retrieves(scorer: object) -> bool:
    """Return True if it finds items instead of scores. It then has request_reader(), answer(), try_out() and items."""
    return bool(getattr(scorer, "retrieves_items", False))


@dataclass(frozen=True)
class RefusedRow:
    """A row without a score. `row` counts from 0 in the rows that were given to the scorer."""

    row: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {"row": self.row, "reason": self.reason}


def refused_rows(scored: ScoredRows) -> list[RefusedRow]:
    """Return the rows that the scorer refused, and the rows that have no number although they were not refused."""
    said = {bad.line - 1: bad.reason for bad in scored.bad_rows}
    without = np.flatnonzero(~has_scores(scored.scores))
    return [RefusedRow(int(row), said.get(int(row), "the model gives no finite score")) for row in without]


def has_scores(scores: np.ndarray) -> np.ndarray:
    """Return [num_rows] bool: True if all scores of a row are numbers; for objects, True if there is one."""
    if scores.dtype == object:
        return np.array([score is not None for score in scores], np.bool_)
    return np.asarray(np.isfinite(scores).reshape(len(scores), -1 if scores.size else 1).all(axis=1))


def score_columns(tasks: Sequence[ServedTask]) -> list[str]:
    """Return the names of the columns of scores in tables: score, or with several labels score_<label>."""
    return [f"{SCORE}_{task.name}" for task in tasks] or [SCORE]


class Output(Protocol):
    """The columns that a prediction writes: scores, vectors, or the best items of each row."""

    fields: list[pa.Field]

    def empty(self, num_rows: int) -> np.ndarray:
        """Return an array for the scores of `num_rows` rows in which no row has a score yet."""

    def arrays(self, scores: np.ndarray, without: np.ndarray) -> Sequence[pa.Array]:
        """Return a column for each of `fields`. Rows in `without`, bool [num_rows], are null."""


class ScoreOutput:
    """One number per row, or one number per row and label."""

    def __init__(self, names: Sequence[str]) -> None:
        self.fields = [pa.field(name, pa.float32()) for name in names]

    def empty(self, num_rows: int) -> np.ndarray:
        return np.full((num_rows, len(self.fields)), np.nan, np.float32)

    def arrays(self, scores: np.ndarray, without: np.ndarray) -> Sequence[pa.Array]:
        return [pa.array(scores[:, number], mask=without) for number in range(len(self.fields))]


def output_of(scorer: Scorer) -> Output:
    """Return the scorer's `output` if there is one, otherwise columns of scores."""
    own: Any = getattr(scorer, "output", None)
    return own if own is not None else ScoreOutput(score_columns(scorer.tasks))


def schema_of(columns: ColumnsConfig) -> pa.Schema:
    """Return the types of raw columns for scoring: the types that prepare reads, without labels."""
    fields = [pa.field(name, pa.float64()) for name in columns.dense]
    fields += [pa.field(name, pa.string()) for name in columns.sparse]
    fields += [pa.field(name, pa.list_(pa.string())) for name in columns.lists]
    fields += [pa.field(name, pa.list_(pa.float64())) for name in columns.vectors]
    return pa.schema(fields)
