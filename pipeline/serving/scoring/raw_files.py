"""Find the format of files to score and the layout of their rows, which are read as prepare reads them, unlabelled."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.columns import ColumnsConfig
from pipeline.config.registry import components
from pipeline.data.raw.blocks import Source
from pipeline.data.raw.layout import Layout, find_format
from pipeline.runtime.errors import ServingError

USUAL = "tsv"  # of a file whose name does not tell


def format_of(sources: list[Source], columns: ColumnsConfig) -> str:
    """By the files' names; what has no telling name is as the training rows were: Criteo's TSV, or a TSV with a header.

    Raises ServingError where the files have several formats.
    """
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


def layout_of_file(
    source: Source, kind: str, columns: ColumnsConfig, id_columns: list[str], delimiter: str | None = None
) -> Layout:
    """Labels are not read. Raises DataError where the file has other columns than the artifact was made from."""
    read = find_format(kind)
    header = read.unlabelled_header(source, columns)
    layout = read.layout(kind, replace(columns, label=""))
    return replace(layout, header=header, carried=tuple(id_columns), delimiter=delimiter or layout.delimiter)
