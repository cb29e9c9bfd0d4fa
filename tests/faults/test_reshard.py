"""Fault 12: a checkpoint goes on elsewhere: other ranks, other plans, the same values."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.optimizers import find_optimizer
from tests.checkpoint.resharding import EXACT_FOR_ROW_STATE, TYPES, largest_difference, restore, rotated, save
from tests.faults.conftest import FaultRecorder
from tests.support.ranks import RankPool

LOCAL_SIZE = {1: 1, 2: 2, 4: 2}  # four ranks are two hosts of two: table_row_wise and grid_shard need hosts


def _types_for(optimizer: str) -> tuple[str, ...]:
    """Row-wise state under column shards is another optimizer: its refusal is tested elsewhere."""
    return EXACT_FOR_ROW_STATE if find_optimizer(optimizer).whole_rows else TYPES


def _fits(types: tuple[str, ...], world_size: int) -> tuple[str, ...]:
    """One rank has no columns to cut a grid of; what is cut by hosts needs two."""
    return types if world_size > 1 else tuple("table_wise" if kind == "grid_shard" else kind for kind in types)


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    ["adam"]  # its first moment is kept as Adagrad's only state is
    + [
        pytest.param(name, marks=pytest.mark.campaign)
        for name in ("adagrad", "rowwise_adagrad", "partial_rowwise_adam")
    ],
)
def test_resharding_2_1_4_2_with_every_type_of_sharding_is_exact(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder, optimizer: str
) -> None:
    types, folder = _types_for(optimizer), str(tmp_path / "0")
    saved, loss = ranks.run(2, save, folder, types, optimizer, 2)[0]
    apart = 0.0
    for stage, world_size in enumerate((1, 4, 2), start=1):
        chosen, following, local = (
            _fits(rotated(types, stage), world_size),
            str(tmp_path / str(stage)),
            LOCAL_SIZE[world_size],
        )
        restored, after = ranks.run(
            world_size, restore, folder, chosen, optimizer, local, following, local_world_size=local
        )[0]
        assert largest_difference(saved, restored) == 0.0, f"stage {stage}, {world_size} ranks"
        assert after == pytest.approx(loss, abs=1e-6)
        apart, folder = max(apart, abs(after - loss)), following
    fault(
        12,
        f"2 -> 1 -> 4 -> 2 ranks, {optimizer}, {len(types)} sharding types, each table moved to another at every stage: "
        f"weights and optimizer state bit for bit, next loss within {apart:.1e}",
        count=3,
        seed=5,
    )


@pytest.mark.campaign
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"])
def test_every_type_of_sharding_reshards_into_every_other(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder, optimizer: str
) -> None:
    types, apart, count = _types_for(optimizer), 0.0, 0
    for source in (1, 2, 4):
        folder, local = str(tmp_path / str(source)), LOCAL_SIZE[source]
        written = _fits(types, source)
        saved, loss = ranks.run(source, save, folder, written, optimizer, local, local_world_size=local)[0]
        for target in (1, 2, 4):
            for turn in range(len(types)):
                local = LOCAL_SIZE[target]
                chosen = _fits(rotated(types, turn), target)
                restored, after = ranks.run(target, restore, folder, chosen, optimizer, local, local_world_size=local)[
                    0
                ]
                assert largest_difference(saved, restored) == 0.0, f"{source} to {target} ranks, {written} to {chosen}"
                assert after == pytest.approx(loss, abs=1e-6)
                apart, count = max(apart, abs(after - loss)), count + len(types)
    fault(
        12,
        f"{optimizer}: every pair of {len(types)} sharding types, from 1, 2, 4 to 1, 2, 4 ranks: weights and optimizer "
        f"state bit for bit, next loss within {apart:.1e}",
        count=count,
        seed=5,
    )
