"""Define the base of all job schemas, the verb of each job, and the folders of jobs (no torch)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from omegaconf import OmegaConf

from pipeline.runtime.errors import check_given

# Job -> the name of its verb, and of conf/<name>.yaml. It has the jobs whose modules were imported.
CONFIG_NAMES: dict[type, str] = {}
Schema = TypeVar("Schema", bound=type)


def job_of(verb: str) -> Callable[[Schema], Schema]:
    """Return a decorator that makes a dataclass the job of `verb`."""

    def remember(job: Schema) -> Schema:
        CONFIG_NAMES[job] = verb
        return job

    return remember


@dataclass
class Job:
    """Base of all jobs. `plugins` are packages whose import registers components. Only the command
    line may set them. A saved job stores them to report missing plugins. Reading a saved job
    imports none of them."""

    plugins: list[str] = field(default_factory=list, kw_only=True)


def under(root: str, name: str) -> str:
    """Return the path of `name` below `root`. A root of "." is left out, which keeps paths
    short."""
    return name if root == "." else f"{root.rstrip('/')}/{name}"


OmegaConf.register_new_resolver("under", under, replace=True)


@dataclass
class PathsConfig:
    """`root` is a folder. The other folders are below it unless they are set."""

    root: str = "."
    data: str = "${under:${.root},datasets}"  # prepared data sets, one folder each
    raw: str = "${.data}/raw"  # generated text, the source of prepare
    runs: str = "${under:${.root},runs}"  # run folders of train
    retraining: str = "${under:${.root},retraining}"  # work folders of retrain
    registry: str = "${under:${.root},registry}"  # versions that retrain promotes
    plans: str = "${under:${.root},sharding_plans}"  # plan files
    artifacts: str | None = None  # artifacts of export, one folder per run; None: <run>/artifacts

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_given(f"paths.{name}", value)
