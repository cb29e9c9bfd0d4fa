"""Search files for a value and for the bytes of its rows: as they are, and inside compressed and columnar files."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.checkpoint.owners import SHARD
from pipeline.data.read.endless import FILE as NEW_VALUES
from pipeline.extras.differential.packed import PackedFile
from pipeline.extras.erase.sequences import is_sequences, without
from pipeline.extras.erase.target import Target
from pipeline.runtime.storage.manifest import MANIFEST
from pipeline.serving.artifact.deltas import VALUES_FILE

BLOCK_BYTES = 8 << 20
GZIP, ZSTD, ZIP, PARQUET, ARROW = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PAR1", b"ARROW1"
VALUE, ROW = "the value", "the bytes of its row"


def found_in(target: Target, path: str, with_ids: bool = False) -> str:
    """Return what a file contains, or "" if neither the value nor a row of it is found.

    with_ids: whole numbers in columns are ids of rows, not values. A file that cannot be decoded is searched as it is.
    """
    if target.pattern.search(os.path.basename(path).encode()):
        return f"{VALUE} in its name"
    try:
        return _found(target, path, with_ids)
    except (OSError, ValueError, EOFError, pa.ArrowException, zipfile.BadZipFile, zlib.error) as error:
        with open(path, "rb") as file:
            return _in_stream(target, file) or f"bytes that cannot be decoded ({str(error)[:100]})"


def _found(target: Target, path: str, with_ids: bool) -> str:
    if is_sequences(target, path):
        with open_text(path) as lines:
            return VALUE if any(without(target, line) != line for line in lines) else ""
    with open(path, "rb") as file:
        head = file.read(8)
        file.seek(0)
        if head.startswith(PARQUET):
            with pq.ParquetFile(file) as parquet:
                metadata = parquet.metadata.metadata or {}
                groups = (parquet.read_row_group(number) for number in range(parquet.num_row_groups))
                return _in_metadata(target, metadata) or _in_tables(target, groups, with_ids)
        if head.startswith(ARROW):
            with pa.ipc.open_file(file) as arrow:
                batches = (pa.Table.from_batches([arrow.get_batch(n)]) for n in range(arrow.num_record_batches))
                return _in_metadata(target, arrow.schema.metadata or {}) or _in_tables(target, batches, with_ids)
        if head.startswith(ZIP):
            with zipfile.ZipFile(file) as archive:
                for member in archive.namelist():
                    with archive.open(member) as part:
                        if found := _in_stream(target, part):
                            return found
            file.seek(0)
        elif head.startswith(GZIP):
            return _in_stream(target, gzip.open(file))
        elif head.startswith(ZSTD):
            return _in_stream(target, pa.CompressedInputStream(pa.PythonFile(file), "zstd"))
        elif os.path.basename(path) in (NEW_VALUES, VALUES_FILE):
            content = file.read()
            text = zlib.decompress(content) if path.endswith(".z") else content
            return VALUE if _in_values(target, json.loads(text)) else ""
        elif path.endswith(".z"):
            return _in_stream(target, io.BytesIO(zlib.decompress(file.read())))
        elif SHARD.fullmatch(os.path.basename(path)) and _is_packed(path):
            return _in_stream(target, PackedFile(file, os.path.getsize(path), path))  # type: ignore[arg-type]
        return _in_stream(target, file)


def _in_values(target: Target, node: Any) -> bool:
    """Return True if the values by feature in `node`, which a stream has added, have the value."""
    if isinstance(node, dict):
        return any(_in_values(target, each) for name, each in node.items() if name not in target.others)
    return any(_in_values(target, each) for each in node) if isinstance(node, list) else node == target.value


def _is_packed(path: str) -> bool:
    manifest = os.path.join(os.path.dirname(path), MANIFEST)
    if not os.path.exists(manifest):
        return False
    with open(manifest) as file:
        return bool(json.load(file).get("packed"))


def _in_stream(target: Target, stream: Any) -> str:
    """Search a stream of bytes. Text is searched for complete words, other bytes for every occurrence."""
    patterns, pattern = target.bytes_patterns, target.pattern
    overlap = max([len(each) for each in [*patterns, *target.encodings]]) + 2
    before, is_text = b"", None
    while block := stream.read(BLOCK_BYTES):
        is_text = _is_text(block) if is_text is None else is_text
        content = before + block
        if is_text and pattern.search(content):
            return VALUE
        for each in patterns:
            if (not is_text or b"\x00" in each or each in target.rows) and each in content:
                return ROW if each in target.rows else VALUE
        before = content[-overlap:]
    return ""


def _is_text(block: bytes) -> bool:
    start = block[: 1 << 16]
    return b"\x00" not in start and not re.search(rb"[\x01-\x08\x0e-\x1a]", start)


def _in_metadata(target: Target, metadata: dict[bytes, bytes]) -> str:
    if any(target.pattern.search(each) for pair in metadata.items() for each in pair if pair[0] != b"ARROW:schema"):
        return f"{VALUE} in its metadata"
    return ""


def _in_tables(target: Target, tables: Iterator[pa.Table], with_ids: bool) -> str:
    for table in tables:
        for name, column in zip(table.column_names, table.columns, strict=True):
            if holds(target, name, column, with_ids):
                return f"{VALUE} in column {name!r}"
    return ""


def holds(target: Target, name: str, column: pa.ChunkedArray, with_ids: bool = False) -> bool:
    """Return True if a cell of a column contains the value as a word. A number counts in the feature's own column."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.cast(column.type.storage_type)
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return holds(target, name, pc.list_flatten(column), with_ids)
    if pa.types.is_struct(kind):
        parts = pa.table({name: column}).flatten()
        return any(holds(target, each.partition(".")[2], parts[each], with_ids) for each in parts.column_names)
    if pa.types.is_map(kind):
        return any(target.is_value(each) for cell in column.to_pylist() for pair in cell or () for each in pair)
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return (
            not with_ids
            and (name == target.feature or name in target.sharing)
            and bool(pc.any(pc.equal(column.cast(pa.string()), target.value)).as_py())
        )
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)):
        return False
    column = column.cast(pa.large_binary())
    is_it = pc.equal(column, pa.scalar(target.value.encode(), pa.large_binary()))
    if name in target.others:
        column = column.filter(pc.invert(is_it))
    elif bool(pc.any(is_it).as_py()):
        return True
    for each in {word for word in target.encodings if len(word) > 1}:
        hits = column.filter(pc.match_substring(column, each)) if b"\x00" not in each else column.slice(0, 0)
        if any(target.pattern.search(cell) for cell in hits.to_pylist() if cell is not None):
            return True
    return False


def open_text(path: str, mode: str = "rb") -> IO[bytes]:
    """Open a file that may be gzipped. The first bytes decide for reading, the name decides for writing."""
    if "r" in mode:
        with open(path, "rb") as file:
            packed = file.read(2) == GZIP
    else:
        packed = path.endswith(".gz")
    return gzip.open(path, mode) if packed else open(path, mode)  # type: ignore[return-value]
