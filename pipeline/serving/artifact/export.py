"""Export a checkpoint as an artifact that scores raw rows:  python -m pipeline export run=runs/quickstart precision=int8

step -> reference scores -> plan -> write -> certify -> commit -> summarize. The certificate states
how much quality the artifact loses. If it loses more than job.parity allows, nothing is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.registry import from_extra, if_installed
from pipeline.runtime.byte_counts import show_size
from pipeline.runtime.errors import ServingError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.processes import none_while_importing
from pipeline.runtime.shell_words import word
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.signature import requiring, signing

if TYPE_CHECKING:
    from pipeline.serving.artifact.manifest import Manifest
    from pipeline.serving.artifact.trained_step import TrainedStep
    from pipeline.serving.artifact.writer import ArtifactWriter

logger = get_logger("pipeline.export")


def export(job: ExportJob) -> ExportSummary:
    """Write the artifact, unless it exists already. Raises ServingError: the run, step or data set
    is missing or damaged; the output path is used by something else; or the scores differ more
    from the model's than job.parity allows.
    """
    # Here, so that a typo in the command line fails before torch is imported.
    with none_while_importing():
        from pipeline.serving.artifact.plan import default_output
        from pipeline.serving.artifact.trained_step import open_trained_step
        from pipeline.serving.artifact.writer import new_artifact

    started = time.monotonic()
    with requiring(job.require_signature):
        step = open_trained_step(job)
    output = job.output or default_output(job, step.step)
    if storage.exists(output):
        return _already_there(job, step, output)
    logger.info(
        "step %d of %s: %d tables with %s rows, %s",
        step.step, job.run, len(step.tables), f"{step.num_rows:,}", show_size(step.table_bytes),
    )  # fmt: skip
    if step.has_towers and job.calibration.kind != "none":
        raise ServingError(
            f"calibration.kind={job.calibration.kind} calibrates scores, and the artifact of model={step.job.model.kind} finds "
            "items: leave it out"
        )
    write = from_extra("export_towers", f"model={step.job.model.kind}") if step.has_towers else write_scorer
    try:
        # Tables are read while they are written, so the signature is required here too.
        with new_artifact(output) as writer, requiring(job.require_signature), signing(job.sign_key):
            if job.feature_tables:  # first, so that a table that does not fit fails at once
                from_extra("write_feature_tables", f"feature_tables={sorted(job.feature_tables)}")(job, step, writer)
            manifest = write(job, step, writer)
            if describe_artifact := if_installed("describe_artifact"):
                describe_artifact(job, step, manifest, writer)  # writes files about the artifact
                manifest = replace(manifest, files=writer.files)
            writer.commit(manifest)
    except FileExistsError:  # another export has made it in the meantime, maybe the same
        return _already_there(job, step, output)
    return _summary(job, step, output, manifest, time.monotonic() - started)


def write_scorer(job: ExportJob, step: TrainedStep, writer: ArtifactWriter) -> Manifest:
    """Write the files of an artifact that scores rows, and certify them. Raises ServingError."""
    from pipeline.serving.artifact.certificate import artifact_outputs, certify
    from pipeline.serving.artifact.plan import choose_precisions, plan_export
    from pipeline.serving.artifact.reference import make_reference, read_samples

    kind = job.calibration.kind
    additions: list[Callable[..., dict[str, Any]]] = []
    if kind != "none":
        additions.append(from_extra("calibrate_artifact", f"calibration.kind={kind}"))
    if job.onnx:
        additions.append(from_extra("onnx_addition", "onnx=true")())
    if measure := if_installed("measure_artifact"):
        additions.append(measure)
    reference = make_reference(step, read_samples(job, step), writer.scratch)
    plan = plan_export(job, step, choose_precisions(job, reference))
    draft = writer.write(plan)
    outputs = artifact_outputs(reference, draft, writer.path)
    certificate: dict[str, Any] = {}
    for add in additions:  # each writes files, and returns entries of the certificate
        certificate |= add(job, plan, reference.samples, outputs, writer)
    return certify(job, reference, plan, replace(writer.manifest(plan), certificate=certificate), outputs)


def _already_there(job: ExportJob, step: TrainedStep, output: str) -> ExportSummary:
    """Return the summary of an equal earlier export. Raises ServingError if `output` has something else."""
    from pipeline.serving.artifact.manifest import read_manifest
    from pipeline.serving.artifact.plan import lineage_of, settings_of

    hint = f"choose another output=<folder>, or remove {output}"
    try:
        manifest = read_manifest(output)
    except UserError as error:
        raise ServingError(f"{output} is there already, and is not an artifact ({error}): {hint}") from None
    wanted = {**lineage_of(job, step), "exported_at": manifest.lineage["exported_at"], "run": manifest.lineage["run"]}
    if manifest.lineage != wanted or manifest.settings != json.loads(json.dumps(settings_of(job))):
        raise ServingError(f"{output} is there already, of another step, run or setting: {hint}")
    return _summary(job, step, output, manifest, 0.0)


def _summary(job: ExportJob, step: TrainedStep, output: str, manifest: Manifest, seconds: float) -> ExportSummary:
    """Summarize an export that took `seconds`. 0.0 means that the artifact existed already."""
    about = manifest.version, manifest.certificate, manifest.sizes
    return ExportSummary(job.run, step.step, output, *about, seconds == 0.0, seconds, step.best_by)


LONG_EXPORT_S = 60.0  # after which the output names the setting that makes an export shorter


@dataclass
class ExportSummary:
    """The summary. best_by: the metric, if the step was chosen as the best step of the run; otherwise ""."""

    run: str
    step: int
    artifact: str
    version: str
    certificate: dict[str, Any]
    sizes: dict[str, Any]
    already_exported: bool = False
    seconds: float = 0.0
    best_by: str = ""

    @property
    def parity(self) -> dict[str, dict[str, Any]]:
        """Return split -> comparison of the artifact's scores, NE and AUC with the trained model's."""
        splits: dict[str, dict[str, Any]] = self.certificate["splits"]
        return splits


def describe(summary: ExportSummary) -> str:
    """Return the lines that the export prints."""
    from pipeline.serving.artifact.task_quality import measures

    sizes, certificate = summary.sizes, summary.certificate
    if "index" in certificate:
        return str(from_extra("describe_towers", f"run={summary.run}")(summary))
    ratio = sizes["tables_before"] / max(sizes["tables_after"], 1)
    lines = [title(summary), *_table_of_precisions(certificate["precisions"])]
    for split, parity in _by_label(certificate["splits"]):
        titles = measures(parity["ne"], parity["auc"])
        numbers = "".join(
            f"{title} {parity[key]:.5f} ({parity[f'{key}_delta']:+.6f}), " for key, title in titles.items()
        )
        lines.append(f"{split:<12}{numbers}scores within {parity['max_score_difference']:.2g} of the model's")
    lines.append(
        f"tables      {show_size(sizes['tables_before'])} -> {show_size(sizes['tables_after'])} ({ratio:.1f}x smaller); layers "
        f"{show_size(sizes['layers_before'])} -> {show_size(sizes['layers_after'])}, vocabularies {show_size(sizes['vocabularies'])}"
    )
    if "calibration" in certificate:
        lines += from_extra("describe_calibration", "the artifact's calibration")(certificate["calibration"])
    if "onnx" in certificate:
        lines += from_extra("describe_onnx", "the artifact's dense.onnx")(certificate["onnx"])
    return "\n".join([*lines, *ending(summary)])


def _by_label(splits: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the parity of each split or, if there are several labels, of each label."""
    found = []
    for split, parity in splits.items():
        of_tasks = parity.get("tasks", {})
        found += [(f"{split} {name} ", each) for name, each in of_tasks.items()] or [(split, parity)]
    return found


def _table_of_precisions(costs: dict[str, dict[str, Any]]) -> list[str]:
    """Return one line for each precision with the loss of quality that it causes."""
    from pipeline.serving.artifact.task_quality import measures

    first = next(iter(costs.values()))
    titles = measures(first["ne_delta"], first["auc_delta"])
    heads = "".join(f"{title:>{max(12, len(title) + 2)}}" for title in titles.values())
    lines = [f"  {'precision':<11}{'tables':>12}{heads}{'score, most':>13}{'mean':>11}   on validation"]
    for name, cost in costs.items():
        deltas = "".join(f"{cost[f'{key}_delta']:>+{max(12, len(title) + 2)}.6f}" for key, title in titles.items())
        lines.append(
            f"  {name:<11}{show_size(cost['table_bytes']):>12}{deltas}"
            f"{cost['max_score_difference']:>13.2g}{cost['mean_score_difference']:>11.2g}"
        )
    return lines


def title(summary: ExportSummary) -> str:
    """Return the first line of what export prints."""
    best = f" (best by {summary.best_by})" if summary.best_by else ""
    return f"step {summary.step}{best} of {summary.run} as an artifact, version {summary.version}"


def ending(summary: ExportSummary) -> list[str]:
    """Return the last lines: where the artifact is, and the next command."""
    if summary.already_exported:
        line = f"already exported to {summary.artifact}: nothing to do"
    else:
        line = f"written to  {summary.artifact} ({show_size(summary.sizes['artifact'])}) in {summary.seconds:.1f} s"
    rows = [parity["rows"] for parity in summary.parity.values() if "rows" in parity]
    if summary.seconds > LONG_EXPORT_S and rows:
        line += (
            f", most of it to compare {sum(rows):,} rows with the trained model; parity.max_rows=10000 compares fewer"
        )
    return [line, f"next        python -m pipeline serve {word('artifact', summary.artifact)}"]
