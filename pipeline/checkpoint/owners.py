"""Refuse a file of a step that another save, step or rank wrote, even if its checksum in the
manifest is right.

Each save chooses a random id, which its manifest stores as `save_id`. A shard file begins with a
line of HEADER_BYTES that names the save, the step, the rank and the file. Random states and
.metadata contain these names as values. Offsets in .metadata count from the beginning of the file,
so torch.distributed.checkpoint's own reader skips the line. Steps of releases without save ids have
no `save_id` in their manifests, and their shard files do not have the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from pipeline.checkpoint import random_state
from pipeline.checkpoint.steps import file_path, step_name
from pipeline.runtime.errors import ForeignFileError
from pipeline.runtime.storage.checksums import FileEntry, VerifiedFile

HEADER_BYTES = 256  # a multiple of 64, to which torch.save aligns the values of a tensor
SHARD = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class Owner:
    """The writer of a file: the id that a save chooses for all ranks, its step, and the rank."""

    save_id: str
    step: int
    rank: int


def shard_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def header_of_shard(owner: Owner) -> bytes:
    """Return the first line of a rank's shard file, padded with spaces."""
    line = json.dumps({**asdict(owner), "file": shard_name(owner.rank)}).encode()
    assert len(line) < HEADER_BYTES, line
    return line.ljust(HEADER_BYTES - 1) + b"\n"


def storage_meta(owner: Owner) -> StorageMeta:
    """Return the owner in the form that .metadata stores."""
    return StorageMeta(checkpoint_id=owner.save_id, save_id=step_name(owner.step))


def check_file(path: str, manifest: Mapping[str, Any], name: str) -> None:
    """Check the owner of a shard or random state `name` of the step at `path`. Other files have no
    owner.

    Raises:
        ForeignFileError: the file belongs to another save, step or rank.
        DamagedError: the content does not match its checksum.
    """
    shard, rank = SHARD.fullmatch(name), random_state.rank_of(name)
    if rank or (shard and "save_id" in manifest):
        where = file_path(path, dict(manifest), name)
        entry: FileEntry = manifest["files"][name]
        with VerifiedFile(where, entry) as file:
            content = file.read() if rank else file.read(HEADER_BYTES)
        if rank:
            check_random_state(where, manifest, int(rank), content)
        else:
            check_shard(where, manifest, name, content)


def check_shard(where: str, manifest: Mapping[str, Any], name: str, header: bytes) -> None:
    """Check `header`, the first HEADER_BYTES of the shard file `name`. Raises ForeignFileError."""
    match = SHARD.fullmatch(name)
    if match is None or "save_id" not in manifest:
        return
    rank = int(match[1])
    if header != header_of_shard(Owner(manifest["save_id"], manifest["step"], rank)):
        _compare(where, manifest, rank, header)
        raise ForeignFileError(f"{where} begins with another line than {name} of step {manifest['step']} does")


def check_random_state(where: str, manifest: Mapping[str, Any], rank: int, content: bytes) -> None:
    """Check that `content` is the random state of `rank`. Raises ForeignFileError."""
    _compare(where, manifest, rank, content)


def check_metadata(where: str, manifest: Mapping[str, Any], metadata: Metadata) -> None:
    """Check the owner of .metadata. Raises ForeignFileError if another save wrote it."""
    about = metadata.storage_meta if isinstance(metadata.storage_meta, StorageMeta) else StorageMeta()
    named = about.save_id
    if named is not None and named != step_name(manifest["step"]):
        raise ForeignFileError(f"{where} is that of {named}, not of {step_name(manifest['step'])}")
    if "save_id" in manifest and about.checkpoint_id != manifest["save_id"]:
        raise ForeignFileError(_of_another_save(where, about.checkpoint_id, manifest))


def _compare(where: str, manifest: Mapping[str, Any], rank: int, content: bytes) -> None:
    """Check the owner in `content`, which is JSON. Random states of earlier releases have no owner.
    Raises ForeignFileError.
    """
    step = manifest["step"]
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ForeignFileError(f"{where} does not name the save that wrote it, as the files of step {step} do")
    named = (found.get("step", step), found.get("rank", rank))
    if named != (step, rank):
        raise ForeignFileError(
            f"{where} is that of rank {named[1]} at step {named[0]}, not of rank {rank} at step {step}"
        )
    if "save_id" in manifest and found.get("save_id") != manifest["save_id"]:
        raise ForeignFileError(_of_another_save(where, found.get("save_id"), manifest))


def _of_another_save(where: str, found: object, manifest: Mapping[str, Any]) -> str:
    return (
        f"{where} is that of save {found}, of another run or another attempt; step {manifest['step']} is that of save "
        f"{manifest['save_id']}"
    )
