"""Prepare a data set from raw click logs:  python -m pipeline prepare data=criteo_kaggle source=train.txt"""

from __future__ import annotations

from pipeline.cli.verb import resume_hint, verb
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare.run import describe, prepare

main = verb(
    "prepare", PrepareJob, describe=describe, when_interrupted=resume_hint, written_to=lambda job: job.data.path
)(prepare)
