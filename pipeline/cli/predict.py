"""Score raw rows with an exported artifact:  python -m pipeline.predict artifact=artifacts/quickstart source=rows.parquet output=scores.parquet

A killed run goes on where it was when the same command is given again.
"""

from __future__ import annotations

from pipeline.cli.command_line import run_verb
from pipeline.config.jobs import PredictJob
from pipeline.retraining.find_artifact import find_artifact
from pipeline.serving.scoring.predict import PredictSummary, describe, predict


def _predict(job: PredictJob) -> PredictSummary:
    return predict(job, find=find_artifact)


def main() -> None:
    run_verb(PredictJob, _predict, __doc__, describe)


if __name__ == "__main__":
    main()
