"""Store a table as base rows and a small network for each bucket of ids (stdlib only; arXiv 1909.02107, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import CompressionConfig
from pipeline.embeddings.compression.kind import Bags, CompressionKind, Split
from pipeline.embeddings.table import Table
from pipeline.extras.compression.digits import by_slot, digit_frequencies, pool_rows
from pipeline.runtime.errors import ConfigError, check_at_least

if TYPE_CHECKING:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class Paths:
    """Hold a base table of `num_rows` rows, chosen by the id's remainder, and a small network for
    each of `num_buckets` quotients.
    """

    num_rows: int
    num_buckets: int
    hidden_size: int


@register("compression", "path_based")
class PathBased(CompressionKind):
    """Compute the row of an id with remainder r and quotient q as W2[q] relu(W1[q] base[r] + b1[q])
    + b2[q].

    All ids of a batch are computed together. The networks are dense parameters: hidden_weight
    [buckets, hidden, D], output_weight [buckets, D, hidden].
    """

    settings = ("ratio", "num_rows", "hidden_size", "max_ids_per_bag")
    carries_weights = True
    id_part = "bucket"
    composes_each_id = True

    @classmethod
    def check(cls, config: CompressionConfig) -> None:
        check_at_least("compression.hidden_size", config.hidden_size, 1)

    @cached_property
    def paths(self) -> Paths:
        """Return the sizes. Raises ConfigError if they do not fit the table."""
        config, num_ids, dim = self.config, self.table.num_embeddings, self.table.embedding_dim
        hidden, each = config.hidden_size, network_numbers(dim, config.hidden_size)
        if config.num_rows is not None:
            if config.ratio is not None:
                raise ConfigError(f"{self.key}: num_rows and ratio both set the size; remove one")
            if config.num_rows > num_ids:
                raise ConfigError(
                    f"{self.key}.num_rows={config.num_rows:,}, but the table has {num_ids:,} ids: "
                    "no id would look up the additional rows of the base table; use fewer rows, "
                    "or kind=none"
                )
            return Paths(config.num_rows, -(-num_ids // config.num_rows), hidden)
        cheapest = min(num_ids, max(1, round(math.sqrt(num_ids * each / dim))))
        limit = self.budget()
        if limit is None:
            return Paths(cheapest, -(-num_ids // cheapest), hidden)
        # Rows and networks cost num_rows * dim + num_ids / num_rows * each. The larger root leaves
        # most to the rows.
        num_rows = min(num_ids, limit // dim)
        while num_rows >= cheapest and num_rows * dim + -(-num_ids // num_rows) * each > limit:
            num_rows -= max(1, (num_rows * dim + -(-num_ids // num_rows) * each - limit) // (2 * dim))
        if num_rows < cheapest:
            least = cheapest * dim + -(-num_ids // cheapest) * each
            raise ConfigError(
                f"{self.key}.ratio={config.ratio:g} is more than paths of {hidden} hidden units can reach for {num_ids:,} ids, which is "
                f"{num_ids * dim / least:.3g}; lower it, use a smaller hidden_size, or exclude "
                f"such tables with min_rows={num_ids + 1}"
            )
        return Paths(num_rows, -(-num_ids // num_rows), hidden)

    def parts(self) -> list[Table]:
        num_rows = self.paths.num_rows
        curve = digit_frequencies(self.table.frequencies, num_rows, 1, self.table.num_embeddings)
        return [self.part("remainder", num_rows, frequencies=curve)]

    def split(self, index: int) -> Split:
        """Return the rows of the base table, one feature per position in the bag, and all buckets
        of the bag in one feature.
        """

        num_rows, slots = self.paths.num_rows, [slot for slot in self.slots(index) if slot is not None]
        what = f"feature {self.table.feature_names[index]!r} of table {self.table.name!r}"

        def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
            # a weight applies to the output of the network
            rows = Bags(bags.ids % num_rows, bags.lengths)
            if not slots:
                yield self.feature(index, "remainder"), rows
            else:
                for slot, part in by_slot(rows, slots, what):
                    yield self.feature(index, "remainder", slot), part
            yield self.feature(index, "bucket"), bags._replace(ids=bags.ids // num_rows)

        return split

    def num_dense_numbers(self) -> int:
        return self.paths.num_buckets * network_numbers(self.table.embedding_dim, self.paths.hidden_size)

    def initial_parameters(self) -> dict[str, torch.Tensor]:
        """Return initial networks that keep the variance of the base rows, so that composed rows
        have the variance of the table's init.
        """
        import torch

        dim, buckets, hidden = self.table.embedding_dim, self.paths.num_buckets, self.paths.hidden_size
        return {
            "hidden_weight": torch.randn(buckets, hidden, dim) * math.sqrt(2 / dim),
            "hidden_bias": torch.zeros(buckets, hidden),
            "output_weight": torch.randn(buckets, dim, hidden) * math.sqrt(1 / hidden),
            "output_bias": torch.zeros(buckets, dim),
        }

    def compose(
        self,
        parameters: Mapping[str, torch.Tensor],
        pooled: Mapping[str, torch.Tensor],
        features: KeyedJaggedTensor,
        index: int,
    ) -> torch.Tensor:
        """Return [batch, D]: each id's base row goes through the network of its bucket, and the
        rows of a bag are pooled.
        """
        import torch

        slots = self.slots(index)
        base = torch.stack(
            [pooled[self.feature(index, "remainder", slot)] for slot in slots], dim=1
        )  # [batch, slots, D]
        bags = features[self.feature(index, "bucket")]
        present = torch.arange(len(slots), device=base.device) < bags.lengths().unsqueeze(1)
        buckets = bags.values()
        hidden = torch.baddbmm(
            parameters["hidden_bias"].index_select(0, buckets).unsqueeze(2),
            parameters["hidden_weight"].index_select(0, buckets),
            base[present].unsqueeze(2),
        )
        output = torch.baddbmm(
            parameters["output_bias"].index_select(0, buckets).unsqueeze(2),
            parameters["output_weight"].index_select(0, buckets),
            torch.relu(hidden),
        )
        return pool_rows(output.squeeze(2), bags)


def network_numbers(dim: int, hidden_size: int) -> int:
    """Return how many numbers a small network dim -> hidden -> dim has."""
    return 2 * dim * hidden_size + hidden_size + dim
