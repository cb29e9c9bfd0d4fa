"""Give a test, or a rank's task, a process like the one before it: what it changes for the whole process ends with it."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pipeline import devices
from pipeline.config import registry
from pipeline.config.jobs.job import CONFIG_NAMES

Undo = Callable[[], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def own_process_state() -> Iterator[None]:
    """Environment, folder, umask, signals, hooks, loggers, warnings, collector, plugins and torch's settings are put back.

    Random generators start from 0, so that nothing depends on who drew from them before.
    """
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    undo = [_environment(), _folder(), _signals_and_hooks(), _loggers(), _collector(), _plugins(), _torch(), _device()]
    with warnings.catch_warnings():
        try:
            yield
        finally:
            for put_back in undo:
                put_back()


def _device() -> Undo:
    before = devices._current
    return lambda: devices.use(before)


def _environment() -> Undo:
    before = dict(os.environ)

    def undo() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})

    return undo


def _folder() -> Undo:
    folder, mask = os.getcwd(), os.umask(0)
    os.umask(mask)

    def undo() -> None:
        os.chdir(folder)
        os.umask(mask)

    return undo


def _signals_and_hooks() -> Undo:
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    hook = sys.excepthook

    def undo() -> None:
        sys.excepthook = hook
        for number, handler in before:
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)

    return undo


def _all_loggers() -> list[logging.Logger]:
    made = logging.Logger.manager.loggerDict.values()
    return [logging.getLogger(), *(logger for logger in made if isinstance(logger, logging.Logger))]


def _loggers() -> Undo:
    before = [
        (each, each.level, each.propagate, each.disabled, list(each.handlers), list(each.filters))
        for each in _all_loggers()
    ]

    def undo() -> None:
        ours = [each for each in _all_loggers() if each.name.partition(".")[0] == "pipeline"]
        known = {entry[0] for entry in before}
        # What an import within the test has made, and the library has set up, is the library's.
        new = [(each, logging.NOTSET, True, False, [], []) for each in ours if each not in known]
        for each, level, propagate, disabled, handlers, filters in [*before, *new]:
            if each.level != level:
                each.setLevel(level)
            each.propagate, each.disabled = propagate, disabled
            each.handlers[:], each.filters[:] = handlers, filters

    return undo


def _collector() -> Undo:
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0

    def undo() -> None:
        (gc.enable if enabled else gc.disable)()
        if gc.get_freeze_count() and not frozen:
            gc.unfreeze()

    return undo


def _plugins() -> Undo:
    """A plugin that was loaded is unknown again, and imported anew when it is next asked for."""
    before = set(registry._loaded)

    def undo() -> None:
        for name in [name for name in registry._loaded - before if not name.startswith("pipeline.")]:
            if name == registry.ENTRY_POINTS:
                continue
            registry._loaded.remove(name)
            for known in registry._components.values():
                for key in [key for key, found in known.items() if found.__module__.startswith(name)]:
                    del known[key]
            for job in [job for job in CONFIG_NAMES if job.__module__.startswith(name)]:
                del CONFIG_NAMES[job]
            for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
                del sys.modules[module]

    return undo


def _torch() -> Undo:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    precision, grad = torch.get_float32_matmul_precision(), torch.is_grad_enabled()

    def undo() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(precision)
        torch.set_grad_enabled(grad)
        _forget_compiled()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        _forget_groups()

    return undo


def _forget_compiled() -> None:
    """Dynamo compiles a function anew eight times in a process, and then no more: a test that compiles uses them up."""
    if (frames := sys.modules.get("torch._dynamo.utils")) and any(frames.counters.values()):
        sys.modules["torch._dynamo"].reset()
        frames.counters.clear()


def _forget_groups() -> None:
    """TorchRec keeps for the life of a process what it agreed on, or made, within a process group."""
    if comm := sys.modules.get("torchrec.distributed.comm"):
        comm._INTRA_PG = comm._CROSS_PG = None
    if validation := sys.modules.get("torchrec.distributed.collective_utils"):
        validation._INITIALIZED = False  # 1.8; ranks that were not there would wait
