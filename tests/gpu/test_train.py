"""The train verb on a GPU: the same numbers as on the CPU, and nothing that a GPU would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.conftest import Gpus


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_equals_the_cpus(gpus: Gpus, prepared_clicks: str, tmp_path: Path, world_size: int) -> None:
    if gpus.at_most(world_size) < world_size:
        pytest.skip("the job on one GPU is the other case")
    words = ["experiment=quickstart", f"data.path={prepared_clicks}"]
    words.append("tables.default.sharding.sharding_types=[table_wise,row_wise]")
    cpu = gpus.train(world_size, words, tmp_path / "cpu", on="cpu")
    gpu = gpus.train(world_size, words, tmp_path / "gpu")
    assert gpu.summary.step == cpu.summary.step == 3
    for name, value in cpu.summary.validation.items():
        assert gpu.summary.validation[name] == pytest.approx(value, rel=1e-5), name
    for report in filter(None, gpu.reports):
        assert report.problems == []
        assert report.operations["fbgemm::split_embedding_codegen_forward_unweighted_cuda"] >= 3
        assert report.operations["fbgemm::split_embedding_backward_codegen_rowwise_adagrad_unweighted_exact_cuda"] >= 3
