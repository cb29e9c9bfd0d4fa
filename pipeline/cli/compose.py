"""Compose conf/*.yaml and command-line overrides into a typed job by Hydra's compose API, with one-line errors."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipeline.cli.composition_errors import explain_composition
from pipeline.cli.overrides import apply_override, first_words, parse_overrides
from pipeline.config.jobs.names import CONFIG_NAMES
from pipeline.config.registry import components, load_plugins, missing_plugins
from pipeline.config.saved_jobs import instantiate
from pipeline.runtime.errors import ConfigError, did_you_mean

Job = TypeVar("Job")
_stored: dict[tuple[str | None, str], type] = {}  # (group, name) -> schema, of those in Hydra's store


def compose_job(job_type: type[Job], overrides: Iterable[str], config_dir: str | None = None) -> Job:
    """Compose conf/<verb>.yaml with the `overrides` into a job; `config_dir` overlays a user's own conf folder.

    Raises:
        ConfigError: one line that names the key or option and the nearest valid one.
    """
    folders = config_folders(config_dir)
    parsed = parse_overrides(overrides, first_words(job_type))
    load_plugins(_given_plugins(parsed))  # first, for what they register are options of groups and types of values
    groups = with_registered_models(group_options(folders))
    # A verb's own field may bear a group's name and hold a word: evaluate's tables=own.
    words = {name for name, kind in get_type_hints(job_type).items() if kind is str}
    own_groups = {group: options for group, options in groups.items() if group in first_words(job_type) - words}
    choices, values = _split_overrides(parsed, own_groups, len(folders) > 1)
    _register_schemas(job_type, folders)
    try:
        with _for_another_model(folders, choices) as (searched, chosen):
            config = _compose_choices(job_type, searched, chosen)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(explain_composition(error, job_type, groups)) from None
    except ValueError as error:  # Hydra's own, for null where a YAML file overrides the group
        nulls = ", ".join(choice for choice in choices if choice.endswith("=null"))
        raise ConfigError(f"{nulls or ' '.join(choices)}: {error}; choose an option, or leave the key out") from None
    for override in values:
        if override.key_or_group == "plugins" and "plugins" not in get_type_hints(job_type):
            continue  # of a plugin's verb, whose job need not tell what it came from
        apply_override(config, job_type, override)
    job = instantiate(config, job_type)
    if missing := missing_plugins(getattr(job, "plugins", [])):
        raise ConfigError(
            f"plugins={missing[0]} comes from a YAML file, too late to load it; give plugins=[...] as an override"
        )
    return job


@contextmanager
def _for_another_model(folders: list[Path], choices: list[str]) -> Iterator[tuple[list[Path], list[str]]]:
    """Folders and choices; where an experiment is given another model, its keys of `model` that this one lacks are left out."""
    chosen = dict(choice.partition("=")[::2] for choice in choices)
    kind = components("model").get(chosen.get("model", ""))
    files = [folder / "experiment" / f"{chosen.get('experiment', '')}.yaml" for folder in folders]
    file = next((each for each in files if each.is_file()), None)
    values = yaml.safe_load(file.read_text()) if file is not None and kind is not None else None
    section = values.get("model") if isinstance(values, dict) else None
    known = {field.name for field in dataclasses.fields(kind)} if kind is not None else set()
    if file is None or not isinstance(values, dict) or not isinstance(section, dict) or section.keys() <= known:
        yield folders, choices
        return
    with tempfile.TemporaryDirectory() as staged:
        head = "".join(line + "\n" for line in file.read_text().splitlines() if line.startswith("#"))
        option = f"{file.stem}__{chosen['model']}"
        (Path(staged) / "experiment").mkdir()
        values["model"] = {key: value for key, value in section.items() if key in known}
        (Path(staged) / "experiment" / f"{option}.yaml").write_text(head + yaml.safe_dump(values, sort_keys=False))
        changed = [f"experiment={option}" if choice.startswith("experiment=") else choice for choice in choices]
        yield [*folders, Path(staged)], changed


def _compose_choices(job_type: type, folders: list[Path], choices: list[str]) -> DictConfig:
    """What the YAML files make of the chosen options, interpolations unresolved; the caller's own copy.

    Hydra takes half a second of CPU for it, so a process that composes many jobs (a notebook, a sweep, the tests) does
    it once for the same choices, until a file of conf/ changes or a model is registered. An overlay is always read anew.
    """
    if len(folders) > 1:
        return _compose_by_hydra(CONFIG_NAMES[job_type], folders, choices)
    files = [(str(file), file.stat()) for pattern in ("*.yaml", "*/*.yaml") for file in folders[0].glob(pattern)]
    written = frozenset((file, stat.st_ino, stat.st_mtime_ns, stat.st_size) for file, stat in files)
    models = frozenset(components("model").items())
    return deepcopy(_composed(job_type, folders[0], tuple(choices), written, models))


@lru_cache(maxsize=64)
def _composed(job_type: type, folder: Path, choices: tuple[str, ...], *_depends_on: frozenset[Any]) -> DictConfig:
    return _compose_by_hydra(CONFIG_NAMES[job_type], [folder], list(choices))


def _compose_by_hydra(config_name: str, folders: list[Path], choices: list[str]) -> DictConfig:
    with initialize_config_dir(str(folders[0]), version_base="1.3", job_name=config_name):
        searchpath = ["hydra.searchpath=[" + ",".join(f"'file://{folder}'" for folder in folders[1:]) + "]"]
        return compose(config_name, [*searchpath, *choices])


def config_folders(config_dir: str | None = None) -> list[Path]:
    """Where YAML is looked for: our conf/, then the user's overlay, which adds options and replaces none.

    Ours is conf/ beside the package where setup.cfg is too (a checkout, or the copy of one that TorchX makes as
    a job directory; under an editable install `pkg://pipeline.conf` would lead back to the checkout), else the
    installed pipeline/conf.
    """
    package = Path(__file__).resolve().parents[1]
    own = package.parent / "conf" if (package.parent / "setup.cfg").is_file() else package / "conf"
    if not own.is_dir():
        raise ConfigError(f"there is no conf folder at {own}: reinstall the package")
    if config_dir is None:
        return [own]
    overlay = Path(config_dir).expanduser().resolve()
    if not overlay.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
    taken = [
        file.relative_to(overlay) for file in overlay.glob("*/*.yaml") if (own / file.relative_to(overlay)).is_file()
    ]
    if taken:
        raise ConfigError(f"--config-dir {config_dir}: {taken[0]} is a name that the package has; give yours another")
    return [own, overlay]


def group_options(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Every config group with the options that a command line may choose."""
    options: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            options.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def with_registered_models(options: dict[str, list[str]]) -> dict[str, list[str]]:
    """A registered model is an option of its own name, with the values that its config has, where no YAML file gives others."""
    return {**options, "model": sorted({*options.get("model", []), *components("model")})}


def load_plugins_of(words: Iterable[str]) -> None:
    """Import what `plugins=[...]` among the overrides names, for whoever lists options and composes nothing."""
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
    """Choices of group options, checked, and settings of values."""
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
                own = "" if has_overlay else "; an option of your own needs --config-dir <your conf folder>"
                raise ConfigError(f"{group}={option}: there is no such option in {', '.join(groups[group])}{near}{own}")
        # Every group stands in the defaults list, so `+group=option` can only mean `group=option`.
        choices.append(str(override.input_line).lstrip("+"))
    return choices, values


def _register_schemas(job_type: type, folders: list[Path]) -> None:
    """`job` is what the verb's YAML starts from; a model's YAML names the schema that types it."""
    _store(None, "job", job_type)
    if not any((folder / f"{CONFIG_NAMES[job_type]}.yaml").is_file() for folder in folders):
        # A plugin's verb.
        ConfigStore.instance().store(name=CONFIG_NAMES[job_type], node={"defaults": ["job", "_self_"]})
    files = group_options(folders).get("model", [])
    for kind, model_config in components("model").items():
        _store("model", f"{kind}_schema", model_config)
        if kind not in files:
            _store("model", kind, model_config)


def _store(group: str | None, name: str, schema: type) -> None:
    """Into Hydra's store, unless it is there: a schema takes milliseconds to build, and a process may compose many jobs."""
    store = ConfigStore.instance()
    names = store.repo.get(group, {}) if group else store.repo
    if _stored.get((group, name)) is not schema or f"{name}.yaml" not in names:
        store.store(group=group, name=name, node=schema)
        _stored[group, name] = schema
