"""Write a job to a file and read it back: plain YAML without interpolations, and without imports.

`model.kind` names the class of the model. `plugins` names the packages that the command line loaded, for
the error if they are missing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from pipeline import __version__
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.registry import components, find, missing_plugins
from pipeline.runtime.errors import ConfigError, did_you_mean
from pipeline.runtime.logs import get_logger
from pipeline.runtime.masking import without_hidden
from pipeline.runtime.storage import storage

GENERATORS = ("user_item", "conversions", "histories", "tags")
# Key of an earlier release -> the key that replaces it.
MOVED = {f"data.{name}": f"data.generator (its kind is {name})" for name in GENERATORS}


def moved_hint(key: str) -> str:
    """Return a hint with the new key, "" if the key has not moved."""
    return next((f"it is {new} now" for old, new in MOVED.items() if f"{key}.".startswith(f"{old}.")), "")


def with_moved_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a saved job under the keys of this release."""
    data = values.get("data")
    if not isinstance(data, dict):
        return values
    generated = {"kind": name, **data[name]} if (name := next(filter(data.get, GENERATORS), None)) else {}
    kept = {name: value for name, value in data.items() if name not in GENERATORS}
    return {**values, "data": {**kept, "generator": generated} if generated else kept}


Job = TypeVar("Job")
Result = TypeVar("Result")
OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})  # a setting with such a value changes nothing
logger = get_logger(__name__)
MOST_MESSAGE = 2000  # characters of an error; it may quote a value of the file
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader, if PyYAML has it


def job_to_yaml(job: Any) -> str:
    """Return a resolved job as plain YAML. Secret addresses are replaced by ***."""
    values = without_hidden(dataclasses.asdict(job))
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def job_from_yaml(job_type: type[Job], text: str) -> Job:
    """Read a job. Raises ConfigError for keys or values that this release does not know, also
    because they belong to a plugin that is not loaded."""
    values = _values_of(text)
    plugins = [str(name) for name in values.get("plugins") or []]
    try:
        model = find("model", str(values["model"].get("kind")), "saved model.kind") if "model" in values else None
        return copy.deepcopy(_read_job(job_type, model, text))  # type: ignore[arg-type, return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(f"saved job: {error.full_key}: {str(error).splitlines()[0]}{near_field(error)}") from None
    except ConfigError as error:
        if missing := missing_plugins(plugins):
            reason = str(error).partition(" is not one of ")[0]
            raise ConfigError(
                f"saved job: this run needs plugin {missing[0]}, which is not loaded ({reason}); "
                f"give plugins=[{','.join(plugins)}] to the same command"
            ) from None
        raise


def plain_values(text: str) -> dict[str, Any]:
    """Return what a saved job holds, before names of earlier releases are replaced. Raises ConfigError."""
    try:
        # Aliases of aliases stand for more values than memory holds, and train writes none.
        if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, SAFE_LOADER)):
            raise ConfigError("saved job: it has YAML aliases, which train does not write; restore the file")
        values = yaml.load(text, SAFE_LOADER)
    except ConfigError:
        raise
    except (RecursionError, ValueError) as error:  # a number or date that Python does not have
        raise ConfigError(f"saved job: {error}; restore the file, it was changed") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"saved job{line}: {getattr(error, 'problem', None) or error}; restore the file, it was cut off or changed"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"saved job: a {type(values).__name__} is not a job")
    return values


def _values_of(text: str) -> dict[str, Any]:
    values = plain_values(text)
    if key := _interpolation(values):
        raise ConfigError(f"saved job: {key} holds ${{...}}, but train saves resolved values: the file was changed")
    for section, kind in (("model", dict), ("plugins", list)):
        if section in values and not isinstance(values[section], kind):
            raise ConfigError(f"saved job: {section} is a {type(values[section]).__name__}, not a {kind.__name__}")
    if "model" in values:
        values["model"] = _renamed_kind(values["model"])
    return with_moved_keys(values)


@lru_cache(maxsize=4)
def _read_job(job_type: type, model: type | None, text: str) -> object:
    """Read a job and cache it. A publisher reads the same job at each step, and OmegaConf takes 40
    ms."""
    values = _values_of(text)
    _drop_unknown(job_type, values, "", model)
    return instantiate(OmegaConf.merge(_schema(job_type, model), values), job_type)  # type: ignore[arg-type]


def _drop_unknown(kind: Any, values: dict[str, Any], section: str, model: type | None = None) -> None:
    """Drop keys that only another release has, if they are off, and say so.

    Raises ConfigError for such a key with a value that this release cannot apply.
    """
    kind = next((part for part in get_args(kind) if part is not NoneType), kind) if NoneType in get_args(kind) else kind
    is_section = dataclasses.is_dataclass(kind)
    hints = get_type_hints(kind) if is_section else {}
    for name, value in list(values.items()):
        inner = f"{section}.{name}" if section else str(name)
        if is_section and name not in hints:
            if value not in OFF:
                raise ConfigError(
                    f"saved job: {inner}={str(value)[:80]} is a key that this release ({__version__}) does not have"
                    f"{did_you_mean(str(name), hints)}: use the release that saved the job, or remove the line from the "
                    "file if the run does not need that setting"
                )
            logger.warning("saved job: %s=%s is a key of another release and is dropped", inner, value)
            del values[name]
        elif isinstance(value, dict):
            of_entries = get_args(kind)[1] if get_origin(kind) is dict else Any
            of_model = model if name == "model" and model is not None else None
            _drop_unknown(of_model or (hints[name] if is_section else of_entries), value, inner)


@lru_cache(maxsize=32)
def _schema(job_type: type, model: type | None) -> DictConfig:
    """Build the schema once: it takes longer than reading a job, and merging copies it."""
    schema: DictConfig = OmegaConf.structured(job_type)
    if model is not None:
        schema.model = OmegaConf.structured(model)
    return schema


def _renamed_kind(model: dict[str, Any]) -> dict[str, Any]:
    """Rename the `deepfm` of release 0.1.0 to `simple_deepfm`, which a key that only it has
    identifies."""
    is_simple = model.get("kind") == "deepfm" and "deep_fm_dimension" in model
    return {**model, "kind": "simple_deepfm"} if is_simple else model


def _interpolation(value: Any, key: str = "") -> str:
    """Return the key of the first value that OmegaConf would resolve, or "". A resolver could read
    the environment."""
    if isinstance(value, dict):
        inner = ((f"{key}.{name}" if key else str(name), part) for name, part in value.items())
    elif isinstance(value, list):
        inner = ((f"{key}.{index}", part) for index, part in enumerate(value))
    else:
        return key if isinstance(value, str) and "${" in value else ""
    return next((found for name, part in inner if (found := _interpolation(part, name))), "")


def save_job(job: Any, path: str) -> None:
    storage.publish_text(path, job_to_yaml(job))


def load_saved_job(job_type: type[Job], path: str) -> Job:
    """Read a saved job. Raises ConfigError if there is no file or it does not fit `job_type`."""
    return _read(path, lambda text: job_from_yaml(job_type, text))


def load_saved_values(path: str) -> dict[str, Any]:
    """Return plain_values of a saved job, which needs no plugin. Raises ConfigError if there is no such file."""
    return _read(path, plain_values)


def _read(path: str, parse: Callable[[str], Result]) -> Result:
    if not storage.is_file(path):
        raise ConfigError(f"there is no saved job at {path!r}: is that a run folder?")
    try:
        return parse(storage.read_text(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text ({error.reason} at byte {error.start}): restore the file") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error)[:MOST_MESSAGE]}") from None


def instantiate(config: DictConfig, job_type: type[Job]) -> Job:
    try:
        job: Job = OmegaConf.to_object(config)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(_explain_no_object(config, job_type, error)) from None
    except ConfigError as error:
        if entry := _entry_at_fault(config, str(error)):
            raise ConfigError(f"{entry}: {error}") from None
        raise
    model = getattr(job, "model", None)
    models = components("model")
    if model is not None and models.get(model.kind) is not type(model):
        raise ConfigError(
            f"model.kind={model.kind!r} does not change the model, which is {type(model).__name__}; "
            f"choose it by model=<option>{did_you_mean(model.kind, models)}"
        )
    return job


def _explain_no_object(config: DictConfig, job_type: type, error: OmegaConfBaseException) -> str:
    """Describe all keys without a value; if there are none, the first error of OmegaConf."""
    try:
        if missing := sorted(OmegaConf.missing_keys(config)):
            return _explain_missing(missing, CONFIG_NAMES[job_type])
    except OmegaConfBaseException as first:  # an interpolation of a key that does not exist
        error = first
    if isinstance(error, InterpolationToMissingValueError):
        # OmegaConf names the missing key only in its message
        key = str(error).splitlines()[0].rpartition(" ")[2]
        return _explain_missing([key], CONFIG_NAMES[job_type])
    return f"{error.full_key}: {first_line(error)}"


def _entry_at_fault(config: DictConfig, message: str, key: str = "") -> str:
    """Return the key of the mapping entry, such as `tables.cat_3`, whose checks fail with that
    message; "" if none does. A schema does not know its own key in a mapping."""
    names: list[Any] = list(config)
    for name in names:
        if OmegaConf.is_missing(config, name) or not isinstance(node := config[name], DictConfig):
            continue
        inner = f"{key}.{name}" if key else str(name)
        if found := _entry_at_fault(node, message, inner):
            return found
        if OmegaConf.get_type(config) is dict and dataclasses.is_dataclass(OmegaConf.get_type(node)):
            try:
                OmegaConf.to_object(node)
            except (ConfigError, OmegaConfBaseException) as error:
                if str(error) == message:
                    return inner
    return ""


def _explain_missing(keys: list[str], config_name: str) -> str:
    if "data.name" in keys:
        hint = (
            "choose data=<option>"
            if config_name in ("generate", "prepare")
            else "choose experiment=<option> or data=<option>"
        )
        return f"no data set is chosen: {hint}; `python -m pipeline {config_name} --help` lists them"
    if keys == ["model.kind"]:
        return "no model is chosen: choose model=<option>"
    return f"{', '.join(keys)} must be given: {' '.join(f'{key}=<value>' for key in keys)}"


def near_field(error: OmegaConfBaseException) -> str:
    if error.object_type is not None and dataclasses.is_dataclass(error.object_type):
        if error.object_type.__name__ == "DataConfig" and (moved := moved_hint(f"data.{error.key}")):
            return f"; {moved}"
        names = [field.name for field in dataclasses.fields(error.object_type)]
        return did_you_mean(str(error.key), names) if str(error.key) not in names else ""
    return ""


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def flat(job: Any) -> dict[str, Any]:
    """Return the values of a job by their dotted keys."""
    return dict(flatten(dataclasses.asdict(job)))


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested dictionaries."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
