"""Read a Kafka topic: a message is a row, and offsets are those of the topic's partitions.

Offsets are stored in the checkpoint and not in the broker, whose consumer group does not affect
what is read. Partitions take turns, each with as much as a batch takes. Partitions that are added
to the topic are found.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from pipeline.config.data import DataConfig
from pipeline.config.registry import register
from pipeline.config.retraining import StreamConfig
from pipeline.extras.stream.source import Lines, Offsets, Range
from pipeline.runtime.errors import ConfigError, DataError

ANSWER_S = 30.0  # for a broker to answer
FETCH_S = 10.0  # for messages that are known to exist
LOOK_S = 30.0  # between two searches for partitions
AT_ONCE = 10_000  # messages per request
OWN = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": False,
    "queued.max.messages.kbytes": 65_536,
    "fetch.wait.max.ms": 100,
}


@register("stream", "kafka")
class KafkaSource:
    """A topic.

    `topic` is the job's source; stream.options are librdkafka's, and may set group.id, sasl and
    ssl.
    """

    unit = "rows"

    def __init__(self, topic: str, config: StreamConfig, data: DataConfig) -> None:
        """Raises ConfigError or DataError if the package, the topic or the names of columns are
        missing.
        """
        from pipeline.data.raw.layout import check_columns, find_format
        from pipeline.extras.stream.joined import rows_of

        try:
            from confluent_kafka import Consumer
        except ImportError as error:
            raise ConfigError(
                "stream.kind=kafka needs confluent-kafka: pip install 'torchrec-pipeline[kafka]'"
            ) from error
        kind, self._layout = find_format(data.format), rows_of(data, config)
        if not kind.is_lines or (kind.header_lines and self._layout.header is None):
            raise DataError(
                f"data.format={data.format}: a message is a row without a header; use jsonl, or "
                "set the names of columns by data.header=[...]"
            )
        self._names = self._layout.header or ()
        if self._names:
            check_columns(self._layout, self._names, f"topic {topic}")
        self._topic, self._poll_s = topic, config.poll_s
        self._consumer = Consumer({"group.id": f"torchrec-pipeline-{topic}", **OWN, **config.options})
        # by partition: messages that are fetched but not returned
        self._fetched: dict[int, deque[Any]] = {}
        self._next: dict[int, int] = {}  # by partition: the start of the next rows to return
        self._fetched_to: dict[int, int] = {}  # by partition: the offset after the fetched messages
        self._turn = 0
        self._partitions: list[int] = []
        self._looked_at = 0.0
        self._find_partitions()

    def _find_partitions(self) -> None:
        """Find the partitions. Raises DataError if there is no such topic."""
        from confluent_kafka import KafkaException

        if time.monotonic() - self._looked_at < LOOK_S and self._partitions:
            return
        try:
            found = self._consumer.list_topics(self._topic, timeout=ANSWER_S).topics[self._topic]
        except KafkaException as error:
            raise DataError(f"Kafka does not answer ({error}): check stream.options.bootstrap.servers") from None
        if found.error is not None or not found.partitions:
            raise DataError(
                f"source={self._topic} is not a topic of this Kafka: {found.error or 'it has no partition'}"
            )
        self._partitions, self._looked_at = sorted(found.partitions), time.monotonic()

    def _name(self, partition: int) -> str:
        return str(partition)

    def read(self, offsets: Offsets, most_lines: int) -> Lines | None:
        self._find_partitions()
        self._assign(offsets)
        for number in range(len(self._partitions)):
            partition = self._partitions[(self._turn + number) % len(self._partitions)]
            if not self._fetched[partition] and self._is_behind(partition):
                self._fetch(partition)
            if messages := self._fetched[partition]:
                self._turn = (self._turn + number + 1) % len(self._partitions)
                return self._hand_out(partition, messages, most_lines)
        self._take(self._consumer.consume(AT_ONCE, self._poll_s))
        return None

    def _hand_out(self, partition: int, messages: deque[Any], most_lines: int) -> Lines:
        taken = [messages.popleft() for _ in range(min(len(messages), most_lines))]
        begin, self._next[partition] = self._next[partition], taken[-1].offset() + 1
        return self._lines(partition, begin, taken)

    def _lines(self, partition: int, begin: int, messages: list[Any]) -> Lines:
        values = [message.value() or b"" for message in messages]
        return Lines(self._name(partition), begin, values, [message.offset() + 1 for message in messages], self._names)

    def _assign(self, offsets: Offsets) -> None:
        """Let the consumer continue after `offsets`, if it is at another position."""
        wanted = {partition: self._begin(partition, offsets) for partition in self._partitions}
        if wanted != self._next:
            self._seek(wanted)

    def _seek(self, wanted: dict[int, int]) -> None:
        from confluent_kafka import TopicPartition

        self._fetched = {partition: deque() for partition in wanted}
        self._next, self._fetched_to = dict(wanted), dict(wanted)
        self._consumer.assign([TopicPartition(self._topic, partition, offset) for partition, offset in wanted.items()])

    def _begin(self, partition: int, offsets: Offsets) -> int:
        """Return the offset where a partition begins. Raises DataError if the broker no longer has the next rows."""
        known, wanted = self._next.get(partition), offsets.get(self._name(partition))
        if wanted is None:
            return self._low(partition) if known is None else known
        if known != wanted and (low := self._low(partition)) > wanted:
            raise DataError(
                f"partition {partition} of {self._topic} begins at offset {low:,}, but the "
                f"training has read up to {wanted:,}: the rows in between are deleted; choose "
                "another run_dir to start again, and let the topic keep rows for longer"
            )
        return wanted

    def _low(self, partition: int) -> int:
        return self._watermarks(partition)[0]

    def _watermarks(self, partition: int) -> tuple[int, int]:
        from confluent_kafka import TopicPartition

        low, high = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), timeout=ANSWER_S)
        return int(low), int(high)

    def _is_behind(self, partition: int) -> bool:
        return self._fetched_to[partition] < self._watermarks(partition)[1]

    def _fetch(self, partition: int) -> None:
        """Wait for existing messages of a partition, so that the order of partitions does not
        depend on their speed.
        """
        until = time.monotonic() + FETCH_S
        while not self._fetched[partition] and self._is_behind(partition) and time.monotonic() < until:
            self._take(self._consumer.consume(AT_ONCE, 0.1))

    def _take(self, messages: list[Any]) -> None:
        for message in messages:
            if (error := message.error()) is not None:
                if error.fatal() or not error.retriable():
                    raise DataError(f"topic {self._topic} cannot be read further: {error}")
                continue
            self._fetched[message.partition()].append(message)
            self._fetched_to[message.partition()] = message.offset() + 1

    def reread(self, wanted: Range) -> Lines:
        partition = int(wanted.partition)
        low, high = self._watermarks(partition)
        gone = DataError(
            f"offsets {wanted.begin:,} to {wanted.end:,} of partition {partition} of "
            f"{self._topic} no longer exist: it has {low:,} to {high:,}"
        )
        if low > wanted.begin or high < wanted.end:
            raise gone
        self._seek({partition: wanted.begin})
        until, found = time.monotonic() + FETCH_S, self._fetched[partition]
        while (not found or found[-1].offset() < wanted.end - 1) and time.monotonic() < until:
            self._take(self._consumer.consume(AT_ONCE, 0.1))
        messages = [message for message in found if message.offset() < wanted.end]
        self._next = {}  # read() then seeks to its offsets
        if not messages or messages[-1].offset() < wanted.end - 1:
            raise gone
        return self._lines(partition, wanted.begin, messages)

    def behind(self, offsets: Offsets) -> int:
        count = 0
        for partition in self._partitions:
            low, high = self._watermarks(partition)
            count += max(0, high - offsets.get(self._name(partition), low))
        return count

    def newest(self) -> Offsets:
        return {self._name(partition): self._watermarks(partition)[1] for partition in self._partitions}

    def close(self) -> None:
        self._consumer.close()
