"""Retrain on new windows of data, and promote the model if it is better:  python -m pipeline retrain experiment=quickstart source=clicks/

One call is called a tick. It takes the oldest windows of new data (at most max_catchup). For each window it prepares
the data, trains a new model (the challenger) from the current one (the champion), compares both on the next window,
and promotes or rejects the challenger. If there is nothing to do, or another tick runs, it ends with exit code 0. A scheduler may run it at any interval
(docs/do/retraining.md).

With follow=true it is one continuous training: it reads the source's files as they are added and grow, or a Kafka
topic, and publishes deltas of an artifact with publishing.when=every_5_minutes.
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
