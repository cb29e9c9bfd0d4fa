"""Define the exit codes of a verb (stdlib only). docs/do/reliability.md explains them."""

from __future__ import annotations

DONE = 0
FAILED = 1  # a bug, a dead peer, a broken host: a restart may help
USER_ERROR = 2  # config, data, disk: a restart ends the same way
REJECTED_WINDOW = 3  # retrain with strict=true: the tick finished and rejected a window
# EX_TEMPFAIL: asked to stop; run the same command again to resume from the last saved step
REQUEUE = 75
HANG = 76  # the watchdog found this rank or another rank hanging
INTERRUPTED = 130  # Ctrl-C; shells use 128 + SIGINT

# after these codes the agent does not restart ranks
FINAL = frozenset({USER_ERROR, REJECTED_WINDOW, REQUEUE, INTERRUPTED})
