"""Convert layers to ONNX by torch.onnx, and run them by onnxruntime.

Inputs: `dense` [batch, num_dense] if there are dense features, then the pooled row of each feature
[batch, width], under the feature's name. Output: `outputs`, [batch] or [batch, width], as of
dense.pt2. All are float32, for any number of rows.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.dense_export import EXAMPLE_ROWS, MAX_BATCH, copied_layers

DENSE, OUTPUT = "dense", "outputs"
LIBRARIES = ("onnx", "onnxruntime", "onnxscript")


def import_libraries() -> dict[str, ModuleType]:
    """Import what torch.onnx and the check need. Raises ServingError if a library is not installed."""
    try:
        return {name: importlib.import_module(name) for name in LIBRARIES}
    except ImportError as error:
        raise ServingError(
            f"onnx=true needs {', '.join(LIBRARIES)} ({error}): pip install 'torchrec-pipeline[onnx]', or leave it out"
        ) from error


class LayersByFeature(nn.Module):
    """Takes a tensor for each feature, instead of one tensor with the pooled rows of all features."""

    def __init__(self, layers: nn.Module, num_dense: int) -> None:
        super().__init__()
        self.layers, self._num_dense = layers, num_dense

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        none = inputs[0][:, :0]
        dense, rows = (inputs[0], inputs[1:]) if self._num_dense else (none, inputs)
        outputs: torch.Tensor = self.layers(dense, torch.cat(rows, dim=1) if rows else none)
        return outputs


def input_widths(num_dense: int, features: Mapping[str, int]) -> dict[str, int]:
    """Return input -> width, in the order of the program. `features`: feature -> width of its pooled
    row. Raises ServingError if a feature has the name of another input or of the output.
    """
    if taken := [name for name in (DENSE, OUTPUT) if name in features]:
        raise ServingError(
            f"onnx=true names inputs by feature, and {taken[0]!r} is the name of another input or of the output: "
            f"rename the column {taken[0]!r}, or leave out onnx=true"
        )
    return {**({DENSE: num_dense} if num_dense else {}), **features}


def onnx_bytes(layers: nn.Module, num_dense: int, features: Mapping[str, int], width: int | None) -> bytes:
    """Return the content of an ONNX file of the layers. Raises ServingError if torch.onnx cannot
    convert them."""
    widths = input_widths(num_dense, features)
    module = LayersByFeature(copied_layers(layers, "fp32", width), num_dense).eval()
    example = tuple(torch.zeros(EXAMPLE_ROWS, each) for each in widths.values())
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    try:
        with torch.no_grad(), _without_remarks():
            module(*example)  # what a model works out on its first batch is not traced
            program = torch.export.export(module, example, dynamic_shapes=(({0: batch},) * len(example),), strict=False)
            exported = torch.onnx.export(program, dynamo=True, verbose=False, external_data=False)
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
        raise ServingError(
            f"torch.onnx cannot convert these layers ({' '.join(lines)[:300]}): leave out onnx=true; dense.pt2 and "
            "compiled=true have the same scores"
        ) from error
    assert exported is not None
    model = exported.model
    _rename(model.graph, [*widths])
    content: bytes = _without_traces(exported.model_proto).SerializeToString(deterministic=True)
    return content


def _rename(graph: Any, inputs: list[str]) -> None:
    """Name inputs and output. Other values get names that no feature has."""
    wanted, prefix = dict(zip([*graph.inputs, *graph.outputs], [*inputs, OUTPUT], strict=True)), "value"
    while any(name.startswith(prefix) for name in wanted.values()):
        prefix += "_"
    others = [value for node in graph for value in node.outputs if value not in wanted]
    for number, value in enumerate([*graph.initializers.values(), *others]):
        value.name = f"{prefix}{number}"
    for value, name in wanted.items():
        value.name = name


def _without_traces(model: Any) -> Any:
    """Remove names of modules, paths of source files and shapes of values within the graph."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        del part.metadata_props[:]
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Hide what torch.onnx prints and logs about its own progress."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


class OnnxProgram:
    """Runs an ONNX file by onnxruntime on CPUs: (dense, pooled) -> outputs, as dense.pt2."""

    def __init__(self, content: bytes, num_dense: int, features: Mapping[str, int]) -> None:
        self._num_dense, self._features = num_dense, dict(features)
        runtime = import_libraries()["onnxruntime"]
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def __call__(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        parts = dict(zip(self._features, pooled.split([*self._features.values()], dim=1), strict=True))
        given = {**({DENSE: dense} if self._num_dense else {}), **parts}
        found = self._session.run([OUTPUT], {name: part.contiguous().numpy() for name, part in given.items()})
        return torch.from_numpy(found[0])
