"""Score raw rows with an exported artifact:  python -m pipeline predict artifact=artifacts/quickstart source=rows.parquet output=scores.parquet

With a two-tower's artifact, find the best items of each row (retrieve.k=100), or give its vector (retrieve.vectors=true).
Run the same command again to resume a killed run.
"""

from __future__ import annotations

from pipeline.cli.verb import resume_hint, verb
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.retraining.find_artifact import find_artifact
from pipeline.runtime.storage.signature import requiring
from pipeline.serving.scoring.predict import describe, predict
from pipeline.serving.scoring.prediction import PredictSummary


def predict_with_registry(job: PredictJob) -> PredictSummary:
    with requiring(job.require_signature):
        return predict(job, find=find_artifact)


main = verb("predict", PredictJob, describe=describe, handles_sigterm=True, when_interrupted=resume_hint)(
    predict_with_registry
)
