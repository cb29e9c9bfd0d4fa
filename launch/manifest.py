"""Write Kubernetes objects as YAML that every YAML reader reads alike."""

from __future__ import annotations

import re
from typing import Any, Optional

import yaml

from pipeline.runtime.errors import LaunchError

# Text without quotes. YAML 1.1, YAML 1.2 and Go's reader disagree on `1e3`, `0o7`, `yes`, `1_000`,
# `12:30`.
_PLAIN = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9_./:=,-]*(?<!:)")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


class _Dumper(yaml.SafeDumper):
    """Write YAML with lists indented as kubectl does. An object that occurs twice is written twice."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(objects: list[dict[str, Any]], comment: str = "") -> str:
    """Return YAML with one document per object. Each line of `comment` comes first, after a #."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    # The width is unlimited, because a long line would be folded, and with it a line break inside a
    # word.
    documents = [yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True) for each in objects]
    return head + "---\n".join(documents)


def patched(objects: list[dict[str, Any]], path: Optional[str]) -> list[dict[str, Any]]:
    """Merge each document of the file `path` into the objects of its kind.

    As in kubectl's strategic merge, mappings are merged, null removes a key, and lists whose
    members have names are merged by name; other lists are replaced. Raises LaunchError if the file
    is invalid.
    """
    if path is None:
        return objects
    try:
        with open(path) as file:
            documents = [each for each in yaml.safe_load_all(file) if each is not None]
    except (OSError, yaml.YAMLError) as error:
        raise LaunchError(f"--patch {path} cannot be read: {' '.join(str(error).split())}") from None
    kinds = [each["kind"] for each in objects]
    for document in documents:
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind not in kinds:
            raise LaunchError(f"--patch {path}: a document is for kind {kind}, but the objects are {', '.join(kinds)}")
        objects = [_merged(each, document) if each["kind"] == kind else each for each in objects]
    return objects


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        kept = {key: _merged(value, new[key]) if key in new else value for key, value in old.items()}
        added = {key: value for key, value in new.items() if key not in old}
        return {key: value for key, value in (kept | added).items() if value is not None}
    if isinstance(old, list) and isinstance(new, list) and _named(old) and _named(new):
        changes = {each["name"]: each for each in new}
        first = [_merged(each, changes.pop(each["name"], {})) for each in old]
        return first + list(changes.values())
    return new


def _named(members: list[Any]) -> bool:
    return all(isinstance(each, dict) and "name" in each for each in members)


def check_letter_first(name: str, whose: str) -> None:
    """Raise LaunchError for a name that begins with a digit, which a Service does not allow."""
    if name[0].isdigit():
        raise LaunchError(f"--name {name}: names of {whose} must begin with a letter; give --name")


def of_kind(api_version: str, kind: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def given(**values: Any) -> dict[str, Any]:
    """Return the mapping without entries whose value is None, "", [] or {}. Values 0 and False are kept."""
    return {key: value for key, value in values.items() if value not in (None, "", [], {})}
