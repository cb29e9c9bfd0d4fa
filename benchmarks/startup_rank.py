"""Run one rank of benchmarks/startup.py: `pipeline train` with a clock around its stages.

    python -m benchmarks.startup_rank MARKS key=value ...

Writes MARKS.<rank>: [stage, when it ended, CPU-seconds of this process by then] for each of STAGES.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pipeline.runtime.process.processes import start_time

STAGES = (
    "agent",
    "interpreter",
    "config",
    "imports",
    "process group",
    "data set and reader",
    "plan",
    "sharding",
    "checkpoint, writers",
    "first step",
)
# What train() imports once its config is known.
IMPORTED = (
    "checkpoint.random_state", "data.dataset", "runtime.logs", "devices.process_group", "runtime.process.distributed",
    "checkpoint.tables", "training.sharded_model", "training.hooks.base", "training.memory_watch", "training.run_state",
    "training.optimizer", "training.trainer",
)  # fmt: skip
marks: list[tuple[str, float, float]] = []


def mark(stage: str) -> None:
    """The stage ends here. Called again (a second reader), it ended later."""
    if marks and marks[-1][0] == stage:
        marks.pop()
    marks.append((stage, time.time(), time.process_time()))


def after(owner: Any, name: str, stage: str) -> None:
    """Mark the stage's end whenever owner.name returns."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        if not is_training():
            mark(stage)
        return result

    setattr(owner, name, call)


def is_training() -> bool:
    return bool(marks) and marks[-1][0] in STAGES[-2:]


def timed_train(job: Any) -> Any:
    mark("config")
    for name in IMPORTED:
        import_module(f"pipeline.{name}")
    from pipeline.devices import process_group
    from pipeline.training import sharded_model
    from pipeline.training import train as recipe
    from pipeline.training.hooks.throughput import StepLog
    from pipeline.training.train import train
    from pipeline.training.trainer import Trainer

    mark("imports")
    after(process_group, "init_distributed", "process group")
    after(recipe, "open_reader", "data set and reader")
    after(sharded_model, "load_or_search_plan", "plan")
    after(sharded_model, "shard_model", "sharding")
    after(StepLog, "__init__", "checkpoint, writers")
    original = Trainer._make_pipeline

    def first_step(trainer: Any) -> Any:
        made = original(trainer)
        progress = made.progress

        def call(batches: Any) -> Any:
            result = progress(batches)
            mark("first step")
            return result

        made.progress = call
        return made

    Trainer._make_pipeline = first_step
    return train(job)


def main() -> None:
    # The process began before its interpreter: Linux says when, in ticks since the boot.
    since_boot = start_time(os.getpid()) / os.sysconf("SC_CLK_TCK")
    marks.append(("agent", time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot, 0.0))
    path = sys.argv.pop(1)
    from pipeline.cli.command_line import validate_train
    from pipeline.cli.verb import Verb
    from pipeline.config.jobs.train import TrainJob

    mark("interpreter")
    Verb(
        TrainJob,
        timed_train,
        __doc__ or "",
        validate=validate_train,
        runs_on_ranks=True,
        handles_sigterm=True,
        runs_kernels=True,
    ).main()
    with open(f"{path}.{os.environ.get('RANK', '0')}", "w") as file:
        json.dump(marks, file)


if __name__ == "__main__":
    main()
