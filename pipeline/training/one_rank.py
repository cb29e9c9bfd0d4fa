"""Turn what a sharded model does between ranks, and for the sake of it, into nothing where there is one CPU rank.

TorchRec sends ids to itself: lengths, splits and ids through the process group, with copies on both sides. And between the
tables' lookup and DLRM's dot products, which may then lie side by side, pooled rows are copied and cast once more.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.models.dlrm import DotDLRM


def keep_ids_here(input_dists: Iterable[nn.Module]) -> None:
    """Of a collection on one rank. TrainPipelineSparseDist puts an exchange of its own in place of any other."""
    for module in (module for one in input_dists for module in one.modules()):
        if isinstance(module, KJTAllToAll):
            module.forward = _stay  # type: ignore[method-assign]


def _stay(features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
    return NoWait(NoWait(features))


def look_up_where_products_want_it(model: nn.Module) -> int:
    """Let each DLRM's lookup leave its rows where its dot products want them, in their type; how many do.

    Where one lookup holds all tables, in the model's order and of one width: what it leaves is then the dot products' whole
    input but for the dense layers' row. The numbers are the same: a row is rounded once, at another place.
    """
    joined = 0
    for dlrm in (module for module in model.modules() if isinstance(module, DotDLRM)):
        tables = dlrm.sparse_arch.embedding_bag_collection
        lookup = getattr(tables, "lookup_here", None)
        if lookup is None or tables._embedding_names != dlrm.pooled_rows.feature_names or len(set(lookup.dims)) > 1:
            continue
        lookup.room, lookup.follows_autocast = lookup.dims[0], True
        dlrm.inter_arch.rows_have_room = True
        joined += 1
    return joined
