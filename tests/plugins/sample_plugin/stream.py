"""A source of streams in one file: one text file that grows, whose offsets count lines."""

from __future__ import annotations

import time

from pipeline.config.data import DataConfig
from pipeline.config.registry import register
from pipeline.config.retraining import StreamConfig
from pipeline.extras.stream.source import Lines, Offsets, Range

PARTITION = "lines"


@register("stream", "numbered_lines")
class NumberedLines:
    unit = "rows"

    def __init__(self, path: str, config: StreamConfig, data: DataConfig) -> None:
        self._path, self._poll_s = path, config.poll_s

    def read(self, offsets: Offsets, most_lines: int) -> Lines | None:
        begin = offsets.get(PARTITION, 0)
        found = self._lines()[begin : begin + most_lines]
        if not found:
            time.sleep(self._poll_s)
            return None
        return Lines(PARTITION, begin, found, list(range(begin + 1, begin + 1 + len(found))))

    def reread(self, wanted: Range) -> Lines:
        lines = self._lines()[wanted.begin : wanted.end]
        return Lines(PARTITION, wanted.begin, lines, list(range(wanted.begin + 1, wanted.end + 1)))

    def behind(self, offsets: Offsets) -> int:
        return len(self._lines()) - offsets.get(PARTITION, 0)

    def newest(self) -> Offsets:
        return {PARTITION: len(self._lines())}

    def close(self) -> None:
        return None

    def _lines(self) -> list[bytes]:
        with open(self._path, "rb") as file:
            return [line.rstrip(b"\n") for line in file if line.endswith(b"\n")]
