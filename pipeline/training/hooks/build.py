"""Build the hooks of a training: the core's in their order, those of extras, and those that `trainer.hooks` names."""

from __future__ import annotations

from operator import attrgetter

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import components, find
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.training.hooks.base import Hook, TrainingParts

# What a run changes is said before anything is written. Replicas are averaged before anything reads the tables.
BEFORE = (
    "record",
    "bad_rows",
    "progress",
    "memory",
    "throughput",
    "evaluation",
    "early_stop",
    "plateau",
    "progressive",
)
# A checkpoint holds what all hooks have counted up to its step, and a rollback waits for a save in flight.
AFTER = ("saving", "rollback", "heartbeat")

# Key -> the hook of an extra that reads it. None and "none" need no hook.
SETTINGS_OF_EXTRAS = {
    "profile": "profile",
    "publishing.when": "publishing",
    "trainer.metrics_port": "monitor",
    "logger.otlp_endpoint": "monitor",
    "logger.tracker": "tracker",
}


def hook_names(job: TrainJob) -> list[str]:
    """In the order in which they are called.

    Raises:
        ConfigError: trainer.hooks names one that is not registered.
        TrainingError: trainer.hooks names one of this release, or one twice; or patience counts evaluations and none is made.
    """
    patience = {
        "trainer.early_stop.patience": job.trainer.early_stop.patience,
        "schedule.plateau.patience": job.schedule.plateau.patience,
    }
    if not (job.trainer.evaluate_every_steps or job.trainer.evaluate_every_epochs):
        for key, count in patience.items():
            if count:
                raise TrainingError(
                    f"{key}={count} counts evaluations, and none is made before the end: set "
                    "trainer.evaluate_every_epochs=1, or trainer.evaluate_every_steps=<steps>"
                )
    own = [*BEFORE, *job.trainer.hooks, *AFTER]
    for name, kind in components("hook").items():
        if after := getattr(kind, "runs_after", ""):  # a plugin's hook may have another base
            own.insert(own.index(after) + 1, name)
    for key, name in SETTINGS_OF_EXTRAS.items():
        if name not in own and (value := attrgetter(key)(job)) not in (None, "none"):
            raise ConfigError(f"{key}={value} needs an extra that is not installed: the hook {name!r} is absent")
    for name in job.trainer.hooks:
        find("hook", name, "trainer.hooks")
        if own.count(name) > 1:
            raise TrainingError(f"trainer.hooks: {name!r} is among the hooks already; name each of your own once")
    return own


def build_hooks(job: TrainJob, parts: TrainingParts) -> list[Hook]:
    """Raises as hook_names."""
    hooks: list[Hook] = []
    for name in hook_names(job):
        hook: Hook = find("hook", name)(job, parts)
        hook.name = name
        hooks.append(hook)
    return hooks
