"""Each feature's importance by permutation, and what a training says of its tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.tensors import StepTensors
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.extras.runs.folder import open_run
from pipeline.extras.runs.permutation import with_shuffled
from pipeline.extras.runs.report import render_report
from pipeline.training.summary import describe_evaluation
from tests.support.jobs import evaluate_on_rank
from tests.support.messages import mentions
from tests.support.ranks import RankPool


def test_shuffling_a_feature_moves_whole_bags_and_leaves_the_others() -> None:
    features = keyed_jagged_tensor(
        ["a", "b"],
        torch.tensor([1, 2, 3, 4, 5, 6]),
        torch.tensor([2, 0, 1, 1, 1, 1]),
        3,
        [3, 3],
        torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    )
    batch = Batch(torch.zeros(3, 1), features, torch.zeros(3), torch.ones(3))
    shuffled = with_shuffled(batch, "a", torch.tensor([2, 0, 1])).sparse_features.to_dict()
    assert shuffled["a"].lengths().tolist() == [1, 2, 0] and shuffled["a"].values().tolist() == [3, 1, 2]
    assert shuffled["b"].values().tolist() == [4, 5, 6]
    assert torch.equal(shuffled["a"].weights(), torch.tensor([0.3, 0.1, 0.2]))
    assert torch.equal(shuffled["b"].weights(), torch.tensor([0.4, 0.5, 0.6]))


def test_a_training_says_how_many_rows_of_each_table_it_has_updated(small_run: Path) -> None:
    tables = open_run(str(small_run)).tables
    step = StepTensors(str(small_run / "checkpoints" / "step_00000030"))
    assert len(tables) == 26
    for name in ("cat_0", "cat_24", "cat_25"):  # the last of which lies on both ranks
        key = next(key for key in step.entries if key.endswith(f"embedding_bags.{name}.weight"))
        state = next(key for key in step.entries if key.endswith(f"embedding_bags.{name}.weight.{name}.momentum1"))
        weights = torch.cat([rows for _, rows in step.row_blocks(key)])
        changed = torch.cat([rows for _, rows in step.row_blocks(state)]).flatten() != 0
        assert (tables[name]["rows"], tables[name]["dim"]) == weights.shape
        assert tables[name]["updated"] == int(changed.sum()) and 0 < tables[name]["updated"] <= tables[name]["rows"]
        assert tables[name]["norm"] == pytest.approx(
            float(weights[changed].norm(dim=1).square().mean().sqrt()), rel=1e-4
        )


@pytest.mark.campaign
def test_an_evaluation_measures_importance_on_all_ranks_and_the_page_shows_it(
    ranks: RankPool, small_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "run"))
    words = [f"run={run}", "split=validation", "max_batches=1", "importance_rows=1024"]
    summary = ranks.run(2, evaluate_on_rank, words)[0]
    found = json.loads((run / "importance.json").read_text())
    assert (found["split"], found["step"], found["rows"]) == ("validation", 30, 1024)
    assert len(found["features"]) == 39 and found["ne"] < 1.1
    assert all(each["error"] > 0 for each in found["features"].values())
    increases = {name: each["ne_increase"] for name, each in found["features"].items()}
    assert max(increases.values()) > 2 * found["features"][max(increases, key=lambda name: increases[name])]["error"]
    assert mentions(describe_evaluation(summary), f"importance NE {max(increases, key=lambda name: increases[name])}")
    page = render_report(open_run(str(run)))
    assert 'aria-label="importance of each feature"' in page and "1,024 rows of the validation split" in page
