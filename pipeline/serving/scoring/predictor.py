"""Load an artifact, and score raw or prepared rows with it.

Nothing of the training is imported: the tables are files, the layers a program of torch.export, and raw rows are read by
the functions that prepare reads them with. What is loaded was verified first, byte by byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from pipeline.config.data import ColumnsConfig
from pipeline.config.server import SsdConfig
from pipeline.data.raw.rows import QuarantinedRow
from pipeline.data.read.value_index import NAMES
from pipeline.runtime.errors import DataError, ServingError, check_choice
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import FileEntry, damage, read_verified, size_problem
from pipeline.serving.artifact.kept_rows import KeptRows
from pipeline.serving.artifact.manifest import (
    COMPILED_FILE,
    COMPOSED_FILE,
    DENSE_FILE,
    ArtifactError,
    Manifest,
    TableFiles,
    read_manifest,
)
from pipeline.serving.artifact.served_tasks import ServedTask, scores_of
from pipeline.serving.scoring.column_lists import Rows
from pipeline.serving.scoring.coverage import by_feature, count_row_zero, warning
from pipeline.serving.scoring.dense_program import Program, load_compiled, load_program
from pipeline.serving.scoring.lookup import (
    MappedLookup,
    RamLookup,
    ServedFeature,
    ServedTable,
    TableLookup,
    select_features,
)
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.ssd_open import open_on_ssd

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from pipeline.serving.artifact.composed import ComposedTables

MEMORIES = ("ram", "mapped", "ssd")
ROWS_AT_ONCE = 8192


@dataclass
class Scored:
    """scores [num_rows] float32, or [num_rows, tasks] of an artifact with tasks, NaN where the row was refused; bad_rows say
    why, `line` counting from 1."""

    scores: NDArray[np.float32]
    bad_rows: list[QuarantinedRow] = field(default_factory=list)
    row_zero: dict[str, list[int]] = field(
        default_factory=dict
    )  # feature -> lookups, and those of row 0 (see coverage)


class Predictor:
    """Raw rows -> scores. For one caller at a time."""

    def __init__(
        self,
        manifest: Manifest,
        encoder: RowEncoder,
        lookup: TableLookup,
        program: Program,
        composed: ComposedTables | None = None,
    ) -> None:
        self.manifest, self.encoder, self.lookup = manifest, encoder, lookup
        self._program, self._composed = program, composed
        self._keys = [feature.name for feature in manifest.schema.features]

    @classmethod
    def load(
        cls,
        artifact: str,
        *,
        memory: str = "ram",
        cache_bytes: int | None = None,
        ssd: SsdConfig | None = None,
        verify: bool = True,
        compiled: bool = False,
    ) -> Predictor:
        """memory: ram reads the tables, mapped leaves them to the page cache, ssd keeps `cache_bytes` of hot rows, or as
        many as `ssd` asks for.
        compiled: run the AOTInductor package in the place of dense.pt2. Without `verify` sizes alone are checked.

        Raises:
            ArtifactError: it is missing, damaged, of another release, or holds what is not loaded.
        """
        check_choice("memory", memory, MEMORIES)
        manifest = read_manifest(artifact)
        files = _Files(artifact, manifest, verify)
        if compiled and not manifest.dense.get("compiled"):
            raise ArtifactError(f"{artifact} has no compiled layers; export with compiled=true, or leave it out here")
        lookup = open_lookup(files, memory, cache_bytes, ssd)
        vocabularies = {name: files.vocabulary(file) for name, file in manifest.vocabularies.items()}
        for feature in manifest.schema.features:
            if feature.name in vocabularies and (
                problem := _ids_problem(vocabularies[feature.name], feature.cardinality)
            ):
                raise ArtifactError(f"the vocabulary of {feature.name!r} {problem}; export again")
        program = load_compiled(files.checked(COMPILED_FILE)) if compiled else files.program()
        try:
            predictor = cls(manifest, RowEncoder(manifest.schema, vocabularies), lookup, program, files.composed())
            predictor._try()
        except (RuntimeError, IndexError, AssertionError, DataError, ServingError) as error:
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(
                f"the parts of {artifact} do not fit each other ({' '.join(str(error).split())[:200]}); export again"
            ) from None
        return predictor

    def _try(self) -> None:
        """Two rows without ids through tables and layers: they raise where their widths are not each other's. No row of a
        table is read, so none counts as a lookup."""
        nothing = torch.zeros(2, len(self.encoder.schema.dense))
        ids, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(2 * len(self._keys) + 1, dtype=torch.int64)
        wanted = (2, len(self.tasks)) if self.tasks else (2,)
        if (found := self._score(nothing, ids, offsets).shape) != wanted:
            raise ServingError(f"scores of 2 rows have the shape {tuple(found)}, not {wanted}")

    @property
    def version(self) -> str:
        """Of the artifact: equal for equal scores."""
        return self.manifest.version

    @property
    def columns(self) -> ColumnsConfig:
        """What raw rows have, without a label."""
        return self.encoder.layout.columns

    @property
    def tasks(self) -> list[ServedTask]:
        """What the columns of scores are; empty where there is one score a row."""
        return self.manifest.tasks

    def unusual(self, row_zero: Mapping[str, Sequence[int]]) -> str:
        """What is to be said of counts as Scored.row_zero has them; empty where they are as on the validation rows."""
        return warning(row_zero, self.manifest.lookups)

    def score(self, rows: Rows) -> Scored:
        """Raw columns, as prepare reads them, without a label; a table, or lists of schema_of(self.columns).

        Raises:
            ServingError: a column is missing, or of a type that cannot be what it should.
        """
        scores = np.full((rows.num_rows, *([len(self.tasks)] if self.tasks else [])), np.nan, np.float32)
        bad: list[QuarantinedRow] = []
        counts = np.zeros((2, len(self._keys)), np.int64)
        for first in range(0, max(rows.num_rows, 1), ROWS_AT_ONCE):
            encoded = self.encoder.encode(rows.slice(first, ROWS_AT_ONCE))
            if len(encoded.kept):
                scores[first + encoded.kept] = self._score(encoded.dense, encoded.values, encoded.offsets)
                counts += count_row_zero(encoded.values.numpy(), encoded.offsets.numpy(), len(encoded.kept))
            bad += [QuarantinedRow(first + row.line, row.reason, row.text) for row in encoded.bad_rows]
        return Scored(scores, bad, by_feature(self._keys, counts, self.manifest.lookups))

    def score_batch(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """[batch], or [batch, tasks], float32 of prepared rows: dense [batch, num_dense], ids by the features that the model reads, among others.

        Raises:
            ServingError: a feature is missing, an id outside its table, or the dense values are of another number.
        """
        keys = list(sparse.keys())
        if lacking := [key for key in self._keys if key not in keys]:
            raise ServingError(f"the features are {keys[:5]}..., and the artifact wants {lacking[0]!r} too")
        offsets = sparse.offsets().long()
        wanted = [sparse.stride() if not keys else (len(offsets) - 1) // len(keys), len(self.encoder.schema.dense)]
        if list(dense.shape) != wanted:
            raise ServingError(f"dense is {list(dense.shape)}, and {wanted} goes with the ids")
        ids = select_features(sparse.values(), offsets, len(keys), [keys.index(key) for key in self._keys])
        return torch.from_numpy(self._score(dense, *ids))

    @torch.inference_mode()
    def _score(self, dense: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> NDArray[np.float32]:
        if not self._keys:
            pooled = torch.empty(len(dense), 0)
        elif self._composed is None:
            pooled = self.lookup.pooled(values, offsets)
        else:
            pooled = self._composed.pooled(self.lookup, values, offsets)
        scores: NDArray[np.float32] = scores_of(self.tasks, self._program(dense, pooled)).numpy()
        return scores


def _ids_problem(vocabulary: pa.Table, cardinality: int) -> str:
    """Empty, or what ids and values of a vocabulary cannot be. A pruned one lacks those of rows that are not stored."""
    if vocabulary.column_names != NAMES:
        return f"has the columns {vocabulary.column_names}"
    ids = vocabulary["id"].to_numpy()
    if len(ids) and (ids.min() < 1 or ids.max() >= cardinality or len(np.unique(ids)) != len(ids)):
        return f"gives ids that are not different ones from 1 to {cardinality - 1}"
    if pc.any(pc.equal(pc.binary_length(vocabulary["value"]), 0)).as_py():
        return "holds empty values"
    if not len(ids) and cardinality > 1:
        return f"is empty, and there are {cardinality} ids"
    return ""


def open_lookup(
    files: _Files, memory: str, cache_bytes: int | None = None, ssd: SsdConfig | None = None
) -> TableLookup:
    """The artifact's tables, as `memory` says."""
    tables = [files.table(table, verified=memory == "ram") for table in files.manifest.tables]
    features = [ServedFeature(name, table) for name, table in files.manifest.features]
    if memory == "ram":
        return RamLookup(tables, features)
    if memory == "mapped":
        return MappedLookup(tables, features)
    return open_on_ssd(tables, features, files.manifest.lookups, cache_bytes, ssd or SsdConfig())


class _Files:
    """The files of an artifact, each verified before it is used."""

    def __init__(self, path: str, manifest: Manifest, verify: bool) -> None:
        self._path, self.manifest, self._verify = path, manifest, verify

    def path(self, name: str) -> str:
        """Raises ArtifactError where the file is missing, or has another size."""
        path, entry = storage.join(self._path, name), self.manifest.files[name]
        if problem := size_problem(path, entry):
            raise ArtifactError(f"{problem}; copy or export the artifact again")
        return path

    def checked(self, name: str) -> str:
        """The path of a file that others read, verified as a whole."""
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
        """`verified`: whoever reads the rows verifies them; else that is done here."""
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
        try:
            with pa.ipc.open_file(pa.BufferReader(self.content(name))) as file:
                table = file.read_all()
            table.validate(full=True)
            return table
        except (pa.ArrowException, OSError) as error:
            raise ArtifactError(f"{name} is no vocabulary: {error}") from None

    def composed(self) -> ComposedTables | None:
        """What makes compressed tables of their parts; None where there are none."""
        if COMPOSED_FILE not in self.manifest.files:
            return None
        from pipeline.serving.artifact.composed import ComposedTables  # TorchRec, which other artifacts do without

        try:
            return ComposedTables.from_bytes(self.content(COMPOSED_FILE))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ArtifactError(f"{COMPOSED_FILE} is not of this release ({error}); export again") from None

    def program(self) -> Program:
        return load_program(self.content(DENSE_FILE), storage.join(self._path, DENSE_FILE))


def load_parts(artifact: str, manifest: Manifest) -> tuple[TableLookup, Program]:
    """Lookup and layers of an artifact whose manifest is not written yet, tables left in their files."""
    files = _Files(artifact, manifest, verify=True)
    return open_lookup(files, "mapped"), files.program()
