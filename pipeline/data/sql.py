"""Write values into DuckDB's SQL."""

from __future__ import annotations


def sql_text(value: str) -> str:
    """A text literal: what the value holds is never read as SQL."""
    return "'" + value.replace("'", "''") + "'"
