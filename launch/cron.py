"""Parse a cron expression, and write it so that cron, Slurm's scrontab and Kubernetes read it alike.

Three differences make this necessary. Kubernetes has no day of the week 7. Cron accepts no names in
lists, and no `5/10`, which Kubernetes reads as 5, 15, 25, ... Slurm counts the steps of 5-59/10
from 0, and the steps of */2 as days of the week from Monday. So the result has no names, and has
steps only after a single * in the fields for minutes and hours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.runtime.errors import LaunchError

MACROS = {
    "@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *",
}  # fmt: skip
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_PART = re.compile(r"(?P<range>\*|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?")


@dataclass(frozen=True)
class Field:
    """The values that one of the five fields may have. `names` are names of the numbers from `least` on."""

    name: str
    least: int
    most: int
    names: tuple[str, ...] = ()


FIELDS = (
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day of month", 1, 31),
    Field("month", 1, 12, MONTHS),
    Field("day of week", 0, 6, DAYS),
)


def parse_cron(expression: str) -> str:
    """Return five fields of numbers. Raises LaunchError if a scheduler would misread them."""
    text = MACROS.get(expression.strip().lower(), expression)
    words = text.split()
    if len(words) != len(FIELDS):
        known = ", ".join(each.name for each in FIELDS)
        raise LaunchError(
            f'--cron "{expression}" has {len(words)} field(s) instead of 5 ({known}); quote it, as in --cron "0 * * * *", '
            f"or take one of {', '.join(MACROS)}"
        )
    parsed = [
        set[int]().union(*(_parse_part(part, kind) for part in word.split(",")))
        for word, kind in zip(words, FIELDS, strict=True)
    ]
    written = [_write(word, values, kind) for word, values, kind in zip(words, parsed, FIELDS, strict=True)]
    first_day = min(parsed[2])
    if written[4] == "*" and first_day > max(LONGEST_MONTHS[month - 1] for month in parsed[3]):
        raise LaunchError(f'--cron "{expression}" never matches: no month in it has {first_day} days')
    return " ".join(written)


def _write(word: str, values: set[int], kind: Field) -> str:
    if "*" in word.split(",") or word.endswith("*/1"):
        return "*"
    if word.startswith("*/") and "," not in word and kind.least == 0 and not kind.names:
        return f"*/{int(word[2:])}"
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _parse_part(part: str, kind: Field) -> set[int]:
    match = _PART.fullmatch(part)
    if match is None:
        raise _wrong(part, kind, "is not *, a number, a range as in 1-5, or one of these with a step as in */15")
    first, last, step = match["first"], match["last"], match["step"]
    if step is not None and first is not None and last is None:
        raise _wrong(part, kind, f"is not valid in cron; write {first}-{kind.most}/{step}")
    low = kind.least if first is None else _number(first, kind, part)
    high = kind.most if first is None else low if last is None else _number(last, kind, part)
    if low > high:
        raise _wrong(part, kind, "ends before it begins; give two ranges, separated by a comma")
    width = int(step or 1)
    if not 1 <= width <= max(1, high - low):
        raise _wrong(
            part, kind, f"has a step larger than the range; remove the step, or give 1 to {max(1, high - low)}"
        )
    return set(range(low, high + 1, width))


def _number(word: str, kind: Field, part: str) -> int:
    if word.lower() in kind.names:
        return kind.names.index(word.lower()) + kind.least
    if word == "7" and kind.names is DAYS:
        raise _wrong(part, kind, "has a 7, which Kubernetes refuses; write 0 for Sunday")
    if not word.isdecimal() or not kind.least <= int(word) <= kind.most:
        names = f" or {kind.names[0]}-{kind.names[-1]}" if kind.names else ""
        raise _wrong(part, kind, f"is not within {kind.least}-{kind.most}{names}")
    return int(word)


def _wrong(part: str, kind: Field, why: str) -> LaunchError:
    return LaunchError(f"--cron: {part!r} as {kind.name} {why}")
