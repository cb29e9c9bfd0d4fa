"""Profile the columns of a raw file: types, missing values, distinct values, skew, and how far each alone tells the label.

DuckDB reads the first rows as text, so that every value is seen as it is written.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.data.quality import auc
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage

SEPARATORS = ("|", ";")
CRITEO_COLUMNS = 40
NUM_FOLDS = 2


class LabelError(DataError):
    """Which column is the label cannot be told from names and values; the message says which could be."""


@dataclass(frozen=True)
class Column:
    """Shares are of the rows that have a value; `alone_auc`: of the label, by this column alone, out of fold (NaN: unknown)."""

    name: str
    missing: float
    distinct: int
    top_share: float  # of the most frequent value
    numbers: float  # share of values that are numbers
    whole: float  # and whole ones
    times: float  # that are dates or times, and no numbers
    lists: dict[str, float]  # separator -> share of values that hold it
    low: float
    high: float
    mean: float
    alone_auc: float = math.nan
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Profile:
    """format, delimiter and header as a data config has them; rows: that were looked at."""

    path: str
    format: str
    delimiter: str | None
    header: list[str]
    rows: int
    is_all: bool
    columns: list[Column]
    label: str
    label_rate: float


def profile(path: str, label: str | None, max_rows: int) -> Profile:
    """Raises DataError for a file that cannot be read, or that has no column of 0 and 1 for a label."""
    if not storage.is_local(path) or not os.path.isfile(path):
        raise DataError(f"source={path} is no file on this machine: give one of the raw files, the others are like it")
    connection = duckdb.connect()
    connection.execute("SET threads = 2")
    kind, delimiter, header = _open(connection, path, max_rows)
    names = [row[0] for row in connection.execute("DESCRIBE raw").fetchall()]
    rows = int(_one(connection, "SELECT count(*) FROM raw"))
    if not rows:
        raise DataError(f"source={path} holds no rows")
    columns = [_column(connection, name, rows) for name in names]
    found = _label(columns, label, path)
    labels = np.asarray(
        connection.execute(f"SELECT try_cast({_quoted(found)} AS DOUBLE) FROM raw").fetchnumpy()[
            _first(connection, found)
        ]
    )
    labels = np.ma.filled(labels.astype(np.float64), np.nan)
    columns = [each if each.name == found else _with_auc(connection, each, labels) for each in columns]
    whole = rows < max_rows
    return Profile(path, kind, delimiter, header, rows, whole, columns, found, float(np.nanmean(labels)))


def _open(connection: duckdb.DuckDBPyConnection, path: str, max_rows: int) -> tuple[str, str | None, list[str]]:
    """Fill the table `raw` with text; (format, delimiter, header)."""
    literal = "'" + path.replace("'", "''") + "'"
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
    """Of lists the values joined, so that they look as in text files."""
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


LABEL_NAMES = re.compile(
    r"(is_?)?(label|click|clicked|target|y|conversion|converted|purchase|purchased|like|liked)", re.IGNORECASE
)


def _label(columns: list[Column], wanted: str | None, path: str) -> str:
    binary = [
        each.name
        for each in columns
        if each.distinct == 2 and (each.low, each.high) == (0.0, 1.0) and each.numbers == 1.0
    ]
    if wanted is not None:
        if wanted not in [each.name for each in columns]:
            raise DataError(
                f"label={wanted}: {path} has no such column; it has {', '.join(each.name for each in columns)}"
            )
        if wanted not in binary:
            raise DataError(
                f"label={wanted}: its values are not 0 and 1; columns of 0 and 1 are {', '.join(binary) or 'none'}"
            )
        return wanted
    named = [name for name in binary if LABEL_NAMES.fullmatch(name)]
    if len(named) == 1 or (not named and len(binary) == 1):
        return (named or binary)[0]
    raise LabelError(
        f"{path}: which column is the label? Columns of 0 and 1 are {', '.join(binary) or 'none'}; give label=<column>"
    )


def _with_auc(connection: duckdb.DuckDBPyConnection, column: Column, labels: NDArray[np.float64]) -> Column:
    """Numbers by their rank, either way round; other values by their label rate in the other fold."""
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


def _first(connection: duckdb.DuckDBPyConnection, name: str) -> str:
    return str(connection.execute(f"SELECT try_cast({_quoted(name)} AS DOUBLE) FROM raw LIMIT 0").description[0][0])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _one(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]
