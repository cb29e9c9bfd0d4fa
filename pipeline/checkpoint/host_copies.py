"""Copy the tensors of a GPU to host memory one block at a time, through two pinned buffers.

A rank's tables may take hundreds of gigabytes. Pinning that much memory takes long and may fail,
and copying a complete table without pinned memory is slow. Two pinned blocks are fast at a fixed
cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pipeline import devices
from pipeline.devices.base import in_host_memory

BLOCK_BYTES = 256 << 20
PINNED_BYTES = 2 * BLOCK_BYTES  # maximum of one save


def host_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the rows of a GPU's tensor in order, in pinned memory. A block is valid until the next
    is requested.

    While a block is used, the next one is copied.
    """
    rows = tensor.detach() if tensor.dim() else tensor.detach()[None]
    rows_at_once = max(1, BLOCK_BYTES // max(1, rows[:1].nbytes))
    parts = rows.split(rows_at_once) if len(rows) else ()
    pinned = [
        torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts[:2]
    ]  # torch keeps pinned memory for the next save
    coming: list[tuple[torch.Tensor, torch.Event]] = []
    for number, part in enumerate(parts):
        block = pinned[number % 2][: len(part)]
        block.copy_(part, non_blocking=True)
        coming.append((block, devices.current().record_event()))
        if len(coming) == 2:
            yield _arrived(*coming.pop(0))
    for block, copied in coming:
        yield _arrived(block, copied)


def _arrived(block: torch.Tensor, copied: torch.Event) -> torch.Tensor:
    copied.synchronize()
    return block


@dataclass
class HostCopy:
    """Copies a state to host memory for a save that runs during training.

    The memory is reused by the next save.
    """

    buffers: list[torch.Tensor] = field(default_factory=list)

    def fill(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of `tensors`. They overwrite the copies of the last call."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if shapes != [(buffer.shape, buffer.dtype) for buffer in self.buffers]:
            self.buffers = []  # freed before as much is allocated again
            self.buffers = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            if in_host_memory(tensor):
                buffer.copy_(tensor)
                continue
            rows, done = buffer if buffer.dim() else buffer[None], 0
            for block in host_blocks(tensor):
                rows[done : done + len(block)] = block
                done += len(block)
        return self.buffers
