"""Turn the bytes of dense.pt2 into a callable, without unpickling anything.

torch.export's archive is a zip file of JSON and raw tensors. It may hold pickles too: tensors of other classes, objects,
example inputs. Ours do not, and one that does is refused before torch looks at it.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable

import torch

from pipeline.checkpoint.errors import DamagedError

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
RAW = ("/data/weights/weight_", "/data/constants/tensor_")  # the tensors themselves
JSON = ("_config.json", "/models/model.json")
PLAIN = ("/archive_format", "/archive_version", "/byteorder", "/.data/version", "/.data/serialization_id", "/version", "/.format_version")  # fmt: skip


def load_program(content: bytes, name: str) -> Program:
    """Raises DamagedError for an archive that holds, or may hold, a pickle."""
    check_archive(content, name)
    program = torch.export.load(io.BytesIO(content))
    module = program.module()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


def check_archive(content: bytes, name: str) -> None:
    """Raises DamagedError unless every member is of a kind that is read without pickle."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.infolist():
                if problem := _problem(archive, member):
                    raise DamagedError(f"{name} holds {member.filename}, {problem}; it is not loaded. Export again")
    except (zipfile.BadZipFile, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedError(f"{name} is no archive of torch.export: {error}") from None


def _problem(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    path = member.filename
    if member.compress_type != zipfile.ZIP_STORED:
        return "which is compressed"
    if "/data/sample_inputs/" in path:
        return "" if member.file_size == 0 else "a pickle of example inputs"
    if path.endswith("_config.json"):
        config = json.loads(archive.read(member)).get("config", {})
        return "which names a pickle" if any(entry.get("use_pickle", True) for entry in config.values()) else ""
    if path.endswith((*JSON, *PLAIN)) or any(raw in path for raw in RAW):
        return ""
    return "which is nothing that an artifact has"


def load_compiled(path: str) -> Program:
    """An AOTInductor package: native code, which its file's checksums must vouch for."""
    from torch._inductor import aoti_load_package

    program: Program = aoti_load_package(path)
    return program
