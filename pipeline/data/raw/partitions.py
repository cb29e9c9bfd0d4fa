"""Read the folder layouts of Spark and Hive: dt=2026-11-01/part-00000.parquet. A folder's name
states a column and its value.

A job writes the file _SUCCESS next to its data when it has finished. Names that begin with `_` or
`.` (_temporary, ._SUCCESS.crc) and checksums (.crc) are not data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta
from urllib.parse import unquote

import pyarrow as pa

from pipeline.data.raw.blocks import Block, Partitions, RowReader, Source
from pipeline.data.raw.layout import Layout
from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage

FOLDER = re.compile(r"([^=/{}]+)=([^/]*)")
RANGE = re.compile(r"\{([^{}]+)\.\.([^{}]+)\}")
SUCCESS = "_SUCCESS"
NULL = "__HIVE_DEFAULT_PARTITION__"  # name of Hive and Spark for a missing value
MAX_NAMED = 3
OBJECT_BEGIN = re.compile(rb"^\s*\{(?=[^}\n]*\S)", re.MULTILINE)  # of an object that is not empty
logger = get_logger(__name__)


def partitions_of(path: str) -> Partitions:
    """Return (column, value) for each partition folder in the path. None is a missing value."""
    folders = (FOLDER.fullmatch(part) for part in path.split("/")[:-1])
    return tuple((unquote(found[1]), None if found[2] == NULL else unquote(found[2])) for found in folders if found)


def name_of(path: str) -> str:
    """Return the file's name with its partition folders, so that files with equal names can be
    distinguished.
    """
    parts = path.split("/")
    first = next((at for at, part in enumerate(parts[:-1]) if FOLDER.fullmatch(part)), len(parts) - 1)
    return "/".join(parts[first:])


def is_data(name: str) -> bool:
    """Return True if a file or folder of this name may hold rows."""
    return not name.startswith((".", "_")) and not name.endswith(".crc")


def files_below(folder: str) -> Iterator[str]:
    """Yield the files in a folder and in the partitions below it."""
    names = [name for name in storage.list_folder(folder) if is_data(name)]
    for name in names:
        path = storage.join(folder, name)
        if FOLDER.fullmatch(name) and not storage.is_file(path):
            yield from files_below(path)
        else:
            yield path


def in_range(source: str) -> list[str] | None:
    """Return the paths that `source` names, if a part of it is a range such as
    dt={2026-11-01..2026-11-07}; None if there is no range.

    Whole numbers are compared as numbers, everything else (such as ISO 8601 dates) as text.

    Raises:
        DataError: the range is empty, or a folder for a day or number of it is missing.
    """
    found = RANGE.search(source)
    if found is None:
        return None
    before, _, begin = source[: found.start()].rpartition("/")
    end, slash, after = source[found.end() :].partition("/")
    first, last = found[1], found[2]
    low, high = _order(first), _order(last)
    if type(low) is not type(high) or low > high:  # type: ignore[operator]  # of one type by then
        raise DataError(
            f"source={source!r}: {{{first}..{last}}} is not a range of numbers or dates; write the smaller value first"
        )
    folder = before or ("/" if source.startswith("/") else ".")
    values = {}
    for name in storage.list_folder(folder):
        value = name[len(begin) : len(name) - len(end)]
        fits = name.startswith(begin) and name.endswith(end) and len(name) >= len(begin) + len(end)
        if fits and type(_order(value)) is type(low) and low <= _order(value) <= high:  # type: ignore[operator]
            values[value] = storage.join(folder, name)
    if missing := [value for value in _all_of(first, last) if _order(value) not in map(_order, values)]:
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        raise DataError(
            f"source={source!r}: of {begin}{{{first}..{last}}}{end} {len(missing)} are missing in {folder}: "
            f"{', '.join(missing[:MAX_NAMED])}{more}; fetch them, or name an existing range"
        )
    paths = [f"{values[value]}{slash}{after}" for value in sorted(values, key=_order)]
    return [path for each in paths for path in (in_range(each) or [each])]


def _order(value: str) -> int | str:
    return int(value) if value.isdigit() else value


def _all_of(first: str, last: str) -> list[str]:
    """Return every number or day of a range; [] if it is unknown which values the range has."""
    if first.isdigit() and last.isdigit():
        return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    try:
        begin, end = date.fromisoformat(first), date.fromisoformat(last)
    except ValueError:
        return []
    return [(begin + timedelta(days=day)).isoformat() for day in range((end - begin).days + 1)]


def check_success(sources: Iterable[Source], wanted: str) -> None:
    """Check that _SUCCESS exists next to the files of jobs, or in a folder above them (at most the
    folder that contains the partitions).

    `wanted` is `required`, `reported` or `ignored`. Files that are in no partition and are not
    called part-* do not belong to a job.

    Raises:
        DataError: _SUCCESS is missing, and `wanted` is `required`.
    """
    if wanted == "ignored":
        return
    of_jobs = (source for source in sources if source.partitions or source.path.rpartition("/")[2].startswith("part-"))
    folders = sorted({storage.dirname(source.path) for source in of_jobs})
    known: dict[str, bool] = {}
    missing = [folder for folder in folders if not _is_done(folder, known)]
    if not missing:
        return
    problem = (
        f"{len(missing)} of {len(folders)} folders hold no {SUCCESS}, which a job of Spark or Hive writes last "
        f"({', '.join(missing[:MAX_NAMED])}{', ...' if len(missing) > MAX_NAMED else ''})"
    )
    if wanted == "required":
        raise DataError(
            f"{problem}: is the job still writing? Wait for it, leave them out, or set data.success_file=reported"
        )
    logger.warning("%s: data.success_file=required refuses them, =ignored omits this warning", problem)


def _is_done(folder: str, known: dict[str, bool]) -> bool:
    if folder not in known:
        known[folder] = storage.is_file(storage.join(folder, SUCCESS)) or (
            FOLDER.fullmatch(folder.rpartition("/")[2]) is not None and _is_done(storage.dirname(folder), known)
        )
    return known[folder]


def with_constants(sources: Iterable[Source], values: Mapping[str, str | None]) -> list[Source]:
    """Return the sources with constants (`values`) for the columns that a file lacks."""
    return [replace(source, partitions=(*values.items(), *source.partitions)) for source in sources]


def with_partitions(
    layout: Layout, source: Source, reader: RowReader, names: Sequence[str], *, has_cells: bool
) -> tuple[RowReader, tuple[str, ...]]:
    """Return the reader and its column names, extended by columns whose values only the folder
    names state. has_cells: rows are cells of text, and not JSON objects.
    """
    given = {name: value for name, value in source.partitions if name in layout.needed and name not in names}
    if not given:
        return reader, tuple(names)
    return _WithPartitions(reader, layout, source.path, given, has_cells), (*names, *given)


class _WithPartitions:
    """Reads the blocks of another reader, and adds one column for each partition."""

    def __init__(
        self, reader: RowReader, layout: Layout, path: str, given: Mapping[str, str | None], has_cells: bool
    ) -> None:
        self._reader, self._layout, self._path, self._given, self._has_cells = reader, layout, path, given, has_cells

    @property
    def position(self) -> int:
        return self._reader.position

    def __enter__(self) -> _WithPartitions:
        self._reader.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    def schema(self) -> pa.Schema | None:
        schema = self._reader.schema()
        if schema is None:
            return None
        return pa.schema([*schema, *(pa.field(name, pa.string()) for name in self._given)])

    def blocks(self) -> Iterator[Block]:
        for block in self._reader.blocks():
            yield self._typed(block) if block.table is not None else self._as_text(block)

    def _typed(self, block: Block) -> Block:
        table = block.table
        assert table is not None
        for name, value in self._given.items():
            table = table.append_column(name, self._column(name, value, block.num_rows))
        return replace(block, table=table)

    def _column(self, name: str, value: str | None, count: int) -> pa.Array:
        if name not in self._layout.numbers or value is None:
            return pa.repeat(pa.scalar(value, pa.string()), count)
        try:
            return pa.repeat(pa.scalar(float(value)), count)
        except ValueError:
            raise DataError(
                f"{self._path}: the folder name has {name}={value}, but {name!r} is a number in data.columns"
            ) from None

    def _as_text(self, block: Block) -> Block:
        if not self._has_cells:  # an object a line; a key of the row itself comes later and counts
            keys = "".join(f"{json.dumps(name)}: {json.dumps(value)}, " for name, value in self._given.items())
            return replace(block, text=OBJECT_BEGIN.sub(lambda begin: begin[0] + keys.encode(), block.text))
        end = "".join(
            f"{self._layout.delimiter}{self._cell(name, value)}" for name, value in self._given.items()
        ).encode()
        text = block.text.replace(b"\r\n", b"\n")
        is_whole = text.endswith(b"\n")
        text = text.replace(b"\n", end + b"\n") if is_whole else text.replace(b"\n", end + b"\n") + end
        return replace(block, text=text)

    def _cell(self, name: str, value: str | None) -> str:
        if value is None:
            return ""
        if self._layout.quoted:
            value = value.replace('"', '""')
            return f'"{value}"'
        if self._layout.delimiter in value:
            raise DataError(f"{self._path}: the folder's {name}={value!r} contains the delimiter of its rows")
        return value
