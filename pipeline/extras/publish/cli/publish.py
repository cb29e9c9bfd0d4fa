"""Publish a delta of an artifact, which servers take in place:  python -m pipeline publish artifact=runs/quickstart/artifacts/step_00000300.int8

It holds the rows that changed since, in the artifact's own precision, and the layers. With follow=true it goes on beside a
training and publishes every step that is saved; with checkpoint.differential=true it reads the changed rows alone.

    python -m pipeline publish artifact=A pin=41     servers go back to delta 41 and stay there
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
