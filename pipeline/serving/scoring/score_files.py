"""Score raw files block by block: blocks are parsed in parallel and scored in order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from pipeline.config.columns import ColumnsConfig
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.config.registry import components
from pipeline.data.prepare.parallel import map_ordered
from pipeline.data.prepare.row_groups import in_row_groups
from pipeline.data.prepare.write_shards import PARQUET_OPTIONS
from pipeline.data.raw.blocks import Block, ParsedRows, RowReader, Source
from pipeline.data.raw.layout import Layout, find_format
from pipeline.data.raw.rows import open_source, parse_block
from pipeline.data.raw.source import unchanged
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger, progress
from pipeline.runtime.storage import atomic, storage
from pipeline.serving.scoring.scorer import (
    Scorer,
    asked_columns,
    has_scores,
    output_of,
    refused_rows,
    schema_of,
    tables_of,
)

PROGRESS = "progress.json"
ROWS_PER_ROW_GROUP = 1 << 18
logger = get_logger("pipeline.serving.scoring.predict")


@dataclass(frozen=True)
class Part:
    """A finished part of the scores. `next_row` of source number `source` is the first row after this part."""

    number: int
    source: int
    next_row: int
    num_rows: int
    num_refused: int
    size_bytes: int
    row_zero: dict[str, list[int]] = field(default_factory=dict)  # see Scored


@dataclass
class Progress:
    """The progress of a prediction. `subject`: everything that the scores depend on."""

    subject: dict[str, Any]
    parts: list[Part] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def num_refused(self) -> int:
        return sum(part.num_refused for part in self.parts)

    @property
    def row_zero(self) -> dict[str, list[int]]:
        """Return feature -> lookups, and lookups of row 0, over all parts."""
        total: dict[str, list[int]] = {}
        for part in self.parts:
            add_counts(total, part.row_zero)
        return total

    def next_row(self, source: int) -> int:
        """Return the first row of a source that was not scored yet."""
        return max((part.next_row for part in self.parts if part.source == source), default=0)


def add_counts(total: dict[str, list[int]], more: Mapping[str, Sequence[int]]) -> None:
    for name, counts in more.items():
        total[name] = [before + count for before, count in zip(total.get(name, [0, 0]), counts, strict=True)]


@dataclass
class OpenPart:
    """Scored rows that are not yet written to a file."""

    tables: list[pa.Table] = field(default_factory=list)
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    num_rows: int = 0
    row_zero: dict[str, list[int]] = field(default_factory=dict)


class StagedScores:
    """The parts of one prediction. Only one process may hold it."""

    def __init__(self, folder: str, subject: dict[str, Any]) -> None:
        self.folder, self.progress = folder, Progress(subject)

    def _file(self, number: int, kind: str) -> str:
        return os.path.join(self.folder, f"{number:05d}.{kind}")

    def take_over(self) -> None:
        """Use the parts of an earlier run, unless they belong to another prediction or are damaged."""
        path = os.path.join(self.folder, PROGRESS)
        if not os.path.exists(path):
            return
        try:
            values = json.loads(storage.read_text(path))
            earlier = Progress(values["subject"], [Part(**part) for part in values["parts"]])
        except (ValueError, KeyError, TypeError):
            return _start_anew(f"{path} cannot be read")
        if changed := [name for name, value in self.progress.subject.items() if earlier.subject.get(name) != value]:
            return _start_anew(f"{' and '.join(changed)} changed")
        for part in earlier.parts:
            table = self._file(part.number, "arrow")
            if not os.path.exists(table) or os.path.getsize(table) != part.size_bytes:
                return _start_anew(f"{table} is not what was written")
        self.progress = earlier
        if earlier.parts:
            logger.info("going on after %s rows that an earlier run has scored", f"{earlier.num_rows:,}")

    def add(self, source: int, next_row: int, done: OpenPart) -> None:
        """Write a finished part. It is durable when this method returns."""
        number, rows = len(self.progress.parts), pa.concat_tables(done.tables)
        path, refused = self._file(number, "arrow"), self._file(number, "jsonl")
        with pa.ipc.new_file(path, rows.schema) as writer:
            writer.write_table(rows)
        with open(refused, "w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in done.quarantined)
        for written in (path, refused):
            atomic.make_durable(written)
        size_bytes, num_refused = os.path.getsize(path), len(done.quarantined)
        self.progress.parts.append(
            Part(number, source, next_row, rows.num_rows, num_refused, size_bytes, done.row_zero)
        )
        storage.publish_text(os.path.join(self.folder, PROGRESS), json.dumps(asdict(self.progress)))

    def tables(self) -> Iterator[pa.Table]:
        for part in self.progress.parts:
            with pa.memory_map(self._file(part.number, "arrow")) as file:
                reader = pa.ipc.open_file(file)
                for index in range(reader.num_record_batches):
                    yield pa.Table.from_batches([reader.get_batch(index)])

    def quarantine_lines(self) -> Iterator[str]:
        for part in self.progress.parts:
            with open(self._file(part.number, "jsonl"), encoding="utf-8") as lines:
                yield from lines


def _start_anew(why: str) -> None:
    logger.warning("%s since an earlier run of this command: scoring starts anew", why)


def without_formulas(table: pa.Table) -> pa.Table:
    """Return the rows with ' before each text that a spreadsheet would run as a formula. Numbers are unchanged."""
    columns = []
    for column in table.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            begins = pc.match_substring_regex(column, r"^[=+\-@\t\r]")
            number = pc.match_substring_regex(column, r"^[+\-]?(\d+\.?\d*|\.\d+)([eE][+\-]?\d+)?$")
            quoted = pc.binary_join_element_wise(pa.scalar("'", column.type), column, pa.scalar("", column.type))
            column = pc.if_else(pc.and_not(begins, number), quoted, column)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=table.schema)


def write_output(job: PredictJob, schema: pa.Schema, staged: StagedScores) -> None:
    """Write job.output (.parquet or .csv) completely or not at all."""
    tables, path, is_csv = staged.tables(), os.path.join(staged.folder, "output"), job.output.endswith(".csv")
    if is_csv and job.escape_formulas:
        tables = map(without_formulas, tables)
    # CSV is written row group by row group too: blocks of other sizes are the same bytes.
    open_writer = pa_csv.CSVWriter if is_csv else partial(pq.ParquetWriter, **PARQUET_OPTIONS)
    with open(path, "wb") as file, open_writer(file, schema) as writer:
        for table in in_row_groups(tables, ROWS_PER_ROW_GROUP):
            writer.write_table(table.combine_chunks())
    atomic.publish_file(path, job.output)


HOPELESS_ROWS = 1000  # a file more than half of which is unreadable is given up after so many rows
BLOCK_BYTES = 1 << 20  # the least that a part can be
FILE, ROW = "file", "row"
USUAL = "tsv"  # of a file whose name does not say its format


@dataclass(frozen=True)
class OpenedSource:
    """A source with the layout of its rows, and the types of columns that are copied to the output."""

    source: Source
    layout: Layout
    carried: pa.Schema


def format_of(sources: list[Source], columns: ColumnsConfig) -> str:
    """Return the format by the files' names, otherwise the format of the training rows. Raises ServingError."""
    found = {_format_of(source.name, columns) for source in sources}
    if len(found) > 1:
        raise ServingError(f"source names files of several formats ({', '.join(sorted(found))}): score them one by one")
    return found.pop()


def _format_of(name: str, columns: ColumnsConfig) -> str:
    suffix = name.removesuffix(".gz").rpartition(".")[2].lower()
    formats = {known: find_format(known) for known in components("format")}
    if not any(suffix in each.suffixes for each in formats.values()):
        suffix = USUAL
    fitting = [known for known, each in formats.items() if suffix in each.suffixes and each.fits(columns)]
    return min(fitting, key=lambda known: formats[known].columns is None)  # one that fixes just these columns first


def layout_of_file(source: Source, kind: str, columns: ColumnsConfig, id_columns: list[str]) -> Layout:
    """Return the layout of the rows, without labels. Raises DataError if the file lacks needed columns."""
    read = find_format(kind)
    header = read.unlabelled_header(source, columns)
    layout = read.layout(kind, replace(columns, label=""))
    return replace(layout, header=header, carried=tuple(id_columns))


def columns_in(source: Source, kind: str, job: PredictJob, scorer: Scorer) -> ColumnsConfig:
    """Return the columns to read from a file: without columns that it lacks and a feature table has."""
    read, asked = scorer.columns, asked_columns(scorer)
    tables, form = tables_of(scorer), find_format(kind)
    if tables is None or form.columns is not None:
        return read
    nothing = form.layout(kind, ColumnsConfig(label="")).written(job.delimiter, job.encoding, job.quotes)
    reader, names = open_source(nothing, source, 1 << 16)
    with reader:
        optional = tables.fillable(names).union(set(schema_of(asked).names).difference(schema_of(read).names))
        return asked.without(optional.difference(names))


def open_sources(sources: list[Source], layouts: list[Layout], reserved: tuple[str, ...]) -> list[OpenedSource]:
    """Check the columns of every source before any row is scored. Raises ServingError."""
    opened: list[OpenedSource] = []
    for source, layout in zip(sources, layouts, strict=True):
        reader, _ = open_source(layout, source, 1 << 16)
        with reader:
            carried = _carried(layout, reader)
        if taken := [name for name in layout.carried if name in reserved]:
            raise ServingError(
                f"id_columns names {taken[0]!r}, as a column of the output is called: rename it in the source"
            )
        if opened and carried != opened[0].carried:
            raise ServingError(
                f"{source.path}: id columns have other types than in {sources[0].path} ({_types(carried)}; "
                f"{_types(opened[0].carried)}): write both with one type"
            )
        opened.append(OpenedSource(source, layout, carried))
    return opened


def _carried(layout: Layout, reader: RowReader) -> pa.Schema:
    if (schema := reader.schema()) is not None:
        return pa.schema([schema.field(name).with_nullable(True).remove_metadata() for name in layout.carried])
    numbers = layout.columns.dense  # of text
    return pa.schema([pa.field(name, pa.float64() if name in numbers else pa.string()) for name in layout.carried])


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name} {column.type}" for column in schema)


def score_sources(
    job: PredictJob, scorer: Scorer, sources: list[Source], own: Sequence[Source], staged: StagedScores
) -> pa.Schema:
    """Score the rows of the shard's `own` sources that `staged` does not have. Return the schema of
    the output.

    Its columns: file (if there are several), row, the id columns, and the columns of scores.
    """
    kind, fields = staged.progress.subject["format"], output_of(scorer).fields
    layouts = [
        layout_of_file(source, kind, columns_in(source, kind, job, scorer), job.id_columns).written(
            job.delimiter, job.encoding, job.quotes
        )
        for source in sources
    ]
    opened = open_sources(sources, layouts, (FILE, ROW, *(field.name for field in fields)))
    names = [pa.field(FILE, pa.string())] if len(opened) > 1 else []
    schema = pa.schema([*names, pa.field(ROW, pa.int64()), *opened[0].carried, *fields])
    with progress("scoring", sum(source.size_bytes for source in own)) as bar:
        for number, source in enumerate(opened):
            if source.source in own:
                _score_source(job, scorer, source, number, schema, staged, bar.advance)
    return schema


def _score_source(
    job: PredictJob,
    scorer: Scorer,
    opened: OpenedSource,
    number: int,
    schema: pa.Schema,
    staged: StagedScores,
    advance: Callable[[int], object],
) -> None:
    """Score the rows of source `number` that `staged` does not have. `advance` is called with the
    bytes read.

    Raises ServingError if more than half of the file cannot be read, and SourceChangedError.
    """
    threads = job.threads or len(os.sched_getaffinity(0))
    begin = staged.progress.next_row(number)
    reader, names = open_source(opened.layout, opened.source, BLOCK_BYTES)
    part, position, num_seen, num_refused = OpenPart(), 0, 0, 0

    def parse(block: Block) -> tuple[Block, ParsedRows]:
        return block, parse_block(opened.layout, names, block)

    next_row = begin
    with unchanged(opened.source), reader:
        blocks = (block for block in reader.blocks() if block.first_row + block.num_rows > begin)
        for block, parsed in in_batches(map_ordered(parse, blocks, threads), begin, job.batch_rows):
            table, quarantined, row_zero = _score_block(scorer, opened, block, parsed, schema)
            add_counts(part.row_zero, row_zero)
            part.tables.append(table)
            part.quarantined += quarantined
            part.num_rows += block.num_rows
            next_row = block.first_row + block.num_rows
            num_seen, num_refused = num_seen + block.num_rows, num_refused + len(quarantined)
            if num_refused > max(HOPELESS_ROWS, num_seen / 2):
                raise ServingError(
                    f"{num_refused:,} of the first {num_seen:,} rows of {opened.source.path} cannot be read, the last "
                    f"line {quarantined[-1]['line']}: {quarantined[-1]['reason']}; does format= say what the file is?"
                )
            if part.num_rows >= job.rows_per_part:
                staged.add(number, next_row, part)
                part = OpenPart()
            advance(reader.position - position)
            position = reader.position
    if part.num_rows:
        staged.add(number, next_row, part)


def in_batches(
    parsed: Iterable[tuple[Block, ParsedRows]], begin: int, batch_rows: int
) -> Iterator[tuple[Block, ParsedRows]]:
    """Yield the rows from `begin` on in blocks that end at multiples of `batch_rows`.

    A score may round differently in a batch with another number of rows. So a row's batch depends on its
    number alone, as in Predictor.score, and neither on the bytes of a block nor on a restart.
    """
    held: list[tuple[Block, ParsedRows]] = []
    for block, rows in parsed:
        first = max(block.first_row, begin)
        last = block.first_row + block.num_rows
        while first < last:
            end = min(last, (first // batch_rows + 1) * batch_rows)
            held.append(_cut(block, rows, first, end))
            if end % batch_rows == 0:
                yield _joined(held)
                held = []
            first = end
    if held:
        yield _joined(held)


def _cut(block: Block, rows: ParsedRows, first: int, end: int) -> tuple[Block, ParsedRows]:
    """Return the rows `first` to `end` of a block, by their numbers in the file."""
    at, length = first - block.first_row, end - first
    begin, stop = np.searchsorted(rows.kept, [at, at + length])
    line = block.first_line + at
    quarantined = [row for row in rows.quarantined if line <= row.line < line + length]
    part = ParsedRows(rows.table.slice(begin, stop - begin), rows.kept[begin:stop] - at, quarantined)
    return Block(line, first, length), part


def _joined(parts: list[tuple[Block, ParsedRows]]) -> tuple[Block, ParsedRows]:
    """Join rows that follow each other."""
    if len(parts) == 1:
        return parts[0]
    first, last = parts[0][0], parts[-1][0]
    kept = [rows.kept + (block.first_row - first.first_row) for block, rows in parts]
    joined = ParsedRows(
        pa.concat_tables([rows.table for _, rows in parts]),
        np.concatenate(kept),
        [row for _, rows in parts for row in rows.quarantined],
    )
    return Block(first.first_line, first.first_row, last.first_row + last.num_rows - first.first_row), joined


def _score_block(
    scorer: Scorer, opened: OpenedSource, block: Block, parsed: ParsedRows, schema: pa.Schema
) -> tuple[pa.Table, list[dict[str, Any]], dict[str, list[int]]]:
    """Return one output row for each row of the block, the rows without a score, and row_zero."""
    columns_read = opened.layout.columns
    features = parsed.table.select([*columns_read.dense, *columns_read.sparse, *columns_read.raw_lists])
    output = output_of(scorer)
    scores = output.empty(block.num_rows)
    bad = {row.line: {"line": row.line, "reason": row.reason, "text": row.text} for row in parsed.quarantined}
    row_zero: dict[str, list[int]] = {}
    if features.num_rows:
        scored = scorer.score(features)
        add_counts(row_zero, scored.row_zero)
        scores[parsed.kept] = scored.scores.reshape(features.num_rows, *scores.shape[1:])
        for refused in refused_rows(scored):
            line = block.first_line + int(parsed.kept[refused.row])
            text = str(features.slice(refused.row, 1).to_pylist()[0])[:500]
            bad[line] = {"line": line, "reason": refused.reason, "text": text}
    columns = {ROW: pa.array(np.arange(block.first_row, block.first_row + block.num_rows))}
    if FILE in schema.names:
        columns[FILE] = pa.array([opened.source.name] * block.num_rows)
    for name in opened.layout.carried:
        columns[name] = _spread(parsed.table[name], parsed.kept, block.num_rows, schema.field(name).type)
    without = ~has_scores(scores)
    columns |= {each.name: array for each, array in zip(output.fields, output.arrays(scores, without), strict=True)}
    table = pa.table([columns[name] for name in schema.names], schema=schema)
    return table, [{"file": opened.source.name, **bad[line]} for line in sorted(bad)], row_zero


def _spread(column: pa.ChunkedArray, kept: np.ndarray, num_rows: int, kind: pa.DataType) -> pa.ChunkedArray:
    """Return [num_rows] values: the kept rows' values at their positions, and null for all other rows."""
    if len(kept) < num_rows:
        positions = np.full(num_rows, -1)
        positions[kept] = np.arange(len(kept))
        column = column.take(pa.array(positions, mask=positions < 0))
    return column if column.type == kind else column.cast(kind)
