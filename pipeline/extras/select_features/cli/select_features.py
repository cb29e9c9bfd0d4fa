"""Train without the least important features:  python -m pipeline select_features run=runs/quickstart drop=5

It measures the importance of each feature on the validation split, trains the run again without the least
important features, and compares both on the test split. The same command continues an interrupted one.
"""

from __future__ import annotations

from pipeline.cli.verb import resume_hint, verb
from pipeline.extras.select_features.config import SelectFeaturesJob
from pipeline.runtime.process.processes import none_while_importing


def run(job: SelectFeaturesJob) -> str:
    with none_while_importing():
        from pipeline.extras.select_features.selection import select_features
    return select_features(job)


main = verb(
    "select_features",
    SelectFeaturesJob,
    describe=str,
    when_interrupted=resume_hint,
    runs_on_ranks=True,
    handles_sigterm=True,
    runs_kernels=True,
)(run)
