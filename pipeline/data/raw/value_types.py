"""Define which types of values are read, and in which roles. Convert each value to one text.

inspect, prepare, predict and the server use this table, so a value has the same id wherever it
comes from. Whole numbers are written without point and exponent, even if they are stored as
fractions or decimals: pandas stores a column of whole numbers with a missing value as fractions,
and 12345678901.0 is the id 12345678901. Times are written to the last digit that is not 0, in UTC
if they have a zone.

| Arrow type | as a category | as a number | as a time |
|---|---|---|---|
| text, binary that is UTF-8, JSON, their views | the text | if it is a number | if it is a time |
| UUID | its 36 characters | - | - |
| whole numbers, fractions, decimals | the shortest number | yes | yes |
| true and false | true, false | 1, 0 | - |
| dates, timestamps | 2026-11-01, 2026-11-01 12:00:00.5Z | - | yes |
| times of a day | 12:00:00 | - | - |
| nulls | missing | missing | missing |
| dictionaries and runs of these | as their values | as their values | as their values |
| lists of these, of any kind of list | a list | - | - |

Every other type is refused: fixed-size binary, spans of time, structs, maps, unions, lists of
lists.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.transforms import LIST, NUMBER, TIME, VECTOR  # what a column is read as
from pipeline.config.transforms import TEXT as CATEGORY

TEXT, WHOLE, FRACTIONS, DECIMALS, TRUTHS = "text", "whole numbers", "fractions", "decimals", "true and false"
DATES, TIMES, ZONED, CLOCK, NOTHING = "dates", "times", "times with a zone", "times of a day", "nothing"
READ = {
    CATEGORY: {TEXT, WHOLE, FRACTIONS, DECIMALS, TRUTHS, DATES, TIMES, ZONED, CLOCK, NOTHING},
    NUMBER: {TEXT, WHOLE, FRACTIONS, DECIMALS, TRUTHS, NOTHING},
    TIME: {TEXT, WHOLE, FRACTIONS, DECIMALS, DATES, TIMES, ZONED, NOTHING},
}
READ[VECTOR] = READ[NUMBER]
# Kinds in which one value has one spelling, so that they may be mixed in the files of one column.
ALIKE = {
    TEXT: {TEXT, WHOLE, TRUTHS},
    WHOLE: {WHOLE, TEXT, FRACTIONS, DECIMALS},
    FRACTIONS: {FRACTIONS, WHOLE, DECIMALS},
    DECIMALS: {FRACTIONS, WHOLE, DECIMALS},
    TRUTHS: {TRUTHS, TEXT},
}
LARGEST_WHOLE = 2.0**63  # fractions below this are written as whole numbers if they are whole
LISTS = (
    pa.lib.Type_LIST, pa.lib.Type_LARGE_LIST, pa.lib.Type_FIXED_SIZE_LIST, pa.lib.Type_LIST_VIEW,
    pa.lib.Type_LARGE_LIST_VIEW,
)  # fmt: skip
BYTES = {pa.lib.Type_BINARY, pa.lib.Type_LARGE_BINARY, pa.lib.Type_BINARY_VIEW}
TEXTS = {pa.lib.Type_STRING, pa.lib.Type_LARGE_STRING, pa.lib.Type_STRING_VIEW}
VIEWS = {
    pa.lib.Type_RUN_END_ENCODED, pa.lib.Type_STRING_VIEW, pa.lib.Type_BINARY_VIEW, pa.lib.Type_LIST_VIEW,
    pa.lib.Type_LARGE_LIST_VIEW,
}  # fmt: skip
ENCODED = (pa.lib.Type_DICTIONARY, pa.lib.Type_RUN_END_ENCODED)
EXTENSIONS = {"arrow.uuid": TEXT, "arrow.json": TEXT, "arrow.bool8": TRUTHS}


def is_list(kind: pa.DataType) -> bool:
    return kind.id in LISTS


def kind_of(kind: pa.DataType) -> str:
    """Return the kind of the values of a type, or of a list type's elements; "" if they cannot be read."""
    if is_list(kind) or kind.id in ENCODED:
        return "" if is_list(kind) and is_list(kind.value_type) else kind_of(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return EXTENSIONS.get(kind.extension_name, "")
    if kind.id in TEXTS or kind.id in BYTES:
        return TEXT
    if pa.types.is_timestamp(kind):
        return ZONED if kind.tz else TIMES
    checks = {
        NOTHING: pa.types.is_null, WHOLE: pa.types.is_integer, FRACTIONS: pa.types.is_floating,
        DECIMALS: pa.types.is_decimal, TRUTHS: pa.types.is_boolean, DATES: pa.types.is_date, CLOCK: pa.types.is_time,
    }  # fmt: skip
    return next((name for name, fits in checks.items() if fits(kind)), "")


def why_not_read(kind: pa.DataType, role: str) -> str:
    """Return "" if a column of this type can be read as `role`, otherwise a text that says what to use instead."""
    found, listed = kind_of(kind), is_list(kind)
    if found in READ[CATEGORY if role == LIST else role] and listed == (role in (LIST, VECTOR)):
        return ""
    if role in (LIST, VECTOR) and found in (TEXT, NOTHING) and not listed:
        return ""  # joined by data.columns.list_separator, or missing in all rows
    if pa.types.is_fixed_size_binary(kind):
        return "write the bytes as text, such as hexadecimal digits or a UUID"
    if pa.types.is_duration(kind):
        return "a span of time: write it as a number" + (" and name a column of times" if role == TIME else "")
    if role == VECTOR:
        return "data.columns.vectors are lists of numbers, or text joined by data.columns.list_separator"
    if role == LIST and found and not listed:
        return (
            "one value a row: name it under data.columns.sparse, not multi_hot (lists, or text joined by "
            "data.columns.list_separator)"
        )
    if listed and found and role in (CATEGORY, TIME):
        where = "sparse" if role == CATEGORY else "timestamp"
        return f"a list a row: name it under data.columns.multi_hot or sequence, not {where}"
    if role == TIME and found == CLOCK:
        return "a time of day without a date: name a column of dates, of times with their date, or of whole numbers"
    if role == NUMBER:
        return (
            "labels, weights and dense features are numbers; correct data.columns, or for a label say which text is 1, "
            "data.columns.label_values={yes: 1, no: 0}"
        )
    return "give text, whole numbers, or lists of them"


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the same values in a type that the package computes with: lists become list<>, binary
    becomes text (which may not be UTF-8), and views, runs and extension types their values.

    Dictionaries of such types stay dictionaries. Raises pa.ArrowInvalid for a type that is not
    read.
    """
    wanted = _plain_type(column.type)
    if wanted == column.type:
        return column
    return pa.chunked_array([_plain(chunk, wanted) for chunk in column.chunks], wanted)


@lru_cache(maxsize=256)
def _plain_type(kind: pa.DataType) -> pa.DataType:
    if not kind_of(kind):
        raise pa.ArrowInvalid(f"values of type {kind} are not read")
    if is_list(kind):
        inner = kind.value_type
        inner = inner.value_type if inner.id in ENCODED else inner
        return pa.list_(pa.string() if pa.types.is_null(inner) else _plain_type(inner))
    if kind.id in ENCODED:
        inner = _plain_type(kind.value_type)
        return kind if pa.types.is_dictionary(kind) and inner == kind.value_type else inner
    if isinstance(kind, pa.BaseExtensionType):
        return pa.bool_() if kind_of(kind) == TRUTHS else pa.string()
    if kind.id in BYTES:
        return pa.large_string() if pa.types.is_large_binary(kind) else pa.string()
    return pa.string() if pa.types.is_string_view(kind) else kind


def _plain(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    kind = array.type
    if kind == wanted:
        return array
    if is_list(kind):
        return lists_like(array, _plain(array.flatten(), wanted.value_type))
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary_decode(), wanted)
    if pa.types.is_run_end_encoded(kind):
        return _plain(pc.run_end_decode(array), wanted)
    if isinstance(kind, pa.BaseExtensionType):
        return _uuid_texts(array) if kind.extension_name == "arrow.uuid" else array.storage.cast(wanted)
    if pa.types.is_binary_view(kind):
        array = array.cast(pa.binary())
    return array.view(wanted) if kind.id in BYTES else array.cast(wanted)


def _uuid_texts(array: pa.Array) -> pa.Array:
    """Return the 36 characters of each UUID."""
    raw = array.storage.cast(pa.binary()).fill_null(bytes(16))
    digits = np.frombuffer(b"".join(raw.to_pylist()).hex().encode(), np.uint8).reshape(-1, 32)
    texts = np.insert(digits, (8, 12, 16, 20), ord("-"), axis=1)
    found = pa.FixedSizeBinaryArray.from_buffers(pa.binary(36), len(array), [None, pa.py_buffer(texts.tobytes())])
    return pc.if_else(array.is_valid(), found.cast(pa.binary()).view(pa.string()), None)


def to_text(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return plain values as pa.string(). A missing value stays missing."""
    kind = values.type
    if pa.types.is_decimal(kind):
        return _without_zeros(values.cast(pa.string()), r"^([^.E]*\.\d*?)0+$")
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        zone = "UTC" if getattr(kind, "tz", None) else None
        if pa.types.is_timestamp(kind):
            values = values.cast(pa.timestamp(kind.unit, zone)) if zone else values
        texts = pc.replace_substring_regex(values.cast(pa.string()), r"Z$", "")
        texts = _without_zeros(texts, r"^(.*\.\d*?)0+$")
        return pc.binary_join_element_wise(texts, "Z", "") if zone else texts
    if not pa.types.is_floating(kind):
        return values.cast(pa.date32()).cast(pa.string()) if pa.types.is_date(kind) else values.cast(pa.string())
    if pa.types.is_float16(kind):
        values = values.cast(pa.float32())
    is_whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), LARGEST_WHOLE))
    if not pc.any(is_whole).as_py():
        return values.cast(pa.string())
    whole = pc.if_else(is_whole, values, pa.scalar(None, values.type)).cast(pa.int64(), safe=False)
    return pc.coalesce(whole.cast(pa.string()), values.cast(pa.string()))


def _without_zeros(texts: Any, pattern: str) -> Any:
    """Remove zeros at the end of a fraction, and the point if no digit follows it."""
    return pc.replace_substring_regex(pc.replace_substring_regex(texts, pattern, r"\1"), r"\.$", "")


def spelled(column: pa.ChunkedArray, role: str) -> pa.ChunkedArray:
    """Return a category as text and a list as a list of text."""
    column = plain(column)
    if not is_list(column.type):
        column = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        return column.cast(pa.list_(pa.string())) if role == LIST else to_text(column)
    texts = [lists_like(part, to_text(part.flatten())) for part in column.chunks]
    return pa.chunked_array(texts, pa.list_(pa.string()))


def lists_like(lists: pa.Array, values: pa.Array) -> pa.ListArray:
    """Return lists with the lengths of `lists`. `values` are their elements, one list after the other."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=lists.is_null() if lists.null_count else None)


def value_to_text(value: Any) -> str | None:
    """Return the text of one JSON value. Raises ValueError for a list or an object."""
    if value is None or type(value) is str:
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _fraction(value + 0.0)  # both zeros have one text
    if isinstance(value, list | dict):
        raise ValueError(f"{'a list' if isinstance(value, list) else 'an object'} instead of one value")
    return str(value)


@lru_cache(maxsize=1 << 16)
def _fraction(value: float) -> str:
    if value.is_integer() and abs(value) < LARGEST_WHOLE:
        return str(int(value))
    text: str = pa.array([value]).cast(pa.string())[0].as_py()
    return text
