"""Stage the scores of a prediction in parts, which a restarted run resumes, and write them to one output file.

<staging>/progress.json    what is scored (artifact, source, options) and the parts that are finished: the commit of each
<staging>/00000.arrow      file, row, id columns and score of consecutive source rows
<staging>/00000.jsonl      the rows among them that could not be read

A part is whole blocks of one source. Row groups of the output have a size of their own, so that its bytes do not depend on
where a run was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from pipeline.data.prepare.row_groups import in_row_groups
from pipeline.data.prepare.write_shards import PARQUET_OPTIONS
from pipeline.runtime.storage import atomic, storage

PROGRESS = "progress.json"
ROWS_PER_ROW_GROUP = 1 << 18


@dataclass(frozen=True)
class Part:
    """`next_row` of source number `source` is the first that the part does not hold."""

    number: int
    source: int
    next_row: int
    num_rows: int
    num_refused: int
    size_bytes: int
    row_zero: dict[str, list[int]] = field(default_factory=dict)  # see Scored

    @property
    def table_name(self) -> str:
        return f"{self.number:05d}.arrow"

    @property
    def quarantine_name(self) -> str:
        return f"{self.number:05d}.jsonl"


@dataclass
class Progress:
    """`subject`: everything that the scores depend on."""

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
        """Feature -> lookups, and those of row 0, of all parts."""
        total: dict[str, list[int]] = {}
        for part in self.parts:
            add_counts(total, part.row_zero)
        return total

    def next_row(self, source: int) -> int:
        """The first row of a source that is not scored yet."""
        return max((part.next_row for part in self.parts if part.source == source), default=0)


def add_counts(total: dict[str, list[int]], more: Mapping[str, Sequence[int]]) -> None:
    for name, counts in more.items():
        total[name] = [before + count for before, count in zip(total.get(name, [0, 0]), counts, strict=True)]


class StagedScores:
    """The parts of one prediction. Only one process may hold it."""

    def __init__(self, folder: str, subject: dict[str, Any]) -> None:
        self.folder, self.progress = folder, Progress(subject)

    def take_over(self) -> str:
        """Go on from an earlier run's parts. What keeps them from being taken, which are dropped then; else empty."""
        path = os.path.join(self.folder, PROGRESS)
        if not os.path.exists(path):
            return ""
        try:
            values = json.loads(storage.read_text(path))
            earlier = Progress(values["subject"], [Part(**part) for part in values["parts"]])
        except (ValueError, KeyError, TypeError):
            return f"{path} cannot be read"
        changed = [name for name, value in self.progress.subject.items() if earlier.subject.get(name) != value]
        if changed:
            return f"{' and '.join(changed)} changed"
        for part in earlier.parts:
            table = os.path.join(self.folder, part.table_name)
            if not os.path.exists(table) or os.path.getsize(table) != part.size_bytes:
                return f"{table} is not what was written"
        self.progress = earlier
        return ""

    def add(
        self,
        source: int,
        next_row: int,
        tables: list[pa.Table],
        quarantined: list[dict[str, Any]],
        row_zero: dict[str, list[int]],
    ) -> None:
        """A finished part, durable when this returns."""
        number = len(self.progress.parts)
        rows = pa.concat_tables(tables)
        draft = Part(number, source, next_row, rows.num_rows, len(quarantined), 0)
        path = os.path.join(self.folder, draft.table_name)
        refused = os.path.join(self.folder, draft.quarantine_name)
        with pa.ipc.new_file(path, rows.schema) as writer:
            writer.write_table(rows)
        with open(refused, "w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in quarantined)
        for written in (path, refused):
            atomic.make_durable(written)
        part = Part(number, source, next_row, rows.num_rows, len(quarantined), os.path.getsize(path), row_zero)
        self.progress.parts.append(part)
        storage.publish_text(os.path.join(self.folder, PROGRESS), json.dumps(asdict(self.progress)))

    def tables(self) -> Iterator[pa.Table]:
        for part in self.progress.parts:
            with pa.memory_map(os.path.join(self.folder, part.table_name)) as file:
                reader = pa.ipc.open_file(file)
                for index in range(reader.num_record_batches):
                    yield pa.Table.from_batches([reader.get_batch(index)])

    def quarantine_lines(self) -> Iterator[str]:
        for part in self.progress.parts:
            with open(os.path.join(self.folder, part.quarantine_name), encoding="utf-8") as lines:
                yield from lines


def without_formulas(table: pa.Table) -> pa.Table:
    """Return the rows with ' before each text that a spreadsheet would run as a formula. Numbers stay."""
    columns = []
    for column in table.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            begins = pc.match_substring_regex(column, r"^[=+\-@\t\r]")
            number = pc.match_substring_regex(column, r"^[+\-]?(\d+\.?\d*|\.\d+)([eE][+\-]?\d+)?$")
            quoted = pc.binary_join_element_wise(pa.scalar("'", column.type), column, pa.scalar("", column.type))
            column = pc.if_else(pc.and_not(begins, number), quoted, column)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=table.schema)


def write_output(path: str, schema: pa.Schema, tables: Iterable[pa.Table], staged: str) -> None:
    """Write `path` (.parquet or .csv) whole or not at all; `staged` is a local file that becomes it."""
    # CSV is written row group by row group too: blocks of other sizes are the same bytes.
    with open(staged, "wb") as file, _writer(path, file, schema) as writer:
        for table in in_row_groups(tables, ROWS_PER_ROW_GROUP):
            writer.write_table(table.combine_chunks())
    atomic.publish_file(staged, path)


def _writer(path: str, file: Any, schema: pa.Schema) -> Any:
    if path.endswith(".csv"):
        return pa_csv.CSVWriter(file, schema)
    return pq.ParquetWriter(file, schema, **PARQUET_OPTIONS)
