"""Turn what a sharded model does between ranks, and for the sake of it, into nothing where there is one CPU rank.

TorchRec sends ids to itself: lengths, splits and ids through the process group, with copies on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def keep_ids_here(input_dists: Iterable[nn.Module]) -> None:
    """Of a collection on one rank. TrainPipelineSparseDist puts an exchange of its own in place of any other."""
    for module in (module for one in input_dists for module in one.modules()):
        if isinstance(module, KJTAllToAll):
            module.forward = _stay  # type: ignore[method-assign]


def _stay(features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
    return NoWait(NoWait(features))
