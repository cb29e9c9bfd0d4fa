"""Stage a source file: typed rows with codes in place of categorical values, and the value of each code.

It depends on its source alone, and `done.json` is written last: a killed run finds its finished files and goes on.

rows.arrow         a record batch a block
entries.parquet    a row group a block: the value behind each code, feature by feature, and its count in the block
quarantine.jsonl   the rows that could not be read
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.transforms import described
from pipeline.data.prepare.encode import TIMESTAMP_COLUMN, EncodedBlock, Features, encode_block
from pipeline.data.prepare.parallel import map_ordered
from pipeline.data.prepare.time_units import count_units
from pipeline.data.prepare.vocabulary import ENTRIES_SCHEMA
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.rows import ParsedRows, open_source, parse_block
from pipeline.data.raw.source import TEACHER_COLUMN, TEACHER_SUFFIX, Block, RowReader, Source
from pipeline.runtime.errors import DataError
from pipeline.runtime.process.processes import LOCK
from pipeline.runtime.storage import atomic, storage

STAGING_VERSION = 1  # what another version staged is not taken over
NUMBER_SHIFT = 40  # a file numbers its blocks and entries from (its own number << 40): ascending in source order
DONE = "done.json"
IDS_FILE = "ids.int32"


@dataclass
class StagedFile:
    """block_rows [num_blocks]; num_values and num_lookups [num_blocks][num_features]."""

    folder: str
    number: int
    num_source_rows: int = 0
    num_quarantined: int = 0
    first_quarantined: str = ""
    block_rows: list[int] = field(default_factory=list)
    num_values: list[list[int]] = field(default_factory=list)
    num_lookups: list[list[int]] = field(default_factory=list)
    num_negative: dict[str, int] = field(default_factory=dict)  # see EncodedBlock
    num_times: dict[str, int] = field(default_factory=dict)  # see count_units
    ids_folder: str = ""  # where that is not the file's own

    @property
    def num_rows(self) -> int:
        return sum(self.block_rows)

    @property
    def rows_path(self) -> str:
        return os.path.join(self.folder, "rows.arrow")

    @property
    def entries_path(self) -> str:
        return os.path.join(self.folder, "entries.parquet")

    @property
    def quarantine_path(self) -> str:
        return os.path.join(self.folder, "quarantine.jsonl")

    @property
    def ids_path(self) -> str:
        """Raw int32, an id for each entry of the file in order; written when values have ids."""
        return storage.join(self.ids_folder or self.folder, IDS_FILE)

    @property
    def num_entries(self) -> int:
        return sum(map(sum, self.num_values))

    @property
    def sizes(self) -> list[int]:
        paths = (self.rows_path, self.entries_path, self.quarantine_path)
        return [os.path.getsize(path) if os.path.exists(path) else 0 for path in paths]

    def block_number(self, block: int) -> int:
        return (self.number << NUMBER_SHIFT) + block


def stage_source(
    source: Source,
    number: int,
    layout: Layout,
    features: Features,
    root: str,
    *,
    block_bytes: int,
    threads: int,
    advance: Callable[[int], None],
    check: Callable[[StagedFile, int], None],
) -> StagedFile:
    """Stage a source under `root`, or take over what an earlier run has staged of it.

    `advance` hears of bytes read. `check` sees the state after each block, and a number of bytes whose rows are all in it; it
    may raise.
    """
    folder = staged_folder(root, source, number, layout, features)
    staged = _finished(folder)
    if staged:
        advance(source.size_bytes)
        return staged
    atomic.begin_marked_folder(folder)
    staged = stage_into(
        folder, source, number, layout, features, block_bytes=block_bytes, threads=threads, advance=advance, check=check
    )
    atomic.finish_marked_folder(folder, DONE, json.dumps(asdict(staged) | {"sizes": staged.sizes}))
    return staged


def staged_folder(root: str, source: Source, number: int, layout: Layout, features: Features) -> str:
    """Named after all that the staged bytes depend on."""
    return storage.join(root, f"{number:05d}-{_key(source, layout, features)}")


def stage_into(
    folder: str,
    source: Source,
    number: int,
    layout: Layout,
    features: Features,
    *,
    block_bytes: int,
    threads: int,
    advance: Callable[[int], None],
    check: Callable[[StagedFile, int], None],
) -> StagedFile:
    """Write the files of a StagedFile to a local folder; see stage_source."""
    staged = StagedFile(folder, number)
    teacher = _read_teacher(source, features)
    reader, names = open_source(layout, source, block_bytes)

    def work(read: tuple[Block, int]) -> tuple[int, Block, ParsedRows, EncodedBlock]:
        block, before = read
        parsed = parse_block(layout, names, block)
        rows = slice(block.first_row, block.first_row + block.num_rows)
        truth = {name: of_label[rows][parsed.kept] for name, of_label in teacher.items()}
        return before, block, parsed, encode_block(features, parsed.table, truth)

    position = 0
    with reader, _Writer(staged) as writer:
        for before, block, parsed, encoded in map_ordered(work, _with_positions(reader), threads):
            writer.add(block, parsed, encoded)
            check(staged, before)
            advance(reader.position - position)
            position = reader.position
    if teacher and (rows := len(next(iter(teacher.values())))) != staged.num_source_rows:
        raise DataError(
            f"{source.path}{TEACHER_SUFFIX} has {rows} rows, its source {staged.num_source_rows}: generate both again"
        )
    return staged


def _with_positions(reader: RowReader) -> Iterator[tuple[Block, int]]:
    """Each block, and a position whose rows are all in the blocks so far: a reader is ahead by what it cuts into blocks."""
    before = now = 0
    for block in reader.blocks():
        if reader.position != now:
            before, now = now, reader.position
        yield block, before


def _key(source: Source, layout: Layout, features: Features) -> str:
    # Frequency thresholds and the like come later: only what the staged bytes depend on.
    hashed = {name: (ids.hash_size, ids.hash_seed) for name, ids in features.ids.items() if ids.kind == "hash"}
    parts = [STAGING_VERSION, source.name, source.size_bytes, source.digest, asdict(layout), hashed]
    parts += ["row hashes"] if features.row_hashes else []
    parts += [f"in buckets: {name}" for name in features.buckets]
    parts += [f"{name} by {kind}" for name, kind in features.transforms.items()]
    parts += described(features.derived, features.derived_kinds)
    return hashlib.sha256(json.dumps([*parts, features.dense_transform]).encode()).hexdigest()[:16]


def remove_unfinished(root: str) -> None:
    """Of a preparation that has failed: all but the staged files that another run can take over; without any, `root` itself."""
    paths = [os.path.join(root, name) for name in os.listdir(root) if name != LOCK]
    kept = [path for path in paths if (staged := _finished(path)) is not None and staged.num_source_rows]
    for path in [path for path in paths if path not in kept] if kept else [root]:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.remove(path)


def _finished(folder: str) -> StagedFile | None:
    """None where the file was not finished, or a machine that lost power kept its mark and not its bytes."""
    path = os.path.join(folder, DONE)
    if not os.path.exists(path):
        return None
    values = json.loads(storage.read_text(path))
    sizes = values.pop("sizes")
    staged = StagedFile(**values | {"folder": folder})
    return staged if staged.sizes == sizes else None


def _read_teacher(source: Source, features: Features) -> dict[str, np.ndarray]:
    """Label -> [rows] true probabilities of a generated source; those of a single label have a name of their own."""
    path = source.path + TEACHER_SUFFIX
    if not storage.is_file(path):
        return {}
    with storage.open_file(path, "rb") as file:
        table = pq.read_table(file)
    names = {TEACHER_COLUMN: features.label, **{name: name for name in features.labels}}
    return {names[name]: table[name].to_numpy() for name in table.column_names if name in names}


class _Writer:
    """Appends blocks to the files of a StagedFile and to its counts."""

    def __init__(self, staged: StagedFile) -> None:
        self._staged = staged
        self._next_entry = staged.block_number(0)
        self._rows: pa.ipc.RecordBatchFileWriter | None = None

    def __enter__(self) -> _Writer:
        encoding = dict.fromkeys(ENTRIES_SCHEMA.names, "PLAIN") | {"entry": "DELTA_BINARY_PACKED"}
        self._entries = pq.ParquetWriter(
            self._staged.entries_path,
            ENTRIES_SCHEMA,
            compression="lz4",
            use_dictionary=False,
            column_encoding=encoding,
        )
        self._quarantine = open(self._staged.quarantine_path, "w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._rows, self._entries, self._quarantine):
            if file:
                file.close()

    def add(self, block: Block, parsed: ParsedRows, encoded: EncodedBlock) -> None:
        staged = self._staged
        if self._rows is None:
            # LZ4 saves two fifths of the staging folder for a fiftieth of the time.
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._rows = pa.ipc.new_file(staged.rows_path, encoded.rows.schema, options=options)
        self._rows.write_batch(encoded.rows)
        self._entries.write_table(self._entry_table(encoded))
        for row in parsed.quarantined:
            self._quarantine.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
        if parsed.quarantined and not staged.first_quarantined:
            staged.first_quarantined = f"line {parsed.quarantined[0].line}: {parsed.quarantined[0].reason}"
        staged.num_source_rows += block.num_rows
        staged.num_quarantined += len(parsed.quarantined)
        staged.block_rows.append(encoded.rows.num_rows)
        staged.num_values.append(encoded.num_values)
        staged.num_lookups.append(encoded.num_lookups)
        found = [(staged.num_negative, encoded.num_negative)]
        if TIMESTAMP_COLUMN in encoded.rows.schema.names:
            found.append((staged.num_times, count_units(encoded.rows[TIMESTAMP_COLUMN].to_numpy())))
        for counts, more in found:
            for name, count in more.items():
                counts[name] = counts.get(name, 0) + count

    def _entry_table(self, encoded: EncodedBlock) -> pa.Table:
        num_entries = len(encoded.values)
        first = self._next_entry
        self._next_entry += num_entries
        columns = [
            np.arange(first, self._next_entry),
            np.full(num_entries, self._staged.block_number(len(self._staged.block_rows))),
            np.repeat(np.arange(len(encoded.num_values), dtype=np.int32), encoded.num_values),
            encoded.values,
            encoded.counts,
        ]
        return pa.table([pa.array(column) for column in columns], schema=ENTRIES_SCHEMA)
