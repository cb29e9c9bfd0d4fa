"""The cost of a table's precision is measured on the first rows, and each mix once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.serving import PRECISIONS
from pipeline.extras.precision_search.search import highest_cost, table_losses
from pipeline.serving.artifact import reference
from pipeline.serving.artifact.reference import SPLIT, Reference, make_reference, read_samples
from pipeline.serving.artifact.trained_step import open_trained_step
from pipeline.serving.artifact.writer import new_artifact


@pytest.fixture
def of_small_run(small_run: Path, tmp_path: Path) -> Iterator[Reference]:
    job = load_config(ExportJob, [f"run={small_run}", f"output={tmp_path / 'artifact'}", "parity.splits=[validation]"])
    step = open_trained_step(job)
    with new_artifact(str(tmp_path / "artifact")) as writer:
        yield make_reference(step, read_samples(job, step), writer.scratch)


@pytest.mark.long
def test_a_tables_loss_is_that_of_the_first_rows_and_no_mix_is_measured_twice(
    of_small_run: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = of_small_run.trained.tables
    few = of_small_run.of_batches(SPLIT, slice(0, 1))
    assert len(few.scores[SPLIT]) < len(of_small_run.scores[SPLIT])
    losses = table_losses(
        of_small_run, [{"fp32": 4, "int2": 1} if number == 25 else {} for number in range(len(tables))]
    )
    alone = ["fp32"] * 25 + ["int2"] + ["fp32"] * (len(tables) - 26)
    assert losses[25] == {"fp32": 0.0, "int2": of_small_run.parity_of(SPLIT, alone).ne_delta} and losses[0] == {}
    assert abs(losses[25]["int2"]) > 1e-6

    measured = []
    compared = reference.compare
    monkeypatch.setattr(reference, "compare", lambda *found: (measured.append(1), compared(*found))[1])
    mixes = [[precision] * len(tables) for precision in (*PRECISIONS[:2], *PRECISIONS[:2])]
    parities = [of_small_run.parity_of(SPLIT, mix) for mix in mixes]
    assert parities[:2] == parities[2:] and len(measured) == 2
    assert parities[0].max_score_difference == 0 < parities[1].max_score_difference


@pytest.mark.long
def test_other_rows_decide_than_those_that_choose_with_a_standard_error(of_small_run: Reference) -> None:
    whole = of_small_run.scores[SPLIT]
    halves = [of_small_run.of_batches(SPLIT, slice(first, None, 2)) for first in (0, 1)]
    batches = [half.samples[SPLIT].batches for half in halves]
    assert len(batches[1]) >= 1 and not {id(one) for one in batches[0]} & {id(one) for one in batches[1]}
    assert sorted(np.concatenate([half.scores[SPLIT] for half in halves]).tolist()) == sorted(whole.tolist())

    deciding = halves[1]
    trained = deciding.scores[SPLIT]
    assert highest_cost(deciding, trained) == 0
    # moves NE both ways: the mean cost is small, its standard error is not
    noisy = np.clip(trained + np.random.default_rng(7).normal(0, 0.2, trained.shape), 0.01, 0.99)
    cost = deciding.compare(SPLIT, noisy).ne_delta
    assert 0 < cost < highest_cost(deciding, noisy) < 2 * cost
