"""Serve an artifact with Ray Serve:  serve run examples.ray_serve:application artifact=artifacts/quickstart

    curl -d @rows.json localhost:8000

rows.json holds {"rows": [{"int_0": 3, "cat_0": "a", ...}]} with each column of the artifact's `schema`.

`python -m pipeline serve` is faster: it puts requests together. Use this file where a Ray cluster serves other models too.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from pipeline import Artifact, UserError


@serve.deployment
class Scores:
    def __init__(self, artifact: str) -> None:
        self.artifact = Artifact(artifact)

    async def __call__(self, request: Any) -> dict[str, Any]:
        try:
            return {"scores": self.artifact.predict((await request.json())["rows"]).tolist()}
        except UserError as error:
            return {"error": str(error)}


def application(arguments: dict[str, str]) -> Any:
    return Scores.bind(arguments["artifact"])
