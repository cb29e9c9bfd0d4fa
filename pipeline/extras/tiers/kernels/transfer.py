"""Transfer many spans between files and memory at once, by kernels that Numba compiles.

Linux's io_submit starts all transfers of a step in one call, and io_getevents waits for them. One
thread keeps the SSD busy. It needs a third of the processor time of threads that read one span
each. Kernels return the first span that failed and its errno (SHORT: the file ended); an errno of 0
means success.
"""

from __future__ import annotations

import platform

import numpy as np
from numba import njit, types

from pipeline.devices.cpu.kernels.parts import part

U, int64 = np.uint64, np.int64
SHORT = -1
EINTR = 4
SETUP, GET_EVENTS, SUBMIT = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}.get(platform.machine(), (0, 0, 0))
HAS_REQUESTS = SUBMIT > 0
# of 8 bytes: struct iocb and struct io_event of linux/aio_abi.h
REQUEST_NUMBERS, EVENT_NUMBERS = 8, 4
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uint64, types.int64))
_pwrite = types.ExternalFunction("pwrite", types.int64(types.int32, types.uintp, types.uint64, types.int64))
_syscall = types.ExternalFunction(
    "syscall", types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64)
)
_errno = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())


@part()
def _move(is_write, file, offset, size, address):  # type: ignore[no-untyped-def]
    """Transfer one span synchronously."""
    done = 0
    while done < size:
        if is_write:
            count = _pwrite(np.int32(file), U(address + done), U(size - done), int64(offset + done))
        else:
            count = _pread(np.int32(file), U(address + done), U(size - done), int64(offset + done))
        if count < 0 and _errno()[0] == EINTR:
            continue
        if count < 0:
            return int64(_errno()[0])
        if count == 0:
            return int64(SHORT)
        done += count
    return int64(0)


@njit(nogil=True, cache=True)
def move_each(is_write, files, offsets, sizes, addresses, begin, end):  # type: ignore[no-untyped-def]
    """Transfer spans [begin, end) one after the other. Return (failed span, errno)."""
    for at in range(begin, end):
        error = _move(is_write, files[at], offsets[at], sizes[at], addresses[at])
        if error != 0:
            return int64(at), error
    return int64(end), int64(0)


@njit(nogil=True, cache=True)
def move_together(context, is_write, files, offsets, sizes, addresses, requests, pointers, events):  # type: ignore[no-untyped-def]
    """Transfer all spans [n] (files, offsets and sizes in bytes, addresses). As many spans as there
    are requests are transferred at a time.

    context: the result of io_setup. requests [most at once, REQUEST_NUMBERS], pointers [most at
    once] and events [most at once, EVENT_NUMBERS] are overwritten. Spans that Linux refuses, or
    transfers only partly, are transferred by pread and pwrite, whose errors state the reason.
    """
    for first in range(0, len(files), len(requests)):
        count = min(len(requests), len(files) - first)
        for position in range(count):
            at = first + position
            requests[position, 0] = at
            requests[position, 1] = 0
            requests[position, 2] = int64(is_write) | int64(files[at]) << 32
            requests[position, 3], requests[position, 4] = addresses[at], sizes[at]
            requests[position, 5], requests[position, 6], requests[position, 7] = offsets[at], 0, 0
            pointers[position] = requests.ctypes.data + 8 * REQUEST_NUMBERS * position
        failed, error, submitted, finished = int64(0), int64(0), 0, 0
        while finished < submitted or (submitted < count and error == 0):
            if submitted < count and error == 0:
                waiting = pointers.ctypes.data + 8 * submitted
                taken = _syscall(SUBMIT, int64(context), int64(count - submitted), int64(waiting), int64(0), int64(0))
                if taken > 0:
                    submitted += taken
                elif submitted == finished:  # no pending transfer whose end would free space
                    at = first + submitted
                    failed, error = int64(at), _move(is_write, files[at], offsets[at], sizes[at], addresses[at])
                    submitted += 1
                    finished += 1
                    continue
            found = _syscall(
                GET_EVENTS,
                int64(context),
                int64(submitted - finished),
                int64(len(events)),
                int64(events.ctypes.data),
                int64(0),
            )
            for position in range(max(found, 0)):
                at = events[position, 0]
                if events[position, 2] != sizes[at] and error == 0:
                    failed, error = int64(at), _move(is_write, files[at], offsets[at], sizes[at], addresses[at])
            finished += max(found, 0)
        if error != 0:
            return failed, error
    return int64(len(files)), int64(0)
