"""Compose conf/*.yaml and command-line overrides into a typed job with Hydra's compose API and
one-line errors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipeline.cli.overrides import apply_override, first_words, parse_overrides
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.registry import components, load_plugins, missing_plugins
from pipeline.config.saved_jobs import instantiate, near_field
from pipeline.runtime.errors import ConfigError, did_you_mean
from pipeline.runtime.logs import get_logger

Job = TypeVar("Job")
logger = get_logger(__name__)
# (group, name) -> schema, for the schemas in Hydra's store
_stored: dict[tuple[str | None, str], type] = {}


def compose_job(job_type: type[Job], overrides: Iterable[str], config_dir: str | None = None) -> Job:
    """Compose conf/<verb>.yaml with `overrides` into a job. `config_dir` adds a user's conf folder.
    Raises ConfigError: one line that names the key or option and the nearest valid one."""
    folders = config_folders(config_dir)
    parsed = parse_overrides(overrides, first_words(job_type))
    # first, because plugins register options of groups and types of values
    load_plugins(_given_plugins(parsed))
    groups = with_registered_models(group_options(folders))
    # A verb's own field may have a group's name and hold text: evaluate's tables=own.
    words = {name for name, kind in get_type_hints(job_type).items() if kind is str}
    own_groups = {group: options for group, options in groups.items() if group in first_words(job_type) - words}
    choices, values = _split_overrides(parsed, own_groups, config_dir is not None)
    _register_schemas(job_type, folders)
    try:
        config = _compose_choices(job_type, folders, _without_keys_of_other_models(folders, choices))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain_composition(error, groups)) from None
    except ValueError as error:  # Hydra raises it for null if a YAML file overrides the group
        nulls = ", ".join(choice for choice in choices if choice.endswith("=null"))
        raise ConfigError(f"{nulls or ' '.join(choices)}: {error}; choose an option, or leave the key out") from None
    for line in _replaced_by_experiment(folders, choices, {override.key_or_group for override in values}):
        logger.warning(line)
    fields = get_type_hints(job_type)
    for override in values:
        # train and prepare name a data set by data.path; a verb of a run has no section data
        if override.key_or_group == "data.path" and "data" not in fields and "data_path" in fields:
            override.key_or_group = "data_path"
        if override.key_or_group == "plugins" and "plugins" not in fields:
            continue  # the job of a plugin's verb may have no such field
        apply_override(config, job_type, override)
    job = instantiate(config, job_type)
    if missing := missing_plugins(getattr(job, "plugins", [])):
        raise ConfigError(
            f"plugins={missing[0]} comes from a YAML file, too late to load it; give plugins=[...] as an override"
        )
    return job


def _without_keys_of_other_models(folders: list[Path], choices: list[str]) -> list[str]:
    """Return the choices with an experiment that sets no key of `model` that the chosen model
    lacks. An experiment may set sizes of its model and be combined with another model:
    experiment=quickstart model=fm."""
    chosen = dict(choice.partition("=")[::2] for choice in choices)
    name, model = chosen.get("experiment", ""), chosen.get("model", "")
    kind = components("model").get(model)
    file = next((file for each in folders if (file := each / "experiment" / f"{name}.yaml").is_file()), None)
    text = file.read_text() if file is not None and kind is not None else ""
    values = yaml.safe_load(text) if text.startswith("# @package _global_") else None
    section = values.get("model") if isinstance(values, dict) else None
    if kind is None or values is None or not isinstance(section, dict):
        return choices
    known = {field.name for field in dataclasses.fields(kind)}
    if section.keys() <= known:
        return choices
    node = {**values, "model": {key: value for key, value in section.items() if key in known}}
    option = f"{name}__{model}"
    ConfigStore.instance().store(group="experiment", name=option, node=node, package="_global_")
    return [f"experiment={option}" if choice == f"experiment={name}" else choice for choice in choices]


def _replaced_by_experiment(folders: list[Path], choices: list[str], given: set[str]) -> list[str]:
    """Return a line for each chosen option of which the chosen experiment replaces values. An
    experiment is composed after all groups. given: keys of the command line, which replace both."""
    chosen = dict(choice.partition("=")[::2] for choice in choices)
    experiment = _leaves(_option_values(folders, "experiment", chosen.pop("experiment", "")))
    lines = []
    for group, name in chosen.items():
        option = {f"{group}.{key}": value for key, value in _leaves(_option_values(folders, group, name)).items()}
        replaced = [key for key in option if key not in given and key in experiment and experiment[key] != option[key]]
        if replaced:
            values = ", ".join(f"{key}={experiment[key]}" for key in replaced)
            own = " ".join(f"{key}={option[key]}" for key in replaced)
            lines.append(f"{group}={name}: the experiment sets {values} instead; to use the option's values add {own}")
    return lines


def _option_values(folders: list[Path], group: str, name: str) -> dict[str, Any]:
    file = next((file for each in folders if (file := each / group / f"{name}.yaml").is_file()), None)
    values = yaml.safe_load(file.read_text()) if file is not None else None
    return values if isinstance(values, dict) else {}


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value; lists are values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _compose_choices(job_type: type, folders: list[Path], choices: list[str]) -> DictConfig:
    """Return the composed YAML files for the chosen options, with unresolved interpolations, as a
    copy.

    Hydra needs half a second of CPU, so a process that composes many jobs (a notebook, a sweep, the
    tests) reuses the result for the same choices until a file of conf/ changes or a model is
    registered. An overlay is never cached.
    """
    if folders != config_folders(None):
        return _compose_by_hydra(CONFIG_NAMES[job_type], folders, choices)
    files = [
        (str(file), file.stat())
        for folder in folders
        for pattern in ("*.yaml", "*/*.yaml")
        for file in folder.glob(pattern)
    ]
    written = frozenset((file, stat.st_ino, stat.st_mtime_ns, stat.st_size) for file, stat in files)
    models = frozenset(components("model").items())
    return deepcopy(_composed(job_type, tuple(folders), tuple(choices), written, models))


@lru_cache(maxsize=64)
def _composed(
    job_type: type, folders: tuple[Path, ...], choices: tuple[str, ...], *_depends_on: frozenset[Any]
) -> DictConfig:
    return _compose_by_hydra(CONFIG_NAMES[job_type], list(folders), list(choices))


def _compose_by_hydra(config_name: str, folders: list[Path], choices: list[str]) -> DictConfig:
    # Hydra reads the verb's YAML before it knows the search path.
    home = next((folder for folder in folders if (folder / f"{config_name}.yaml").is_file()), folders[0])
    others = [folder for folder in folders if folder != home]
    with initialize_config_dir(str(home), version_base="1.3", job_name=config_name):
        searchpath = ["hydra.searchpath=[" + ",".join(f"'file://{folder}'" for folder in others) + "]"]
        return compose(config_name, [*searchpath, *choices])


def config_folders(config_dir: str | None = None) -> list[Path]:
    """Return folders with YAML: our conf/, the extras', then the user's overlay, which adds options
    and replaces none.

    Ours is conf/ next to the package if setup.cfg is there (a checkout, or TorchX's copy of one as
    a job directory; in an editable install `pkg://pipeline.conf` would lead back to the checkout).
    Otherwise it is the installed pipeline/conf.
    """
    package = Path(__file__).resolve().parents[1]
    own = package.parent / "conf" if (package.parent / "setup.cfg").is_file() else package / "conf"
    if not own.is_dir():
        raise ConfigError(f"there is no conf folder at {own}: reinstall the package")
    shipped = [own, *sorted(package.glob("extras/*/conf"))]
    if config_dir is None:
        return shipped
    overlay = Path(config_dir).expanduser().resolve()
    if not overlay.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
    names = [file.relative_to(overlay) for file in overlay.glob("*/*.yaml")]
    taken = [name for name in names if any((folder / name).is_file() for folder in shipped)]
    if taken:
        raise ConfigError(f"--config-dir {config_dir}: {taken[0]} is already a file of the package; rename yours")
    return [*shipped, overlay]


def group_options(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Return every config group with the options that a command line may choose."""
    options: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            options.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def with_registered_models(options: dict[str, list[str]]) -> dict[str, list[str]]:
    """Add an option for each registered model with its config's defaults, unless a YAML file has
    that name."""
    return {**options, "model": sorted({*options.get("model", []), *components("model")})}


def load_plugins_of(words: Iterable[str]) -> None:
    """Import the packages of `plugins=[...]` in the overrides, for callers that list options
    without composing."""
    load_plugins(_given_plugins(parse_overrides(words)))


def _given_plugins(overrides: list[Override]) -> list[str]:
    for override in overrides:
        if override.key_or_group == "plugins":
            value = override.value()
            if not isinstance(value, list):
                raise ConfigError(f"{override.input_line}: plugins are a list of packages; write plugins=[{value}]")
            return [str(name) for name in value]
    return []


def _split_overrides(
    overrides: list[Override], groups: dict[str, list[str]], has_overlay: bool
) -> tuple[list[str], list[Override]]:
    """Return checked choices of group options, and settings of values."""
    choices, values = [], []
    for override in overrides:
        group, value = override.key_or_group, override.value()
        if group not in groups or isinstance(value, dict):
            values.append(override)
            continue
        if override.is_delete():
            raise ConfigError(
                f"{override.input_line!r}: a group has one option, choose another: {', '.join(groups[group])}"
            )
        for option in value if isinstance(value, list) else [value]:
            if option is not None and str(option) not in groups[group]:
                near = did_you_mean(str(option), groups[group])
                own = "" if has_overlay else "; your own options need --config-dir <your conf folder>"
                raise ConfigError(f"{group}={option}: there is no such option in {', '.join(groups[group])}{near}{own}")
        # Every group is in the defaults list, so `+group=option` can only mean `group=option`.
        choices.append(str(override.input_line).lstrip("+"))
    return choices, values


def _register_schemas(job_type: type, folders: list[Path]) -> None:
    """Store the schemas that YAML files extend: `job` for the verb, `<model>_schema` for a
    model."""
    stored: dict[tuple[str | None, str], type] = {(None, "job"): job_type}
    if not any((folder / f"{CONFIG_NAMES[job_type]}.yaml").is_file() for folder in folders):  # of a plugin
        ConfigStore.instance().store(name=CONFIG_NAMES[job_type], node={"defaults": ["job", "_self_"]})
    files = group_options(folders).get("model", [])
    for kind, config in components("model").items():
        stored["model", f"{kind}_schema"] = config
        if kind not in files:
            stored["model", kind] = config
    repo = ConfigStore.instance().repo
    for (group, name), schema in stored.items():
        known = repo.get(group, {}) if group else repo
        # Building a schema takes milliseconds, and a process may compose many jobs.
        if _stored.get((group, name)) is not schema or f"{name}.yaml" not in known:
            ConfigStore.instance().store(group=group, name=name, node=schema)
            _stored[group, name] = schema


def _explain_composition(error: Exception, groups: dict[str, list[str]]) -> str:
    """Return one line that explains an error inside the YAML files."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        file = str(error).splitlines()[0].split(": Could not find")[0]
        options = groups.get(group, [])
        return f"{file}: there is no {error.missing_cfg_file!r}{did_you_mean(option, options)}"
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if match := re.search(r"Key '(\w+)' not in '(\w+)'", text):
        says = text.split(" full_key:")[0]
        if match[1] == "experiment":
            return (
                "experiment=<option>: the first line of its file is not `# @package _global_`, so its keys are put under "
                "`experiment`, which a job does not have; write that line"
            )
        if says.startswith("In 'experiment/") and match[2] in [kind.__name__ for kind in components("model").values()]:
            return f"{says}: that experiment sets the sizes of another model; choose an experiment for this one"
        cause = error.__context__  # the exception of OmegaConf
        return f"{says}{near_field(cause) if isinstance(cause, OmegaConfBaseException) else ''}"
    if match := re.search(r"(.*)Key (\S+) \((?:bool|int|float)\) is incompatible with \(str\)", text):
        where = match[1].replace("KeyValidationError raised while composing config: ", "")
        return f"{where}a name is text: write it in quotes, '{match[2].lower()}' or as it is written in the data"
    if match := re.search(r"Could not override '([\w/]+)'", text):
        return f"{text}{did_you_mean(match[1], groups)}"
    return re.split(r" (?:full_key:|reference_type=|object_type=)", text)[0]
