"""What the shard files of a checkpoint's step hold of the model: the same bytes for two runs that have trained the same."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.owners import HEADER_BYTES


def stored_tensors(step: str | Path) -> dict[str, bytes]:
    """By the name of the file, without the line that names the save."""
    return {file.name: file.read_bytes()[HEADER_BYTES:] for file in Path(step).glob("*.distcp")}
