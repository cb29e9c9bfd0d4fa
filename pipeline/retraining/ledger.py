"""Record what was done with each window and with the champion, in files that never change.

    <registry>/ledger/00000042.json

Each record is a file, because an object store cannot append, and because a number can be taken only
once. A tick reads only as many of the newest records as it needs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from pipeline.retraining.registry import RegistryError, timestamp
from pipeline.runtime.json_values import checked
from pipeline.runtime.masking import one_line
from pipeline.runtime.storage import storage

PROMOTED, REJECTED, SKIPPED = "promoted", "rejected", "skipped"
ROLLED_BACK, UNPINNED, ADDED = "rolled_back", "unpinned", "added"
TERMINAL = (PROMOTED, REJECTED, SKIPPED)  # final states of a window
MAX_READ = 2000  # newest records that a tick reads
ATTEMPTS = 20


@dataclass(frozen=True)
class Record:
    """A record.

    `data` are the window's statistics, for comparison with later windows, and the `changes` of
    features and labels since the parent; `metrics` are those of the comparison.
    """

    state: str
    window: str = ""
    version: str = ""
    parent: str = ""
    reasons: list[str] = field(default_factory=list)
    config_hash: str = ""
    code_version: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # digest of the window's files
    begin: str = ""  # of the window, ISO 8601
    seconds: float = 0.0
    time: str = ""
    number: int = 0


class Ledger:
    def __init__(self, registry: str) -> None:
        self.folder = storage.join(registry.rstrip("/"), "ledger")

    def append(self, record: Record) -> Record:
        """Write the record and return it with its number and time.

        Raises RegistryError if other writers take every number.
        """
        numbers = self._numbers()
        number = numbers[-1] if numbers else 0
        for _ in range(ATTEMPTS):
            number += 1
            written = Record(**{**asdict(record), "number": number, "time": record.time or timestamp()})
            try:
                storage.publish_once(self._path(number), json.dumps(asdict(written), indent=1) + "\n")
            except FileExistsError:
                continue
            return written
        raise RegistryError(f"{self.folder}: other processes keep writing records; try again")

    def newest(self) -> Iterator[Record]:
        """Iterate over the records, newest first."""
        for number in reversed(self._numbers()):
            yield self.read(number)

    def read(self, number: int) -> Record:
        """Read a record. Raises RegistryError if the file is not a record."""
        try:
            return checked(json.loads(storage.read_text(self._path(number))), Record, self._path(number))
        except (ValueError, RecursionError) as error:
            raise RegistryError(
                f"{self._path(number)} is not a record ({error}); restore it from a copy, or "
                "remove it so that its window is judged again"
            ) from None

    def _numbers(self) -> list[int]:
        names = storage.list_folder(self.folder)
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())

    def _path(self, number: int) -> str:
        return storage.join(self.folder, f"{number:08d}.json")


def judged_windows(ledger: Ledger, most: int, besides: Collection[str] = (), accepted: bool = True) -> list[Record]:
    """Windows whose data were accepted, or rejected, when they were last judged, newest first.

    What became of their challengers plays no part. `besides` are windows that are left out, because
    they are to be judged now.
    """
    found: list[Record] = []
    seen = set(besides)
    for record, _ in zip(ledger.newest(), range(MAX_READ), strict=False):
        if record.state in (PROMOTED, REJECTED) and record.window not in seen:
            seen.add(record.window)
            if record.data.get("accepted") is accepted and "statistics" in record.data:
                found.append(record)
            if len(found) == most:
                break
    return found


def windows_missed(ledger: Ledger, version: str, begin: datetime) -> set[str]:
    """Return the windows between the one that made `version` and the one that begins at `begin`,
    whatever their result.
    """
    missed: dict[str, datetime] = {}
    made: datetime | None = None  # begin of the window of `version`
    for record, _ in zip(ledger.newest(), range(MAX_READ), strict=False):
        if made is None and record.version == version and record.state in (PROMOTED, ADDED):
            if not record.begin:
                break
            made = datetime.fromisoformat(record.begin)
        elif record.begin:
            began = datetime.fromisoformat(record.begin)
            if made is not None and began <= made:
                break
            missed[record.window] = began
    return {name for name, began in missed.items() if began < begin and (made is None or began > made)}


def name_of_ne(metrics: Mapping[str, Any]) -> str:
    """Return "NE", or "NE of <label>" if the model learns several labels: the label that decided."""
    return f"NE of {metrics['label']}" if metrics.get("label") else "NE"


def describe_record(record: Record) -> str:
    """Return the record as one line of text; a reason may be any text that somebody typed."""
    metrics, ne = record.metrics, name_of_ne(record.metrics)
    parts = [
        f"{record.number:>6}  {record.time}  {record.state:<12}{record.window or '-':<26}{record.version or '-':<10}"
    ]
    if "champion_ne" in metrics and "challenger_ne" in metrics:
        parts.append(f"{ne} {metrics['challenger_ne']:.4f}, champion {metrics['champion_ne']:.4f}")
    elif "challenger_ne" in metrics:
        parts.append(f"{ne} {metrics['challenger_ne']:.4f}")
    if "training_price" in metrics:
        parts.append(f"price {metrics['training_price']:.4g}")
    changes = record.data.get("changes", {})
    parts += [f"{what.replace('_', ' ')} {', '.join(names)}" for what, names in changes.items()]
    return one_line("  ".join([*parts, *record.reasons]).rstrip())
