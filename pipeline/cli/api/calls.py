"""Functions that do what the verbs do: compose a job, then pass it to the function of that name.

Each returns the record that the verb prints, raises UserError, and prints nothing unless `verbose` is
set. It shows a progress bar in a terminal and in a notebook. Nothing of what a verb changes for its
process stays (pipeline/cli/api/session.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from omegaconf import OmegaConf

from pipeline.cli.api.session import session
from pipeline.cli.command_line import load_config, quoted, validate_train
from pipeline.cli.compose import apply_override, first_words, own_key, parse_overrides
from pipeline.cli.inspect import Inspection
from pipeline.config.jobs.evaluate import EvaluateJob, ExportJob, PredictJob
from pipeline.config.jobs.prepare import GenerateJob, InspectJob, PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.saved_jobs import instantiate
from pipeline.runtime.errors import ConfigError, check_choice

if TYPE_CHECKING:
    from pipeline.cli.generate import GenerateSummary
    from pipeline.data.prepare.run import PrepareSummary
    from pipeline.retraining.tick import TickSummary
    from pipeline.serving.artifact.export import ExportSummary
    from pipeline.serving.scoring.prediction import PredictSummary
    from pipeline.training.plan_job import PlanSummary
    from pipeline.training.summary import EvaluateSummary, TrainSummary

JOBS: dict[str, type] = {
    "evaluate": EvaluateJob,
    "export": ExportJob,
    "generate": GenerateJob,
    "inspect": InspectJob,
    "plan": PlanJob,
    "predict": PredictJob,
    "prepare": PrepareJob,
    "retrain": RetrainJob,
    "train": TrainJob,
}
Job = TypeVar("Job")
Overrides = Sequence[str] | Mapping[str, Any]  # ["trainer.epochs=2"] or {"trainer.epochs": 2}


@overload
def compose(verb: Literal["train"], overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> TrainJob: ...  # fmt: skip
@overload
def compose(verb: Literal["evaluate"], overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> EvaluateJob: ...  # fmt: skip
@overload
def compose(verb: Literal["export"], overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> ExportJob: ...  # fmt: skip
@overload
def compose(verb: Literal["generate"], overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> GenerateJob: ...  # fmt: skip
@overload
def compose(verb: Literal["inspect"], overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> InspectJob: ...  # fmt: skip
@overload
def compose(verb: Literal["plan"], overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> PlanJob: ...  # fmt: skip
@overload
def compose(verb: Literal["predict"], overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> PredictJob: ...  # fmt: skip
@overload
def compose(verb: Literal["prepare"], overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> PrepareJob: ...  # fmt: skip
@overload
def compose(verb: Literal["retrain"], overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> RetrainJob: ...  # fmt: skip
def compose(verb: str, overrides: Overrides = (), *, config_dir: str | None = None, **settings: Any) -> Any:
    """Return the job of a verb. `overrides` are words of its command line, such as "trainer.epochs=2", or keys
    with values, such as {"trainer.epochs": 2}. `settings` are more keys: compose("train", experiment="quickstart").

    config_dir: a conf folder whose options are added to the package's. Raises ConfigError.
    """
    check_choice("verb", verb, JOBS)
    return load_config(JOBS[verb], [*_words(overrides), *_words(settings)], config_dir)


def changed(job: Job, settings: Overrides) -> Job:
    """Return the job with other values of these keys. Raises ConfigError."""
    if not settings:
        return job
    config, kind = OmegaConf.structured(job), type(job)
    for override in parse_overrides(_words(settings), first_words(kind)):
        override.key_or_group = own_key(override.key_or_group, kind)
        apply_override(config, kind, override)
    return instantiate(config, kind)


def _words(settings: Overrides) -> list[str]:
    if isinstance(settings, Mapping):
        return [f"{key}={_as_word(value)}" for key, value in settings.items()]
    return list(settings)


def _as_word(value: Any) -> str:
    """Write a value as on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}: {_as_word(each)}" for name, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_as_word, value)) + "]"
    return repr(value) if isinstance(value, (int, float)) else quoted(str(value))


def inspect(source: str, **settings: Any) -> Inspection:
    """Inspect a raw file. The result's `yaml` is a data config that reads it, and `text` says why."""
    from pipeline.cli.inspect import look

    with session(uses_torch=False):
        return look(compose("inspect", source=source, **settings))


def generate(job: GenerateJob, *, verbose: bool = False, progress: bool | None = None) -> GenerateSummary:
    """Generate raw rows whose best possible AUC is known."""
    from pipeline.cli.generate import generate

    with session(verbose, progress, uses_torch=False):
        return generate(job)


def prepare(job: PrepareJob, *, verbose: bool = False, progress: bool | None = None) -> PrepareSummary:
    """Prepare a data set from raw rows."""
    from pipeline.data.prepare.run import prepare

    with session(verbose, progress, uses_torch=False):
        return prepare(job)


def train(job: TrainJob, *, ranks: int = 1, verbose: bool = False, progress: bool | None = None) -> TrainSummary:
    """Train a model, or resume the run in job.run_dir. Returns the record of rank 0.

    ranks: processes that train together on this host; 1 trains in this process, and under torchrun joins
    the other ranks. Ctrl-C saves the next step, then raises KeyboardInterrupt; the same call resumes.
    """
    from pipeline.cli.api import ranks as several
    from pipeline.cli.api.cells import kept_cells

    with session(verbose, progress, uses_torch=ranks == 1), kept_cells(job.plugins) as plugins:
        job = dataclasses.replace(job, plugins=plugins, world_size=several.count(ranks))
        validate_train(job)
        if ranks > 1:
            from pipeline.training.summary import TrainSummary

            return TrainSummary(**several.run("train", job, ranks, f"{job.run_dir}/logs", verbose))
        from pipeline.training.train import train

        return train(job)


def evaluate(
    run: str | EvaluateJob, *, ranks: int = 1, verbose: bool = False, progress: bool | None = None, **settings: Any
) -> EvaluateSummary:
    """Measure a step of a run on a split of its data set. `settings` are keys of the job, such as split="test"."""
    from pipeline.cli.api import ranks as several
    from pipeline.cli.api.cells import kept_cells

    with session(verbose, progress, uses_torch=ranks == 1):
        job = changed(run, settings) if isinstance(run, EvaluateJob) else compose("evaluate", run=run, **settings)
        with kept_cells(job.plugins) as plugins:
            job = dataclasses.replace(job, plugins=plugins, world_size=several.count(ranks))
            if ranks > 1:
                from pipeline.training.summary import EvaluateSummary

                return EvaluateSummary(**several.run("evaluate", job, ranks, f"{job.run}/logs", verbose))
            from pipeline.training.evaluate import evaluate

            return evaluate(job)


def export(
    run: str | ExportJob, *, verbose: bool = False, progress: bool | None = None, **settings: Any
) -> ExportSummary:
    """Export a step of a run as an artifact. `settings` are keys of the job, such as precision="int8"."""
    from pipeline.serving.artifact.export import export

    with session(verbose, progress):
        return export(changed(run, settings) if isinstance(run, ExportJob) else compose("export", run=run, **settings))


def predict(
    artifact: str | PredictJob, *, verbose: bool = False, progress: bool | None = None, **settings: Any
) -> PredictSummary:
    """Score the rows of files into a file: predict("artifacts/x", source="rows.parquet", output="scores.parquet").

    Artifact(path).predict(frame) scores rows in memory.
    """
    from pipeline.cli.predict import predict_with_registry

    with session(verbose, progress):
        is_job = isinstance(artifact, PredictJob)
        return predict_with_registry(
            changed(artifact, settings) if is_job else compose("predict", artifact=artifact, **settings)  # type: ignore[arg-type]
        )


def plan(job: PlanJob, *, verbose: bool = False, progress: bool | None = None) -> PlanSummary:
    """Plan how the tables of a training are sharded, for hardware that need not be here."""
    from pipeline.cli.plan import plan

    with session(verbose, progress):
        validate_train(job)
        return plan(job)


def retrain_tick(job: RetrainJob, *, verbose: bool = False, progress: bool | None = None) -> TickSummary:
    """Train on the oldest windows of new data, and promote each model that passes the gate."""
    from pipeline.retraining.tick import retrain

    if job.follow:
        raise ConfigError("follow=true trains until it is stopped: use `python -m pipeline retrain`")
    with session(verbose, progress):
        return retrain(job)
