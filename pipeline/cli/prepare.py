"""Prepare a data set from raw click logs:  python -m pipeline prepare data=criteo_kaggle source=train.txt"""

from __future__ import annotations

from pipeline.cli.verb import goes_on, verb
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare.run import describe, prepare

main = verb("prepare", PrepareJob, describe=describe, when_interrupted=goes_on, written_to=lambda job: job.data.path)(
    prepare
)
