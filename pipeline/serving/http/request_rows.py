"""Read a request's body, JSON or Arrow, as raw rows of one schema, or name the row and column that
is wrong.

JSON {"rows": [{"<column>": value, ...}, ...]}: a column that a row leaves out has a missing value
Arrow an IPC stream of record batches with every column; compression is refused, because the
unpacked size is not known
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from pipeline.config.columns import ColumnsConfig
from pipeline.config.serving import LimitsConfig
from pipeline.config.transforms import LIST, NUMBER
from pipeline.config.transforms import TEXT as CATEGORY
from pipeline.data.raw.value_types import TEXT, VIEWS, is_list, kind_of, plain, spelled, value_to_text, why_not_read
from pipeline.runtime.errors import did_you_mean
from pipeline.runtime.storage.arrow_messages import has_compression
from pipeline.serving.http.arrow_bounds import EXPANSION, bytes_before_reading, is_flat, text_bytes
from pipeline.serving.scoring.feature_ids import MIN_ROWS, is_whole_number
from pipeline.serving.scoring.scorer import ColumnLists, Rows, schema_of

JSON_TYPE = "application/json"
USUAL_K = 10  # items of a request to /retrieve that does not say how many
ARROW_TYPE = "application/vnd.apache.arrow.stream"
BARE_ROW = '; rows is missing: send {"rows": [{...}]}'
OUT_OF_RANGE = "Number out of range"  # msgspec's words
UNTYPED = msgspec.json.Decoder(float_hook=float)
UNFIT = re.compile(r'["\\\x00-\x1f]')  # in the name of a field


class BadRequest(Exception):
    """An error in a request, which the client must fix. `status` is 4xx."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.more = status, message, more


class CountedRows(msgspec.Struct):
    """A request body whose rows are counted before they are decoded."""

    rows: list[msgspec.Raw] = []


COUNTED = msgspec.json.Decoder(CountedRows)


class RequestReader:
    """Reads requests for the columns of one artifact. Several threads may use it."""

    def __init__(self, columns: ColumnsConfig, limits: LimitsConfig, more: Sequence[tuple[str, Any, Any]] = ()) -> None:
        """more: fields that a body may have in addition to its rows, as (name, type, default)."""
        self.columns, self.schema, self._limits = columns, schema_of(columns), limits
        self._field_names = _field_names(self.schema.names)
        self._decoder = msgspec.json.Decoder(_body_type(columns, limits, more, self._field_names))
        self._names = [*self.schema.names, *(name for name, *_ in more)]
        self._readers = [_reader_of(field.type) for field in self.schema]

    def read(self, body: bytes, content_type: str) -> Rows:
        """Return the rows with the types of self.schema; category columns may be int64. Raises BadRequest."""
        if content_type == JSON_TYPE:
            return self.read_json(body)
        if content_type == ARROW_TYPE:
            return self.read_arrow(body)
        found = f"Content-Type {content_type!r}" if content_type else "a body without a Content-Type"
        raise BadRequest(415, f"{found} is not read: send {JSON_TYPE} or {ARROW_TYPE}")

    def read_json(self, body: bytes) -> ColumnLists:
        return self.lists_of(self.decode(body).rows)

    def decode(self, body: bytes) -> Any:
        """Return a struct with `rows` and the additional fields of a body. Raises BadRequest."""
        try:
            # msgspec counts the rows after it has decoded all: 8 MB of `{},` would take 1 GB. A row has a brace.
            if body.count(b"{") > self._limits.rows + 1:
                num_rows = len(COUNTED.decode(body).rows)
                if num_rows > self._limits.rows:
                    raise BadRequest(
                        422, f"{num_rows} rows, and limits.rows={self._limits.rows}: send several requests"
                    )
            return self._decode(body)
        except msgspec.ValidationError as error:
            message = self._with_columns(_plain(error))
            hint = self._near_column(message) if _has_rows(body) else BARE_ROW
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
        rows = body.get("rows") if self._field_names and isinstance(body, dict) else None
        if not isinstance(rows, list):
            return body
        taken, names = set(self._field_names.values()), self._field_names

        def field_name(key: str) -> str:
            return names.get(key) or (f"{key}?" if key in taken else key)

        renamed = [{field_name(key): row[key] for key in row} if isinstance(row, dict) else row for row in rows]
        return {**body, "rows": renamed}

    def _with_columns(self, message: str) -> str:
        """Return the message with the original names of the columns."""
        for name, field in self._field_names.items():
            message = message.replace(f".{field}`", f".{name}`").replace(f".{field}[", f".{name}[")
        return message

    def lists_of(self, rows: Sequence[Any]) -> ColumnLists:
        """Return the rows as lists by column. Raises BadRequest."""
        values = list(zip(*map(msgspec.structs.astuple, rows), strict=True)) if rows else [()] * len(self.schema)
        try:
            columns = [read(column) for read, column in zip(self._readers, values, strict=True)]
        except ValueError as error:  # a whole number of thousands of digits
            raise BadRequest(422, f"a value cannot be read: {_plain(error)}") from None
        return ColumnLists(self.schema, columns, len(rows))

    def _near_column(self, message: str) -> str:
        """Return a suggestion for a message such as `Object contains unknown field `cat_O``."""
        unknown = message.partition("unknown field `")[2].partition("`")[0]
        return did_you_mean(unknown, self._names) if unknown else ""

    def read_arrow(self, body: bytes) -> pa.Table:
        """Return the columns of the schema from an Arrow IPC stream, each as one chunk.

        Raises:
            BadRequest: 400 if the body is not such a stream, 415 if it is compressed, 422 if a column
                has a type that is not allowed, and the codes for exceeded limits of rows, sizes and lengths.
        """
        try:
            if has_compression(body):
                raise BadRequest(415, "compressed Arrow buffers are not read: write the stream without compression")
            with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
                self._check_names(stream.schema.names)
                kinds = {field.name: field.type for field in stream.schema}
                for field in self.schema:
                    _check_type(field.name, kinds[field.name], field.type)
                table = pa.Table.from_batches(self._bounded(stream), stream.schema)
            is_small = is_flat(table.schema) and len(body) * table.num_columns < self._limits.body_bytes
            if not is_small:
                table.validate()  # of lengths alone: the full one below reads every value
                self._check_expanded(bytes_before_reading(table))
            table.validate(full=True)
        except (pa.ArrowException, struct.error, UnicodeDecodeError, ValueError, OSError, KeyError) as error:
            raise BadRequest(400, f"the body is not an Arrow IPC stream: {_plain(error)}") from None
        if not is_small:
            self._check_expanded(bytes_before_reading(table) + text_bytes(table))
        self._check_lengths(table)
        try:
            table = table.select(self.schema.names)
            if (wanted := self._schema_of(table)) != table.schema:
                table = _read_as(table, wanted)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise BadRequest(422, f"a column cannot be read: {_plain(error)}") from None
        return table.combine_chunks()

    def _schema_of(self, table: pa.Table) -> pa.Schema:
        """Return the table's schema. With many rows, whole numbers stay int64, which the encoder converts faster."""
        if table.num_rows < MIN_ROWS:
            return self.schema
        kinds = [
            pa.int64() if pa.types.is_string(field.type) and is_whole_number(kind) else field.type
            for field, kind in zip(self.schema, table.schema.types, strict=True)
        ]
        return pa.schema(zip(self.schema.names, kinds, strict=True))

    def _check_names(self, names: list[str]) -> None:
        wanted = self.schema.names
        if unknown := [name for name in names if name not in wanted]:
            raise BadRequest(422, f"there is no column {unknown[0]!r}{did_you_mean(unknown[0], wanted)}")
        if missing := [name for name in wanted if name not in names]:
            listed = ", ".join(map(repr, missing[:5]))
            raise BadRequest(422, f"{len(missing)} of {len(wanted)} columns are missing: {listed}")
        if doubled := [name for name in wanted if names.count(name) > 1]:
            raise BadRequest(422, f"column {doubled[0]!r} is there {names.count(doubled[0])} times")

    def _bounded(self, stream: Any) -> list[pa.RecordBatch]:
        batches, num_rows = [], 0
        for batch in stream:
            num_rows += batch.num_rows
            if num_rows > self._limits.rows:
                raise BadRequest(413, f"more than limits.rows={self._limits.rows} rows: send them in several requests")
            batches.append(batch)
        return batches

    def _check_expanded(self, num_bytes: int) -> None:
        if num_bytes > EXPANSION * self._limits.body_bytes:
            raise BadRequest(
                413,
                f"the rows take {num_bytes / 2**20:.1f} MiB or more in memory, and {EXPANSION} times limits.body_mb="
                f"{self._limits.body_mb:g} are read: send them in several requests, with smaller dictionaries",
            )

    def _check_lengths(self, table: pa.Table) -> None:
        for name in self.columns.lists:
            most = pa.compute.max(pa.compute.list_value_length(table[name])).as_py() or 0
            if most > self._limits.values_per_cell:
                raise BadRequest(
                    422, f"{name} has {most} values in a row, limits.values_per_cell is {self._limits.values_per_cell}"
                )


def _field_names(columns: Sequence[str]) -> dict[str, str]:
    """Return other names for columns whose names msgspec refuses: quotes, backslashes, control characters."""
    return {name: f"column {number}" for number, name in enumerate(columns) if UNFIT.search(name)}


def _body_type(
    columns: ColumnsConfig,
    limits: LimitsConfig,
    more: Sequence[tuple[str, Any, Any]],
    field_names: Mapping[str, str],
) -> Any:
    """Return a struct type with a field for each column, so that msgspec's errors name the row and column."""
    text = str | int | float | bool | None
    listed = Annotated[list[text], msgspec.Meta(max_length=limits.values_per_cell)] | None
    kinds = [*((name, float | None) for name in columns.dense), *((name, text) for name in columns.sparse)]
    kinds += [(name, listed) for name in columns.lists]
    row = msgspec.defstruct(
        "Row",
        [(f"c{number}", kind, None) for number, (_, kind) in enumerate(kinds)],
        rename={f"c{number}": field_names.get(name, name) for number, (name, _) in enumerate(kinds)},
        forbid_unknown_fields=True,
        gc=False,
    )
    rows = Annotated[list[row], msgspec.Meta(max_length=limits.rows)]  # type: ignore[valid-type]
    return msgspec.defstruct("Body", [("rows", rows), *more], forbid_unknown_fields=True)


def _reader_of(kind: pa.DataType) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return the type of a column's values. Categories may be numbers or bools, which are spelled as prepare does."""
    if pa.types.is_string(kind):
        return lambda column: [value if type(value) is str else value_to_text(value) for value in column]
    if pa.types.is_list(kind):
        return lambda column: [
            None if value is None else [value_to_text(item) or "" for item in value] for value in column
        ]
    return lambda column: column


def _check_type(name: str, kind: pa.DataType, wanted: pa.DataType) -> None:
    """Raise BadRequest for a column's type before any record batch is read. Only listed types are
    decoded.

    Views and runs represent more bytes than they have. Text is not accepted as a number.
    """
    role = LIST if is_list(wanted) else CATEGORY if pa.types.is_string(wanted) else NUMBER
    expands = kind.id in VIEWS or (is_list(kind) and kind.value_type.id in VIEWS)
    is_text = kind_of(kind) == TEXT and (role == NUMBER or (role == LIST and not is_list(kind)))
    if expands or is_text or why_not_read(kind, role):
        wanted_types = {
            LIST: "lists of text or of numbers",
            CATEGORY: "text, numbers, dates, times, or true and false",
            NUMBER: "numbers",
        }
        raise BadRequest(422, f"column {name!r} has type {kind}: give {wanted_types[role]}")


def _read_as(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """Return the columns in the wanted types. Values are read and spelled as prepare does."""
    columns = []
    for column, field in zip(table.columns, wanted, strict=True):
        if field.type != column.type:
            if is_list(field.type) or pa.types.is_string(field.type):
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
    return " (limits.rows)" if message.endswith("`$.rows`") else " (limits.values_per_cell)"


def _has_rows(body: bytes) -> bool:
    """Return True if the object has rows. A bare row is an object without rows."""
    try:
        found = UNTYPED.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True
    return not isinstance(found, dict) or "rows" in found


def _plain(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
