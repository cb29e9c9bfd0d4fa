"""Find the files of existing splits, and count rows that occur in two splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import duckdb
import numpy as np
import pyarrow as pa

from pipeline.config.columns import expand_ranges
from pipeline.config.data import SPLITS, SplitConfig
from pipeline.data.prepare.encode import HASH_COLUMN
from pipeline.data.prepare.splits import BlockRows, read_block
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.source import find_sources, named_apart
from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger

WARNED_FRACTION = 0.01
logger = get_logger(__name__)


def find_given(config: SplitConfig) -> list[Source]:
    """Return the files of train, validation and test, in this order.

    Raises:
        DataError: a split has no file, or a file (or two files with the same bytes) is in two splits.
    """
    found: list[Source] = []
    for split in SPLITS:
        for pattern in expand_ranges([value] if (value := getattr(config, split)) else [], f"data.split.{split}"):
            try:
                found += [replace(source, split=split) for source in find_sources(pattern)]
            except DataError as error:
                raise DataError(f"data.split.{split}: {error}") from error
    first: dict[tuple[int, str], Source] = {}
    for source in found:
        other = first.setdefault((source.size_bytes, source.digest), source)
        if other.split != source.split:
            same = "is" if other.path == source.path else f"holds the same {source.size_bytes:,} bytes as {other.path},"
            raise DataError(
                f"{source.path} of data.split.{source.split} {same} a file of data.split.{other.split}: name each file in one "
                "split"
            )
    return named_apart(found)


def count_shared_rows(
    config: SplitConfig, blocks: list[BlockRows], engine: duckdb.DuckDBPyConnection
) -> dict[str, int]:
    """Return the mapping split -> number of its rows that equal a row of an earlier split.
    Published data sets often have some such rows, so they are refused only above
    config.max_shared_fraction.

    Raises:
        DataError: a split has more than that share.
    """
    engine.register("row_hashes", _hashes(blocks))
    shared = engine.sql(
        """SELECT sum(validation) FILTER (train > 0), sum(test) FILTER (train > 0 OR validation > 0) FROM (
            SELECT count(*) FILTER (split = 0) AS train, count(*) FILTER (split = 1) AS validation,
            count(*) FILTER (split = 2) AS test FROM row_hashes GROUP BY hash)"""
    ).fetchall()[0]
    rows = np.sum([block.per_split for block in blocks], axis=0)
    counts = {name: int(shared[i - 1] or 0) for i, name in enumerate(SPLITS) if i and rows[i]}
    for i, name in enumerate(SPLITS):
        if (count := counts.get(name, 0)) > WARNED_FRACTION * rows[i]:
            said = (
                f"{count:,} of {rows[i]:,} rows of split {name!r} ({count / rows[i]:.2%}) are equal to a row of an earlier "
                "split in every column that is read"
            )
            if count > config.max_shared_fraction * rows[i]:
                raise DataError(
                    f"{said}, and data.split.max_shared_fraction allows {config.max_shared_fraction:.2%}: do the files "
                    "overlap? Cut them apart, name the columns that tell rows apart, or allow more"
                )
            logger.warning("%s: a model may know them by heart", said)
    return counts


def _hashes(blocks: list[BlockRows]) -> pa.RecordBatchReader:
    """Yield (hash, split) of every row. All rows of a block are in one split."""
    schema = pa.schema([("hash", pa.uint64()), ("split", pa.int8())])

    def batches() -> Iterator[pa.RecordBatch]:
        for block in blocks:
            split = np.full(block.num_rows, int(np.argmax(block.per_split)), dtype=np.int8)
            yield pa.record_batch([read_block(block.file, block.index, [HASH_COLUMN])[0], split], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())
