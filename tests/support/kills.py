"""Kill a piece of work right before any one of its changes of files, one after the other."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pipeline.runtime.storage.checksums import ChecksummedWriter

CHANGING = {"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "fcntl.flock"}


def killed_at(number: int, arm: Callable[[Callable[[], None]], None], work: Callable[[], None]) -> bool:
    """Whether a child process that does the work was killed right before its operation `number`."""
    child = os.fork()
    if child == 0:
        left = [number]

        def operation() -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        work_and_exit(arm, operation, work)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def copied_before_each(
    arm: Callable[[Callable[[], None]], None],
    work: Callable[[], None],
    folder: Path,
    copies: Path,
    part: int,
    parts: int,
) -> None:
    """A child process does the work, and right before operation n it copies `folder` to copies/<n>: what a kill there would leave.

    A killed process leaves what its calls to the kernel have done, and so does one that waits. Of every `parts` operations one is copied.
    """
    child = os.fork()
    if child == 0:
        own, lock, numbers = threading.local(), threading.Lock(), itertools.count(1)

        def operation() -> None:
            if getattr(own, "copies", False):  # these are operations too
                return
            own.copies = True
            with lock:
                if (number := next(numbers)) % parts == part:
                    shutil.copytree(folder, copies / str(number))
            own.copies = False

        work_and_exit(arm, operation, work)
    _, status = os.waitpid(child, 0)
    assert status == 0


def work_and_exit(
    arm: Callable[[Callable[[], None]], None], operation: Callable[[], None], work: Callable[[], None]
) -> NoReturn:
    """In the child: 0 where the work ended well, 1 where it raised, with the traceback."""
    try:
        arm(operation)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def before_each_change_of_files(operation: Callable[[], None]) -> None:
    """Opening for writing, writing a part of a shard, fsync, rename, link, removal, folder, lock."""

    def hear(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in CHANGING or writes:
            operation()

    sys.addaudithook(hear)
    call_before(os, "fsync", operation)
    call_before(ChecksummedWriter, "write", operation)


def call_before(owner: Any, name: str, operation: Callable[[], None]) -> None:
    function = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        operation()
        return function(*args, **kwargs)

    setattr(owner, name, called)
