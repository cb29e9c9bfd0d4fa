"""Compose conf/*.yaml and command-line overrides into a typed job by Hydra's compose API, with one-line errors."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.jobs.evaluate import CHOSEN_STEPS
from pipeline.config.jobs.names import CONFIG_NAMES
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import components, load_plugins, missing_plugins
from pipeline.config.saved_jobs import first_line, instantiate, near_field
from pipeline.runtime.errors import ConfigError, did_you_mean, nearest

Job = TypeVar("Job")
_stored: dict[tuple[str | None, str], type] = {}  # (group, name) -> schema, of those in Hydra's store
TAKES_A_WORD = ("experiment", "source", "run", "artifact", "registry")  # what a word without a key is taken to be for
# What Hydra's keys may not hold, and columns' names and patterns do: tables.cat_*.embedding_dim=8, tables.user id.embedding_dim=8
SIGN = re.compile(r"[^A-Za-z0-9_.@/+~\-\[\]{}\"'$]")
ENCODED = re.compile(r"__x([0-9a-f]+)__")


def compose_job(job_type: type[Job], overrides: Iterable[str], config_dir: str | None = None) -> Job:
    """Compose conf/<verb>.yaml with the `overrides` into a job; `config_dir` overlays a user's own conf folder.

    Raises:
        ConfigError: one line that names the key or option and the nearest valid one.
    """
    folders = config_folders(config_dir)
    parsed = _parse(overrides, _first_words(job_type))
    load_plugins(_given_plugins(parsed))  # first, for what they register are options of groups and types of values
    groups = with_registered_models(group_options(folders))
    # A verb's own field may bear a group's name and hold a word: evaluate's tables=own.
    words = {name for name, kind in get_type_hints(job_type).items() if kind is str}
    own_groups = {group: options for group, options in groups.items() if group in _first_words(job_type) - words}
    choices, values = _split_overrides(parsed, own_groups, len(folders) > 1)
    _register_schemas(job_type, folders)
    try:
        with _for_another_model(folders, choices) as (searched, chosen):
            config = _compose_choices(job_type, searched, chosen)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain_composition(error, job_type, groups)) from None
    except ValueError as error:  # Hydra's own, for null where a YAML file overrides the group
        nulls = ", ".join(choice for choice in choices if choice.endswith("=null"))
        raise ConfigError(f"{nulls or ' '.join(choices)}: {error}; choose an option, or leave the key out") from None
    for override in values:
        if override.key_or_group == "plugins" and "plugins" not in get_type_hints(job_type):
            continue  # of a plugin's verb, whose job need not tell what it came from
        _apply(config, job_type, override)
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
    load_plugins(_given_plugins(_parse(words)))


def _given_plugins(overrides: list[Override]) -> list[str]:
    for override in overrides:
        if override.key_or_group == "plugins":
            value = override.value()
            if not isinstance(value, list):
                raise ConfigError(f"{override.input_line}: plugins are a list of packages; write plugins=[{value}]")
            return [str(name) for name in value]
    return []


def _parse(argv: Iterable[str], keys: Iterable[str] = ()) -> list[Override]:
    """`keys`: of the job, for a hint where a word has none."""
    parser = OverridesParser.create()
    overrides = []
    for word in argv:
        override = _parse_word(parser, word, keys)
        if override.is_sweep_override():
            raise ConfigError(
                f"{word!r} names several values: a list is key=[a,b]; `python -m pipeline.sweep` tries several values"
            )
        overrides.append(override)
    return overrides


def _parse_word(parser: OverridesParser, word: str, keys: Iterable[str]) -> Override:
    """A value that is no list, mapping or quoted text and that Hydra cannot read is the text that it is."""
    key, equals, value = word.partition("=")
    if not equals and not word.startswith("~"):
        named = next((f"{each}={word}" for each in TAKES_A_WORD if each in keys), "key=value")
        is_key = word.partition(".")[0] in keys
        raise ConfigError(f"{word!r} is no key=value; write {f'{word}=<value>' if is_key else named}")
    key = SIGN.sub(lambda sign: f"__x{ord(sign[0]):x}__", key)
    plain = [f'{key}="{value}"'] if value == "," or not set(value) & set("[]{}'\"$,\\") else []
    for text in [key + equals + value, *plain]:
        try:
            override = parser.parse_override(text)
        except HydraException:
            continue
        override.key_or_group = ENCODED.sub(lambda sign: chr(int(sign[1], 16)), override.key_or_group)
        override.input_line = word
        return override
    raise ConfigError(f"cannot read {word!r}: {_why_unreadable(*word.partition('=')[::2])}")


def _why_unreadable(key: str, value: str) -> str:
    if set(key) & set("[]{}\"'$"):
        return "a key is names and dots"
    if any(value.count(first) != value.count(last) for first, last in ("[]", "{}")) or value.count('"') % 2:
        return "a bracket or a quote in it is not closed"
    if re.search(r"[{,]\s*[\"'][^\"']*[\"']\s*:", value):
        return "names in braces have no quotes, {name: value}"
    return "quote it as 'key=\"value\"' if it is text"


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


def _apply(config: DictConfig, job_type: type, override: Override) -> None:
    """Set one value. A table, feature or section that is not there yet comes to be; an unknown field never does.

    Hydra would want a `+` for new tables, and with it would accept, and drop, any misspelt field.
    """
    key, value = override.key_or_group, override.value()
    if override.is_delete() or override.package is not None:
        raise ConfigError(
            f"{override.input_line!r}: a job's keys are fixed, they cannot be deleted or moved; set a value"
        )
    _make_room(config, job_type, key)
    if isinstance(value, dict):
        value = _with_text_keys(value, str(override.input_line))
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        hint = f"; which={value} chooses that step" if key == "step" and value in CHOSEN_STEPS else near_field(error)
        raise ConfigError(f"{override.input_line}: {first_line(error)}{hint}") from None


def _with_text_keys(values: dict[Any, Any], line: str) -> dict[str, Any]:
    """{1: 0, true: 1}: a job's mappings are by names, which have no quotes on the command line."""
    texts = {}
    for key, value in values.items():
        spelled = re.search(rf"[{{,]\s*({re.escape(str(key))})\s*:", line, re.IGNORECASE)
        texts[spelled[1] if spelled else str(key)] = _with_text_keys(value, line) if isinstance(value, dict) else value
    return texts


def _make_room(config: DictConfig, job_type: type, key: str) -> None:
    """Walk `key` through the types of the job, adding entries of mappings and optional sections on the way."""
    node, kind = config, job_type
    walked: list[str] = []
    for name in key.split("."):
        walked.append(name)
        if dataclasses.is_dataclass(kind):
            fields = {field.name for field in dataclasses.fields(kind)}
            if name not in fields:
                _raise_unknown_key(job_type, key, walked, fields if len(walked) > 1 else _first_words(job_type))
            kind = get_type_hints(kind)[name]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif get_origin(kind) is list and name.isdigit():
            kind = get_args(kind)[0]
        else:
            raise ConfigError(f"unknown key {key!r}: {'.'.join(walked[:-1])} is a single value, not a section")
        kind = next((part for part in get_args(kind) if part is not NoneType), kind) if _is_optional(kind) else kind
        if dataclasses.is_dataclass(kind):
            if OmegaConf.is_missing(node, name) or node.get(name) is None:
                with open_dict(node):
                    node[name] = OmegaConf.structured(kind)
            node = node[name]
            kind = OmegaConf.get_type(node) or kind  # the model is of a subclass
        elif get_origin(kind) is dict:
            node = node[name]


def _is_optional(kind: Any) -> bool:
    return NoneType in get_args(kind)


def _first_words(job_type: type) -> set[str]:
    """What a verb's overrides may begin with: its fields (most groups are fields), and the groups that are none."""
    fields = {field.name for field in dataclasses.fields(job_type)}
    return fields | {"experiment", "early_stop", "debug"} if issubclass(job_type, TrainJob) else fields


def _raise_unknown_key(job_type: type, key: str, walked: list[str], choices: set[str]) -> NoReturn:
    """Name the nearest key of the same section, else the same name elsewhere in the job, else all of the section."""
    *section, name = walked
    last = key.rpartition(".")[2]
    if (joined := key.replace(".", "_")) in choices:  # data.path, where the verb has data_path
        hint = f"did you mean {joined!r}?"
    elif near := nearest(name, sorted(choices), 0.6):
        hint = f"did you mean {'.'.join([*section, near])!r}?"
    elif elsewhere := [key for key in _leaf_keys(job_type) if key.rpartition(".")[2] == last]:
        hint = f"did you mean {' or '.join(repr(key) for key in elsewhere)}?"
    else:
        hint = f"{'.'.join(section) or 'a job'} has {', '.join(sorted(choices))}"
    raise ConfigError(f"unknown key {'.'.join(walked)!r}; {hint}")


def _leaf_keys(kind: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(kind):
        hint = get_type_hints(kind)[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _leaf_keys(hint, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _explain_composition(error: Exception, job_type: type, groups: dict[str, list[str]]) -> str:
    """One line for what is wrong inside the YAML files."""
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
        return f"{says}{_near_field_of(match[1], match[2], job_type)}"
    if match := re.search(r"(.*)Key (\S+) \((?:bool|int|float)\) is incompatible with \(str\)", text):
        where = match[1].replace("KeyValidationError raised while composing config: ", "")
        return f"{where}a name is text: write it in quotes, '{match[2].lower()}' or as the data spells it"
    if match := re.search(r"Could not override '([\w/]+)'", text):
        return f"{text}{did_you_mean(match[1], groups)}"
    return re.split(r" (?:full_key:|reference_type=|object_type=)", text)[0]


def _near_field_of(name: str, class_name: str, job_type: type) -> str:
    for kind in [*_config_classes(job_type), *components("model").values()]:
        if kind.__name__ == class_name:
            return did_you_mean(name, [field.name for field in dataclasses.fields(kind)])
    return ""


def _config_classes(kind: Any, above: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Every dataclass that is reachable from a type; one may hold another of its own."""
    if kind in above:
        return
    if dataclasses.is_dataclass(kind):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from _config_classes(hint, (*above, kind))
    for part in get_args(kind):
        yield from _config_classes(part, above)
