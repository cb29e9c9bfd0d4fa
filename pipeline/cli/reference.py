"""List every key of every verb with type, default and meaning: from the schemas, and from the comments of conf/*.yaml.

`python docs/write_reference.py` writes docs/reference/ by it, and `-h KEY` prints what it says of one key.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pipeline.config.registry import components

NAME = "<name>"
# Where a section's comments are, where that is not its default option: a page to copy from, or the option that has them.
SHOWN_IN = {
    "tables": "tables/from_data",
    f"tables.{NAME}": "tables/all_settings:default",
    "warm_start": "warm_start/from_run",
    "planner": "planner/search",
    "hardware": "hardware/auto",
    "optimizer": "optimizer/rowwise_adagrad",
    "schedule": "schedule/constant",
    "comms": "comms/fp32",
    "vocabularies": "vocabularies/extend",
    "data.synthetic": "data/quickstart:synthetic",
    "data.user_item": "data/user_item:user_item",
    "data.conversions": "data/conversions:conversions",
    "data.histories": "data/histories:histories",
    "data.tags": "data/tags:tags",
    f"data.columns.sequence.{NAME}": "data/histories:columns.sequence.history_dwell",
    "data.negative_sampling": "data/conversions_sampled:negative_sampling",
}
MEANINGS = {
    "plugins": "packages whose import registers components; given on the command line alone",
    "model.kind": "which model: chosen by model=<option>",
}
LINE = re.compile(r"^(\s*)([\w.<>*-]+):(?:\s+(.*))?$")


@dataclass(frozen=True)
class Key:
    """`default` as YAML has it; `meaning` is empty where no comment says it."""

    name: str
    kind: str
    default: str
    meaning: str


def keys_of(job_type: type, verb: str, conf: Path) -> list[Key]:
    """All that can be set for a verb, in the order of its schema."""
    found = []
    for name, hint in _leaves(job_type):
        default, meaning = _said_of(name, verb, conf)
        found.append(Key(name, _kind(hint), default, meaning))
    return found


def model_keys(conf: Path) -> dict[str, list[Key]]:
    """Model -> its keys."""
    found = {}
    for kind, config in sorted(components("model").items()):
        said = _comments(conf / "model" / f"{kind}.yaml") if (conf / "model" / f"{kind}.yaml").is_file() else {}
        keys = [(name, hint, *said.get(name, ("", ""))) for name, hint in _leaves(config)]
        found[kind] = [
            Key(f"model.{name}", _kind(hint), default, meaning or MEANINGS.get(f"model.{name}", ""))
            for name, hint, default, meaning in keys
        ]
    return found


def explain(name: str, job_type: type, verb: str, conf: Path) -> list[Key]:
    """The keys that `name` is, or is a section of."""
    keys = keys_of(job_type, verb, conf)
    if any(key.name.startswith("model.") for key in keys):
        keys += [key for of_model in model_keys(conf).values() for key in of_model]
    wanted = re.compile(re.escape(name).replace(re.escape(NAME), "[^.]+") + r"(\..*)?$")
    exact = list(dict.fromkeys(key for key in keys if wanted.match(key.name)))
    return exact or list(dict.fromkeys(key for key in keys if _fits(key.name, name)))


def _fits(key: str, name: str) -> bool:
    """Whether `name` is a key of a table, say, where `key` has <name> for its own."""
    pattern = re.escape(key).replace(re.escape(NAME), r"[^.]+")
    return re.fullmatch(pattern, name) is not None


def _said_of(name: str, verb: str, conf: Path) -> tuple[str, str]:
    """Default and meaning, of the key itself, of its like in `default`, or of the mapping that it is in."""
    if name in MEANINGS:
        return "", MEANINGS[name]
    section, _, rest = name.partition(".")
    places: list[tuple[str, str]] = []
    for prefix, place in SHOWN_IN.items():
        if name.startswith(f"{prefix}."):
            file, _, inside = place.partition(":")
            inner = name.removeprefix(f"{prefix}.").replace(NAME, "default", 1)
            places.insert(0, (file, f"{inside}.{inner}" if inside else inner))
    places.append((f"{section}/default", rest))
    places += [(each, name) for each in _verb_files(verb, conf)]
    if name.startswith("optimizer.dense."):  # means what it does for tables
        places.append((SHOWN_IN["optimizer"], "sparse." + name.removeprefix("optimizer.dense.")))
    if name.startswith("data.feature_ids."):
        places.append(("data/default", "ids." + rest.split(f"{NAME}.")[-1]))
    said = [_comments(conf / f"{file}.yaml").get(key) for file, key in places if (conf / f"{file}.yaml").is_file()]
    found = [each for each in said if each is not None]
    if meaning := next((comment for _, comment in found if comment), ""):
        return found[0][0], meaning
    shorter = name.rpartition(".")[0]
    return ("", _said_of(shorter, verb, conf)[1]) if NAME in name and shorter else ("", "")


def _verb_files(verb: str, conf: Path) -> list[str]:
    """conf/<verb>.yaml and those that it starts from."""
    path = conf / f"{verb}.yaml"
    if not path.is_file():
        return []
    bases = re.findall(r"(?m)^  - (\w+)$", path.read_text())
    return [verb, *(file for base in bases if base not in ("job", "_self_", verb) for file in _verb_files(base, conf))]


@lru_cache(maxsize=256)
def _comments(path: Path) -> dict[str, tuple[str, str]]:
    """Dotted key -> (value as it is written, comment), of a YAML file of ours; a comment may go on below its line."""
    found: dict[str, tuple[str, str]] = {}
    anchors: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    last = ""
    for line in path.read_text().splitlines():
        if line.strip().startswith("#") and last and line.startswith("    "):
            value, comment = found[last]
            found[last] = (value, f"{comment} {line.strip().lstrip('# ')}")
        match = LINE.match(line)
        if match is None:
            continue
        value, comment = _parts(match[3] or "")
        above = [pair for pair in above if pair[0] < len(match[1])]
        last = ".".join([*(name for _, name in above), match[2]])
        above.append((len(match[1]), match[2]))
        found[last] = ("" if value.startswith("&") else value, comment)
        if value.startswith("&"):
            anchors[value[1:]] = last
        elif value.startswith("*"):
            begin = f"{anchors[value[1:]]}."
            found |= {f"{last}.{key.removeprefix(begin)}": said for key, said in found.items() if key.startswith(begin)}
    return found


def _parts(text: str) -> tuple[str, str]:
    """Value and comment of what stands behind a key."""
    match = re.match(r'((?:"[^"]*"|[^#"])*?)(?:(?:^|\s+)#\s*(.*))?$', text)
    assert match is not None, text
    return match[1].strip(), (match[2] or "").strip()


def _leaves(kind: type, prefix: str = "", above: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(kind):
        hint = get_type_hints(kind)[field.name]
        inner = next((part for part in get_args(hint) if part is not NoneType), hint) if _is_optional(hint) else hint
        name = f"{prefix}{field.name}"
        if get_origin(inner) is dict and dataclasses.is_dataclass(get_args(inner)[1]):
            inner, name = get_args(inner)[1], f"{name}.{NAME}"
        if dataclasses.is_dataclass(inner) and inner not in above:
            assert isinstance(inner, type)
            yield from _leaves(inner, f"{name}.", (*above, inner))
        else:
            yield name, hint


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)


def _kind(hint: Any) -> str:
    if _is_optional(hint):
        return f"{_kind(next(part for part in get_args(hint) if part is not NoneType))} or null"
    if get_origin(hint) is list:
        return f"list of {_kind(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"mapping to {_kind(get_args(hint)[1])}"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
        getattr(hint, "__name__", ""), "section"
    )
