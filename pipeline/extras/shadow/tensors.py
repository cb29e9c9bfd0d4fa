"""Make tensors that report a GPU as their device and hold real numbers in host memory.

A Shadow is what the program sees: device cuda:k. torch's CPU kernels, or lookups.py, run every
operation on the `inner` CPU tensors. ShadowMode makes Shadows when the program asks for a CUDA
device. An operation that a GPU kernel would refuse is refused with torch's message (rules.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pipeline.extras.shadow import device, memory, report, streams
from pipeline.extras.shadow.memory import Copy
from pipeline.extras.shadow.rules import INDEXED, Rule, check_devices, rule_of
from pipeline.extras.shadow.state import settings

CPU = torch.device("cpu")
Handler = Callable[[Any, Any, dict[str, Any]], Any]
# Implementations for operations without a CPU kernel, by a pattern of their names. They get inner
# tensors.
KERNELS: list[tuple[str, Handler]] = []
# Handlers of all operations of a namespace. They get Shadows.
HANDLERS: dict[str, Handler] = {}
torch_swap = torch.utils.swap_tensors  # before it is replaced
CUDA_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class Shadow(torch.Tensor):
    """A tensor on a shadow GPU. Its shape, strides and dtype are those of `inner`."""

    inner: torch.Tensor  # type: ignore[assignment]
    __slots__ = ()

    @staticmethod
    def __new__(cls: type, inner: torch.Tensor, device: torch.device) -> Shadow:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device=device, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["inner"], self.device

    @staticmethod
    def __tensor_unflatten__(parts: Any, device: torch.device, size: Any, stride: Any) -> Shadow:
        return Shadow(parts["inner"], device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shadow({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied.__dict__.update({k: v for k, v in self.__dict__.items() if k != "inner"})
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as torch pickles GPU tensors: the numbers are copied to the host.
        report.sync("pickle")
        return _unpickled, (self.inner, self.device, self.requires_grad)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        if not isinstance(other, Shadow) or other.shape != self.shape:
            raise RuntimeError(f"cannot set .data of {self!r} to {other!r}: another device or shape")
        self.inner = other.inner

    def resize_(self, *sizes: Any, **_: Any) -> Any:
        """Replace this tensor's memory by swapping this tensor with another wrapper."""
        shape = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list)) else sizes
        torch_swap(self, Shadow(self.inner.clone().resize_(shape), self.device))
        return self

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def storage(self) -> Any:
        return self.inner.storage()

    def record_stream(self, stream: Any) -> None:
        streams.record(memory.block_of(self.inner, self.device.index), stream)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        report.sync("tolist")
        streams.wait_for_host_copy()
        return self.inner.tolist()

    def pin_memory(self, *_: Any) -> Any:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def is_pinned(self, *_: Any) -> bool:
        return False


def _unpickled(inner: torch.Tensor, device: torch.device, requires_grad: bool) -> Shadow:
    return Shadow(inner, device).requires_grad_(requires_grad)  # type: ignore[return-value]


class ShadowMode(TorchDispatchMode):
    """Make Shadows of tensors created on a CUDA device. Threads that start enter the mode too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __enter__(self) -> ShadowMode:
        # Otherwise torch.tensor(..., device="cuda") asks the CUDA runtime before any dispatch.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()


entered: list[ShadowMode] = []  # of the main thread: whether new threads enter it too


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation of the program, for a dispatch mode or a Shadow."""
    rule = rule_of(func)
    if rule.namespace in HANDLERS:
        return HANDLERS[rule.namespace](func, args, kwargs)
    flat, spec = tree_flatten((args, kwargs))
    shadows = [each for each in flat if isinstance(each, Shadow)]
    asked = kwargs.get("device")
    asked = torch.device(asked) if asked is not None else None
    to_gpu = asked is not None and asked.type == "cuda"
    if rule.is_about_pinning or not (shadows or to_gpu):
        return _on_the_host(func, rule, args, kwargs, flat)
    if rule.is_wrapper:  # FBGEMM's C++ unpacks the arguments and calls the kernel's operation
        return func.redispatch(CUDA_KERNEL, *args, **kwargs)
    if to_gpu:
        asked = torch.device("cuda", streams.index_of(asked))
        streams_must_have(asked)
    check_devices(rule, func, args, kwargs, shadows)
    target = asked or shadows[0].device
    counted = report.current()
    counted.operations[rule.name] += 1
    counted.launches += rule.is_kernel
    copied = memory.described(rule, args, kwargs, target) if rule.is_copy else None
    out = _on_inner(func, rule, flat, spec, target, copied)
    result = _returned(func, rule, args, kwargs, flat, out, target)
    if copied is not None:
        memory.finish(copied, result)
    elif rule.syncs or (rule.base in INDEXED and any(_is_mask(each) for each in flat[1:])):
        report.sync(rule.base)
        streams.wait_for_host_copy()
    return result


def streams_must_have(asked: torch.device) -> None:
    if asked.index >= settings.num_gpus:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {asked}, but there are {settings.num_gpus} GPU(s)")


def _on_the_host(func: Any, rule: Rule, args: Any, kwargs: dict[str, Any], flat: list[Any]) -> Any:
    """Run an operation without GPU tensors. Pinned memory is ordinary memory that is marked."""
    memory.check_host_reads(rule, flat)
    pinned = kwargs.pop("pin_memory", None) if kwargs.get("pin_memory") else None
    if rule.is_about_pinning:
        is_pinned = memory.is_kind(args[0], "pinned")
        return is_pinned if rule.base == "is_pinned" else pin_memory(args[0])
    out = func(*args, **kwargs)
    return memory.in_host_memory(out, "pinned") if pinned else out


def pin_memory(self: torch.Tensor, *_: Any) -> torch.Tensor:
    return self if memory.is_kind(self, "pinned") else memory.in_host_memory(self.clone(), "pinned")


# ---- one operation on GPU tensors ----


def _is_mask(value: Any) -> bool:
    return isinstance(value, Shadow) and value.dtype in (torch.bool, torch.uint8)


# they fill their first argument completely
_FILLS = frozenset(("uniform_", "normal_", "fill_", "zero_", "random_"))


def _on_inner(func: Any, rule: Rule, flat: list[Any], spec: Any, target: torch.device, copied: Copy | None) -> Any:
    args, kwargs = tree_unflatten([each.inner if isinstance(each, Shadow) else each for each in flat], spec)
    if kwargs.get("device") is not None and target.type == "cuda":
        kwargs["device"] = CPU
    pinned = bool(kwargs.pop("pin_memory", None))
    if copied is not None:
        kwargs.pop("non_blocking", None)
        # As in torch, which allocates the host's side of a non-blocking copy in pinned memory.
        pinned = rule.base == "_to_copy" and copied.to_host and copied.non_blocking
    # Filling reserved memory completely (such as TorchRec's initialization of weights) leaves it at
    # zero.
    filled = kwargs.get("out") if rule.base == "zeros" else args[0] if rule.base in _FILLS else None
    is_large = isinstance(filled, torch.Tensor) and filled.nbytes > settings.untouched_above_bytes
    if filled is not None and is_large and memory.is_untouched(filled):
        return filled
    if rule.is_factory and settings.untouched_above_bytes < 1 << 62 and target.type == "cuda" and "out" not in kwargs:
        shaped = func(*args, **{**kwargs, "device": torch.device("meta")})
        if shaped.numel() * shaped.element_size() > settings.untouched_above_bytes:
            return memory.untouched(tuple(shaped.shape), shaped.dtype)
    kernel = _kernel(rule.name)
    out = _drawn(func, args, kwargs, target) if rule.draws else (kernel or _plain)(func, args, kwargs)
    return memory.in_host_memory(out, "pinned") if pinned else out


@cache
def _kernel(name: str) -> Handler | None:
    return next((kernel for pattern, kernel in KERNELS if re.fullmatch(pattern, name)), None)


def _plain(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _drawn(func: Any, args: Any, kwargs: Any, target: torch.device) -> Any:
    """Sample with the GPU's generator. Sampling on the host does not change this generator."""
    if kwargs.get("generator") is not None:
        return func(*args, **kwargs)
    own, host = device.generator(target.index), torch.default_generator
    before = host.get_state()
    host.set_state(own.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        own.set_state(host.get_state())
        host.set_state(before)


def _returned(func: Any, rule: Rule, args: Any, kwargs: Any, flat: list[Any], out: Any, target: torch.device) -> Any:
    """Wrap the results. Arguments that an operation writes into are returned as they were passed."""
    written = rule.written(args, kwargs)
    if rule.is_kernel or rule.is_copy:
        outputs = [] if rule.returns_written else tree_flatten(out)[0]
        _order(rule, flat, [*written, *outputs], target)
    if rule.returns_written:
        if isinstance(written[0], Shadow) and written[0].shape != written[0].inner.shape:
            raise RuntimeError(f"{rule.name} changes the shape of {written[0]!r}, which the shadow GPU cannot follow")
        return written[0] if rule.num_returns == 1 else tuple(written[: rule.num_returns])
    if rule.returns_value:
        return out

    def wrap(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, Shadow) and target.type == "cuda":
            return Shadow(value.detach() if value.requires_grad else value, target)
        return value

    return tree_map(wrap, out)


def _order(rule: Rule, flat: list[Any], outputs: list[Any], target: torch.device) -> None:
    """Put the operation on its stream, which finds races (streams.py)."""
    written = {id(each) for each in outputs}
    reads, writes = [], []
    for each in flat:
        if isinstance(each, Shadow) and id(each) not in written:
            reads.append((memory.block_of(each.inner, each.device.index), each.shape))
    for each in outputs:
        if isinstance(each, Shadow):
            writes.append((memory.block_of(each.inner, each.device.index), each.shape))
        elif isinstance(each, torch.Tensor) and target.type == "cuda" and each.numel():
            writes.append((memory.block_of(each, target.index), each.shape))
    streams.operation(rule.name, reads, writes)
