"""Read a prepared data set: as Arrow tables, as a profile of its columns, or as batches for plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.data import ReaderConfig
from pipeline.data.dataset import Split, check_split, load_dataset
from pipeline.data.read.row_groups import row_group_reader
from pipeline.runtime.errors import check_at_least
from pipeline.runtime.logs import quiet_libraries
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PlainBatch:
    """Rows without TorchRec's types. dense: [batch, columns] float32. labels, weights: [batch] or [batch, labels].

    ids, offsets: of each feature, as torch.nn.EmbeddingBag(ids, offsets) takes them; offsets: [batch].
    """

    dense: torch.Tensor
    ids: dict[str, torch.Tensor]
    offsets: dict[str, torch.Tensor]
    labels: torch.Tensor
    weights: torch.Tensor


class Batches:
    """The batches of a split, as a DataLoader gives them: each iteration is an epoch."""

    def __init__(self, path: str, split: str, batch_size: int, seed: int) -> None:
        from pipeline.data.read.reader import ShardReader

        check_at_least("batch_size", batch_size, 1)
        self._epoch = 0
        training = split == "train"
        self._reader = ShardReader(
            path, load_dataset(path), split, global_batch_size=batch_size, rank=0, world_size=1, seed=seed,
            config=ReaderConfig(num_streams=1), drop_last=training,
        )  # fmt: skip

    def __len__(self) -> int:
        return self._reader.steps_per_epoch

    def __iter__(self) -> Iterator[PlainBatch]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for batch in self._reader.batches(epoch if self._reader.drop_last else 0):
            with quiet_libraries():  # TorchRec warns of a name that it uses itself
                bags = batch.sparse_features.to_dict()
            yield PlainBatch(
                batch.dense_features,
                {name: bag.values() for name, bag in bags.items()},
                {name: bag.offsets()[:-1].long() for name, bag in bags.items()},
                batch.labels,
                batch.sample_weights,
            )


class Dataset:
    """A data set that prepare() has written to the folder `path`. Raises DataError if it has not."""

    def __init__(self, path: str) -> None:
        self.path = str(path)
        self._about = load_dataset(self.path)

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {split.num_rows:,}" for name, split in self.splits.items())
        return f"Dataset({self.path!r}, {rows})"

    @property
    def splits(self) -> dict[str, Split]:
        """Name -> files, number of rows and label rate."""
        return dict(self._about.splits)

    @property
    def cardinalities(self) -> dict[str, int]:
        """Feature -> number of ids, which is the number of rows of its table. Id 0 is an unknown value."""
        return {feature.name: feature.cardinality for feature in self._about.sparse_features}

    def to_arrow(self, split: str = "train", columns: list[str] | None = None) -> pa.Table:
        """Return the prepared rows: labels, transformed numbers and ids."""
        check_split(self._about, split, 0)
        paths = [storage.join(self.path, file.path) for file in self._about.splits[split].files]
        tables, read = [], row_group_reader(self.path, self._about)
        for path in paths:
            with storage.open_file(path, "rb") as raw, pq.ParquetFile(raw) as file:
                tables += [read(file, number, columns) for number in range(file.num_row_groups)]
        return pa.concat_tables(tables)

    def profile(self) -> pa.Table:
        """Return a row for each feature: its kind, ids, distinct raw values, ids per row, and the share of
        lookups of its most frequent id. Dense columns have a kind only.
        """
        rows = [{"feature": name, "kind": "dense"} for name in self._about.dense_features]
        found = [
            {
                "feature": each.name,
                "kind": "sequence" if each.sequence else "multi_hot" if each.multi_hot else "sparse",
                "ids": each.cardinality,
                "distinct": each.num_distinct,
                "ids_per_row": each.mean_pooling_factor,
                "top_share": each.frequency_curve.shares[0] if each.frequency_curve.shares else None,
            }
            for each in self._about.sparse_features
        ]
        schema = pa.schema(
            [("feature", pa.string()), ("kind", pa.string()), ("ids", pa.int64()), ("distinct", pa.int64()),
             ("ids_per_row", pa.float64()), ("top_share", pa.float64())]
        )  # fmt: skip
        return pa.Table.from_pylist([*rows, *found], schema)

    def batches(self, split: str = "train", *, batch_size: int = 1024, seed: int = 0) -> Batches:
        """Return the batches of a split. The training split is shuffled, and its last partial batch left out."""
        return Batches(self.path, split, batch_size, seed)
