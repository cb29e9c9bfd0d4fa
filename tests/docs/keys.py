"""Check keys, options of groups and verbs by the types of the jobs alone: no YAML is composed."""

from __future__ import annotations

import dataclasses
import functools
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pipeline.cli.compose import config_folders, group_options
from pipeline.cli.verb import Verb
from pipeline.cli.verbs import import_verbs
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import components

PLAIN = {"completion", "doctor", "precompile", "agent"}  # verbs with arguments of their own


@functools.cache
def verbs() -> dict[str, Verb[Any, Any]]:
    import_verbs()
    return {name: main.verb for name, main in components("verb").items()}


@functools.cache
def jobs() -> tuple[type, ...]:
    return tuple(verb.job for verb in verbs().values())


@functools.cache
def groups() -> dict[str, list[str]]:
    return group_options(config_folders())


def is_key(job: type, key: str) -> bool:
    """Whether `key` leads to a value or a section of the job; `<name>` and `*` stand for any name."""
    kinds: list[Any] = [job]
    for name in key.split("."):
        kinds = [inner for kind in kinds for inner in _inner(kind, name)]
    return bool(kinds)


def is_override(job: type, word: str, options: dict[str, list[str]]) -> bool:
    """Whether `key=value` is a key of the job, or a group with an option that it has."""
    key, _, value = word.partition("=")
    if key == "plugins":
        return True
    if key == "from":  # train from=RUN
        return issubclass(job, TrainJob)
    if key == "experiment":
        return issubclass(job, TrainJob) and (value in options["experiment"] or value == "...")
    hint = get_type_hints(job).get(key)
    if key in options and value.isidentifier() and hint is not str:  # evaluate's tables=own is a word, no option
        return value in options[key]
    return is_key(job, key)


def _inner(kind: Any, name: str) -> list[Any]:
    if get_origin(kind) in (Union, UnionType):
        return [inner for part in get_args(kind) if part is not NoneType for inner in _inner(part, name)]
    if get_origin(kind) is dict:
        return [get_args(kind)[1]]
    if get_origin(kind) is list:
        return [get_args(kind)[0]] if name.isdigit() else []
    if not dataclasses.is_dataclass(kind):
        return []
    found = []
    for variant in _variants(kind):
        hints = get_type_hints(variant)
        found += [hints[field.name] for field in dataclasses.fields(variant) if name in (field.name, "*")]
    return found


@functools.cache
def _variants(kind: type) -> tuple[type, ...]:
    """A config class and what was derived from it: a model's own config stands where ModelConfig is typed."""
    components("model")
    below = [variant for child in kind.__subclasses__() for variant in _variants(child)]
    return (kind,) if kind in jobs() else (kind, *below)
