"""Say what is erased: a value of a feature, how it may be written in files, and the bytes of its rows."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from html import escape
from urllib.parse import quote

import numpy as np

MIN_BYTES = 6  # shorter patterns occur in files by chance
MAX_PLAIN_DIGITS = 5  # a shorter number is found in text only in quotes, or next to the feature's name
ERASED = "erased"
TOMBSTONE = re.compile(r"erased:[0-9a-f]{32}")


@dataclass
class Target:
    """`rows`: bytes of the value's rows and optimizer states as stored before, in all files that hold them. `sharing`:
    other columns whose values are from the feature's vocabulary, for example histories of items. `others`: features with
    vocabularies of their own. An equal value of theirs, such as the item of the same number, stays. `sequence_files`:
    names of raw files of data.format=user_sequences."""

    feature: str
    value: str
    rows: set[bytes] = field(default_factory=set)
    sharing: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    sequence_files: set[str] = field(default_factory=set)

    def tombstone(self, row_id: int) -> str:
        """Return the text that keeps the value's place in a vocabulary. It depends on the feature and id alone, so
        copies of a vocabulary stay equal."""
        digest = hashlib.sha256(f"{self.feature}:{row_id}".encode()).hexdigest()
        return f"erased:{digest[:32]}"

    def add_row(self, before: bytes, after: bytes) -> None:
        """Remember the bytes of a row, unless they are too short or too common to prove anything."""
        if len(before) >= 8 and before != after and len(np.unique(np.frombuffer(before, np.uint8))) > 3:
            self.rows.add(before)

    @property
    def encodings(self) -> list[bytes]:
        """Return the bytes of the value in UTF-8, UTF-16, JSON with escapes, CSV, HTML and URLs."""
        escaped = json.dumps(self.value)[1:-1]
        texts = {self.value, escaped, json.dumps(self.value, ensure_ascii=False)[1:-1], quote(self.value, safe="")}
        texts |= {self.value.replace('"', '""'), escape(self.value)}
        found = {text.encode() for text in texts}
        return sorted(found | {self.value.encode("utf-16-le"), self.value.encode("utf-16-be")})

    @property
    def is_short(self) -> bool:
        """Return True if the value is too common as text to be searched without its context."""
        return len(self.value) < 3 or (self.value.isdigit() and len(self.value) <= MAX_PLAIN_DIGITS)

    @property
    def pattern(self) -> re.Pattern[bytes]:
        """Return an expression that finds the value in text as a complete word."""
        words = b"|".join(re.escape(each) for each in self.encodings if b"\x00" not in each)
        if not self.is_short:
            return re.compile(rb"(?<![0-9A-Za-z_])(?:" + words + rb")(?![0-9A-Za-z_])")
        name = re.escape(self.feature.encode())
        return re.compile(rb"(?<=[\"'])(?:" + words + rb")(?=[\"'])|(?<=" + name + rb"[=:])(?:" + words + rb")(?![0-9A-Za-z_.])"
                          rb"|(?<=" + name + rb"\": )(?:" + words + rb")(?![0-9A-Za-z_.])")  # fmt: skip

    @property
    def bytes_patterns(self) -> list[bytes]:
        """Return what no binary file may contain."""
        return [each for each in self.encodings if len(each) >= MIN_BYTES] + sorted(self.rows)

    def is_value(self, cell: object) -> bool:
        """Return True if a cell of raw rows is the value, or a list with it. A whole number is its digits."""
        if isinstance(cell, list | tuple | np.ndarray):
            return any(self.is_value(each) for each in cell)
        return cell is not None and str(cell) == self.value
