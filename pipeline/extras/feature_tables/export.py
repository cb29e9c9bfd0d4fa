"""Write the tables of feature_tables={user_id: users.parquet} into an artifact, as features/<number>.arrow.

A file has the hashes of the ids (uint64, ascending), the ids (text), and the raw columns in the types
that requests have. It is not compressed, so that servers map it into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.transforms import TEXT as CATEGORY
from pipeline.data.raw.value_types import spelled, why_not_read
from pipeline.data.read.value_index import OFFSET_LIMIT
from pipeline.extras.feature_tables.tables import HASH, hashes_of
from pipeline.runtime.errors import ServingError, did_you_mean
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.serving.artifact.plan import feature_files
from pipeline.serving.artifact.raw_schema import schema_of
from pipeline.serving.artifact.trained_step import TrainedStep
from pipeline.serving.artifact.writer import ArtifactWriter
from pipeline.serving.http.request_rows import BadRequest, read_columns

logger = get_logger("pipeline.export")


def write_feature_tables(job: ExportJob, step: TrainedStep, writer: ArtifactWriter) -> None:
    """Write a file for each of job.feature_tables. Raises ServingError: see read_feature_tables."""
    data = step.job.data
    types = schema_of(step.dataset, step.keys, data.columns, data.synthetic_multi_hot, step.new_values).types
    for key, table in read_feature_tables(job.feature_tables, types):
        writer.add_feature_table(key, table)
        about = f"{table.num_rows:,}", key, ", ".join(table.column_names[2:]), table.nbytes / table.num_rows
        logger.info("features   of %s %s: %s, %d bytes each", *about)


def read_feature_tables(tables: Mapping[str, str], types: pa.Schema) -> Iterator[tuple[str, pa.Table]]:
    """Yield the key and the content of the artifact's file for each table. `types`: the model's raw columns.

    Raises ServingError: files are missing or not Parquet; no column of ids, or ids that are missing or
    not different; columns that the model does not read, or of another type than in training.
    """
    owners: dict[str, str] = {}
    for key, path in tables.items():
        where = f"feature_tables.{key}={path}"
        table = _read(where, key, feature_files(key, path))
        names = [name for name in table.column_names if name != key]
        _check_names(where, names, types)
        for name in names:
            if name in owners or name in tables:
                other = (
                    f"also in feature_tables.{owners[name]}" if name in owners else "the column of ids of another table"
                )
                raise ServingError(f"{where}: column {name!r} is {other}: leave it out of one of the files")
        owners |= dict.fromkeys(names, key)
        yield key, sorted_by_hash(key, _ids(where, table[key]), _typed(where, table.select(names), types))


def _read(where: str, key: str, files: Sequence[str]) -> pa.Table:
    tables = []
    for path in files:
        try:
            with storage.open_file(path, "rb") as file:
                tables.append(pq.read_table(file))
        except (OSError, pa.ArrowException) as error:
            said = " ".join(str(error).split())[:150]
            raise ServingError(f"{where}: {path} cannot be read as Parquet ({said})") from None
        names = tables[-1].column_names
        if key not in names:
            raise ServingError(
                f"{where}: {path} has no column {key!r} of ids{did_you_mean(key, names)}; it has {', '.join(names[:10])}"
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise ServingError(f"{where}: {path} has {names.count(twice[0])} columns {twice[0]!r}: write one")
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid:
        other = next(n for n, each in enumerate(tables) if each.schema != tables[0].schema)
        raise ServingError(
            f"{where}: {files[other]} has other columns or types than {files[0]}: write both alike"
        ) from None


def _check_names(where: str, names: Sequence[str], types: pa.Schema) -> None:
    if unread := [name for name in names if name not in types.names]:
        raise ServingError(
            f"{where} has {len(unread)} columns that the model does not read: {', '.join(map(repr, unread[:5]))}"
            f"{did_you_mean(unread[0], types.names)}; leave them out of the file"
        )
    if not names:
        raise ServingError(f"{where} has ids and no other column: give raw columns that the model reads")


def _ids(where: str, column: pa.ChunkedArray) -> pa.Array:
    """Return the ids as text, spelled as in requests."""
    if problem := why_not_read(column.type, CATEGORY):
        raise ServingError(f"{where}: the ids have type {column.type}: {problem}")
    ids = spelled(column, CATEGORY).cast(pa.large_string()).combine_chunks()
    missing = ids.null_count + pc.sum(pc.equal(ids, "")).as_py() if len(ids) else 0
    if missing:
        raise ServingError(f"{where}: {missing:,} of {len(ids):,} rows have no id: leave them out of the file")
    if not len(ids):
        raise ServingError(f"{where} has no rows: give a row for each id")
    if len(ids.unique()) < len(ids):
        counts = pc.value_counts(ids)
        of_id = counts.field("counts")
        first = counts[pc.index(pc.greater(of_id, 1), True).as_py()]
        raise ServingError(
            f"{where}: {pc.sum(pc.greater(of_id, 1)).as_py():,} of {len(counts):,} ids have several rows, such as "
            f"{first['values'].as_py()!r} with {first['counts'].as_py()}: keep one row for each id"
        )
    return ids


def _typed(where: str, table: pa.Table, types: pa.Schema) -> pa.Table:
    """Return the columns in the types and spellings that a request with them would have."""
    try:
        return read_columns(table, pa.schema([types.field(name) for name in table.column_names]))
    except BadRequest as error:
        raise ServingError(f"{where}: {error.message}") from None
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ServingError(f"{where}: a column cannot be read: {' '.join(str(error).split())[:200]}") from None


def sorted_by_hash(key: str, ids: pa.Array, table: pa.Table) -> pa.Table:
    """Return the content of a file: hashes, ids, and the columns of `table`."""
    hashes = hashes_of(ids.to_pylist())
    order = pa.array(np.argsort(hashes, kind="stable"))
    columns = [pa.array(hashes).take(order), _narrow(ids.take(order))]
    columns += [_narrow(_wide(column).take(order)) for column in table.columns]
    return pa.table(columns, names=[HASH, key, *table.column_names])


def _wide(column: pa.ChunkedArray) -> pa.Array:
    """Return the column as one array, whose text may have more than 2 GiB."""
    kind = column.type
    if pa.types.is_string(kind):
        column = column.cast(pa.large_string())
    elif pa.types.is_list(kind):
        inner = pa.large_string() if pa.types.is_string(kind.value_type) else kind.value_type
        column = column.cast(pa.large_list(inner))
    return column.combine_chunks()


def _narrow(column: pa.Array) -> pa.Array:
    """Return the array with offsets of 4 bytes, if these can hold them."""
    kind = column.type
    if column.nbytes >= OFFSET_LIMIT:
        return column
    if pa.types.is_large_string(kind):
        return column.cast(pa.string())
    if pa.types.is_large_list(kind):
        inner = pa.string() if pa.types.is_large_string(kind.value_type) else kind.value_type
        return column.cast(pa.list_(inner))
    return column
