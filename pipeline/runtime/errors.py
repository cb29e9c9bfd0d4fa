"""Define errors that a user can fix, and checks that raise them (stdlib only)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection


class UserError(ValueError):
    """An error that a user can fix. A verb prints it in one line and ends with exit code 2.

    The text says what is wrong, with numbers, and then how to fix it. `code` names the class for
    programs. Every other exception is a bug: it keeps its traceback and ends with exit code 1.
    """

    code = "user"


class ConfigError(UserError):
    """A value, key or option of a job is invalid, alone or in combination with others."""

    code = "config"


class DataError(UserError):
    """Raw rows or a prepared data set cannot be used."""

    code = "data"


class LimitError(DataError):
    """The configured limits are too low for rows that may be valid."""


class PlanError(UserError):
    """No plan fits the tables into memory, or a plan file does not fit the job."""

    code = "plan"


class ShardingError(UserError):
    """Tables cannot be sharded as configured on this backend."""

    code = "sharding"


class TierError(ShardingError):
    """Rows of a table on an SSD cannot be read or written, or a table has too few slots."""

    code = "tiers"


class TrainingError(UserError):
    """A run cannot continue, or cannot continue with this job."""

    code = "training"


class ServingError(UserError):
    """An artifact cannot be made, loaded or served as configured."""

    code = "serving"


class RetrainingError(UserError):
    """The windows, the champion or the registry do not allow the requested action."""

    code = "retraining"


class StorageError(UserError):
    """A path or URI cannot be used."""

    code = "storage"


class CheckpointError(UserError):
    """A checkpoint cannot be used or saved. The text names it, the reason and the fix."""

    code = "checkpoint"


class StepTakenError(CheckpointError):
    """The step to be saved is already committed, because another run writes to the folder."""


class DamagedError(CheckpointError):
    """A file of a checkpoint step, an artifact or a registry version differs from its manifest."""


class ForeignFileError(DamagedError):
    """A file of a checkpoint step was written by another save, step or rank."""

    code = "foreign_file"


class LaunchError(UserError):
    """A job cannot be rendered for, or submitted to, a scheduler."""

    code = "launch"


def did_you_mean(name: str, choices: Collection[str]) -> str:
    """Return `"; did you mean 'x'?"` for the most similar of `choices`, or an empty string."""
    near = nearest(name, choices)
    return f"; did you mean {near!r}?" if near else ""


def nearest(name: str, choices: Collection[str], least_alike: float = 0.5) -> str:
    """Return the choice most similar to `name`, if at least the share `least_alike` of the letters
    matches; otherwise "".

    A choice that starts with `name` comes first: h100 means h100_80gb, although h200 shares more
    letters.
    """
    begun = [choice for choice in choices if name and choice.startswith(name)]
    near = difflib.get_close_matches(name, begun or list(choices), n=1, cutoff=0.0 if begun else least_alike)
    return near[0] if near else ""


def check_choice(field: str, value: str, choices: Collection[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{field}={value!r} is not one of {', '.join(sorted(choices))}{did_you_mean(value, choices)}")


def check_given(field: str, value: str) -> None:
    """Raise ConfigError for empty text."""
    if not value.strip():
        raise ConfigError(f"{field} is empty: give it a value")


def check_keys(field: str, value: object) -> None:
    """Raise ConfigError unless the value is None, the path of a public key or a list of such paths."""
    paths = [value] if isinstance(value, str) else value
    if paths is None:
        return
    if not isinstance(paths, list) or not paths or not all(isinstance(each, str) and each for each in paths):
        raise ConfigError(
            f"{field}={value!r} must be the path of a public key, or a list of paths: {field}=[a.pub,b.pub]"
        )


def check_finite(field: str, value: float) -> None:
    """Raise ConfigError for NaN and the infinities."""
    # math.isfinite overflows on integers above 1e308
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{field}={value} must be a finite number")


def check_at_least(field: str, value: float | None, least: float, allow_none: bool = False) -> None:
    """Raise ConfigError unless `value` is finite and >= `least`."""
    if value is None and allow_none:
        return
    if value is not None:
        check_finite(field, value)
    if value is None or value < least:
        raise ConfigError(f"{field}={value} must be at least {least}")


def check_above(field: str, value: float, floor: float) -> None:
    """Raise ConfigError unless `value` is finite and > `floor`."""
    check_finite(field, value)
    if value <= floor:
        raise ConfigError(f"{field}={value} must be above {floor}")


def check_below_one(field: str, value: float) -> None:
    """Raise ConfigError unless 0 <= `value` < 1, the range of decay rates of running means."""
    check_finite(field, value)
    if not 0.0 <= value < 1.0:
        raise ConfigError(f"{field}={value} must be at least 0 and below 1")


def check_within(field: str, value: float, least: float, most: float) -> None:
    """Raise ConfigError unless `value` is finite and `least` <= `value` <= `most`."""
    check_finite(field, value)
    if not least <= value <= most:
        raise ConfigError(f"{field}={value} must be within [{least}, {most}]")
