"""Faults 9, 10, 11: whatever happens to the files of a step, it is loaded exactly or not at all."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.checkpoint.steps import read_manifest
from pipeline.checkpoint.survey import verify_step
from pipeline.runtime.storage.manifest import seal_manifest
from tests.faults.checkpoints import Loader, save_steps
from tests.faults.conftest import FaultRecorder
from tests.support.messages import mentions
from tests.support.ranks import RankPool

NEWEST = "step_00000002"


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


@pytest.mark.parametrize("count", [3, pytest.param(300, marks=pytest.mark.campaign)])
def test_no_flipped_bit_is_loaded(
    ranks: RankPool, saved: tuple[str, dict[int, str]], tmp_path: Path, fault: FaultRecorder, count: int
) -> None:
    """`count` bits of each kind of file."""
    folder, digests = saved
    generator, cases = random.Random(10), []
    for name in ("__0_0.distcp", ".metadata", "manifest.json", "random_00000.json"):
        bits = 8 * os.path.getsize(f"{folder}/{NEWEST}/{name}")
        cases += [(name, str(generator.randrange(bits))) for _ in range(count)]
    found = _plant(ranks, folder, tmp_path, cases)
    assert [one for one in found if one != (1, digests[1])] == []
    fault(10, f"0 of {len(cases)} silent: step rejected, N-1 loaded exactly", count=len(cases), seed=10)


def test_files_swapped_between_steps_are_found_and_a_step_is_never_written_again(
    ranks: RankPool, saved: tuple[str, dict[int, str]], tmp_path: Path, fault: FaultRecorder
) -> None:
    folder, digests = saved
    names = sorted(os.listdir(f"{folder}/{NEWEST}"))
    for number, name in enumerate(names):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        shutil.copy(copy / "step_00000001" / name, copy / NEWEST / name)
    found = ranks.run(2, _load_each, [str(tmp_path / str(number)) for number in range(len(names))])[0]
    same = {name for name in names if _content(folder, 1, name) == _content(folder, 2, name)}
    # A manifest in the wrong folder names its own step; a file that is equal in both steps is no swap.
    for name, one in zip(names, found, strict=True):
        assert one == ((2, digests[2]) if name in same else (1, digests[1])), name
    before = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    with pytest.raises(RuntimeError, match="already committed"):
        ranks.run(2, save_steps, folder, [2])
    assert {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()} == before
    count = len(names) - len(same) + 1
    fault(11, f"{count} of {count}: swaps rejected and step N-1 loaded, the existing step untouched", count=count)


def test_files_of_another_rank_or_step_are_found_though_their_checksums_are_made_anew(
    ranks: RankPool, saved: tuple[str, dict[int, str]], tmp_path: Path
) -> None:
    folder, digests = saved
    swaps = {
        "ranks": [
            ("random_00000.json", NEWEST, "random_00001.json"),
            ("random_00001.json", NEWEST, "random_00000.json"),
        ],
        "steps": [("random_00000.json", "step_00000001", "random_00000.json")],
        "metadata": [(".metadata", "step_00000001", ".metadata")],
    }
    for case, changes in swaps.items():
        shutil.copytree(folder, tmp_path / case)
        manifest = read_manifest(str(tmp_path / case / NEWEST))
        for name, step, other in changes:
            shutil.copy(Path(folder) / step / other, tmp_path / case / NEWEST / name)
            entries = read_manifest(f"{folder}/{step}")["files"]
            manifest["files"][name] = entries[other]
        (tmp_path / case / NEWEST / "manifest.json").write_text(seal_manifest(manifest))
        assert mentions(verify_step(str(tmp_path / case), 2), "is that of")
    found = ranks.run(2, _load_each, [str(tmp_path / case) for case in swaps])[0]
    assert found == [(1, digests[1])] * len(swaps)


def _content(folder: str, step: int, name: str) -> bytes:
    return (Path(folder) / f"step_{step:08d}" / name).read_bytes()


def _load_each(rank: int, folders: list[str]) -> list[tuple[int, str]]:
    loader = Loader()
    return [loader.load(folder) for folder in folders]
