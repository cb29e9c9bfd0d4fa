"""Read a command line: flags, key=value settings, and positional words without `key=`.

    python -m pipeline checkpoints show runs/quickstart 300        is   command=show run=runs/quickstart step=300
    python -m pipeline registry rollback registry/q v000012        is   command=rollback registry=registry/q version=v000012

Flags and settings may be anywhere between the words.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, did_you_mean

FLAGS = ("--help", "--cfg", "--config-dir")
HINTS = {"-m": "; `python -m pipeline sweep` tries several values"}  # of Hydra
HINTS["--multirun"] = HINTS["-m"]
KEY = re.compile(r"[\w*<>]+(\.[\w*<>]+)+")  # -h optimizer.dense.lr


@dataclass(frozen=True)
class Command:
    """A command of a verb. `words` are the keys that its positional words set, in order.

    patterns: key -> pattern of a word that sets this key. Such a word may be anywhere, if another
    word or setting gives the first key. run: does the command without a job; its words are then
    required. many: a key that takes all further words, as a list.
    """

    name: str
    words: tuple[str, ...] = ()
    patterns: Mapping[str, str] = field(default_factory=dict)
    run: Callable[[Arguments], None] | None = None
    many: str = ""

    def usage(self) -> str:
        return " ".join([self.name, *map(str.upper, self.words), *([f"{self.many.upper()}..."] if self.many else [])])


@dataclass(frozen=True)
class Arguments:
    """A command line that was read. `command` is "" for a verb without commands. values: keys that
    words set. settings: the key=value words."""

    command: str
    values: dict[str, str]
    settings: list[str]
    flags: dict[str, str]
    lists: dict[str, list[str]] = field(default_factory=dict)

    def overrides(self) -> list[str]:
        """Return everything as key=value words and flags, for a job with a field `command` and
        fields for the words' keys."""
        return [
            *([f"command={self.command}"] if self.command else []),
            *(f"{key}={quoted(value)}" for key, value in self.values.items()),
            *(f"{key}=[{','.join(map(quoted, values))}]" for key, values in self.lists.items()),
            *self.remaining(),
        ]

    def remaining(self) -> list[str]:
        """Return settings and flags: the command line without its command and words."""
        return [*self.settings, *(f"{name}={value}" if value else name for name, value in self.flags.items())]


def split_flags(argv: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Separate --help, --cfg and --config-dir from a command line. Return the other words, and flag
    -> value."""
    words: list[str] = []
    flags: dict[str, str] = {}
    waiting = deque(argv)
    while waiting:
        word = waiting.popleft()
        name, equals, value = word.partition("=")
        name = "--help" if name == "-h" else name
        if not name.startswith("-"):
            words.append(word)
            continue
        if name not in FLAGS:
            hint = HINTS.get(name) or did_you_mean(name, FLAGS)
            hint = f"; overrides take no dashes: {word.lstrip('-')}" if equals else hint
            raise ConfigError(f"unknown flag {name} (there are {', '.join(FLAGS)}){hint}")
        following = waiting[0] if waiting and not equals else ""
        if name == "--config-dir" or (name == "--help" and KEY.fullmatch(following)):
            value = waiting.popleft() if following else value
        elif name == "--cfg" and following == "hydra":
            raise ConfigError("--cfg hydra: a job has no Hydra configuration; --cfg prints the job")
        elif name == "--cfg" and following in ("job", "all"):  # as users of Hydra type it
            waiting.popleft()
        flags[name] = value
    return words, flags


def read_arguments(argv: Iterable[str], commands: Sequence[Command], default: str = "") -> Arguments:
    """Split a command line into command, words, settings and flags. Raises ConfigError if an
    unknown flag or command, one word too many, or a required word is missing."""
    overrides, flags = split_flags(argv)
    if not commands:
        return Arguments("", {}, overrides, flags)
    words = [word for word in overrides if "=" not in word.split("/")[0] and not word.startswith("~")]
    settings = [word for word in overrides if word not in words]
    known = {command.name: command for command in commands}
    command = known[next((word for word in words if word in known), default)]
    if command.name in words:
        words.remove(command.name)
    given = {setting.partition("=")[0] for setting in settings}
    free = [key for key in command.words if key not in given]
    values: dict[str, str] = {}
    for key, pattern in command.patterns.items():
        fits = [word for word in words if re.fullmatch(pattern, word)]
        if fits and (len(words) > 1 or command.words[0] not in free):
            words.remove(fits[-1])
            values[key] = fits[-1]
    free = [key for key in free if key not in command.patterns]
    values = {**dict(zip(free, words, strict=False)), **values}
    rest = words[len(free) :]
    if rest and (not command.many or command.many in given):
        raise _unknown(words, command, known)
    if command.run is not None and len(values) < len(command.words) and "--help" not in flags:
        missing = " ".join(map(str.upper, command.words))
        raise ConfigError(f"{command.name} needs {missing}: {command.usage()}")
    return Arguments(command.name, values, settings, flags, {command.many: rest} if rest else {})


def _unknown(words: list[str], command: Command, known: Mapping[str, Command]) -> ConfigError:
    near = next((word for word in words if did_you_mean(word, known)), None)
    if near is None and command.words:
        return ConfigError(f"cannot read {words[-1]!r}: {command.usage()}")
    usages = "; ".join(command.usage() for command in known.values())
    word = near or words[-1]
    return ConfigError(f"cannot read {word!r}; commands are {usages}{did_you_mean(word, known)}")


def quoted(value: str) -> str:
    """Quote text so that Hydra reads it as text. Without quotes it reads numbers, and some signs in
    paths, differently."""
    is_plain = re.fullmatch(r"[\w./-]+", value) and not re.fullmatch(r"[\d._e+-]+", value)
    return value if is_plain else "'" + value.replace("'", "\\'") + "'"
