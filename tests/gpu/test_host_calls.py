"""What the host of a GPU calls for a layer, counted on the shadow GPU."""

from __future__ import annotations

import pytest
import torch

from pipeline.models.layers.interaction import DotInteraction
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
    [(out, gradient)], [report] = gpus.run(1, _interaction)
    [(on_cpu, of_cpu)] = gpus.run_on_cpu(1, _interaction)
    torch.testing.assert_close(out, on_cpu)
    torch.testing.assert_close(gradient, of_cpu)
    if report is not None:  # 27 rows were 26 slices and 26 selections
        assert report.operations["aten::slice"] + report.operations["aten::select"] < 10


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
