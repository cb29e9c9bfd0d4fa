"""Write the files of one step, verify them, commit the step, and remove old steps."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from typing import Any

from pipeline.checkpoint import random_state
from pipeline.checkpoint.chains import chain_of, open_reader, step_before
from pipeline.checkpoint.collective_errors import Ranks
from pipeline.checkpoint.owners import Owner, check_file
from pipeline.checkpoint.retention import LATER_VERIFIED, Retention, measured_metric
from pipeline.checkpoint.shards import Places, Sampled, ShardPlan, Tensors, write_bytes, write_metadata, write_shards
from pipeline.checkpoint.steps import (
    SAMPLED_VERSION,
    base_of,
    file_path,
    is_link,
    is_packed,
    list_steps,
    read_manifest,
    step_name,
    step_path,
)
from pipeline.runtime.errors import CheckpointError, DamagedError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.atomic import Attempt, Fence, PublishedFolders
from pipeline.runtime.storage.checksums import FileEntry, damage, size_problem
from pipeline.runtime.storage.manifest import seal_manifest
from pipeline.runtime.storage.signature import Purpose

GIB = 1 << 30


def free_bytes(folder: str) -> int:
    """Return the free bytes of the file system of a local folder, which may not exist yet."""
    folder = os.path.abspath(folder)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def shortage(folder: str, needed_bytes: int, what: str) -> str:
    """Return "" if `needed_bytes` fit on the disk, otherwise a sentence with the path and the bytes."""
    if (free := free_bytes(folder)) >= needed_bytes:
        return ""
    return (
        f"{folder} has {free:,} bytes ({free / GIB:.2f} GiB) free, {what} needs {needed_bytes:,} "
        f"({needed_bytes / GIB:.2f} GiB)"
    )


logger = get_logger(__name__)
# of a rank's files; the text says why they could not be written
Report = tuple[dict[str, FileEntry], Places, Sampled, str]


@dataclass(frozen=True)
class Save:
    """The content of one save. Training does not change this content."""

    owner: Owner
    attempt: Attempt
    plan: ShardPlan
    tensors: Tensors
    random: bytes
    manifest: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)  # additional files of this rank, by name

    @property
    def step(self) -> int:
        return self.owner.step


class StepWriter:
    """Writes steps. Collective over `ranks`, on the main thread or in another thread."""

    def __init__(self, steps: PublishedFolders, ranks: Ranks, retention: Retention, fence: Fence | None = None) -> None:
        self.folder = steps.parent
        self._is_local = storage.is_local(self.folder)
        self._steps, self._ranks, self._retention = steps, ranks, retention
        self._fence = fence
        self._verified: set[int] = set()

    def write(self, save: Save) -> None:
        """Write and commit a step. If any rank fails, nothing is committed and every rank raises
        CheckpointError."""
        failure, files, places, sampled = "", dict[str, FileEntry](), Places(), Sampled()
        try:
            files, places, sampled = self._write_files(save)
        except (OSError, RuntimeError, DamagedError) as error:
            failure = f"rank {self._ranks.context.rank}: {error}"
        reports = self._ranks.gather_to_main((files, places, sampled, failure))
        failures = self._ranks.from_main(lambda: self._finish(save, reports or []))
        if failures:
            raise CheckpointError(
                f"step {save.step} was not saved, earlier checkpoints are untouched: {'; '.join(failures)[:800]}. "
                f"Is {self.folder} full or read-only?"
            )
        self._verified.add(save.step)
        self._purge(save.step)

    def _write_files(self, save: Save) -> tuple[dict[str, FileEntry], Places, Sampled]:
        attempt, rank = save.attempt, save.owner.rank
        os.makedirs(attempt.stage, exist_ok=True)
        stored = write_shards(
            attempt.stage, save.owner, save.plan.items, save.tensors, self._is_local, is_packed(save.manifest)
        )
        files, places, sampled = stored
        for name, content in {random_state.file_name(rank): save.random, **save.files}.items():
            files |= write_bytes(attempt.stage, name, content, self._is_local)
        self._deliver(attempt, files)
        return files, places, sampled

    def _deliver(self, attempt: Attempt, files: dict[str, FileEntry]) -> None:
        """Move files to their destination. Raises DamagedError if a size is wrong. On disks all
        bytes were read back before this call.
        """
        self._steps.deliver(attempt, list(files))
        for name, entry in files.items():
            if problem := size_problem(storage.join(attempt.path, name), entry):
                raise DamagedError(f"what was written does not read back: {problem}")

    def _finish(self, save: Save, reports: list[Report]) -> list[str]:
        """Commit the step. Return the failures of the ranks as texts. Rank 0 only."""
        failures = [text for *_, text in reports if text]
        if not failures:
            try:
                self._commit(save, reports)
                return []
            except (OSError, DamagedError) as error:
                failures = [f"rank 0: {error}"]
        try:
            self._steps.discard(save.attempt)
        except OSError as error:
            logger.warning("the rest of a failed save could not be removed: %s", error)
        return failures

    def _commit(self, save: Save, reports: list[Report]) -> None:
        assert save.plan.metadata is not None
        places = [places for _, places, _, _ in reports]
        written = write_metadata(save.attempt.stage, save.owner, save.plan.metadata, places, self._is_local)
        self._deliver(save.attempt, written)
        files = {name: entry for part, *_ in reports for name, entry in part.items()} | written
        sampled = [entry for _, _, part, _ in reports for entry in part]
        more = {"format_version": SAMPLED_VERSION, "sampled": sampled} if sampled else {}
        manifest = {**save.manifest, **more, "files": dict(sorted(files.items())), "attempt": save.attempt.below}
        self._steps.commit(save.attempt, seal_manifest(manifest, Purpose.STEP), self._fence)

    def verify(self, step: int) -> dict[str, Any]:
        """Return the manifest of a step if it and all steps that it builds on are intact. Each rank
        checks a part of the files.

        Raises:
            DamagedError, CheckpointError: on all ranks.
        """
        path = step_path(self.folder, step)

        def check() -> dict[str, Any]:
            chain = chain_of(path, read_manifest(path))
            for one in chain:
                self._check_files(*one)
            if self._ranks.context.is_main:
                open_reader(path, chain[-1][1]).read_metadata()
            return chain[-1][1]

        manifest = self._ranks.read(check, storage.is_local(self.folder))
        self.mark_verified(step)
        return manifest

    def _check_files(self, path: str, manifest: dict[str, Any]) -> None:
        """Check the part of a step's files that this rank is responsible for."""
        context, files = self._ranks.context, manifest["files"]
        for name in sorted(files)[context.rank :: context.world_size]:
            if problem := file_problem(file_path(path, manifest, name), files[name]):
                raise DamagedError(problem)
            if storage.is_local(path):
                check_file(path, manifest, name)

    def is_intact_itself(self, step: int) -> bool:
        """Return True if the files of the step verify. The steps that it builds on may be damaged.
        Collective.
        """
        path = step_path(self.folder, step)

        def check() -> None:
            manifest = read_manifest(path)
            if is_link(manifest):
                step_before(path, manifest)
            self._check_files(path, manifest)

        try:
            self._ranks.read(check, storage.is_local(self.folder))
        except (DamagedError, CheckpointError):
            return False
        return True

    def known_chain(self, path: str) -> list[int]:
        """Return the step at `path` and the steps that it builds on, with `path` first, as far as
        their manifests can be read.
        """
        steps: list[int] = []
        while True:
            steps.insert(0, int(path.rstrip("/").rpartition("_")[2]))
            try:
                manifest = read_manifest(path)
            except DamagedError:
                return steps
            if not is_link(manifest) or not manifest["chain"]["previous"] < manifest["step"]:
                return steps
            path = step_path(self.folder, int(manifest["chain"]["previous"]))

    def mark_verified(self, step: int) -> None:
        self._verified.add(step)

    def _purge(self, saved: int) -> None:
        """Remove steps that need not be kept, if two later steps are known to be intact. Only steps
        up to `saved` are removed. Links are removed before their base, the newest first. The two
        later steps are then the last steps of two later chains.
        """
        bases, expendable = self._ranks.from_main(lambda: self._expendable(saved))
        for step in expendable:
            later = sorted(
                {max(other for other in bases if bases[other] == base) for base in bases.values() if base > step}
            )
            if sum(self._is_intact(other) for other in later[-LATER_VERIFIED:]) < LATER_VERIFIED:
                logger.warning("step %d stays: the %d steps after it do not all verify", step, LATER_VERIFIED)
                continue
            if self._ranks.context.is_main:
                try:
                    self._steps.remove(step_name(step))
                    logger.info("step %d  purged: %s stay", step, [other for other in bases if other > step])
                except OSError as error:
                    logger.warning("step %d could not be purged: %s", step, error)
            del bases[step]

    def _expendable(self, saved: int) -> tuple[dict[int, int], list[int]]:
        """Return the mapping step -> base for the steps up to `saved`, and the steps that can be
        removed, in the order of removal.
        """
        metrics: dict[int, float | None] = {}
        bases: dict[int, int] = {}
        try:
            for step in list_steps(self.folder):
                if step > saved:
                    continue
                metrics[step], bases[step] = None, step
                try:
                    manifest = read_manifest(step_path(self.folder, step))
                    metrics[step] = measured_metric(manifest, self._retention.best_metric)
                    bases[step] = base_of(manifest)
                except DamagedError:
                    if self._retention.keep_best_n:
                        raise
        except (OSError, DamagedError) as error:
            logger.warning("nothing is purged: %s", error)
            return {}, []
        return bases, self._retention.expendable(metrics, bases)

    def _is_intact(self, step: int) -> bool:
        if step not in self._verified:
            try:
                self.verify(step)
            except (DamagedError, CheckpointError) as error:
                logger.warning("step %d does not verify: %s", step, error)
                return False
        return True


def file_problem(path: str, entry: FileEntry) -> str:
    """Return "" if a file verifies, otherwise the problem. In an object store only the size is
    checked, because a checksum needs a download.
    """
    return damage(path, entry) if storage.is_local(path) else size_problem(path, entry)
