"""Faults 17, 18 and 20 on ranks: one rank's bad rows are everybody's business, and nobody waits for it in vain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import list_steps
from pipeline.config.data import ReaderConfig
from pipeline.config.training import TrainerConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.read.reader import ShardReader
from pipeline.training.evaluation import evaluate_model
from pipeline.training.trainer import FitResult
from tests.faults.conftest import FaultRecorder
from tests.faults.shards import Change, put, write_shards
from tests.support.messages import mentions
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest, full_state
from tests.support.trainers import make_trainer

KINDS = {"a": "table_wise", "b": "row_wise", "c": "data_parallel", "d": "table_wise"}
FILES = [[32, 32], [32, 32], [32, 32]]  # 192 rows
BAD_VALUES: dict[str, Change] = {
    "id too large": put("a", 37, 50),
    "negative id": put("b", 37, -1),
    "id far beyond int32": put("c", 37, 2**40),
    "missing id": put("d", 37, None),
    "NaN": put("int_0", 37, float("nan")),
    "infinity": put("int_1", 37, float("-inf")),
    "beyond float32": put("int_1", 37, 1e300),
    "label 2": put("label", 37, 2),
    "missing label": put("label", 37, None),
}


def _train(
    rank: int, world_size: int, folder: str, config: ReaderConfig, spoil_at: Callable[[str], None] | None = None
) -> tuple[str, str, FitResult | None, bool]:
    """The error, the model's digest on rank 0, the result, and whether all weights are finite."""
    task, model, optimizer, context = build_sharded(KINDS)
    reader = ShardReader(
        folder,
        load_dataset(folder),
        "train",
        global_batch_size=24,
        rank=rank,
        world_size=world_size,
        config=config,
        seed=1,
        quarantine_path=f"{folder}/run/quarantine/train.rank{rank}.jsonl",
    )
    torch.distributed.barrier()
    if spoil_at and rank == 0:
        spoil_at(folder)
    torch.distributed.barrier()
    checkpointer = Checkpointer(f"{folder}/run/checkpoints", model, optimizer, context)
    trainer = make_trainer(
        TrainerConfig(global_batch_size=24, log_every_steps=2),
        model=model,
        task=task,
        optimizer=optimizer,
        reader=reader,
        writer=None,
        validation_reader=None,
        checkpointer=checkpointer,
        context=context,
    )
    error, result = "", None
    try:
        result = trainer.fit()
    except (ValueError, OSError) as caught:
        error = str(caught)
    finite = all(bool(value.isfinite().all()) for value in full_state(model).values())
    return error, digest(model), result, finite


def config(**values: Any) -> ReaderConfig:
    return ReaderConfig(**{"num_streams": 6, "prefetch_batches": 2, **values})


@pytest.mark.long
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.campaign)])
def test_each_bad_value_stops_all_ranks_by_name_or_is_quarantined(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder, every: int
) -> None:
    clean = tmp_path / "clean"
    write_shards(clean, FILES)
    cases = list(BAD_VALUES.items())[::every]
    for case, change in cases:
        folder = tmp_path / case
        write_shards(folder, FILES, {1: change})
        stopped = ranks.run(2, _train, 2, str(folder), config())
        assert {error for error, *_ in stopped} == {stopped[0][0]}, "both ranks end with the same line"
        assert mentions(stopped[0][0], "train/00001.parquet 37")
        shutil.rmtree(folder / "run", ignore_errors=True)
        left_out = ranks.run(2, _train, 2, str(folder), config(on_bad_rows="quarantine", max_bad_fraction=0.01))
        for error, _, result, finite in left_out:
            assert not error and finite
            assert result is not None and (result.step, result.num_bad_rows) == (8, 1)
        lines = [line for path in (folder / "run" / "quarantine").iterdir() for line in path.read_text().splitlines()]
        assert len(lines) == 1 and mentions(lines[0], "train/00001.parquet 37")
    fault(
        17,
        f"{len(cases)} kinds on 2 ranks: stop names file, row, column and value on both; quarantine leaves "
        "out that row alone, counted over the ranks",
        count=2 * len(cases),
    )


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1, 3), pytest.param((1, 2, 3), marks=pytest.mark.campaign)])
def test_a_quarantined_row_leaves_the_same_weights_at_any_world_size(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    write_shards(tmp_path, FILES, {0: put("a", 3, 99), 2: put("int_0", 60, float("nan"))})
    policy = config(on_bad_rows="quarantine", max_bad_fraction=0.05)
    counts = []
    for world_size in sizes:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        results = ranks.run(world_size, _train, world_size, str(tmp_path), policy)
        counts.append({(result.step, result.num_bad_rows) for _, _, result, _ in results if result})
    assert counts == [{(8, 2)}] * len(sizes)


def test_the_limit_stops_all_ranks_at_the_same_step_with_the_numbers(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder
) -> None:
    def spoil(columns: dict[str, list[Any]]) -> None:
        columns["a"][:20] = [50 + i for i in range(20)]

    write_shards(tmp_path, FILES, {1: spoil})
    results = ranks.run(3, _train, 3, str(tmp_path), config(on_bad_rows="quarantine", max_bad_fraction=0.05))
    assert len({error for error, *_ in results}) == 1
    assert "are quarantined" in results[0][0] and mentions(results[0][0], "data.reader.max_bad_fraction=0.05")
    saved = list_steps(f"{tmp_path}/run/checkpoints")
    assert len(saved) == 1, "the step that met the limit is saved"
    fault(
        18, f"20 of 192 rows bad, 9 allowed: 3 ranks end with one line after step {saved[0]}, which is saved", count=3
    )


def _truncate(folder: str) -> None:
    os.truncate(f"{folder}/train/00001.parquet", 1000)


def _flip(folder: str) -> None:
    path = Path(folder) / "train" / "00001.parquet"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)


SPOILT = {_truncate: "truncated", _flip: "with a bit flipped"}


@pytest.mark.parametrize("spoil", SPOILT, ids=SPOILT.values())
def test_a_shard_that_changes_under_training_ends_all_ranks_at_once(
    ranks: RankPool, tmp_path: Path, spoil: Callable[[str], None], fault: FaultRecorder
) -> None:
    write_shards(tmp_path, FILES)
    results = ranks.run(3, _train, 3, str(tmp_path), config(), spoil)
    assert len({error for error, *_ in results}) == 1
    assert mentions(results[0][0], "train/00001.parquet")
    fault(19, f"a shard {SPOILT[spoil]} while 3 ranks train: all end with the line that names it", count=1)


UNEVEN = [[[1], [50, 3], [7]], [[97], [1, 1, 1]], [[5] * 13, [40]], [[30, 30], [2], [29]]]


@pytest.mark.long
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.campaign)])
def test_uneven_shards_end_at_the_same_step_on_all_ranks(
    ranks: RankPool, tmp_path: Path, fault: FaultRecorder, every: int
) -> None:
    count = 0
    for number, row_groups in enumerate(UNEVEN[::every]):
        folder = tmp_path / str(number)
        dataset = write_shards(folder, row_groups)
        for world_size in (2, 3):
            shutil.rmtree(folder / "run", ignore_errors=True)
            results = ranks.run(world_size, _train, world_size, str(folder), config())
            steps = {(error, result.step if result else None) for error, _, result, _ in results}
            assert steps == {("", dataset.splits["train"].num_rows // 24)}
            samples = ranks.run(world_size, _evaluate, world_size, str(folder))
            assert samples == [(dataset.splits["validation"].num_rows, "")] * world_size
            count += 2
    fault(
        20,
        f"{count // 2} uneven splits on 2 and 3 ranks: training and evaluation end at the same step, no row lost "
        "in evaluation",
        count=count,
    )


def _evaluate(rank: int, world_size: int, folder: str) -> tuple[int, str]:
    _, model, _, context = build_sharded(KINDS)
    reader = ShardReader(
        folder,
        load_dataset(folder),
        "validation",
        global_batch_size=24,
        rank=rank,
        world_size=world_size,
        config=config(),
        seed=1,
        drop_last=False,
    )
    try:
        return int(evaluate_model(model, reader, context)["num_samples"]), ""
    except ValueError as error:
        return 0, str(error)


def test_a_bad_row_ends_an_evaluation_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    write_shards(tmp_path, FILES, {1: put("a", 37, 50)})
    results = ranks.run(3, _evaluate, 3, str(tmp_path))
    assert len(set(results)) == 1 and mentions(results[0][1], "train/00001.parquet 37 50")
