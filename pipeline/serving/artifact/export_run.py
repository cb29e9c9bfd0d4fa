"""Turn a checkpoint into an artifact that scores raw rows:  python -m pipeline.export run=runs/quickstart precision=int8

Tables in fp32, fp16, int8, int4 or int2, one by one too (tables.cat_3=fp16), or precision=auto for the smallest mix within
ne_budget; rows left out by pruning.kind=untrained or frequency; layers in fp32, bf16 or int8 (dense=bf16), and compiled
ahead of time (compiled=true). What it costs in quality is measured and stands in the artifact; past parity.max_ne_increase
and the like nothing is written.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs import ExportJob
from pipeline.config.registry import find
from pipeline.runtime.errors import ServingError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.garbage import none_while_importing
from pipeline.runtime.storage import storage
from pipeline.training.run_state import config_of, folder_of

if TYPE_CHECKING:
    from pipeline.serving.artifact.make_artifact import Source
    from pipeline.serving.artifact.manifest import Manifest
    from pipeline.serving.artifact.trained_model import TrainedModel

logger = get_logger("pipeline.export")


@dataclass
class ExportSummary:
    """`parity` is what the artifact's certificate says, by split: scores, NE and AUC beside the trained model's."""

    run: str
    step: int
    artifact: str
    version: str
    certificate: dict[str, Any]
    sizes: dict[str, Any]
    already_exported: bool = False
    seconds: float = 0.0
    parity: dict[str, dict[str, float]] = field(default_factory=dict)


def export(job: ExportJob) -> ExportSummary:
    """Write the artifact, or find that it is there already.

    Raises:
        ServingError: the run, step or data set is not there, or damaged; another artifact has the output's place; or the
            artifact's scores lie further from the model's than job.parity allows, with the numbers.
    """
    with none_while_importing():  # here, for a typo in the command line must fail before torch is loaded
        from pipeline.serving.artifact.make_artifact import make_artifact
        from pipeline.serving.artifact.package import artifact_folder

    started = time.monotonic()
    source = _open_source(job)
    output = job.output or default_output(job, source.step)
    if storage.exists(output):
        return _already_there(job, source, output)
    logger.info("step %d of %s: %s", source.step, job.run, _describe_tables(source.trained))
    with artifact_folder(output) as at:
        manifest = make_artifact(job, source, at)
        at.commit(manifest.to_text())
    return _summary(job, source.step, output, manifest, time.monotonic() - started)


def default_output(job: ExportJob, step: int) -> str:
    """<run>/artifacts/step_00000300.int8, or below paths.artifacts, with a hash of what else was asked for, where anything was."""
    from pipeline.serving.artifact.make_artifact import settings_of

    asked, usual = settings_of(job), settings_of(ExportJob(run=job.run, precision=job.precision))
    digest = "" if asked == usual else f".{_hash(asked)[:8]}"
    run = job.run.rstrip("/")
    folder = (
        f"{job.paths.artifacts.rstrip('/')}/{run.rpartition('/')[2]}" if job.paths.artifacts else f"{run}/artifacts"
    )
    return f"{folder}/step_{step:08d}.{job.precision}{digest}"


def _hash(content: Any) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _open_source(job: ExportJob) -> Source:
    from pipeline.checkpoint.survey import open_step
    from pipeline.checkpoint.vocabularies import trained_dataset
    from pipeline.models.build import build_model
    from pipeline.planner.resolved_job import resolve_job
    from pipeline.serving.artifact.make_artifact import Source
    from pipeline.serving.artifact.trained_model import load_trained

    trained_job = config_of(job.run)
    if trained_job is None:
        raise ServingError(f"{job.run} is no run folder: it has no config.yaml; run=<the run_dir of a training>")
    task = find("task", trained_job.model.task)
    if task.no_export:
        raise ServingError(f"model={trained_job.model.kind} cannot be exported: {task.no_export}")
    step, manifest, tensors = open_step(folder_of(job.run), job.step)
    dataset, where = trained_dataset(manifest, job.data_path or trained_job.data.path)
    if dataset is None:
        raise ServingError(
            f"{where}: the artifact needs its vocabularies and validation rows; set data_path=<its folder>"
        )
    resolved = resolve_job(trained_job, dataset, world_size=1)
    tables = resolved.tables
    known = {name for part in resolved.plain_tables for name in (part.name, part.config_name)}
    if unknown := [name for name in job.tables if name not in known]:
        from pipeline.runtime.errors import did_you_mean

        near = did_you_mean(unknown[0], sorted(known))
        raise ServingError(f"tables.{unknown[0]}: the run has no such table among {len(tables)}{near}")
    model = build_model(trained_job.model, tables, len(dataset.dense_features), seed=trained_job.trainer.seed)
    is_bf16 = trained_job.trainer.precision == "bf16"
    trained = load_trained(model, tables, dataset.sparse_feature_names, tensors, len(dataset.dense_features), is_bf16)
    return Source(trained_job, step, manifest, trained, dataset, where)


def _already_there(job: ExportJob, source: Source, output: str) -> ExportSummary:
    """Raises ServingError where what is there is something else."""
    from pipeline.serving.artifact.make_artifact import lineage_of, settings_of
    from pipeline.serving.artifact.manifest import read_manifest

    way_out = f"choose another output=<folder>, or remove {output}"
    try:
        manifest = read_manifest(output)
    except UserError as error:
        raise ServingError(f"{output} is there already, and is no artifact ({error}): {way_out}") from None
    wanted = {**lineage_of(job, source), "exported_at": manifest.lineage["exported_at"], "run": manifest.lineage["run"]}
    if manifest.lineage != wanted or manifest.settings != json.loads(json.dumps(settings_of(job))):
        raise ServingError(f"{output} is there already, of another step, run or setting: {way_out}")
    return _summary(job, source.step, output, manifest, 0.0, already_exported=True)


def _summary(
    job: ExportJob, step: int, output: str, manifest: Manifest, seconds: float, already_exported: bool = False
) -> ExportSummary:
    return ExportSummary(
        job.run, step, output, manifest.version, manifest.certificate, manifest.sizes, already_exported, seconds,
        manifest.certificate["splits"],
    )  # fmt: skip


def _describe_tables(trained: TrainedModel) -> str:
    rows = sum(stored.rows for stored in trained.stored)
    return f"{len(trained.tables)} tables with {rows:,} rows, {_size(trained.table_bytes)}"


def _size(size_bytes: int) -> str:
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= length:
            return f"{size_bytes / length:.1f} {unit}"
    return f"{size_bytes} B"


def describe(summary: ExportSummary) -> str:
    sizes, certificate = summary.sizes, summary.certificate
    ratio = sizes["tables_before"] / max(sizes["tables_after"], 1)
    lines = [f"step {summary.step} of {summary.run} as an artifact, version {summary.version}"]
    lines.append(
        f"  {'precision':<11}{'tables':>12}{'NE':>12}{'AUC':>12}{'score, most':>13}{'mean':>11}   on validation"
    )
    for name, one in certificate["precisions"].items():
        lines.append(
            f"  {name:<11}{_size(one['table_bytes']):>12}{one['ne_delta']:>+12.6f}{one['auc_delta']:>+12.6f}"
            f"{one['max_score_difference']:>13.2g}{one['mean_score_difference']:>11.2g}"
        )
    for split, one in certificate["splits"].items():
        lines.append(
            f"{split:<12}NE {one['ne']:.5f} ({one['ne_delta']:+.6f}), AUC {one['auc']:.5f} ({one['auc_delta']:+.6f}), "
            f"scores within {one['max_score_difference']:.2g} of the model's"
        )
    lines.append(
        f"tables      {_size(sizes['tables_before'])} -> {_size(sizes['tables_after'])} ({ratio:.1f}x smaller); layers "
        f"{_size(sizes['layers_before'])} -> {_size(sizes['layers_after'])}, vocabularies {_size(sizes['vocabularies'])}"
    )
    if summary.already_exported:
        lines.append(f"already exported to {summary.artifact}: nothing to do")
    else:
        lines.append(f"written to  {summary.artifact} ({_size(sizes['artifact'])}) in {summary.seconds:.1f} s")
    lines.append(f"next        python -m pipeline.serve artifact={summary.artifact}")
    return "\n".join(lines)
