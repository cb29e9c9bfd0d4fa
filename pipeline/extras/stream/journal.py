"""Record which rows each batch of a stream took from which partition, so that a killed run trains
on the same batches again.

    {"batch": 41, "ranges": [["part-0007.tsv", 1032, 20991], ["part-0008.tsv", 0, 811]]}

Each batch has one line, written before the batch is used. The order of rows of several partitions
depends on when they arrived, so the source alone would give another order the second time.
"""

from __future__ import annotations

import json
import os

from pipeline.extras.stream.source import Range
from pipeline.runtime.storage import atomic

MAX_LINES = 1 << 18


class Journal:
    """The journal of one run's batches. Only one process may write to it."""

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._path = path
        self._file = open(path, "ab")  # noqa: SIM115  # for as long as the run reads
        self._num_lines = 0

    def append(self, batch: int, ranges: list[Range]) -> None:
        self._file.write(json.dumps({"batch": batch, "ranges": ranges}).encode() + b"\n")
        self._file.flush()  # to the kernel, which outlives the process
        self._num_lines += 1
        if self._num_lines > MAX_LINES:
            self._cut()

    def _cut(self) -> None:
        """Drop the older half of the lines, which belong to steps that were saved long ago."""
        with open(self._path, "rb") as file:
            lines = file.readlines()
        self._rewrite(lines[-MAX_LINES // 2 :])

    def _rewrite(self, lines: list[bytes]) -> None:
        self._file.close()
        partial = f"{self._path}.partial"
        with open(partial, "wb") as file:
            file.writelines(lines)
        atomic.publish_file(partial, self._path)
        self._file = open(self._path, "ab")  # noqa: SIM115
        self._num_lines = len(lines)

    def after(self, batch: int) -> list[list[Range]]:
        """Return the ranges of batch `batch` and of the batches after it, up to a gap. Drop
        everything after a gap or a partial line.
        """
        with open(self._path, "rb") as file:
            lines = file.readlines()
        found: list[list[Range]] = []
        kept: list[bytes] = []
        for line in lines:
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if entry is None:
                break
            if entry["batch"] == batch + len(found):
                found.append([Range(*each) for each in entry["ranges"]])
            elif entry["batch"] >= batch:
                break
            kept.append(line)
        if len(kept) != len(lines):
            self._rewrite(kept)
        return found

    def close(self) -> None:
        self._file.close()
