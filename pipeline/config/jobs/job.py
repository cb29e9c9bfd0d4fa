"""Define the base of all job schemas, and the verb of each job (stdlib and OmegaConf only)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

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
    line may set them.

    A saved job stores them to report missing plugins. Reading a saved job imports none of them.
    """

    plugins: list[str] = field(default_factory=list, kw_only=True)
