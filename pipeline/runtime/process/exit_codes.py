"""Exit codes of a verb, as schedulers and the launcher's agent read them (stdlib only).

docs/do/reliability.md has the table for people.
"""

from __future__ import annotations

DONE = 0
FAILED = 1  # a bug, a dead peer, a broken host: starting again may help
USER_ERROR = 2  # config, data, disk: starting again ends the same way
REJECTED_WINDOW = 3  # retrain with strict=true: the tick did its work, and rejected a window
REQUEUE = 75  # EX_TEMPFAIL: asked to stop; the same command resumes from the last saved step
HANG = 76  # the watchdog gave up on this rank or on another
INTERRUPTED = 130  # Ctrl-C; as shells say it, 128 + SIGINT

FINAL = frozenset({USER_ERROR, REJECTED_WINDOW, REQUEUE, INTERRUPTED})  # after these the agent starts no rank again
