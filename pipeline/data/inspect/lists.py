"""Find columns of lists in a table of text, and the lists that are histories of another column."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import duckdb

from pipeline.data.raw.json_lists import JSON
from pipeline.data.sql import sql_text

SEPARATORS = ("|", ";", " ", ",", JSON)
LOOSE = (" ", ",")  # separators that other text holds too
LIST_NAME = re.compile(
    r"(genre|tag|categorie|keyword|token|word|topic|interest)s$|list|seq|hist|recent|last_", re.IGNORECASE
)
LIST_SHARE = 0.2  # of the values hold the separator of a list
SHARE_OF_JSON = 0.9  # of the values begin with [ and end with ]
SAME_VALUES = 0.8  # of the distinct values of a list are values of another column


class ListColumn(Protocol):
    """Describe the fields of a profile's column that this module reads."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def distinct(self) -> int: ...
    @property
    def lists(self) -> dict[str, float]: ...


def separator_of(column: ListColumn) -> str | None:
    """Return the separator of a column of lists, None for another column."""
    separator = max(column.lists, key=lambda each: column.lists[each])
    return separator if column.lists[separator] > LIST_SHARE else None


def shares_of_lists(
    connection: duckdb.DuckDBPyConnection, name: str, column: str, distinct: int
) -> tuple[dict[str, float], float]:
    """Return separator -> share of values that hold it, and the share of elements that are id:weight.

    Text with blanks or commas is a list if its parts come again in other values, or by its name.
    Other text has the share 0.
    """
    counted = [
        f"{column} LIKE '[%]'" if separator == JSON else f"contains({column}, {sql_text(separator)})"
        for separator in SEPARATORS
    ]
    query = ", ".join(f"avg(CAST({each} AS INT))" for each in counted)
    found = dict(zip(SEPARATORS, _row(connection, f"SELECT {query} FROM raw WHERE {column} <> ''"), strict=True))
    shares, weighted = {separator: float(share or 0.0) for separator, share in found.items()}, 0.0
    if shares[JSON] > SHARE_OF_JSON:
        return dict.fromkeys(shares, 0.0) | {JSON: shares[JSON]}, 0.0
    shares[JSON] = 0.0
    for separator in [each for each in SEPARATORS if shares[each] > LIST_SHARE]:
        number, pairs = _row(
            connection,
            f"SELECT count(*), avg(CAST(regexp_full_match(v, '.+:[0-9.eE+-]+') AS INT)) FROM ({_elements(column, separator)})",
        )
        if separator in LOOSE and not LIST_NAME.search(name) and 2 * number > distinct:
            shares[separator] = 0.0
        else:
            weighted = max(weighted, float(pairs or 0.0))
    return shares, weighted


def find_sequences(connection: duckdb.DuckDBPyConnection, columns: Sequence[ListColumn]) -> dict[str, str]:
    """Return list -> the column with one value a row that has at least SAME_VALUES of the list's values."""
    found = {}
    singles = [each for each in columns if each.distinct > 1 and separator_of(each) is None]
    for column in columns:
        if (separator := separator_of(column)) is None:
            continue
        elements = _elements(column.id, separator)
        for single in singles:
            (share,) = _row(
                connection, f"SELECT avg(CAST(v IN (SELECT {single.id} FROM raw) AS INT)) FROM ({elements})"
            )
            if share is not None and share >= SAME_VALUES:
                found[column.name] = single.name
                break
    return found


def find_beside(
    connection: duckdb.DuckDBPyConnection, columns: Sequence[ListColumn], sequences: Mapping[str, str]
) -> dict[str, str]:
    """Return sequence -> an earlier sequence that has equally many values in every row."""
    found: dict[str, str] = {}
    leaders: dict[str, str] = {}
    for column in columns:
        if column.name not in sequences:
            continue
        length = f"coalesce(len({_split(column.id, separator_of(column) or '|')}), 0)"
        for leader, name in leaders.items():
            if _row(connection, f"SELECT bool_and({length} = {leader}) FROM raw") == (True,):
                found[column.name] = name
                break
        else:
            leaders[length] = column.name
    return found


def _split(column: str, separator: str) -> str:
    return f"try_cast({column} AS VARCHAR[])" if separator == JSON else f"string_split({column}, {sql_text(separator)})"


def _elements(column: str, separator: str) -> str:
    """Return a query of the distinct elements v of a column's lists."""
    lists = f"SELECT DISTINCT unnest({_split(column, separator)}) AS v FROM raw WHERE {column} <> ''"
    return f"SELECT v FROM ({lists}) WHERE v <> ''"


def _row(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row
