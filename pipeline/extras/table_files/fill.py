"""Fill the rows of tables with the vectors of files, by the values of the ids, and report the coverage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from pipeline.checkpoint.stored_rows import StoredRows
from pipeline.checkpoint.vocabularies import IdSpace, id_space, read_values
from pipeline.config.tables import CompressionConfig, InitConfig
from pipeline.data.dataset import Dataset
from pipeline.data.raw.hashing import hash_ids
from pipeline.data.read.value_index import ValueIndex, index_values
from pipeline.embeddings.table import Table
from pipeline.extras.table_files.vectors import Vectors, read_vectors
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.runtime.logs import get_logger, to_json
from pipeline.runtime.storage import storage
from pipeline.sharding.torchrec.table_init import TablePart, local_tables

Rows = NDArray[np.int64]
REPORT = "table_files.json"
logger = get_logger(__name__)


@dataclass(frozen=True)
class Coverage:
    """How many ids of a table have a vector in the file. lookups: the share of the training lookups
    that these ids have; None for ids that are hashes. unknown: vectors of values that the data set
    lacks. columns: of a row, from the first one on."""

    table: str
    file: str
    ids: int
    covered: int
    lookups: float | None
    unknown: int
    columns: int

    def line(self) -> str:
        share = f"{100 * self.covered / max(1, self.ids):.1f} %"
        lookups = "" if self.lookups is None else f", {100 * self.lookups:.1f} % of the training lookups"
        return (
            f"table {self.table}: {self.covered:,} of {self.ids:,} ids ({share}{lookups}) start from {self.file}; "
            f"{self.unknown:,} of its vectors have a value that the data set lacks"
        )


def fill_from_files(
    model: nn.Module, tables: Sequence[Table], dataset: Dataset, data_path: str, run_dir: str | None = None
) -> list[Coverage]:
    """Fill this rank's rows of the tables whose config has init.file. The tables have initial
    values; ids without a vector keep them. Rank 0 writes the coverage to the run folder. Raises
    ConfigError or DataError for a file that does not fit the table."""
    parts = {config.name: found for config, found in local_tables(model)}
    coverage = [_fill(table, parts[table.name], dataset, data_path) for table in tables]
    for each in coverage:
        logger.info("%s", each.line())
    if run_dir is not None and dist.get_rank() == 0:
        storage.publish_text(f"{run_dir}/{REPORT}", to_json([asdict(each) for each in coverage], indent=1))
    return coverage


def _fill(table: Table, parts: list[TablePart], dataset: Dataset, data_path: str) -> Coverage:
    key = f"tables.{table.config_name}." + ("init.file" if table.compression is None else "compression.options.file")
    ids = id_space(dataset, data_path, table.feature_names)
    rows_of = _rows_of(ids, key)
    num_ids = max(dataset.sparse_feature(name).cardinality for name in table.feature_names) - 1
    covered, unknown, width = np.zeros(table.num_embeddings, np.bool_), 0, 0
    for values, vectors in read_vectors(table.init, key):
        width = vectors.shape[1]
        if table.compression is not None:
            vectors = _marked(table.compression, key, vectors)
        _check(table, key, vectors)
        rows = rows_of(values)
        known = np.flatnonzero(rows > 0)
        unknown += len(rows) - len(known)
        if ids.vocabulary:
            _check_new(table.init, values, rows, known, covered)
        covered[rows[known]] = True
        for part in parts:
            _write(part, rows[known], vectors[known])
    found = Coverage(
        table.config_name, str(table.init.file), num_ids, int(covered.sum()), _lookups(ids, covered), unknown, width
    )
    if not found.covered:
        raise DataError(
            f"{key}={table.init.file}: none of its {unknown:,} vectors has a value of {', '.join(table.feature_names)}; compare "
            f"the values with {ids.vocabulary or 'the source'}, or leave the file out"
        )
    return found


def _rows_of(ids: IdSpace, key: str) -> Callable[[pa.Array], Rows]:
    """Return the function from values to rows, which are 0 for unknown values."""
    if ids.hashed is not None:
        size, seed = ids.hashed
        return lambda values: hash_ids(values, size, seed)
    if ids.vocabulary is None:
        raise ConfigError(f"{key}: the values of the table's rows are unknown: {ids.reason}; leave the file out")
    index = ValueIndex([index_values(read_values(ids.vocabulary))])
    return lambda values: index.ids(np.zeros(len(values), np.int64), values)


def _marked(config: CompressionConfig, key: str, vectors: Vectors) -> Vectors:
    """Return the vectors with a further column of 1, which compression.kind=vectors reads. Raises
    ConfigError for another width than the config has."""
    width = int(config.options["width"])
    if vectors.shape[1] != width:
        raise ConfigError(
            f"{key}: the file has vectors of {vectors.shape[1]} numbers, but width={width}; set "
            f"{key.removesuffix('file')}width={vectors.shape[1]}"
        )
    return np.concatenate([vectors, np.ones((len(vectors), 1), np.float32)], axis=1)


def _check(table: Table, key: str, vectors: Vectors) -> None:
    if vectors.shape[1] > table.embedding_dim:
        raise ConfigError(
            f"{key}={table.init.file} has vectors of {vectors.shape[1]} numbers, but embedding_dim={table.embedding_dim}; set "
            f"tables.{table.config_name}.embedding_dim={vectors.shape[1]}, or write narrower vectors"
        )
    limit = torch.finfo(torch.float16).max
    if table.data_type == "fp16" and (largest := float(np.abs(vectors).max(initial=0))) > limit:
        raise DataError(
            f"{key}={table.init.file} has the number {largest:g}, and fp16 ends at {limit:g}; use data_type=fp32"
        )


def _check_new(init: InitConfig, values: pa.Array, rows: Rows, known: Rows, covered: NDArray[np.bool_]) -> None:
    """Raise DataError if a value has two vectors."""
    order = known[np.argsort(rows[known], kind="stable")]
    again = np.concatenate([known[covered[rows[known]]], order[1:][rows[order[1:]] == rows[order[:-1]]]])
    if len(again):
        raise DataError(f"{init.file} has two vectors of {str(values[int(again[0])])!r}; keep one of them")


@torch.no_grad()
def _write(part: TablePart, rows: Rows, vectors: Vectors) -> None:
    """Write the vectors of the table's `rows` into this part of the table."""
    num_rows, num_columns = part.values.shape
    here = np.flatnonzero((rows >= part.row) & (rows < part.row + num_rows))
    here = here[np.argsort(rows[here], kind="stable")]
    end = min(vectors.shape[1] - part.column, num_columns)
    if not len(here) or end <= 0:
        return
    own = torch.from_numpy(rows[here] - part.row)
    values = torch.from_numpy(vectors[here, part.column : part.column + end])
    if isinstance(part.values, StoredRows):
        block = part.values.read_rows(own.numpy())
        block[:, :end] = values
        part.values.index_copy_(0, own, block)
    else:
        part.values[:, :end].index_copy_(0, own.to(part.values.device), values.to(part.values))


def _lookups(ids: IdSpace, covered: NDArray[np.bool_]) -> float | None:
    """Return the share of the training lookups of known values that are covered."""
    if ids.vocabulary is None:
        return None
    counts = pq.read_table(ids.vocabulary, columns=["count"])["count"].to_numpy()
    return float(counts[covered[1 : len(counts) + 1]].sum() / max(1, counts.sum()))
