"""Read a table of data.joins, and find the version of a key that had been written at a time.

A version is a row of the table. It is visible from max(valid_from, written_at) + delay on. Of the
visible versions of a key, the current one has the latest valid_from, and of these the latest
written_at. So a correction of an older period does not hide newer values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.config.columns import ColumnsConfig
from pipeline.config.registry import components
from pipeline.data.prepare.encode import codes_of
from pipeline.data.prepare.time_units import count_units
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import find_format
from pipeline.data.raw.parse_cells import parse_times
from pipeline.data.raw.rows import open_source, parse_block
from pipeline.data.raw.source import unchanged
from pipeline.data.raw.value_types import TIMES, ZONED, kind_of, plain
from pipeline.data.read.value_index import ValueIndex, index_values
from pipeline.extras.joins.config import JoinConfig
from pipeline.runtime.errors import DataError

BLOCK_BYTES = 1 << 22
Numbers = NDArray[np.int64]


class Found(NamedTuple):
    """For each row the number of the version that it may see and of the newest one, 0 if there is
    none, and 1 if the version that it may see became visible at exactly the row's time."""

    visible: Numbers
    latest: Numbers
    at_once: Numbers


@dataclass(frozen=True)
class Versions:
    """The versions of a table, sorted by key and time. Version n is row n - 1 of `table`, which has
    typed columns as parse_block returns them.

    keys: number of the key of each version, from 1 on. places: combined number of key and time.
    current: the version that is current from then on. times: the different times.
    """

    table: pa.Table
    index: ValueIndex
    keys: Numbers
    times: Numbers
    visible_from: Numbers
    places: Numbers
    current: Numbers
    unit: str
    has_zone: bool | None  # None: unknown, because the times are text, whole numbers or dates

    def find(self, keys: pa.ChunkedArray, times: Numbers, null_values: Sequence[str] = ()) -> Found:
        codes, distinct = codes_of(plain(keys).combine_chunks(), null_values)
        numbers = self.index.ids(np.zeros(len(distinct), np.int64), distinct.cast(pa.large_string()))
        key = np.concatenate([np.zeros(1, np.int64), numbers])[codes]
        rank = np.searchsorted(self.times, times, side="right")
        at = np.searchsorted(self.places, key * (len(self.times) + 1) + rank, side="right") - 1
        seen = (at >= 0) & (key > 0) & (self.keys[np.maximum(at, 0)] == key)
        visible = np.where(seen, self.current[np.maximum(at, 0)], 0)
        last = np.searchsorted(self.keys, key, side="right") - 1
        latest = np.where(key > 0, self.current[np.maximum(last, 0)], 0)
        at_once = seen & (self.visible_from[np.maximum(visible - 1, 0)] == times)
        return Found(visible, latest, at_once.astype(np.int64))

    def rows(self, versions: Numbers) -> pa.Table:
        """Return the rows with these numbers. Version 0 has missing values."""
        return self.table.take(pa.array(versions - 1, mask=versions == 0))


def format_of(name: str) -> str:
    """Return the format of a table by the end of its name. Raises DataError for another one."""
    suffix = name.removesuffix(".gz").rpartition(".")[2].lower()
    known = {end: each for each in components("format") for end in find_format(each).suffixes if end}
    fixed = [end for end, each in known.items() if find_format(each).columns is not None]
    if suffix not in known or suffix in fixed:
        usual = ", ".join(f".{end}" for end in known if end not in fixed)
        raise DataError(f"data.joins: {name} is of no known format: let its name end in one of {usual}")
    return known[suffix]


def read_versions(
    join: JoinConfig, sources: Sequence[Source], columns: ColumnsConfig, group: Sequence[str]
) -> Versions:
    """Read a table with `columns` and further columns `group`. Raises DataError if it has a value
    that cannot be read, or two rows of a key with equal times."""
    carried = tuple(dict.fromkeys([join.on, *join.times, *group]))
    parts: list[pa.Table] = []
    zones: set[str] = set()
    for source in sources:
        form = format_of(source.path)
        layout = replace(find_format(form).layout(form, replace(columns, label="", labels={}, timestamp=None)), carried=carried)  # fmt: skip
        with unchanged(source):
            reader, names = open_source(layout, source, BLOCK_BYTES)
            with reader:
                if (schema := reader.schema()) is not None:
                    zones |= {kind_of(schema.field(name).type) for name in join.times}
                for block in reader.blocks():
                    parsed = parse_block(layout, names, block)
                    if parsed.quarantined:
                        bad = parsed.quarantined[0]
                        raise DataError(
                            f"{source.path}, line {bad.line}: {bad.reason}; correct it, because without this row older "
                            "values would be used in its place"
                        )
                    parts.append(_with_times(join, parsed.table, source, block.first_line))
    if not parts or not sum(map(len, parts)):
        raise DataError(f"data.joins: {join.table} has no rows")
    table = pa.concat_tables(_alike(parts), promote_options="permissive").unify_dictionaries().combine_chunks()
    return _sorted(join, table, zones)


def _alike(parts: list[pa.Table]) -> list[pa.Table]:
    """Return the tables without dictionaries, which differ in the types of their indices."""
    for number, table in enumerate(parts):
        for at, each in enumerate(table.schema):
            if pa.types.is_dictionary(each.type):
                table = table.set_column(at, each.name, table[each.name].cast(each.type.value_type))
        parts[number] = table
    return parts


def _with_times(join: JoinConfig, table: pa.Table, source: Source, first_line: int) -> pa.Table:
    for name in join.times:
        column = table[name]
        times, bad = parse_times(column)
        bad = bad or np.flatnonzero(np.asarray(times.is_null())).tolist()
        if bad:
            shown = column[bad[0]].as_py()
            raise DataError(
                f"{source.path}, line {first_line + bad[0]}: {name} is {shown!r}, not a time ({len(bad):,} such rows "
                "nearby); correct them: a time is a whole number or ISO 8601"
            )
        table = table.set_column(table.schema.get_field_index(name), name, times)
    return table


def _sorted(join: JoinConfig, table: pa.Table, zones: set[str]) -> Versions:
    codes, distinct = codes_of(plain(table[join.on]).combine_chunks())
    present = np.flatnonzero(codes > 0)
    keys = codes[present].astype(np.int64)
    times = {name: table[name].to_numpy()[present].astype(np.int64) for name in join.times}
    units = {name: count_units(each) for name, each in times.items()}
    if len(found := {unit for counts in units.values() for unit in counts}) > 1:
        raise DataError(
            f"data.joins: the times of {join.table} are in {len(found)} units, {', '.join(sorted(found))}: write all in one"
        )
    valid = times[join.valid_from or join.times[0]]
    written = times[join.written_at or join.times[0]]
    order = np.lexsort((written, valid, keys))
    twice = np.flatnonzero((np.diff(keys[order]) == 0) & (np.diff(valid[order]) == 0) & (np.diff(written[order]) == 0))
    if len(twice):
        row = table.select([join.on, *join.times]).slice(int(present[order[twice[0]]]), 1).to_pylist()[0]
        raise DataError(
            f"data.joins: {join.table} has {len(twice):,} rows whose {join.on} and {', '.join(join.times)} equal another "
            f"row's, the first with {row}: keep one row of each, because nothing says which was written last"
        )
    rank = np.empty(len(order), np.int64)  # of valid_from, then written_at
    rank[order] = np.arange(len(order))
    visible_from = np.maximum(valid, written) + join.delay
    order = np.lexsort((rank, visible_from, keys))
    keys, rank, visible_from = keys[order], rank[order], visible_from[order]
    # The highest rank of a key so far. Ranks of later keys are higher, so each key starts again.
    best = np.maximum.accumulate(rank)
    place_of_rank = np.empty(len(order), np.int64)
    place_of_rank[rank] = np.arange(len(order))
    moments, of_moment = np.unique(visible_from, return_inverse=True)
    kinds = zones & {TIMES, ZONED}
    return Versions(
        table.drop_columns([join.on, *join.times]).take(pa.array(present[order])),
        ValueIndex([index_values([(1, distinct.to_pylist())])]),
        keys,
        moments,
        visible_from,
        keys * (len(moments) + 1) + of_moment + 1,
        place_of_rank[best] + 1,
        next(iter(found), ""),
        None if len(kinds) != 1 else kinds == {ZONED},
    )
