"""Read the input tensors of an inference request as raw rows: a tensor for each column.

A column of numbers has a tensor of numbers, a column of categories has BYTES or whole numbers, both
of the shape [rows] or [rows, 1]. A list has the shape [rows, length], or it is text [rows] with
data.columns.list_separator between the values, because lists may have different lengths. If some
tensors have one row and others have more, the first are the columns of a user with items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from pipeline.config.columns import ColumnsConfig
from pipeline.runtime.errors import did_you_mean
from pipeline.serving.http.request_rows import BadRequest, RequestReader
from pipeline.serving.scoring.scorer import ColumnLists, UserItems

NUMBERS = ("FP16", "FP32", "FP64", "BOOL", *(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)))
TEXT = "BYTES"
TYPES = {TEXT: (str,), "BOOL": (bool,), "FP16": (float, int), "FP32": (float, int), "FP64": (float, int)}


class Tensor(msgspec.Struct):
    """An input. `data` is flat, or nested as `shape` says."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]
    parameters: dict[str, Any] = {}


class Output(msgspec.Struct):
    """An output that is asked for."""

    name: str


class Inference(msgspec.Struct):
    """The body of a request."""

    inputs: list[Tensor]
    id: str | None = None
    outputs: list[Output] | None = None


DECODER = msgspec.json.Decoder(Inference, float_hook=float)


def described(columns: ColumnsConfig) -> list[dict[str, Any]]:
    """Return the protocol's description of the columns."""
    kinds = [*((name, "FP64", [-1]) for name in columns.dense), *((name, TEXT, [-1]) for name in columns.sparse)]
    kinds += [(name, TEXT, [-1, -1]) for name in columns.lists]
    kinds += [(name, "FP64", [-1, width]) for name, width in columns.vectors.items()]
    return [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in kinds]


def read_tensors(body: bytes, reader: RequestReader) -> tuple[Inference, ColumnLists | UserItems]:
    """Return the request and its rows. Raises BadRequest."""
    names, limits = reader.schema.names, reader.limits
    # msgspec has no limit of nested lists: 8 MB of `[],` would take 200 MB.
    if body.count(b"[") > (limits.rows + 2) * (len(names) + 1):
        raise BadRequest(413, f"more lists than limits.rows={limits.rows} rows have: send several requests")
    try:
        asked = DECODER.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(422, f"{error}; a request has inputs: [{{name, shape, datatype, data}}]") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(400, f"the body is not JSON: {error}") from None
    tensors: dict[str, Tensor] = {}
    for each in asked.inputs:
        if each.name not in names:
            raise BadRequest(422, f"there is no column {each.name!r}{did_you_mean(each.name, names)}")
        if each.name in tensors:
            raise BadRequest(422, f"there are two inputs {each.name!r}: send one")
        tensors[each.name] = each
    if not tensors:
        raise BadRequest(422, "inputs is empty: send a tensor for each column")
    columns = {name: _column(each, reader) for name, each in tensors.items()}
    num_rows = max(map(len, columns.values()))
    if odd := [name for name, column in columns.items() if len(column) not in (1, num_rows)]:
        raise BadRequest(422, f"{odd[0]!r} has {len(columns[odd[0]])} rows, and another input {num_rows}")
    if not 1 <= num_rows <= limits.rows:
        raise BadRequest(422, f"{num_rows} rows, and from 1 to limits.rows={limits.rows} are scored")
    cells = [columns.get(name, ()) for name in names]
    is_item = [len(column) == num_rows for column in cells]
    items = reader.lists(cells, is_item, num_rows)
    if num_rows == 1 or all(is_item):
        return asked, reader.complete(items)
    user = reader.lists(cells, [len(column) == 1 for column in cells], 1)
    return asked, reader.complete(UserItems(user, items))


def _column(tensor: Tensor, reader: RequestReader) -> Sequence[Any]:
    """Return the values of a column, a list for each row of a list. Raises BadRequest."""
    name, columns = tensor.name, reader.columns
    are_numbers = name in columns.dense or name in columns.vectors
    datatypes = NUMBERS if are_numbers else (TEXT, "BOOL", *(each for each in NUMBERS if "INT" in each))
    if tensor.datatype not in datatypes:
        raise BadRequest(422, f"{name!r} has the datatype {tensor.datatype!r}, and {', '.join(datatypes)} are read")
    if "binary_data_size" in tensor.parameters:
        raise BadRequest(415, f"{name!r} is binary: send its data as JSON")
    values, shape = _flat(tensor), tensor.shape
    kinds = TYPES.get(tensor.datatype, (int,))
    wrong = [number for number, value in enumerate(values) if value is not None and type(value) not in kinds]
    if wrong:
        found = str(values[wrong[0]])[:50]
        raise BadRequest(422, f"{name!r} has {found!r} at {wrong[0]}, which is not {tensor.datatype}")
    if are_numbers:
        values = [None if value is None else _number(value) for value in values]
    if name not in columns.raw_lists:
        if shape[1:] not in ([], [1]):
            raise BadRequest(422, f"{name!r} has the shape {shape}: it has one value in each row")
        return values
    if len(shape) == 1:
        if tensor.datatype != TEXT:
            raise BadRequest(422, f"{name!r} has the shape {shape}, and is a list: send [rows, length]")
        lists = [value.split(columns.list_separator) if value else None for value in values]
    else:
        lists = [values[begin : begin + shape[1]] for begin in range(0, len(values), max(shape[1], 1))] or [[]] * shape[
            0
        ]
    if (most := max((len(each or ()) for each in lists), default=0)) > reader.limits.values_per_cell:
        limit = reader.limits.values_per_cell
        raise BadRequest(422, f"{name!r} has {most} values in a row, limits.values_per_cell is {limit}")
    return lists


def _number(value: float) -> float:
    """Return a number as float64; infinity, which refuses the row, for a larger whole number."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _flat(tensor: Tensor) -> list[Any]:
    """Return the data as one list. Raises BadRequest if its shape does not fit."""
    values, shape = tensor.data, tensor.shape
    if len(shape) == 2 and values and all(type(row) is list for row in values):
        if len(values) != shape[0] or any(len(row) != shape[1] for row in values):
            raise BadRequest(422, f"{tensor.name!r} has the shape {shape}, and its data has other sizes")
        values = list(chain.from_iterable(values))
    num_values = shape[0] * (shape[1] if len(shape) == 2 else 1) if len(shape) in (1, 2) and min(shape) >= 0 else -1
    if num_values != len(values):
        raise BadRequest(
            422, f"{tensor.name!r} has the shape {shape} and {len(values)} values: send [rows] or [rows, length]"
        )
    return values
