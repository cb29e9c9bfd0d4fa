"""Read a request's body, JSON or Arrow, as raw rows of one schema, or name the row and column that is wrong.

JSON    {"rows": [{"<column>": value, ...}, ...]}: a column that a row leaves out is missing in it
Arrow   an IPC stream of record batches with every column; without compression, whose size nothing bounds beforehand
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from pipeline.config.columns import ColumnsConfig
from pipeline.config.server import LimitsConfig
from pipeline.data.raw.spelling import spell, spell_value
from pipeline.runtime.errors import did_you_mean
from pipeline.serving.scoring.column_ids import LEAST_ROWS, is_whole_number
from pipeline.serving.scoring.column_lists import ColumnLists, Rows
from pipeline.serving.scoring.scorer import schema_of

JSON_TYPE = "application/json"
USUAL_K = 10  # items of a request to /retrieve that does not say how many
ARROW_TYPE = "application/vnd.apache.arrow.stream"
OUT_OF_RANGE = "Number out of range"  # msgspec's words
UNTYPED = msgspec.json.Decoder(float_hook=float)


class BadRequest(Exception):
    """What the client has to fix; `status` is 4xx."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.more = status, message, more


class RequestReader:
    """Of one artifact's columns. Safe from several threads."""

    def __init__(self, columns: ColumnsConfig, limits: LimitsConfig, more: Sequence[tuple[str, Any, Any]] = ()) -> None:
        """more: what a body may have beside its rows: name, type, default."""
        self.columns, self.schema, self._limits = columns, schema_of(columns), limits
        self._decoder = msgspec.json.Decoder(_body_type(columns, limits, more))
        self._names = [*self.schema.names, *(name for name, *_ in more)]
        self._readers = [_reader_of(field.type) for field in self.schema]

    def read(self, body: bytes, content_type: str) -> Rows:
        """Rows of self.schema, but whole numbers of categorical columns may be int64. Raises BadRequest."""
        if content_type == JSON_TYPE:
            return self.read_json(body)
        if content_type == ARROW_TYPE:
            return self.read_arrow(body)
        found = f"Content-Type {content_type!r}" if content_type else "a body without a Content-Type"
        raise BadRequest(415, f"{found} is not read: send {JSON_TYPE} or {ARROW_TYPE}")

    def read_json(self, body: bytes) -> ColumnLists:
        return self.lists_of(self.decode(body).rows)

    def decode(self, body: bytes) -> Any:
        """A struct with `rows` and what else a body may have. Raises BadRequest."""
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            raise BadRequest(422, f"{_plain(error)}{self._near_column(str(error))}{_limit_in(str(error))}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(400, f"the body is not JSON: {_plain(error)}") from None

    def _decode(self, body: bytes) -> Any:
        """A number with too large an exponent, 1e400, is an infinity, which makes its row a bad one and leaves the others."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            if not str(error).startswith(OUT_OF_RANGE):
                raise
        return msgspec.convert(UNTYPED.decode(body), self._decoder.type)

    def lists_of(self, rows: Sequence[Any]) -> ColumnLists:
        """Raises BadRequest."""
        values = list(zip(*map(msgspec.structs.astuple, rows), strict=True)) if rows else [()] * len(self.schema)
        try:
            columns = [read(column) for read, column in zip(self._readers, values, strict=True)]
        except ValueError as error:  # a whole number of thousands of digits
            raise BadRequest(422, f"a value cannot be read: {_plain(error)}") from None
        return ColumnLists(self.schema, columns, len(rows))

    def _near_column(self, message: str) -> str:
        """A hint for `Object contains unknown field `cat_O``."""
        unknown = message.partition("unknown field `")[2].partition("`")[0]
        return did_you_mean(unknown, self._names) if unknown else ""

    def read_arrow(self, body: bytes) -> pa.Table:
        """The columns of the schema from an Arrow IPC stream, in one chunk each.

        Raises:
            BadRequest: 400 where the body is no such stream or is compressed, 422 where a column has a type that rows cannot have, and
                what the limits on rows and lengths say.
        """
        try:
            refuse_compression(body)
            with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
                self._check_names(stream.schema.names)
                kinds = {field.name: field.type for field in stream.schema}
                for field in self.schema:
                    _check_type(field.name, kinds[field.name], field.type)
                table = pa.Table.from_batches(self._bounded(stream), stream.schema)
            table.validate(full=True)
        except (pa.ArrowException, struct.error, UnicodeDecodeError, ValueError, OSError, KeyError) as error:
            raise BadRequest(400, f"the body is not an Arrow IPC stream: {_plain(error)}") from None
        try:
            table = table.select(self.schema.names)
            if (wanted := self._schema_of(table)) != table.schema:
                table = _spelled(table, wanted).cast(wanted)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise BadRequest(422, f"a column cannot be read: {_plain(error)}") from None
        self._check_lengths(table)
        return table.combine_chunks()

    def _schema_of(self, table: pa.Table) -> pa.Schema:
        """Of many rows whole numbers stay what they are: the encoder spells them sooner than Arrow does."""
        if table.num_rows < LEAST_ROWS:
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

    def _check_lengths(self, table: pa.Table) -> None:
        for name in self.columns.lists:
            most = pa.compute.max(pa.compute.list_value_length(table[name])).as_py() or 0
            if most > self._limits.values_per_cell:
                raise BadRequest(
                    422, f"{name} has {most} values in a row, limits.values_per_cell is {self._limits.values_per_cell}"
                )


def _body_type(columns: ColumnsConfig, limits: LimitsConfig, more: Sequence[tuple[str, Any, Any]]) -> Any:
    """A struct that has a field for each column: msgspec then says at which row and column something is wrong."""
    text = str | int | float | bool | None
    listed = Annotated[list[text], msgspec.Meta(max_length=limits.values_per_cell)] | None
    kinds = [*((name, float | None) for name in columns.dense), *((name, text) for name in columns.sparse)]
    kinds += [(name, listed) for name in columns.lists]
    row = msgspec.defstruct(
        "Row",
        [(f"c{number}", kind, None) for number, (_, kind) in enumerate(kinds)],
        rename={f"c{number}": name for number, (name, _) in enumerate(kinds)},
        forbid_unknown_fields=True,
        gc=False,
    )
    rows = Annotated[list[row], msgspec.Meta(max_length=limits.rows)]  # type: ignore[valid-type]
    return msgspec.defstruct("Body", [("rows", rows), *more], forbid_unknown_fields=True)


def _reader_of(kind: pa.DataType) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Of a column's values. Numbers, true and false are categories too, in the spelling that prepare gives them."""
    if pa.types.is_string(kind):
        return lambda column: [value if type(value) is str else spell_value(value) for value in column]
    if pa.types.is_list(kind):
        return lambda column: [
            None if value is None else [spell_value(item) or "" for item in value] for value in column
        ]
    return lambda column: column


def _check_type(name: str, kind: pa.DataType, wanted: pa.DataType) -> None:
    """Raises BadRequest before a record batch is read: what is not listed here is not decoded."""
    if pa.types.is_list(wanted):
        fits = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_category(kind.value_type)
        wanted_types = "lists of text or of numbers"
    elif pa.types.is_string(wanted):
        fits, wanted_types = _is_category(kind), "text, numbers, dates, or true and false"
    else:
        fits = any(
            check(kind)
            for check in (
                pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null
            )
        )  # fmt: skip
        wanted_types = "numbers"
    if not fits:
        raise BadRequest(422, f"column {name!r} has type {kind}: give {wanted_types}")


def _is_category(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_date(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )


def _spelled(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """Fractions of categorical columns as text, as prepare spells them, and large whole numbers of dense ones: Arrow's own
    cast gives the former an exponent and refuses the latter."""
    for number, field in enumerate(wanted):
        column = table[number]
        if pa.types.is_floating(field.type) and pa.types.is_integer(
            column.type
        ):  # that no float64 is, as prepare reads it
            table = table.set_column(number, field.name, column.cast(field.type, safe=False))
        elif pa.types.is_string(field.type) and pa.types.is_floating(column.type):
            table = table.set_column(number, field.name, spell(column))
        elif pa.types.is_list(field.type) and pa.types.is_floating(column.type.value_type):
            lists = column.combine_chunks().cast(pa.list_(column.type.value_type))
            mask = lists.is_null() if lists.null_count else None
            lists = pa.ListArray.from_arrays(lists.offsets, spell(lists.values), mask=mask)
            table = table.set_column(number, field.name, lists)
    return table


def refuse_compression(body: bytes) -> None:
    """A few bytes of a compressed buffer may stand for gigabytes, and Arrow allocates what they claim."""
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        if message.type in ("record batch", "dictionary") and _is_compressed(
            message.metadata.to_pybytes(), message.type
        ):
            raise BadRequest(415, "compressed Arrow buffers are not read: write the stream without compression")


def _is_compressed(metadata: bytes, kind: str) -> bool:
    """Whether a message's RecordBatch has a `compression` (arrow/format/Message.fbs). Raises struct.error where it is torn."""
    header = _table_at(metadata, struct.unpack_from("<I", metadata, 0)[0], 2)
    if kind == "dictionary" and header:
        header = _table_at(metadata, header, 1)  # DictionaryBatch: id, data
    return bool(header and _field(metadata, header, 3))  # RecordBatch: length, nodes, buffers, compression


def _field(data: bytes, table: int, number: int) -> int:
    """Where a flatbuffer table's field lies, 0 where it is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise struct.error("a table points before the message")
    size = struct.unpack_from("<H", data, vtable)[0]
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0] if 6 + 2 * number <= size else 0
    return table + offset if offset else 0


def _table_at(data: bytes, table: int, number: int) -> int:
    offset = _field(data, table, number)
    return offset + int(struct.unpack_from("<I", data, offset)[0]) if offset else 0


def _limit_in(message: str) -> str:
    """The key of the limit in `Expected `array` of length <= 4096 - at `$.rows``."""
    if message.endswith("`$.k`") and "<=" in message:
        return " (limits.k)"
    if "of length <=" not in message:
        return ""
    if message.endswith(("`$.allowed`", "`$.excluded`")):
        return " (limits.filter_ids)"
    return " (limits.rows)" if message.endswith("`$.rows`") else " (limits.values_per_cell)"


def _plain(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
