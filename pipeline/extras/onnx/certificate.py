"""Write the layers of an artifact as ONNX, and compare onnxruntime's scores with the artifact's.

An ONNX file whose scores differ by more than MAX_DIFFERENCE is refused. The comparison uses the rows
of `parity`, and scores before a calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.extras.onnx.program import OnnxProgram, import_libraries, onnx_bytes
from pipeline.runtime.byte_counts import show_size
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.plan import ExportPlan, PlannedProgram
from pipeline.serving.artifact.reference import Sample, Scores
from pipeline.serving.artifact.task_quality import compare, qualities
from pipeline.serving.artifact.writer import ArtifactWriter
from pipeline.serving.scoring.artifact_files import load_parts

MAX_DIFFERENCE = 1e-4  # of the score of a row, or of a number of its vector
MAX_LAYER_BYTES = 2_000_000_000  # a protobuf message has at most 2 GiB
logger = get_logger("pipeline.export")


def onnx_addition() -> Callable[..., dict[str, Any]]:
    """Return the function that adds ONNX to an artifact. Raises ServingError if a library is not installed."""
    import_libraries()
    return _add_onnx


def _add_onnx(
    job: ExportJob,
    plan: ExportPlan,
    samples: Mapping[str, Sample],
    outputs: Mapping[str, Scores],
    writer: ArtifactWriter,
) -> dict[str, Any]:
    """Write dense.onnx. Return the entry `onnx` of the certificate. `outputs`: the artifact's outputs
    [rows, columns] for each split's sample.

    Raises ServingError: the layers cannot be converted, or a score differs too much.
    """
    dims = dict(zip(plan.step.keys, plan.step.model_dims, strict=True))
    (program,) = (_write(plan, each, dims, writer) for each in plan.programs)
    lookup, _ = load_parts(writer.path, writer.manifest(plan))
    splits = {}
    for split, sample in samples.items():
        found = sample.outputs(program, lambda batch: lookup.pooled(*batch.ids))
        scores = sample.scores(outputs[split])
        parity = compare(scores, sample.scores(found), sample.labels, qualities(sample.labels, scores))
        names = ("rows", "max_score_difference", "mean_score_difference")
        splits[split] = {name: getattr(parity, name) for name in names}
    return _certified(splits, "max_score_difference")


def add_onnx_towers(
    plan: ExportPlan, features: Mapping[str, list[str]], writer: ArtifactWriter
) -> dict[str, OnnxProgram]:
    """Write dense.onnx and item.onnx of a two-tower. Return the program of each tower. features:
    tower -> its features."""
    import_libraries()
    dims = dict(zip(plan.step.keys, plan.step.model_dims, strict=True))
    return {
        tower: _write(plan, each, {name: dims[name] for name in names}, writer)
        for (tower, names), each in zip(features.items(), plan.programs, strict=True)
    }


def certify_towers(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry `onnx` of a two-tower's certificate. found: split -> the comparison of the
    vectors with those of the artifact. Raises ServingError if a vector differs too much."""
    names = ("rows", "max_vector_difference")
    return _certified({split: {name: each[name] for name in names} for split, each in found.items()}, names[1])


def _write(plan: ExportPlan, each: PlannedProgram, dims: Mapping[str, int], writer: ArtifactWriter) -> OnnxProgram:
    if plan.step.layer_bytes > MAX_LAYER_BYTES:
        raise ServingError(
            f"onnx=true: the layers have {show_size(plan.step.layer_bytes)}, and an ONNX file has at most "
            f"{show_size(MAX_LAYER_BYTES)}: leave out onnx=true"
        )
    content = onnx_bytes(each.layers, each.num_dense, dims, each.width)
    writer.add_bytes(each.file.replace(".pt2", ".onnx"), content)
    return OnnxProgram(content, each.num_dense, dims)


def _certified(splits: dict[str, dict[str, Any]], number: str) -> dict[str, Any]:
    for split, each in splits.items():
        logger.info("onnx       %s: differs from the artifact by %.2g at most", split, each[number])
        if not each[number] <= MAX_DIFFERENCE:
            raise ServingError(
                f"nothing is written, because onnxruntime's result differs from the artifact's by {each[number]:.3g} in a row "
                f"of {split}, more than {MAX_DIFFERENCE:g}: leave out onnx=true"
            )
    versions = {name: library.__version__ for name, library in import_libraries().items()}
    return {"onnx": {"splits": splits, "limit": MAX_DIFFERENCE, "versions": versions}}


def describe_onnx(found: dict[str, Any]) -> list[str]:
    """Return the lines that `export` prints for a certificate's entry `onnx`."""
    splits = found["splits"].values()
    most = max(each[name] for each in splits for name in each if name.startswith("max_"))
    rows = sum(each["rows"] for each in splits)
    return [
        f"onnx        onnxruntime {found['versions']['onnxruntime']} is within {most:.2g} of the artifact on {rows:,} rows"
    ]
