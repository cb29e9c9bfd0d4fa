"""Make a delta of an artifact from a later step of its run: the rows whose stored bytes differ, and
the layers.

The publisher has a predictor to which each delta is applied before it is committed. So a delta is
computed relative to what servers have, and the gate measures the model that would serve.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import torch

from pipeline.checkpoint.changes import Rows
from pipeline.checkpoint.steps import list_steps, step_path
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.registry import from_extra, if_installed
from pipeline.data.dataset import vocabulary_of
from pipeline.data.read.batch import Batch
from pipeline.extras.publish.gate import PROGRESSIVE_NE, DeltaRefusedError, Stats, problems_of
from pipeline.extras.publish.job import PublishJob
from pipeline.extras.publish.layer_tensors import LayerTensors
from pipeline.runtime.errors import ServingError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import FileEntry
from pipeline.runtime.storage.manifest import MANIFEST, seal_manifest, sealed_digest
from pipeline.runtime.storage.signature import Purpose
from pipeline.serving.artifact.deltas import (
    FORMAT_VERSION,
    LAYERS_FILE,
    VALUES_FILE,
    Delta,
    NewIds,
    Patch,
    StagedDelta,
    TableChange,
    delta_folders,
    deltas_folder,
    name_of,
    newest_sequence,
    pin,
    pinned_sequence,
    read_delta,
    tensors_to_bytes,
    values_to_bytes,
    why_pinned,
)
from pipeline.serving.artifact.manifest import CALIBRATION_FILE, COMPOSED_FILE, Manifest, TableFiles
from pipeline.serving.artifact.quantize import dequantize_rows, quantize_rows
from pipeline.serving.artifact.reference import SPLIT, first_batches
from pipeline.serving.artifact.task_quality import Calibration, quality
from pipeline.serving.artifact.trained_step import TrainedStep, block_rows, open_trained_step
from pipeline.serving.artifact.writer import write_bytes
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training.run_state import folder_of


class Stages:
    """The seconds that each part of making one delta took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def __str__(self) -> str:
        return ", ".join(f"{seconds:.2f} s {name}" for name, seconds in self.seconds.items())


class OutgrownError(ServingError):
    """A step has rows or values that a delta cannot add to the artifact, so a new artifact is needed."""


class Publisher:
    """Writes the chain of deltas of one artifact."""

    def __init__(self, job: PublishJob, artifact: str, history: Sequence[Stats] = ()) -> None:
        """history: deltas of earlier artifacts, with which the first deltas of this artifact are
        compared.

        Raises ServingError if deltas cannot follow the artifact.
        """
        self._job, self._artifact, self._folder = job, artifact, deltas_folder(artifact)
        self._predictor = Predictor.load(artifact, memory="mapped" if storage.is_local(artifact) else "ram")
        self._manifest = self._predictor.manifest
        _check_artifact(artifact, self._manifest)
        self._run = job.run or str(self._manifest.lineage["run"])
        self._predictor.catch_up(artifact)
        if self._predictor.sequence != newest_sequence(self._folder):
            raise ServingError(
                f"{self._folder} has a delta that cannot be used: set pin={self._predictor.sequence}, and export again"
            )
        self.layers = LayerTensors(self._manifest.dense["precision"], artifact)
        self._batches: list[Batch] | None = None
        self._ne = math.nan
        self._not_finite = 0  # rows of the delta in progress
        self.stages = Stages()  # of the newest delta
        deltas = [
            read_delta(self._folder, artifact, self._manifest, sequence)
            for sequence in range(1, self._predictor.sequence + 1)
        ]
        self._chain_bytes = sum(delta.size_bytes for delta in deltas)
        self.history: list[Stats] = [*history, *(delta.stats for delta in deltas)]

    @property
    def newest(self) -> str:
        return self._predictor.version

    @property
    def _step(self) -> int:
        applied = self._predictor.applied
        return applied.step if applied else int(self._manifest.lineage["step"])

    def publish_newest(self) -> Delta | None:
        """Publish a delta of the newest step, or of job.step.

        Return None if servers already have this step. Raises the same errors as publish_step.
        """
        steps = list_steps(folder_of(self._run))
        return self.publish_step(self._job.step if self._job.step is not None else max(steps, default=-1))

    def publish_step(self, step: int) -> Delta | None:
        """Publish a delta of the step. Return None if servers have this step or a later one.

        Raises:
            ServingError: the delta does not pass the gate, or the run no longer fits the artifact.
            CheckpointError: the step cannot be read.
        """
        if (pinned := pinned_sequence(self._folder)) is not None:
            raise ServingError(
                f"delta {pinned} of {self._artifact} is pinned, and nothing is published: unpin=true first{why_pinned(self._folder)}"
            )
        if step <= self._step:
            return None
        self.stages = Stages()
        with self.stages("opening"):
            trained = open_trained_step(ExportJob(run=self._run, step=step, data_path=self._job.data_path))
            self._check_step(trained)
        return self._publish(trained)

    def _check_step(self, trained: TrainedStep) -> None:
        """Raise OutgrownError if tables have more rows than the artifact's tables. Raise
        ServingError if tables, features or data differ.
        """
        now = [
            (table.name, stored.rows, stored.dim) for table, stored in zip(trained.tables, trained.stored, strict=True)
        ]
        then = [(table.name, table.rows, table.dim) for table in self._manifest.tables]
        features = [(feature.name, feature.table) for feature in trained.features]
        data = trained.dataset.fingerprint()
        larger = [(name, max(rows, own), dim) for (name, rows, dim), (_, own, _) in zip(then, now, strict=False)]
        same = (features, data) == (self._manifest.features, self._manifest.lineage["dataset_sha256"])
        if now != then and now == larger and same:
            raise OutgrownError(f"step {trained.step} of {self._run} has larger tables than {self._artifact}")
        if (now, features, data) != (then, self._manifest.features, self._manifest.lineage["dataset_sha256"]):
            raise ServingError(
                f"step {trained.step} of {self._run} has other tables, features or data than {self._artifact}: export a whole artifact"
            )

    def _publish(self, trained: TrainedStep) -> Delta:
        path = step_path(folder_of(self._run), trained.step)
        saved_at = os.path.getmtime(storage.join(path, MANIFEST)) if storage.is_local(path) else time.time()
        with self.stages("rows"):
            patches = list(self._patches(trained, path))
        with self.stages("layers"):
            constants = self.layers.at(trained, self._predictor.program)
        composed, values = trained.composed, self._new_ids(trained)
        with self.stages("gate"):
            stats = self._stats_before(patches, trained)
        stats["not_finite"] = self._not_finite + sum(int(not each.isfinite().all()) for each in constants)
        draft = Delta(
            self._folder, self._predictor.sequence + 1, trained.step, saved_at, str(trained.manifest.get("save_id", "")),
            [], {}, stats, "",
        )  # fmt: skip
        with self.stages("gate"):
            self._predictor.apply(StagedDelta(draft, patches, constants, composed, values))
            calibration = self._refit(trained)
            stats["ne"] = self._normalized_entropy(trained)
            self._check_gate(draft)
        contents = {LAYERS_FILE: tensors_to_bytes(constants)}
        if calibration is not None:
            contents[CALIBRATION_FILE] = calibration.to_bytes()
        if composed is not None:
            contents[COMPOSED_FILE] = composed.to_bytes()
        if values:
            contents[VALUES_FILE] = values_to_bytes(values)
            stats["new_values"] = sum(len(new.values) for new in values.values())
        with self.stages("writing"):
            delta = self._commit(draft, patches, contents)
        self._ne = stats["ne"]
        self.history.append(stats)
        self._chain_bytes += delta.size_bytes
        return delta

    def _refit(self, trained: TrainedStep) -> Calibration | None:
        """Fit the calibration to the scores of the step, if the artifact has a calibration."""
        if self._predictor.calibration is not None:
            refit = from_extra("refit_calibration", f"artifact={self._artifact}")
            self._predictor.calibration = refit(self._predictor, trained)
        return self._predictor.calibration

    def _new_ids(self, trained: TrainedStep) -> dict[str, NewIds]:
        """Return for each feature the values that the step has and the servers do not have.

        Raises OutgrownError if servers use these ids for other values.
        """
        found = {}
        for feature in trained.dataset.sparse_features:
            if feature.hash_size is not None or feature.name not in trained.keys:
                continue
            values = trained.new_values.get(vocabulary_of(feature), [])
            first, known = feature.cardinality, self._predictor.num_ids(feature.name)
            before = values[: known - first]
            if len(before) < known - first or (
                before and (self._predictor.encoder.ids_of(feature.name, before) != np.arange(first, known)).any()
            ):
                raise OutgrownError(
                    f"step {trained.step} of {self._run} gives values of {feature.name!r} other ids than {self._artifact}"
                )
            if values[known - first :]:
                found[feature.name] = NewIds(known, values[known - first :])
        return found

    def is_chain_over(self, share: float) -> bool:
        """Return True if the chain's deltas together are larger than `share` times the artifact."""
        return self._chain_bytes > share * self._manifest.size_bytes

    def _patches(self, trained: TrainedStep, path: str) -> Iterator[Patch]:
        applied = self._predictor.applied
        since = if_installed("rows_changed_since") if applied else None
        changed: dict[str, Rows] | None = since(path, trained.manifest, applied.save_id) if applied and since else None
        self._not_finite = 0
        for number, stored in enumerate(trained.stored):
            rows = None if changed is None else changed.get(stored.key, np.empty(0, np.int64))
            parts = list(self._differing(trained, number, rows))
            if parts:
                yield Patch(number, torch.cat([ids for ids, _ in parts]), torch.cat([new for _, new in parts]))

    def _differing(
        self, trained: TrainedStep, number: int, rows: Rows | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, one block at a time, the rows whose stored bytes differ from the servers' bytes.
        Only `rows` are compared (None: all rows).
        """
        stored, table = trained.stored[number], self._manifest.tables[number]
        at_once = block_rows(stored.dim * stored.dtype.itemsize)
        for first in range(0, stored.rows, at_once):
            last = min(first + at_once, stored.rows)
            own = (
                np.arange(first, last)
                if rows is None
                else rows[np.searchsorted(rows, first) : np.searchsorted(rows, last)]
            )
            if not len(own):
                continue
            begin, end = int(own[0]), int(own[-1]) + 1
            values = trained.tensors.read(stored.key, [begin, 0], [end - begin, stored.dim]).float()
            ids = torch.from_numpy(own)
            self._not_finite += int((~values[ids - begin].isfinite()).any(dim=1).sum())
            new = quantize_rows(values[ids - begin], table.precision).contiguous()
            differs = (new != self._predictor.lookup.stored(number, ids)).any(dim=1)
            if differs.any():
                yield ids[differs], new[differs]

    def _stats_before(self, patches: list[Patch], trained: TrainedStep) -> dict[str, float]:
        """Return the statistics of a delta before it is applied, and the values that its NE is
        compared with.
        """
        if math.isnan(self._ne):
            self._ne = self._normalized_entropy(trained)
        rows = sum(len(patch.ids) for patch in patches)
        new, old = (
            sum(_norms(self._manifest.tables[patch.table], each) for patch, each in pairs)
            for pairs in (
                [(patch, patch.rows) for patch in patches],
                [(patch, self._predictor.lookup.stored(patch.table, patch.ids)) for patch in patches],
            )
        )
        total = sum(table.stored_rows for table in self._manifest.tables)
        progressive = trained.manifest.get("progressive") or {}
        event_time = (trained.manifest.get("stream") or {}).get("event_time")
        return {
            **({PROGRESSIVE_NE: float(progressive["ne"])} if progressive.get("ne") is not None else {}),
            **({"event_time": float(event_time)} if event_time is not None else {}),
            "rows": rows,
            "rows_fraction": rows / max(1, total),
            "norm_ratio": new / old if old else 1.0,
            "ne_before": self._ne,
        }

    def _check_gate(self, delta: Delta) -> None:
        """Raise DeltaRefusedError if the delta must not be served. If several deltas are published,
        pin servers to the current delta.
        """
        if not (problems := problems_of(self._job.delta_gate, delta.stats, self.history)):
            return
        refusal = f"delta {delta.sequence} of step {delta.step} is not published, and {self._artifact} is unchanged: {'; '.join(problems)}"
        if self._job.follow:
            pin(self._folder, delta.sequence - 1, refusal)
            refusal += (
                f". The chain stops there until `python -m pipeline publish artifact={self._artifact} unpin=true`"
            )
        raise DeltaRefusedError(refusal)

    def _normalized_entropy(self, trained: TrainedStep) -> float:
        """Return the NE of the predictor's scores for the main label, on the first rows of the
        validation split.
        """
        if self._batches is None:
            self._batches = list(first_batches(trained, SPLIT, self._job.delta_gate.max_rows))
        scores, labels, weights = [], [], []
        for batch in self._batches:
            real = batch.is_present.numpy()
            found = self._predictor.score_batch(batch.dense_features, batch.sparse_features).view(batch.batch_size, -1)
            scores.append(found[:, 0].double().numpy()[real])
            labels.append(batch.labels.view(batch.batch_size, -1)[:, 0].double().numpy()[real])
            weights.append(batch.sample_weights.view(batch.batch_size, -1)[:, 0].double().numpy()[real])
        target = trained.targets[0]
        return quality(target.kind, *map(np.concatenate, (scores, labels, weights))).ne

    def _commit(self, draft: Delta, patches: list[Patch], contents: dict[str, bytes]) -> Delta:
        """Commit the delta. Raises FileExistsError if another publisher committed a delta first."""
        sequence, changes = draft.sequence, []
        for patch in patches:
            change = TableChange(patch.table, len(patch.ids), f"{patch.table:05d}.ids", f"{patch.table:05d}.rows")
            contents[change.ids] = patch.ids.numpy().astype("<u8").tobytes()
            contents[change.values] = patch.rows.numpy().tobytes()
            changes.append(change)
        before = storage.join(self._folder, name_of(sequence - 1)) if sequence > 1 else self._artifact
        with tempfile.TemporaryDirectory() as staging:
            folders = delta_folders(self._folder, staging)
            storage.make_folder(self._folder)
            attempt = folders.begin(name_of(sequence))
            try:
                os.makedirs(attempt.stage, exist_ok=True)
                files: dict[str, FileEntry] = {
                    name: write_bytes(os.path.join(attempt.stage, name), content) for name, content in contents.items()
                }
                folders.deliver(attempt, list(files))
                values = {
                    "format_version": FORMAT_VERSION, "base_version": self._manifest.version, "sequence": sequence,
                    "previous_sha256": sealed_digest(storage.join(before, MANIFEST)), "step": draft.step,
                    "saved_at": draft.saved_at, "save_id": draft.save_id, "tables": [asdict(change) for change in changes],
                    "stats": draft.stats, "attempt": attempt.below, "files": files,
                }  # fmt: skip
                path = folders.commit(attempt, seal_manifest(values, Purpose.DELTA))
            except BaseException:
                folders.discard(attempt)
                raise
        return replace(draft, path=path, tables=changes, files=files)


def _check_artifact(artifact: str, manifest: Manifest) -> None:
    if manifest.dense.get("compiled"):
        raise ServingError(f"{artifact} has compiled layers, which deltas do not change: export with compiled=false")
    if pruned := [table.name for table in manifest.tables if table.kept is not None]:
        raise ServingError(
            f"{artifact} leaves out rows of {len(pruned)} table(s), {pruned[0]!r} first, which deltas could change: export with "
            "pruning.kind=none"
        )


def _norms(table: TableFiles, rows: torch.Tensor) -> float:
    return float(dequantize_rows(rows, table.dim, table.precision).norm(dim=1).double().sum())
