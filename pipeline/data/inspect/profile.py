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
from numpy.typing import NDArray

from pipeline.data.quality import auc
from pipeline.data.sql import sql_path, sql_text
from pipeline.runtime.errors import DataError, did_you_mean
from pipeline.runtime.storage import storage

SEPARATORS = ("|", ";")
CRITEO_COLUMNS = 40
NUM_FOLDS = 2


class LabelError(DataError):
    """The label cannot be found by names and values. The message lists candidates."""


@dataclass(frozen=True)
class Column:
    """A column.

    Shares are of rows with a value. `alone_auc`: AUC of the label by this column alone, out of
    fold; NaN: unknown.
    """

    name: str
    missing: float
    distinct: int
    top_share: float  # of the most frequent value
    numbers: float  # share of values that are numbers
    whole: float  # and whole ones
    times: float  # share of dates or times that are not numbers
    lists: dict[str, float]  # separator -> share of values that contain it
    low: float
    high: float
    mean: float
    alone_auc: float = math.nan
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Profile:
    """A profile: format, delimiter and header as in a data config; rows: the inspected rows."""

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
    kind, delimiter, header = _open(connection, path, max_rows)
    names = [row[0] for row in connection.execute("DESCRIBE raw").fetchall()]
    rows = int(_one(connection, "SELECT count(*) FROM raw"))
    if not rows:
        raise DataError(f"source={path} holds no rows: give a file that has some below its line of names")
    columns = [_column(connection, name, rows) for name in names]
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
    labels = _labels(connection, found, values, label_threshold)
    columns = [each if each.name == found else _with_auc(connection, each, labels) for each in columns]
    rate = float(np.nanmean(labels)) if np.isfinite(labels).any() else math.nan
    return Profile(path, kind, delimiter, header, rows, rows < max_rows, columns, found, rate, values, label_threshold)


def _open(connection: duckdb.DuckDBPyConnection, path: str, max_rows: int) -> tuple[str, str | None, list[str]]:
    """Fill the table `raw` with text. Return (format, delimiter, header)."""
    literal = sql_path(path)
    try:
        if path.endswith(".parquet"):
            connection.execute(f"CREATE TABLE typed AS SELECT * FROM read_parquet({literal}) LIMIT {max_rows}")
            _as_text(connection)
            return "parquet", None, []
        if path.endswith((".jsonl", ".ndjson")):
            connection.execute(
                f"CREATE TABLE typed AS SELECT * FROM read_json({literal}, format='newline_delimited') LIMIT {max_rows}"
            )
            _as_text(connection)
            return "jsonl", None, []
        sniffed = connection.execute(
            f"SELECT Delimiter, HasHeader FROM sniff_csv({literal}, sample_size=20000)"
        ).fetchone()
        assert sniffed is not None
        delimiter, has_header = sniffed
        options = f"all_varchar=true, delim='{delimiter}', header={str(bool(has_header)).lower()}, null_padding=true"
        if delimiter == "\t":
            options += ", quote='', escape=''"
        connection.execute(f"CREATE TABLE raw AS SELECT * FROM read_csv({literal}, {options}) LIMIT {max_rows}")
    except duckdb.Error as error:
        raise DataError(f"source={path} cannot be read: {str(error).splitlines()[0]}") from None
    names = [row[0] for row in connection.execute("DESCRIBE raw").fetchall()]
    if has_header:
        kind = "tsv" if delimiter == "\t" else "csv"
        return kind, None if delimiter in ("\t", ",") else delimiter, []
    if delimiter == "\t" and len(names) == CRITEO_COLUMNS:
        criteo = ["label", *(f"int_{index}" for index in range(13)), *(f"cat_{index}" for index in range(26))]
        _rename(connection, names, criteo)
        return "criteo_tsv", None, []
    made = [f"column_{index}" for index in range(len(names))]
    _rename(connection, names, made)
    return ("tsv" if delimiter == "\t" else "csv"), None if delimiter in ("\t", ",") else delimiter, made


def _as_text(connection: duckdb.DuckDBPyConnection) -> None:
    """Convert columns to text. Values of lists are joined, so that they look as in text files."""
    parts = []
    for name, kind, *_ in connection.execute("DESCRIBE typed").fetchall():
        quoted = _quoted(name)
        text = f"array_to_string({quoted}, '|')" if kind.endswith("[]") else f"CAST({quoted} AS VARCHAR)"
        parts.append(f"{text} AS {quoted}")
    connection.execute(f"CREATE TABLE raw AS SELECT {', '.join(parts)} FROM typed")


def _rename(connection: duckdb.DuckDBPyConnection, names: list[str], new: list[str]) -> None:
    for name, wanted in zip(names, new, strict=True):
        if name != wanted:
            connection.execute(f"ALTER TABLE raw RENAME {_quoted(name)} TO {_quoted(wanted)}")


def _column(connection: duckdb.DuckDBPyConnection, name: str, rows: int) -> Column:
    quoted = _quoted(name)
    value, number = f"nullif({quoted}, '')", f"try_cast({quoted} AS DOUBLE)"
    lists = ", ".join(f"avg(CAST(contains({value}, '{separator}') AS INT))" for separator in SEPARATORS)
    found = connection.execute(
        f"SELECT count({value}), count(DISTINCT {value}), count({number}), count(*) FILTER ({number} = floor({number})), "
        f"count(try_cast({quoted} AS TIMESTAMP)) FILTER ({number} IS NULL), min({number}), max({number}), avg({number}), {lists} FROM raw"
    ).fetchone()
    assert found is not None
    present, distinct, numbers, whole, times, low, high, mean, *shares = found
    most = connection.execute(
        f"SELECT {value}, count(*) AS n FROM raw WHERE {value} IS NOT NULL GROUP BY 1 ORDER BY n DESC, 1 LIMIT 3"
    ).fetchall()
    of = max(present, 1)
    low, high, mean = (math.nan if edge is None else float(edge) for edge in (low, high, mean))
    return Column(
        name, 1 - present / rows, distinct, most[0][1] / of if most else 0.0, numbers / of, whole / of, times / of,
        {separator: float(share or 0.0) for separator, share in zip(SEPARATORS, shares, strict=True)},
        low, high, mean, examples=[str(row[0]) for row in most],
    )  # fmt: skip


WORDS = {"yes": 1, "no": 0, "true": 1, "false": 0, "y": 1, "n": 0, "t": 1, "f": 0}
LABEL_NAMES = re.compile(
    r"(is_?)?(label|click|clicked|target|y|conversion|converted|purchase|purchased|like|liked)", re.IGNORECASE
)


def _is_binary(column: Column) -> bool:
    return column.distinct == 2 and (column.low, column.high) == (0.0, 1.0) and column.numbers == 1.0


def _words(column: Column) -> dict[str, int]:
    """Return text -> 0 or 1 for a column with two words such as yes and no."""
    values = {text: WORDS.get(text.lower(), -1) for text in column.examples} if column.distinct == 2 else {}
    return values if set(values.values()) == {0, 1} else {}


def _found_label(columns: list[Column], path: str) -> str:
    """Return the only column of 0 and 1 with a label's name, or the only one; or the only one of
    yes and no with such a name."""
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

    Raises LabelError if they must be given.
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
    """Return 0, 1, or NaN for rows without a label."""
    number = f"try_cast({_quoted(name)} AS DOUBLE)"
    if threshold is not None:
        number = f"CAST({number} >= {float(threshold)} AS DOUBLE)"
    elif values:
        cases = " ".join(f"WHEN {sql_text(text)} THEN {int(meant)}" for text, meant in values.items())
        number = f"CAST(CASE {_quoted(name)} {cases} END AS DOUBLE)"
    found = connection.execute(f"SELECT {number} AS label FROM raw").fetchnumpy()["label"]
    return np.ma.filled(found.astype(np.float64), np.nan)


def _with_auc(connection: duckdb.DuckDBPyConnection, column: Column, labels: NDArray[np.float64]) -> Column:
    """Set alone_auc: numbers by their rank in either direction, other values by their label rate
    in the other fold."""
    known = ~np.isnan(labels)
    quoted = _quoted(column.name)
    if column.numbers > 0.99 and column.whole < 0.99:
        values = connection.execute(f"SELECT try_cast({quoted} AS DOUBLE) AS v FROM raw").fetchnumpy()["v"]
        values = np.ma.filled(values.astype(np.float64), np.nan)
        values = np.where(np.isnan(values), np.nanmean(values) if np.isfinite(values).any() else 0.0, values)
        area = auc(values[known], labels[known])
        return replace(column, alone_auc=max(area, 1 - area))
    codes = connection.execute(
        f"SELECT dense_rank() OVER (ORDER BY coalesce({quoted}, '')) - 1 AS c FROM (SELECT *, row_number() OVER () AS r FROM raw) ORDER BY r"
    ).fetchnumpy()["c"]
    codes = np.asarray(codes, np.int64)
    folds, scores = np.arange(len(codes)) % NUM_FOLDS, np.zeros(len(codes))
    base = float(np.nanmean(labels))
    for fold in range(NUM_FOLDS):
        others = (folds != fold) & known
        sums = np.bincount(codes[others], weights=labels[others], minlength=codes.max() + 1)
        counts = np.bincount(codes[others], minlength=codes.max() + 1)
        scores[folds == fold] = ((sums + base) / (counts + 1))[codes[folds == fold]]
    return replace(column, alone_auc=auc(scores[known], labels[known]))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _one(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]
