"""Compare a job with the run in its folder and describe the effect of each difference (without
torch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import yaml

from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import job_from_yaml
from pipeline.runtime.errors import TrainingError

# Locations of files, and settings of how the same numbers are computed: changing them changes no
# result.
NEUTRAL = ("name", "run_dir", "world_size", "plugins", "paths.", "data.", "planner.", "hardware.", "logger.", "profile",
           "checkpoint.", "trainer.log_every_steps", "trainer.hooks", "trainer.metrics", "trainer.metrics_port", "trainer.lease_ttl_s", "trainer.grace_s",
           "trainer.startup_timeout_s", "trainer.hang_timeout_s", "trainer.save_timeout_s")  # fmt: skip
# Settings that only the first step of a run uses.
FIRST_STEP = ("warm_start", ".init.")
# Settings that change the trained weights. A finished run has no step left that could apply them.
TRAINS = ("optimizer.", "schedule.", "model.", "tables.", "parallel.", "warm_start", "trainer.precision",
          "trainer.gradient_clip_", "comms.forward_precision", "comms.backward_precision",
          "data.synthetic_multi_hot")  # fmt: skip
MAX_NAMED = 8


def differences(job: TrainJob, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value of the run, value of this job) for each key that can change a result.

    `config` is the config in a checkpoint's manifest.

    Raises:
        ConfigError: the run's config needs a plugin that is not loaded.
    """
    before = dict(_leaves(asdict(job_from_yaml(TrainJob, yaml.safe_dump(config)))))
    now = dict(_leaves(asdict(job)))
    keys = [key for key in dict.fromkeys([*now, *before]) if _is(key, TRAINS) or not _is(key, NEUTRAL)]
    pairs = {key: (before.get(key), now.get(key)) for key in keys}
    return {
        key: (then, new)
        for key, (then, new) in pairs.items()
        if then != new and (then or new) is not None and (then or new) != []
    }


def describe_differences(found: dict[str, tuple[Any, Any]]) -> list[str]:
    """Describe the settings that later steps use, and the settings that are ignored after the first
    step."""
    ignored = {key: pair for key, pair in found.items() if _is(key, FIRST_STEP)}
    taken = {key: pair for key, pair in found.items() if key not in ignored}
    lines = []
    if taken:
        lines.append(f"continues with {_named(taken)}")
    if ignored:
        lines.append(
            f"ignores {_named(ignored)}: only the first step of a run uses these settings; use another run_dir to start a new run"
        )
    return lines


def check_finished(run_dir: str, step: int, found: dict[str, tuple[Any, Any]]) -> str:
    """Return a text about ignored settings, "" if nothing is ignored. No step is left to train
    after `step`.

    Raises:
        TrainingError: the job sets values that would train other weights than the weights of the run.
    """
    if asked := {key: pair for key, pair in found.items() if _is(key, TRAINS)}:
        raise TrainingError(
            f"{run_dir} is trained to its last step, {step}, and no step is left for {_named(asked)}: nothing was changed. "
            "Choose another run_dir for another training, or more steps (trainer.epochs, trainer.max_steps) to continue with "
            "that; the run's own values show its results again"
        )
    return f"ignores {_named(found)}: no step is left to train" if found else ""


def _named(found: dict[str, tuple[Any, Any]]) -> str:
    texts = [f"{key}={now} (the run: {before})" for key, (before, now) in list(found.items())[:MAX_NAMED]]
    more = len(found) - MAX_NAMED
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _is(key: str, patterns: tuple[str, ...]) -> bool:
    """Return True if a pattern matches the key.

    A pattern that ends in "." or "_" matches a prefix. A pattern that starts with "." matches
    anywhere. Any other pattern matches a complete key or a section.
    """
    return any(
        pattern in key
        if pattern.startswith(".")
        else key.startswith(pattern)
        if pattern.endswith((".", "_"))
        else key == pattern or key.startswith(f"{pattern}.")
        for pattern in patterns
    )


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, f"{key}.{name}" if key else str(name))
