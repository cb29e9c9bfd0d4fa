"""Compose conf/*.yaml and command-line overrides into a typed job with Hydra's compose API and
one-line errors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.jobs.evaluate import CHOSEN_STEPS
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import components, from_extra, load_plugins, missing_plugins
from pipeline.config.saved_jobs import first_line, instantiate, moved_hint, near_field
from pipeline.runtime.errors import ConfigError, did_you_mean, nearest
from pipeline.runtime.logs import get_logger

NAME = "<name>"  # represents a key of a mapping
# the key that a hint suggests for a word without a key
TAKES_A_WORD = ("experiment", "source", "run", "artifact", "registry")
# Characters that Hydra's keys cannot contain, but names and patterns of columns can:
# tables.cat_*.embedding_dim=8, tables.user id.embedding_dim=8
SIGN = re.compile(r"[^A-Za-z0-9_.@/+~\-\[\]{}\"'$]")
RANGE = re.compile(r"\{[^{}\[\],:'\"$\\]+\.\.[^{}\[\],:'\"$\\]+\}")  # source=clicks/dt={2026-11-01..2026-11-07}
# A list without quotes that has an entry with an equals sign, which Hydra cannot read:
# retry=[dt=2026-11-20]
ASSIGNED = re.compile(r"\[[^\[\]{}'\"$\\]*=[^\[\]{}'\"$\\]*\]")
ENCODED = re.compile(r"__x([0-9a-f]+)__")


def parse_overrides(argv: Iterable[str], keys: Iterable[str] = ()) -> list[Override]:
    """Return the words as Hydra reads them. `keys` of the job are used for hints about words
    without a key. Raises ConfigError if a word is not `key=value`, has several values, or has an
    unreadable value."""
    parser = OverridesParser.create()
    overrides = []
    for word in argv:
        override = _parse_word(parser, word, keys)
        if override.is_sweep_override():
            raise ConfigError(
                f"{word!r} has several values: write a list as key=[a,b]; `python -m pipeline sweep` tries several values"
            )
        overrides.append(override)
    return overrides


def _parse_word(parser: OverridesParser, word: str, keys: Iterable[str]) -> Override:
    """Read one word. An unreadable value that is not a list, mapping or quoted text is used as
    text. The same holds for a list's entry with `=`."""
    key, equals, value = word.partition("=")
    if not equals and not word.startswith("~"):
        named = next((f"{each}={word}" for each in TAKES_A_WORD if each in keys), "key=value")
        is_key = word.partition(".")[0] in keys
        raise ConfigError(f"{word!r} is not key=value; write {f'{word}=<value>' if is_key else named}")
    key = SIGN.sub(lambda sign: f"__x{ord(sign[0]):x}__", key)
    plain = [f'{key}="{value}"'] if value == "," or not set(RANGE.sub("", value)) & set("[]{}'\"$,\\") else []
    if ASSIGNED.fullmatch(value):
        entries = [entry.strip() for entry in value[1:-1].split(",")]
        entries = [f'"{entry}"' if "=" in entry else entry for entry in entries]
        plain = [f"{key}=[{','.join(entries)}]"]
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
        return "a key consists of names and dots"
    if any(value.count(first) != value.count(last) for first, last in ("[]", "{}")) or value.count('"') % 2:
        return "a bracket or a quote in it is not closed"
    if re.search(r"[{,]\s*[\"'][^\"']*[\"']\s*:", value):
        return "write names in braces without quotes, {name: value}"
    return "quote it as 'key=\"value\"' if it is text"


def apply_override(config: DictConfig, job_type: type, override: Override) -> None:
    """Set one value. A missing table, feature or section is created; an unknown field is an error.
    Hydra would require a `+` for new tables, and then accept and drop any misspelled field."""
    key, value = override.key_or_group, override.value()
    if override.is_delete() or override.package is not None:
        raise ConfigError(
            f"{override.input_line!r}: a job's keys are fixed, they cannot be deleted or moved; set a value"
        )
    _add_sections(config, job_type, key)
    if isinstance(value, list) and _field_type(job_type, key) == list[str]:
        value = _as_written(value, str(override.input_line))
    if isinstance(value, dict):
        value = _with_text_keys(value, str(override.input_line))
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        hint = f"; which={value} chooses that step" if key == "step" and value in CHOSEN_STEPS else near_field(error)
        raise ConfigError(f"{override.input_line}: {first_line(error)}{hint}") from None


def _field_type(job_type: type, key: str) -> Any:
    """Return the declared type of a key of nested dataclasses, None for another key."""
    kind: Any = job_type
    for name in key.split("."):
        if not dataclasses.is_dataclass(kind) or name not in (hints := get_type_hints(kind)):
            return None
        kind = hints[name]
    return kind


def _as_written(values: list[Any], line: str) -> list[Any]:
    """Return text for the words of a list that Hydra takes for null, true or numbers: [NULL, NaN, 007]."""
    if all(isinstance(value, str) for value in values):
        return values
    words = [word.strip() for word in line.partition("=")[2].strip()[1:-1].split(",")]
    if len(words) != len(values):  # a quoted word holds a comma
        return values
    return [value if isinstance(value, str) else word for value, word in zip(values, words, strict=True)]


def _with_text_keys(values: dict[Any, Any], line: str) -> dict[str, Any]:
    """Convert keys to text, {1: 0, true: 1}: a job's mappings have names, which have no quotes on
    the command line."""
    texts = {}
    for key, value in values.items():
        spelled = re.search(rf"[{{,]\s*({re.escape(str(key))})\s*:", line, re.IGNORECASE)
        texts[spelled[1] if spelled else str(key)] = _with_text_keys(value, line) if isinstance(value, dict) else value
    return texts


def _add_sections(config: DictConfig, job_type: type, key: str) -> None:
    """Walk `key` through the types of the job. Create entries of mappings and optional sections on
    the way."""
    node, kind = config, job_type
    walked: list[str] = []
    for name in key.split("."):
        walked.append(name)
        if dataclasses.is_dataclass(kind):
            fields = {field.name for field in dataclasses.fields(kind)}
            if name not in fields:
                _raise_unknown_key(job_type, key, walked, fields if len(walked) > 1 else first_words(job_type))
            kind = get_type_hints(kind)[name]
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif get_origin(kind) is list and name.isdigit():
            kind = get_args(kind)[0]
        else:
            raise ConfigError(f"unknown key {key!r}: {'.'.join(walked[:-1])} is a single value, not a section")
        kind = next((part for part in get_args(kind) if part is not NoneType), kind) if is_optional(kind) else kind
        if dataclasses.is_dataclass(kind):
            if OmegaConf.is_missing(node, name) or node.get(name) is None:
                with open_dict(node):
                    node[name] = OmegaConf.structured(kind)
            node = node[name]
            kind = OmegaConf.get_type(node) or kind  # the class of the model is a subclass
        elif get_origin(kind) is dict:
            with open_dict(node):
                node = node.setdefault(name, {})


def own_key(key: str, job_type: type) -> str:
    """Return the job's own key for a key that has one name on all command lines. train and prepare
    name a data set by data.path, and a verb of a run has no section data.
    """
    fields = get_type_hints(job_type)
    own = {"data.path": "data_path", "from": "from_run"}.get(key, key)
    return own if own in fields and key.partition(".")[0] not in fields else key


def first_words(job_type: type) -> set[str]:
    """Return the first words of a verb's overrides: its fields (most groups are fields), and the
    other groups."""
    fields = {field.name for field in dataclasses.fields(job_type)}
    others = {"experiment", "early_stop", "debug"} if issubclass(job_type, TrainJob) else set()
    return fields | others | ({"from"} if job_type is TrainJob else set())


def _raise_unknown_key(job_type: type, key: str, walked: list[str], choices: set[str]) -> NoReturn:
    """Suggest the nearest key of the same section, or the same name elsewhere in the job, or
    list the section's keys."""
    *section, name = walked
    last = key.rpartition(".")[2]
    if moved := moved_hint(key):
        hint = moved
    elif near := nearest(name, sorted(choices), 0.6):
        hint = f"did you mean {'.'.join([*section, near])!r}?"
    elif elsewhere := [key for key, _ in leaves(job_type) if key.rpartition(".")[2] == last and NAME not in key]:
        hint = f"did you mean {' or '.join(repr(key) for key in elsewhere)}?"
    else:
        hint = f"{'.'.join(section) or 'a job'} has {', '.join(sorted(choices))}"
    raise ConfigError(f"unknown key {'.'.join(walked)!r}; {hint}")


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
    run = next((str(each.value()) for each in parsed if each.key_or_group == "from"), None)
    groups = with_registered_models(group_options(folders))
    # A verb's own field may have a group's name and hold text: evaluate's tables=own.
    words = {name for name, kind in get_type_hints(job_type).items() if kind is str}
    own_groups = {group: options for group, options in groups.items() if group in first_words(job_type) - words}
    choices, values = _split_overrides(parsed, own_groups, config_dir is not None)
    if run is not None and "from_run" in get_type_hints(job_type):
        if job_type is not TrainJob:
            raise ConfigError(f"from={run} is for train, which trains the run in that folder again")
        if choices:
            raise ConfigError(f"from={run} takes its config from that run: set single keys instead of {choices[0]}")
        config = from_extra("config_of_run", "from")(run)
        values = [override for override in values if override.key_or_group != "from"]
    else:
        _register_schemas(job_type, folders)
        try:
            config = _compose_choices(job_type, folders, _without_keys_of_other_models(folders, choices))
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(_explain_composition(error, groups)) from None
        except ValueError as error:  # Hydra raises it for null if a YAML file overrides the group
            nulls = ", ".join(choice for choice in choices if choice.endswith("=null"))
            raise ConfigError(
                f"{nulls or ' '.join(choices)}: {error}; choose an option, or leave the key out"
            ) from None
    for line in _replaced_by_experiment(folders, choices, {override.key_or_group for override in values}):
        logger.warning(line)
    fields = get_type_hints(job_type)
    for override in values:
        override.key_or_group = own_key(override.key_or_group, job_type)
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


def leaves(kind: type, prefix: str = "", above: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each key of a schema with its type. <name> represents a key of a mapping."""
    for field in dataclasses.fields(kind):
        hint = get_type_hints(kind)[field.name]
        inner = next((part for part in get_args(hint) if part is not NoneType), hint) if is_optional(hint) else hint
        name = f"{prefix}{field.name}"
        if get_origin(inner) is dict and dataclasses.is_dataclass(get_args(inner)[1]):
            inner, name = get_args(inner)[1], f"{name}.{NAME}"
        if dataclasses.is_dataclass(inner) and inner not in above:
            assert isinstance(inner, type)
            yield from leaves(inner, f"{name}.", (*above, inner))
        else:
            yield name, hint


def is_optional(hint: object) -> bool:
    return get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
