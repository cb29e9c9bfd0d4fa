"""Log an artifact as an MLflow model, which MLflow's tools load, score and deploy.

with mlflow.start_run():
    log_artifact("artifacts/quickstart", "model")
mlflow.pyfunc.load_model("runs:/.../model").predict(frame)
"""

from __future__ import annotations

from typing import Any

import mlflow

from pipeline import Artifact


class PipelineArtifact(mlflow.pyfunc.PythonModel):
    def load_context(self, context: Any) -> None:
        self.artifact = Artifact(context.artifacts["pipeline"])

    def predict(self, context, model_input, params=None):  # without types, which MLflow would check rows by
        return self.artifact.predict(model_input)


def save_artifact(artifact: str, path: str) -> None:
    """Write the model to a folder, with a copy of the artifact."""
    mlflow.pyfunc.save_model(
        path, python_model=PipelineArtifact(), artifacts={"pipeline": artifact}, pip_requirements=[]
    )


def log_artifact(artifact: str, name: str) -> None:
    """Log the model to the active MLflow run."""
    mlflow.pyfunc.log_model(
        name=name, python_model=PipelineArtifact(), artifacts={"pipeline": artifact}, pip_requirements=[]
    )
