"""Retrain on new windows of data, and promote the model if it is better:  python -m pipeline retrain experiment=quickstart source=clicks/

One call is one tick: it takes the oldest windows of new data (max_catchup of them), and for each prepares it, trains a
challenger from the champion, holds both to the next window, and promotes or rejects. A tick that finds nothing to do,
or another one at work, ends with exit code 0; it may be run as often as a scheduler likes (docs/do/retraining.md).

With follow=true it is one training that goes on: it reads the source's files as they are added and grow, or a Kafka topic, and publishes
deltas of an artifact by publishing.when=every_5_minutes.
"""

from __future__ import annotations

from pipeline.cli.verb import resume_hint, verb
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.registry import from_extra
from pipeline.retraining.tick import describe, retrain_strictly


def retrain_or_follow(job: RetrainJob) -> str:
    if not job.follow:
        return describe(retrain_strictly(job))
    return str(from_extra("follow", "follow=true")(job))


main = verb(
    "retrain",
    RetrainJob,
    describe=str,
    runs_on_ranks=True,
    handles_sigterm=True,
    when_interrupted=resume_hint,
    runs_kernels=True,
)(retrain_or_follow)
