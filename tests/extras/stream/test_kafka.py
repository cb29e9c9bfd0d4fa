"""A topic of several partitions is read by offsets, once more where a training begins again, on librdkafka's own mock brokers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.retraining import StreamConfig
from pipeline.extras.stream.source import Lines, Offsets, Range
from pipeline.extras.stream.sources.kafka import KafkaSource
from pipeline.runtime.errors import ConfigError, DataError
from tests.support.messages import names

kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture(scope="module")
def broker() -> Iterator[tuple[str, Any]]:
    """The address of mock brokers, which live as long as a client, and the client."""
    client = kafka.Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 2})
    brokers = client.list_topics(timeout=10).brokers.values()
    yield ",".join(f"{each.host}:{each.port}" for each in brokers), client


def _send(client: Any, topic: str, partition: int, first: int, last: int) -> None:
    for number in range(first, last):
        client.produce(topic, f'{{"y": 1, "a": "{partition}-{number}"}}'.encode(), partition=partition)
    assert client.flush(10) == 0


def _source(address: str, topic: str) -> KafkaSource:
    words = ["data.name=x", "data.format=jsonl", "data.columns.label=y", "data.columns.sparse=[a]", "source=x"]
    stream = StreamConfig(kind="kafka", poll_s=0.05, options={"bootstrap.servers": address})
    return KafkaSource(topic, stream, load_config(RetrainJob, words).data)


def _read(source: KafkaSource, offsets: Offsets, most: int) -> list[Lines]:
    """All that is there, `most` lines at once; moves `offsets`."""
    found = []
    while (lines := source.read(offsets, most)) is not None:
        offsets[lines.partition] = lines.range.end
        found.append(lines)
    return found


def test_partitions_are_read_in_turn_from_their_offsets_and_once_more(broker: tuple[str, Any]) -> None:
    address, client = broker
    for partition, count in enumerate((50, 20, 0, 7)):
        _send(client, "clicks", partition, 0, count)
    source, offsets = _source(address, "clicks"), Offsets()
    assert source.unit == "rows"
    found = _read(source, offsets, 15)
    assert [each.partition for each in found] == ["0", "1", "3", "0", "1", "0", "0"], "in turn, whoever is quicker"
    assert offsets == {"0": 50, "1": 20, "3": 7} and source.behind(offsets) == 0
    for partition, count in [("0", 50), ("1", 20), ("3", 7)]:
        own = [line for each in found if each.partition == partition for line in each.lines]
        assert own == [f'{{"y": 1, "a": "{partition}-{number}"}}'.encode() for number in range(count)]
    _send(client, "clicks", 2, 0, 3)
    _send(client, "clicks", 0, 50, 55)
    assert source.behind(offsets) == 8 and source.newest() == {"0": 55, "1": 20, "2": 3, "3": 7}
    again = source.reread(Range("0", 10, 14))
    assert again.ends == [11, 12, 13, 14] and again.range == Range("0", 10, 14)
    assert again.lines == [line for each in found if each.partition == "0" for line in each.lines][10:14]
    assert sorted(each.range for each in _read(source, offsets, 100)) == [Range("0", 50, 55), Range("2", 0, 3)]
    source.close()
    other, back = _source(address, "clicks"), {"0": 50, "1": 20, "3": 7}
    assert sorted(each.range for each in _read(other, back, 100)) == [Range("0", 50, 55), Range("2", 0, 3)]
    other.close()


def test_what_cannot_be_read_is_refused(broker: tuple[str, Any]) -> None:
    address, client = broker
    _send(client, "few", 0, 0, 3)
    source = _source(address, "few")
    with pytest.raises(DataError, match=names("offsets 2 9 few")):
        source.reread(Range("0", 2, 9))
    source.close()
    data = load_config(
        RetrainJob, ["data.name=x", "data.format=csv", "data.columns.label=y", "data.columns.sparse=[a]", "source=x"]
    ).data
    stream = StreamConfig(kind="kafka", options={"bootstrap.servers": address})
    with pytest.raises(DataError, match=names("data.header")):
        KafkaSource("few", stream, data)
    named = KafkaSource("few", stream, replace(data, header=["a", "y"]))
    lines = named.read({}, 1)
    assert lines is not None and lines.names == ("a", "y")
    named.close()
    with pytest.raises(ConfigError, match=names("bootstrap.servers")):
        StreamConfig(kind="kafka")
