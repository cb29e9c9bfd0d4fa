"""Record which settings decide the rows of each step, and check a job against the run in its folder
(without torch)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pipeline.checkpoint.steps import list_steps, read_manifest, step_path
from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import CheckpointConfig
from pipeline.data.dataset import Dataset
from pipeline.runtime.errors import DamagedError, TrainingError
from pipeline.runtime.storage import storage


def checkpoint_folder(run_dir: str, config: CheckpointConfig) -> str:
    return config.folder or f"{run_dir}/checkpoints"


def describe_data_order(job: TrainJob, dataset_fingerprint: str) -> dict[str, Any]:
    """Return every setting that decides which rows a step trains on.

    A resumed run must not change them.
    """
    return {
        "dataset": dataset_fingerprint,
        "trainer.seed": job.trainer.seed,
        "trainer.global_batch_size": job.trainer.global_batch_size,
        "trainer.gradient_accumulation_steps": job.trainer.gradient_accumulation_steps,
        "data.reader.num_streams": job.data.reader.num_streams,
        "data.reader.shuffle": job.data.reader.shuffle,
        **({"trainer.overfit_batches": job.trainer.overfit_batches} if job.trainer.overfit_batches else {}),
    }


def check_data_order(run_dir: str, data_order: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Raise TrainingError if this job would read other rows after the manifest's step than the run
    would have read."""
    for key in dict.fromkeys([*data_order, *manifest["data_order"]]):
        now, then = data_order.get(key), manifest["data_order"].get(key)
        if then != now:
            raise TrainingError(
                f"{run_dir} was trained to step {manifest['step']} with {key}={then}, this job has {now}: step "
                f"{manifest['step']} would not be followed by the rows that come next; keep the value, or choose "
                "another run_dir"
            )


def check_run_folder(job: TrainJob, dataset: Dataset) -> None:
    """Check the data order against the newest step in a local run folder, before torch is imported.

    Local.
    """
    folder = checkpoint_folder(job.run_dir, job.checkpoint)
    if not job.checkpoint.resume or not storage.is_local(folder):
        return
    if steps := list_steps(folder):
        with suppress(DamagedError):  # the training falls back to the step before
            manifest = read_manifest(step_path(folder, steps[-1]))
            check_data_order(job.run_dir, describe_data_order(job, dataset.fingerprint()), manifest)
