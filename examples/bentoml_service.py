"""Serve an artifact with BentoML:  ARTIFACT=artifacts/quickstart bentoml serve examples.bentoml_service:Scores

curl -H 'Content-Type: application/json' -d '{"rows": [{"int_0": 3, "cat_0": "a"}]}' localhost:3000/predict
"""

from __future__ import annotations

import os
from typing import Any

import bentoml

from pipeline import Artifact


@bentoml.service
class Scores:
    def __init__(self) -> None:
        self.artifact = Artifact(os.environ["ARTIFACT"])

    @bentoml.api
    def predict(self, rows: list[dict[str, Any]]) -> list[float]:
        return [float(score) for score in self.artifact.predict(rows)]
