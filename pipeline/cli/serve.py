"""Serve an artifact's scores over HTTP:  python -m pipeline serve artifact=artifacts/quickstart

It listens on loopback. For other addresses put a proxy in front, or set tokens and a certificate (docs/do/serving.md). A newer
artifact behind the same link, or a new champion of a registry, is loaded between two requests.
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.config.jobs.evaluate import ServeJob
from pipeline.retraining.find_artifact import find_artifact
from pipeline.runtime.storage.signature import requiring
from pipeline.serving.http.serve import serve


def serve_with_registry(job: ServeJob) -> None:
    with requiring(job.require_signature, job.accepted):
        serve(job, find=find_artifact)


main = verb("serve", ServeJob, when_interrupted=lambda job: "no longer served")(serve_with_registry)
