"""Initialize tables from a seed, with the same weights under any plan and any number of ranks and
threads.

TorchRec initializes each shard from its rank's random state: a table's weights then depend on the
plan, and with one seed on all ranks every shard of a row_wise table gets the same rows. Here the
number of a weight in Philox's sequence is its position in the complete table, and the key is (seed,
table). So a shard samples only its part, and all threads share the work. An init_fn that is not
from embeddings.collection fills blocks of rows of the complete table, each with a separate seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline import devices
from pipeline.checkpoint.stored_rows import NORMAL, UNIFORM, FirstWeights, StoredRows
from pipeline.devices.base import in_host_memory
from pipeline.devices.cpu.process import disable_huge_pages_of
from pipeline.devices.philox import fill_normal, fill_uniform
from pipeline.embeddings.collection import Managed, Normal, RowsOf, Uniform, Zeros

# for such an init_fn; changing it changes the models that a given seed initializes
BLOCK_ROWS = 4096
AT_ONCE = 1 << 22  # numbers, for what cannot be sampled in place: columns of a table, and fp16
# key-value stores initialize rows on first use
OWN_KERNELS = {"dense", "fused", "fused_uvm", "fused_uvm_caching"}


@dataclass(frozen=True)
class TablePart:
    """Hold a part of a table: a tensor whose first element is at `row` and `column` of the table."""

    values: torch.Tensor
    row: int
    column: int


def initialize_tables(module: nn.Module, seed: int, only: Collection[str] | None = None) -> None:
    """Initialize the tables `only` (None: all) inside `module`, sharded or not, by their init_fn.

    The random state is restored. An init_fn that is not from embeddings.collection must sample
    element by element, because it fills float32 blocks.
    """
    for config, parts in local_tables(module):
        for part in parts if only is None or config.name in only else []:
            if isinstance(config.init_fn, RowsOf):  # its rows are a block of another table
                block = config.init_fn.block
                whole = replace(config, name=block.table, num_embeddings=block.num_embeddings)
                _fill(replace(part, row=block.first_row + part.row), whole, seed)
            else:
                _fill(part, config, seed)


def disable_huge_pages(module: nn.Module) -> None:
    """Use small pages for tables in this host's memory. Call it before they are filled."""
    for _, parts in local_tables(module):
        for part in parts:
            if in_host_memory(part.values) and not isinstance(part.values, StoredRows):
                disable_huge_pages_of(part.values.data_ptr(), part.values.nbytes)


def local_tables(module: nn.Module) -> Iterator[tuple[EmbeddingBagConfig, list[TablePart]]]:
    """Iterate over the tables in our lookups or TorchRec's, with their parts on this rank."""
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
            yield config, list(_local_parts(weights[f"embedding_bags.{config.name}.weight"]))


def _local_parts(weight: torch.Tensor | ShardedTensor) -> Iterator[TablePart]:
    """Iterate over the parts of the table on this rank."""
    if isinstance(weight, ShardedTensor):
        for shard in weight.local_shards():
            row, column = shard.metadata.shard_offsets
            yield TablePart(shard.tensor, row, column)
    else:
        yield TablePart(weight, 0, 0)


@torch.no_grad()
def _fill(part: TablePart, config: EmbeddingBagConfig, seed: int) -> None:
    initialize = config.init_fn
    assert initialize is not None
    if isinstance(initialize, (RowsOf, Managed)):
        initialize = initialize.initialize
    if isinstance(part.values, StoredRows):
        _begin_stored(part, config, initialize, seed)
    elif isinstance(initialize, Zeros):
        part.values.zero_()
    elif isinstance(initialize, (Uniform, Normal)):
        _sample(part, config, initialize, _seed(f"{seed}/{config.name}"))
    else:
        _fill_by_blocks(part, config, seed)


def _begin_stored(
    part: TablePart, config: EmbeddingBagConfig, initialize: Callable[[torch.Tensor], torch.Tensor | None], seed: int
) -> None:
    """Initialize stored rows: sample them on first use, or write all of them if the init_fn is not ours."""
    assert isinstance(part.values, StoredRows)
    first = FirstWeights()
    if isinstance(initialize, (Uniform, Normal)):
        kind, unit = (
            (UNIFORM, initialize.bound * 2.0**-23) if isinstance(initialize, Uniform) else (NORMAL, initialize.std)
        )
        key = _seed(f"{seed}/{config.name}")
        first = FirstWeights(kind, key, unit, config.embedding_dim, part.row, part.column)
    part.values.source.begin(first)
    if not isinstance(initialize, (Uniform, Normal, Zeros)):
        _fill_by_blocks(part, config, seed)


def _sample(part: TablePart, config: EmbeddingBagConfig, distribution: Uniform | Normal, key: int) -> None:
    """Sample initial weights on the device of `part`."""
    values, width = part.values, config.embedding_dim
    num_rows, num_columns = values.shape
    if values.dtype == torch.float32 and num_columns == width and values.is_contiguous():
        _sample_numbers(values.view(-1), distribution, key, part.row * width)
        return
    rows_at_once = max(AT_ONCE // width, 1)
    rows = torch.empty(min(rows_at_once, num_rows), width, device=values.device)
    for first in range(0, num_rows, rows_at_once):
        sampled = rows[: num_rows - first]
        _sample_numbers(sampled.view(-1), distribution, key, (part.row + first) * width)
        values[first : first + len(sampled)] = sampled[:, part.column : part.column + num_columns]


def _sample_numbers(out: torch.Tensor, distribution: Uniform | Normal, key: int, first: int) -> None:
    if isinstance(distribution, Uniform):
        fill_uniform(out, key, first, distribution.bound)
    else:
        fill_normal(out, key, first, distribution.std)


def _fill_by_blocks(part: TablePart, config: EmbeddingBagConfig, seed: int) -> None:
    piece, end = part.values, part.row + len(part.values)
    assert config.init_fn is not None
    with devices.current().fork_rng():
        for block in range(part.row // BLOCK_ROWS, -(-end // BLOCK_ROWS)):
            first = block * BLOCK_ROWS
            values = torch.empty(
                min(BLOCK_ROWS, config.num_embeddings - first), config.embedding_dim, device=piece.device
            )
            torch.manual_seed(_seed(f"{seed}/{config.name}/{block}") >> 1)
            config.init_fn(values)
            start, stop = max(first, part.row), min(first + len(values), end)
            piece[start - part.row : stop - part.row].copy_(
                values[start - first : stop - first, part.column : part.column + piece.shape[1]]
            )


def _seed(text: str) -> int:
    """Return a seed: a hash of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
