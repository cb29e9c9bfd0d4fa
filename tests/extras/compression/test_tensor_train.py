"""A tensor-train table is the product of its cores, initialized with the spread of the table in whose place it stands."""

from __future__ import annotations

import pytest
import torch

from pipeline.config.tables import CompressionConfig, ConstraintConfig, InitConfig
from pipeline.embeddings.table import Table
from pipeline.extras.compression import tensor_train
from pipeline.extras.compression.tensor_train import TensorTrain, away_from_zero


class Train(torch.nn.Module):
    """A table of cores; rows_of(ids) -> [ids, dim]."""

    def __init__(self, num_ids: int, dim: int, init: InitConfig, **settings: object) -> None:
        super().__init__()
        config = CompressionConfig("tensor_train", **settings)
        table = Table("t", num_ids, dim, ["f"], "sum", "fp32", init, ConstraintConfig(), [1.0], compression=config)
        self.kind = TensorTrain(table)
        torch.manual_seed(1)
        self.cores = torch.nn.ParameterDict(self.kind.initial_parameters())

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        return self.kind.rows_of(dict(self.cores.items()), ids)

    def materialised(self) -> torch.Tensor:
        """[n1 n2 n3, d1 d2 d3] by one product of the three cores as they stand."""
        first, second, third = (self.cores[name] for name in ("first", "second", "third"))
        rank = first.shape[2]
        second = second.view(second.shape[0], rank, -1, rank)
        full = torch.einsum("iar,jrbs,ksc->ijkabc", first, second, third)
        return full.reshape(first.shape[0] * second.shape[0] * third.shape[0], -1)


@pytest.mark.parametrize("max_pairs", [0, 4096])
def test_rows_and_gradients_are_those_of_the_materialised_product(
    max_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_train, "MAX_PAIRS", max_pairs)
    train = Train(200, 24, InitConfig("normal", 0.3), rank=5)
    ids = torch.randint(0, 200, (300,))
    weights = torch.randn(300, 24)
    found, wanted = [], []
    for rows, grads in ((train.rows_of(ids), found), (train.materialised()[ids], wanted)):
        train.zero_grad()
        (rows * weights).sum().backward()
        grads += [rows.detach(), *(core.grad.clone() for core in train.parameters() if core.grad is not None)]
    assert len(found) == 4
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_pairs", [0, 4096])
def test_a_batch_without_ids_has_no_rows_and_no_gradients(max_pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_train, "MAX_PAIRS", max_pairs)
    train = Train(200, 24, InitConfig("normal", 0.3), rank=5)
    rows = train.rows_of(torch.zeros(0, dtype=torch.int64))
    assert rows.shape == (0, 24)
    rows.sum().backward()
    assert all(core.grad is not None and not core.grad.any() for core in train.parameters())


@pytest.mark.parametrize(
    ("init", "std"), [(InitConfig("uniform"), 5000**-0.5 / 3**0.5), (InitConfig("normal", 0.2), 0.2)]
)
def test_first_rows_have_the_spread_of_the_full_table(init: InitConfig, std: float) -> None:
    rows = Train(5000, 32, init, rank=8).materialised()
    assert rows.mean().item() == pytest.approx(0, abs=0.05 * std)
    assert rows.std().item() == pytest.approx(std, rel=0.1)


def test_the_sampled_gaussian_has_no_middle_and_unit_variance() -> None:
    torch.manual_seed(0)
    sampled = away_from_zero(40_000)
    assert sampled.std().item() == pytest.approx(1, abs=0.01)
    assert sampled.abs().min().item() == pytest.approx(2 / 5.746**0.5, rel=1e-3)  # two standard deviations, rescaled


def test_parameters_have_shapes_on_the_meta_device() -> None:
    """An artifact compares the shapes of its parameters before it takes memory for them."""
    with torch.device("meta"):
        assert away_from_zero(2, 3).shape == (2, 3)
