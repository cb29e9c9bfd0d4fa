"""Schema of a stream: rows that keep coming, which one training follows (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.registry import find
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within
from pipeline.runtime.process.priority import PRIORITIES

STARTS = ("earliest", "latest")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass
class NewValuesConfig:
    """What becomes of values that the vocabularies of the data set lack. spare 0: they are unknown ones.

    spare: a table begins with so many more rows for them, by its own rows, and grows by as many again where it is full: the step is
    saved, and tables are made anew in the same process. A table does not grow beyond max_rows.
    admit_probability: at each batch that holds an unknown value, of getting a row; 1: at once.
    """

    spare: float = 0.0
    admit_probability: float = 1.0
    max_rows: int | None = None

    def __post_init__(self) -> None:
        check_within("stream.new_values.spare", self.spare, 0.0, 100.0)
        check_above("stream.new_values.admit_probability", self.admit_probability, 0.0)
        check_within("stream.new_values.admit_probability", self.admit_probability, 0.0, 1.0)
        check_at_least("stream.new_values.max_rows", self.max_rows, 1, allow_none=True)


@dataclass
class StreamConfig:
    """How `source` is followed: a folder whose files are added and grow, a Kafka topic, or what a plugin registers as "stream".

    Rows are lines of text, of a format that data.format names. They wait until there are as many as a step takes. event_time_column:
    of the rows, a whole number of event_time_unit since 1970 or ISO 8601; the log and the metrics then say how old rows are.
    """

    kind: str = "folder"
    poll_s: float = 1.0
    idle_s: float | None = None  # ends after so long without a row; None: it is followed until SIGTERM or Ctrl-C
    start: str = "earliest"  # where a run begins that has no step yet
    event_time_column: str | None = None
    event_time_unit: str = "s"
    priority: str = "normal"  # low or idle: the training gives way to others on its machine, a server among them
    new_values: NewValuesConfig = field(default_factory=NewValuesConfig)
    options: dict[str, str] = field(default_factory=dict)  # of kafka: librdkafka's, bootstrap.servers among them

    def __post_init__(self) -> None:
        check_above("stream.poll_s", self.poll_s, 0.0)
        if self.idle_s is not None:
            check_above("stream.idle_s", self.idle_s, 0.0)
        check_choice("stream.start", self.start, STARTS)
        check_choice("stream.priority", self.priority, PRIORITIES)
        check_choice("stream.event_time_unit", self.event_time_unit, tuple(UNITS))
        if self.kind == "kafka" and "bootstrap.servers" not in self.options:
            raise ConfigError("stream.kind=kafka needs stream.options={bootstrap.servers: 'host:9092'}")

    def check_kind(self) -> None:
        """Raises ConfigError for a kind that nothing registers."""
        find("stream", self.kind, "stream.kind")
