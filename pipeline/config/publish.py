"""Define how a training run publishes deltas of an artifact (stdlib only)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_given, check_within

CADENCE = re.compile(r"every_(\d+(?:\.\d+)?_)?(seconds?|minutes?|hours?|steps?)")
SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


@dataclass
class DeltaGateConfig:
    """Limits for a delta. A delta that exceeds one is not published, and the command ends with an
    error.

    NE is measured on the first `max_rows` rows of the validation split and compared with the published model.
    The trailing limits compare the delta with the median of the last `trailing` deltas, once there are
    `min_history`: the share of changed rows, their norm, and the NE of the rows since the last save, each
    scored before it was trained on. None disables a limit.
    """

    max_rows: int = 20_000
    max_ne_increase: float = 0.01  # of a delta compared with the published model
    # Mean norm of changed rows divided by the mean norm of the same published rows, and its inverse.
    max_norm_ratio: float = 10.0
    max_rows_fraction: float = 1.0  # share of all stored rows that a delta may change
    trailing: int = 20
    min_history: int = 5
    max_rows_rise: float | None = 5.0  # as a multiple of the trailing median of the share of rows
    # as a multiple of the trailing median of the norm ratio, and its inverse
    max_norm_rise: float | None = 3.0
    max_progressive_ne_rise: float | None = 0.1  # 0.1: 10 % above the trailing median

    def __post_init__(self) -> None:
        check_at_least("delta_gate.max_rows", self.max_rows, 1)
        check_at_least("delta_gate.max_ne_increase", self.max_ne_increase, 0.0)
        check_at_least("delta_gate.max_norm_ratio", self.max_norm_ratio, 1.0)
        check_above("delta_gate.max_rows_fraction", self.max_rows_fraction, 0.0)
        check_within("delta_gate.max_rows_fraction", self.max_rows_fraction, 0.0, 1.0)
        check_at_least("delta_gate.min_history", self.min_history, 1)
        check_at_least("delta_gate.trailing", self.trailing, self.min_history)
        check_at_least("delta_gate.max_rows_rise", self.max_rows_rise, 1.0, allow_none=True)
        check_at_least("delta_gate.max_norm_rise", self.max_norm_rise, 1.0, allow_none=True)
        check_at_least("delta_gate.max_progressive_ne_rise", self.max_progressive_ne_rise, 0.0, allow_none=True)


class Cadence(NamedTuple):
    """An interval in `seconds` or in `steps`; 0 means unused."""

    seconds: float = 0.0
    steps: int = 0


def read_cadence(text: str, key: str) -> Cadence:
    """Parse `every_5_minutes`, `every_30_seconds`, `every_200_steps` or `every_hour`.

    Raises ConfigError for other text.
    """
    found = CADENCE.fullmatch(text)
    number = float((found[1] or "1_").rstrip("_")) if found else 0.0
    unit = found[2].rstrip("s") if found else ""
    if number <= 0 or (unit == "step" and number % 1):
        raise ConfigError(
            f"{key}={text!r} is not an interval: write every_5_minutes, every_30_seconds or every_200_steps"
        )
    return Cadence(steps=int(number)) if unit == "step" else Cadence(seconds=number * SECONDS[unit])


@dataclass
class PublishingConfig:
    """Publish deltas of an artifact during training, in a process next to rank 0.

    `artifact` is a link, which the process creates if it does not exist. If its deltas have more than
    `max_chain` times its bytes, a new artifact of the same step replaces it, and servers load that.

    A due step is saved and then published. At most one step is being published and one waits; if
    more become due, the newest waits and earlier ones are dropped. The last step of the training is
    published, with a wait of at most `finish_s`. A delta that does not pass `gate` stops
    publishing. Servers then keep the last delta until `python -m pipeline publish artifact=A
    unpin=true`; training continues.
    """

    when: str | None = None  # None: nothing is published
    # None: <run_dir>/artifacts/published; exported from the first due step if it does not exist
    artifact: str | None = None
    precision: str = "int8"  # of the exported artifact
    gate: DeltaGateConfig = field(default_factory=DeltaGateConfig)
    max_chain: float | None = 0.5
    finish_s: float = 600.0

    def __post_init__(self) -> None:
        if self.when is not None:
            read_cadence(self.when, "publishing.when")
        if self.artifact is not None:
            check_given("publishing.artifact", self.artifact)
        check_above("publishing.finish_s", self.finish_s, 0.0)
        if self.max_chain is not None:
            check_above("publishing.max_chain", self.max_chain, 0.0)

    @property
    def cadence(self) -> Cadence | None:
        return None if self.when is None else read_cadence(self.when, "publishing.when")
