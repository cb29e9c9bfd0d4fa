"""Write each kind of file of an artifact: tables, vocabularies, layers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.export import ExportedProgram

from pipeline.checkpoint.vocabularies import read_values
from pipeline.config.columns import ColumnsConfig
from pipeline.data.dataset import Dataset, SequenceFeature, SparseFeature, vocabulary_of
from pipeline.data.read.value_index import index_values
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import progress
from pipeline.runtime.storage import atomic, storage
from pipeline.runtime.storage.checksums import ChecksummedWriter, FileEntry
from pipeline.serving.artifact.composed import ComposedTables
from pipeline.serving.artifact.dense_export import compile_layers, export_layers, program_bytes
from pipeline.serving.artifact.kept_rows import KeptRows
from pipeline.serving.artifact.manifest import COMPILED_FILE, COMPOSED_FILE, DENSE_FILE, UNFINISHED, TableFiles
from pipeline.serving.artifact.raw_schema import RawFeature, RawSchema
from pipeline.serving.artifact.served_tasks import width_of
from pipeline.serving.artifact.table_files import checkpoint_rows, write_bytes, write_rows
from pipeline.serving.artifact.trained_model import TrainedModel
from pipeline.serving.scoring.coverage import ROW_ZERO

LIBRARIES = ("torch", "numpy", "pyarrow")
FOLDERS, SCRATCH = ("tables", "vocabulary"), "scratch"


@dataclass(frozen=True)
class ArtifactFolder:
    """An artifact that is being written to `path`; its `scratch` folder holds what is not of the artifact."""

    path: str
    output: str

    @property
    def scratch(self) -> str:
        return os.path.join(self.path, SCRATCH)

    def commit(self, manifest: str) -> None:
        """Raises FileExistsError where another export has made the output in the meantime."""
        shutil.rmtree(self.scratch)
        atomic.commit_folder(self.path, self.output, manifest)


@contextmanager
def artifact_folder(output: str) -> Iterator[ArtifactFolder]:
    """A fresh folder beside `output`, .export-<id>, that commit() renames to it; nothing of it is left otherwise."""
    output = os.path.abspath(output)
    with atomic.locked_attempt(os.path.dirname(output), UNFINISHED) as path:
        for folder in (*FOLDERS, SCRATCH):
            os.mkdir(os.path.join(path, folder))
        yield ArtifactFolder(path, output)


@dataclass
class Packed:
    """What has been written so far; `files` are the manifest's entries."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    tables: list[TableFiles] = field(default_factory=list)
    vocabularies: dict[str, str] = field(default_factory=dict)
    dense: dict[str, Any] = field(default_factory=dict)

    def sizes(self, trained: TrainedModel) -> dict[str, int]:
        """Bytes before and after."""

        def total(beginning: str) -> int:
            return sum(int(entry["size_bytes"]) for name, entry in self.files.items() if name.startswith(beginning))

        return {
            "tables_before": trained.table_bytes,
            "tables_after": total("tables/"),
            "layers_before": trained.layer_bytes,
            "layers_after": total("dense.pt2") + total("item.pt2"),
            "vocabularies": total("vocabulary/"),
            **({"items": total("items.")} if "items.vectors" in self.files else {}),
            "artifact": total(""),
        }


def pack_tables(
    packed: Packed, attempt: ArtifactFolder, trained: TrainedModel, precisions: list[str], kept: list[KeptRows | None]
) -> None:
    """One file a table, and one for the rows that are kept where not all are."""
    with progress("writing tables", sum(stored.rows for stored in trained.stored)) as bar:
        for number, (table, stored) in enumerate(zip(trained.tables, trained.stored, strict=True)):
            name, rows = f"tables/{number:05d}.rows", kept[number]
            blocks = checkpoint_rows(trained.tensors, stored, rows)
            entry, num_rows = write_rows(os.path.join(attempt.path, name), blocks, precisions[number])
            packed.files[name] = entry
            kept_name = None
            if rows is not None:
                kept_name = f"tables/{number:05d}.kept"
                path = os.path.join(attempt.path, kept_name)
                packed.files[kept_name] = write_bytes(path, rows.words.astype("<u8").tobytes())
            packed.tables.append(
                TableFiles(
                    table.name, stored.rows, num_rows, stored.dim, precisions[number], table.pooling, name, kept_name
                )
            )
            bar.advance(stored.rows)


def pack_composed(packed: Packed, attempt: ArtifactFolder, composed: ComposedTables) -> None:
    """What makes tables of their parts."""
    path = os.path.join(attempt.path, COMPOSED_FILE)
    packed.files[COMPOSED_FILE] = write_bytes(path, composed.to_bytes())


def pack_vocabularies(
    packed: Packed,
    attempt: ArtifactFolder,
    dataset: Dataset,
    keys: list[str],
    data_path: str,
    kept: Mapping[str, KeptRows],
    new_values: Mapping[str, list[str]],
) -> None:
    """Of the features `keys`, with `new_values` behind the data set's own. `kept`: feature -> rows of the table that it alone looks up; values of other rows are unknown ones."""
    features = [dataset.sparse_feature(key) for key in keys if dataset.sparse_feature(key).hash_size is None]
    with progress("writing vocabularies", sum(feature.cardinality for feature in features)) as bar:
        for feature in features:
            packed.vocabularies[feature.name] = name = f"vocabulary/{len(packed.vocabularies):05d}.arrow"
            rows = kept.get(feature.name)
            own = read_values(vocabulary_path(feature, data_path))
            added = (feature.cardinality, new_values.get(vocabulary_of(feature), []))
            table = index_values(chain(own, [added]), None if rows is None else rows.contains)
            pack_arrow(packed, attempt, table, name)
            bar.advance(feature.cardinality)


def pack_arrow(packed: Packed, attempt: ArtifactFolder, table: pa.Table, name: str) -> None:
    with ChecksummedWriter(os.path.join(attempt.path, name)) as writer:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(pa.PythonFile(writer, mode="w"), table.schema, options=options) as file:
            file.write_table(table)
        writer.close()
        packed.files[name] = writer.entry()


def vocabulary_path(feature: SparseFeature, data_path: str) -> str:
    path = storage.join(data_path, feature.vocabulary or "")
    if feature.vocabulary is None or not storage.is_file(path):
        raise ServingError(
            f"the vocabulary of feature {feature.name!r} is not at {path}, and without it raw rows cannot be scored; "
            "say where the data set is now: data_path=<folder>"
        )
    return path


def pack_layers(packed: Packed, attempt: ArtifactFolder, trained: TrainedModel, precision: str, compiled: bool) -> None:
    program = export_layers(
        trained.model, precision, trained.num_dense, sum(trained.model_dims), width_of(trained.tasks)
    )
    pack_program(packed, attempt, program, DENSE_FILE)
    packed.dense = {"precision": precision, "compiled": compiled}
    if compiled:
        pack_compiled(packed, attempt, program)


def pack_program(packed: Packed, attempt: ArtifactFolder, program: ExportedProgram, name: str) -> None:
    packed.files[name] = write_bytes(os.path.join(attempt.path, name), program_bytes(program))


def pack_compiled(packed: Packed, attempt: ArtifactFolder, program: ExportedProgram) -> None:
    staged = os.path.join(attempt.scratch, COMPILED_FILE)
    compile_layers(program, staged)
    pack_staged(packed, attempt, staged, COMPILED_FILE)


def pack_staged(packed: Packed, attempt: ArtifactFolder, staged: str, name: str) -> None:
    """A file that others wrote, in blocks."""
    with open(staged, "rb") as file, ChecksummedWriter(os.path.join(attempt.path, name)) as writer:
        while block := file.read(1 << 24):
            writer.write(block)
        writer.close()
        packed.files[name] = writer.entry()


def schema_of(
    dataset: Dataset,
    keys: list[str],
    columns: ColumnsConfig,
    multi_hot: dict[str, int],
    new_values: Mapping[str, list[str]] | None = None,
) -> RawSchema:
    """What raw rows of this model look like: the columns that make the features `keys`, and how ids are made of their values.

    multi_hot: feature -> largest number of ids a row. new_values: feature -> values that a stream has added to its vocabulary.
    """
    features = [
        RawFeature(
            feature.name,
            feature.cardinality + len((new_values or {}).get(vocabulary_of(feature), ())),
            feature.multi_hot,
            multi_hot.get(feature.name, 1),
            feature.hash_size,
            feature.hash_seed,
            feature.boundaries,
            _sequence(feature, keys),
            feature.weighted,
        )
        for feature in map(dataset.sparse_feature, keys)
    ]
    schema = RawSchema(
        list(dataset.dense_features),
        features,
        dataset.dense_transform,
        columns.list_separator,
        dataset.dense_columns,
        list(columns.null_values),
        list(dataset.transforms),
    )
    return schema.of_features(keys)


def _sequence(feature: SparseFeature, keys: list[str]) -> SequenceFeature | None:
    """Its leader may be one that the model does not read, which raw rows need not have."""
    sequence = feature.sequence
    if sequence is None or sequence.beside is None or sequence.beside in keys:
        return sequence
    return replace(sequence, beside=None)


def lookups_of(dataset: Dataset, data_path: str, multi_hot: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Feature -> ids that a row looks up, and how they fall on the ids: what the cache of tables on SSD goes by.

    row_zero_share: of the validation rows, what unknown and missing values show as (scoring.coverage).
    """
    shares = _row_zero_shares(dataset, data_path)
    return {
        feature.name: {
            **({ROW_ZERO: shares[feature.name]} if feature.name in shares else {}),
            "per_row": float(multi_hot.get(feature.name, feature.mean_pooling_factor)),
            "ranks": feature.frequency_curve.ranks,
            "shares": feature.frequency_curve.shares,
        }
        for feature in dataset.sparse_features
        if feature.hash_size is None  # hashed ids are in no order of frequency
    }


def _row_zero_shares(dataset: Dataset, data_path: str) -> dict[str, float]:
    """Of the lookups of the first row groups of validation."""
    names = [feature.name for feature in dataset.sparse_features if feature.hash_size is None]
    files = dataset.splits["validation"].files
    if not names or not files:
        return {}
    zeros, totals = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    with storage.open_file(storage.join(data_path, files[0].path), "rb") as raw, pq.ParquetFile(raw) as file:
        for number in range(min(file.num_row_groups, 8)):
            table = file.read_row_group(number)
            for name in names:
                column = table[name].combine_chunks()
                ids = np.asarray(column.flatten() if pa.types.is_list(column.type) else column)
                zeros[name], totals[name] = zeros[name] + int((ids == 0).sum()), totals[name] + len(ids)
    return {name: round(zeros[name] / totals[name], 6) for name in names if totals[name]}


def library_versions() -> dict[str, str]:
    """Of what reads the files."""
    return {name: version(name) for name in LIBRARIES}
