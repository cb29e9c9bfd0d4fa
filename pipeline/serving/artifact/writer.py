"""Write the files of an artifact: tables, layers, vocabularies, and the manifest that commits them.

A table is written a block at a time, so memory never holds a whole table.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain

import pyarrow as pa

from pipeline.checkpoint.vocabularies import read_values
from pipeline.data.dataset import SparseFeature, vocabulary_of
from pipeline.data.read.value_index import index_values
from pipeline.data.vocabulary_files import find_vocabulary
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import progress
from pipeline.runtime.storage import atomic, storage
from pipeline.runtime.storage.checksums import ChecksummedWriter, FileEntry, write_blocks
from pipeline.serving.artifact.dense_export import compile_layers, export_layers, program_bytes
from pipeline.serving.artifact.manifest import (
    COMPILED_FILE,
    COMPOSED_FILE,
    DENSE_FILE,
    UNFINISHED,
    Manifest,
    TableFiles,
)
from pipeline.serving.artifact.plan import ExportPlan
from pipeline.serving.artifact.quantize import write_rows

LIBRARIES = ("torch", "numpy", "pyarrow")
FOLDERS, SCRATCH = ("tables", "vocabulary"), "scratch"


def write_bytes(path: str, content: bytes | memoryview) -> FileEntry:
    """Write a new file. Return its checksums."""
    return write_blocks(path, [content])


def write_arrow(path: str, table: pa.Table, is_mapped: bool = False) -> FileEntry:
    """Write a new Arrow file, compressed unless it is to be mapped into memory, or would unpack to more than readers
    accept. Return its checksums.
    """
    for compression in (None,) if is_mapped else ("lz4", None):
        if os.path.exists(path):
            os.remove(path)
        with ChecksummedWriter(path) as writer:
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with pa.ipc.new_file(pa.PythonFile(writer, mode="w"), table.schema, options=options) as file:
                file.write_table(table)
            writer.close()
            entry = writer.entry()
        if table.nbytes <= storage.most_unpacked_bytes(entry["size_bytes"]):
            break
    return entry


class ArtifactWriter:
    """Writes one artifact into `path`, and moves it to `output`. `scratch` holds files that are not part of it."""

    def __init__(self, path: str, output: str) -> None:
        self.path, self._output = path, output
        self.scratch = os.path.join(path, SCRATCH)
        self._files: dict[str, FileEntry] = {}
        self._tables: list[TableFiles] = []
        self._vocabularies: dict[str, str] = {}
        self._feature_tables: dict[str, str] = {}

    def write(self, plan: ExportPlan) -> Manifest:
        """Write all files of the plan. Return a manifest without a certificate."""
        self.write_tables(plan)
        self.write_programs(plan)
        self.write_composed(plan)
        self.write_vocabularies(plan)
        return self.manifest(plan)

    def write_tables(self, plan: ExportPlan) -> None:
        """Write one file for each table. If not all rows are kept, also write a file of its kept rows."""
        with progress("writing tables", plan.step.num_rows) as bar:
            for number, each in enumerate(plan.tables):
                name, kept_name, stored = f"tables/{number:05d}.rows", None, each.stored
                num_rows = stored.rows if each.kept is None else each.kept.num_kept
                rows = plan.step.rows(stored, each.kept)
                self._files[name] = write_rows(self._at(name), rows, each.precision)
                if each.kept is not None:
                    kept_name = f"tables/{number:05d}.kept"
                    self.add_bytes(kept_name, each.kept.words.astype("<u8").tobytes())
                self._tables.append(
                    TableFiles(
                        stored.name, stored.rows, num_rows, stored.dim, each.precision, each.table.pooling, name,
                        kept_name,
                    )
                )  # fmt: skip
                bar.advance(stored.rows)

    def write_programs(self, plan: ExportPlan) -> None:
        """Write each program of the layers, and compile the first one if the plan says so."""
        for each in plan.programs:
            program = export_layers(each.layers, plan.dense, each.num_dense, each.pooled_dim, each.width)
            self.add_bytes(each.file, program_bytes(program))
            if plan.compiled and each.file == DENSE_FILE:
                staged = os.path.join(self.scratch, COMPILED_FILE)
                compile_layers(program, staged)
                self.add_file(COMPILED_FILE, staged)

    def write_composed(self, plan: ExportPlan) -> None:
        """Write the parameters that compute the rows of compressed tables from their parts."""
        if plan.step.composed is not None:
            self.add_bytes(COMPOSED_FILE, plan.step.composed.to_bytes())

    def write_vocabularies(self, plan: ExportPlan) -> None:
        """Write the vocabulary of each feature that is not hashed, without values whose row is left
        out.

        Values of a stream follow those of the data set.
        """
        step = plan.step
        features = [each for each in map(step.dataset.sparse_feature, step.keys) if each.hash_size is None]
        with progress("writing vocabularies", sum(feature.cardinality for feature in features)) as bar:
            for number, feature in enumerate(features):
                name, rows = f"vocabulary/{number:05d}.arrow", plan.kept_of.get(feature.name)
                added = (feature.cardinality, step.new_values.get(vocabulary_of(feature), []))
                values = chain(read_values(vocabulary_path(feature, step.data_path)), [added])
                self.add_arrow(name, index_values(values, None if rows is None else rows.contains))
                self._vocabularies[feature.name] = name
                bar.advance(feature.cardinality)

    @property
    def files(self) -> dict[str, FileEntry]:
        """Return the files that have been written so far."""
        return dict(self._files)

    def add_bytes(self, name: str, content: bytes) -> None:
        self._files[name] = write_bytes(self._at(name), content)

    def add_file(self, name: str, staged: str) -> None:
        """Add a file that another library has written."""
        with open(staged, "rb") as file:
            self._files[name] = write_blocks(self._at(name), iter(lambda: file.read(1 << 24), b""))

    def add_arrow(self, name: str, table: pa.Table) -> None:
        self._files[name] = write_arrow(self._at(name), table)

    def add_feature_table(self, key: str, table: pa.Table) -> None:
        """Add raw columns by the ids of column `key`. Servers map the file into memory."""
        self._feature_tables[key] = name = f"features/{len(self._feature_tables):05d}.arrow"
        os.makedirs(os.path.dirname(self._at(name)), exist_ok=True)
        self._files[name] = write_arrow(self._at(name), table, is_mapped=True)

    def manifest(self, plan: ExportPlan) -> Manifest:
        """Describe the files that have been written so far."""
        return Manifest(
            lineage=plan.lineage,
            schema=plan.schema,
            tables=self._tables,
            features=[(feature.name, feature.table) for feature in plan.step.features],
            dense={"precision": plan.dense, "compiled": plan.compiled},
            files=self._files,
            vocabularies=self._vocabularies,
            lookups=plan.lookups,
            sizes=self._sizes(plan),
            versions=library_versions(),
            settings=plan.settings,
            tasks=plan.tasks,
            retrieval=plan.retrieval,
            feature_tables=self._feature_tables,
        )

    def _sizes(self, plan: ExportPlan) -> dict[str, int]:
        """Return the bytes of each kind of file, before and after the export."""

        def total(beginning: str) -> int:
            return sum(int(entry["size_bytes"]) for name, entry in self._files.items() if name.startswith(beginning))

        return {
            "tables_before": plan.step.table_bytes,
            "tables_after": total("tables/"),
            "layers_before": plan.step.layer_bytes,
            "layers_after": total("dense.pt2") + total("item.pt2"),
            "vocabularies": total("vocabulary/"),
            **({"items": total("items.")} if "items.vectors" in self._files else {}),
            **({"feature_tables": of_tables} if (of_tables := total("features/")) else {}),
            "artifact": total(""),
        }

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest and move the folder to the output. Raises FileExistsError."""
        shutil.rmtree(self.scratch)
        atomic.commit_folder(self.path, self._output, manifest.to_text())

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)


@contextmanager
def new_artifact(output: str) -> Iterator[ArtifactWriter]:
    """Yield a writer for a new folder .export-<id> next to `output`. If nothing is committed, the folder is removed."""
    output = os.path.abspath(output)
    with atomic.locked_attempt(os.path.dirname(output), UNFINISHED) as path:
        for folder in (*FOLDERS, SCRATCH):
            os.mkdir(os.path.join(path, folder))
        yield ArtifactWriter(path, output)


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that are needed to read the files."""
    return {name: version(name) for name in LIBRARIES}


def vocabulary_path(feature: SparseFeature, data_path: str) -> str:
    """Return the path of the feature's vocabulary. Raises ServingError, and DataError if damaged."""
    path = storage.join(data_path, feature.vocabulary or "")
    if feature.vocabulary is None or not storage.is_file(path):
        raise ServingError(
            f"the vocabulary of feature {feature.name!r} is not at {path}, and without it raw rows cannot be scored; "
            "say where the data set is now: data_path=<folder>"
        )
    return find_vocabulary(data_path, feature)
