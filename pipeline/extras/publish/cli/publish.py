"""Publish a delta of an artifact, which servers apply in place:  python -m pipeline publish
artifact=runs/quickstart/artifacts/step_00000300.int8

The delta has the changed rows in the artifact's precision, and the layers. With follow=true the
command runs next to a training and publishes every saved step. With checkpoint.differential=true it
reads only the changed rows.

    python -m pipeline publish artifact=A pin=41     servers return to delta 41 and stay there
    python -m pipeline publish artifact=A unpin=true
"""

from __future__ import annotations

from pipeline.cli.verb import resume_hint, verb
from pipeline.extras.publish.job import PublishJob
from pipeline.extras.publish.publish import publish
from pipeline.retraining.find_artifact import find_artifact


def publish_with_registry(job: PublishJob) -> list[str]:
    return publish(job, find_artifact)


main = verb("publish", PublishJob, describe="\n".join, when_interrupted=resume_hint)(publish_with_registry)
