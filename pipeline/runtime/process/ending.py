"""End a command without the interpreter's finalization (stdlib only).

Before Python 3.14 a native thread that asks for the interpreter's lock during the finalization aborts the process
(github.com/python/cpython/issues/87135): Arrow's threads release buffers after the last read, so a command that had
finished could end with SIGABRT. The finalization also takes half a second once torch is imported.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from pipeline.runtime.process.exit_codes import DONE, FAILED


def run_to_exit(main: Callable[[], None]) -> NoReturn:
    """Run `main`, wait for threads, run what atexit knows, write buffered output, and end the process with main's code.

    Any exception other than SystemExit is left to the interpreter.
    """
    code = DONE
    try:
        main()
    except SystemExit as end:
        code = _exit_code(end)
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads that are not daemons, and those of executors
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError, ValueError):  # its reader left, or it is closed
            stream.flush()
    os._exit(code)


def _exit_code(end: SystemExit) -> int:
    """Return the exit code of sys.exit(...) as the interpreter has it: a text is printed and means 1."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or DONE) & 0xFF
    print(end.code, file=sys.stderr)
    return FAILED
