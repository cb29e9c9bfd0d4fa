"""Read the words of a command line that stand without `key=`: a command, then what it is about.

    python -m pipeline checkpoints show runs/quickstart 300        is   command=show run=runs/quickstart step=300
    python -m pipeline registry rollback registry/q v000012        is   command=rollback registry=registry/q version=v000012

Flags and key=value words may stand anywhere among them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.cli.command_line import split_flags
from pipeline.runtime.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Command:
    """words: the keys that its words set, in order. patterns: key -> what a word must look like to set that key.

    A word that fits a pattern sets that key wherever it stands, if another word or setting gives the first key. run: does it
    without a job; its words are then required, for no setting can stand for them. many: a key that takes all words beyond
    those, as a list.
    """

    name: str
    words: tuple[str, ...] = ()
    patterns: Mapping[str, str] = field(default_factory=dict)
    run: Callable[[Words], None] | None = None
    many: str = ""

    def usage(self) -> str:
        words = [*self.words, *([f"{self.many}..."] if self.many else [])]
        return " ".join([self.name, *(word.upper() for word in words)])


@dataclass(frozen=True)
class Words:
    """A command line, read: the command ("" for a verb without any), what its words set, key=value settings, and flags."""

    command: str
    values: dict[str, str]
    settings: list[str]
    flags: dict[str, str]
    lists: dict[str, list[str]] = field(default_factory=dict)

    def overrides(self) -> list[str]:
        """As key=value words and flags, for a job that has `command` and the words' keys for fields."""
        return [
            *([f"command={self.command}"] if self.command else []),
            *(f"{key}={quoted(value)}" for key, value in self.values.items()),
            *(f"{key}=[{','.join(map(quoted, values))}]" for key, values in self.lists.items()),
            *self.remaining(),
        ]

    def remaining(self) -> list[str]:
        """Settings and flags: the command line without its command and words."""
        return [*self.settings, *(f"{name}={value}" if value else name for name, value in self.flags.items())]


def read_words(argv: Iterable[str], commands: Sequence[Command], default: str = "") -> Words:
    """Split a command line into command, words, settings and flags.

    Raises:
        ConfigError: an unknown flag or command, a word too many, or a required one missing.
    """
    overrides, flags = split_flags(argv)
    if not commands:
        return Words("", {}, overrides, flags)
    words = [word for word in overrides if "=" not in word.split("/")[0] and not word.startswith("~")]
    settings = [word for word in overrides if word not in words]
    known = {command.name: command for command in commands}
    name = next((word for word in words if word in known), default)
    if name in words:
        words.remove(name)
    keys_set = {setting.partition("=")[0] for setting in settings}
    lists = {}
    if (many := known[name].many) and many not in keys_set:
        free = sum(key not in keys_set for key in known[name].words)
        lists, words = ({many: words[free:]} if words[free:] else {}), words[:free]
    values = _assign(words, known[name], keys_set, known)
    if known[name].run is not None and len(values) < len(known[name].words) and "--help" not in flags:
        raise ConfigError(f"{name} takes {' '.join(word.upper() for word in known[name].words)}: {known[name].usage()}")
    return Words(name, values, settings, flags, lists)


def _assign(words: list[str], command: Command, keys_set: set[str], known: Mapping[str, Command]) -> dict[str, str]:
    assigned: dict[str, str] = {}
    words = list(words)
    for key, pattern in command.patterns.items():
        fits = [word for word in words if re.fullmatch(pattern, word)]
        if fits and (len(words) > 1 or command.words[0] in keys_set):
            words.remove(fits[-1])
            assigned[key] = fits[-1]
    free = [key for key in command.words if key not in command.patterns and key not in keys_set]
    if len(words) > len(free):
        raise _unknown(words, command, known)
    return {**dict(zip(free, words, strict=False)), **assigned}


def _unknown(words: list[str], command: Command, known: Mapping[str, Command]) -> ConfigError:
    near = next((word for word in words if did_you_mean(word, known)), None)
    if near is None and command.words:
        return ConfigError(f"cannot read {words[-1]!r}: {command.usage()}")
    usages = "; ".join(command.usage() for command in known.values())
    word = near or words[-1]
    return ConfigError(f"cannot read {word!r}; commands are {usages}{did_you_mean(word, known)}")


def quoted(value: str) -> str:
    """As Hydra reads text back: a number, or a path with signs that Hydra knows, would be read as something else."""
    is_plain = re.fullmatch(r"[\w./-]+", value) and not re.fullmatch(r"[\d._e+-]+", value)
    return value if is_plain else "'" + value.replace("'", "\\'") + "'"
