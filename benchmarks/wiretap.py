"""Count the bytes that a rank puts into collectives, as they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    "all_to_all_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_gather",
    "all_gather_into_tensor",
    "_all_gather_base",
    "_reduce_scatter_base",
)


@dataclass(frozen=True)
class Kind:
    collective: str
    dtype: torch.dtype
    in_backward: bool

    @property
    def is_ids(self) -> bool:
        return self.dtype in (torch.int64, torch.int32)


@contextmanager
def wiretap() -> Iterator[Counter[Kind]]:
    """Counts input bytes by kind while inside. DDP's all-reduce goes past Python: count_buckets() has it."""
    sent: Counter[Kind] = Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def tapped(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            data = args[1] if len(args) > 1 else kwargs["input"]
            in_backward = torch._C._current_graph_task_id() != -1
            for tensor in data if isinstance(data, (list, tuple)) else [data]:
                sent[Kind(name, tensor.dtype, in_backward)] += tensor.numel() * tensor.element_size()
            return originals[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, tapped(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def count_buckets(wrapped: torch.nn.parallel.DistributedDataParallel) -> list[int]:
    """Bytes of each bucket of gradients that DDP averages from now on; once a model, before its first step."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    sizes: list[int] = []

    def hook(group, bucket):  # DDP does not read annotations that are text
        sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, hook)
    return sizes
