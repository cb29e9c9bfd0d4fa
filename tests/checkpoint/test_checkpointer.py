"""A checkpoint brings back every bit, at any world size, or is refused."""

from __future__ import annotations

import json
import logging
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint import metadata
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.metadata import TensorsOnlyReader
from pipeline.checkpoint.steps import list_steps
from pipeline.runtime.errors import CheckpointError
from pipeline.runtime.storage.checksums import BLOCK_BYTES
from pipeline.runtime.storage.manifest import seal_manifest
from pipeline.runtime.storage.signature import Purpose
from tests.support.messages import mentions
from tests.support.ranks import RankPool
from tests.support.sharded_models import build_sharded, digest, draw_batches, full_state, train_steps

MIXED = {"a": "table_wise", "b": "row_wise", "c": "data_parallel", "d": "table_wise"}
ROWS = dict.fromkeys(MIXED, "row_wise")


def _train_and_save(rank: int, folder: str, kinds: dict[str, str], world_size: int, steps: int) -> tuple[str, str]:
    """Digests at the step saved, and three steps later."""
    _, model, optimizer, context = build_sharded(kinds)
    train_steps(model, optimizer, draw_batches(rank, world_size, steps))
    saved = digest(model)
    Checkpointer(folder, model, optimizer, context, about={"experiment": "test"}).save(steps, {"metrics": {"ne": 0.5}})
    train_steps(model, optimizer, draw_batches(rank, world_size, 3, start=steps))
    return saved, digest(model)


def _restore_and_train(rank: int, folder: str, kinds: dict[str, str], world_size: int) -> tuple[str, str, dict]:
    _, model, optimizer, context = build_sharded(kinds, seed=99)
    manifest = Checkpointer(folder, model, optimizer, context).restore_latest()
    assert manifest is not None
    restored = digest(model)
    train_steps(model, optimizer, draw_batches(rank, world_size, 3, start=manifest["step"]))
    return restored, digest(model), manifest


def test_resumed_training_equals_uninterrupted_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    saved = ranks.run(2, _train_and_save, folder, MIXED, 2, 5)[0]
    restored, later, manifest = ranks.run(2, _restore_and_train, folder, MIXED, 2)[0]
    assert (restored, later) == saved
    assert (manifest["step"], manifest["metrics"], manifest["experiment"]) == (5, {"ne": 0.5}, "test")


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "kinds"), [(1, MIXED), (4, MIXED), (2, ROWS)])
def test_a_checkpoint_of_two_ranks_restores_exactly_elsewhere(
    ranks: RankPool, tmp_path: Path, world_size: int, kinds: dict[str, str]
) -> None:
    folder = str(tmp_path / "checkpoints")
    saved, _ = ranks.run(2, _train_and_save, folder, MIXED, 2, 3)[0]
    restored, _, _ = ranks.run(world_size, _restore_and_train, folder, kinds, world_size)[0]
    assert restored == saved


def _restore_in_place(rank: int, folder: str, kinds: dict[str, str], world_size: int) -> tuple[str, str, dict, int]:
    """Tensors of any size are read to where they belong, as large ones are; and how many were."""
    read, least, read_in_place = [], metadata.IN_PLACE_BYTES, TensorsOnlyReader._read_in_place

    def noted(*arguments: Any) -> bool:
        read.append(read_in_place(*arguments))
        return read[-1]

    metadata.IN_PLACE_BYTES, TensorsOnlyReader._read_in_place = 1, noted
    try:
        return *_restore_and_train(rank, folder, kinds, world_size), sum(read)
    finally:
        metadata.IN_PLACE_BYTES, TensorsOnlyReader._read_in_place = least, read_in_place


@pytest.mark.parametrize(("world_size", "kinds"), [(2, MIXED), (1, ROWS)], ids=["same", "elsewhere"])
def test_tensors_that_are_read_where_they_belong_are_those_that_were_saved(
    ranks: RankPool, tmp_path: Path, world_size: int, kinds: dict[str, str]
) -> None:
    folder = str(tmp_path / "checkpoints")
    saved, later = ranks.run(2, _train_and_save, folder, MIXED, 2, 5)[0]
    restored, trained, _, num_read = ranks.run(world_size, _restore_in_place, folder, kinds, world_size)[0]
    assert restored == saved and num_read >= 4
    assert trained == later or world_size == 1


def _saves(rank: int, folder: str, steps: list[int], keep_last_n: int) -> None:
    _, model, optimizer, context = build_sharded(ROWS)
    checkpointer = Checkpointer(folder, model, optimizer, context, keep_last_n)
    for step in steps:
        checkpointer.save(step)


def _restored_step(rank: int, folder: str) -> int | str:
    """The step that restore_latest takes, or what its error says."""
    logging.disable(logging.WARNING)
    _, model, optimizer, context = build_sharded(ROWS)
    try:
        manifest = Checkpointer(folder, model, optimizer, context).restore_latest()
    except CheckpointError as error:
        return str(error)
    finally:
        logging.disable(logging.NOTSET)
    return manifest["step"] if manifest else -1


def test_only_the_last_n_steps_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, _saves, str(tmp_path), [1, 2, 3, 4], 2)
    assert list_steps(str(tmp_path)) == [3, 4]


def test_a_committed_step_is_never_written_again(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, _saves, str(tmp_path), [1], 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RuntimeError, match="already committed"):
        ranks.run(1, _saves, str(tmp_path), [1], 2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.long
def test_damaged_steps_are_passed_over_and_named(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _saves, str(tmp_path), [1, 2, 3, 4], 9)
    _flip_a_bit(next((tmp_path / "step_00000004").glob("*.distcp")))
    (tmp_path / "step_00000003" / ".metadata").unlink()
    (tmp_path / "step_00000002" / "manifest.json").write_text("{")
    (tmp_path / ".attempt-00000005-abc").mkdir()  # a save that was killed
    assert ranks.run(2, _restored_step, str(tmp_path)) == [1, 1]
    _flip_a_bit(next((tmp_path / "step_00000001").glob("*.distcp")))
    for message in ranks.run(2, _restored_step, str(tmp_path)):
        assert "none of the 4 checkpoints" in str(message)


def _saves_files_of_hooks(rank: int, folder: str) -> None:
    _, model, optimizer, context = build_sharded(ROWS)
    checkpointer = Checkpointer(folder, model, optimizer, context)
    for step in (1, 2):
        checkpointer.save(step, files={"of_a_hook.bin": bytes(100)} if rank == 0 else {})


@pytest.mark.long
def test_a_step_whose_file_of_a_hook_is_damaged_is_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    """The hook reads it after the step is loaded, when no earlier step can be taken any more."""
    ranks.run(2, _saves_files_of_hooks, str(tmp_path))
    assert ranks.run(2, _restored_step, str(tmp_path)) == [2, 2]
    _flip_a_bit(tmp_path / "step_00000002/of_a_hook.bin")
    assert ranks.run(2, _restored_step, str(tmp_path)) == [1, 1]


def _goes_on_past_damage(rank: int, folder: str) -> list[int]:
    """Restore what can be, then write the damaged step and one more, keeping one."""
    logging.disable(logging.WARNING)
    _, model, optimizer, context = build_sharded(ROWS)
    checkpointer = Checkpointer(folder, model, optimizer, context, keep_last_n=2)
    manifest = checkpointer.restore_latest()
    logging.disable(logging.NOTSET)
    assert manifest is not None and manifest["step"] == 2
    checkpointer.clear_after(2)
    dist.barrier()
    left = list_steps(folder)
    dist.barrier()
    for step in (3, 4, 5):
        checkpointer.save(step)
    return left


def test_a_run_goes_on_past_a_damaged_step_and_loses_none_that_is_good(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _saves, str(tmp_path), [1, 2, 3], 9)
    _flip_a_bit(next((tmp_path / "step_00000003").glob("*.distcp")))
    (tmp_path / ".attempt-00000003-abc").mkdir()
    assert ranks.run(2, _goes_on_past_damage, str(tmp_path)) == [[1, 2], [1, 2]]
    assert list_steps(str(tmp_path)) == [4, 5]
    assert [path.name[:17] for path in tmp_path.iterdir() if path.name.startswith(".")] == [".damaged-00000003"]


def test_an_empty_folder_restores_nothing(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, _restored_step, str(tmp_path / "none")) == [-1]


def _restore_into_another_model(rank: int, folder: str) -> str:
    from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig

    other = OptimizerConfig(SparseOptimizerConfig("adagrad", lr=0.1), DenseOptimizerConfig("adam"))
    _, model, optimizer, context = build_sharded(ROWS, optimizers=other)
    before = {name: value.clone() for name, value in full_state(model).items()}
    with pytest.raises(CheckpointError) as error:
        Checkpointer(folder, model, optimizer, context).restore(1)
    assert all(torch.equal(value, before[name]) for name, value in full_state(model).items())
    return str(error.value)


def test_a_checkpoint_of_another_optimizer_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _saves, str(tmp_path), [1], 2)
    for message in ranks.run(2, _restore_into_another_model, str(tmp_path)):
        assert "does not fit this model, optimizer or plan" in message and "run_dir" in message


class _Attack:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._path}",)


def _restore_attacked(rank: int, folder: str) -> str:
    _, model, optimizer, context = build_sharded(ROWS)
    with pytest.raises(CheckpointError) as error:
        Checkpointer(folder, model, optimizer, context).restore(1)
    return str(error.value)


def test_metadata_that_asks_to_run_something_is_refused_even_with_a_matching_checksum(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, _saves, str(tmp_path), [1], 2)
    step, trap = tmp_path / "step_00000001", tmp_path / "ran"
    content = pickle.dumps(_Attack(trap))
    (step / ".metadata").write_bytes(content)
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"][".metadata"] = {
        "size_bytes": len(content),
        "block_bytes": BLOCK_BYTES,
        "crc32": [f"{zlib.crc32(content):08x}"],
    }
    (step / "manifest.json").write_text(seal_manifest(manifest, Purpose.STEP))
    for message in ranks.run(2, _restore_attacked, str(tmp_path)):
        assert mentions(message, "posix.system")
    assert not trap.exists()


def test_the_manifest_lists_every_file_with_size_and_checksum(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _saves, str(tmp_path), [7], 2)
    manifest = json.loads((tmp_path / "step_00000007" / "manifest.json").read_text())
    on_disk = {path.name: path.stat().st_size for path in (tmp_path / "step_00000007").iterdir()}
    del on_disk["manifest.json"]
    assert {name: entry["size_bytes"] for name, entry in manifest["files"].items()} == on_disk
    assert manifest["world_size"] == 2
