"""Every kind of compression either makes weight times row of each id, or refuses weighted ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.config.tables import CompressionConfig, TableConfig
from pipeline.data.read.batch import keyed_jagged_tensor
from pipeline.embeddings.collection import build_embeddings
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.tables import resolve_tables
from pipeline.planner.request import PlacedTable, _describe_table
from pipeline.runtime.errors import ConfigError
from tests.embeddings.compressed import NUM_IDS, table_of
from tests.support.datasets import described_dataset
from tests.support.messages import mentions

KINDS = {
    "hash": CompressionConfig("hash", num_rows=17, seed=4),
    "add": CompressionConfig("quotient_remainder", operation="add"),
    "multiply": CompressionConfig("quotient_remainder", operation="multiply", max_ids_per_bag=4),
    "concatenate": CompressionConfig("quotient_remainder", operation="concatenate"),
    "path": CompressionConfig("path_based", num_rows=12, hidden_size=3, max_ids_per_bag=4),
    "mixed": CompressionConfig("mixed_dimension", dims=[16, 8, 4]),
    "cores": CompressionConfig("tensor_train", rank=3, row_factors=[3, 4, 5], dim_factors=[2, 2, 4]),
    "split": CompressionConfig("frequency_split", head_rows="9"),
    "split_tail": CompressionConfig("frequency_split", head_rows="9", tail=CompressionConfig("hash", num_rows=11)),
}
BAGS = [[2, 50, 10, 10], [], [7], [0, 52, 9]]
WEIGHTS = [[0.5, -1.0, 3.0, 0.25], [], [-2.0], [0.0, 1.5, 1.0]]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bag_is_the_sum_of_weight_times_row(kind: str, pooling: str) -> None:
    table = replace(table_of("t", KINDS[kind], pooling), is_weighted=True)
    torch.manual_seed(0)
    tables = [table, table_of("other", None)]  # TorchRec looks nothing up in a collection without tables
    embeddings, splitter = build_embeddings(tables, torch.device("cpu")), IdSplitter(tables)
    keys = ["t_one", "t_many", "other_one", "other_many"]

    def pooled(bags: list[list[int]], weights: list[list[float]]) -> torch.Tensor:
        ids = torch.tensor([each for bag in bags for each in bag])
        lengths = torch.tensor([0] * len(bags) + [len(bag) for bag in bags] + [0] * 2 * len(bags))
        of_ids = torch.tensor([each for bag in weights for each in bag])
        features = keyed_jagged_tensor(keys, ids, lengths, len(bags), [0, len(ids), 0, 0], of_ids)
        return embeddings(splitter(features))["t_many"].detach()

    rows = pooled([[each] for each in range(NUM_IDS)], [[1.0]] * NUM_IDS)
    assert rows.abs().min(dim=1).values.max() > 0
    expected = torch.stack(
        [
            (torch.tensor(weights).unsqueeze(1) * rows[bag]).sum(dim=0) / (max(1, len(bag)) if pooling == "mean" else 1)
            for bag, weights in zip(BAGS, WEIGHTS, strict=True)
        ]
    )
    torch.testing.assert_close(pooled(BAGS, WEIGHTS), expected, rtol=1e-5, atol=1e-6)


def test_a_kind_that_would_lose_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.embeddings.compression.hash import Hash

    dataset = described_dataset({"tags": 60})
    weighted = replace(dataset, sparse_features=[replace(dataset.sparse_features[0], multi_hot=True, weighted=True)])
    plain = TableConfig(embedding_dim=16, compression=CompressionConfig("hash", num_rows=9))
    tail = TableConfig(embedding_dim=16, compression=KINDS["split_tail"])
    for config in (plain, tail):
        assert resolve_tables({"tags": config}, weighted)[0].is_weighted
    monkeypatch.setattr(Hash, "carries_weights", False)
    for config in (plain, tail):
        resolve_tables({"tags": config}, dataset)
        with pytest.raises(ConfigError) as error:
            resolve_tables({"tags": config}, weighted)
        assert mentions(error.value, "tables.tags.compression kind=hash data.columns.weighted")


def test_weights_are_counted_in_costs_and_named_in_plans() -> None:
    plain = table_of("t", None)
    weighted = replace(plain, is_weighted=True)
    assert [build_embeddings([each]).is_weighted() for each in (plain, weighted)] == [False, True]
    about = [_describe_table(PlacedTable(each, "embeddings", None, None)) for each in (plain, weighted)]
    assert "is_weighted" not in about[0] and about[1]["is_weighted"]
