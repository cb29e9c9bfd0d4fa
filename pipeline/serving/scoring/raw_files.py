"""Turn an artifact's raw columns and a source's name into the layout of its rows, as prepare would read them unlabelled."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.data import ColumnsConfig
from pipeline.data.raw.criteo import criteo_columns
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.source import Source, TextReader
from pipeline.runtime.errors import ServingError

FORMAT_OF_SUFFIX = {"parquet": "parquet", "pq": "parquet", "csv": "csv", "tsv": "tsv"}


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
    kind = FORMAT_OF_SUFFIX.get(suffix, "tsv")
    return "criteo_tsv" if kind == "tsv" and _is_criteo(columns) else kind


def _is_criteo(columns: ColumnsConfig) -> bool:
    theirs = criteo_columns()
    return (columns.dense, columns.sparse, columns.multi_hot) == (theirs.dense, theirs.sparse, [])


def layout_of_file(source: Source, kind: str, columns: ColumnsConfig, id_columns: list[str]) -> Layout:
    """Labels are not read. Criteo's rows, which have no header, may have one or not: the first line tells.

    Raises ServingError where that line has another number of columns, or the artifact was not made from such rows.
    """
    header = _criteo_header(source, columns) if kind == "criteo_tsv" else None
    return Layout(
        replace(columns, label=""),
        delimiter="," if kind == "csv" else "\t",
        quoted=kind == "csv",
        header=header,
        parquet=kind == "parquet",
        carried=tuple(id_columns),
    )


def _criteo_header(source: Source, columns: ColumnsConfig) -> tuple[str, ...]:
    if not _is_criteo(columns):
        raise ServingError(
            f"format=criteo_tsv, but the artifact's model reads {', '.join([*columns.dense, *columns.sparse][:5])}, ...: "
            "name them in a header, and set format=tsv or format=csv"
        )
    theirs = criteo_columns()
    features = (*theirs.dense, *theirs.sparse)
    with TextReader(source, 1 << 16) as reader:
        block = next(reader.blocks(), None)
    found = block.text.split(b"\n", 1)[0].count(b"\t") + 1 if block else len(features)
    if found not in (len(features), len(features) + 1):
        raise ServingError(
            f"{source.path}: line 1 has {found} columns; Criteo's rows have {len(features)}, or {len(features) + 1} with their "
            "label; format=<format> says what it is"
        )
    return features if found == len(features) else (theirs.label, *features)
