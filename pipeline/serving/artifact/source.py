"""Open the training step that is exported, and name what an export of it depends on."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline import __version__
from pipeline.checkpoint.chains import open_step
from pipeline.checkpoint.steps import read_step_file, step_path
from pipeline.checkpoint.vocabularies import trained_dataset
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import find
from pipeline.config.serving import RetrievalConfig
from pipeline.data.dataset import Dataset
from pipeline.data.read.endless import FILE, Values, from_bytes
from pipeline.models.build import build_model
from pipeline.runtime.errors import ServingError, did_you_mean
from pipeline.serving.artifact.trained_model import TrainedModel, load_trained
from pipeline.training.preflight import resolve_alone
from pipeline.training.run_state import as_signed, chosen_step, config_of, folder_of

# What of a job does not change the artifact's bytes.
NO_SETTINGS = ("plugins", "run", "step", "which", "output", "data_path", "paths", "require_signature")


@dataclass(frozen=True)
class Source:
    """The step that is exported, and the data set that it was trained on.

    new_values: by vocabulary, those of a stream that the data set lacks; their ids follow on the vocabulary's.
    `best_by`: the metric by which the step is the best of the run; empty where it was not chosen so.
    """

    job: TrainJob
    step: int
    manifest: dict[str, Any]
    trained: TrainedModel
    dataset: Dataset
    data_path: str
    best_by: str = ""
    new_values: Values = field(default_factory=dict)

    @property
    def has_towers(self) -> bool:
        """Whether its model gives vectors of users and of items, in the place of logits."""
        return getattr(find("task", self.job.model.task), "exports", "logits") == "towers"


def open_source(job: ExportJob) -> Source:
    """Raises ServingError where the run, the step, the data set or a table that job.tables names is not there."""
    trained_job = config_of(job.run)
    if trained_job is None:
        raise ServingError(f"{job.run} is no run folder: it has no config.yaml; run=<the run_dir of a training>")
    chosen = chosen_step(job.run, trained_job, job.step, job.which)
    trained_job = as_signed(job.run, trained_job, chosen)
    task = find("task", trained_job.model.task)
    if task.no_export:
        raise ServingError(f"model={trained_job.model.kind} cannot be exported: {task.no_export}")
    step, manifest, tensors = open_step(folder_of(job.run), chosen)
    dataset, where = trained_dataset(manifest, job.data_path or trained_job.data.path)
    if dataset is None:
        raise ServingError(
            f"{where}: the artifact needs its vocabularies and validation rows; set data_path=<its folder>"
        )
    resolved = resolve_alone(trained_job, dataset)
    tables = resolved.tables
    known = {name for part in resolved.plain_tables for name in (part.name, part.config_name)}
    if unknown := [name for name in job.tables if name not in known]:
        near = did_you_mean(unknown[0], sorted(known))
        raise ServingError(f"tables.{unknown[0]}: the run has no such table among {len(tables)}{near}")
    num_dense = len(dataset.dense_features)
    model = build_model(trained_job.model, tables, num_dense, seed=trained_job.trainer.seed, targets=resolved.targets)
    is_bf16 = trained_job.trainer.precision == "bf16"
    trained = load_trained(model, tables, dataset.sparse_feature_names, tensors, num_dense, is_bf16)
    trained = replace(trained, targets=resolved.targets)
    best_by = trained_job.best_metric if job.step is None and chosen is not None else ""
    content = read_step_file(step_path(folder_of(job.run), step), FILE)
    new_values = {} if content is None else from_bytes(content).values
    return Source(trained_job, step, manifest, trained, dataset, where, best_by, new_values)


def settings_of(job: ExportJob) -> dict[str, Any]:
    """What of a job decides on the artifact's bytes."""
    settings = {key: value for key, value in asdict(job).items() if key not in (*NO_SETTINGS, "sign_key")}
    if job.retrieval == RetrievalConfig():  # as artifacts of earlier releases have their settings
        del settings["retrieval"]
    return settings | ({"signed": True} if job.sign_key is not None else {})


def lineage_of(job: ExportJob, source: Source) -> dict[str, Any]:
    hashes = source.manifest.get("hashes", {})
    return {
        "run": job.run,
        "name": source.job.name,
        "step": source.step,
        "config_sha256": hashes.get("config", ""),
        "schema_sha256": hashes.get("schema", ""),
        "dataset": source.dataset.name,
        "dataset_sha256": source.dataset.fingerprint(),
        "code_version": __version__,
        "exported_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def default_output(job: ExportJob, step: int) -> str:
    """<run>/artifacts/step_00000300.int8, or below paths.artifacts, with a hash of what else was asked for, where anything was."""
    asked, usual = settings_of(job), settings_of(ExportJob(run=job.run, precision=job.precision))
    digest = "" if asked == usual else f".{_hash(asked)[:8]}"
    run = job.run.rstrip("/")
    folder = (
        f"{job.paths.artifacts.rstrip('/')}/{run.rpartition('/')[2]}" if job.paths.artifacts else f"{run}/artifacts"
    )
    return f"{folder}/step_{step:08d}.{job.precision}{digest}"


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
