"""Say once, when it begins, that kernels are compiled: the first job of a new checkout else waits in silence.

Modules of kernels import this module. Numba reports what its cache does not hold; a kernel that is compiled in each
process, because Numba cannot keep it, takes no time worth a line.
"""

from __future__ import annotations

from numba.core import event
from numba.core.caching import NullCache

from pipeline.runtime.logs import get_logger


class _SayOnce(event.Listener):  # type: ignore[misc]
    said = False

    def on_start(self, event: event.Event) -> None:
        if not self.said and not isinstance(event.data["dispatcher"]._cache, NullCache):
            self.said = True
            get_logger(__name__).info(
                "compiling the CPU kernels that this job uses: a minute or two, once for this checkout and kind of CPU; "
                "`python -m pipeline precompile` compiles them ahead of a job"
            )

    def on_end(self, event: event.Event) -> None:
        pass


listener = _SayOnce()
event.register("numba:compile", listener)
