"""Replace what torch and TorchRec do in C++ or by changing classes, because tensor wrappers do not
support this.

DistributedDataParallel's Reducer makes CUDA events in C++. Here hooks compute the same sums:
weights are broadcast at the start, and gradients are averaged in buckets when backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from pipeline.extras.shadow.state import Patch
from pipeline.extras.shadow.tensors import Shadow

_BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default


_init, _forward, _train = (getattr(DistributedDataParallel, name) for name in ("__init__", "forward", "train"))


class _Averages:
    """Do what DistributedDataParallel does for a module on a shadow GPU."""

    def __init__(self, trained: Sequence[torch.Tensor], group: Any, is_on: Callable[[], bool]) -> None:
        self.trained, self.group, self.is_on = trained, group, is_on
        self.due: list[torch.Tensor] = []
        first = dist.get_global_rank(group, 0)
        with torch.no_grad():
            for each in trained:
                dist.broadcast(each.detach(), first, group=group)
        for each in trained:
            each.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, weight: torch.Tensor) -> None:
        if not self.is_on():
            return
        if not self.due:
            torch.autograd.Variable._execution_engine.queue_callback(self._average)
        self.due.append(weight)

    def _average(self) -> None:
        due, self.due = {id(each) for each in self.due}, []
        bucket: list[torch.Tensor] = []
        for each in reversed(self.trained):  # gradients become ready in about this order
            if id(each) not in due or each.grad is None:
                continue
            if bucket and _num_bytes([*bucket, each.grad]) > _BUCKET_BYTES:
                self._average_bucket(bucket)
                bucket = []
            bucket.append(each.grad)
        if bucket:
            self._average_bucket(bucket)

    def _average_bucket(self, gradients: list[torch.Tensor]) -> None:
        with torch.no_grad():
            flat = torch.cat([each.reshape(-1) for each in gradients])
            flat.div_(dist.get_world_size(self.group))
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([each.numel() for each in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def _ddp_init(self: Any, module: torch.nn.Module, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
    """Replace DistributedDataParallel(module, device_ids, ...) for modules on a shadow GPU."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    trained = [each for name, each in module.named_parameters() if name not in ignored and each.requires_grad]
    if not any(isinstance(each, Shadow) for each in trained):
        _init(self, module, device_ids, *args, **kwargs)
        return
    devices = {each.device for each in trained}
    if len(devices) > 1 or (device_ids and devices != {torch.device(device_ids[0])}):
        raise ValueError(f"DistributedDataParallel with device_ids={device_ids} got weights on {devices}")
    torch.nn.Module.__init__(self)
    self.module, self.process_group = module, kwargs.get("process_group") or dist.group.WORLD
    self.parameters_to_ignore, self.require_backward_grad_sync = ignored, True
    self.shadow = _Averages(trained, self.process_group, lambda: self.require_backward_grad_sync)


def _ddp_forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs) if hasattr(self, "shadow") else _forward(self, *args, **kwargs)


def _ddp_train(self: DistributedDataParallel, mode: bool = True) -> Any:
    return torch.nn.Module.train(self, mode) if hasattr(self, "shadow") else _train(self, mode)


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


class ShadowSlice(TableBatchedEmbeddingSlice, Shadow):
    """A slice of a flat table, which TorchRec makes by as_subclass: wrappers do not support it."""

    def __new__(
        cls, data: Shadow, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int
    ) -> ShadowSlice:
        inner = data.inner.detach()[start_offset:end_offset].view(num_embeddings, embedding_dim)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=data.device,
            requires_grad=data.requires_grad,
        )
        made.inner = inner
        return made


_new_slice = TableBatchedEmbeddingSlice.__new__


def _slice_of(cls: type, data: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(data, Shadow):
        return ShadowSlice.__new__(ShadowSlice, data, *args, **kwargs)
    return _new_slice(cls, data, *args, **kwargs)


def patches() -> list[Patch]:
    reducer = "its C++ Reducer makes CUDA events"
    return [
        Patch(DistributedDataParallel, "__init__", _ddp_init, reducer),
        Patch(DistributedDataParallel, "forward", _ddp_forward, reducer),
        Patch(DistributedDataParallel, "train", _ddp_train, reducer),
        Patch(TableBatchedEmbeddingSlice, "__new__", staticmethod(_slice_of), "a wrapper tensor cannot be re-classed"),
    ]
