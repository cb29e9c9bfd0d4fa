"""List every key of every verb with type, default and meaning, from the schemas and the comments of
conf/*.yaml.

`python docs/write_reference.py` writes docs/reference/ with it, and `-h KEY` prints one key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import yaml

from pipeline.cli.compose import NAME, is_optional, leaves
from pipeline.config.registry import components

# Place of a section's comments if it is not its default option: a page to copy from, or another
# option.
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
    f"data.columns.sequence.{NAME}": "data/histories:columns.sequence.history_dwell",
    "data.negative_sampling": "data/conversions_sampled:negative_sampling",
}
MEANINGS = {
    "plugins": "packages whose import registers components; only on the command line",
    "model.kind": "name of the model, chosen by model=<option>",
}
Folders = Sequence[Path]  # conf/ and the conf folders of the extras


@dataclass(frozen=True)
class Key:
    """A key. `default` is written as in YAML; `meaning` is empty without a comment."""

    name: str
    kind: str
    default: str
    meaning: str
    model: str = ""  # of a key that only this model has


def keys_of(job_type: type, verb: str, conf: Folders) -> list[Key]:
    """Return all keys of a verb, in the order of its schema."""
    found = []
    for name, hint in leaves(job_type):
        default, meaning = _default_and_meaning(name, verb, conf)
        found.append(Key(name, _kind(hint), default, meaning))
    return found


def model_keys(conf: Folders) -> dict[str, list[Key]]:
    """Return model -> its keys."""
    found: dict[str, list[Key]] = {}
    for kind, config in sorted(components("model").items()):
        comments = _comments_of(f"model/{kind}", conf)
        found[kind] = []
        for name, hint in leaves(config):
            default, meaning = comments.get(name, ("", ""))
            key = f"model.{name}"
            found[kind].append(Key(key, _kind(hint), default, meaning or MEANINGS.get(key, "")))
    return found


def explain(name: str, job_type: type, verb: str, conf: Folders) -> list[Key]:
    """Return the key `name`, or all keys of the section `name`."""
    keys = keys_of(job_type, verb, conf)
    if any(key.name.startswith("model.") for key in keys):
        keys += [replace(key, model=kind) for kind, of_model in model_keys(conf).items() for key in of_model]
    wanted = re.compile(re.escape(name).replace(re.escape(NAME), "[^.]+") + r"(\..*)?$")
    exact = [key for key in keys if wanted.match(key.name)]
    # Also a key of a named table or column, tables.cat_3.embedding_dim.
    found = exact or [key for key in keys if re.fullmatch(re.escape(key.name).replace(re.escape(NAME), r"[^.]+"), name)]
    return list(dict.fromkeys(found))


def _default_and_meaning(name: str, verb: str, conf: Folders) -> tuple[str, str]:
    """Return default and meaning: of the key itself, of the same key in `default`, or of its
    mapping."""
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
    if name.startswith("optimizer.dense."):  # has the meaning of the same key for tables
        places.append((SHOWN_IN["optimizer"], "sparse." + name.removeprefix("optimizer.dense.")))
    if name.startswith("data.feature_ids."):
        places.append(("data/default", "ids." + rest.split(f"{NAME}.")[-1]))
    found = [each for file, key in places if (each := _comments_of(file, conf).get(key))]
    if meaning := next((comment for _, comment in found if comment), ""):
        return found[0][0], meaning
    shorter = name.rpartition(".")[0]
    return ("", _default_and_meaning(shorter, verb, conf)[1]) if NAME in name and shorter else ("", "")


def _verb_files(verb: str, conf: Folders) -> list[str]:
    """Return conf/<verb>.yaml and the files that it extends."""
    path = _file(verb, conf)
    if path is None:
        return []
    bases = re.findall(r"(?m)^  - (\w+)$", path.read_text())
    return [verb, *(file for base in bases if base not in ("job", "_self_", verb) for file in _verb_files(base, conf))]


def _file(name: str, conf: Folders) -> Path | None:
    """Return <name>.yaml in the first folder that has it."""
    return next((path for folder in conf if (path := folder / f"{name}.yaml").is_file()), None)


def _comments_of(name: str, conf: Folders) -> dict[str, tuple[str, str]]:
    path = _file(name, conf)
    return {} if path is None else _comments(path)


@lru_cache(maxsize=256)
def _comments(path: Path) -> dict[str, tuple[str, str]]:
    """Return dotted key -> (value as written, comment) of one of our YAML files."""
    lines = path.read_text().splitlines()
    found: dict[str, tuple[str, str]] = {}

    def walk(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            name, line, end = f"{prefix}{key.value}", key.start_mark.line, key.end_mark.column + 1
            if value.start_mark.line == value.end_mark.line == line:
                end = value.end_mark.column
            text, comment = lines[line][key.end_mark.column + 1 : end], lines[line][end:].partition("#")[2]
            below = line + 1  # a comment may continue below its line
            while below < len(lines) and lines[below].startswith("    ") and lines[below].strip().startswith("#"):
                comment, below = f"{comment.strip()} {lines[below].strip()[1:].strip()}", below + 1
            found[name] = (text.strip(), comment.strip())
            if isinstance(value, yaml.MappingNode):
                walk(value, f"{name}.")

    if isinstance(root := yaml.compose("\n".join(lines), Loader=yaml.SafeLoader), yaml.MappingNode):
        walk(root, "")
    return found


def _kind(hint: Any) -> str:
    if is_optional(hint):
        return f"{_kind(next(part for part in get_args(hint) if part is not NoneType))} or null"
    if isinstance(hint, UnionType):
        return " or ".join(map(_kind, get_args(hint)))
    if get_origin(hint) is list:
        return f"list of {_kind(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"mapping to {_kind(get_args(hint)[1])}"
    return {
        "str": "text",
        "int": "whole number",
        "float": "number",
        "bool": "true or false",
        "Any": "text, list or null",
    }.get(getattr(hint, "__name__", ""), "section")
