"""Store trained models as immutable versions in a folder or an object store, and point to the
champion.

    <registry>/versions/v000012/manifest.json    lineage, and size and checksums of every other file: it is the commit
                                checkpoint/step_00000390/...    data/dataset.json, data/vocabulary/...    artifact/...
    <registry>/champion.json                     which version serves and is trained on: replaced atomically
    <registry>/ledger/00000042.json              what was done and why (ledger.py): never changed

The pointer is compared and swapped, so a promotion cannot overwrite a rollback that it has not
seen. This module does not import torch, so that a rollback is fast.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pipeline.runtime.errors import DamagedError, RetrainingError, did_you_mean
from pipeline.runtime.json_values import checked
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.atomic import Fence, committed_names, published_folders
from pipeline.runtime.storage.checksums import FileEntry, damage, same_bytes, size_problem
from pipeline.runtime.storage.manifest import (
    MANIFEST,
    check_not_removed,
    check_still_signed,
    open_manifest,
    parse_pointer,
    pointer_text,
    seal_manifest,
)
from pipeline.runtime.storage.signature import Purpose, next_number

POINTER = "champion.json"
ARTIFACT = "artifact"
FORMAT_VERSION = 1
VERSION_NAME = re.compile(r"v(\d{6,15})")
PROMOTION_ATTEMPTS = 5


class RegistryError(RetrainingError):
    """The registry lacks what was requested. The message lists what it has."""


class PinnedError(RegistryError):
    """A rollback has pinned the champion: nothing is promoted until `unpin`."""


@dataclass(frozen=True)
class Version:
    """One model. `path` is its folder, `manifest` describes it."""

    name: str
    path: str
    manifest: dict[str, Any]

    @property
    def lineage(self) -> dict[str, Any]:
        """Return window, parent, candidate, config_hash, code_version, metrics and created_at."""
        found: dict[str, Any] = self.manifest["lineage"]
        return found

    @property
    def checkpoint(self) -> str:
        """Return the folder of its step (step_00000390)."""
        steps = {name.split("/")[1] for name in self.manifest["files"] if name.startswith("checkpoint/")}
        if len(steps) != 1:
            raise DamagedError(f"{self.path} holds {len(steps)} steps, and a version has one")
        return storage.join(self.path, "checkpoint", *steps)

    @property
    def data(self) -> str:
        """Return the folder of dataset.json and the vocabularies of its ids. Shards are not
        kept.
        """
        return storage.join(self.path, "data")

    @property
    def config(self) -> str:
        """Return the path of the train job's YAML."""
        return storage.join(self.path, "config.yaml")

    @property
    def artifact(self) -> str | None:
        """Return the folder that `serve` loads, or None if no artifact was exported."""
        has_one = any(name.startswith(f"{ARTIFACT}/") for name in self.manifest["files"])
        return storage.join(self.path, ARTIFACT) if has_one else None

    @property
    def size_bytes(self) -> int:
        return sum(int(entry["size_bytes"]) for entry in self.manifest["files"].values())

    def has_file(self, name: str, wanted: FileEntry) -> bool:
        """Whether the version has a file of this name with the bytes that `wanted` describes."""
        entry = self.manifest["files"].get(name)
        return entry is not None and same_bytes(storage.join(self.path, name), entry, wanted)


@dataclass
class _VersionValues:
    """The types of a version's values."""

    version: str
    lineage: dict[str, Any]


@dataclass(frozen=True)
class Pointer:
    """The content of champion.json. `number` rises with every change."""

    version: str
    previous: str | None
    number: int
    promoted_at: str
    pinned: bool = False
    reason: str = ""


class Registry:
    """Read and change a registry.

    One tick at a time promotes (a lease ensures it); people may roll back and unpin anytime.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        self._versions = storage.join(self.path, "versions")
        self._pointer = storage.join(self.path, POINTER)
        self._folders = published_folders(self._versions, VERSION_NAME, flat=True)

    def champion(self) -> Version | None:
        """Return the version that the pointer names, or None. Raises DamagedError,
        RegistryError.
        """
        pointer = self.pointer()
        return None if pointer is None else self.version(pointer.version)

    def pointer(self) -> Pointer | None:
        return self._read_pointer()[0]

    def _read_pointer(self) -> tuple[Pointer | None, str | None]:
        """Return the pointer and the text that it was read from."""
        try:
            text = storage.read_text(self._pointer)
        except FileNotFoundError:
            check_not_removed(self._pointer)
            return None, None
        except UnicodeDecodeError as error:
            raise self._damaged(f"{self._pointer} is damaged ({error})") from None
        try:
            pointer = checked(parse_pointer(text, self._pointer, Purpose.CHAMPION), Pointer, self._pointer)
            for name in (pointer.version, pointer.previous):
                if name is not None and not VERSION_NAME.fullmatch(name):
                    raise DamagedError(f"{self._pointer} names the version {name[:100]!r}")
            return pointer, text
        except DamagedError as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, problem: str) -> DamagedError:
        return DamagedError(
            f"{problem}: `python -m pipeline registry rollback {self.path} VERSION` writes the pointer again; "
            f"there are {', '.join(self.names()[-10:]) or 'no versions'}"
        )

    def names(self) -> list[str]:
        """Return committed versions, oldest first."""
        return sorted(committed_names(self._versions, VERSION_NAME), key=lambda name: int(name[1:]))

    def versions(self) -> Iterator[Version]:
        """Iterate over the versions, newest first."""
        return (self.version(name) for name in reversed(self.names()))

    def version(self, name: str) -> Version:
        """Return a version.

        Raises RegistryError if it does not exist, DamagedError if its manifest was changed.
        """
        path = storage.join(self._versions, name)
        if not VERSION_NAME.fullmatch(name) or not storage.is_file(storage.join(path, MANIFEST)):
            names = self.names()
            near = did_you_mean(name, names)
            raise RegistryError(f"{self.path} has no version {name!r} among {', '.join(names[-10:]) or 'none'}{near}")
        manifest = open_manifest(storage.join(path, MANIFEST), Purpose.VERSION, FORMAT_VERSION)
        if (named := checked(manifest, _VersionValues, f"{path}/{MANIFEST}").version) != name:
            raise DamagedError(f"{path}/{MANIFEST} is that of version {named[:100]!r}")
        return Version(name, path, manifest)

    def next_name(self) -> str:
        taken = [int(name[1:]) for name in storage.list_folder(self._versions) if VERSION_NAME.fullmatch(name)]
        pointer = self.pointer()
        taken += [int(name[1:]) for name in (pointer.version, pointer.previous) if name] if pointer else []
        return f"v{max(taken, default=0) + 1:06d}"

    def publish(self, name: str, files: dict[str, str], lineage: dict[str, Any], fence: Fence | None = None) -> Version:
        """Commit a version. `files` maps its paths to local files, which are copied.

        `fence`: as in promote().

        Raises:
            FileExistsError: a version of this name exists.
            OSError: it cannot be written; nothing is committed.
        """
        path = storage.join(self._versions, name)
        if storage.is_file(storage.join(path, MANIFEST)):
            raise FileExistsError(f"{path} is already committed: versions are never changed")
        attempt = self._folders.begin(name)
        try:
            entries = {at: self._folders.add(attempt, at, source) for at, source in files.items()}
            manifest = {"format_version": FORMAT_VERSION, "version": name, "lineage": lineage, "files": entries}
            return Version(
                name, self._folders.commit(attempt, seal_manifest(manifest, Purpose.VERSION), fence), manifest
            )
        except BaseException:
            self._folders.discard(attempt)
            raise

    def verify(self, version: Version, budget_s: float | None = None) -> tuple[str, int]:
        """Return (error, number of bytes whose checksums were verified).

        The error is empty if all is well.

        The sizes of all files are checked. budget_s: after this time no more checksums are started.
        """
        began, checked = time.monotonic(), 0

        def check(name: str, entry: FileEntry) -> tuple[str, int]:
            path = storage.join(version.path, name)
            if budget_s is not None and time.monotonic() - began > budget_s:
                return "", 0
            return damage(path, entry), int(entry["size_bytes"])

        files = sorted(version.manifest["files"].items(), key=lambda item: int(item[1]["size_bytes"]))
        with ThreadPoolExecutor(8) as pool:  # reading and zlib.crc32 release the GIL
            problem = next(
                filter(None, pool.map(lambda item: size_problem(storage.join(version.path, item[0]), item[1]), files)),
                "",
            )
            if problem:
                return problem, 0
            for found, size in pool.map(lambda item: check(*item), files):
                problem, checked = problem or found, checked + size
        return problem, checked

    def check_inputs(self, version: Version) -> None:
        """Read what a challenger takes from a version besides the step, which has a manifest of its own.

        Raises:
            DamagedError: the job, dataset.json or a vocabulary is not what the version's manifest says.
        """
        for name, entry in version.manifest["files"].items():
            is_input = name == "config.yaml" or name.startswith("data/")
            if is_input and (problem := damage(storage.join(version.path, name), entry)):
                raise DamagedError(f"{version.name} is damaged: {problem}")

    def promote(self, version: Version, expected: Pointer | None) -> Pointer:
        """Move the pointer from `expected` to `version`. If it was moved before, it stays.

        Raises:
            PinnedError: a rollback came first.
            RegistryError: another process has moved the pointer.
        """
        now, text = self._read_pointer()
        if now is not None and now.version == version.name and not now.pinned:
            return now
        if now is not None and now.pinned:
            raise PinnedError(
                f"{self.path}: {now.version} is pinned ({now.reason or 'no reason given'}); unpin it first"
            )
        if now != expected:
            raise RegistryError(
                f"{self._pointer} was moved to {now and now.version} by another process: nothing is promoted"
            )
        number, previous = (now.number, now.version) if now else (0, None)
        moved = Pointer(version.name, previous, next_number(number), timestamp())
        check_still_signed(self._pointer)
        if not storage.swap_text(self._pointer, text, _to_text(moved)):
            raise RegistryError(f"{self._pointer} was changed by another process at the same time: nothing is promoted")
        return moved

    def pin(self, version: str, reason: str) -> Pointer:
        """Point to `version` even if a tick is running, and let no tick promote until unpin()."""
        return self._change(
            lambda now: Pointer(
                version,
                now.version if now and now.version != version else (now.previous if now else None),
                next_number(now.number if now else 0),
                timestamp(),
                pinned=True,
                reason=reason,
            )
        )

    def unpin(self) -> Pointer:
        """Allow promotions again. Raises RegistryError if there is no champion."""

        def change(now: Pointer | None) -> Pointer:
            if now is None:
                raise RegistryError(f"{self.path} has no champion yet")
            return replace(now, pinned=False, reason="", number=next_number(now.number)) if now.pinned else now

        return self._change(change)

    def _change(self, change: Any) -> Pointer:
        for _ in range(PROMOTION_ATTEMPTS):
            try:
                now, text = self._read_pointer()
            except DamagedError:
                now, text = None, self._damaged_text()
            check_still_signed(self._pointer)
            moved: Pointer = change(now)
            if moved == now or storage.swap_text(self._pointer, text, _to_text(moved)):
                return moved
        raise RegistryError(f"{self._pointer} is changed by other processes all the time: try again")

    def _damaged_text(self) -> str | None:
        """What a damaged pointer holds; one that is not text is removed."""
        try:
            return storage.read_text(self._pointer)
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            storage.remove(self._pointer)
            return None

    def predecessor(self) -> str | None:
        """Return the target of a rollback: the champion's parent by lineage if it exists, otherwise
        the version before it.
        """
        pointer = self.pointer()
        if pointer is None:
            return None
        names = self.names()
        parent = None
        # the champion's manifest may be damaged, which is a reason to roll back
        with suppress(DamagedError):
            parent = self.version(pointer.version).lineage.get("parent") if pointer.version in names else None
        return next((name for name in (parent, pointer.previous) if name in names and name != pointer.version), None)

    def prune(self, keep: int) -> list[str]:
        """Remove all versions except the newest `keep`, the champion and its rollback target.

        Return the removed names.

        Only for the process with the registry's lease, because it also removes partly written
        versions.
        """
        self._folders.remove_leftovers()
        names = self.names()
        removed = []
        for name in names[:-keep]:
            # read again each time, because a user may roll back at any moment
            pointer = self.pointer()
            if pointer is None or name in (pointer.version, pointer.previous, self.predecessor()):
                continue
            self._folders.remove(name)
            removed.append(name)
        return removed


def timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _to_text(pointer: Pointer) -> str:
    return pointer_text(asdict(pointer), Purpose.CHAMPION)
