"""A source of streams from outside the package is found by its name, and goes on from the offsets that it is given."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import registry
from pipeline.config.data import DataConfig
from pipeline.config.retraining import StreamConfig
from pipeline.extras.stream.source import Range, StreamSource


def test_its_source_reads_on_from_an_offset_and_reads_a_range_once_more(tmp_path: Path) -> None:
    registry.load_plugins(["tests.plugins.sample_plugin"])
    config = StreamConfig(kind="numbered_lines", poll_s=0.001)
    config.check_kind()
    file = tmp_path / "rows.tsv"
    file.write_text("1\ta\n0\tb\n1")
    source: StreamSource = registry.find("stream", config.kind)(str(file), config, DataConfig())
    first = source.read({}, 1)
    assert first is not None and (first.lines, first.range) == ([b"1\ta"], Range("lines", 0, 1))
    offsets = {"lines": first.range.end}
    assert (source.behind(offsets), source.newest()) == (1, {"lines": 2})
    second = source.read(offsets, 9)
    assert second is not None and second.lines == [b"0\tb"], "a line counts once it has its end"
    assert source.read({"lines": 2}, 9) is None
    assert source.reread(Range("lines", 0, 2)).lines == [b"1\ta", b"0\tb"]
