"""Open the files of an artifact, each verified before it is used."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.columns import ColumnsConfig
from pipeline.config.registry import from_extra
from pipeline.config.serving import SsdConfig
from pipeline.data.read.value_index import NAMES
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import signature, storage
from pipeline.runtime.storage.arrow_messages import FILE_MAGIC, unpacked_bytes
from pipeline.runtime.storage.checksums import FileEntry, damage, read_verified, size_problem
from pipeline.serving.artifact.manifest import (
    CALIBRATION_FILE,
    COMPOSED_FILE,
    DENSE_FILE,
    ArtifactError,
    Manifest,
    TableFiles,
)
from pipeline.serving.artifact.quantize import KeptRows
from pipeline.serving.artifact.raw_schema import RawFeature
from pipeline.serving.artifact.task_quality import Calibration
from pipeline.serving.scoring.dense_program import Program, load_program
from pipeline.serving.scoring.lookup import MappedLookup, RamLookup, ServedFeature, ServedTable, TableLookup
from pipeline.serving.scoring.scorer import FeatureTables

if TYPE_CHECKING:
    from pipeline.serving.artifact.composed import ComposedTables


@contextmanager
def parts_of(what: str) -> Iterator[None]:
    """Raise ArtifactError for whatever a crafted file makes its parts raise."""
    try:
        yield
    except (DamagedError, OSError, MemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ArtifactError(
            f"the parts of {what} do not fit each other ({type(error).__name__}: {said}); export again"
        ) from error


def _ids_problem(vocabulary: pa.Table, cardinality: int) -> str:
    """Return "" or why a vocabulary is invalid. A pruned one lacks values of rows that are not stored."""
    if (
        vocabulary.column_names != NAMES
        or vocabulary["id"].type != pa.int32()
        or not _is_text(vocabulary["value"].type)
    ):
        return f"has the columns {str(vocabulary.schema)[:200]!r}, not ids (int32) and values (text)"
    if vocabulary["id"].null_count or vocabulary["value"].null_count:
        return "has an id or a value that is missing"
    ids = vocabulary["id"].to_numpy()
    if len(ids) and (ids.min() < 1 or ids.max() >= cardinality or len(np.unique(ids)) != len(ids)):
        return f"gives ids that are not different ones from 1 to {cardinality - 1}"
    if pc.any(pc.equal(pc.binary_length(vocabulary["value"]), 0)).as_py():
        return "holds empty values"
    if not len(ids) and cardinality > 1:
        return f"is empty, and there are {cardinality} ids"
    return ""


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def open_lookup(
    files: ArtifactFiles,
    memory: str,
    cache_bytes: int | None = None,
    ssd: SsdConfig | None = None,
    only: Sequence[str] | None = None,
) -> TableLookup:
    """Return the lookup of the artifact's tables. `memory`: where rows are kept. `only`: features to look up."""
    chosen = [(name, table) for name, table in files.manifest.features if only is None or name in only]
    used = sorted({table for _, table in chosen}) if only is not None else list(range(len(files.manifest.tables)))
    tables = [files.table(files.manifest.tables[number], verified=memory == "ram") for number in used]
    features = [ServedFeature(name, used.index(table)) for name, table in chosen]
    if memory == "ram":
        return RamLookup(tables, features)
    if memory == "mapped":
        return MappedLookup(tables, features)
    open_on_ssd = from_extra("open_on_ssd", f"memory={memory}")
    lookup: TableLookup = open_on_ssd(tables, features, files.manifest.lookups, cache_bytes, ssd or SsdConfig())
    return lookup


class ArtifactFiles:
    """Opens the files of an artifact. Each file is verified before it is used."""

    def __init__(self, path: str, manifest: Manifest, verify: bool) -> None:
        self._path, self.manifest, self._verify = path, manifest, verify or signature.is_required()

    def path(self, name: str) -> str:
        """Return the path of a file. Raises ArtifactError if the file is missing, or has another size."""
        path, entry = storage.join(self._path, name), self.manifest.files[name]
        if problem := size_problem(path, entry):
            raise ArtifactError(f"{problem}; copy or export the artifact again")
        return path

    def checked(self, name: str) -> str:
        """Return the path of a file for a library that reads it. The complete file was verified."""
        path = self.path(name)
        if self._verify and (problem := damage(path, self.manifest.files[name])):
            raise ArtifactError(f"{problem}; copy or export the artifact again")
        return path

    def content(self, name: str) -> bytes:
        path = self.path(name)
        if self._verify:
            return read_verified(path, self.manifest.files[name])
        with storage.open_file(path, "rb") as file:
            content: bytes = file.read()
        return content

    def table(self, table: TableFiles, verified: bool) -> ServedTable:
        """Return the file of a table. `verified`: the caller verifies the rows; otherwise they are verified here."""
        entry: FileEntry | None = self.manifest.files[table.file] if verified and self._verify else None
        path = self.path(table.file) if verified else self.checked(table.file)
        kept = None
        if table.kept is not None:
            words = np.frombuffer(self.content(table.kept), np.dtype("<u8"))
            kept = KeptRows(table.rows, words)
            if kept.num_kept != table.stored_rows:
                raise ArtifactError(f"table {table.name!r} keeps {kept.num_kept} rows and stores {table.stored_rows}")
        return ServedTable(
            table.name, table.rows, table.stored_rows, table.dim, table.precision, table.pooling, path, kept, entry
        )

    def vocabulary(self, name: str) -> pa.Table:
        content = pa.py_buffer(self.content(name))
        try:
            if content[: len(FILE_MAGIC)].to_pybytes() != FILE_MAGIC:
                raise ArtifactError(f"{name} is no vocabulary: it is not an Arrow file")
            stream = content[len(FILE_MAGIC) :]  # the footer is not read, because it could point to other bytes
            if (unpacked := unpacked_bytes(stream)) > storage.most_unpacked_bytes(content.size):
                raise ArtifactError(f"{name} has {content.size} bytes, which unpack to {unpacked}; export again")
            with pa.ipc.open_stream(stream) as file:
                if odd := [each for each in file.schema if not (pa.types.is_integer(each.type) or _is_text(each.type))]:
                    raise ArtifactError(f"{name} is no vocabulary: its column {odd[0].name!r} has type {odd[0].type}")
                table = file.read_all()
            table.validate(full=True)
            return table
        except (pa.ArrowException, OSError, UnicodeDecodeError, struct.error) as error:
            raise ArtifactError(f"{name} is no vocabulary: {error}") from None

    def composed(self) -> ComposedTables | None:
        """Return the object that composes compressed tables from their parts; None if there are none."""
        if COMPOSED_FILE not in self.manifest.files:
            return None
        from pipeline.serving.artifact.composed import ComposedTables  # TorchRec, which other artifacts do without

        try:
            return ComposedTables.from_bytes(self.content(COMPOSED_FILE))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{COMPOSED_FILE} is not of this release ({repr(error)[:200]}); export again"
            ) from error

    def calibration(self) -> Calibration | None:
        """Return the calibration of scores; None if the artifact has none."""
        if CALIBRATION_FILE not in self.manifest.files:
            return None
        open_calibration = from_extra("open_calibration", CALIBRATION_FILE)
        calibration: Calibration = open_calibration(self.content(CALIBRATION_FILE), self.manifest)
        return calibration

    def feature_tables(self, columns: ColumnsConfig) -> FeatureTables | None:
        """Return the tables that fill some of the raw columns; None if there are none."""
        if not self.manifest.feature_tables:
            return None
        open_tables = from_extra("open_feature_tables", "an artifact with feature tables")
        tables: FeatureTables = open_tables(self, columns)
        return tables

    def program(self, name: str = DENSE_FILE) -> Program:
        return load_program(self.content(name), storage.join(self._path, name))

    def vocabularies(self, features: Sequence[RawFeature]) -> dict[str, pa.Table]:
        """Return the vocabularies of `features` that have one. Raises ArtifactError for an invalid vocabulary."""
        found = {}
        for feature in features:
            if (file := self.manifest.vocabularies.get(feature.name)) is None:
                continue
            found[feature.name] = self.vocabulary(file)
            if problem := _ids_problem(found[feature.name], feature.cardinality):
                raise ArtifactError(f"the vocabulary of {feature.name!r} {problem}; export again")
        return found


def load_parts(artifact: str, manifest: Manifest) -> tuple[TableLookup, Program]:
    """Return lookup and layers of an artifact without a manifest file. Tables stay in their files."""
    files = ArtifactFiles(artifact, manifest, verify=True)
    return open_lookup(files, "mapped"), files.program()
