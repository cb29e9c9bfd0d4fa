"""A tensor without memory is saved as torch.save saves one in memory, by blocks, and read and written by rows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint import stored_rows
from pipeline.checkpoint.shards import _save_stored, _without_zip_checksums
from pipeline.checkpoint.stored_rows import FirstWeights, StoredRows
from pipeline.runtime.errors import TierError
from pipeline.runtime.storage.checksums import ChecksummedWriter


class Source:
    """Rows in memory, which counts how many were read at once."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns, self.most = columns, 0
        self.first = FirstWeights()
        self.changed = np.ones(len(columns[0]), np.bool_)

    def read_rows(self, column: int, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        self.most = max(self.most, len(rows))
        return self.columns[column][torch.from_numpy(rows)]

    def write_rows(self, column: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        self.columns[column][rows] = values
        self.changed[rows.numpy()] = True

    def first_weights(self) -> FirstWeights:
        return self.first

    def changed_rows(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.packbits(self.changed, bitorder="little")

    def begin(self, first_weights: FirstWeights) -> None:
        rows = np.arange(len(self.changed))
        self.first, self.changed[:] = first_weights, False
        first_weights.sample(rows, rows, self.columns[0].numpy())
        for column in self.columns[1:]:
            column.zero_()


class Failing(Source):
    def read_rows(self, column: int, rows: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        raise TierError("rows of table 't' could not be read")


def _stored(source: Source, column: int = 0) -> StoredRows:
    return StoredRows(source, column, 0, source.columns[column].shape)


@pytest.mark.parametrize("shape", [(1000, 16), (1000,), (1, 4)], ids=str)
def test_the_file_is_the_one_that_torch_save_writes_from_memory(
    tmp_path: Path, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "BLOCK_BYTES", 1 << 15)
    values, expected = torch.randn(shape), io.BytesIO()
    source = Source(values)
    with _without_zip_checksums():
        torch.save(values, expected)
        with ChecksummedWriter(str(tmp_path / "file")) as writer:
            _save_stored(_stored(source), writer)
    assert (tmp_path / "file").read_bytes() == expected.getvalue()
    assert source.most * values[0].numel() * 4 <= 1 << 15


def test_a_read_that_fails_is_the_error_that_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="rows of table 't' could not be read"),
        ChecksummedWriter(str(tmp_path / "file")) as writer,
    ):
        _save_stored(_stored(Failing(torch.zeros(10, 4))), writer)


def test_slices_copies_and_index_copies_reach_the_rows() -> None:
    source = Source(torch.zeros(20, 4), torch.zeros(20))
    weights, state = _stored(source), _stored(source, 1)
    weights[5:9].copy_(torch.ones(4, 4))
    state[3:].copy_(torch.full((17,), 2.0))
    weights.index_copy_(0, torch.tensor([19, 0]), torch.tensor([[7.0] * 4, [8.0] * 4]))
    assert source.columns[0][:, 0].tolist() == [8.0, *[0.0] * 4, *[1.0] * 4, *[0.0] * 10, 7.0]
    assert source.columns[1].tolist() == [0.0] * 3 + [2.0] * 17
    read = torch.empty(4, 4)
    read.copy_(weights[4:8])
    assert read[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert (weights[5:9].float().square().sum(), float(state[2:4].sum())) == (16.0, 2.0)
    weights.copy_(weights)  # the same rows: nothing to do


def test_what_would_change_rows_in_memory_is_refused() -> None:
    weights = _stored(Source(torch.zeros(20, 4)))
    with pytest.raises(NotImplementedError, match="copy_ and index_copy_ can"):
        weights.add_(1.0)
