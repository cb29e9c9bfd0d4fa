"""Read the opcodes of a pickle into plain values, without unpickling it.

Only known opcodes are accepted. They build numbers, texts, tuples, lists, dicts as pairs, and
records of calls (a name and its arguments). No name in the file is imported, called or changed.
Time and memory are bounded by the size of the file.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar, cast

MAX_TEXT, MAX_INT = 4096, 1 << 63
PUSHED = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}  # their argument is the value
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

Converted = TypeVar("Converted")


class Name(NamedTuple):
    """A name in the file of something that could be imported. The name is compared, but never imported."""

    module: str
    name: str


PERSISTENT = Name("", "persistent_load")  # the kind of what torch.save keeps outside the pickle


class Record:
    """A call of `kind` with `arguments`, and the state that the pickle sets on the result."""

    def __init__(self, kind: Name, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments, self.state = kind, arguments, None


class Pairs(list[tuple[Any, Any]]):
    """The key-value pairs of a dict. Its keys are not hashed."""


def refuse(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"{what}, which no checkpoint of this pipeline does")


def interpret(content: bytes, known: Collection[Name]) -> object:
    """Return the value of a pickle that uses no names except `known`.

    Raises pickle.UnpicklingError for other names and opcodes. Damaged content may raise any error.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def above_mark() -> list[Any]:
        begin = marks.pop()
        found = stack[begin:]
        del stack[begin:]
        return found

    for opcode, value, _ in pickletools.genops(content):
        name, argument = opcode.name, cast(Any, value)
        if name in PUSHED:
            if isinstance(argument, str) and len(argument) > MAX_TEXT:
                raise refuse(f"it has a text of {len(argument)} letters")
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in TUPLES:
            count = TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(above_mark()))
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append(Pairs() if name == "EMPTY_DICT" else [])
        elif name in ("APPEND", "APPENDS"):
            values = above_mark() if name == "APPENDS" else [stack.pop()]
            typed(stack[-1], list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = above_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            typed(stack[-1], Pairs).extend(zip(values[::2], values[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            parts = argument.split(" ", 1) if name == "GLOBAL" else [stack.pop(-2), stack.pop()]
            stack.append(_known_name(parts, known))
        elif name == "BINPERSID":
            stack.append(Record(PERSISTENT, typed(stack.pop(), tuple)))
        elif name in ("NEWOBJ", "REDUCE"):
            arguments, kind = typed(stack.pop(), tuple), stack.pop()
            stack.append(Record(typed(kind, Name), arguments))
        elif name == "BUILD":
            state = stack.pop()
            if typed(stack[-1], Record).state is not None:
                raise refuse("it changes an object twice")
            stack[-1].state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise refuse(f"it has the opcode {name}")
    raise pickle.UnpicklingError("it ends too soon")


def _known_name(parts: list[Any], known: Collection[Name]) -> Name:
    found = Name(*(typed(part, str) for part in parts))
    if found not in known:
        raise refuse(f"it names {found.module}.{found.name}")
    return found


def typed(value: Any, kind: type[Converted]) -> Converted:
    if type(value) is not kind:
        raise refuse(f"it has a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def text_of(value: object) -> str:
    return typed(value, str)


def int_of(value: object) -> int:
    if type(value) is not int or not -MAX_INT <= value < MAX_INT:
        raise refuse(f"it has {shown(value)} in the place of a whole number")
    return value


def shown(value: object) -> str:
    if isinstance(value, Record):
        return f"a call of {value.kind.name}"
    return repr(value)[:80] if isinstance(value, str | int | Name) or value is None else f"a {type(value).__name__}"
