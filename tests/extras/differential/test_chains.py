"""A base and its links bring back every bit of every step, on any plan, and a damaged link costs the steps that build on it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint.chains import open_step
from pipeline.checkpoint.changes import CHECKPOINT
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.retention import Retention
from pipeline.checkpoint.steps import list_steps, read_manifest
from pipeline.checkpoint.tables import flatten
from pipeline.config.training import CheckpointConfig
from pipeline.extras.checkpoints.survey import verify_step
from pipeline.extras.differential.links import Differential
from pipeline.extras.differential.tracked_rows import TrackedRows
from pipeline.runtime.errors import CheckpointError, ConfigError
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest, draw_batches, full_state, train_steps

MIXED = {"a": "table_wise", "b": "row_wise", "c": "data_parallel", "d": "column_wise"}
ROWS = {**dict.fromkeys(MIXED, "row_wise"), "d": "column_wise"}


def _open(
    folder: str,
    kinds: dict[str, str] = MIXED,
    links: int = 9,
    most_bytes: float = 1e9,
    seed: int = 0,
    is_packed: bool = False,
    **options: Any,
) -> tuple[Any, Any, Any, Checkpointer]:
    """Collective. These models are too small for links of half of their base."""
    _, model, optimizer, context = build_sharded(kinds, seed=seed)
    rows = TrackedRows(model, optimizer.replicated, [CHECKPOINT])
    given = {"keep_last_n": 9, **options}
    checkpointer = Checkpointer(
        folder, model, optimizer, context, differential=Differential(rows, links, most_bytes, is_packed), **given
    )
    return model, optimizer, context, checkpointer


def _save_chain(rank: int, folder: str, last: int, links: int, options: dict[str, Any]) -> dict[int, str]:
    """Steps 1 .. last, each of few rows; their digests, and under 0 that of three steps later."""
    model, optimizer, context, checkpointer = _open(folder, links=links, **options)
    digests = {}
    for step in range(1, last + 1):
        train_steps(model, optimizer, draw_batches(rank, context.world_size, 1, start=step, global_batch_size=8))
        checkpointer.save(step, {"metrics": {"ne": 1.0}})
        digests[step] = digest(model)
    checkpointer.wait()
    train_steps(model, optimizer, draw_batches(rank, context.world_size, 3, start=50))
    return {**digests, 0: digest(model)}


def _restore_each(rank: int, folder: str, kinds: dict[str, str], steps: list[int]) -> dict[int, str]:
    """Digests of the steps restored, and under 0 that of three steps after the last."""
    model, optimizer, context, checkpointer = _open(folder, kinds, seed=99)
    digests = {}
    for step in steps:
        checkpointer.restore(step)
        digests[step] = digest(model)
    train_steps(model, optimizer, draw_batches(rank, context.world_size, 3, start=50))
    return {**digests, 0: digest(model)}


@pytest.fixture(scope="module")
def chain(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, str]]:
    """Steps 1 and 4 whole, 2, 3 and 5 links; and their digests."""
    folder = str(tmp_path_factory.mktemp("chain") / "checkpoints")
    return folder, ranks.run(2, _save_chain, folder, 5, 2, {})[0]


def test_every_step_of_a_chain_is_restored_bit_for_bit_and_goes_on_as_it_would(
    ranks: RankPool, chain: tuple[str, dict[int, str]]
) -> None:
    folder, digests = chain
    manifests = {step: read_manifest(f"{folder}/step_{step:08d}") for step in list_steps(folder)}
    assert {step: one.get("chain", {}).get("base") for step, one in manifests.items()} == {
        1: None,
        2: 1,
        3: 1,
        4: None,
        5: 4,
    }
    assert ranks.run(2, _restore_each, folder, MIXED, [3, 1, 2, 4, 5])[0] == digests


@pytest.mark.parametrize(("world_size", "kinds"), [(1, MIXED), pytest.param(4, ROWS, marks=pytest.mark.campaign)])
def test_a_chain_of_two_ranks_restores_exactly_under_another_plan(
    ranks: RankPool, chain: tuple[str, dict[int, str]], world_size: int, kinds: dict[str, str]
) -> None:
    """Column blocks stay, for row-wise state is one a block."""
    folder, digests = chain
    kinds = {**kinds, "d": "table_wise"} if world_size == 1 else kinds
    found = ranks.run(world_size, _restore_weights, folder, kinds, [3, 5])[0]
    assert found == {step: digests[step] for step in (3, 5)}


@pytest.mark.campaign
def test_compressed_links_bring_back_every_bit_and_a_chain_may_hold_both_kinds(
    ranks: RankPool, chain: tuple[str, dict[int, str]], tmp_path: Path
) -> None:
    plain, digests = chain
    folder = str(tmp_path / "checkpoints")
    assert ranks.run(2, _save_chain, folder, 5, 2, {"is_packed": True})[0] == digests
    sizes = [
        sum(entry["size_bytes"] for entry in read_manifest(f"{each}/step_00000003")["files"].values())
        for each in (plain, folder)
    ]
    assert sizes[1] < 0.8 * sizes[0] and not any(verify_step(folder, step) for step in range(1, 6))
    assert ranks.run(2, _restore_each, folder, MIXED, [3, 1, 2, 4, 5])[0] == digests
    found = ranks.run(1, _restore_weights, folder, {**MIXED, "d": "table_wise"}, [3, 5])[0]
    assert found == {step: digests[step] for step in (3, 5)}
    both = tmp_path / "both"
    shutil.copytree(plain, both)
    after, is_same = ranks.run(2, _go_on, str(both), True)[0]
    assert list(after) == [5] and all(is_same)
    kinds = {step: read_manifest(f"{both}/step_{step:08d}").get("packed", False) for step in list_steps(str(both))}
    assert kinds == {1: False, 2: False, 3: False, 5: True}


def _restore_weights(rank: int, folder: str, kinds: dict[str, str], steps: list[int]) -> dict[int, str]:
    _, model, _, context = build_sharded(kinds, seed=99)
    digests = {}
    for step in steps:
        Checkpointer(folder, model, None, context).restore(step)
        digests[step] = digest(model)
    return digests


def _go_on(rank: int, folder: str, is_packed: bool = False) -> tuple[dict[int, str], list[bool]]:
    """Restore step 3, save 4 as a link of its chain; a failed save in between loses no row."""
    fails: list[bool] = []

    def fence() -> None:
        if fails:
            raise OSError("no commit now")

    model, optimizer, context, checkpointer = _open(folder, fence=fence, is_packed=is_packed)
    checkpointer.restore(3)
    checkpointer.clear_after(3)
    dist.barrier()
    digests = {}
    for step in (4, 5):
        train_steps(model, optimizer, draw_batches(rank, context.world_size, 1, start=step, global_batch_size=8))
        if step == 4:
            fails.append(True)
            with pytest.raises(CheckpointError, match="no commit now"):
                checkpointer.save(step)
            fails.clear()
        else:
            checkpointer.save(step)
            digests[step] = digest(model)
    whole = {name: value.clone() for name, value in full_state(model).items()}
    _, _, tensors = open_step(folder, 5)
    same = [
        torch.equal(value, tensors.read(f"model.{name}", [0] * value.dim(), value.shape))
        for name, value in whole.items()
    ]
    return digests, same


@pytest.mark.long
def test_a_resumed_run_adds_to_the_chain_and_a_failed_save_loses_no_row(
    ranks: RankPool, chain: tuple[str, dict[int, str]], tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    shutil.copytree(chain[0], folder)
    digests, same = ranks.run(2, _go_on, folder)[0]
    assert len(same) > 4 and all(same)
    assert (
        read_manifest(f"{folder}/step_00000005")["chain"] | {"previous": 3, "base": 1, "links": 3}
        == (read_manifest(f"{folder}/step_00000005")["chain"])
    )
    assert verify_step(folder, 5) == ""
    assert ranks.run(1, _restore_weights, folder, {**MIXED, "d": "table_wise"}, [5])[0] == digests


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _restored(rank: int, folder: str) -> tuple[int, str, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("pipeline.checkpoint.step_loader")
    logger.addHandler(handler)
    try:
        _, model, _, context = build_sharded({**MIXED, "d": "table_wise"}, seed=99)
        manifest = Checkpointer(folder, model, None, context).restore_latest()
    finally:
        logger.removeHandler(handler)
    assert manifest is not None
    return manifest["step"], digest(model), [line for line in lines if "does not verify" in line]


@pytest.mark.parametrize(
    ("damaged", "expected", "lost"),
    [
        pytest.param("step_00000002/__0_0.distcp", 1, "2 steps are lost", id="a link"),
        pytest.param("step_00000001/__1_0.distcp", 0, "3 steps are lost", id="the base", marks=pytest.mark.campaign),
        pytest.param("step_00000002/manifest.json", 1, "2 steps are lost", id="a manifest", marks=pytest.mark.campaign),
        pytest.param("step_00000003/.metadata", 2, "going back to step 2", id="the last", marks=pytest.mark.campaign),
    ],
)
def test_a_damaged_link_costs_the_steps_that_build_on_it_and_one_line_says_so(
    ranks: RankPool, chain: tuple[str, dict[int, str]], tmp_path: Path, damaged: str, expected: int, lost: str
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(chain[0], folder)
    for step in (4, 5):
        shutil.rmtree(folder / f"step_{step:08d}")
    _flip(folder / damaged)
    assert verify_step(str(folder), 3) != "", "the newest builds on what is damaged"
    if not expected:
        with pytest.raises(RuntimeError, match=names("3")):
            ranks.run(1, _restored, str(folder))
        return
    step, found, lines = ranks.run(1, _restored, str(folder))[0]
    assert (step, found) == (expected, chain[1][expected])
    assert len(lines) == 1 and lost in lines[0], lines


def test_a_base_that_was_replaced_is_no_base_of_the_chain(chain: tuple[str, dict[int, str]], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(chain[0], folder)
    manifest = folder / "step_00000002" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"sha256": "', '"sha256": "0', 1))
    assert names("step_00000002") and verify_step(str(folder), 3) and verify_step(str(folder), 2)
    assert verify_step(str(folder), 1) == ""


def test_chains_are_kept_and_go_as_one() -> None:
    bases = {1: 1, 2: 1, 3: 1, 4: 4, 5: 4, 6: 6, 7: 6, 8: 8}
    metrics = dict.fromkeys(bases, None) | {2: 0.5, 4: 0.7}
    assert Retention(2).expendable(dict.fromkeys(bases, None), bases) == [3, 2, 1, 5, 4]
    assert Retention(2, keep_best_n=1).expendable(metrics, bases) == [5, 4], "step 2 is the best, and needs its base"
    assert Retention(3).expendable(metrics, bases) == [3, 2, 1]


def test_old_chains_are_removed_whole(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, _save_chain, str(tmp_path), 8, 1, {"keep_last_n": 2, "asynchronous": True})
    assert list_steps(str(tmp_path)) == [5, 6, 7, 8]


def test_links_of_more_than_half_of_the_base_make_a_new_base(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, _save_chain, str(tmp_path), 4, 9, {"most_bytes": 1e-9})
    kinds = ["chain" in read_manifest(f"{tmp_path}/step_{step:08d}") for step in range(1, 5)]
    assert kinds == [False, True, False, True]


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=names("checkpoint.max_links")):
        CheckpointConfig(max_links=0)


def test_the_keys_of_a_link_are_those_of_a_whole_step(chain: tuple[str, dict[int, str]]) -> None:
    whole, link = (open_step(chain[0], step)[2] for step in (1, 3))
    assert {key: whole.shape(key) for key in whole.entries} == {key: link.shape(key) for key in link.entries}
    assert not flatten({}) and any(not torch.equal(_whole(whole, key), _whole(link, key)) for key in whole.entries)


def _whole(tensors: Any, key: str) -> torch.Tensor:
    shape = tensors.shape(key)
    found: torch.Tensor = tensors.read(key, [0] * len(shape), shape)
    return found
