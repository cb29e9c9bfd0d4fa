"""Compare logged rows with the rows that training has of the same requests, column by column.

Both are read and spelled as prepare does. A column with other values is named with an example, and
with what the difference looks like: letter case, a factor, an offset, a cut list and so on.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.transforms import LIST
from pipeline.config.transforms import TEXT as CATEGORY
from pipeline.data.raw.value_types import is_list, plain, spelled
from pipeline.extras.serving_log import log_files
from pipeline.extras.serving_log.log_files import About, raw_columns
from pipeline.extras.serving_log.replay import differing_features, encode_again
from pipeline.runtime.errors import DataError, did_you_mean
from pipeline.serving.scoring.raw_rows import RowEncoder

MOST_PAIRS = 200  # that are looked at for what a difference looks like
MOST = 0.9  # of them must look alike
ABSENT = "is missing in the training rows"


@dataclass
class ColumnSkew:
    """A raw column with other values in training. rows: how many; prepared: in how many of them a
    feature or dense value of the column differs too. pairs: served and training values.
    """

    column: str
    rows: int = 0
    prepared: int = 0
    absent: bool = False
    request: dict[str, Any] = field(default_factory=dict)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    looks_like: str = ""


@dataclass
class TrainingRows:
    """Raw rows of training, found by request id, and by the row's number in the request if they have it."""

    table: pa.Table
    keys: pa.Array
    num_doubled: int

    def find(self, rows: pa.Table) -> np.ndarray:
        """Return for each logged row the number of its training row, -1 if there is none."""
        found = pc.index_in(keys_of(rows, log_files.REQUEST_ID, log_files.ROW), value_set=self.keys)
        return np.asarray(found.fill_null(-1), np.int64)


def read_training_rows(path: str, id_column: str, row_column: str) -> TrainingRows:
    """Read Parquet files. Raises DataError if they have no column of request ids."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"rows={path} is not a Parquet file or a folder of them: {' '.join(str(error).split())[:150]}"
        ) from None
    if id_column not in table.column_names:
        hint = did_you_mean(id_column, table.column_names)
        raise DataError(f"rows={path} has no column {id_column!r} of request ids{hint}: set id_column")
    keys = keys_of(table, id_column, row_column if row_column in table.column_names else None)
    return TrainingRows(table, keys, table.num_rows - len(keys.unique()))


def keys_of(table: pa.Table, id_column: str, row_column: str | None) -> pa.Array:
    """Return request id and row number as one text. Without numbers a request has one row."""
    ids = table[id_column].cast(pa.string())
    numbers = table[row_column].cast(pa.int64()).cast(pa.string()) if row_column else pa.repeat("0", table.num_rows)
    return pc.binary_join_element_wise(ids, numbers, "\n").combine_chunks()


def compare(
    encoder: RowEncoder, about: About, logged: pa.Table, training: pa.Table, found: dict[str, ColumnSkew]
) -> int:
    """Compare rows pairwise, and add what differs to `found`. Return how many rows differ."""
    raw = raw_columns(logged)
    columns: dict[str, pa.ChunkedArray] = {}
    differing: dict[str, np.ndarray] = {}
    for name, served in zip(raw.column_names, raw.columns, strict=True):
        absent = name not in training.column_names
        missing = pa.chunked_array([pa.nulls(raw.num_rows, served.type)])
        columns[name] = own = missing if absent else _read_as(training[name], served, name, encoder)
        differs = _differs(served, own)
        if differs.any():
            differing[name] = differs
            _note(found.setdefault(name, ColumnSkew(name, absent=absent)), differs, logged, served, own)
    prepared = _prepared_differs(encoder, about, logged, pa.table(columns))
    for name, differs in differing.items():
        if of_features := [each for feature, each in prepared.items() if name in _sources(encoder, feature)]:
            found[name].prepared += int((differs & np.any(of_features, axis=0)).sum())
    return int(np.any([*differing.values()], axis=0).sum()) if differing else 0


def _read_as(column: pa.ChunkedArray, served: pa.ChunkedArray, name: str, encoder: RowEncoder) -> pa.ChunkedArray:
    """Return a training column in the type of the served column, its values read and spelled as prepare does."""
    try:
        kind = served.type
        if pa.types.is_string(kind):
            return spelled(column, CATEGORY).cast(kind)
        if is_list(kind) and not is_list(plain(column).type):
            parts = pc.split_pattern(column.cast(pa.string()), encoder.schema.list_separator)
            empty = pc.equal(column.cast(pa.string()), "")
            return pc.if_else(empty, pa.scalar(None, parts.type), parts).cast(kind)
        if is_list(kind) and pa.types.is_string(kind.value_type):
            return spelled(column, LIST).cast(kind)
        column = plain(column)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
        return column.cast(pa.int8()).cast(kind) if pa.types.is_boolean(column.type) else column.cast(kind)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"the column {name!r} of the training rows cannot be read as {served.type}: "
            f"{' '.join(str(error).split())[:150]}"
        ) from None


def _differs(served: pa.ChunkedArray, own: pa.ChunkedArray) -> np.ndarray:
    """Return [rows] True if two values differ. Numbers are float32, as in prepared rows; NaN is a missing value."""
    if pa.types.is_floating(served.type):
        a, b = (np.asarray(pc.fill_null(each, math.nan), np.float64).astype(np.float32) for each in (served, own))
        return ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if is_list(served.type):  # few columns are lists; None and an empty list are alike
        pairs = zip(served.to_pylist(), own.to_pylist(), strict=True)
        return np.array([(a or []) != (b or []) for a, b in pairs], np.bool_)
    a, b = (pc.fill_null(each.cast(pa.string()), "") for each in (served, own))
    return np.asarray(pc.not_equal(a, b))


def _note(
    skew: ColumnSkew, differs: np.ndarray, logged: pa.Table, served: pa.ChunkedArray, own: pa.ChunkedArray
) -> None:
    rows = np.flatnonzero(differs)
    if not skew.rows:
        first = int(rows[0])
        skew.request = {
            "request_id": logged[log_files.REQUEST_ID][first].as_py(),
            "row": logged[log_files.ROW][first].as_py(),
        }
    skew.rows += len(rows)
    taken = pa.array(rows[: MOST_PAIRS - len(skew.pairs)], pa.int64())
    skew.pairs += zip(served.take(taken).to_pylist(), own.take(taken).to_pylist(), strict=True)


def _prepared_differs(encoder: RowEncoder, about: About, logged: pa.Table, training: pa.Table) -> dict[str, np.ndarray]:
    """Return feature or dense column -> [rows] True if the prepared training row differs from the log."""
    was_kept, is_kept, rows, encoded = encode_again(encoder, about, logged, training)
    whole: dict[str, np.ndarray] = {}
    for name, differs in differing_features(about, rows, encoded).items():
        whole[name] = was_kept != is_kept
        whole[name][was_kept & is_kept] = differs
    return whole


def _sources(encoder: RowEncoder, feature: str) -> set[str]:
    """Return the raw columns that a feature or a dense column is made of."""
    dense = [feature] if feature in encoder.schema.dense else []
    return set(encoder.schema.of_features([feature], dense).columns)


def explain(found: Mapping[str, ColumnSkew]) -> None:
    """Say of each column what its difference looks like."""
    for skew in found.values():
        others = [each for each in found.values() if each is not skew and each.request == skew.request]
        swapped = [each.column for each in others if _are_swapped(skew.pairs, each.pairs)]
        said = f"training has the values of {swapped[0]!r} here: the columns are swapped" if swapped else ""
        skew.looks_like = ABSENT if skew.absent else said or looks_like(skew.pairs)


def _are_swapped(own: Sequence[tuple[Any, Any]], other: Sequence[tuple[Any, Any]]) -> bool:
    """Return True if most training values of each column are the served values of the other one. Rows
    in which both columns have one value differ in neither.
    """
    here, there = [(str(a), str(b)) for a, b in own], [(str(a), str(b)) for a, b in other]
    crossed = sum(a == d and b == c for (a, b), (c, d) in zip(here, there, strict=False))
    return crossed >= MOST * max(1, min(len(here), len(there)))


def looks_like(pairs: Sequence[tuple[Any, Any]]) -> str:
    """Return what most pairs (served, training) have in common, "other values" if nothing is found."""
    if all(b is None for _, b in pairs):
        return "training has no value"
    if all(a is None for a, _ in pairs):
        values = {str(b) for _, b in pairs}
        return f"a missing value is {values.pop()!r} in training" if len(values) == 1 else "the request has no value"
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    if all(isinstance(a, list) and isinstance(b, list) for a, b in both):
        return _first(LIST_CHECKS, both) or "other values"
    texts = [(str(a), str(b)) for a, b in both]
    if any(isinstance(a, str) for a, _ in both) and (found := _first(TEXT_CHECKS, texts)):
        return found
    numbers = [(_number(a), _number(b)) for a, b in both]
    if all(a is not None and b is not None for a, b in numbers):
        return _looks_like_numbers(numbers) or "other values"  # type: ignore[arg-type]
    return "other values"


Check = tuple[str, Callable[[Any, Any], bool]]
LIST_CHECKS: list[Check] = [
    ("training has the list in reversed order", lambda a, b: a[::-1] == b),
    ("training has only the beginning of the list", lambda a, b: len(b) < len(a) and a[: len(b)] == b),
    ("training has only the end of the list", lambda a, b: len(b) < len(a) and a[len(a) - len(b) :] == b),
    ("the request has only a part of the list", lambda a, b: len(a) < len(b) and a in (b[: len(a)], b[-len(a) :])),
    ("training has the list in another order", lambda a, b: sorted(map(str, a)) == sorted(map(str, b))),
]
TEXT_CHECKS: list[Check] = [
    ("white space at the ends", lambda a, b: a.strip() == b.strip()),
    ("upper and lower case", lambda a, b: a.casefold() == b.casefold()),
    ("white space and letter case", lambda a, b: a.strip().casefold() == b.strip().casefold()),
    ("another Unicode form", lambda a, b: unicodedata.normalize("NFKC", a) == unicodedata.normalize("NFKC", b)),
    ("another spelling of the same number", lambda a, b: _number(a) is not None and _number(a) == _number(b)),
]


def _first(checks: Sequence[Check], pairs: Sequence[tuple[Any, Any]]) -> str:
    return next((text for text, holds in checks if sum(holds(a, b) for a, b in pairs) >= MOST * len(pairs)), "")


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _looks_like_numbers(pairs: Sequence[tuple[float, float]]) -> str:
    a, b = np.array(pairs, np.float64).T
    for decimals in range(7):
        if np.mean(np.isclose(np.round(a, decimals), b, rtol=1e-6, atol=1e-9)) >= MOST:
            return f"training has it rounded to {decimals} decimals"
    zone = "; a time zone?"
    offset = float(np.median(b - a))
    if offset and np.mean(np.isclose(b - a, offset, rtol=1e-4)) >= MOST:
        hours = offset / 3600
        return f"training has {offset:+g}" + (zone if hours == round(hours) else "")
    ratios = b[a != 0] / a[a != 0]
    if len(ratios) and np.mean(np.isclose(ratios, np.median(ratios), rtol=1e-4)) >= MOST:
        return f"training has {np.median(ratios):g} times the value; another unit?"
    whole = np.all(a == np.round(a)) and np.all((a >= 0) & (a < 24)) and np.all((b >= 0) & (b < 24))
    around = np.round(b - a) % 24
    if whole and np.mean(around == np.median(around)) >= MOST:
        return f"training has {int(np.median(around)):+d} hours of 24{zone}"
    return ""
