"""Run a function of the API, and undo afterwards what it changes for the whole process.

A verb owns its process: it sets signal handlers, environment variables, loggers, threads of torch
and random generators, and joins a process group. A notebook or a script keeps its own.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pipeline.devices.cpu.process import find_kernel_cache, find_other_caches, limit_openmp_spin, use_huge_pages
from pipeline.runtime.errors import StorageError, TrainingError
from pipeline.runtime.logs import BAR, NONE, own_logging, progress_as
from pipeline.runtime.process import preemption
from pipeline.runtime.process.exit_codes import INTERRUPTED, REQUEUE
from pipeline.runtime.process.failures import describe_os_error

_is_active = False


@contextmanager
def session(verbose: bool = False, progress: bool | None = None, uses_torch: bool = True) -> Iterator[None]:
    """Run the block as a verb, and undo what it changed for the process. A session in a session changes nothing.

    verbose: print the log. progress: show a bar; None: in a terminal and in a notebook. Raises
    KeyboardInterrupt after a training that Ctrl-C has stopped was saved, and StorageError for a full disk or a
    path that cannot be used. A SIGTERM is handled as the process handles it, but after the work was saved.
    """
    global _is_active
    if _is_active:
        yield
        return
    _is_active = True
    try:
        with ExitStack() as undo:
            undo.enter_context(_signals())
            undo.enter_context(_environment())
            undo.enter_context(own_logging(verbose))
            undo.enter_context(progress_as(BAR if _is_shown(progress) else NONE))
            undo.enter_context(_collector())
            if uses_torch:
                from pipeline.training.own_process import own_torch_state

                undo.enter_context(own_torch_state())
            try:
                yield
            except SystemExit as stop:
                if stop.code == INTERRUPTED:
                    raise KeyboardInterrupt from None
                if stop.code == REQUEUE:
                    raise TrainingError("stopped by SIGTERM; the same call resumes") from None
                raise
            except OSError as error:
                if text := describe_os_error(error):
                    raise StorageError(text) from error
                raise
    finally:
        _is_active = False


def _is_shown(progress: bool | None) -> bool:
    if progress is not None:
        return progress
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return sys.stderr.isatty() or hasattr(get_shell(), "kernel")


@contextmanager
def _signals() -> Iterator[None]:
    """Handle SIGTERM as a request to save. Afterwards let the former handler have it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    preemption.listen()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        has_arrived = preemption.wanted() and not preemption.interrupted()
        preemption.withdraw()
        if has_arrived:
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    find_kernel_cache()
    find_other_caches()
    limit_openmp_spin()
    use_huge_pages()
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@contextmanager
def _collector() -> Iterator[None]:
    """Undo gc.freeze(), with which a verb keeps the objects of imports from being searched for garbage."""
    was_on, was_frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        if not was_frozen:
            gc.unfreeze()


@contextmanager
def torch_threads() -> Iterator[None]:
    """Use all cores, as `predict` does."""
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
