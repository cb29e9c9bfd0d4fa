"""Sample negatives from the corpus of items, add them to training batches, and estimate the
softmax over all items from the sampled items.

A batch gets one row for each sampled item, with the item's features and no other ids. So the item
tower computes sampled items in the same pass as the items of the batch, and they get gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.data.read.batch import keyed_jagged_tensor
from pipeline.embeddings.compression.kind import Bags
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.extras.models.negatives import NegativesConfig, corpus_of, corpus_size
from pipeline.extras.models.tasks.item_rows import NO_ITEM, ItemBags
from pipeline.planner.resolved_job import ResolvedJob

SALT = 0x6E6567  # the sampler has other random numbers than the reader with the same seed

# Ids of sampled items [num_rows], NO_ITEM for a row without ids -> the bags of each item feature
BagsOfItems = Callable[[NDArray[np.int64]], dict[str, Bags]]


class LogFrequency(nn.Module):
    """Map item ids to the log of each item's share of the training rows, from the frequency curve
    of its table.

    Ids are sorted by descending frequency and start at 1. Between the points of the curve, log
    share is linear in log rank, as under a power law. The unknown item (0) counts as the rarest
    item.
    """

    _centres: torch.Tensor
    _density: torch.Tensor

    def __init__(self, frequencies: RowFrequencies) -> None:
        super().__init__()
        rows = torch.tensor(frequencies.rows, dtype=torch.float64)
        shares = torch.tensor(frequencies.shares, dtype=torch.float64)
        widths = rows.diff()
        centres = ((rows[:-1] + 1) * rows[1:]).sqrt().log()
        density = (shares.diff() / widths).clamp(min=1e-12).log()
        self.register_buffer("_centres", centres.float(), persistent=False)
        self.register_buffer("_density", density.float(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        centres, density = self._centres.to(ids.device), self._density.to(ids.device)
        if len(centres) == 1:
            return density.expand(len(ids))
        log_rank = ids.clamp(min=1).float().log()
        log_rank = torch.where(ids == 0, centres[-1], log_rank).clamp(centres[0], centres[-1])
        right = torch.searchsorted(centres, log_rank).clamp(1, len(centres) - 1)
        share = (log_rank - centres[right - 1]) / (centres[right] - centres[right - 1])
        return torch.lerp(density[right - 1], density[right], share)


class CorpusProbability(nn.Module):
    """Map item ids to the log of each item's probability to be sampled: its share of the training
    rows to a power, divided by the sum over all items.
    """

    def __init__(self, frequencies: RowFrequencies, power: float) -> None:
        super().__init__()
        self._log_frequency, self._power = LogFrequency(frequencies), power
        self._num_items = corpus_size(frequencies)
        self._log_sum = math.log(self._weights().sum())

    def _weights(self) -> NDArray[np.float64]:
        """Return [num_items] float64: frequency ** power of items 1, 2, ..."""
        if self._power == 0:
            return np.ones(self._num_items)
        logs = self._log_frequency(torch.arange(1, self._num_items + 1))
        return np.exp(self._power * logs.double().numpy())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self._power == 0:
            return torch.full_like(ids, -self._log_sum, dtype=torch.float32)
        return self._power * self._log_frequency(ids) - self._log_sum

    def sampler(self) -> Callable[[np.random.Generator, int], NDArray[np.int64]]:
        """Return a function (random, count) -> [count] ids, sampled with replacement."""
        ends = np.cumsum(self._weights())

        def sample(random: np.random.Generator, count: int) -> NDArray[np.int64]:
            found = np.searchsorted(ends, random.random(count) * ends[-1], side="right")
            return np.minimum(found, len(ends) - 1) + 1

        return sample


class SampledRows:
    """Adds this rank's share of a step's sampled items to a batch: see training.readers.extra_rows_of.

    The items depend on the seed, the epoch and the step, and not on the number of ranks.
    """

    def __init__(
        self,
        sample: Callable[[np.random.Generator, int], NDArray[np.int64]],
        count: int,
        bags_of: BagsOfItems,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._sample, self._count, self._bags_of, self._seed = sample, count, bags_of, seed
        self._share = -(-count // world_size)
        self._begin = rank * self._share

    def __call__(self, features: KeyedJaggedTensor, epoch: int, step: int) -> KeyedJaggedTensor:
        items = self._sample(np.random.default_rng([SALT, self._seed, epoch, step]), self._count)
        own = np.full(self._share, NO_ITEM)
        items = items[self._begin : self._begin + self._share]
        own[: len(items)] = items
        return append_rows(features, self._share, self._bags_of(own))


def append_rows(features: KeyedJaggedTensor, num_rows: int, bags: dict[str, Bags]) -> KeyedJaggedTensor:
    """Return the features with `num_rows` more rows. Features that `bags` lacks have no ids there."""
    keys, stride = features.keys(), features.stride()
    lengths = np.zeros((len(keys), stride + num_rows), np.int32)
    lengths[:, :stride] = features.lengths().numpy().reshape(len(keys), stride)
    values, weights = features.values().numpy(), features.weights_or_none()
    parts, weight_parts, counts, begin = [], [], [], 0
    for index, (key, count) in enumerate(zip(keys, features.length_per_key(), strict=True)):
        own = slice(begin, begin + count)
        begin += count
        more = bags.get(key)
        parts.append(values[own])
        if weights is not None:
            weight_parts.append(weights.numpy()[own])
        if more is not None:
            lengths[index, stride:] = more.lengths
            parts.append(more.ids)
            if weights is not None:
                weight_parts.append(np.ones(len(more.ids), np.float32) if more.weights is None else more.weights)
        counts.append(count if more is None else count + len(more.ids))
    return keyed_jagged_tensor(
        keys,
        torch.from_numpy(np.concatenate(parts)),
        torch.from_numpy(lengths.reshape(-1)),
        stride + num_rows,
        counts,
        None if weights is None else torch.from_numpy(np.concatenate(weight_parts)),
    )


def sampled_rows(
    config: NegativesConfig, features: Sequence[str], resolved: ResolvedJob, rank: int
) -> SampledRows | None:
    """Return what adds sampled items to training batches, None if none are sampled.

    features: the item features; the first names items. Local: it may read the training rows.
    """
    if not config.num_sampled:
        return None
    job = resolved.job
    frequencies = corpus_of(features[0], resolved.tables, f"model.negatives.kind={config.kind}")
    return SampledRows(
        CorpusProbability(frequencies, config.power).sampler(),
        config.num_sampled,
        ItemBags(resolved.dataset, job.data.path, features, job.data.synthetic_multi_hot),
        job.trainer.seed,
        rank,
        resolved.world_size,
    )


class ExpectedCount(nn.Module):
    """Map item ids to the log of how often each item is expected among the negatives of a step.

    The sum over the negatives of exp(score) / expected count estimates, without bias, the sum of
    exp(score) over all items, also if the negatives come from several distributions (Veach and
    Guibas, SIGGRAPH 1995).
    """

    def __init__(self, config: NegativesConfig, item: str, tables: list[Table]) -> None:
        super().__init__()
        frequencies = corpus_of(item, tables, f"model.negatives.kind={config.kind}")
        self._count = config.num_sampled
        self._sampled = CorpusProbability(frequencies, config.power)
        self._in_batch = LogFrequency(frequencies) if config.kind == "mixed" else None

    def forward(self, ids: torch.Tensor, num_negatives: torch.Tensor) -> torch.Tensor:
        """ids: [N]. num_negatives: 0-d, the sampled items and, with mixed, the items of other rows."""
        sampled: torch.Tensor = math.log(self._count) + self._sampled(ids)
        if self._in_batch is None:
            return sampled
        return torch.logaddexp(sampled, (num_negatives - self._count).clamp(min=1).log() + self._in_batch(ids))
