"""One stage of a chain: a workload, its name in the chain, and the stages that must have ended well before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from launch.workload import SERVICES, Workload


@dataclass(frozen=True)
class Stage:
    name: str
    workload: Workload
    after: tuple[str, ...] = ()

    @property
    def is_service(self) -> bool:
        """Whether it runs until it is stopped: nothing can wait for its end."""
        return self.workload.verb in SERVICES
