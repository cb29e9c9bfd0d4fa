"""Run compiled kernels on torch's OpenMP threads, which are still awake if torch has just used them.

A second thread pool would be woken for each kernel, through Python's lock, on cores where torch's
threads may still spin. On Linux, libgomp and LLVM's OpenMP both start a parallel region with
GOMP_parallel, which compilers call for `#pragma omp parallel`
(https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-construct.html).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core.cgutils import alloca_once
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from pipeline.devices.cpu.kernels import ALL_TRUE, NONE_RAISED
from pipeline.devices.cpu.kernels.parts import NO_WRAPPERS

Kernel = Any  # a function that Numba compiles: kernel(*arguments, begin, end)
INT64, INT32, ADDRESS = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
NEXT, OUTCOME, COUNT, SHARES, ARGUMENTS = range(5)  # what the threads of a region share
START = "GOMP_parallel"


@cache
def is_there() -> bool:
    """Return whether this process can call torch's OpenMP (not on macOS). Without it kernels run on one thread."""
    try:
        start = getattr(ctypes.CDLL(torch._C.__file__), START)
    except (OSError, AttributeError):
        return False
    binding.add_symbol(START, ctypes.cast(start, ctypes.c_void_p).value)
    return True


@cache
def region_of(kernel: Kernel) -> Callable[[tuple[Any, ...], np.uint64, np.uint64, np.uint32], int]:
    """Return a function region(arguments, count, shares, threads) that runs kernel(*arguments,
    begin, end) on every share of 0..count.

    The result of region() has the bit ALL_TRUE if every call returned True, and the bit NONE_RAISED
    if no call raised. Numba caches the function on disk as part of the kernel's file.
    """
    own, name = kernel.py_func, f"{kernel.py_func.__name__}_region"
    code = _region.__code__.replace(
        co_filename=own.__code__.co_filename, co_firstlineno=own.__code__.co_firstlineno, co_name=name
    )
    region = FunctionType(code, {"_run_shares": _run_shares, "kernel": kernel, "__name__": own.__module__}, name)
    region.__module__, region.__qualname__ = own.__module__, name
    compiled: Callable[[tuple[Any, ...], np.uint64, np.uint64, np.uint32], int] = njit(nogil=True, cache=True)(region)
    return compiled


def _region(arguments, count, shares, threads):  # type: ignore[no-untyped-def]
    return _run_shares(kernel, arguments, count, shares, threads)  # noqa: F821


@intrinsic
def _run_shares(
    _: Any, kernel: Any, arguments: Any, count: Any, shares: Any, threads: Any
) -> tuple[Signature, Callable[..., Any]]:
    """Let each thread take the next share until none is left. So a thread that starts late delays nothing."""
    dispatcher, number = kernel.dispatcher, types.uint64

    def call(arguments, begin, end):  # type: ignore[no-untyped-def]
        return dispatcher(*(arguments + (begin, end)))  # noqa: RUF005  (all that Numba compiles)

    whole = njit(nogil=True, **NO_WRAPPERS)(call)
    whole.compile((arguments, number, number))
    compiled: Any = next(iter(whole.overloads.values()))

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        context.add_linking_libs((compiled.library,))
        common = _Common(builder, alloca_once(builder, ir.LiteralStructType([INT64] * 4 + [given[1].type])))
        for place, value in (
            (NEXT, INT64(0)),
            (OUTCOME, INT64(ALL_TRUE | NONE_RAISED)),
            (COUNT, given[2]),
            (SHARES, given[3]),
        ):
            common.store(place, value)
        common.store(ARGUMENTS, given[1])
        module = builder.module
        work = ir.Function(module, ir.FunctionType(ir.VoidType(), [ADDRESS]), module.get_unique_name("shares"))
        work.linkage = "internal"
        _take_shares(context, work, common.pointer.type, compiled)
        kinds = [work.type, ADDRESS, INT32, INT32]
        start = module.globals.get(START) or ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), START)
        builder.call(start, [work, builder.bitcast(common.pointer, ADDRESS), given[4], INT32(0)])
        return common.load(OUTCOME)

    return types.int64(kernel, arguments, number, number, types.uint32), generate


def _take_shares(context: Any, work: ir.Function, kind: ir.PointerType, compiled: Any) -> None:
    """Write the code that each thread of a region runs: call the compiled kernel until no share is left."""
    builder = ir.IRBuilder(work.append_basic_block("entry"))
    common = _Common(builder, builder.bitcast(work.args[0], kind))
    count, shares, arguments = (common.load(place) for place in (COUNT, SHARES, ARGUMENTS))
    turn, share, end = (work.append_basic_block(name) for name in ("turn", "share", "end"))
    builder.branch(turn)
    builder.position_at_end(turn)
    taken = builder.atomic_rmw("add", common.at(NEXT), INT64(1), "seq_cst")
    builder.cbranch(builder.icmp_unsigned("<", taken, shares), share, end)
    builder.position_at_end(share)
    bounds = [builder.udiv(builder.mul(count, number), shares) for number in (taken, builder.add(taken, INT64(1)))]
    status, found = context.call_internal_no_propagate(
        builder, compiled.fndesc, compiled.signature, [arguments, *bounds]
    )
    outcome = builder.select(
        builder.icmp_signed("==", status.code, status.code.type(0)), INT64(ALL_TRUE | NONE_RAISED), INT64(ALL_TRUE)
    )
    if compiled.signature.return_type == types.boolean:
        outcome = builder.and_(outcome, builder.or_(builder.zext(found, INT64), INT64(NONE_RAISED)))
    builder.atomic_rmw("and", common.at(OUTCOME), outcome, "seq_cst")
    builder.branch(turn)
    builder.position_at_end(end)
    builder.ret_void()


class _Common:
    """Access the data that the threads of a region share."""

    def __init__(self, builder: Any, pointer: Any) -> None:
        self._builder, self.pointer = builder, pointer

    def at(self, place: int) -> Any:
        return self._builder.gep(self.pointer, [INT32(0), INT32(place)], inbounds=True)

    def load(self, place: int) -> Any:
        return self._builder.load(self.at(place))

    def store(self, place: int, value: Any) -> None:
        self._builder.store(value, self.at(place))
