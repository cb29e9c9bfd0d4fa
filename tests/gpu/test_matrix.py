"""Every model x every kind of sharding x every place of a table: training equals the CPU's.

A job gives each of its tables another kind and place, so that few jobs have all pairs: the 26 tables
of the click data take every legal pair of both, in each of their models. The CPU trains the same
job on one rank, by another plan. Losses, metrics and final weights are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import Gpus, Job
from tests.gpu.data import prepared
from tests.support.stored_tensors import step_tensors

KINDS = ["table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard"]
KERNELS = ["fused", "fused_uvm", "fused_uvm_caching"]
# Neighbours differ in both, so four tables in a row have four kinds and all three kernels.
LAYOUTS = [("data_parallel", "dense"), *((KINDS[i % 5], KERNELS[i % 3]) for i in range(15))]

CLICKS = ["dlrm", "dlrm_dcn", "dcn", "dcnv2", "gdcn", "deepfm", "simple_deepfm", "xdeepfm", "autoint", "masknet", "finalmlp",
          "finalnet", "wukong", "wide_deep", "fm", "logistic_regression"]  # fmt: skip
USER_ITEM = ["user_item_mf", "user_item_ncf", "user_item_two_tower"]
LABELS = ["conversions_shared_bottom", "conversions_mmoe", "conversions_ple", "conversions_dbmtl", "conversions_pepnet",
          "conversions_esmm"]  # fmt: skip
SEQUENCES = ["histories_din", "histories_dien", "histories_bst", "histories_hstu", "histories_encoders",
             "histories_sasrec", "histories_hstu_retrieval"]  # fmt: skip
TABLES = {
    "quickstart": [f"cat_{number}" for number in range(26)],
    "user_item": ["user_id", "user_group", "item_id", "item_genre"],
    "conversions": ["user_id", "user_group", "item_id", "item_category"],
    "histories": ["item_id", "category", "history_dwell"],
}
# Adagrad is exact however a table is cut. Its eps keeps the first step of a tiny gradient small:
# otherwise the last bits of two sums decide between +lr and -lr.
EXACT = [
    "optimizer=adagrad",
    "optimizer.sparse.eps=0.01",
    "optimizer.dense.eps=0.01",
    "tables.default.embedding_dim=16",
    "tables.default.sharding.min_partition=8",
]

NO_DROPOUT = ["model.dropout=0"]  # a GPU draws from a generator of its own

# Sums of another order move a unit of its ReLUs across 0: one weight of thousands by 3e-5.
TOLERANCES = {"finalmlp": 1e-4}
# The layer norms of masknet divide by the size of its vectors, which start near 0: they would magnify rounding.
LARGER_ROWS = {"masknet": ["tables.default.init.kind=normal", "tables.default.init.scale=0.1"]}


def cases() -> Iterator[tuple[str, list[str], str, int]]:
    """Name, words, data, and the first of LAYOUTS that its tables take."""
    for model in CLICKS:
        drops = model not in ("simple_deepfm", "fm", "logistic_regression")
        words = [f"model={model}", *(NO_DROPOUT if drops else []), *LARGER_ROWS.get(model, [])]
        yield model, ["experiment=quickstart", *words], "quickstart", 0
    for data, names in (("user_item", USER_ITEM), ("conversions", LABELS)):
        for name, first in product(names, (0, 4)):
            yield f"{name}_{first}", [f"experiment={name}"], data, first
    for name, first in product(SEQUENCES, (0, 3)):
        yield (
            f"{name}_{first}",
            [f"experiment={name}", "data.columns.sequence.history.max_length=8"],
            "histories",
            first,
        )


CASES = {name: (words, data, first) for name, words, data, first in cases()}


def layouts(data: str, first: int) -> Iterator[tuple[str, str, str]]:
    """Give each table of the data its kind and kernel."""
    for number, table in enumerate(TABLES[data]):
        kind, kernel = LAYOUTS[(first + number) % len(LAYOUTS)]
        if data == "histories" and kind in ("table_row_wise", "grid_shard"):
            kind = "row_wise"  # TorchRec has neither for tables whose rows are not pooled
        yield table, kind, kernel


def words_of_layouts(data: str, first: int) -> list[str]:
    words = []
    for table, kind, kernel in layouts(data, first):
        words.append(f"tables.{table}.sharding.sharding_types=[{kind}]")
        words += [] if kernel == "dense" else [f"tables.{table}.sharding.compute_kernels=[{kernel}]"]
    return words


def assert_same(gpu: Job, cpu: Job, tolerance: float = 1e-5) -> None:
    """The same metrics, weights and buffers, and nothing that a GPU would refuse."""
    for report in filter(None, gpu.reports):
        assert report.problems == []
    assert gpu.summary.step == cpu.summary.step
    assert gpu.summary.validation.keys() == cpu.summary.validation.keys()
    for name, value in cpu.summary.validation.items():
        assert gpu.summary.validation[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    found, wanted = (step_tensors(job.run_dir, job.summary.step) for job in (gpu, cpu))
    names = [name for name in wanted if name.startswith("model.")]
    assert names and set(names) <= set(found)
    for name in names:
        torch.testing.assert_close(
            found[name], wanted[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def model_of(name: str) -> str:
    return name.rpartition("_")[0] if name[-1].isdigit() and name != "dcnv2" else name


_on_cpu: dict[str, Job] = {}


@pytest.mark.parametrize("name", CASES)
def test_a_models_tables_may_be_anywhere(
    gpus: Gpus, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, name: str
) -> None:
    words, data, first = CASES[name]
    words = [*words, *EXACT, *prepared(tmp_path_factory, data)]
    model = model_of(name)
    if model not in _on_cpu:
        _on_cpu[model] = gpus.train(1, words, tmp_path_factory.mktemp("cpu") / "run", on="cpu")
    gpu = gpus.train(2, [*words, *words_of_layouts(data, first)], tmp_path / "gpu")
    assert_same(gpu, _on_cpu[model], TOLERANCES.get(model, 1e-5))


def test_all_pairs_occur() -> None:
    """Of model and kind, of model and kernel, and of kind and kernel: what is legal."""
    pairs: set[tuple[str, str]] = set()
    for name, (_, data, first) in CASES.items():
        for _, kind, kernel in layouts(data, first):
            pairs |= {(model_of(name), kind), (model_of(name), kernel), (kind, kernel)}
    for model in map(model_of, CASES):
        kinds = KINDS[:3] if model in SEQUENCES else KINDS
        assert {(model, each) for each in [*kinds, "data_parallel", *KERNELS]} <= pairs
    assert set(product(KINDS, KERNELS)) <= pairs
