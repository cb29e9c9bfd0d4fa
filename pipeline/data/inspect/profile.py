"""Profile the columns of a raw file: types, missing and distinct values, skew, and how well each
predicts the label.

DuckDB reads the first rows as text, so every value is seen as written.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.inspect.first_rows import FirstRows, read_first_rows
from pipeline.data.inspect.lists import SEPARATORS, find_beside, find_sequences, shares_of_lists
from pipeline.data.inspect.signal import Signal, measure_signal
from pipeline.data.raw.parse_cells import parse_numbers, parse_times
from pipeline.data.sql import sql_text
from pipeline.runtime.errors import DataError, did_you_mean
from pipeline.runtime.storage import storage

FEW_VALUES = 20  # whole numbers with at most this many values are categories
SURE_NULLS = ("NULL", "null", "\\N", "N/A", "n/a", "nan", "NaN", "<NA>")  # no column means such text as a value
MAX_NULL_WORDS = 3  # texts of a column of numbers that are words for missing values
# 1,234.50 or 12,5 or $3.20 or 15 %
WRITTEN_NUMBER = r"[$€£¥]?\s?[+-]?(\d{1,3}([ ,.'']\d{3})+|\d+)([.,]\d+)?\s?[%$€£¥]?"


class LabelError(DataError):
    """The label cannot be found by its name and values. The message lists candidates."""


@dataclass(frozen=True)
class Column:
    """The profile of a column.

    All shares are shares of the rows that have a value. `alone_auc`: AUC of predicting the label
    from this column alone, out of fold; NaN if it is unknown.
    """

    name: str
    missing: float = 1.0
    distinct: int = 0
    top_share: float = 0.0  # of the most frequent value
    numbers: float = 0.0  # share of values that are numbers
    whole: float = 0.0  # share of whole numbers
    times: float = 0.0  # share of dates or times that are not numbers
    lists: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(SEPARATORS, 0.0)
    )  # separator -> share with it
    low: float = math.nan
    high: float = math.nan
    mean: float = math.nan
    alone_auc: float = math.nan
    examples: list[str] = field(default_factory=list)
    unusable: str = ""  # why prepare would refuse the column
    id: str = ""  # of the column in the table of text
    new_share: float = 0.0  # of the values in the last tenth of the rows, the share that no earlier row has
    written_numbers: float = 0.0  # share of values such as 1,234.50 or 15 %, which are not read as numbers
    weighted: float = 0.0  # of the elements of lists, the share that is id:weight
    signal: Signal = field(default_factory=lambda: Signal(math.nan))


@dataclass(frozen=True)
class Profile:
    """The profile of a file. Format, delimiter and header are written as in a data config; rows: the inspected rows."""

    path: str
    format: str
    delimiter: str | None
    header: list[str]
    rows: int
    is_all: bool
    columns: list[Column]
    label: str
    label_rate: float
    label_values: dict[str, int] = field(default_factory=dict)
    label_threshold: float | None = None
    encoding: str = "utf-8"
    quotes: str = "doubled"
    null_values: list[str] = field(default_factory=list)
    sequences: dict[str, str] = field(default_factory=dict)  # list -> the column whose values it holds
    beside: dict[str, str] = field(default_factory=dict)  # sequence -> another one that always has equally many values


def profile(
    path: str,
    label: str | None,
    max_rows: int,
    label_values: Mapping[str, int] | None = None,
    label_threshold: float | None = None,
) -> Profile:
    """Profile a file. Raises DataError if it cannot be read, or has no column for a label."""
    if not storage.is_local(path) or not os.path.isfile(path):
        raise DataError(f"source={path} is no file on this machine: give one of the raw files, the others are like it")
    connection = duckdb.connect()
    connection.execute("SET threads = 2")
    read = read_first_rows(path, max_rows)
    names, rows = read.names, read.table.num_rows
    if not rows:
        raise DataError(f"source={path} holds no rows: give a file that has some below its line of names")
    null_values = list(dict.fromkeys(text for column in read.table.columns for text in _null_words(column)))
    words = pa.array(["", *null_values])
    filled = [pc.if_else(pc.is_in(each, words), None, each) for each in read.table.columns]
    read.table = pa.table(filled, names=read.table.column_names)
    connection.register("raw", read.table)
    columns = [
        _column(connection, read, number, rows)
        if number not in read.unusable
        else Column(name, unusable=read.unusable[number], id=f"c{number}")
        for number, name in enumerate(names)
    ]
    if label is not None and label not in names:
        raise DataError(
            f"label={label}: {path} has no such column{did_you_mean(label, names)}; it has {', '.join(names)}"
        )
    given = bool(label_values) or label_threshold is not None
    if given and label is None:
        raise DataError("label_values and label_threshold say what a label's values mean: give label=<column> too")
    found = label if label is not None else _found_label(columns, path)
    column = next(each for each in columns if each.name == found)
    values = dict(label_values or {})
    if not given:
        values, label_threshold = _meaning(column)
    labels = _labels(connection, column.id, values, label_threshold)
    for number, each in enumerate(columns):
        if each.name != found and not each.unusable:
            signal = measure_signal(connection, each.id, each.numbers > 0.99 and each.whole < 0.99, labels)
            columns[number] = replace(each, alone_auc=signal.auc, signal=signal)
    rate = float(np.nanmean(labels)) if np.isfinite(labels).any() else math.nan
    sequences = find_sequences(connection, columns)
    return Profile(
        path, read.format, read.delimiter, read.header, rows, rows < max_rows, columns, found, rate, values, label_threshold,
        encoding=read.encoding, quotes=read.quotes, null_values=null_values, sequences=sequences,
        beside=find_beside(connection, columns, sequences),
    )  # fmt: skip


def _null_words(column: pa.ChunkedArray) -> list[str]:
    """Return the texts that stand for a missing value: known words, and the few texts in a column of many numbers."""
    numbers = _numbers(column)
    others = pc.value_counts(pc.filter(column, pc.and_(pc.is_null(numbers), pc.not_equal(column, ""))))
    texts = {str(each["values"]): int(each["counts"]) for each in others.to_pylist() if each["values"] is not None}
    is_numbers = (
        len(texts) <= MAX_NULL_WORDS
        and len(column) - numbers.null_count > sum(texts.values())
        and len(pc.unique(numbers)) > FEW_VALUES
    )
    return [text for text in texts if is_numbers or text in SURE_NULLS]


def _numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return text as float64 as prepare reads it, with null for other text and for NaN."""
    numbers, _ = parse_numbers(pc.if_else(pc.equal(column, ""), None, column))
    return pc.if_else(pc.is_finite(numbers), numbers, None)


def _column(connection: duckdb.DuckDBPyConnection, read: FirstRows, place: int, rows: int) -> Column:
    quoted = f"c{place}"
    value = f"nullif({quoted}, '')"
    found = connection.execute(
        f"SELECT count({value}), count(DISTINCT {value}), avg(CAST(regexp_full_match({value}, '{WRITTEN_NUMBER}') AS INT)) FROM raw"
    ).fetchone()
    assert found is not None
    present, distinct, written = found
    parsed = _numbers(read.table[quoted])
    numbers, whole = len(parsed) - parsed.null_count, pc.sum(pc.equal(pc.floor(parsed), parsed)).as_py() or 0
    low, high, mean = pc.min(parsed).as_py(), pc.max(parsed).as_py(), pc.mean(parsed).as_py()
    times = 0 if 2 * numbers > present else present - len(parse_times(read.table[quoted].drop_null())[1])
    first = rows - rows // 10
    earlier = f"SELECT e FROM (SELECT {quoted} AS e FROM raw LIMIT {first}) WHERE e IS NOT NULL"
    late = f"SELECT DISTINCT v FROM (SELECT {quoted} AS v FROM raw OFFSET {first}) WHERE v <> ''"
    new = _one(connection, f"SELECT avg(CAST(v NOT IN ({earlier}) AS INT)) FROM ({late})")
    most = connection.execute(
        f"SELECT {value}, count(*) AS n FROM raw WHERE {value} IS NOT NULL GROUP BY 1 ORDER BY n DESC, 1 LIMIT 3"
    ).fetchall()
    of = max(present, 1)
    low, high, mean = (math.nan if edge is None else float(edge) for edge in (low, high, mean))
    joined, weighted = dict.fromkeys(SEPARATORS, 0.0), 0.0
    if 2 * max(numbers, times) <= present:
        joined, weighted = shares_of_lists(connection, read.names[place], quoted, distinct)
    return Column(
        read.names[place], 1 - present / rows, distinct, most[0][1] / of if most else 0.0, numbers / of, whole / of, times / of,
        joined, low, high, mean, examples=[str(row[0]) for row in most], id=quoted, new_share=float(new or 0.0),
        written_numbers=0.0 if 2 * numbers > present else float(written or 0.0), weighted=weighted,
    )  # fmt: skip


WORDS = {"yes": 1, "no": 0, "true": 1, "false": 0, "y": 1, "n": 0, "t": 1, "f": 0}
LABEL_NAMES = re.compile(
    r"(is_?)?(label|click|clicked|target|y|conversion|converted|purchase|purchased|like|liked)", re.IGNORECASE
)


def _is_binary(column: Column) -> bool:
    return column.distinct == 2 and (column.low, column.high) == (0.0, 1.0) and column.numbers == 1.0


def _words(column: Column) -> dict[str, int]:
    """Return the mapping text -> 0 or 1 for a column with two words such as yes and no."""
    values = {text: WORDS.get(text.lower(), -1) for text in column.examples} if column.distinct == 2 else {}
    return values if set(values.values()) == {0, 1} else {}


def _found_label(columns: list[Column], path: str) -> str:
    """Return the label column. Candidates are columns of 0 and 1, then columns of yes and no with a
    label's name; a column of 0 and 1 with such a name comes first. A candidate must be the only
    one.
    """
    binary = [each.name for each in columns if _is_binary(each)]
    named = [name for name in binary if LABEL_NAMES.fullmatch(name)]
    if len(named) == 1 or (not named and len(binary) == 1):
        return (named or binary)[0]
    worded = [each.name for each in columns if _words(each) and LABEL_NAMES.fullmatch(each.name)]
    if not binary and len(worded) == 1:
        return worded[0]
    holds = f"{', '.join(binary)} hold 0 and 1 alone" if binary else "no column holds 0 and 1 alone"
    raise LabelError(
        f"{path}: which column is the label? {holds}; give label=<column>, and label_threshold=<number> where it holds "
        f"other numbers; columns are {', '.join(each.name for each in columns)}"
    )


def _meaning(column: Column) -> tuple[dict[str, int], float | None]:
    """Return label_values and label_threshold of a label that is not 0 and 1.

    Raises LabelError if the user must give them.
    """
    if _is_binary(column):
        return {}, None
    if words := _words(column):
        return words, None
    if column.numbers == 1.0 and column.distinct > 1:
        raise LabelError(
            f"label={column.name} holds {column.distinct:,} numbers of {column.low:g} to {column.high:g}: "
            f"say from which one on it is 1, label_threshold={math.ceil(column.mean):g}"
        )
    few = [f"{text}: {int(not place)}" for place, text in enumerate(column.examples)]
    raise LabelError(
        f"label={column.name} holds {column.distinct:,} values that are not 0 and 1: say what is 1, "
        f"'label_values={{{', '.join(few)}}}'"
    )


def _labels(
    connection: duckdb.DuckDBPyConnection, name: str, values: Mapping[str, int], threshold: float | None
) -> NDArray[np.float64]:
    """Return [rows] labels: 0, 1, or NaN for rows without a label."""
    number = f"try_cast({name} AS DOUBLE)"
    if threshold is not None:
        number = f"CAST({number} >= {float(threshold)} AS DOUBLE)"
    elif values:
        cases = " ".join(f"WHEN {sql_text(text)} THEN {int(meant)}" for text, meant in values.items())
        number = f"CAST(CASE {name} {cases} END AS DOUBLE)"
    found = connection.execute(f"SELECT {number} AS label FROM raw").fetchnumpy()["label"]
    return np.ma.filled(found.astype(np.float64), np.nan)


def _one(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]
