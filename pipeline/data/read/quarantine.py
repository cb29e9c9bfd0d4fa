"""Write bad rows to a quarantine file, each row once per rank: <run>/quarantine/<split>.rank<r>.jsonl

{"file": "train/00000.parquet", "row": 31, "reason": "'cat_3' is 99, not an id within [0, 50)"}

Rows count from 0. An unreadable row group has one line, with the number of its rows.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from pipeline.runtime.logs import get_logger

MAX_LOGGED = 3  # the log shows this many reasons; the file has all
logger = get_logger(__name__)


class Quarantine:
    """The list of bad rows. Several threads may use it.

    Without a path, rows are only logged.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: set[tuple[str, int]] = set()
        self._num_logged = 0
        if path and os.path.exists(path):  # of the run that this one resumes
            with open(path, encoding="utf-8") as file:
                self._known = {(entry["file"], entry["row"]) for entry in map(_parse, file) if entry}

    def add(self, file: str, reasons: dict[int, str], num_rows: int | None = None) -> None:
        """Add `reasons` (row number in the file -> reason). `num_rows`: the number of rows that one line stands for."""
        with self._lock:
            new = {row: reason for row, reason in reasons.items() if (file, row) not in self._known}
            if not new:
                return
            self._known |= {(file, row) for row in new}
            extra: dict[str, Any] = {} if num_rows is None else {"num_rows": num_rows}
            lines = [
                json.dumps({"file": file, "row": row, **extra, "reason": reason}, ensure_ascii=False)
                for row, reason in sorted(new.items())
            ]
            self._write(lines)
        for line in lines[: MAX_LOGGED - self._num_logged]:
            self._num_logged += 1
            logger.warning(
                "quarantined %s%s", line, f"; more are only in {self._path}" * (self._num_logged == MAX_LOGGED)
            )

    def _write(self, lines: list[str]) -> None:
        if self._path:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as out:
                out.write("".join(line + "\n" for line in lines))


def _parse(line: str) -> dict[str, Any]:
    """Parse a line. Return {} for an incomplete line, which a killed run may leave."""
    try:
        entry = json.loads(line)
        return entry if {"file", "row"} <= entry.keys() else {}
    except (ValueError, AttributeError):
        return {}
