"""Score rows with parts of two artifacts: the vocabulary of one, the rows of the other, and so on.

A row of a table belongs to a value of the feature. If a value has different ids in the two vocabularies, a swap either
takes the row of the same value or the row of the same id: for each feature the choice is the one that makes the rows of
both artifacts more similar. So a training that gives its values new ids does not change the vocabulary, but an exchange of
the ids of two values does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch

from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.manifest import COMPOSED_FILE
from pipeline.serving.artifact.quantize import SCALE_BIAS_BYTES, dequantize_rows, quantize_rows
from pipeline.serving.artifact.task_quality import scores_of
from pipeline.serving.scoring.dense_program import DenseProgram
from pipeline.serving.scoring.lookup import ServedTable
from pipeline.serving.scoring.predictor import Predictor

OLD, NEW = 0, 1
VOCABULARY, ROWS, QUANTIZER, LAYERS, CALIBRATION, TRANSFORMS = (
    "vocabulary", "rows", "quantizer", "layers", "calibration", "transforms",
)  # fmt: skip
FINENESS = ("int2", "int4", "int8", "fp16", "fp32")


@dataclass(frozen=True, order=True)
class Part:
    """A part of an artifact: a kind, and the feature, or the group of layers."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.name else self.kind


Choice = Mapping[Part, int]  # of which artifact each part is


def relative_change(old: torch.Tensor, new: torch.Tensor) -> float:
    """Return |new - old| relative to the mean of |old| and |new|, by the Euclidean norm: from 0 to 2."""
    before, after, change = (
        float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in (old, new, new - old)
    )
    return 2 * change / (before + after) if change else 0.0


class Side:
    """One artifact with the encoded rows."""

    def __init__(self, path: str, rows: pa.Table) -> None:
        self.predictor = Predictor.load(path)
        self.predictor.catch_up(path)
        if COMPOSED_FILE in self.predictor.manifest.files:
            raise ServingError(f"{path} has compressed tables or positions of sequences, whose parts are not swapped")
        encoder = self.predictor.encoder
        self.encoded = encoder.encode(
            rows.select([name for name in encoder.schema.columns if name in rows.column_names])
        )
        self.features = {each.name: self.predictor.lookup.tables[each.table] for each in self.predictor.lookup.features}
        self._numbers = {each.name: each.table for each in self.predictor.lookup.features}
        keys = [each.name for each in encoder.schema.features]
        ends = self.encoded.offsets.view(-1)
        batch = len(self.encoded.kept)
        self.ids: dict[str, np.ndarray] = {}
        self.lengths: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor | None] = {}
        for number, key in enumerate(keys):
            begin, end = int(ends[number * batch]), int(ends[(number + 1) * batch])
            self.ids[key] = self.encoded.values[begin:end].numpy()
            self.lengths[key] = ends[number * batch : (number + 1) * batch + 1].diff()
            self.weights[key] = None if self.encoded.weights is None else self.encoded.weights[begin:end]

    def stored(self, feature: str, ids: np.ndarray) -> torch.Tensor:
        """Return the bytes [n, row_bytes] of the rows of `ids`. An id beyond the table means unknown."""
        table = self.features[feature]
        ids = np.where(ids < table.rows, ids, 0)
        stored = ids if table.kept is None else table.kept.remap(ids)
        return self.predictor.lookup.stored(self._numbers[feature], torch.from_numpy(stored))

    def table(self, feature: str) -> ServedTable:
        return self.features[feature]

    def floats(self, feature: str, ids: np.ndarray) -> torch.Tensor:
        table = self.features[feature]
        return dequantize_rows(self.stored(feature, ids), table.dim, table.precision)


class Pair:
    """Two artifacts and the same rows. score() mixes their parts."""

    def __init__(self, paths: tuple[str, str], rows: pa.Table) -> None:
        self.sides = Side(paths[OLD], rows), Side(paths[NEW], rows)
        old, new = self.sides
        if {key: each.dim for key, each in old.features.items()} != {
            key: each.dim for key, each in new.features.items()
        }:
            differing = sorted(set(old.features) ^ set(new.features))
            raise ServingError(
                f"the versions read different features ({', '.join(differing[:5]) or 'of other dimensions'}), so their "
                "parts cannot be swapped: compare versions with the same features and dimensions"
            )
        if old.encoded.kept.tolist() != new.encoded.kept.tolist() or any(
            not torch.equal(old.lengths[key], new.lengths[key]) for key in old.lengths
        ):
            raise ServingError(
                "the versions read the rows differently (other lists or other bad rows): their parts cannot be swapped"
            )
        self.kept = old.encoded.kept
        self._of_value = {key: self._follow_values(key) for key in old.features}

    def _follow_values(self, feature: str) -> bool:
        """Return whether a value keeps its row if its id changes."""
        ids = [np.asarray(side.ids[feature]) for side in self.sides]
        moved = (ids[OLD] != ids[NEW]) & (ids[OLD] > 0) & (ids[NEW] > 0)
        if not moved.any():
            return True
        pairs = np.unique(np.stack([ids[OLD][moved], ids[NEW][moved]]), axis=1)
        own = self.sides[OLD].floats(feature, pairs[0])
        by_value = (own - self.sides[NEW].floats(feature, pairs[1])).norm(dim=1)
        by_id = (own - self.sides[NEW].floats(feature, pairs[0])).norm(dim=1)
        return bool(by_value.sum() <= by_id.sum())

    @cached_property
    def parts(self) -> list[Part]:
        """Return the parts that differ."""
        found = (
            [Part(TRANSFORMS)] if not torch.equal(self.sides[OLD].encoded.dense, self.sides[NEW].encoded.dense) else []
        )
        found += self._moved_vectors
        found += [Part(LAYERS, name) for name in self._groups]
        return found + ([Part(CALIBRATION)] if self._calibrations[OLD] != self._calibrations[NEW] else [])

    def contexts(self, part: Part) -> list[int]:
        """Return the artifacts in which the part is replaced by the other artifact's. If one artifact stores a table
        less precisely, its quantizer is tried on the precise rows, and rows are compared in the coarse precision."""
        finer = self.finer(part.name) if part.kind in (ROWS, QUANTIZER) else None
        return [OLD, NEW] if finer is None else [finer if part.kind == QUANTIZER else 1 - finer]

    def moved(self, part: Part) -> float | None:
        """Return the relative change of what the part gives to the model, whatever the layers make of it: of the
        vectors of the rows' ids, of the constants of layers. None if only its scores can be compared."""
        if part in self._moved_vectors:
            return self._moved_vectors[part]
        if part.kind == TRANSFORMS:
            return relative_change(self.sides[OLD].encoded.dense, self.sides[NEW].encoded.dense)
        if part.kind == LAYERS and self._groups[part.name]:
            constants = [
                torch.cat([self._program(side).constants[number].flatten() for number in self._groups[part.name]])
                for side in (OLD, NEW)
            ]
            return relative_change(*constants)
        return None

    @cached_property
    def _moved_vectors(self) -> dict[Part, float]:
        """Return the mean relative change over the contexts, for the parts of features that differ."""
        found = {}
        for key in self.sides[OLD].features:
            whole = [Part(kind, key) for kind in (VOCABULARY, ROWS, QUANTIZER)]
            for part in whole:
                changes = [
                    relative_change(
                        self._vectors(key, dict.fromkeys(whole, side)),
                        self._vectors(key, {**dict.fromkeys(whole, side), part: 1 - side}),
                    )
                    for side in self.contexts(part)
                ]
                if any(changes):
                    found[part] = sum(changes) / len(changes)
        return found

    def finer(self, feature: str) -> int | None:
        """Return the artifact that stores a table more precisely; None if both store it equally."""
        old, new = (FINENESS.index(side.table(feature).precision) for side in self.sides)
        return None if old == new else int(new > old)

    @cached_property
    def _calibrations(self) -> list[bytes]:
        return [side.predictor.calibration.to_bytes() if side.predictor.calibration else b"" for side in self.sides]

    @cached_property
    def _groups(self) -> dict[str, list[int]]:
        """Return group -> numbers of its constants, for groups that differ. "all" if the programs differ."""
        old, new = self._program(OLD), self._program(NEW)
        shapes = [[(each.shape, each.dtype) for each in program.constants] for program in (old, new)]
        if old.code != new.code or shapes[OLD] != shapes[NEW] or old.sources != new.sources:
            return {"all": []}
        found: dict[str, list[int]] = {}
        for number, (name, a, b) in enumerate(zip(old.sources, old.constants, new.constants, strict=True)):
            if not torch.equal(a, b):
                found.setdefault(name.rpartition(".")[0] or name, []).append(number)
        return found

    def _program(self, side: int) -> DenseProgram:
        program = self.sides[side].predictor.program
        if not isinstance(program, DenseProgram):
            raise ServingError("compiled layers cannot be taken apart")
        return program

    def _vectors(self, feature: str, choice: Choice) -> torch.Tensor:
        """Return the vectors [n, dim] of the ids of a feature."""
        of = {kind: choice.get(Part(kind, feature), OLD) for kind in (VOCABULARY, ROWS, QUANTIZER)}
        named, held = self.sides[of[VOCABULARY]], self.sides[of[ROWS]]
        ids, other = named.ids[feature], held.ids[feature]
        if self._of_value[feature]:
            vectors = self._quantized(feature, np.where(ids > 0, other, 0), of)
            alone = (ids > 0) & (other == 0)  # values that the other version does not know keep their row
            if alone.any():
                vectors[torch.from_numpy(alone)] = named.floats(feature, ids[alone])
            return vectors
        return self._quantized(feature, ids, of)

    def _quantized(self, feature: str, ids: np.ndarray, of: Mapping[str, int]) -> torch.Tensor:
        held, quantizer = self.sides[of[ROWS]], self.sides[of[QUANTIZER]]
        table, wanted = held.table(feature), quantizer.table(feature)
        rows = held.stored(feature, ids)
        if held is quantizer:
            return dequantize_rows(rows, table.dim, table.precision)
        if table.precision == wanted.precision and table.precision.startswith("int"):
            own = ids
            if self._of_value[feature]:  # the same values in the other vocabulary
                own = np.where(ids > 0, quantizer.ids[feature], 0)
            others = quantizer.stored(feature, own)
            same = (rows[:, SCALE_BIAS_BYTES:] == others[:, SCALE_BIAS_BYTES:]).all(dim=1)
            rows = torch.where(same[:, None], others, rows)
            return dequantize_rows(rows, table.dim, table.precision)
        values = dequantize_rows(rows, table.dim, table.precision)
        if FINENESS.index(wanted.precision) < FINENESS.index(table.precision):
            values = dequantize_rows(quantize_rows(values, wanted.precision), table.dim, wanted.precision)
        return values

    @torch.inference_mode()
    def score(self, choice: Choice, context: int) -> np.ndarray:
        """Return scores [rows] or [rows, tasks]. Parts that `choice` does not name are of the artifact `context`."""
        full = {part: choice.get(part, context) for part in self.parts}
        base = self.sides[context]
        pooled = [self._pooled(key, full, context) for key in (each.name for each in base.predictor.lookup.features)]
        dense = self.sides[full.get(Part(TRANSFORMS), context)].encoded.dense
        inputs = torch.cat(pooled, dim=1) if pooled else torch.zeros(len(dense), 0)
        outputs = self._run_layers(full, context, dense, inputs)
        calibrated = self.sides[full.get(Part(CALIBRATION), context)]
        if calibrated.predictor.calibration is not None:
            outputs = calibrated.predictor.calibration.apply(
                outputs, calibrated.encoded.values, calibrated.encoded.offsets
            )
        scores: np.ndarray = scores_of(base.predictor.tasks, outputs).double().numpy()
        return scores

    def _pooled(self, feature: str, choice: Choice, context: int) -> torch.Tensor:
        of = {Part(kind, feature): choice.get(Part(kind, feature), context) for kind in (VOCABULARY, ROWS, QUANTIZER)}
        vectors, side = self._vectors(feature, of), self.sides[context]
        lengths, weights = side.lengths[feature], side.weights[feature]
        if weights is not None:
            vectors = vectors * weights[:, None]
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        pooled = torch.zeros(len(lengths), vectors.shape[1]).index_add_(0, rows, vectors)
        return pooled / lengths.clamp(min=1)[:, None] if side.table(feature).pooling == "mean" else pooled

    def _run_layers(self, choice: Choice, context: int, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        whole = choice.get(Part(LAYERS, "all"), context)
        program = self._program(whole)
        before = program.constants
        mixed = list(before)
        for name, numbers in self._groups.items():
            other = self._program(choice.get(Part(LAYERS, name), context))
            for number in numbers:
                mixed[number] = other.constants[number]
        program.replace_constants(mixed)
        try:
            return program(dense, pooled)
        finally:
            program.replace_constants(before)
