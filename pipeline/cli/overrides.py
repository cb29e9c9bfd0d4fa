"""Read `key=value` words in Hydra's syntax, and set the values in a composed job by the types of
its fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pipeline.cli.reference import NAME, is_optional, leaves
from pipeline.config.jobs.evaluate import CHOSEN_STEPS
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import first_line, moved_hint, near_field
from pipeline.runtime.errors import ConfigError, nearest

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
    if isinstance(value, dict):
        value = _with_text_keys(value, str(override.input_line))
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        hint = f"; which={value} chooses that step" if key == "step" and value in CHOSEN_STEPS else near_field(error)
        raise ConfigError(f"{override.input_line}: {first_line(error)}{hint}") from None


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
            node = node[name]


def first_words(job_type: type) -> set[str]:
    """Return the first words of a verb's overrides: its fields (most groups are fields), and the
    other groups."""
    fields = {field.name for field in dataclasses.fields(job_type)}
    return fields | {"experiment", "early_stop", "debug"} if issubclass(job_type, TrainJob) else fields


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
