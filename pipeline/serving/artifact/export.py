"""Export a checkpoint as an artifact that scores raw rows:  python -m pipeline export run=runs/quickstart precision=int8

step -> reference scores -> plan -> write -> certify -> commit -> summarize. This file is the whole path; each step is
one call away. The certificate states how much quality the artifact loses. If it loses more than job.parity allows,
nothing is written.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.registry import from_extra
from pipeline.runtime.byte_counts import show_size
from pipeline.runtime.errors import ServingError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.garbage import none_while_importing
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.signature import requiring, signing
from pipeline.serving.artifact.summary import ExportSummary

if TYPE_CHECKING:
    from pipeline.serving.artifact.manifest import Manifest
    from pipeline.serving.artifact.trained_step import TrainedStep
    from pipeline.serving.artifact.writer import ArtifactWriter

logger = get_logger("pipeline.export")


def export(job: ExportJob) -> ExportSummary:
    """Write the artifact, or find that it is there already.

    Raises:
        ServingError: the run, step or data set is missing or damaged; something else is at the output; or the
            artifact's scores are further from the model's than job.parity allows, with the numbers.
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
    write = from_extra("export_towers", f"model={step.job.model.kind}") if step.has_towers else write_scorer
    try:
        # Tables are read while they are written, so the signature is required here too.
        with new_artifact(output) as writer, requiring(job.require_signature), signing(job.sign_key):
            manifest = write(job, step, writer)
            writer.commit(manifest)
    except FileExistsError:  # another export has made it in the meantime, maybe the same
        return _already_there(job, step, output)
    return _summary(job, step, output, manifest, time.monotonic() - started)


def write_scorer(job: ExportJob, step: TrainedStep, writer: ArtifactWriter) -> Manifest:
    """Write the files of an artifact that scores rows, and certify them.

    Raises:
        ServingError: the artifact exceeds a limit of job.parity.
    """
    from pipeline.serving.artifact.certificate import certify
    from pipeline.serving.artifact.plan import choose_precisions, plan_export
    from pipeline.serving.artifact.reference import make_reference, read_samples

    reference = make_reference(step, read_samples(job, step), writer.scratch)
    plan = plan_export(job, step, choose_precisions(job, reference))
    draft = writer.write(plan)
    return certify(job, reference, plan, draft, writer.path)


def _already_there(job: ExportJob, step: TrainedStep, output: str) -> ExportSummary:
    """Return the summary of an equal export. Raises ServingError if something else is at the output."""
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
    return _summary(job, step, output, manifest, already_exported=True)


def _summary(
    job: ExportJob,
    step: TrainedStep,
    output: str,
    manifest: Manifest,
    seconds: float = 0.0,
    already_exported: bool = False,
) -> ExportSummary:
    return ExportSummary(
        run=job.run,
        step=step.step,
        artifact=output,
        version=manifest.version,
        certificate=manifest.certificate,
        sizes=manifest.sizes,
        already_exported=already_exported,
        seconds=seconds,
        best_by=step.best_by,
    )
