"""Load an artifact, and score raw or prepared rows with it.

No training code is imported: the tables are files, the layers are a program of torch.export, and
prepare's functions read raw rows. Every byte that is loaded was verified first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.columns import ColumnsConfig
from pipeline.config.serving import SsdConfig
from pipeline.data.raw.blocks import QuarantinedRow
from pipeline.runtime.errors import ServingError, check_choice
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.deltas import Delta, StagedDelta, deltas_folder, newest_sequence, stage_delta
from pipeline.serving.artifact.manifest import COMPILED_FILE, ArtifactError, Manifest, read_manifest
from pipeline.serving.artifact.raw_schema import ROW_ZERO
from pipeline.serving.artifact.task_quality import Calibration, ServedTask, scores_of
from pipeline.serving.scoring.artifact_files import ArtifactFiles, open_lookup, parts_of
from pipeline.serving.scoring.dense_program import DenseProgram, Program, load_compiled
from pipeline.serving.scoring.encoded import Encoded
from pipeline.serving.scoring.lookup import TableLookup, select_features
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import AnyRows, FeatureTables, JoinedRows, UserItems
from pipeline.serving.scoring.user_items import LayerInputs, UserFeatures, join_inputs

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from pipeline.serving.artifact.composed import ComposedTables

RISE = 0.25  # above the share of the validation rows
MIN_LOOKUPS = 100
MAX_NAMED = 5
Counts = NDArray[np.int64]  # [2, features]: lookups, and those of row 0


def count_row_zero(values: NDArray[np.int64], offsets: NDArray[np.int64], num_rows: int) -> Counts:
    """Return how many ids of each feature are 0. values, offsets: as in a KeyedJaggedTensor."""
    bounds = offsets[::num_rows]
    zeros = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values == 0, out=zeros[1:])
    counts, before = np.empty((2, len(bounds) - 1), np.int64), zeros[bounds]
    # np.diff and np.stack would take longer than the counting, for a request of one row.
    np.subtract(bounds[1:], bounds[:-1], out=counts[0])
    np.subtract(before[1:], before[:-1], out=counts[1])
    return counts


def by_feature(names: Sequence[str], counts: Counts, lookups: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return feature -> [lookups, lookups of row 0], for the features in the manifest's `lookups`."""
    return {name: counts[:, number].tolist() for number, name in enumerate(names) if ROW_ZERO in lookups.get(name, {})}


def unusual(counts: Mapping[str, Sequence[int]], lookups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a phrase for each feature with far more unknown values than in validation, worst first."""
    found = []
    for name, (total, zeros) in counts.items():
        expected = float(lookups[name][ROW_ZERO])
        if total >= MIN_LOOKUPS and zeros / total > expected + RISE:
            found.append((zeros / total - expected, f"{name} {zeros / total:.1%} (validation rows: {expected:.1%})"))
    return [text for _, text in sorted(found, reverse=True)]


def warning(counts: Mapping[str, Sequence[int]], lookups: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a warning about unknown values, or "" if their number is as usual."""
    texts = unusual(counts, lookups)
    if not texts:
        return ""
    more = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return (
        f"values that the model does not know, or none: {', '.join(texts[:MAX_NAMED])}{more}; are these rows of the "
        "kind that it was trained on, with the same spelling?"
    )


logger = get_logger(__name__)
MEMORIES = ("ram", "mapped", "ssd")
ROWS_AT_ONCE = 8192


@dataclass
class Scored:
    """scores [num_rows] or [num_rows, tasks] float32. bad_rows, whose `line` counts from 1, have NaN."""

    scores: NDArray[np.float32]
    bad_rows: list[QuarantinedRow] = field(default_factory=list)
    row_zero: dict[str, list[int]] = field(default_factory=dict)  # feature -> lookups, and those of row 0
    encoded: list[Encoded] = field(default_factory=list)  # what the rows became


class Predictor:
    """Maps raw rows to scores. Only one thread may call it."""

    def __init__(
        self,
        manifest: Manifest,
        encoder: RowEncoder,
        lookup: TableLookup,
        program: Program,
        composed: ComposedTables | None = None,
    ) -> None:
        self.manifest, self.encoder, self.lookup = manifest, encoder, lookup
        self.program, self._composed = program, composed
        self.calibration: Calibration | None = None
        self.feature_tables: FeatureTables | None = None
        self._keys = [feature.name for feature in encoder.schema.features]
        self.applied: Delta | None = None  # the newest one
        self._num_ids = {feature.name: feature.cardinality for feature in encoder.schema.features}
        self._is_weighted = any(feature.weighted for feature in encoder.schema.features)

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
        """memory: "ram" reads the tables into memory, "mapped" maps their files, "ssd" caches
        `cache_bytes` of rows.

        compiled: run the AOTInductor package instead of dense.pt2. Without `verify` only sizes are
        checked. Raises ArtifactError: the artifact is missing, damaged, of another release, or has
        unexpected content.
        """
        check_choice("memory", memory, MEMORIES)
        manifest = read_manifest(artifact)
        if manifest.retrieval is not None:
            raise ArtifactError(f"{artifact} retrieves items and scores no rows: it is loaded as a Retriever")
        files = ArtifactFiles(artifact, manifest, verify)
        if compiled and not manifest.dense.get("compiled"):
            raise ArtifactError(f"{artifact} has no compiled layers; export with compiled=true, or leave it out here")
        lookup = open_lookup(files, memory, cache_bytes, ssd)
        with parts_of(artifact):
            vocabularies = files.vocabularies(manifest.schema.features)
            program = load_compiled(files.checked(COMPILED_FILE)) if compiled else files.program()
            predictor = cls(manifest, RowEncoder(manifest.schema, vocabularies), lookup, program, files.composed())
            predictor.calibration = files.calibration()
            predictor.feature_tables = files.feature_tables(predictor.columns)
            predictor._try()
        return predictor

    def _try(self) -> None:
        """Score two rows without ids. This raises an error if the widths of tables and layers differ."""
        nothing = torch.zeros(2, len(self.encoder.schema.dense))
        ids, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(2 * len(self._keys) + 1, dtype=torch.int64)
        wanted, features = (2, *self._width), [feature.name for feature in self.lookup.features]
        if self._composed is not None and self._composed.looked_up != features:
            raise ServingError(
                f"tables are looked up by {features[:3]}, and composed of {self._composed.looked_up[:3]}"
            )
        scores = self.score_ids(nothing, ids, offsets)
        if scores.shape != wanted:
            raise ServingError(f"scores of 2 rows have the shape {tuple(scores.shape)}, not {wanted}")
        if not np.isfinite(scores).all():
            raise ServingError(f"the score of a row without values is {scores.ravel()[0]}")

    @property
    def version(self) -> str:
        """Return the artifact's version, + and the last delta's number. Equal versions give equal scores."""
        return f"{self.manifest.version}+{self.sequence}" if self.applied else self.manifest.version

    @property
    def event_at(self) -> float | None:
        """Return the time of the newest event that the last delta was trained on; None if it is unknown."""
        return self.applied.stats.get("event_time") if self.applied else None

    @property
    def sequence(self) -> int:
        """Return the number of the delta that was applied last; 0 if none was applied."""
        return self.applied.sequence if self.applied else 0

    @property
    def fresh_at(self) -> float | None:
        """Return the time in seconds since 1970 at which the serving step was saved; None if it is unknown."""
        return self.applied.saved_at if self.applied else self.manifest.exported_at

    def catch_up(self, artifact: str, last: int | None = None) -> None:
        """Apply the deltas of `artifact` before serving, to number `last`. Stop before one that is damaged or does not fit."""
        try:
            newest = newest_sequence(deltas_folder(artifact)) if last is None else last
            for sequence in range(self.sequence + 1, newest + 1):
                self.apply(stage_delta(artifact, self.manifest, sequence))
        except Exception as error:  # as a running server, which refuses the delta whatever is wrong with it
            logger.error("%s serves delta %d, and not the ones after it: %s", artifact, self.sequence, error)

    def apply(self, staged: StagedDelta) -> None:
        """Apply the next delta. Call it on the thread that scores, between two calls of score().

        Raises ServingError if the delta does not fit. Every score is then unchanged, to the bit.
        """
        program, names = self._check_follows(staged), dict(staged.values)
        try:
            with ExitStack() as undo:
                for patch in staged.patches:
                    undo.callback(self.lookup.patch(patch.table, patch.ids, patch.rows))
                undo.callback(program.replace_constants, program.constants)
                program.replace_constants(staged.constants)
                undo.callback(setattr, self, "_composed", self._composed)
                self._composed = staged.composed or self._composed
                undo.callback(setattr, self, "calibration", self.calibration)
                self.calibration = staged.calibration or self.calibration
                self._try()
                for name, new in names.items():
                    undo.callback(self.encoder.added.add(self._keys.index(name), *new))
                undo.pop_all()  # nothing failed
        except Exception as error:
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise ServingError(f"{staged.delta.path} does not fit the artifact: {said}") from error
        for name, new in names.items():
            self._num_ids[name] += len(new.values)
        self.applied = staged.delta

    def _check_follows(self, staged: StagedDelta) -> DenseProgram:
        """Return the program whose constants the delta replaces."""
        if staged.delta.sequence != self.sequence + 1:
            raise ServingError(f"delta {staged.delta.sequence} does not follow on {self.sequence}")
        if not isinstance(self.program, DenseProgram):
            raise ServingError(
                "deltas change the layers of dense.pt2, and compiled ones run: serve with compiled=false"
            )
        for name, new in staged.values.items():
            if new.first != self._num_ids.get(name):
                raise ServingError(
                    f"{staged.delta.path} gives {name!r} ids from {new.first} on, not from {self._num_ids.get(name)}"
                )
        return self.program

    def num_ids(self, feature: str) -> int:
        """Return the number of a feature's ids: values with a row, and the unknown value."""
        return self._num_ids[feature]

    @property
    def columns(self) -> ColumnsConfig:
        """Return the columns of raw rows, without labels."""
        return self.encoder.layout.columns

    @property
    def tasks(self) -> list[ServedTask]:
        """Return what the columns of scores are; empty if there is one score per row."""
        return self.manifest.tasks

    def unusual(self, row_zero: Mapping[str, Sequence[int]]) -> str:
        """Return a warning about counts in the form of Scored.row_zero; "" if they are as in the validation rows."""
        return warning(row_zero, self.manifest.lookups)

    def score(self, rows: AnyRows) -> Scored:
        """Score raw columns without a label: a table, lists of schema_of(self.columns), or a user
        with items, whose features are encoded and looked up once. The artifact's feature tables fill
        columns that the rows lack.

        Raises ServingError if a column is missing, or of a wrong type.
        """
        if self.feature_tables is not None:
            rows = self.feature_tables.fill(rows)
        # A new thread has OMP's default number of threads until this call gives it set_num_threads' number.
        torch.get_num_threads()
        scores = np.full((rows.num_rows, *self._width), np.nan, np.float32)
        bad: list[QuarantinedRow] = []
        encoded: list[Encoded] = []
        counts = np.zeros((2, len(self._keys)), np.int64)
        for first in range(0, max(rows.num_rows, 1), ROWS_AT_ONCE):
            inputs = self._inputs(rows.slice(first, ROWS_AT_ONCE))
            if len(inputs.kept):
                scores[first + inputs.kept] = self._run(inputs)
                counts += inputs.counts
                encoded.append(Encoded(first + inputs.kept, inputs.dense, inputs.ids))
            bad += [QuarantinedRow(first + row.line, row.reason, row.text) for row in inputs.bad_rows]
        return Scored(scores, bad, by_feature(self._keys, counts, self.manifest.lookups), encoded)

    @torch.inference_mode()
    def _inputs(self, rows: AnyRows) -> LayerInputs:
        """Encode the rows and look up their ids."""
        if isinstance(rows, JoinedRows):
            return join_inputs([(part.num_rows, self._inputs(part)) for part in rows.parts])
        if isinstance(rows, UserItems):
            return self._user_features.inputs(rows, self._pooled, count_row_zero)
        encoded = self.encoder.encode(rows)
        num_rows = len(encoded.kept)
        if not num_rows:
            return self._user_features.nothing(encoded.bad_rows)
        counts = count_row_zero(encoded.values.numpy(), encoded.offsets.numpy(), num_rows)
        pooled = self._pooled(*encoded.ids) if self._keys else torch.empty(num_rows, 0)
        ids = encoded.values, encoded.offsets
        return LayerInputs(encoded.dense, pooled, encoded.kept, encoded.bad_rows, counts, lambda: ids)

    @cached_property
    def _user_features(self) -> UserFeatures:
        if self._composed is not None:
            dims = self._composed.dims_of_keys
            linked, computed = self._composed.depends_on_others(), self._composed.computed
        else:
            dims = {each.name: self.lookup.tables[each.table].dim for each in self.lookup.features}
            linked, computed = [], set()
        return UserFeatures(self.encoder, {key: dims[key] for key in self._keys}, linked, computed, self._lookup_of)

    def _lookup_of(self, features: Sequence[str]) -> Callable[..., torch.Tensor] | None:
        """Return the lookup of some features: ids -> pooled rows; None if there is none."""
        part: Any = getattr(self.lookup, "part", None)
        if part is None:
            return None
        if self._composed is None:
            looked_up: Callable[..., torch.Tensor] = part(features).pooled
            return looked_up
        composed = self._composed.part(features)
        return None if composed is None else partial(composed.pooled, part(composed.looked_up))

    def score_batch(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return scores of prepared rows: [batch] or [batch, tasks], float32. dense: [batch,
        num_dense].

        Raises ServingError: a feature is missing, an id is outside its table, or `dense` has
        another width.
        """
        return torch.from_numpy(self.score_ids(dense, *self._selected(dense, sparse)))

    @torch.inference_mode()
    def outputs(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return the outputs of the layers for prepared rows, before they are calibrated. Raises
        ServingError as score_batch does."""
        return self._outputs(dense, *self._selected(dense, sparse))

    def _selected(
        self, dense: torch.Tensor, sparse: KeyedJaggedTensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the ids of prepared rows in the order of the artifact's features."""
        keys = list(sparse.keys())
        if lacking := [key for key in self._keys if key not in keys]:
            raise ServingError(f"the features are {keys[:5]}..., and the artifact wants {lacking[0]!r} too")
        offsets = sparse.offsets().long()
        wanted = [sparse.stride() if not keys else (len(offsets) - 1) // len(keys), len(self.encoder.schema.dense)]
        if list(dense.shape) != wanted:
            raise ServingError(f"dense is {list(dense.shape)}, and {wanted} goes with the ids")
        weights = sparse.weights_or_none()
        if weights is None and self._is_weighted:
            raise ServingError("the features have no weights, and the artifact's have some")
        positions = [keys.index(key) for key in self._keys]
        return select_features(sparse.values(), offsets, len(keys), positions, weights)

    @torch.inference_mode()
    def score_ids(
        self, dense: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> NDArray[np.float32]:
        """Return scores of encoded rows; values, offsets and weights as in EncodedRows."""
        return self._calibrated(self._outputs(dense, values, offsets, weights), lambda: (values, offsets))

    @torch.inference_mode()
    def _run(self, inputs: LayerInputs) -> NDArray[np.float32]:
        """Return the scores of the layers' inputs."""
        return self._calibrated(self.program(inputs.dense, inputs.pooled), inputs.ids)

    def _calibrated(
        self, outputs: torch.Tensor, ids: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    ) -> NDArray[np.float32]:
        """Return scores from the layers' outputs and the ids of the same rows."""
        if self.calibration is not None:
            outputs = self.calibration.apply(outputs, *ids())
        scores: NDArray[np.float32] = self._scores_of(outputs).float().numpy()
        return scores

    def _outputs(
        self, dense: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        pooled = self._pooled(values, offsets, weights) if self._keys else torch.empty(len(dense), 0)
        return self.program(dense, pooled)

    def _pooled(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Return the pooled rows. A tower of the extra retrieval overrides this to look up only its features."""
        if self._composed is None:
            return self.lookup.pooled(values, offsets, weights)
        return self._composed.pooled(self.lookup, values, offsets, weights)

    def _scores_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return scores from the layers' outputs. A tower of the extra retrieval overrides this to return vectors."""
        return scores_of(self.tasks, outputs)

    @property
    def _width(self) -> tuple[int, ...]:
        """Return the number of scores per row."""
        return (len(self.tasks),) if self.tasks else ()
