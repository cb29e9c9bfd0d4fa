"""Find what a program on a GPU would wait for, by the operations that it runs on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Waits(TorchDispatchMode):
    """Lists operations whose result a program on a GPU would wait for: numbers read, masks counted."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        by_mask = any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in tree_leaves(arguments[1:2]))
        is_index = operation in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
        reads = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "is_nonzero")
        if operation.overloadpacket.__name__ in reads or (is_index and by_mask):
            self.found.append(str(operation))
        return operation(*arguments, **(keywords or {}))
