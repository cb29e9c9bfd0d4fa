"""Score rows in DuckDB's SQL with an artifact, in batches.

add_score(connection, Artifact("artifacts/quickstart"))
connection.sql("SELECT score(int_0, ..., cat_25) FROM clicks")
"""

from __future__ import annotations

import duckdb
import pyarrow as pa

from pipeline import Artifact


def add_score(connection: duckdb.DuckDBPyConnection, artifact: Artifact, name: str = "score") -> None:
    """Add the function `name`. Its arguments are the columns of the artifact's schema, in order."""

    def score(*columns: pa.ChunkedArray) -> pa.Array:
        rows = pa.table(list(columns), names=artifact.schema.names)
        return pa.array(artifact.predict(rows).reshape(rows.num_rows, -1)[:, 0])  # of the first label

    connection.create_function(name, score, None, "FLOAT", type="arrow", null_handling="special")
