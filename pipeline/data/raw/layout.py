"""Define raw formats, and the Layout of a source's rows in a format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.registry import find
from pipeline.config.tables import is_pattern, matches
from pipeline.config.transforms import LIST, NUMBER, TEXT, TIME, VECTOR, TransformConfig, make_transforms, raw_inputs
from pipeline.data.raw.blocks import Block, ParsedRows, RowReader, Source
from pipeline.runtime.errors import DataError, did_you_mean

TIME_PREFIX = "\0time "  # no column of a source has such a name
LONGEST_NAME_SHOWN = 60
BACKSLASH = "backslash"  # value of data.quotes
OTHER_DELIMITERS = ("::", ";", "\t", "|", ",")


@dataclass(frozen=True)
class Layout:
    """The format of a source's rows. `header` is None if the file's first line or schema names the
    columns.

    columns.label is empty if the rows are to be scored, because such rows have no label. `carried`
    columns are read unchanged (as text in text files).
    """

    columns: ColumnsConfig
    format: str = "tsv"
    delimiter: str = "\t"
    quoted: bool = False
    header: tuple[str, ...] | None = None
    carried: tuple[str, ...] = ()
    escaped: bool = False  # a backslash is before a quote inside a quoted cell; otherwise the quote is doubled
    encoding: str = "utf-8"
    separator: str = ""  # the delimiter of the file, if it has several characters

    def written(self, delimiter: str | None, encoding: str, quotes: str) -> Layout:
        """Return the layout of text with this delimiter, encoding and quoting. Cells are not quoted
        if the delimiter has several characters.
        """
        layout = replace(self, encoding=encoding, escaped=quotes == BACKSLASH)
        if delimiter is None:
            return layout
        if len(delimiter) > 1:
            return replace(layout, delimiter="\x1f", separator=delimiter, quoted=False)
        return replace(layout, delimiter=delimiter)

    @property
    def numbers(self) -> list[str]:
        return [*self.columns.all_labels, *self.weights, *self.columns.dense]

    @property
    def roles(self) -> dict[str, str]:
        """Return column -> role, which says how its values are read (value_types). A label with texts is a category."""
        columns = self.columns
        texts = {name for name, label in columns.all_labels.items() if label.values}
        found = {columns.timestamp: TIME} if columns.timestamp else {}  # a category too: its text must be a time
        found |= {name: TEXT if name in texts else NUMBER for name in self.numbers}
        found |= dict.fromkeys(columns.sparse, TEXT) | dict.fromkeys(columns.lists, LIST)
        return found | dict.fromkeys(columns.vectors, VECTOR)

    @property
    def weights(self) -> list[str]:
        """Return a list with the name of the column of sample weights. [] if there is none, or the
        rows are to be scored.
        """
        return [self.columns.weight] if self.columns.weight and self.columns.label else []

    @property
    def time_column(self) -> str | None:
        """Return the column of parsed tables with the times that split the rows.

        This is the source's column, or a copy of it if the source's column is also a text feature.
        """
        name = self.columns.timestamp
        return f"{TIME_PREFIX}{name}" if name and name in self.columns.sparse else name

    @property
    def needed(self) -> list[str]:
        columns = self.columns
        times = [columns.timestamp] if columns.timestamp else []
        names = [*self.numbers, *columns.sparse, *columns.raw_lists]
        names += [name for name in times if name not in columns.sparse]
        return [*names, *(name for name in self.carried if name not in names)]


class Format:
    """Base of raw formats. A subclass opens a source and, if its blocks are text, parses a block.

        @register("format", "my_format")
        class MyFormat(Format): ...

    suffixes: files with these suffixes have this format, if no config names one. columns: the
    columns, if the format defines them; None if data.columns names them. header_lines: lines before
    the first row of text.
    """

    suffixes: tuple[str, ...] = ()
    is_lines = True  # True if a row is a line of text
    columns: ColumnsConfig | None = None
    delimiter = "\t"
    quoted = False
    header_lines = 1
    has_cells = False  # True if lines are cells with delimiters and columns have names
    sql_copy = ""  # options of DuckDB's COPY to write this format; empty: not supported

    def open(self, source: Source, layout: Layout, block_bytes: int) -> tuple[RowReader, tuple[str, ...]]:
        """Open a source.

        Return a reader of blocks of about `block_bytes`, and the names of the source's columns.
        """
        raise NotImplementedError(f"{type(self).__name__} has no open()")

    def parse(self, layout: Layout, names: tuple[str, ...], block: Block) -> ParsedRows:
        """Parse a block of text.

        A block that is a table is parsed by code that all formats share, not by this method.
        """
        raise NotImplementedError(f"{type(self).__name__} has no parse(), but its blocks are text")

    def layout(self, name: str, columns: ColumnsConfig) -> Layout:
        return Layout(columns, name, self.delimiter, self.quoted)

    def fits(self, columns: ColumnsConfig) -> bool:
        """Return True if files of this format can have these features."""
        fixed = self.columns
        return fixed is None or (columns.dense, columns.sparse, columns.raw_lists) == (fixed.dense, fixed.sparse, [])

    def propose(self, path: str) -> tuple[dict[str, Any], str] | None:
        """Return the settings of a data config, and a line that describes the file, if `inspect`
        can tell from its first lines that the file has this format; otherwise None."""
        return None

    def unlabelled_header(self, source: Source, columns: ColumnsConfig) -> tuple[str, ...] | None:
        """Return the header of rows to score if the file does not contain it, otherwise None.

        Raises:
            DataError: the file has neither these columns nor these columns without the label.
        """
        return None

    def sql_table(self, paths: str) -> str:
        """Return a DuckDB table expression of the quoted `paths` with the columns as text; "" if
        the columns have no names.
        """
        return ""

    def sql_lines(self, paths: str) -> str:
        """Return a DuckDB query of the rows, with each row as one text `line`."""
        # One column with complete lines: no text file contains this delimiter.
        return (
            f"SELECT line FROM read_csv([{paths}], columns={{'line': 'VARCHAR'}}, delim='\\x01', quote='', escape='', "
            f"header=false, skip={self.header_lines}, auto_detect=false, max_line_size=67108864, ignore_errors=true)"
        )


def find_format(name: str) -> Format:
    """Return the format of that name. Raises ConfigError if there is no format of that name."""
    kind: type[Format] = find("format", name, "data.format")
    return kind()


def columns_of(config: DataConfig) -> ColumnsConfig:
    """Return the columns that become features: the columns of the format or of data.columns, and
    the outputs of data.transforms.
    """
    return with_outputs(find_format(config.format).columns or config.columns, make_transforms(config.transforms))


def feature_names(config: DataConfig) -> tuple[list[str], list[str]]:
    """Return the dense and the categorical features that prepare makes, in the order of dataset.json."""
    columns = columns_of(config)
    dense = [name for name in columns.dense if name not in config.buckets]
    return dense, [*columns.sparse, *columns.lists, *(name for name in columns.dense if name in config.buckets)]


def source_columns(config: DataConfig) -> ColumnsConfig:
    """Return the columns that are read: the columns of the format or of data.columns, and further
    inputs of data.transforms.
    """
    columns, transforms = find_format(config.format).columns or config.columns, make_transforms(config.transforms)
    for transform in transforms.values():
        transform.check_columns(columns)
    return with_inputs(columns, transforms)


def with_inputs(columns: ColumnsConfig, transforms: Mapping[str, TransformConfig]) -> ColumnsConfig:
    """Return the columns of the source that are read: features, and further columns that transforms read."""
    known = {*columns.dense, *columns.sparse, *columns.raw_lists, *columns.vector_features}
    more = {name: kind for name, kind in raw_inputs(transforms).items() if name not in known}
    numbers = [name for name, kind in more.items() if kind == NUMBER]
    return replace(
        columns,
        dense=[*columns.dense, *numbers],
        sparse=[*columns.sparse, *(name for name in more if name not in numbers)],
    )


def with_outputs(columns: ColumnsConfig, transforms: Mapping[str, TransformConfig]) -> ColumnsConfig:
    """Return the columns that become features: columns of the source, numbers of vectors, then
    the outputs of transforms."""
    made = {kind: [name for name, each in transforms.items() if each.output == kind] for kind in (NUMBER, TEXT, LIST)}
    return replace(
        columns,
        dense=[*columns.dense, *columns.vector_features, *made[NUMBER]],
        vectors={},
        sparse=[*columns.sparse, *made[TEXT]],
        multi_hot=[*columns.multi_hot, *made[LIST]],
    )


def with_dense_names(config: DataConfig, names: Sequence[str]) -> DataConfig:
    """Return the config with the columns among `names` in place of patterns in data.columns.dense.

    A pattern does not name a column that has another role. Raises ConfigError if it fits no column.
    """
    columns, key = config.columns, "data.columns.dense"
    if not any(is_pattern(name) and name not in names for name in columns.dense):
        return config
    taken = {*layout_of(config).needed, config.group_column, columns.weight, columns.timestamp, *config.transforms}
    free, dense = [name for name in names if name not in taken], dict[str, None]()
    for name in columns.dense:
        is_name = name in names or not is_pattern(name)
        dense |= dict.fromkeys([name] if is_name else matches(name, free, key))
    return replace(config, columns=replace(columns, dense=list(dense)))


def layout_of(config: DataConfig) -> Layout:
    """Return the layout that a config describes. Raises DataError if a column has two roles, or there is no feature."""
    columns = source_columns(config)
    timestamp = columns.timestamp if config.split.kind in ("time", "date") else None
    layout = find_format(config.format).layout(config.format, replace(columns, timestamp=timestamp))
    layout = layout.written(config.delimiter, config.encoding, config.quotes)
    if config.header:
        layout = replace(layout, header=tuple(config.header))
    names = [*layout.needed, *columns.vector_features]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"data.columns gives {', '.join(map(repr, twice))} two roles: name each column once")
    if not columns.sparse and not columns.raw_lists and not columns.dense:
        raise DataError("data.columns names no feature: list some under data.columns.sparse, multi_hot or dense")
    return layout


def with_group(layout: Layout, group_column: str | None) -> Layout:
    """Return the layout that also reads the group column.

    Raises DataError if that column holds lists.
    """
    if group_column is None:
        return layout
    if group_column in layout.columns.raw_lists:
        raise DataError(f"data.group_column={group_column!r} holds lists: name a column with one value a row")
    return replace(layout, carried=(*layout.carried, group_column))


def _shown(name: str) -> str:
    """Shorten a name for a message.

    The name may be empty. In a file of another format it may be a complete line.
    """
    return name if 0 < len(name) <= LONGEST_NAME_SHOWN else f"{name[:LONGEST_NAME_SHOWN]}..." if name else "(no name)"


def check_columns(layout: Layout, names: tuple[str, ...], path: str) -> None:
    """Raise DataError if a needed column is missing.

    The message suggests the nearest existing name.
    """
    missing = [name for name in layout.needed if name not in names]
    if missing:
        near = {name: did_you_mean(name, names).lstrip("; ") for name in missing[:5]}
        listed = ", ".join(f"{name!r} ({hint})" if hint else repr(name) for name, hint in near.items())
        # Rows without a label are scored by a trained model, so its columns cannot change.
        fix = (
            "correct data.columns"
            if layout.columns.all_labels
            else "rename them in it to what the model was trained on"
        )
        has = (
            f"It has {', '.join(map(_shown, names[:60]))}; {fix}"
            if names
            else "No column was found in it; "
            + (
                "jsonl has one object per line: convert a list by jq -c '.[]'"
                if layout.format == "jsonl"
                else "correct data.format"
            )
        )
        hint = ", or let a quoted glob as source leave this file out" if len(missing) == len(layout.needed) else ""
        if (
            len(names) == 1
            and layout.header is None
            and (other := [each for each in OTHER_DELIMITERS if each in names[0]])
        ):
            hint = f", or set data.delimiter={other[0]!r}, which is in its first line"
        raise DataError(f"{path} lacks {len(missing)} of {len(layout.needed)} columns: {listed}. {has}{hint}")
    doubled = sorted({name for name in layout.needed if names.count(name) > 1})
    if doubled:
        raise DataError(f"{path} names column {doubled[0]!r} {names.count(doubled[0])} times: rename one")
