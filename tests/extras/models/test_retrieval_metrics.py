"""recall@k and MRR are those of a brute-force ranking of the whole catalogue, on any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.extras.models.tasks.negatives import LogFrequency
from pipeline.extras.models.tasks.retrieval import RetrievalPrediction, hardest_cross_entropy
from pipeline.extras.models.tasks.retrieval_metrics import RetrievalMetrics
from tests.support.ranks import RankPool

NUM_BATCHES, BATCH, NUM_ITEMS, DIM = 4, 32, 40, 3


def _predictions() -> list[RetrievalPrediction]:
    """Global batches; an item's vector is the same in every row, scores have ties, some rows are padding."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randint(-2, 3, (NUM_ITEMS, DIM), generator=generator).float()
    found = []
    for _ in range(NUM_BATCHES):
        ids = torch.randint(0, NUM_ITEMS, (BATCH,), generator=generator)
        users = torch.randint(-2, 3, (BATCH, DIM), generator=generator).float()
        labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
        weights = (torch.rand(BATCH, generator=generator) > 0.2).float()
        zeros, history = torch.zeros(BATCH), torch.randint(-1, NUM_ITEMS, (BATCH, 3), generator=generator)
        further = (history, vectors[history.clamp(min=0)])
        found.append(
            RetrievalPrediction(zeros.sum(), zeros, labels, weights, users, vectors[ids], ids, further, history)
        )
    return found


def _measured(rank: int, world_size: int) -> dict[str, float]:
    measure, share = RetrievalMetrics(init_distributed(), [1, 5]), BATCH // world_size
    for one in _predictions():
        mine = slice(rank * share, (rank + 1) * share)
        assert one.history is not None
        history = (one.history[0][mine], one.history[1][mine])
        parts = one._replace(**{name: getattr(one, name)[mine] for name in one._fields[1:] if name != "history"})
        measure.update(parts._replace(history=history))
    return measure.compute()


def _brute_force() -> dict[str, float]:
    items: dict[int, torch.Tensor] = {}
    clicks: list[tuple[torch.Tensor, int, set[int]]] = []
    num_samples = 0
    for one in _predictions():
        for row in torch.nonzero(one.sample_weights > 0).flatten().tolist():
            num_samples += 1
            if one.item_ids[row] > 0:
                items.setdefault(int(one.item_ids[row]), one.items[row])
            if one.labels[row] > 0:
                seen = set(one.seen[row].tolist()) - {int(one.item_ids[row])}
                clicks.append((one.users[row], int(one.item_ids[row]), seen))
            for item, vector in zip(*(part[row] for part in one.history), strict=True):
                if item > 0:
                    items.setdefault(int(item), vector)
    places = []
    for user, wanted, seen in clicks:
        if wanted == 0:
            places.append(math.inf)
            continue
        scores = {item: float(user @ vector) for item, vector in items.items() if item not in seen}
        above = sum(score > scores[wanted] for score in scores.values())
        ties = sum(score == scores[wanted] for score in scores.values()) - 1
        places.append(1 + above + ties / 2)
    count = len(places)
    return {
        "recall_at_1": sum(place <= 1 for place in places) / count,
        "recall_at_5": sum(place <= 5 for place in places) / count,
        "ndcg_at_1": sum(1 / math.log2(1 + place) for place in places if place <= 1) / count,
        "ndcg_at_5": sum(1 / math.log2(1 + place) for place in places if place <= 5) / count,
        "mrr": sum(1 / place for place in places) / count,
        "num_clicked": count,
        "catalogue_items": len(items),
        "num_samples": num_samples,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_recall_and_mrr_equal_a_brute_force_ranking(ranks: RankPool, world_size: int) -> None:
    expected = _brute_force()
    assert 0 < expected["recall_at_1"] < expected["recall_at_5"] < 1
    for found in ranks.run(world_size, _measured, world_size):
        assert found == pytest.approx(expected)


def test_log_frequency_follows_a_power_law_between_the_curves_points() -> None:
    truth = torch.arange(1, 1001, dtype=torch.float64) ** -0.8
    truth /= truth.sum()
    rows = [0, *(2**power for power in range(10)), 1000]
    shares = [float(truth[:row].sum()) for row in rows]
    estimate = LogFrequency(RowFrequencies(rows, shares))(torch.arange(1, 1001))
    assert float((estimate.double() - truth.log())[:900].abs().max()) < 0.2
    assert float(LogFrequency(RowFrequencies(rows, shares))(torch.tensor([0]))) == pytest.approx(float(estimate.min()))


def test_hard_negatives_are_those_that_score_highest_and_all_of_them_are_the_softmax() -> None:
    scores = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    own = torch.tensor([0, 3, 8, 3, 1])
    scores[1, 5] = scores[4, [0, 2, 7]] = float("-inf")  # the same item again, or a row that does not count
    whole = torch.nn.functional.cross_entropy(scores, own, reduction="none")
    for count in (8, 100):
        torch.testing.assert_close(hardest_cross_entropy(scores, own, count), whole)
    others = scores.scatter(1, own[:, None], float("-inf")).sort(dim=1, descending=True).values
    positive = scores.gather(1, own[:, None])
    for count in (1, 3):
        wanted = torch.cat([positive, others[:, :count]], dim=1).log_softmax(dim=1)[:, 0]
        torch.testing.assert_close(hardest_cross_entropy(scores, own, count), -wanted)
    assert hardest_cross_entropy(scores[:1, :1], torch.tensor([0]), 4).tolist() == [0.0]
