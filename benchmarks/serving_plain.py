"""Serve the model of benchmarks/serving.py as one would by hand:  python -m benchmarks.serving_plain ROWS

torch.jit's trace of the fp32 layers over nn.EmbeddingBag, in an app of Starlette on uvicorn and uvloop with httptools: json, a
dictionary a feature, and each request scored by itself as soon as it is read. No artifact, no checks, no limits, no counters.
"""

from __future__ import annotations

import json
import socket
import sys

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from torch import nn

from benchmarks.serving_artifacts import DENSE, SPARSE, DictEncoder, Shape, layers_of, rows_of_table
from pipeline.serving.artifact.dense_export import Layers, with_gathered_pairs
from pipeline.serving.scoring.scorer import ColumnLists


class PlainModel(nn.Module):
    """(dense [batch, 13], ids [26, batch]) -> probabilities [batch]"""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        tables = [rows_of_table(shape, number) for number in range(len(SPARSE))]
        self.tables = nn.ModuleList(nn.EmbeddingBag.from_pretrained(rows, mode="sum") for rows in tables)
        self.layers = Layers(with_gathered_pairs(layers_of(shape)))  # the trainer's kernels cannot be traced

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pooled = [table(ids[number].unsqueeze(1)) for number, table in enumerate(self.tables)]
        return torch.sigmoid(self.layers(dense, torch.cat(pooled, dim=1)))


def traced(shape: Shape) -> torch.jit.ScriptModule:
    model, example = PlainModel(shape).eval(), (torch.zeros(16, len(DENSE)), torch.zeros(len(SPARSE), 16).long())
    with torch.no_grad():
        return torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(model, example)))


def app_of(shape: Shape) -> Starlette:
    model, encoder, names = traced(shape), DictEncoder(shape), [*DENSE, *SPARSE]

    async def score(request: Request) -> JSONResponse:
        rows = json.loads(await request.body())["rows"]
        columns = [[row.get(name) for row in rows] for name in DENSE]
        columns += [[str(row.get(name)) for row in rows] for name in SPARSE]
        encoded = encoder.encode(ColumnLists(None, columns, len(rows)))
        with torch.inference_mode():
            scores = model(encoded.dense, encoded.values.view(len(SPARSE), -1))
        return JSONResponse({"scores": scores.tolist()})

    async def metrics(request: Request) -> PlainTextResponse:
        return PlainTextResponse("")

    assert len(names) == len(set(names))
    return Starlette(routes=[Route("/score", score, methods=["POST"]), Route("/metrics", metrics)])


def main() -> None:
    if len(sys.argv) != 2:
        print(__doc__)
        return
    torch.set_num_threads(1)
    app = app_of(Shape(int(sys.argv[1])))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"serving on http://127.0.0.1:{listener.getsockname()[1]}, by torch.jit", flush=True)
        config = uvicorn.Config(app, http="httptools", loop="uvloop", log_config=None, access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
