"""Decide what an export writes before it writes any file. The plan is a frozen record that the writer follows."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from pipeline import __version__
from pipeline.checkpoint.tables import StoredTable
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.registry import from_extra
from pipeline.config.serving import AUTO, PRECISIONS, CalibrationConfig, CardConfig, RetrievalConfig
from pipeline.data.raw.source import find_sources
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import DataError, ServingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.serving.artifact.manifest import DENSE_FILE, RetrievalParts
from pipeline.serving.artifact.prune import prune_tables
from pipeline.serving.artifact.quantize import KeptRows, nearest, row_bytes
from pipeline.serving.artifact.raw_schema import RawSchema, lookups_of, schema_of
from pipeline.serving.artifact.task_quality import ServedTask, width_of
from pipeline.serving.artifact.trained_step import TrainedStep

if TYPE_CHECKING:
    from pipeline.serving.artifact.reference import Reference

logger = get_logger(__name__)
MAX_NAMED = 8  # tables in a log line
# Settings of an ExportJob that do not change the artifact's bytes.
NO_SETTINGS = ("plugins", "run", "step", "which", "output", "data_path", "paths", "require_signature", "sign_key")


@dataclass(frozen=True)
class PlannedTable:
    """A table of the step, and the rows that the artifact stores. kept: the rows; None means all rows."""

    table: Table
    stored: StoredTable
    precision: str
    kept: KeptRows | None


@dataclass(frozen=True)
class PlannedProgram:
    """Layers that become a program of torch.export, which maps (dense, pooled) to [batch] or [batch, width]."""

    file: str
    layers: nn.Module
    num_dense: int
    pooled_dim: int
    width: int | None


@dataclass(frozen=True)
class ExportPlan:
    """A planned artifact: everything that its files depend on, and the values of its manifest.

    dense: precision of the layers. compiled: write an AOTInductor package too. lookups: feature ->
    how often its ids are looked up (raw_schema.lookups_of). retrieval: the parts that only the
    artifact of a two-tower has.
    """

    step: TrainedStep
    tables: tuple[PlannedTable, ...]
    programs: tuple[PlannedProgram, ...]
    dense: str
    compiled: bool
    schema: RawSchema
    lookups: dict[str, dict[str, Any]]
    lineage: dict[str, Any]
    settings: dict[str, Any]
    tasks: list[ServedTask] = field(default_factory=list)
    retrieval: RetrievalParts | None = None

    @property
    def kept(self) -> list[KeptRows | None]:
        """Return the rows that each table keeps. None means all rows."""
        return [each.kept for each in self.tables]

    @cached_property
    def kept_of(self) -> dict[str, KeptRows]:
        """Return feature -> the rows that its table keeps, for pruned tables that only this feature looks up."""
        return {
            each.table.feature_names[0]: each.kept
            for each in self.tables
            if each.kept is not None and len(each.table.feature_names) == 1
        }


def plan_export(job: ExportJob, step: TrainedStep, precisions: Sequence[str]) -> ExportPlan:
    """Plan an artifact that scores rows. precisions: the precision of each table of the step.

    Raises ServingError if pruning needs optimizer state that the step does not have.
    """
    kept = prune_tables(step, job.pruning)
    columns, multi_hot = step.job.data.columns, step.job.data.synthetic_multi_hot
    layers = PlannedProgram(DENSE_FILE, step.model, step.num_dense, sum(step.model_dims), width_of(step.tasks))
    return ExportPlan(
        step=step,
        tables=tuple(PlannedTable(*each) for each in zip(step.tables, step.stored, precisions, kept, strict=True)),
        programs=(layers,),
        dense=job.dense,
        compiled=job.compiled,
        schema=schema_of(step.dataset, step.keys, columns, multi_hot, step.new_values),
        lookups=lookups_of(step.dataset, step.data_path, multi_hot),
        lineage=lineage_of(job, step),
        settings=settings_of(job),
        tasks=step.tasks,
    )


def choose_precisions(job: ExportJob, reference: Reference) -> list[str]:
    """Return the precision of each table: the one in job.tables for the table's name, otherwise
    job.precision.

    Raises ServingError if a table cannot have rows of this precision.
    """
    if job.precision != AUTO:
        return given_precisions(job, reference.trained)
    find_mix = from_extra("find_mix", "precision=auto")
    return _logged(find_mix(reference, _fixed(reference.trained, job.tables), job.ne_budget, job.parity))


def given_precisions(job: ExportJob, trained: TrainedStep) -> list[str]:
    """Return the precisions in the same way as choose_precisions, if job.precision is not auto."""
    precision, fixed = job.precision, _fixed(trained, job.tables)
    found = [fixed.get(table.name) or nearest(table.embedding_dim, precision) for table in trained.tables]
    names = [table.name for table in trained.tables]
    missed = [name for name, has in zip(names, found, strict=True) if has != precision and name not in fixed]
    if missed:
        named = ", ".join(missed[:MAX_NAMED]) + (", ..." if len(missed) > MAX_NAMED else "")
        logger.info(
            "%d table(s) have no %s rows of their width and get the next larger: %s", len(missed), precision, named
        )
    return _logged(found)


def _fixed(trained: TrainedStep, tables: dict[str, str]) -> dict[str, str]:
    """Return table -> the precision that is set for its name. Raises ServingError if a table cannot have it."""
    fixed = {}
    for table in trained.tables:
        asked = tables.get(table.name) or tables.get(table.config_name)
        if asked is not None:
            row_bytes(table.embedding_dim, asked)
            fixed[table.name] = asked
    return fixed


def _logged(found: list[str]) -> list[str]:
    counts = {name: found.count(name) for name in PRECISIONS if name in found}
    logger.info("precision  %s", ", ".join(f"{count} table(s) {name}" for name, count in counts.items()))
    return found


def settings_of(job: ExportJob) -> dict[str, Any]:
    """Return the settings that the artifact's bytes depend on."""
    settings = {key: value for key, value in asdict(job).items() if key not in NO_SETTINGS}
    usual_settings = {
        "retrieval": RetrievalConfig(), "calibration": CalibrationConfig(), "onnx": False, "card": CardConfig(),
        "feature_tables": {},
    }  # fmt: skip
    for name, usual in usual_settings.items():
        if getattr(job, name) == usual:  # earlier releases had no such settings
            del settings[name]
    if job.feature_tables:  # another table at the same path gives other scores
        settings["feature_tables"] = {
            name: [storage.sha256_of(file) for file in feature_files(name, path)]
            for name, path in job.feature_tables.items()
        }
    return settings | ({"signed": True} if job.sign_key is not None else {})


def feature_files(name: str, path: str) -> list[str]:
    """Return the files of feature_tables.<name>. Raises ServingError if there are none."""
    try:
        return [source.path for source in find_sources(path)]
    except DataError as error:
        raise ServingError(str(error).replace("source=", f"feature_tables.{name}=", 1)) from None


def lineage_of(job: ExportJob, step: TrainedStep) -> dict[str, Any]:
    """Return the run, step, data set and code that the artifact is made from."""
    hashes = step.manifest.get("hashes", {})
    return {
        "run": job.run,
        "name": step.job.name,
        "step": step.step,
        "config_sha256": hashes.get("config", ""),
        "schema_sha256": hashes.get("schema", ""),
        "dataset": step.dataset.name,
        "dataset_sha256": step.dataset.fingerprint(),
        "code_version": __version__,
        "exported_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def default_output(job: ExportJob, step: int) -> str:
    """Return <run>/artifacts/step_00000300.int8, or the same in paths.artifacts.

    Settings other than the defaults add their hash.
    """
    settings, usual = settings_of(job), settings_of(ExportJob(run=job.run, precision=job.precision))
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    suffix = "" if settings == usual else f".{digest[:8]}"
    run, artifacts = job.run.rstrip("/"), job.paths.artifacts
    folder = f"{artifacts.rstrip('/')}/{run.rpartition('/')[2]}" if artifacts else f"{run}/artifacts"
    return f"{folder}/step_{step:08d}.{job.precision}{suffix}"
