"""Route the Open Inference Protocol, which KServe calls v2: health, metadata and /infer, as JSON.

github.com/kserve/open-inference-protocol: specification/protocol/inference_rest.md
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline import __version__
from pipeline.extras.open_inference.tensors import Inference, described, read_tensors
from pipeline.runtime.errors import did_you_mean
from pipeline.serving.http.app import ScoringApp, problem
from pipeline.serving.http.batching import Asked, Scores
from pipeline.serving.http.request_rows import JSON_TYPE, BadRequest
from pipeline.serving.http.switching import ServedModel
from pipeline.serving.scoring.scorer import Scorer, score_columns

SERVER = "torchrec_pipeline"


def routes(app: ScoringApp) -> list[Route]:
    """Return the routes for a server."""
    inference = OpenInference(app)
    found = [
        Route("/v2", inference.server),
        Route("/v2/health/live", inference.live),
        Route("/v2/health/ready", inference.ready),
    ]
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [
            Route(path, inference.metadata),
            Route(f"{path}/ready", inference.model_ready),
            Route(f"{path}/infer", inference.infer, methods=["POST"]),
        ]
    return found


class OpenInference:
    """Handles the protocol's requests for the model that a server serves now."""

    def __init__(self, app: ScoringApp) -> None:
        self._app = app

    async def server(self, request: Request) -> Response:
        return JSONResponse({"name": SERVER, "version": __version__, "extensions": []})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        return JSONResponse({"ready": self._app.is_ready}, 200 if self._app.is_ready else 503)

    async def model_ready(self, request: Request) -> Response:
        try:
            _check_named(request, self._app.model)
        except BadRequest as error:
            return problem(error.status, error.message)
        name, ready = name_of(self._app.model.scorer), self._app.is_ready
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request) -> Response:
        model = self._app.model
        try:
            _check_named(request, model)
        except BadRequest as error:
            return problem(error.status, error.message)
        scorer = model.scorer
        outputs = [{"name": name, "datatype": "FP32", "shape": [-1]} for name in score_columns(scorer.tasks)]
        about = {"name": name_of(scorer), "versions": [scorer.version], "platform": SERVER}
        return JSONResponse({**about, "inputs": described(scorer.columns), "outputs": outputs})

    async def infer(self, request: Request) -> Response:
        asked: list[Inference] = []

        def read(model: ServedModel, body: bytes) -> Asked:
            _check_named(request, model)
            kind = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
            if kind != JSON_TYPE:
                raise BadRequest(415, f"Content-Type {kind!r} is not read by /infer: send {JSON_TYPE}")
            inference, rows = read_tensors(body, model.reader)
            names = score_columns(model.scorer.tasks)
            if unknown := [each.name for each in inference.outputs or [] if each.name not in names]:
                hint = did_you_mean(unknown[0], names)
                raise BadRequest(422, f"there is no output {unknown[0]!r}{hint}; there are {', '.join(names)}")
            asked.append(inference)
            return rows

        def answer(model: ServedModel, scored: Scores) -> Response:
            return _answer(model.scorer, scored, asked[0])

        return await self._app.answered(request, read, answer)


def name_of(scorer: Scorer) -> str:
    """Return the name of the run that the artifact was made from."""
    manifest: Any = getattr(scorer, "manifest", None)
    return str(manifest.lineage.get("name") or "model") if manifest is not None else "model"


def _check_named(request: Request, model: ServedModel) -> None:
    """Raise BadRequest if the path names another model or version, or a model without scores."""
    name, version = name_of(model.scorer), request.path_params.get("version", model.scorer.version)
    if (asked := request.path_params["model"]) != name:
        raise BadRequest(404, f"there is no model {asked[:100]!r}: this server has {name!r}")
    if version != model.scorer.version:
        raise BadRequest(404, f"version {model.scorer.version} of {name!r} is served, not {version[:100]}")
    if model.retrieves:
        raise BadRequest(404, f"{name!r} finds items and has no scores: send requests to {model.path}")


def _answer(scorer: Scorer, scored: Scores, asked: Inference) -> Response:
    """Return the output tensors. A tensor has no value for a row without a score, so there must be none."""
    if scored.refused:
        first = scored.refused[0]
        return problem(422, f"{len(scored.refused)} rows cannot be scored; row {first.row}: {first.reason}")
    names = score_columns(scorer.tasks)
    scores = scored.scores.reshape(len(scored.scores), len(names))
    wanted = [each.name for each in asked.outputs or []] or names
    outputs = [
        {"name": name, "shape": [len(scores)], "datatype": "FP32", "data": scores[:, names.index(name)].tolist()}
        for name in wanted
    ]
    about = {"model_name": name_of(scorer), "model_version": scored.version}
    about |= {} if asked.id is None else {"id": asked.id}
    return Response(msgspec.json.encode({**about, "outputs": outputs}), media_type=JSON_TYPE)
