"""Check that a folder is one and the same on all nodes, and does what checkpoints and leases rely on.

They rely on: a file is seen by others soon after it is renamed into place, a rename replaces a file at once and whole, and of
many who create a name exclusively one succeeds. Locks of fcntl and the rate of durable writes are measured and told.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from pipeline.runtime.process.distributed import DistributedContext

SEEN_WITHIN_S = 30.0  # NFS clients may answer from their cache for as long (acdirmax is 60 s, acregmax too)
REPLACES = 100
PIECE = 64 << 10
WRITTEN = 64 << 20

Value = TypeVar("Value")


@dataclass
class FolderFacts:
    """What was found of a shared folder. `problems`: what would break a run, each with what to do."""

    visible_after_s: float = 0.0
    replaces_seen: int = 0
    locks: str = ""
    write_bytes_per_s: float = 0.0
    free_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def check_folder(context: DistributedContext, folder: str) -> FolderFacts:
    """Collective: the same facts on all ranks. Writes below `folder`/.node_check-*, which it removes.

    What a file system refuses is a problem, not an exception: all ranks stay together.
    """
    name = [f".node_check-{os.getpid()}-{time.time_ns()}"]
    dist.broadcast_object_list(name, device=context.device)
    place = Path(folder) / name[0]
    facts = FolderFacts()
    checks = (_check_visible, _check_exclusive, _check_replaces, _check_locks, _check_writes)
    for check in checks:
        check(context, place, facts)
        if facts.problems:
            break
    dist.barrier()
    if context.is_main:
        shutil.rmtree(place, ignore_errors=True)
    return facts


def _tried(action: Callable[[], object]) -> str:
    """Why it could not be done; empty where it was."""
    try:
        action()
    except OSError as error:
        return str(error)
    return ""


def _told_by_rank_0(context: DistributedContext, value: Value) -> Value:
    known: list[Value] = [value]
    dist.broadcast_object_list(known, device=context.device)
    return known[0]


def _gather(context: DistributedContext, value: Value) -> list[Value]:
    found: list[Value] = [value] * context.world_size
    dist.all_gather_object(found, value)
    return found


def _check_visible(context: DistributedContext, place: Path, facts: FolderFacts) -> None:
    """Whether all ranks see a file that rank 0 renames into place."""

    def publish() -> None:
        place.mkdir()
        staged = place / "staged"
        staged.write_text("here")
        staged.rename(place / "seen")

    error = _told_by_rank_0(context, _tried(publish) if context.is_main else "")
    if error:
        facts.problems.append(f"{place.parent}: {error}; give a folder that is there and that rank 0 may write to")
        return
    times = _gather(context, wait_until(lambda: _text(place / "seen") == "here"))
    facts.visible_after_s = max(times)
    blind = [str(rank) for rank, seconds in enumerate(times) if seconds >= SEEN_WITHIN_S]
    if blind:
        facts.problems.append(
            f"rank(s) {', '.join(blind)} did not see {place.parent} of rank 0 within {SEEN_WITHIN_S:g} s: it is not one "
            "folder on all nodes; give a path on the shared file system"
        )


def wait_until(holds: Callable[[], bool], limit_s: float = SEEN_WITHIN_S) -> float:
    """Seconds until it does, at most the limit."""
    begun = time.monotonic()
    while not holds():
        if time.monotonic() - begun >= limit_s:
            return limit_s
        time.sleep(0.01)
    return min(time.monotonic() - begun, limit_s)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _check_exclusive(context: DistributedContext, place: Path, facts: FolderFacts) -> None:
    """Of all ranks that create the same name at once, one has to succeed, ten times over."""
    for turn in range(10):
        dist.barrier()
        states = _gather(context, _create(place / f"only-{turn}"))
        errors = [state for state in states if state not in ("made", "taken")]
        makers = [rank for rank, state in enumerate(states) if state == "made"]
        if errors:
            facts.problems.append(f"{place.parent}: {errors[0]}; every rank has to be able to write there")
        elif len(makers) != 1:
            facts.problems.append(
                f"exclusive creation: {len(makers)} ranks ({makers}) made the same file; leases cannot keep two runs apart "
                "here: use another file system, or an object store with conditional writes"
            )
        if facts.problems:
            return


def _create(path: Path) -> str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return "taken"
    except OSError as error:
        return str(error)
    return "made"


def _check_replaces(context: DistributedContext, place: Path, facts: FolderFacts) -> None:
    """Rank 0 replaces a file a hundred times by rename while the others read it: each read is whole."""
    target = place / "replaced"
    error = _told_by_rank_0(context, _tried(lambda: target.write_bytes(b"\0" * PIECE)) if context.is_main else "")
    seen: set[int] = set()
    if context.is_main:
        error = error or _tried(lambda: _replace(place, target))
    elif not error:
        done, limit = place / "done", time.monotonic() + SEEN_WITHIN_S
        while not error and not done.exists() and time.monotonic() < limit:
            error = _torn(target, seen)
    errors = [each for each in _gather(context, error) if each]
    facts.replaces_seen = max(_gather(context, len(seen)))
    if errors:
        facts.problems.append(
            f"rename over a file that others read: {errors[0]}; checkpoints commit by rename: use another file system"
        )


def _replace(place: Path, target: Path) -> None:
    try:
        for turn in range(1, REPLACES + 1):
            staged = place / "next"
            staged.write_bytes(bytes([turn]) * PIECE)
            staged.replace(target)
    finally:
        (place / "done").touch()


def _torn(path: Path, seen: set[int]) -> str:
    """What is wrong with one read; adds the content's byte to `seen`."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return "no file"
    except OSError as error:  # NFS: the open file was removed (ESTALE); training opens it again
        return "" if error.errno == 116 else str(error)
    if len(content) != PIECE or len(set(content)) != 1:
        return f"a mix of two files ({len(content)} bytes, {len(set(content))} different)"
    seen.add(content[0])
    return ""


def _check_locks(context: DistributedContext, place: Path, facts: FolderFacts) -> None:
    """Told, never a problem: nothing relies on locks between nodes."""
    path = place / "replaced"
    own = _lock(path) if context.is_main else ("", -1)
    dist.barrier()
    state, descriptor = own if context.is_main else _lock(path)
    others = [each for rank, each in enumerate(_gather(context, state)) if rank]
    for each in {own[1], descriptor} - {-1}:
        os.close(each)
    facts.locks = (
        own[0] or " and ".join(sorted({each or "not kept between nodes" for each in others})) or "one rank: not tried"
    )
    facts.locks = _told_by_rank_0(context, facts.locks)


def _lock(path: Path) -> tuple[str, int]:
    """Empty where it was taken, `kept` where another has it, else why not; and the open file that holds it."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "kept", descriptor
    except OSError as error:
        return f"not offered ({error.strerror})", descriptor
    return "", descriptor


def _check_writes(context: DistributedContext, place: Path, facts: FolderFacts) -> None:
    """The rate at which rank 0 writes 64 MiB durably, and what is free."""
    error = ""
    if context.is_main:
        begun = time.perf_counter()
        error = _tried(lambda: _write(place / "written"))
        facts.write_bytes_per_s = 0.0 if error else WRITTEN / max(time.perf_counter() - begun, 1e-9)
        facts.free_bytes = shutil.disk_usage(place).free
    told = error, facts.write_bytes_per_s, facts.free_bytes
    error, facts.write_bytes_per_s, facts.free_bytes = _told_by_rank_0(context, told)
    if error:
        facts.problems.append(f"{place.parent}: {error}; a checkpoint could not be written either")


def _write(path: Path) -> None:
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20) * (WRITTEN >> 20))
        file.flush()
        os.fsync(file.fileno())
