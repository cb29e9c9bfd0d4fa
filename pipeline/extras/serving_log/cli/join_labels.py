"""Join late labels to a serving log as rows for training:  python -m pipeline join_labels log=logs/serving labels=clicks.parquet output=joined

A row gets its label once its window is over. The folder is a source of prepare and of retrain with
follow=true. The same command joins what has come since.
"""

from __future__ import annotations

from pipeline.cli.verb import resume_hint, verb
from pipeline.extras.serving_log.job import JoinLabelsJob


def run(job: JoinLabelsJob) -> str:
    from pipeline.extras.serving_log.join import join_labels

    return str(join_labels(job))


main = verb("join_labels", JoinLabelsJob, describe=str, when_interrupted=resume_hint)(run)
