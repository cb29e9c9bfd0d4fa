"""Serve an artifact with BentoML:  ARTIFACT=artifacts/quickstart bentoml serve examples.bentoml_service:Scores

    curl -H 'Content-Type: application/json' -d @rows.json localhost:3000/predict

rows.json holds {"rows": [{"int_0": 3, "cat_0": "a", ...}]} with each column of the artifact's `schema`.
"""

from __future__ import annotations

import os
from typing import Any

import bentoml
from bentoml.exceptions import BadInput

from pipeline import Artifact, UserError


@bentoml.service
class Scores:
    def __init__(self) -> None:
        self.artifact = Artifact(os.environ["ARTIFACT"])

    @bentoml.api
    def predict(self, rows: list[dict[str, Any]]) -> list[float]:
        try:
            return [float(score) for score in self.artifact.predict(rows)]
        except UserError as error:
            raise BadInput(str(error)) from error
