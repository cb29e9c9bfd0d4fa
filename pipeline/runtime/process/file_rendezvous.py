"""Let agents connect through a folder that all nodes share, so that no node is special and any node
may be lost.

    <folder>/<run id>/state.00000012    torchelastic's state of the rendezvous; the highest number is valid
    <folder>/<run id>/store             torch's FileStore: the ranks and addresses of each round
    <folder>/<run id>/ended             the exit code with which the job ended

os.link makes a state, which is atomic on local disks and on NFS: if two nodes replace the same
state, one succeeds. torchrun knows this module as `--rdzv-backend folder`. The clocks of the nodes
must agree to a few seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
    _RendezvousExitOp,
)

BACKEND = "folder"
KEPT_STATES = 20  # a node reads again if the state that it reads is removed
JOIN_S, LAST_CALL_S = 3600, 20  # to wait for the minimum number of nodes; then for more nodes
HEARTBEAT_S, LOST_AFTER = 5, 4  # heartbeats missed
_STATE_CLASSES = {
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState"),
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timezone"),
    ("datetime", "timedelta"),
}


class _StateReader(pickle.Unpickler):
    """Allow the types of torchelastic's state, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STATE_CLASSES:
            raise RendezvousStateError(
                f"the rendezvous state names {module}.{name}, which is not part of torchelastic's state"
            )
        return super().find_class(module, name)


class FolderBackend(RendezvousBackend):
    """Store one state that all nodes replace in turn."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, exist_ok=True)

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        while numbers := self._numbers():
            with contextlib.suppress(FileNotFoundError), open(self._path(numbers[-1]), "rb") as file:
                state = file.read()
                _StateReader(io.BytesIO(state)).load()
                return state, numbers[-1]
        return None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        number = int(token or 0) + 1
        if not self._make(number, state):
            found = self.get_state()
            return None if found is None else (*found, False)
        for old in self._numbers()[:-KEPT_STATES]:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path(old))
        return state, number, True

    def _make(self, number: int, state: bytes) -> bool:
        """Return True if this process made the state with this number, and it is the newest state."""
        staged = os.path.join(self.folder, f".{uuid.uuid4().hex}.tmp")
        with open(staged, "wb") as file:
            file.write(state)
        try:
            os.link(staged, self._path(number))
        except FileExistsError:
            return False
        finally:
            os.remove(staged)
        # otherwise this process slept, and its number was removed long ago
        return self._numbers()[-1:] == [number]

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, f"state.{number:08d}")

    def _numbers(self) -> list[int]:
        names = [name.partition(".")[2] for name in os.listdir(self.folder) if name.startswith("state.")]
        return sorted(int(name) for name in names if name.isdigit())


class FileRendezvous(DynamicRendezvousHandler):
    """Extend torchelastic's handler: nodes leave and join until end() is called."""

    # of this process, because the launcher makes it and does not return it
    newest: FileRendezvous | None = None
    folder: str

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, which has a separate store on its first node.

        torch (2.13 and 2.14) keeps the address of an earlier round, so nodes would use different addresses.
        """
        self._bootstrap_store_info, self._shared_tcp_store_server = None, None
        try:
            return super().next_rendezvous()
        except (RendezvousClosedError, RendezvousGracefulExitError):
            raise RendezvousEndedError(ended_code(self.folder) or 0) from None

    @property
    def round(self) -> int:
        return int(self._state_holder.state.round)

    def lost_one_of(self, num_nodes: int) -> bool:
        """Return True if fewer nodes than `num_nodes` are left. Wait until a lost node is noticed."""
        until = time.monotonic() + HEARTBEAT_S * (LOST_AFTER + 1)
        while True:
            with self._heartbeat_lock:
                self._state_holder.sync()
                if len(self._state_holder.state.participants) < num_nodes:
                    return True
            if time.monotonic() > until:
                return False
            time.sleep(1.0)

    def shutdown(self) -> bool:
        """The launcher calls this when it exits for any reason. Other nodes may continue."""
        self._stop_heartbeats()
        return True

    def leave(self) -> None:
        """Leave, so that the other nodes need not wait until this node counts as lost."""
        with contextlib.suppress(Exception):  # otherwise they wait
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self._settings.timeout.close))

    def end(self, code: int) -> None:
        """End the rendezvous: nodes that join later end with this code."""
        staged = os.path.join(self.folder, f".{uuid.uuid4().hex}.tmp")
        with open(staged, "w") as file:
            file.write(str(code))
        os.replace(staged, _ended_path(self.folder))
        with contextlib.suppress(Exception):
            self._close()


class RendezvousEndedError(Exception):
    """The other nodes have ended the job, with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"other nodes of the job have ended it with code {code}")
        self.code = code


def ended_code(folder: str) -> int | None:
    """Return the exit code of the job, or None while nodes may join."""
    try:
        with open(_ended_path(folder)) as file:
            return int(file.read())
    except FileNotFoundError:
        return None


def _ended_path(folder: str) -> str:
    return os.path.join(folder, "ended")


def _make_handler(parameters: RendezvousParameters) -> DynamicRendezvousHandler:
    """Raises RendezvousEndedError if the job has ended."""
    folder = os.path.join(parameters.endpoint, parameters.run_id)
    if (code := ended_code(folder)) is not None:
        raise RendezvousEndedError(code)
    backend = FolderBackend(folder)
    join, last_call = (
        timedelta(seconds=parameters.get_as_int(name, default) or default)
        for name, default in (("join_timeout", JOIN_S), ("last_call_timeout", LAST_CALL_S))
    )
    handler = FileRendezvous.from_backend(
        parameters.run_id, FileStore(os.path.join(folder, "store")), backend, parameters.min_nodes, parameters.max_nodes,
        parameters.local_addr, RendezvousTimeout(join, last_call), HEARTBEAT_S, LOST_AFTER,
    )  # fmt: skip
    handler.folder = folder
    FileRendezvous.newest = handler
    return handler


def register() -> None:
    """Register `--rdzv-backend folder` with torchrun. A second call changes nothing."""
    rendezvous_handler_registry.register(BACKEND, _make_handler)
