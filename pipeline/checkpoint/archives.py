"""Find the offset of a tensor's values in an uncompressed archive of torch.save."""

from __future__ import annotations

from typing import IO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def values_offset(archive: IO[bytes], sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the offset of the values in `archive`.

    Raises RuntimeError unless it holds one contiguous tensor of that shape and dtype.
    """
    with FakeTensorMode():
        found = torch.load(archive, map_location="cpu", weights_only=True)
    if not isinstance(found, torch.Tensor) or (tuple(found.shape), found.dtype) != (sizes, dtype):
        raise RuntimeError(f"its file holds something else than {dtype} of shape {list(sizes)}")
    if not found.is_contiguous() or found.storage_offset():
        raise RuntimeError("its values do not lie one after the other")
    archive.seek(0)
    return int(torch._C.PyTorchFileReader(archive).get_record_offset("data/0"))  # type: ignore[attr-defined]
