"""Build the hooks of a training run: the core's hooks, hooks of extras, and hooks that
`trainer.hooks` names."""

from __future__ import annotations

from operator import attrgetter

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import components, find
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.training.hooks.base import Hook, TrainingParts

# The record is checked first, before anything is written.
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
# A checkpoint holds the counts of all hooks up to its step. A rollback waits for a save in
# progress.
AFTER = ("saving", "rollback", "heartbeat")

# Key -> the hook of an extra that reads it. The values None and "none" need no hook.
SETTINGS_OF_EXTRAS = {
    "profile": "profile",
    "publishing.when": "publishing",
    "trainer.metrics_port": "monitor",
    "logger.otlp_endpoint": "monitor",
    "logger.tracker": "tracker",
}


def hook_names(job: TrainJob) -> list[str]:
    """Return the names of all hooks in the order in which they are called.

    Raises:
        ConfigError: trainer.hooks names a hook that is not registered.
        TrainingError: trainer.hooks names a hook of the core, or a hook twice; or a patience counts
            evaluations, but no evaluation is made during training.
    """
    patience = {
        "trainer.early_stop.patience": job.trainer.early_stop.patience,
        "schedule.plateau.patience": job.schedule.plateau.patience,
    }
    if not (job.trainer.evaluate_every_steps or job.trainer.evaluate_every_epochs):
        for key, count in patience.items():
            if count:
                raise TrainingError(
                    f"{key}={count} counts evaluations, but none is made during training: set "
                    "trainer.evaluate_every_epochs=1, or trainer.evaluate_every_steps=<steps>"
                )
    own = [*BEFORE, *job.trainer.hooks, *AFTER]
    # By name, because the order in which modules were imported must not change the order of hooks.
    for name, kind in sorted(components("hook").items(), reverse=True):
        if after := getattr(kind, "runs_after", ""):  # a plugin's hook may have another base
            own.insert(own.index(after) + 1, name)
    for key, name in SETTINGS_OF_EXTRAS.items():
        if name not in own and (value := attrgetter(key)(job)) not in (None, "none"):
            raise ConfigError(f"{key}={value} needs an extra that is not installed: the hook {name!r} is absent")
    for name in job.trainer.hooks:
        find("hook", name, "trainer.hooks")
        if own.count(name) > 1:
            raise TrainingError(
                f"trainer.hooks: {name!r} is already a hook of this run; name each of your own hooks once"
            )
    return own


def build_hooks(job: TrainJob, parts: TrainingParts) -> list[Hook]:
    """Build the hooks in the order of hook_names, and raise the same errors."""
    hooks: list[Hook] = []
    for name in hook_names(job):
        hook: Hook = find("hook", name)(job, parts)
        hook.name = name
        hooks.append(hook)
    return hooks
