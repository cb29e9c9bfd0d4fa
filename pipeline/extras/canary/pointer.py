"""Read and write <registry>/canary.json: the version that serves a share of the requests next to the champion.

The file is replaced atomically and never removed. Without a canary its version is null.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pipeline.retraining.registry import PinnedError, Registry, RegistryError, timestamp
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.json_values import checked
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import check_not_removed, check_still_signed, parse_pointer, pointer_text
from pipeline.runtime.storage.signature import Purpose, next_number

FILE = "canary.json"


@dataclass(frozen=True)
class CanaryPointer:
    """`share` of the keys get answers of `version`. reason: why the last canary was stopped. number
    rises with every change."""

    version: str | None = None
    share: float = 0.0
    champion: str | None = None
    started_at: str = ""
    reason: str = ""
    number: int = 0


class CanaryFile:
    """The pointer of one registry."""

    def __init__(self, registry: str) -> None:
        self.path = storage.join(registry.rstrip("/"), FILE)

    def read(self) -> CanaryPointer:
        return self._read()[0]

    def _read(self) -> tuple[CanaryPointer, str | None]:
        try:
            text = storage.read_text(self.path)
        except FileNotFoundError:
            check_not_removed(self.path)
            return CanaryPointer(), None
        except UnicodeDecodeError as error:
            raise DamagedError(f"{self.path} is damaged ({error})") from None
        pointer = checked(parse_pointer(text, self.path, Purpose.CANARY), CanaryPointer, self.path)
        if not 0.0 <= pointer.share <= 1.0:
            raise DamagedError(f"{self.path} has share {pointer.share!r}: start the canary again")
        return pointer, text

    def start(self, registry: Registry, version: str, share: float) -> CanaryPointer:
        """Let `version` answer a share of the requests. Raises RegistryError if it cannot, or another canary runs."""
        now, champion, found = self.read(), registry.pointer(), registry.version(version)
        if champion is None:
            raise RegistryError(f"{registry.path} has no champion to compare {version} with: promote a version first")
        if champion.version == version:
            raise RegistryError(f"{version} is the champion of {registry.path}: name another version")
        if champion.pinned:
            raise PinnedError(f"{champion.version} is pinned ({champion.reason or 'no reason given'}): unpin it first")
        if found.artifact is None:
            raise RegistryError(f"{version} of {registry.path} has no artifact, so it cannot serve")
        if problem := registry.verify(found)[0]:
            raise RegistryError(f"{version} is damaged and does not serve: {problem}")
        if now.version not in (None, version):
            raise RegistryError(f"{now.version} is the canary of {registry.path}: stop it first")
        return self._write(CanaryPointer(version, share, champion.version, timestamp()))

    def stop(self, reason: str, expected: str | None = None) -> CanaryPointer:
        """Let servers drop the canary. Raises RegistryError if there is none, or it is not `expected`."""
        now = self.read()
        if now.version is None or expected not in (None, now.version):
            raise RegistryError(f"{self.path} names {now.version or 'no canary'}, not {expected or 'a canary'}")
        return self._write(CanaryPointer(reason=reason))

    def _write(self, pointer: CanaryPointer) -> CanaryPointer:
        now, text = self._read()
        check_still_signed(self.path)
        written = CanaryPointer(**{**asdict(pointer), "number": next_number(now.number)})
        if not storage.swap_text(self.path, text, pointer_text(asdict(written), Purpose.CANARY)):
            raise RegistryError(f"{self.path} was changed by another process at the same time: try again")
        return written
