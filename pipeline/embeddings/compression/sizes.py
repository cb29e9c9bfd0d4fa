"""Turn a table's compression into the sizes of what stands in its place, for kinds that are no partitions (stdlib only)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.embeddings.compression.part_frequencies import share_of_block
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError

DIM_STEP = 4  # columns of FBGEMM's sharded tables
BLOCK_GROWTH = 8  # a block of ids has so many times the rows of all hotter ones
DEFAULT_BLOCKS = 4
DEFAULT_RANK = 16


def budget(table: Table) -> int | None:
    """How many numbers a table may take by its ratio; None where it names none."""
    config = table.compression
    assert config is not None
    return None if config.ratio is None else int(table.num_embeddings * table.embedding_dim / config.ratio)


@dataclass(frozen=True)
class Paths:
    """A base table of `num_rows`, chosen by the remainder, and a small network for each of `num_buckets` quotients."""

    num_rows: int
    num_buckets: int
    hidden_size: int


def paths_of(table: Table) -> Paths:
    """Raises ConfigError where the numbers do not fit the table."""
    config, num_ids, dim = table.compression, table.num_embeddings, table.embedding_dim
    assert config is not None
    key, hidden = f"tables.{table.name}.compression", config.hidden_size
    each = network_numbers(dim, hidden)
    if config.num_rows is not None:
        if config.ratio is not None:
            raise ConfigError(f"{key}: num_rows and ratio both say the size; leave one out")
        if config.num_rows > num_ids:
            raise ConfigError(
                f"{key}.num_rows={config.num_rows:,}, but the table has {num_ids:,} ids: a base table of more rows has some that "
                "no id looks up; use fewer, or kind=none"
            )
        return Paths(config.num_rows, -(-num_ids // config.num_rows), hidden)
    cheapest = min(num_ids, max(1, round(math.sqrt(num_ids * each / dim))))
    limit = budget(table)
    if limit is None:
        return Paths(cheapest, -(-num_ids // cheapest), hidden)
    # Rows and networks cost num_rows * dim + num_ids / num_rows * each: the larger root leaves most to the rows.
    num_rows = min(num_ids, limit // dim)
    while num_rows >= cheapest and num_rows * dim + -(-num_ids // num_rows) * each > limit:
        num_rows -= max(1, (num_rows * dim + -(-num_ids // num_rows) * each - limit) // (2 * dim))
    if num_rows < cheapest:
        least = cheapest * dim + -(-num_ids // cheapest) * each
        raise ConfigError(
            f"{key}.ratio={config.ratio:g} is more than paths of {hidden} hidden units can reach for {num_ids:,} ids, which is "
            f"{num_ids * dim / least:.3g}; lower it, use a smaller hidden_size, or leave such tables out with "
            f"min_rows={num_ids + 1}"
        )
    return Paths(num_rows, -(-num_ids // num_rows), hidden)


def network_numbers(dim: int, hidden_size: int) -> int:
    """Of one small network dim -> hidden -> dim."""
    return 2 * dim * hidden_size + hidden_size + dim


@dataclass(frozen=True)
class Block:
    """Ids first .. end - 1, in a table of `dim` columns."""

    first: int
    end: int
    dim: int

    @property
    def num_rows(self) -> int:
        return self.end - self.first


def blocks_of(table: Table) -> list[Block]:
    """Blocks of ids by descending popularity, the hottest first with the most columns.

    Columns go with popularity to the power of a temperature, as in arXiv 1909.11810, algorithm 1: d = d0 (p / p0)^t with
    p the lookups of a block's average id; here by blocks within a table, and in steps of 4.

    Raises:
        ConfigError: ids that are not in descending frequency, sizes that do not fit.
    """
    config = table.compression
    assert config is not None
    key = f"tables.{table.name}.compression"
    if table.frequencies is not None and not table.frequencies.by_row:
        raise ConfigError(
            f"{key}: mixed_dimension goes by popularity, and hashed ids are in no order; prepare the feature with "
            "ids.kind=vocabulary, or use another kind"
        )
    bounds = _bounds(table.num_embeddings, len(config.dims) or config.num_blocks or DEFAULT_BLOCKS)
    if config.dims:
        return _given_blocks(table, bounds)
    if (config.temperature is None) == (config.ratio is None):
        raise ConfigError(f"{key}: mixed_dimension wants one of dims, temperature and ratio")
    popularity = [_popularity(table.frequencies, first, end, table.num_embeddings) for first, end in bounds]
    if config.temperature is not None:
        return _sized(table, bounds, popularity, config.temperature)
    limit, high = budget(table), 16.0
    assert limit is not None
    if _numbers(least := _sized(table, bounds, popularity, high), table.embedding_dim) > limit:
        raise ConfigError(
            f"{key}.ratio={config.ratio:g} is more than blocks of at least {DIM_STEP} columns can reach, which is "
            f"{table.num_embeddings * table.embedding_dim / _numbers(least, table.embedding_dim):.3g} at "
            f"embedding_dim={table.embedding_dim}; lower it, or use another kind"
        )
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        fits = _numbers(_sized(table, bounds, popularity, middle), table.embedding_dim) <= limit
        low, high = (low, middle) if fits else (middle, high)
    return _sized(table, bounds, popularity, high)


def _bounds(num_ids: int, num_blocks: int) -> list[tuple[int, int]]:
    """(first, end) of blocks that grow by BLOCK_GROWTH; fewer where there are not so many ids."""
    ends = sorted({max(1, num_ids // BLOCK_GROWTH ** (num_blocks - 1 - index)) for index in range(num_blocks)})
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _given_blocks(table: Table, bounds: list[tuple[int, int]]) -> list[Block]:
    config = table.compression
    assert config is not None
    key = f"tables.{table.name}.compression"
    if config.temperature is not None or config.ratio is not None or config.num_blocks is not None:
        raise ConfigError(f"{key}: dims say all sizes; leave out temperature, ratio and num_blocks")
    if any(later > former for former, later in zip(config.dims, config.dims[1:], strict=False)):
        raise ConfigError(f"{key}.dims={config.dims} must not grow: the hottest ids come first")
    if config.dims[0] > table.embedding_dim:
        raise ConfigError(
            f"{key}.dims={config.dims}: no block is wider than the table's embedding_dim={table.embedding_dim}"
        )
    if len(bounds) < len(config.dims):
        raise ConfigError(f"{key}.dims={config.dims}: {table.num_embeddings} ids make only {len(bounds)} blocks")
    return [Block(first, end, dim) for (first, end), dim in zip(bounds, config.dims, strict=True)]


def _popularity(frequencies: RowFrequencies | None, first: int, end: int, num_ids: int) -> float:
    """Lookups of a block's average id. Where no data say, as Zipf's law has it."""
    if frequencies is None:
        return math.log((end + 1) / (first + 1)) / math.log(num_ids + 1) / (end - first)
    return max(share_of_block(frequencies, first, end, num_ids), 1e-12) / (end - first)


def _sized(table: Table, bounds: list[tuple[int, int]], popularity: list[float], temperature: float) -> list[Block]:
    dim, blocks = table.embedding_dim, []
    widest = dim
    for (first, end), each in zip(bounds, popularity, strict=True):
        wanted = dim * (each / popularity[0]) ** temperature
        widest = min(widest, max(DIM_STEP, DIM_STEP * round(wanted / DIM_STEP)))
        blocks.append(Block(first, end, widest))
    return blocks


def _numbers(blocks: list[Block], dim: int) -> int:
    return sum(block.num_rows * block.dim + projection_numbers(block, dim) for block in blocks)


def projection_numbers(block: Block, dim: int) -> int:
    """A block as wide as the table needs no projection."""
    return block.dim * dim if block.dim < dim else 0


@dataclass(frozen=True)
class TensorTrain:
    """Cores [rows[0], dims[0], rank], [rows[1], rank, dims[1], rank], [rows[2], rank, dims[2]]."""

    rows: tuple[int, int, int]
    dims: tuple[int, int, int]
    rank: int

    @property
    def num_numbers(self) -> int:
        (n1, n2, n3), (d1, d2, d3), rank = self.rows, self.dims, self.rank
        return n1 * d1 * rank + n2 * rank * d2 * rank + n3 * rank * d3


def tensor_train_of(table: Table) -> TensorTrain:
    """Raises ConfigError where factors do not cover the table, or no rank is small enough."""
    config, num_ids, dim = table.compression, table.num_embeddings, table.embedding_dim
    assert config is not None
    key = f"tables.{table.name}.compression"
    rows = tuple(config.row_factors) or _factors_above(num_ids)
    dims = tuple(config.dim_factors) or _factors_of(dim)
    if len(rows) != 3 or math.prod(rows) < num_ids:
        raise ConfigError(
            f"{key}.row_factors={list(rows)} must be three numbers whose product covers the table's {num_ids:,} ids, e.g. "
            f"{list(_factors_above(num_ids))}"
        )
    if len(dims) != 3 or math.prod(dims) != dim:
        raise ConfigError(
            f"{key}.dim_factors={list(dims)} must be three numbers whose product is embedding_dim={dim}, e.g. "
            f"{list(_factors_of(dim))}"
        )
    if config.rank is not None and config.ratio is not None:
        raise ConfigError(f"{key}: rank and ratio both say the size; leave one out")
    limit = budget(table)
    rank = config.rank or DEFAULT_RANK
    if limit is not None:
        # The largest root of n2 d2 r^2 + (n1 d1 + n3 d3) r = limit.
        square, linear = rows[1] * dims[1], rows[0] * dims[0] + rows[2] * dims[2]
        rank = int((math.sqrt(linear**2 + 4 * square * limit) - linear) / (2 * square))
        if rank < 1:
            least = TensorTrain(rows, dims, 1).num_numbers
            raise ConfigError(
                f"{key}.ratio={config.ratio:g} is more than a tensor train of {num_ids:,} x {dim} can reach, which is "
                f"{num_ids * dim / least:.3g}; lower it, or leave such tables out with min_rows={num_ids + 1}"
            )
    return TensorTrain(rows, dims, rank)


def _factors_above(num_ids: int) -> tuple[int, int, int]:
    """Three factors as even as can be whose product is num_ids or little more."""
    first = max(1, math.ceil(round(num_ids ** (1 / 3), 9)))
    second = max(1, math.ceil(round(math.sqrt(num_ids / first), 9)))
    return first, second, max(1, -(-num_ids // (first * second)))


def _factors_of(dim: int) -> tuple[int, int, int]:
    """Three factors of `dim`, as even as can be, in ascending order."""
    choices = [
        (a, b, dim // (a * b))
        for a in range(1, dim + 1)
        if dim % a == 0
        for b in range(a, dim // a + 1)
        if (dim // a) % b == 0 and b <= dim // (a * b)
    ]
    return min(choices, key=lambda factors: sum(factors))
