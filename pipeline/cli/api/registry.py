"""Read and change a registry of models, as `python -m pipeline registry` does."""

from __future__ import annotations

from itertools import islice

from pipeline.cli.api.artifact import Artifact
from pipeline.cli.api.session import session
from pipeline.cli.registry import rollback
from pipeline.config.jobs.retrain import RegistryJob
from pipeline.retraining.ledger import UNPINNED, Ledger, Record
from pipeline.retraining.promotion import add_run
from pipeline.retraining.registry import Registry as Versions
from pipeline.retraining.registry import RegistryError, Version


class Registry:
    """The versions of a model in the folder `path`. The champion is the version that serves."""

    def __init__(self, path: str) -> None:
        self.path = str(path)
        self._versions = Versions(self.path)

    def __repr__(self) -> str:
        champion = self.champion
        return f"Registry({self.path!r}, champion={champion.name if champion else None})"

    @property
    def champion(self) -> Version | None:
        """The version that serves and that the next training starts from; None if there is none."""
        return self._versions.champion()

    @property
    def versions(self) -> list[Version]:
        """All versions, oldest first."""
        return list(self._versions.versions())

    def history(self, num: int = 20) -> list[Record]:
        """Return the newest `num` records of what was promoted, rejected, skipped and rolled back, newest first."""
        return list(islice(Ledger(self.path).newest(), num))

    def artifact(self) -> Artifact:
        """Return the champion's artifact."""
        return Artifact(self.path)

    def promote(self, run: str) -> Version:
        """Make a run the first champion. Raises RegistryError if there is one: a later model must pass the gate
        of retrain_tick().
        """
        with session(uses_torch=False):
            add_run(self._versions, Ledger(self.path), str(run))
        return self._now()

    def rollback(self, version: str | None = None, reason: str = "") -> Version:
        """Make an earlier version the champion, the one before by default, and pin it: retrain_tick() promotes
        nothing until unpin(). Raises RegistryError if the version is missing or damaged.
        """
        with session(uses_torch=False):
            rollback(RegistryJob(registry=self.path, command="rollback", version=version, reason=reason))
        return self._now()

    def unpin(self) -> Version:
        """Let retrain_tick() promote again."""
        pointer = self._versions.pointer()
        if pointer is None or pointer.pinned:
            Ledger(self.path).append(Record(UNPINNED, version=self._versions.unpin().version))
        return self._now()

    def _now(self) -> Version:
        champion = self.champion
        if champion is None:
            raise RegistryError(f"{self.path} has no champion")
        return champion
