"""Check that a folder is the same on all nodes, and that its file system works as checkpoints and
leases need it.

They need three things: other nodes soon see a renamed file, a rename replaces a file completely,
and if several processes create a name exclusively, one process succeeds.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from pipeline.extras.nodes.links import gather
from pipeline.runtime.process.distributed import DistributedContext

SEEN_WITHIN_S = 30.0  # NFS clients may answer from their cache for that long (acdirmax, acregmax: 60 s)
TURNS = 10  # of exclusive creation
REPLACES = 100
PIECE = 64 << 10
WRITTEN = 64 << 20
STALE = 116  # ESTALE of NFS: the open file was removed; training opens it again


@dataclass
class FolderFacts:
    """The measurements of the folder. `problems`: faults that would break a run, each with its fix."""

    visible_after_s: float = 0.0
    replaces_seen: int = 0
    write_bytes_per_s: float = 0.0
    free_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def check_folder(context: DistributedContext, folder: str) -> FolderFacts:
    """Collective: return the same facts on all ranks. Writes below `folder`/.node_check-*.

    An error of the file system is a problem, not an exception, so that all ranks stay together.
    """
    place = Path(folder) / gather(context, f".node_check-{os.getpid()}-{time.time_ns()}")[0]
    facts = FolderFacts()
    for check in (_check_visible, _check_exclusive, _check_replaces, _check_writes):
        check(context, place, facts)
        if facts.problems:
            break
    dist.barrier()
    if context.is_main:
        shutil.rmtree(place, ignore_errors=True)
    return facts


def _attempt(action: Callable[[], object]) -> str:
    """Return why `action` failed, or "" if it succeeded."""
    try:
        action()
    except OSError as error:
        return str(error)
    return ""


def _on_rank_0(context: DistributedContext, action: Callable[[], object]) -> str:
    """Run `action` on rank 0. Return on all ranks why it failed, or "" if it succeeded."""
    return gather(context, _attempt(action) if context.is_main else "")[0]


def _check_visible(context: DistributedContext, place: Path, facts: FolderFacts) -> None:
    """Check that all ranks see a file that rank 0 renames into place."""

    def publish() -> None:
        place.mkdir()
        (place / "staged").write_text("here")
        (place / "staged").rename(place / "seen")

    if error := _on_rank_0(context, publish):
        facts.problems.append(f"{place.parent}: {error}; give an existing folder that rank 0 can write to")
        return
    begun = time.monotonic()
    while (seconds := time.monotonic() - begun) < SEEN_WITHIN_S and not (place / "seen").exists():
        time.sleep(0.01)
    times = gather(context, seconds)
    facts.visible_after_s = max(times)
    if blind := [str(rank) for rank, seconds in enumerate(times) if seconds >= SEEN_WITHIN_S]:
        facts.problems.append(
            f"rank(s) {', '.join(blind)} did not see {place.parent} of rank 0 within {SEEN_WITHIN_S:g} s: "
            "it is not one folder on all nodes; give a path on the shared file system"
        )


def _check_exclusive(context: DistributedContext, place: Path, facts: FolderFacts) -> None:
    """Check that exactly one rank succeeds if all ranks create the same name at the same time."""
    for turn in range(TURNS):
        dist.barrier()
        states = gather(context, _create(place / f"only-{turn}"))
        makers = [rank for rank, state in enumerate(states) if not state]
        if errors := [state for state in states if state not in ("", "taken")]:
            facts.problems.append(f"{place.parent}: {errors[0]}; every rank must be able to write there")
        elif len(makers) != 1:
            facts.problems.append(
                f"exclusive creation: {len(makers)} ranks ({makers}) created the same file; leases cannot separate two "
                "runs here: use another file system, or an object store with conditional writes"
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
    return ""


def _check_replaces(context: DistributedContext, place: Path, facts: FolderFacts) -> None:
    """Check that the other ranks read complete files while rank 0 replaces a file by renames."""
    target, done, seen = place / "replaced", place / "done", set[int]()

    def replace() -> None:
        for turn in range(1, REPLACES + 1):
            staged = target.with_name("next")
            staged.write_bytes(bytes([turn]) * PIECE)
            staged.replace(target)
        done.touch()

    error = _on_rank_0(context, lambda: target.write_bytes(b"\0" * PIECE))
    if context.is_main:
        error = error or _attempt(replace)
    limit = time.monotonic() + SEEN_WITHIN_S
    while not error and not done.exists() and time.monotonic() < limit:
        error = read_whole(target, seen)
    facts.replaces_seen = max(gather(context, len(seen)))
    if errors := [each for each in gather(context, error) if each]:
        facts.problems.append(
            f"rename over a file that other ranks read: {errors[0]}; checkpoints commit by rename: use another file system"
        )


def read_whole(path: Path, seen: set[int]) -> str:
    """Read a file whose bytes are all equal. Return what is wrong with the file, or add its byte to `seen`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return "" if error.errno == STALE else str(error)
    if len(content) != PIECE or len(set(content)) != 1:
        return f"a mix of two files ({len(content)} bytes, {len(set(content))} different)"
    seen.add(content[0])
    return ""


def _check_writes(context: DistributedContext, place: Path, facts: FolderFacts) -> None:
    """Measure how fast rank 0 writes durably, and how much space is free."""

    def write() -> None:
        begun = time.perf_counter()
        with (place / "written").open("wb") as file:
            file.write(os.urandom(1 << 20) * (WRITTEN >> 20))
            file.flush()
            os.fsync(file.fileno())
        facts.write_bytes_per_s = WRITTEN / max(time.perf_counter() - begun, 1e-9)
        facts.free_bytes = shutil.disk_usage(place).free

    if error := _on_rank_0(context, write):
        facts.problems.append(f"{place.parent}: {error}; a checkpoint could not be written either")
    measured = facts.write_bytes_per_s, facts.free_bytes
    facts.write_bytes_per_s, facts.free_bytes = gather(context, measured)[0]
