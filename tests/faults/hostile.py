"""Payloads that make a canary file where they run, and the checksums that let them pass for what a run wrote."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from pipeline.checkpoint.steps import read_manifest
from pipeline.runtime.storage.checksums import BLOCK_BYTES
from pipeline.runtime.storage.manifest import MANIFEST, seal_manifest
from pipeline.runtime.storage.signature import Purpose

# (module, name, argument): what a pickle asks to be called. CANARY stands for the path of the canary.
CALLS = [
    ("os", "system", "touch CANARY"),
    ("posix", "system", "touch CANARY"),
    ("os", "popen", "touch CANARY"),
    ("builtins", "eval", "open('CANARY', 'w')"),
    ("builtins", "exec", "open('CANARY', 'w')"),
    ("subprocess", "getoutput", "touch CANARY"),
    ("pathlib", "PosixPath.touch", "CANARY"),
    ("os", "mkdir", "CANARY"),
    ("torch", "serialization.os.mkdir", "CANARY"),
    ("torch.serialization", "os.system", "touch CANARY"),
    ("torch.distributed.checkpoint.metadata", "os.mkdir", "CANARY"),
    ("pty", "spawn", "touch CANARY"),
]


class Call:
    """Pickled, it asks for a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


def calling(module: str, name: str, argument: str) -> bytes:
    """A pickle (protocol 4, which allows dotted names) that calls module.name(argument)."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


def pickles(canary: Path) -> dict[str, bytes]:
    """Every hostile .metadata, by what it tries."""
    found = {
        f"{module}.{name}": calling(module, name, argument.replace("CANARY", str(canary)))
        for module, name, argument in CALLS
    }
    harm = Call(os.system, f"touch {canary}")
    found["inside Metadata"] = pickle.dumps(Metadata({"x": harm}, None, {}))
    found["as storage data"] = pickle.dumps(Metadata({}, None, harm))
    found["a BYTE_IO entry"] = pickle.dumps(Metadata({"x": BytesStorageMetadata()}, None, {}))
    found["no Metadata"] = pickle.dumps({"state_dict_metadata": {}})
    return found


def archive(canary: Path) -> bytes:
    """What torch.load(weights_only=False) would run: a tensor's file with a call in it."""
    file = io.BytesIO()
    torch.save(Call(os.system, f"touch {canary}"), file)
    return file.getvalue()


def replace_and_seal(step: Path, name: str, content: bytes) -> None:
    """Write a file of a step, and every checksum of its manifest so that they agree with it."""
    manifest = read_manifest(str(step))
    (step / name).write_bytes(content)
    blocks = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
    manifest["files"][name] = {
        **manifest["files"][name],
        "size_bytes": len(content),
        "block_bytes": BLOCK_BYTES,
        "crc32": [f"{zlib.crc32(block):08x}" for block in blocks],
    }
    (step / MANIFEST).write_text(seal_manifest(manifest, Purpose.STEP))


def change_json(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
