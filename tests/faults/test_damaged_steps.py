"""Faults 9, 10, 11: whatever happens to the files of a step, it is loaded exactly or not at all."""

from __future__ import annotations

import os
import random
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from pipeline.checkpoint.chains import open_step
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.steps import read_manifest
from pipeline.checkpoint.tables import flatten
from pipeline.extras.checkpoints.survey import check_step
from pipeline.runtime.errors import CheckpointError, ForeignFileError
from tests.faults.checkpoints import Loader, load_once, save_steps
from tests.faults.conftest import FaultRecorder
from tests.faults.hostile import replace_and_seal
from tests.support.examples import SCALE, SEED
from tests.support.messages import names
from tests.support.ranks import RankPool

NEWEST = "step_00000002"
DIGEST_BEFORE_SAVE_IDS = "8055d3d10945bca941ba84a7194451dfbb78378ad08cdc9a88fb1db2d89614fd"


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, str]]:
    """A folder with steps 1 and 2 of two ranks, and their digests."""
    folder = str(tmp_path_factory.mktemp("saved") / "checkpoints")
    return folder, ranks.run(2, save_steps, folder, [1, 2])[0]


def _damage(path: Path, how: str) -> None:
    size = path.stat().st_size
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, size // 2)
    elif how == "zeroed":
        path.write_bytes(bytes(size))
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "lengthened":
        path.write_bytes(path.read_bytes() + b"\0")


def _flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def _load_damaged(rank: int, folder: str, cases: list[tuple[str, str]]) -> list[tuple[int, str]]:
    """What is loaded after each damage (file, how or bit) to a fresh copy of the newest step."""
    loader, found = Loader(), []
    step, intact = Path(folder) / NEWEST, Path(folder).parent / "intact"
    for name, how in cases:
        if rank == 0:
            shutil.rmtree(step, ignore_errors=True)
            shutil.copytree(intact, step)
            _flip(step / name, int(how)) if how.isdigit() else _damage(step / name, how)
        dist.barrier()
        found.append(loader.load(folder))
    return found


def _plant(ranks: RankPool, folder: str, tmp_path: Path, cases: list[tuple[str, str]]) -> list[tuple[int, str]]:
    shutil.copytree(folder, tmp_path / "checkpoints")
    shutil.copytree(f"{folder}/{NEWEST}", tmp_path / "intact")
    return ranks.run(2, _load_damaged, str(tmp_path / "checkpoints"), cases)[0]


@pytest.mark.long
@pytest.mark.parametrize("count", [1, pytest.param(5, marks=pytest.mark.campaign)])
def test_a_truncated_deleted_or_zeroed_file_rejects_its_step_and_the_one_before_loads(
    ranks: RankPool, saved: tuple[str, dict[int, str]], tmp_path: Path, fault: FaultRecorder, count: int
) -> None:
    """`count` damages to each file; those of one file follow on those of the file before."""
    folder, digests = saved
    names = sorted(os.listdir(f"{folder}/{NEWEST}"))
    hows = ("deleted", "truncated", "zeroed", "emptied", "lengthened")
    cases = [(name, hows[(i * count + j) % len(hows)]) for i, name in enumerate(names) for j in range(count)]
    assert {how for _, how in cases} == set(hows)
    found = _plant(ranks, folder, tmp_path, cases)
    assert [one for one in found if one != (1, digests[1])] == []
    fault(9, f"{len(cases)} of {len(cases)} rejected, step N-1 loaded exactly", count=len(cases))


@pytest.mark.long
@pytest.mark.parametrize("count", [3, pytest.param(300, marks=pytest.mark.campaign)])
def test_no_flipped_bit_is_loaded(
    ranks: RankPool, saved: tuple[str, dict[int, str]], tmp_path: Path, fault: FaultRecorder, count: int
) -> None:
    """`count` bits of each kind of file."""
    folder, digests = saved
    generator, cases = random.Random(10 + SEED), []
    for name in ("__0_0.distcp", ".metadata", "manifest.json", "random_00000.json"):
        bits = 8 * os.path.getsize(f"{folder}/{NEWEST}/{name}")
        cases += [(name, str(generator.randrange(bits))) for _ in range(count * SCALE)]
    found = _plant(ranks, folder, tmp_path, cases)
    assert [one for one in found if one != (1, digests[1])] == []
    fault(10, f"0 of {len(cases)} silent: step rejected, N-1 loaded exactly", count=len(cases), seed=10 + SEED)


@pytest.mark.long
def test_files_swapped_between_steps_are_found_and_a_step_is_never_written_again(
    ranks: RankPool, saved: tuple[str, dict[int, str]], tmp_path: Path, fault: FaultRecorder
) -> None:
    folder, digests = saved
    files = sorted(os.listdir(f"{folder}/{NEWEST}"))
    for number, name in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        shutil.copy(copy / "step_00000001" / name, copy / NEWEST / name)
    found = ranks.run(2, _load_each, [str(tmp_path / str(number)) for number in range(len(files))])[0]
    same = {name for name in files if _content(folder, 1, name) == _content(folder, 2, name)}
    # A manifest in the wrong folder names its own step; a file that is equal in both steps is no swap.
    for name, one in zip(files, found, strict=True):
        assert one == ((2, digests[2]) if name in same else (1, digests[1])), name
    before = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    with pytest.raises(RuntimeError, match="already committed"):
        ranks.run(2, save_steps, folder, [2])
    assert {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()} == before
    count = len(files) - len(same) + 1
    fault(11, f"{count} of {count}: swaps rejected and step N-1 loaded, the existing step untouched", count=count)


# Every file of another step, rank or run that may take a file's place in step 2: (its place, step, name there).
SWAPS = {
    f"{kind} of another {whose}": (place, source, name)
    for kind, place, other_rank in (
        ("shard", "__0_0.distcp", "__1_0.distcp"),
        ("random state", "random_00000.json", "random_00001.json"),
    )
    for whose, source, name in (
        ("step", "step_00000001", place),
        ("rank", NEWEST, other_rank),
        ("run", f"../again/{NEWEST}", place),
    )
}
SWAPS[".metadata of another step"] = (".metadata", "step_00000001", ".metadata")
SWAPS[".metadata of another run"] = (".metadata", f"../again/{NEWEST}", ".metadata")


@pytest.mark.long
def test_files_of_another_rank_step_or_run_are_found_though_their_checksums_are_made_anew(
    ranks: RankPool, saved: tuple[str, dict[int, str]], tmp_path: Path
) -> None:
    """The other run has trained the same: all that differs is whose its files are."""
    folder, digests = saved
    ranks.run(2, save_steps, f"{folder}/../again", [1, 2])
    for case, (place, source, name) in SWAPS.items():
        shutil.copytree(folder, tmp_path / case)
        replace_and_seal(tmp_path / case / NEWEST, place, (Path(folder) / source / name).read_bytes())
        with pytest.raises(ForeignFileError, match=names(f"{NEWEST}/{place}")) as found:
            check_step(str(tmp_path / case), 2)
        assert found.value.code == "foreign_file"
    loaded = ranks.run(2, _load_each, [str(tmp_path / case) for case in SWAPS])[0]
    assert loaded == [(1, digests[1])] * len(SWAPS)
    assert ranks.run(2, _restore_each, [str(tmp_path / case) for case in SWAPS], 2)[0] == ["ForeignFileError"] * len(
        SWAPS
    )


def test_a_step_of_a_release_without_save_ids_is_loaded_exactly(ranks: RankPool, tmp_path: Path) -> None:
    """The archive was written by save_steps(..., [1]) on two ranks, before shard files named their save."""
    with tarfile.open(Path(__file__).parents[1] / "checkpoint" / "step_before_save_ids.tar.xz") as archive:
        archive.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )  # from 3.11.4 on
    assert "save_id" not in read_manifest(str(tmp_path / "step_00000001"))
    check_step(str(tmp_path), 1)
    assert ranks.run(2, load_once, str(tmp_path))[0] == (1, DIGEST_BEFORE_SAVE_IDS)


def test_torchs_own_reader_reads_a_step(saved: tuple[str, dict[int, str]], tmp_path: Path) -> None:
    """The line before the tensors is passed over, for offsets count from the beginning of the file."""
    folder, _ = saved
    dcp_to_torch_save(f"{folder}/{NEWEST}", str(tmp_path / "whole.pt"))
    whole = flatten(torch.load(tmp_path / "whole.pt", weights_only=True))
    _, _, tensors = open_step(folder, 2)
    assert whole.keys() == tensors.entries.keys()
    for key, value in whole.items():
        assert torch.equal(value, tensors.read(key, [0] * value.dim(), value.shape)), key


def _content(folder: str, step: int, name: str) -> bytes:
    return (Path(folder) / f"step_{step:08d}" / name).read_bytes()


def _load_each(rank: int, folders: list[str]) -> list[tuple[int, str]]:
    loader = Loader()
    return [loader.load(folder) for folder in folders]


def _restore_each(rank: int, folders: list[str], step: int) -> list[str]:
    """The class of what a restore of `step` raises."""
    loader = Loader()
    found = []
    for folder in folders:
        with pytest.raises(CheckpointError) as caught:
            Checkpointer(folder, loader.model, loader.optimizer, loader.context).restore(step)
        found.append(type(caught.value).__name__)
    return found
