"""Promote a finished run to champion: publish it, move the pointer, record it, and remove old
versions.

A process may be killed after each of the four steps. A version is found again by its candidate key.
The pointer states its target. A promotion that is missing in the ledger is recorded from the
version's lineage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.checkpoint.retention import best_step
from pipeline.checkpoint.steps import is_link, list_steps, read_manifest, step_path
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import load_saved_job, plain_values
from pipeline.data.dataset import FILE_NAME, load_dataset
from pipeline.data.vocabulary_files import find_vocabulary
from pipeline.retraining.ledger import ADDED, PROMOTED, Ledger, Record
from pipeline.retraining.registry import ARTIFACT, Pointer, Registry, RegistryError, Version, timestamp
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import signature, storage
from pipeline.runtime.storage.lease import Lease, RunFolderHeldError, take_lease
from pipeline.runtime.storage.manifest import MANIFEST, path_below, read_sealed
from pipeline.runtime.storage.signature import Purpose

CONFIG = "config.yaml"
LEASE_TTL_S = 120.0


@dataclass(frozen=True)
class FinishedRun:
    """A finished run. `manifest`: of the step at `checkpoint`.

    `data`: the folder of dataset.json and the vocabularies.
    """

    folder: str
    checkpoint: str
    data: str
    manifest: dict[str, Any]

    def files(self) -> dict[str, str]:
        """Return path in a version -> local file, for all files of a version. Raises DataError for a damaged vocabulary."""
        step = self.checkpoint.rpartition("/")[2]
        names = [MANIFEST, *self.manifest["files"]]
        source = storage.join(self.checkpoint, MANIFEST)
        files = {f"checkpoint/{step}/{name}": path_below(self.checkpoint, name, source) for name in names}
        files[CONFIG] = storage.join(self.folder, CONFIG)
        files[f"data/{FILE_NAME}"] = storage.join(self.data, FILE_NAME)
        features = [feature for feature in load_dataset(self.data).sparse_features if feature.vocabulary]
        return files | {f"data/{feature.vocabulary}": find_vocabulary(self.data, feature) for feature in features}

    def check(self, version: Version) -> None:
        """Raise DamagedError if a copied file of the step differs from the file that the
        run wrote.
        """
        step = self.checkpoint.rpartition("/")[2]
        for name, entry in self.manifest["files"].items():
            if not version.has_file(f"checkpoint/{step}/{name}", entry):
                raise DamagedError(
                    f"{self.checkpoint}/{name} has changed since it was saved: {version.name} is not promoted"
                )


def finished_run(folder: str) -> FinishedRun:
    """Return the best step if the run keeps it, otherwise the newest step.

    Raises RetrainingError if there is none, or if its vocabularies are elsewhere.
    """
    checkpoints = storage.join(folder, "checkpoints")
    steps = list_steps(checkpoints)
    if not steps or not storage.is_file(storage.join(folder, CONFIG)):
        raise RegistryError(
            f"{folder} has no finished run with checkpoints on this machine; give run=<the run_dir of a training>"
        )
    path = step_path(checkpoints, steps[-1])
    manifest = read_manifest(path)
    kept = manifest["config"]["checkpoint"]
    if kept.get("keep_best_n") or kept.get("save_best"):
        job = load_saved_job(TrainJob, storage.join(folder, CONFIG))
        if best := best_step(checkpoints, job.best_metric):
            path = step_path(checkpoints, best[0])
            manifest = read_manifest(path)
    if is_link(manifest):
        raise RegistryError(
            f"{path} has only the rows that changed since the previous step, but a version needs "
            "a complete step: train with "
            "checkpoint.differential=false to promote a run"
        )
    if signature.is_required():
        _check_config(storage.join(folder, CONFIG), manifest, path)
    data = str(manifest["config"]["data"]["path"])
    if load_dataset(data).fingerprint() != manifest["data_order"]["dataset"]:
        raise RegistryError(
            f"{data} is no longer the data set that {folder} was trained on: prepare that data set again"
        )
    return FinishedRun(folder, path, data, manifest)


def _check_config(path: str, manifest: dict[str, Any], step: str) -> None:
    """Raise DamagedError unless the saved job is the config that the signed manifest of the step holds."""
    saved = plain_values(storage.read_text(path))
    signed = manifest["config"]
    differing = sorted(key for key in saved.keys() | signed.keys() if saved.get(key) != signed.get(key))
    if differing:
        raise DamagedError(
            f"{path} differs from the config that {step} was signed with, in {', '.join(differing)}: restore it"
        )


@dataclass(frozen=True)
class Candidate:
    """A run that has passed. `key` identifies it.

    `extra`: more files, as path in the version -> local file.
    """

    run: FinishedRun
    key: str
    record: Record
    expected: Pointer | None
    extra: dict[str, str]

    def check(self, version: Version) -> None:
        """Raise DamagedError if a copied file differs from the file that the training or the export
        wrote.
        """
        self.run.check(version)
        manifest = self.extra.get(f"{ARTIFACT}/{MANIFEST}")
        for name, entry in read_sealed(manifest, Purpose.ARTIFACT)["files"].items() if manifest else ():
            if not version.has_file(f"{ARTIFACT}/{name}", entry):
                raise DamagedError(f"{name} has changed since it was exported: {version.name} is not promoted")

    def is_in(self, version: Version) -> bool:
        """Return whether the version has this run, and not an earlier run of the same window whose
        files are lost.
        """
        try:
            self.check(version)
        except DamagedError:
            return False
        return True


def files_of_artifact(folder: str) -> dict[str, str]:
    """Return path in a version -> local file, for a complete artifact."""
    found = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    return {f"{ARTIFACT}/{os.path.relpath(path, folder)}": path for path in sorted(found)}


def lineage_of(candidate: Candidate) -> dict[str, Any]:
    record = candidate.record
    return {
        "window": record.window,
        "parent": record.parent or None,
        "candidate": candidate.key,
        "config_hash": record.config_hash,
        "code_version": record.code_version,
        "data": {"fingerprint": candidate.run.manifest["data_order"]["dataset"], "source": record.source},
        "step": candidate.run.manifest["step"],
        "metrics": record.metrics,
        "created_at": timestamp(),
        "record": asdict(record),
    }


def promote(
    registry: Registry, ledger: Ledger, candidate: Candidate, keep: int | None, fence: Callable[[], None]
) -> Record:
    """Promote the candidate and return the ledger's record.

    `fence` raises if this process may no longer commit.

    keep: how many of the newest versions to keep. None: remove nothing; only the tick with the
    registry's lease removes.

    Raises:
        PinnedError, RegistryError: the candidate was compared with another champion than the current one.
        DamagedError: the run's files have changed since they were saved.
    """
    version = publish(registry, candidate, fence)
    fence()
    registry.promote(version, candidate.expected)
    record = complete(registry, ledger)
    assert record is not None
    if keep is not None:
        registry.prune(keep)
    return record


def publish(registry: Registry, candidate: Candidate, fence: Callable[[], None]) -> Version:
    """Publish the candidate, unless an interrupted promotion has. The pointer stays. Raises DamagedError as promote."""
    version = published(registry, candidate.key)
    if version is None or not candidate.is_in(version):
        fence()
        files = candidate.run.files() | candidate.extra
        version = registry.publish(registry.next_name(), files, lineage_of(candidate), fence)
    candidate.check(version)
    return version


def published(registry: Registry, key: str) -> Version | None:
    """Return the newest version with this candidate key, which an interrupted promotion has
    left.
    """
    return next((version for version in registry.versions() if version.lineage.get("candidate") == key), None)


def complete(registry: Registry, ledger: Ledger) -> Record | None:
    """Record a promotion that was interrupted before it was recorded.

    Return the champion's record; None without a champion.
    """
    champion = registry.champion()
    if champion is None:
        return None
    for record in ledger.newest():
        if record.version == champion.name and record.state in (PROMOTED, ADDED):
            return record
    return ledger.append(Record(**{**champion.lineage["record"], "version": champion.name}))


def add_run(registry: Registry, ledger: Ledger, folder: str) -> Record:
    """Make a run the first champion without a gate.

    Raises RegistryError if there is a champion or a tick is running.
    """
    lease: Lease | None = None
    try:
        if storage.is_local(registry.path):
            lease = take_lease(registry.path, LEASE_TTL_S)
        return _add_run(registry, ledger, folder, lease.check if lease else lambda: None)
    except RunFolderHeldError as error:
        raise RegistryError(f"nothing is added, because a retrain is running: {error}") from None
    finally:
        if lease is not None:
            lease.release()


def _add_run(registry: Registry, ledger: Ledger, folder: str, fence: Callable[[], None]) -> Record:
    if (pointer := registry.pointer()) is not None:
        raise RegistryError(
            f"{registry.path} has a champion, {pointer.version}; its successor must pass the gate of retrain"
        )
    run = finished_run(folder)
    record = Record(ADDED, reasons=[f"from {os.path.abspath(folder)}"], metrics=_validation(folder))
    # Remove nothing, because in an object store, which has no lease, a tick may be publishing.
    return promote(registry, ledger, Candidate(run, f"add {run.checkpoint}", record, None, {}), None, fence)


def _validation(folder: str) -> dict[str, Any]:
    path = storage.join(folder, "summary.json")
    found = json.loads(storage.read_text(path)).get("validation", {}) if storage.is_file(path) else {}
    return {f"validation_{name}": value for name, value in found.items()}
