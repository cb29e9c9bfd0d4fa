"""Make command-line flags from a dataclass of options, and read flags into the dataclass.

A field's metadata has its `help`. `--max-retries` is the field max_retries.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

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
    """Make the dataclass `kind` from flags. Raises LaunchError for invalid values, and a --env without `=`."""
    values = {each.name: getattr(typed, each.name) for each, _ in _fields(kind)}
    for each, plain in _fields(kind):
        if get_origin(plain) is dict:
            words = values[each.name]
            if wrong := [word for word in words if "=" not in word]:
                raise LaunchError(f"{flag_of(each.name)} {wrong[0]}: give NAME=VALUE")
            values[each.name] = dict(word.split("=", 1) for word in words)
    return kind(**values)


def parse_job(
    parser: argparse.ArgumentParser, argv: list[str], kinds: dict[str, type]
) -> tuple[argparse.Namespace, list[str], list[Any]]:
    """Read the flags of these kinds, and --check-data.

    Return the flags, the overrides after `--`, and one object for each kind.
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
    """Print what `render` returns for the words after a target. If there is no target, print the usage."""
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
    """Return every field with its type. Optional[T] counts as T."""
    hints = get_type_hints(kind)
    return [(each, _without_none(hints[each.name])) for each in dataclasses.fields(kind)]


def _without_none(hint: Any) -> Any:
    if get_origin(hint) is Union:
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    return hint


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


NCCL_SETTINGS = {
    "infiniband": {"NCCL_NET": "IB"},
    "roce": {"NCCL_NET": "IB"},
    "efa": {"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "efa"},
    "tcp": {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"},
}


@dataclass(frozen=True)
class NetworkOptions:
    network: Optional[str] = option(
        None, "network that NCCL must use, otherwise the job fails: infiniband, roce, efa or tcp"
    )
    interface: Optional[str] = option(None, "network interface that ranks use to connect, for "
                                            "instance ib0 or eth0")  # fmt: skip
    hca: Optional[str] = option(None, "InfiniBand or RoCE adapters that NCCL may use, for instance mlx5 or =mlx5_0:1")

    def __post_init__(self) -> None:
        if self.network is not None:
            check_choice("--network", self.network, NCCL_SETTINGS)
        for flag, value in (("--interface", self.interface), ("--hca", self.hca)):
            if value is not None and not re.fullmatch(r"[\^=]{0,2}[\w.:,-]+", value):
                raise LaunchError(f"{flag} {value}: give names separated by commas, for instance ib0 or mlx5_0")
        if self.hca and self.network not in ("infiniband", "roce"):
            raise LaunchError(
                f"--hca {self.hca}: give --network infiniband or roce too, because other networks have no adapters"
            )

    @property
    def network_env(self) -> dict[str, str]:
        env = dict(NCCL_SETTINGS.get(self.network or "", {}))
        if self.interface:
            env["NCCL_SOCKET_IFNAME"] = self.interface
            if self.interface[0] not in "^=":  # gloo does not support these
                env["GLOO_SOCKET_IFNAME"] = self.interface
        return {**env, "NCCL_IB_HCA": self.hca} if self.hca else env

    @property
    def locks_memory(self) -> bool:
        """Return True if the network card accesses memory directly, so that this memory must be locked."""
        return self.network in ("infiniband", "roce", "efa")
