"""Distribute the rows of a stream's batches: each rank gets a share of the rows.

Rank 0 reads the stream. The other ranks read their rows from the source again.

For each batch and rank, the store of the process group holds the ranges of all rows and of the
rank's rows, or why there is no such batch. The entry is deleted when the rank has read it. A reader
that starts again after a rollback uses a new round, so that nothing from before is used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.data.read.endless import EndOfInputError, InputPausedError, TablesFullError, Values
from pipeline.extras.stream.source import Range
from pipeline.runtime.errors import RetrainingError

if TYPE_CHECKING:
    from torch.distributed import Store

LOOK_S = 0.005
STOP = "stop"


class Share(NamedTuple):
    """The share of one batch: the ranges of all rows and of this rank's rows, and new values with
    ids from this batch on.
    """

    ranges: list[Range]
    own: list[Range]
    added: Values


class StreamRanks:
    """Exchanges shares through the store. No method is collective."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size
        self._round = 0

    def begin(self) -> int:
        """Start a new round.

        Every rank must start equally many rounds. Returns the argument of tell(), end() and
        share().
        """
        self._round += 1
        return self._round

    def tell(self, round_: int, number: int, ranges: list[Range], shares: list[list[Range]], added: Values) -> None:
        """On rank 0: publish the ranges of batch `number`, and each rank's part."""
        for rank in range(1, self.world_size):
            self._set(round_, number, rank, {"ranges": ranges, "own": shares[rank], "added": added})

    def end(self, round_: int, number: int, error: Exception) -> None:
        """On rank 0: publish that there is no batch `number`."""
        kinds = {"pause": InputPausedError, "end": EndOfInputError, "failure": Exception}
        said: dict[str, Any] = {next(name for name, kind in kinds.items() if isinstance(error, kind)): str(error)}
        if isinstance(error, TablesFullError):
            said = {"full": error.tables}
        for rank in range(1, self.world_size):
            self._set(round_, number, rank, said)

    def _set(self, round_: int, number: int, rank: int, values: dict[str, Any]) -> None:
        self._store.set(f"{round_}/{number}/{rank}", json.dumps(values))

    def share(self, round_: int, number: int, idle: Callable[[], None]) -> Share:
        """Return the share of batch `number` when rank 0 has it. `idle` is called while waiting.

        Raises rank 0's error.
        """
        key = f"{round_}/{number}/{self.rank}"
        while not self._store.check([key]):
            idle()
            time.sleep(LOOK_S)
        values = json.loads(self._store.get(key))
        self._store.delete_key(key)
        if "full" in values:
            raise TablesFullError(values["full"])
        if "pause" in values:
            raise InputPausedError(values["pause"])
        if "end" in values:
            raise EndOfInputError(values["end"])
        if "failure" in values:
            raise RetrainingError(values["failure"])
        return Share(
            [Range(*each) for each in values["ranges"]], [Range(*each) for each in values["own"]], values["added"]
        )

    def ask_to_stop(self) -> None:
        """Report that this rank was asked to stop. Without rows there is no step in which rank 0 would learn it."""
        self._store.set(STOP, "1")

    def is_asked_to_stop(self) -> bool:
        return bool(self._store.check([STOP]))
