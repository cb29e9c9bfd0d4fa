"""Do the commands of `canary` that need no scores: status, start, promote and stop."""

from __future__ import annotations

import os
from dataclasses import replace

from pipeline.extras.canary.config import CanaryJob
from pipeline.extras.canary.pointer import CanaryFile
from pipeline.retraining.ledger import PROMOTED, Ledger, Record
from pipeline.retraining.promotion import (
    LEASE_TTL_S,
    Candidate,
    files_of_artifact,
    finished_run,
    publish,
)
from pipeline.retraining.registry import Registry, RegistryError, Version
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.lease import RunFolderHeldError, take_lease
from pipeline.runtime.storage.manifest import MANIFEST, read_sealed
from pipeline.runtime.storage.signature import Purpose

OFFERED = "offered"  # state of a record: the version serves as canary


def status(job: CanaryJob) -> list[str]:
    """Return what serves."""
    pointer, canary = Registry(job.registry).pointer(), CanaryFile(job.registry).read()
    lines = [f"champion    {pointer.version if pointer else 'none'}"]
    if canary.version is None:
        return [*lines, f"canary      none{f'; the last one: {canary.reason}' if canary.reason else ''}"]
    return [*lines, f"canary      {canary.version}, {100 * canary.share:g} % of the keys since {canary.started_at}"]


def start(job: CanaryJob) -> list[str]:
    """Let a version answer a share of the requests. Raises RegistryError."""
    registry = Registry(job.registry)
    name = job.version or publish_run(registry, str(job.run), str(job.artifact)).name
    canary = CanaryFile(job.registry).start(registry, name, job.share)
    return [
        f"canary      {canary.version}, {100 * canary.share:g} % of the keys; the champion is {canary.champion}",
        f"servers     python -m pipeline serve artifact={job.registry} router.canary.artifact={job.registry} "
        "router.canary.shadow=0.1 router.canary.log=<folder>",
    ]


def offer_canary(registry: Registry, version: Version, record: Record, share: float) -> Record:
    """Start a challenger of retrain as canary, instead of promoting it, and note this in the ledger.
    The window is not judged before the canary is promoted or stopped. Raises RegistryError."""
    CanaryFile(registry.path).start(registry, version.name, share)
    return Ledger(registry.path).append(replace(record, state=OFFERED, version=version.name))


def canary_note(registry: str) -> str:
    """Return why retrain waits, or an empty text if no canary runs."""
    canary = CanaryFile(registry).read()
    if canary.version is None:
        return ""
    return f"{canary.version} is the canary: `python -m pipeline canary evaluate {registry}` promotes it or stops it"


def canary_card(registry: str) -> tuple[str, str] | None:
    """Return the canary and its description for the page of a registry; None if no canary runs."""
    canary = CanaryFile(registry).read()
    if canary.version is None:
        return None
    return canary.version, f"canary: {100 * canary.share:g} % of the keys since {canary.started_at}"


def publish_run(registry: Registry, folder: str, artifact: str) -> Version:
    """Make a version of a run and its artifact, without promoting it. Raises RegistryError."""
    run, champion = finished_run(folder), registry.pointer()
    lineage = read_sealed(storage.join(artifact, MANIFEST), Purpose.ARTIFACT)["lineage"]
    if lineage.get("step") != run.manifest["step"]:
        raise RegistryError(
            f"{artifact} has step {lineage.get('step')}, and {folder} would be published with step {run.manifest['step']}: "
            "export that step"
        )
    record = Record(PROMOTED, parent=champion.version if champion else "", reasons=[f"from {os.path.abspath(folder)}"])
    candidate = Candidate(run, f"canary {run.checkpoint}", record, champion, files_of_artifact(artifact))
    lease = None
    try:
        if storage.is_local(registry.path):
            lease = take_lease(registry.path, LEASE_TTL_S)
        return publish(registry, candidate, lease.check if lease else lambda: None)
    except RunFolderHeldError as error:
        raise RegistryError(f"nothing is published, because a retrain is running: {error}") from None
    finally:
        if lease is not None:
            lease.release()


def promote_by_hand(job: CanaryJob) -> list[str]:
    """Make the canary the champion without a gate."""
    from pipeline.extras.canary.evaluate import PROMOTE, Decision, promote

    registry, file = Registry(job.registry), CanaryFile(job.registry)
    pointer, canary = registry.pointer(), file.read()
    if canary.version is None or pointer is None:
        raise RegistryError(f"{job.registry} has no canary to promote")
    decision = Decision(PROMOTE, [job.reason or "promoted by hand"], {}, [])
    promote(registry, file, registry.version(canary.version), pointer, decision)
    return [f"champion    {canary.version}, was {pointer.version}"]


def stop_by_hand(job: CanaryJob) -> list[str]:
    """End the canary without a gate."""
    from pipeline.extras.canary.evaluate import STOP, Decision, stop

    registry, file = Registry(job.registry), CanaryFile(job.registry)
    pointer, canary = registry.pointer(), file.read()
    if canary.version is None or pointer is None:
        raise RegistryError(f"{job.registry} has no canary to stop")
    decision = Decision(STOP, [job.reason or "stopped by hand"], {}, [])
    stop(registry, file, registry.version(canary.version), pointer.version, decision)
    return [f"canary      {canary.version} stopped; {pointer.version} answers everything"]
