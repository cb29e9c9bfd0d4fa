"""Write Kubernetes objects as YAML that every YAML reader reads alike."""

from __future__ import annotations

import re
from typing import Any

import yaml

# What is left without quotes. YAML 1.1, YAML 1.2 and Go's reader disagree on `1e3`, `0o7`, `yes`, `1_000`, `12:30`.
_PLAIN = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9_./:=,-]*(?<!:)")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


class _Dumper(yaml.SafeDumper):
    """Indents lists within mappings, as kubectl prints them, and repeats an object instead of linking to it."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(objects: list[dict[str, Any]], comment: str = "") -> str:
    """One document an object; `comment` stands above the first, each of its lines behind a #."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    # A line break inside a word would be folded where the line is long: no line is.
    documents = [yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True) for each in objects]
    return head + "---\n".join(documents)


def given(**values: Any) -> dict[str, Any]:
    """The mapping without what is None, "", [] or {}; 0 and False stay."""
    return {key: value for key, value in values.items() if value not in (None, "", [], {})}
