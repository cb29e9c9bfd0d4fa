"""Publish deltas of an artifact for the verb: one delta, or every step that a training saves; or
pin a delta.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.extras.publish.job import PublishJob
from pipeline.runtime.errors import CheckpointError, ServingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.processes import none_while_importing
from pipeline.runtime.storage.signature import requiring, signing
from pipeline.serving.scoring.load import FoundArtifact

if TYPE_CHECKING:
    from pipeline.serving.artifact.deltas import Delta

logger = get_logger("pipeline.publish")


def publish(job: PublishJob, find: Callable[[str], FoundArtifact]) -> list[str]:
    """Return lines that say what was published.

    With job.follow the function runs until Ctrl-C, or until a delta is refused.

    Raises:
        ServingError: deltas cannot follow the artifact, or a delta does not pass the gate.
    """
    with none_while_importing():
        from pipeline.extras.publish.publisher import Publisher
        from pipeline.serving.artifact.deltas import deltas_folder, pin

    with requiring(job.require_signature), signing(job.sign_key):
        artifact = find(job.artifact).path
        folder = deltas_folder(artifact)
        if job.pin is not None:
            pin(folder, job.pin)
            return [f"pinned      servers of {artifact} return to delta {job.pin} and stay there until unpin=true"]
        if job.unpin:
            pin(folder, None)
            return [f"unpinned    servers of {artifact} follow its newest delta"]
        publisher = Publisher(job, artifact)
        if not job.follow:
            delta = publisher.publish_newest()
            return [
                describe(delta) if delta else f"published   nothing: {publisher.newest} already serves the newest step"
            ]
        while True:
            _publish_what_came(publisher)
            time.sleep(job.every_s)


def _publish_what_came(publisher: object) -> None:
    """Publish the newest step, if there is one.

    Training keeps only a few steps, so it may remove a step while it is being read. The next step
    follows soon.
    """
    try:
        delta = publisher.publish_newest()  # type: ignore[attr-defined]
    except (CheckpointError, OSError) as error:
        if isinstance(error, ServingError):
            raise
        logger.warning("not published: %s", error)
        return
    if delta:
        logger.info("%s", describe(delta))
        if publisher.is_chain_over(0.5):  # type: ignore[attr-defined]
            logger.warning(
                "the deltas now have more than half of the artifact's bytes: export a new artifact to begin a new chain"
            )


def describe(delta: Delta) -> str:
    stats = delta.stats
    return (
        f"published   delta {delta.sequence}: step {delta.step}, {int(stats['rows']):,} rows, {delta.size_bytes:,} bytes, "
        f"NE {stats['ne']:.5f} ({stats['ne'] - stats['ne_before']:+.5f})"
    )
