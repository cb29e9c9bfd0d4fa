"""Define a stream: a source with new rows, which one training run follows (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.registry import find
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within
from pipeline.runtime.process.priority import PRIORITIES

STARTS = ("earliest", "latest")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass
class NewValuesConfig:
    """How values that are not in the vocabularies get ids. spare=0: they are unknown.

    spare: a table starts with this many additional rows per existing row, and grows by the same
    number when it is full. The step is then saved, and the tables are allocated again in the same
    process. A table does not grow beyond max_rows. admit_probability: probability that an unknown
    value gets a row at each batch that holds it; 1 means at once.
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
    """How `source` is followed: a folder with new and growing files, a Kafka topic, or a plugin's
    kind of stream.

    Rows are lines of text in data.format. They wait until there are enough for a step.
    event_time_column is a column of the rows, in whole numbers of event_time_unit since 1970 or ISO
    8601; the log and the metrics then report the age of rows.
    """

    kind: str = "folder"
    poll_s: float = 1.0
    # end after this time without a row; None: follow until SIGTERM or Ctrl-C
    idle_s: float | None = None
    start: str = "earliest"  # where a run without a saved step starts
    event_time_column: str | None = None
    event_time_unit: str = "s"
    # low or idle: other programs on the machine, for example a server, have priority
    priority: str = "normal"
    new_values: NewValuesConfig = field(default_factory=NewValuesConfig)
    # for kafka: settings of librdkafka, including bootstrap.servers
    options: dict[str, str] = field(default_factory=dict)

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
        """Raise ConfigError if nothing registers this kind."""
        find("stream", self.kind, "stream.kind")
