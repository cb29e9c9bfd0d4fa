"""Read a request's body, JSON or Arrow, as raw rows of one schema, or name the row and column that
is wrong.

JSON {"rows": [{"<column>": value, ...}, ...]}: a column that a row leaves out has a missing value.
Arrow: an IPC stream of record batches with every column; compression is refused, because the
unpacked size is not known.
A user with items, JSON {"user": {...}, "items": [{...}, ...]}: the user's columns are sent once.
Columns that the artifact's feature tables have may be left out: the tables fill them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET, UnsetType

from pipeline.config.columns import ColumnsConfig
from pipeline.config.serving import LimitsConfig
from pipeline.config.transforms import LIST, NUMBER, VECTOR
from pipeline.config.transforms import TEXT as CATEGORY
from pipeline.data.raw.value_types import TEXT, VIEWS, is_list, kind_of, plain, spelled, value_to_text, why_not_read
from pipeline.runtime.errors import did_you_mean
from pipeline.runtime.storage.arrow_messages import has_compression
from pipeline.serving.http.arrow_bounds import EXPANSION, bytes_before_reading, is_flat, text_bytes
from pipeline.serving.http.arrow_users import fields_by_user, is_by_user, split_by_user
from pipeline.serving.scoring.feature_ids import MIN_ROWS, is_whole_number
from pipeline.serving.scoring.scorer import (
    MAX_DIVISIONS,
    AnyRows,
    ColumnLists,
    CountIds,
    FeatureTables,
    JoinedRows,
    LeftOut,
    UserItems,
    names_of,
    schema_of,
)

JSON_TYPE = "application/json"
USUAL_K = 10  # items of a request to /retrieve that does not say how many
ARROW_TYPE = "application/vnd.apache.arrow.stream"
BARE_ROW = '; rows is missing: send {"rows": [{...}]}'
NO_ROWS = 'the body has neither rows nor a user: send {"rows": [{...}]}, or {"user": {...}, "items": [{...}]}'
OUT_OF_RANGE = "Number out of range"  # msgspec's words
UNTYPED = msgspec.json.Decoder(float_hook=float)
UNFIT = re.compile(r'["\\\x00-\x1f]')  # in the name of a field


Sent = TypeVar("Sent", ColumnLists, UserItems)  # a request as JSON


class BadRequest(Exception):
    """An error in a request, which the client must fix. `status` is 4xx."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.more = status, message, more


class CountedRows(msgspec.Struct):
    """A request body whose rows are counted before they are decoded."""

    rows: list[msgspec.Raw] = []
    items: list[msgspec.Raw] = []


COUNTED = msgspec.json.Decoder(CountedRows)


class RequestReader:
    """Reads requests for the columns of one artifact. Several threads may use it."""

    def __init__(
        self,
        columns: ColumnsConfig,
        limits: LimitsConfig,
        more: Sequence[tuple[str, Any, Any]] | None = None,
        tables: FeatureTables | None = None,
    ) -> None:
        """more: fields of a body in addition to its rows, as (name, type, default). A body with them
        has no user with items. tables: they fill what requests leave out.
        """
        self._tables, self._read_schema = tables, schema_of(columns)
        self.count_ids: CountIds | None = None
        self._divided = lru_cache(MAX_DIVISIONS)(self._divide)
        columns = columns if tables is None else tables.asked(columns)
        self.columns, self.schema, self.limits = columns, schema_of(columns), limits
        self._field_names = _field_names(self.schema.names)
        body = _body_type(columns, limits, more, self._field_names, tables is not None)
        self._decoder = msgspec.json.Decoder(body)
        self._names = [*self.schema.names, *(name for name, *_ in more or ())]
        self._reads_users = more is None
        self._readers = [_reader_of(field.type) for field in self.schema]

    def read(self, body: bytes, content_type: str) -> AnyRows:
        """Return the rows with the columns that the model reads; category columns may be int64. Raises BadRequest."""
        if content_type == JSON_TYPE:
            return self.read_json(body)
        if content_type == ARROW_TYPE:
            return self.read_arrow(body)
        found = f"Content-Type {content_type!r}" if content_type else "a body without a Content-Type"
        raise BadRequest(415, f"{found} is not read: send {JSON_TYPE} or {ARROW_TYPE}")

    def read_json(self, body: bytes) -> ColumnLists | UserItems:
        asked = self.decode(body)
        given = [name for name in ("rows", "user", "items") if getattr(asked, name) is not UNSET]
        if given == ["rows"]:
            return self.lists_of(asked.rows)
        if not given:
            raise BadRequest(422, NO_ROWS)
        if "rows" in given:
            raise BadRequest(422, f"the body has rows and {given[1]}: send rows, or a user with items")
        if len(given) == 1:
            other = "items" if given == ["user"] else "user"
            raise BadRequest(422, f"the body has {given[0]} and no {other}: a user is scored with items")
        return self._user_items(asked.user, asked.items)

    def _user_items(self, user: Any, items: Sequence[Any]) -> UserItems:
        """Return the rows of a request by user. A column that no item has a value for is the user's.
        Raises BadRequest.
        """
        if not items:
            raise BadRequest(422, "items is empty: send at least one item")
        of_user = msgspec.structs.astuple(user)
        given = [value is not UNSET for value in of_user]
        values = list(zip(*map(msgspec.structs.astuple, items), strict=True))
        left_out: dict[str, Sequence[int]] = {}
        found = self._columns_of_items(values, given, left_out)
        is_items = [column is not None for column in found]
        user_columns = [(None if value is UNSET else value,) for value in of_user]
        # A column that neither the user nor an item has may be in a table.
        is_users = [not is_item for is_item in is_items] if self._tables is None else given
        rows = UserItems(
            self.lists(user_columns, is_users, 1),
            self.lists([column or () for column in found], is_items, len(items)),
        )
        return rows if self._tables is None else self.complete(rows, left_out)

    def _columns_of_items(
        self, values: Sequence[Sequence[Any]], of_user: Sequence[bool], left_out: dict[str, Sequence[int]]
    ) -> list[Sequence[Any] | None]:
        """Return the values of each column; None if no item has a value (with feature tables: if no item has
        the column). of_user: columns that the user has. left_out gets the items that lack a column that others
        have. Raises BadRequest if an item has a column of the user.
        """
        columns: list[Sequence[Any] | None] = []
        for name, column, is_given in zip(self.schema.names, values, of_user, strict=True):
            num_unset = column.count(UNSET)
            if num_unset == len(column):
                columns.append(None)
                continue
            if is_given:
                first = next(number for number, value in enumerate(column) if value is not UNSET)
                raise BadRequest(422, f"items[{first}] has the column {name!r}, which the user has: send it once")
            if num_unset:
                left_out[name] = [number for number, value in enumerate(column) if value is UNSET]
                column = tuple(None if value is UNSET else value for value in column)
            has_values = self._tables is not None or any(value is not None for value in column)
            columns.append(column if has_values else None)
        return columns

    def lists(self, columns: Sequence[Sequence[Any]], chosen: Sequence[bool], num_rows: int) -> ColumnLists:
        """Return the chosen columns as lists. `columns` are in the order of the schema."""
        try:
            read = [
                reader(column)
                for reader, column, is_chosen in zip(self._readers, columns, chosen, strict=True)
                if is_chosen
            ]
        except ValueError as error:  # a whole number of thousands of digits
            raise BadRequest(422, f"a value cannot be read: {_plain(error)}") from None
        schema = pa.schema([field for field, is_chosen in zip(self.schema, chosen, strict=True) if is_chosen])
        return ColumnLists(schema, read, num_rows)

    def decode(self, body: bytes) -> Any:
        """Return a struct with `rows` and the additional fields of a body. Raises BadRequest."""
        try:
            # msgspec counts the rows after it has decoded all: 8 MB of `{},` would take 1 GB. A row has a brace.
            if body.count(b"{") > self.limits.rows + 1:
                counted = COUNTED.decode(body)
                num_rows = len(counted.rows) + len(counted.items)
                if num_rows > self.limits.rows:
                    raise BadRequest(422, f"{num_rows} rows, and limits.rows={self.limits.rows}: send several requests")
            return self._decode(body)
        except msgspec.ValidationError as error:
            message = self._with_columns(_plain(error))
            known = {"rows", "user", "items"} if self._reads_users else {"rows"}
            hint = self._near_column(message) if _has_any(known, body) else BARE_ROW
            raise BadRequest(422, f"{message}{hint}{_limit_in(message)}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(400, f"the body is not JSON: {_plain(error)}") from None

    def _decode(self, body: bytes) -> Any:
        """Decode a body. A number with a too large exponent (1e400) becomes infinite: only its row is refused."""
        if not self._field_names:
            try:
                return self._decoder.decode(body)
            except msgspec.ValidationError as error:
                if not str(error).startswith(OUT_OF_RANGE):
                    raise
        return msgspec.convert(self._renamed(UNTYPED.decode(body)), self._decoder.type)

    def _renamed(self, body: Any) -> Any:
        """Replace the names of columns that cannot be names of a struct's fields."""
        if not self._field_names or not isinstance(body, dict):
            return body
        taken, names = set(self._field_names.values()), self._field_names

        def renamed(row: Any) -> Any:
            if not isinstance(row, dict):
                return row
            return {names.get(key) or (f"{key}?" if key in taken else key): value for key, value in row.items()}

        changed = {
            name: [renamed(row) for row in rows] if isinstance(rows, list) else renamed(rows)
            for name, rows in body.items()
            if name in ("rows", "user", "items")
        }
        return {**body, **changed}

    def _with_columns(self, message: str) -> str:
        """Return the message with the original names of the columns."""
        for name, field in self._field_names.items():
            message = message.replace(f".{field}`", f".{name}`").replace(f".{field}[", f".{name}[")
        return message

    def lists_of(self, rows: Sequence[Any]) -> ColumnLists:
        """Return the rows as lists by column. Raises BadRequest."""
        values = list(zip(*map(msgspec.structs.astuple, rows), strict=True)) if rows else [()] * len(self.schema)
        if self._tables is None:
            return self.lists(values, [True] * len(values), len(rows))
        left_out: dict[str, Sequence[int]] = {}
        found = self._columns_of_items(values, [False] * len(values), left_out)
        sent = [column is not None for column in found]
        return self.complete(self.lists([column or () for column in found], sent, len(rows)), left_out)

    def complete(self, rows: Sent, left_out: LeftOut | None = None) -> Sent:
        """Fill the columns that the rows lack from the artifact's tables. The remaining ones get missing values.
        left_out: as in FeatureTables.fill.
        """
        if self._tables is not None:
            rows = self._tables.fill(rows, left_out, self.count_ids)
        if isinstance(rows, ColumnLists):
            return _in_order(rows, self._read_schema)
        of_user, of_items = self._divided(tuple(names_of(rows.items)))
        return UserItems(_in_order(rows.user, of_user), _in_order(rows.items, of_items))

    def _divide(self, of_items: tuple[str, ...]) -> tuple[pa.Schema, pa.Schema]:
        """Return the columns of the user and of the items. Making schemas takes longer than filling the rows."""
        parts = [
            [each for each in self._read_schema if (each.name in of_items) == is_item] for is_item in (False, True)
        ]
        return pa.schema(parts[0]), pa.schema(parts[1])

    def _near_column(self, message: str) -> str:
        """Return a suggestion for a message such as `Object contains unknown field `cat_O``."""
        unknown = message.partition("unknown field `")[2].partition("`")[0]
        return did_you_mean(unknown, self._names) if unknown else ""

    def read_arrow(self, body: bytes) -> pa.Table | UserItems | JoinedRows:
        """Return the columns of the schema from an Arrow IPC stream, each as one chunk. A stream of a
        struct `user` and a list of structs `items` has a row for each user.

        Raises:
            BadRequest: 400 if the body is not such a stream, 415 if it is compressed, 422 if a column
                has a type that is not allowed, and the codes for exceeded limits of rows, sizes and lengths.
        """
        try:
            if has_compression(body):
                raise BadRequest(415, "compressed Arrow buffers are not read: write the stream without compression")
            with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
                by_user = self._reads_users and is_by_user(stream.schema)
                fields = fields_by_user(stream.schema) if by_user else list(stream.schema)
                self._check_names([field.name for field in fields], by_user)
                kinds = {field.name: field.type for field in fields}
                for field in self.schema:
                    if field.name in kinds:
                        _check_type(field.name, kinds[field.name], field.type)
                table = pa.Table.from_batches(self._bounded(stream), stream.schema)
            is_small = is_flat(table.schema) and len(body) * table.num_columns < self.limits.body_bytes
            if not is_small:
                table.validate()  # of lengths alone: the full one below reads every value
                self._check_expanded(bytes_before_reading(table))
            table.validate(full=True)
        except (pa.ArrowException, struct.error, UnicodeDecodeError, ValueError, OSError, KeyError) as error:
            raise BadRequest(400, f"the body is not an Arrow IPC stream: {_plain(error)}") from None
        if not is_small:
            self._check_expanded(bytes_before_reading(table) + text_bytes(table))
        if not by_user:
            return self._filled(self._read_columns(table))
        users, items, counts = split_by_user(table)
        if items.num_rows > self.limits.rows:
            raise BadRequest(413, f"more than limits.rows={self.limits.rows} items: send them in several requests")
        users, items = self._read_columns(users), self._read_columns(items)
        ends = np.cumsum(counts).tolist()
        parts = [
            self._filled(UserItems(users.slice(number, 1), items.slice(end - count, count)))
            for number, (count, end) in enumerate(zip(counts, ends, strict=True))
        ]
        return parts[0] if len(parts) == 1 else JoinedRows(tuple(parts))

    def _filled(self, rows: Any) -> Any:
        """Return an Arrow request's rows with the columns of the tables, and without ids that the model does not read."""
        if self._tables is None:
            return rows
        filled: Any = self._tables.fill(rows, None, self.count_ids)
        if isinstance(filled, UserItems):
            return UserItems(self._selected(filled.user), self._selected(filled.items))
        return self._selected(filled)

    def _selected(self, table: pa.Table) -> pa.Table:
        return table.select([name for name in self._read_schema.names if name in table.column_names])

    def _read_columns(self, table: pa.Table) -> pa.Table:
        """Return the table's columns in the order and with the types of the schema. Raises BadRequest."""
        schema = pa.schema([field for field in self.schema if field.name in table.schema.names])
        self._check_lengths(table)
        try:
            table = table.select(schema.names)
            if (wanted := self._schema_of(table, schema)) != table.schema:
                table = _read_as(table, wanted)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise BadRequest(422, f"a column cannot be read: {_plain(error)}") from None
        return table.combine_chunks()

    def _schema_of(self, table: pa.Table, schema: pa.Schema) -> pa.Schema:
        """Return the types for the table. With many rows, whole numbers stay int64, which the encoder converts faster."""
        if table.num_rows < MIN_ROWS:
            return schema
        kinds = [
            pa.int64() if pa.types.is_string(field.type) and is_whole_number(kind) else field.type
            for field, kind in zip(schema, table.schema.types, strict=True)
        ]
        return pa.schema(zip(schema.names, kinds, strict=True))

    def _check_names(self, names: list[str], by_user: bool) -> None:
        wanted, where = self.schema.names, " for the user and for the items" if by_user else " times"
        if unknown := [name for name in names if name not in wanted]:
            raise BadRequest(422, f"there is no column {unknown[0]!r}{did_you_mean(unknown[0], wanted)}")
        needed, filled = self._read_schema.names, set() if self._tables is None else self._tables.fillable(names)
        if missing := [name for name in needed if name not in names and name not in filled]:
            listed = ", ".join(map(repr, missing[:5]))
            raise BadRequest(422, f"{len(missing)} of {len(needed)} columns are missing: {listed}")
        if doubled := [name for name in wanted if names.count(name) > 1]:
            count = "" if by_user else f" {names.count(doubled[0])}"
            raise BadRequest(422, f"column {doubled[0]!r} is there{count}{where}: send it once")

    def _bounded(self, stream: Any) -> list[pa.RecordBatch]:
        batches, num_rows = [], 0
        for batch in stream:
            num_rows += batch.num_rows
            if num_rows > self.limits.rows:
                raise BadRequest(413, f"more than limits.rows={self.limits.rows} rows: send them in several requests")
            batches.append(batch)
        return batches

    def _check_expanded(self, num_bytes: int) -> None:
        if num_bytes > EXPANSION * self.limits.body_bytes:
            raise BadRequest(
                413,
                f"the rows take {num_bytes / 2**20:.1f} MiB or more in memory, and {EXPANSION} times limits.body_mb="
                f"{self.limits.body_mb:g} are read: send them in several requests, with smaller dictionaries",
            )

    def _check_lengths(self, table: pa.Table) -> None:
        for name in [name for name in self.columns.raw_lists if name in table.schema.names]:
            most = pa.compute.max(pa.compute.list_value_length(table[name])).as_py() or 0
            if most > self.limits.values_per_cell:
                raise BadRequest(
                    422, f"{name} has {most} values in a row, limits.values_per_cell is {self.limits.values_per_cell}"
                )


def _field_names(columns: Sequence[str]) -> dict[str, str]:
    """Return other names for columns whose names msgspec refuses: quotes, backslashes, control characters."""
    return {name: f"column {number}" for number, name in enumerate(columns) if UNFIT.search(name)}


def _body_type(
    columns: ColumnsConfig,
    limits: LimitsConfig,
    more: Sequence[tuple[str, Any, Any]] | None,
    field_names: Mapping[str, str],
    tells_unset: bool,
) -> Any:
    """Return a struct type with a field for each column, so that msgspec's errors name the row and column.
    tells_unset: rows tell a column that is left out from a column that is null, as users and items do.
    """
    text = str | int | float | bool | None
    listed = Annotated[list[text], msgspec.Meta(max_length=limits.values_per_cell)] | None
    kinds = [*((name, float | None) for name in columns.dense), *((name, text) for name in columns.sparse)]
    kinds += [(name, listed) for name in columns.lists]
    numbers = Annotated[list[float | None], msgspec.Meta(max_length=limits.values_per_cell)] | None
    kinds += [(name, numbers) for name in columns.vectors]

    def row(more_types: Any, default: Any) -> Any:
        return msgspec.defstruct(
            "Row",
            [(f"c{number}", kind | more_types, default) for number, (_, kind) in enumerate(kinds)],
            rename={f"c{number}": field_names.get(name, name) for number, (name, _) in enumerate(kinds)},
            forbid_unknown_fields=True,
            gc=False,
        )

    full = row(UnsetType, UNSET) if tells_unset else row(None, None)
    rows = Annotated[list[full], msgspec.Meta(max_length=limits.rows)]  # type: ignore[valid-type]
    if more is not None:
        return msgspec.defstruct("Body", [("rows", rows), *more], forbid_unknown_fields=True)
    # UNSET tells a column that is left out from a column that is null.
    part = row(UnsetType, UNSET)
    items = Annotated[list[part], msgspec.Meta(max_length=limits.rows)]  # type: ignore[valid-type]
    fields = [("rows", rows | UnsetType, UNSET), ("user", part | UnsetType, UNSET), ("items", items | UnsetType, UNSET)]
    return msgspec.defstruct("Body", fields, forbid_unknown_fields=True)


def _reader_of(kind: pa.DataType) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the type of a column's values. Categories may be numbers or bools, which are spelled as prepare does."""
    if pa.types.is_string(kind):
        return lambda column: [value if type(value) is str else value_to_text(value) for value in column]
    if pa.types.is_list(kind) and pa.types.is_string(kind.value_type):
        return lambda column: [
            None if value is None else [value_to_text(item) or "" for item in value] for value in column
        ]
    return lambda column: column


def read_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of `schema` with its types, read as an Arrow request's columns are. Raises BadRequest for a
    column of another type, pa.ArrowException and UnicodeDecodeError for values that cannot be read.
    """
    for field in schema:
        _check_type(field.name, table.schema.field(field.name).type, field.type)
    return _read_as(table.select(schema.names), schema)


def _in_order(rows: Any, schema: pa.Schema) -> ColumnLists:
    """Return the columns of `schema`. A column that the rows lack has missing values."""
    given = dict(zip(rows.schema.names, rows.columns, strict=True))
    nothing = [None] * rows.num_rows
    return ColumnLists(schema, [given.get(name, nothing) for name in schema.names], rows.num_rows)


def _check_type(name: str, kind: pa.DataType, wanted: pa.DataType) -> None:
    """Raise BadRequest for a column's type before any record batch is read. Only listed types are
    decoded.

    Views and runs represent more bytes than they have. Text is not accepted as a number.
    """
    role = CATEGORY if pa.types.is_string(wanted) else NUMBER
    if is_list(wanted):
        role = LIST if pa.types.is_string(wanted.value_type) else VECTOR
    expands = kind.id in VIEWS or (is_list(kind) and kind.value_type.id in VIEWS)
    is_text = kind_of(kind) == TEXT and (role in (NUMBER, VECTOR) or (role == LIST and not is_list(kind)))
    if expands or is_text or why_not_read(kind, role):
        wanted_types = {
            LIST: "lists of text or of numbers",
            VECTOR: "lists of numbers",
            CATEGORY: "text, numbers, dates, times, or true and false",
            NUMBER: "numbers",
        }
        raise BadRequest(422, f"column {name!r} has type {kind}: give {wanted_types[role]}")


def _read_as(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """Return the columns in the wanted types. Values are read and spelled as prepare does."""
    columns = []
    for column, field in zip(table.columns, wanted, strict=True):
        if field.type != column.type:
            is_vector = is_list(field.type) and not pa.types.is_string(field.type.value_type)
            if (is_list(field.type) or pa.types.is_string(field.type)) and not is_vector:
                column = spelled(column, LIST if is_list(field.type) else CATEGORY)
            else:  # a large whole number is no float64
                column = plain(column)
                column = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
                column = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
                column = column.cast(field.type, safe=False)
        columns.append(column)
    return pa.table(columns, schema=wanted)


def _limit_in(message: str) -> str:
    """Return the key of the limit in a message such as `Expected `array` of length <= 4096 - at `$.rows``."""
    if message.endswith("`$.k`") and "<=" in message:
        return " (limits.k)"
    if "of length <=" not in message:
        return ""
    if message.endswith(("`$.allowed`", "`$.excluded`")):
        return " (limits.filter_ids)"
    return " (limits.rows)" if message.endswith(("`$.rows`", "`$.items`")) else " (limits.values_per_cell)"


def _has_any(names: Set[str], body: bytes) -> bool:
    """Return True if the object has one of these keys. A bare row is an object without them."""
    try:
        found = UNTYPED.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True
    return not isinstance(found, dict) or bool(names & found.keys())


def _plain(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
