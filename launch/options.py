"""Make command-line flags from a dataclass of options, and read flags into the dataclass.

A field's metadata has its `help`. `--max-retries` is the field max_retries.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeline.cli.command_line import print_user_errors
from pipeline.runtime.errors import LaunchError, check_choice
from pipeline.runtime.process.stdout import write_out

Options = TypeVar("Options")


def option(default: Any, text: str) -> Any:
    """Define a field with a default and one line of help."""
    return dataclasses.field(default=default, metadata={"help": text})


def add_flags(parser: argparse.ArgumentParser, kind: type, title: str) -> None:
    group = parser.add_argument_group(title)
    for each, plain in _fields(kind):
        flag, text = flag_of(each.name), each.metadata.get("help", "").replace("%", "%%")
        if plain is bool:
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=each.default, help=text, dest=each.name
            )
        elif get_origin(plain) is dict:
            group.add_argument(flag, action="append", default=[], metavar="NAME=VALUE", help=text, dest=each.name)
        else:
            flags = ["-j"] if each.name == "j" else [flag]
            group.add_argument(*flags, type=plain, default=each.default, help=text, dest=each.name, metavar=plain.__name__.upper())  # fmt: skip


def from_flags(kind: type[Options], typed: argparse.Namespace) -> Options:
    """Make the dataclass.

    Raises LaunchError for a --env without `=`, and for values that the dataclass refuses.
    """
    values = {each.name: getattr(typed, each.name) for each, _ in _fields(kind)}
    for each, plain in _fields(kind):
        if get_origin(plain) is dict:
            values[each.name] = _pairs(flag_of(each.name), values[each.name])
    return kind(**values)


def parse_job(
    parser: argparse.ArgumentParser, argv: list[str], kinds: dict[str, type]
) -> tuple[argparse.Namespace, list[str], list[Any]]:
    """Read the flags of these kinds and --check-data.

    Return the flags, the overrides after `--`, and an object per kind.
    """
    for title, kind in kinds.items():
        add_flags(parser, kind, title)
    text = "validate the job with its data from this machine"
    parser.add_argument("--check-data", action=argparse.BooleanOptionalAction, default=True, help=text)
    middle = argv.index("--") if "--" in argv else len(argv)
    typed = parser.parse_args(argv[:middle])
    with print_user_errors():
        return typed, argv[middle + 1 :], [from_flags(kind, typed) for kind in kinds.values()]


def main_of(doc: str, what: str, targets: Collection[str], render: Callable[[str, list[str]], str]) -> None:
    """Print the result of `render` for the words after a target.

    Without a target print the usage, with exit code 2.
    """
    argv = sys.argv[1:]
    if argv[:1] and argv[0] in targets:
        write_out(render(argv[0], argv[1:]).removesuffix("\n"))
        return
    asked = argv[:1] in (["-h"], ["--help"])
    if argv and not asked:
        with print_user_errors():
            check_choice(what, argv[0], targets)
    print(doc.strip(), file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)


def _fields(kind: type) -> list[tuple["dataclasses.Field[Any]", Any]]:
    """Return every field with its type, without Optional."""
    hints = get_type_hints(kind)
    return [(each, _without_none(hints[each.name])) for each in dataclasses.fields(kind)]


def _without_none(hint: Any) -> Any:
    if get_origin(hint) is Union:
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    return hint


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _pairs(flag: str, words: list[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise LaunchError(f"{flag} {word}: give NAME=VALUE")
    return dict(word.split("=", 1) for word in words)
