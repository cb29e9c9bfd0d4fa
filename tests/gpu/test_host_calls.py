"""What the host of a GPU calls for a layer, counted on the shadow GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline import devices
from pipeline.config.optimizers import SparseOptimizerConfig
from pipeline.extras.shadow import report
from pipeline.models.layers.interaction import DotInteraction
from pipeline.sharding.torchrec.sparse_optimizer import ReplicatedTablesOptimizer
from tests.gpu.conftest import Gpus


def _interaction(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    dense = torch.randn(8, 4, generator=generator).to(device)
    rows = torch.randn(8, 26, 4, generator=generator).to(device).requires_grad_()
    layer = DotInteraction(26)
    out = layer(dense, rows)
    out.square().sum().backward()
    assert rows.grad is not None
    return out.detach().cpu(), rows.grad.cpu()


def test_dot_products_are_gathered_in_one_call_and_are_those_of_the_cpu(gpus: Gpus) -> None:
    [(out, gradient)], [shadow] = gpus.run(1, _interaction)
    [(on_cpu, of_cpu)] = gpus.run_on_cpu(1, _interaction)
    torch.testing.assert_close(out, on_cpu)
    torch.testing.assert_close(gradient, of_cpu)
    if shadow is not None:  # 27 rows were 26 slices and 26 selections
        assert shadow.operations["aten::slice"] + shadow.operations["aten::select"] < 10


def _train_replicated(rank: int) -> tuple[dict[str, torch.Tensor], int]:
    """Three steps of row-wise Adagrad over six tables of two widths; their weights, and the launches of the last step."""
    generator = torch.Generator().manual_seed(1)
    kind = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    sizes = {f"t{index}": (index + 2, 4 if index % 2 else 8) for index in range(6)}
    values = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    weights = {f"m.embedding_bags.{name}.weight": nn.Parameter(each.to(kind)) for name, each in values.items()}
    with devices.using(devices.named(kind, plain=True)):
        optimizer = ReplicatedTablesOptimizer(weights, SparseOptimizerConfig("rowwise_adagrad", lr=0.1))
        for _ in range(3):
            for weight in weights.values():
                weight.grad = torch.randn(weight.shape, generator=generator).to(kind)
            before = report.current().launches
            optimizer.step()
    launches = report.current().launches - before
    return {name: weight.detach().cpu() for name, weight in weights.items()}, launches


def test_replicated_tables_are_updated_together_as_torchrec_does_one_by_one(gpus: Gpus) -> None:
    [(found, launches)], [shadow] = gpus.run(1, _train_replicated)
    [(expected, _)] = gpus.run_on_cpu(1, _train_replicated)
    torch.testing.assert_close(found, expected)
    if shadow is not None:
        assert launches <= 2 * 9  # of each width; TorchRec's own optimizer has seven for each table


def _count_calls(rank: int) -> tuple[int, float]:
    from pipeline.extras.shadow import tensors
    from pipeline.extras.shadow.meter import Meter

    before = tensors.run
    try:
        meter = Meter()
        start = meter.calls
        tensor = torch.zeros(4, device="cuda")
        for _ in range(10):
            tensor.add_(1)
        total = float(tensor.sum())
        return meter.calls - start, total
    finally:
        tensors.run = before


@pytest.mark.usefixtures("needs_shadow")
def test_the_meter_counts_each_operation_once(gpus: Gpus) -> None:
    [(calls, total)], _ = gpus.run(1, _count_calls)
    assert (calls, total) == (13, 40.0)  # zeros, ten sums, and the two of float(tensor.sum())
