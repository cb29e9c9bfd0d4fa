"""Initialize tables from a seed, to the same weights whatever the plan and the number of ranks.

TorchRec initializes each shard from its rank's own random state: a table's weights then depend on the plan, and with one
seed on all ranks every shard of a row_wise table gets the same rows. Here a table is initialized in blocks of rows, each
from (seed, table, block), and every shard cuts out its own part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.collection import RowsOf

BLOCK_ROWS = 4096  # changing it changes every model that a given seed initializes
OWN_KERNELS = {"dense", "fused", "fused_uvm", "fused_uvm_caching"}  # key-value stores initialize rows on first use


def initialize_tables(module: nn.Module, seed: int) -> None:
    """Initialize every table inside `module`, sharded or not, by its config's init_fn; the caller's random state is kept.

    init_fn must sample element by element (uniform, normal, zeros): it is called on float32 blocks of rows.
    """
    for child in module.modules():
        if isinstance(child, ShardedEmbeddingBagCollection):
            configs = child._embedding_bag_configs
            plan = child.module_sharding_plan
            configs = [config for config in configs if plan[config.name].compute_kernel in OWN_KERNELS]
        elif isinstance(child, EmbeddingBagCollection):
            configs = child.embedding_bag_configs()
        else:
            continue
        weights = child.state_dict()
        for config in configs:
            for piece, row_offset, column_offset in _local_pieces(weights[f"embedding_bags.{config.name}.weight"]):
                source, first_row = config, 0
                if isinstance(config.init_fn, RowsOf):  # its rows are a block of another table's
                    block = config.init_fn.block
                    source = replace(config, name=block.table, num_embeddings=block.num_embeddings)
                    first_row = block.first_row
                _fill(piece, first_row + row_offset, column_offset, source, seed)


def _local_pieces(weight: torch.Tensor | ShardedTensor) -> Iterator[tuple[torch.Tensor, int, int]]:
    """(tensor, its first row, its first column) for each part of the table that lies on this rank."""
    if isinstance(weight, ShardedTensor):
        for shard in weight.local_shards():
            row, column = shard.metadata.shard_offsets
            yield shard.tensor, row, column
    else:
        yield weight, 0, 0


@torch.no_grad()
def _fill(piece: torch.Tensor, row_offset: int, column_offset: int, config: EmbeddingBagConfig, seed: int) -> None:
    """Samples on the device of `piece`: a table of billions of values takes a GPU a blink, a CPU minutes."""
    num_rows, num_columns = piece.shape
    end = row_offset + num_rows
    assert config.init_fn is not None
    with torch.random.fork_rng(devices=[piece.device] if piece.is_cuda else []):
        for block in range(row_offset // BLOCK_ROWS, -(-end // BLOCK_ROWS)):
            first = block * BLOCK_ROWS
            values = torch.empty(
                min(BLOCK_ROWS, config.num_embeddings - first), config.embedding_dim, device=piece.device
            )
            torch.manual_seed(_block_seed(seed, config.name, block))
            config.init_fn(values)
            start, stop = max(first, row_offset), min(first + len(values), end)
            piece[start - row_offset : stop - row_offset].copy_(
                values[start - first : stop - first, column_offset : column_offset + num_columns]
            )


def _block_seed(seed: int, table: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{table}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
