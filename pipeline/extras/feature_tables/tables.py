"""Look up raw columns by id in the files of an artifact, and add them to rows that leave them out.

A file is mapped into memory: servers on one machine share its pages. Its ids are sorted by their
hashes, which are in the file, so an id is found by a binary search.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.config.columns import ColumnsConfig
from pipeline.config.transforms import TEXT as CATEGORY
from pipeline.data.raw.value_types import spelled
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.arrow_messages import FILE_MAGIC, has_compression
from pipeline.serving.artifact.manifest import ArtifactError
from pipeline.serving.scoring.artifact_files import ArtifactFiles, parts_of
from pipeline.serving.scoring.scorer import (
    ColumnLists,
    CountIds,
    Filled,
    JoinedRows,
    LeftOut,
    Rows,
    UserItems,
    names_of,
    schema_of,
)

HASH = "\0hash"  # the first column of a file; no raw column has this name


def hashes_of(ids: Sequence[str]) -> NDArray[np.uint64]:
    """Return [len(ids)] hashes of texts. For one id this takes a microsecond, which hash_text does not."""
    digests = b"".join([blake2b(each.encode(), digest_size=8).digest() for each in ids])
    return np.frombuffer(digests, "<u8").astype(np.uint64, copy=False)


@dataclass
class FeatureTable:
    """The raw columns of each id. `hashes` ascend; `longest_run`: ids of one hash, at most. The columns of
    `values` have the types of `types`, or the same with longer offsets.
    """

    key: str
    hashes: NDArray[np.uint64]
    ids: pa.Array
    values: pa.RecordBatch
    types: pa.Schema
    longest_run: int

    def __post_init__(self) -> None:
        self.columns: dict[str, pa.Array] = dict(zip(self.types.names, self.values.columns, strict=True))
        self.fields: dict[str, pa.Field] = {field.name: field for field in self.types}

    def rows_of(self, ids: Sequence[str | None]) -> NDArray[np.int64]:
        """Return [len(ids)]: the row of each id; -1 if the table does not have it, or it is missing."""
        found = np.full(len(ids), -1)
        hashes = hashes_of([each or "" for each in ids])
        first = np.searchsorted(self.hashes, hashes)
        for step in range(self.longest_run):
            rows = np.minimum(first + step, len(self.hashes) - 1)
            for place, text in enumerate(self.ids.take(pa.array(rows)).to_pylist()):
                if text == ids[place]:
                    found[place] = rows[place]
        return found

    def take(self, names: Sequence[str], rows: NDArray[np.int64]) -> list[pa.Array]:
        """Return the columns `names` of these rows; missing values for row -1."""
        return list(self.values.select(list(names)).take(pa.array(rows, mask=rows < 0)).columns)

    def lists(self, names: Sequence[str], rows: NDArray[np.int64]) -> list[list[Any]]:
        """Return the same as Python values. For one row, as of a user, this is faster than take."""
        if len(rows) > 1:
            return [column.to_pylist() for column in self.take(names, rows)]
        row = int(rows[0]) if len(rows) else -1
        if row < 0:
            return [[None] * len(rows)] * len(names)
        return [[self.columns[name][row].as_py()] for name in names]


class Tables:
    """The feature tables of one artifact, for scorers that read `columns`. Implements FeatureTables."""

    def __init__(self, tables: Sequence[FeatureTable], columns: ColumnsConfig) -> None:
        self._tables = list(tables)
        self._new_keys = [each.key for each in tables if each.key not in schema_of(columns).names]

    def asked(self, columns: ColumnsConfig) -> ColumnsConfig:
        """Return the columns, and ids that the model does not read as categories."""
        return replace(columns, sparse=[*columns.sparse, *self._new_keys]) if self._new_keys else columns

    def fillable(self, names: Collection[str]) -> set[str]:
        """Return the columns that rows may leave out if they have the columns `names`."""
        return {name for each in self._tables if each.key in names for name in each.fields}

    def fill(self, rows: Filled, left_out: LeftOut | None = None, count: CountIds | None = None) -> Filled:
        """Return the rows with the columns that they lack and their ids determine. An unknown id has missing
        values. left_out: cells of columns that the rows have, which are filled too.
        """
        found: Any = rows
        if isinstance(rows, JoinedRows):
            return JoinedRows(tuple(self.fill(part, None, count) for part in rows.parts))  # type: ignore[return-value]
        for table in self._tables:
            fill = _fill_user_items if isinstance(rows, UserItems) else _fill_rows
            found = fill(table, found, left_out or {}, count)
        filled: Filled = found
        return filled


def _fill_rows(table: FeatureTable, rows: Rows, left_out: LeftOut, count: CountIds | None) -> Rows:
    names = names_of(rows)
    absent, cells = _left_out(table, names, left_out)
    if table.key not in names or not (absent or cells):
        return rows
    return _with(table, rows, _ids_in(rows, table.key), absent, cells, count)


def _fill_user_items(table: FeatureTable, rows: UserItems, left_out: LeftOut, count: CountIds | None) -> UserItems:
    """Fill the columns of the user or of the items, whichever has the id."""
    of_user, of_items = names_of(rows.user), names_of(rows.items)
    absent, cells = _left_out(table, [*of_user, *of_items], left_out)
    if not (absent or cells):
        return rows
    user, items = rows.user, rows.items
    if table.key in of_items:
        items = _with(table, items, _ids_in(items, table.key), absent, cells, count)
    elif table.key in of_user:
        ids = _ids_in(user, table.key)
        if absent:
            user = _with(table, user, ids, absent, {}, count)
        if cells:
            items = _with(table, items, ids * items.num_rows, [], cells, count)
    return UserItems(user, items)


def _left_out(table: FeatureTable, names: Sequence[str], left_out: LeftOut) -> tuple[list[str], LeftOut]:
    """Return the table's columns that are not in `names`, and the cells of its other columns."""
    absent = [name for name in table.fields if name not in names]
    return absent, {name: left_out[name] for name in table.fields if name in left_out} if left_out else {}


def _ids_in(rows: Rows, key: str) -> list[str | None]:
    if isinstance(rows, ColumnLists):
        return list(rows.columns[rows.schema.get_field_index(key)])
    texts: list[str | None] = spelled(rows[key], CATEGORY).to_pylist()
    return texts


def _with(
    table: FeatureTable, rows: Rows, ids: Sequence[str | None], absent: Sequence[str], cells: LeftOut, count: CountIds | None
) -> Rows:  # fmt: skip
    """Return the rows with the columns `absent` added and with the cells filled. ids: one for each row."""
    found = table.rows_of(ids)
    if count is not None:
        count(table.key, len(found), int((found < 0).sum()))
    if not isinstance(rows, ColumnLists):
        for name, column in zip(absent, table.take(absent, found), strict=True):
            rows = rows.append_column(name, column.cast(table.fields[name].type))
        return rows
    schema = pa.schema([*rows.schema, *(table.fields[name] for name in absent)])
    columns = [*rows.columns, *table.lists(absent, found)]
    for name, places in cells.items():
        number = schema.get_field_index(name)
        columns[number] = column = list(columns[number])
        (values,) = table.lists([name], found[list(places)])
        for place, value in zip(places, values, strict=True):
            column[place] = value
    return ColumnLists(schema, columns, rows.num_rows)


def open_feature_tables(files: ArtifactFiles, columns: ColumnsConfig) -> Tables:
    """Open the tables of an artifact, each verified. Columns that are not in `columns` are left out: the other tower
    of a two-tower reads them. Raises ArtifactError if a file is damaged, or not a feature table.
    """
    types = schema_of(columns)
    tables = [_open(files, key, file, types) for key, file in files.manifest.feature_tables.items()]
    return Tables([each for each in tables if each.values.num_columns], columns)


def _open(files: ArtifactFiles, key: str, file: str, types: pa.Schema) -> FeatureTable:
    with parts_of(f"{file}, the feature table of {key!r},"):
        batch = stored_batch(files, key, file)
        hashes, names = batch.column(0).to_numpy(), [name for name in batch.schema.names[2:] if name in types.names]
        if (hashes[1:] < hashes[:-1]).any():
            raise ArtifactError(f"{file}: the hashes do not ascend; export again")
        own = pa.schema([types.field(name) for name in names])
        if other := [each.name for each in own if _widest(batch.schema.field(each.name).type) != _widest(each.type)]:
            raise ArtifactError(f"{file}: column {other[0]!r} has another type than the model reads; export again")
        return FeatureTable(key, hashes, batch.column(1), batch.select(names), own, _longest_run(hashes))


def stored_batch(files: ArtifactFiles, key: str, file: str) -> pa.RecordBatch:
    """Return the content of a feature table's file: hashes, ids, and columns; mapped into memory if it is local. Raises
    ArtifactError.
    """
    if storage.is_local(path := files.path(file)):
        content = pa.memory_map(files.checked(file)).read_buffer()
    else:
        content = pa.py_buffer(files.content(file))
    stream = content[len(FILE_MAGIC) :]  # the footer is not read, because it could point to other bytes
    if content[: len(FILE_MAGIC)].to_pybytes() != FILE_MAGIC or has_compression(stream):
        raise ArtifactError(f"{path} is not an Arrow file that can be mapped; export again")
    with pa.ipc.open_stream(stream) as reader:
        batches = list(reader)
    schema = reader.schema
    kinds = [_widest(kind) for kind in schema.types[:2]]
    if len(batches) != 1 or schema.names[:2] != [HASH, key] or kinds != [pa.uint64(), pa.large_string()]:
        raise ArtifactError(f"{path} is not a feature table; export again")
    (batch,) = batches
    batch.validate(full=True)
    if not batch.num_rows or batch.column(0).null_count or batch.column(1).null_count:
        raise ArtifactError(f"{path} has no rows, or rows without id; export again")
    return batch


def _widest(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_widest(kind.value_type))
    return kind


def _longest_run(hashes: NDArray[np.uint64]) -> int:
    """Return the largest number of equal neighbours. More than 1 needs billions of ids."""
    longest = 1
    while (hashes[longest:] == hashes[:-longest]).any():
        longest += 1
    return longest
