"""Train a run again:  python -m pipeline train from=runs/x run_dir=runs/y data.path=datasets/x

The config is the run's config.yaml. Only the folders to which a training writes are this job's own.
"""

from __future__ import annotations

from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from pipeline.config.jobs.job import PathsConfig
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import missing_plugins
from pipeline.config.saved_jobs import load_saved_job
from pipeline.extras.runs.folder import PLUGINS, open_run
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage import storage

WORLD_SIZE = "${oc.decode:${oc.env:WORLD_SIZE,1}}"  # as in conf/train.yaml


def job_of_run(path: str) -> TrainJob:
    """Return the job that trains the run in folder `path` again, in another folder. Raises ConfigError
    if the folder is not a run folder, or the run needs plugins that are not loaded: reading a run
    folder imports nothing.
    """
    run = open_run(path)
    plugins = [str(name) for name in run.config.get("plugins") or []]
    if missing_plugins(plugins):
        kept = storage.join(run.path, PLUGINS)
        where = f", after PYTHONPATH={kept}, where the run has kept its files" if storage.is_folder(kept) else ""
        raise ConfigError(
            f"from={run.path}: the run uses code of its own. If you trust it, add plugins=[{','.join(plugins)}] to the "
            f"same command{where}"
        )
    job = load_saved_job(TrainJob, storage.join(run.path, "config.yaml"))
    return replace(
        job,
        from_run=None,
        # A plan file is copied to the run folder as plan.json, which the search reads first.
        planner=replace(job.planner, kind="search" if job.planner.kind == "file" else job.planner.kind),
        checkpoint=replace(job.checkpoint, folder=None),
        publishing=replace(job.publishing, artifact=None),
    )


def config_of_run(path: str) -> DictConfig:
    """Return the config of `train from=path`. Raises ConfigError as job_of_run."""
    run = open_run(path)
    config = OmegaConf.structured(job_of_run(path))
    config.from_run = run.path  # not before: the saved job has the run's own folder
    config.paths = OmegaConf.structured(PathsConfig)
    config.run_dir = f"${{paths.runs}}/{run.name}_again"
    config.world_size = WORLD_SIZE
    return config
