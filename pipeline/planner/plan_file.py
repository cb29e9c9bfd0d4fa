"""Find plan files and read them as plain values, without torch, so that showing and comparing them
is fast.

plan_codec.py turns them into TorchRec's objects.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from pipeline.planner.fingerprint import sha256_of
from pipeline.planner.plan_record import PlanDescription
from pipeline.runtime.errors import PlanError
from pipeline.runtime.storage import storage

FOLDER = "sharding_plans"
OF_THIS_MACHINE = ".autox"  # part of the name of a plan for hardware=auto; no shipped plan has it
PACKAGE = Path(__file__).resolve().parents[1]
FORMAT_VERSION = 2
COMMAND = "python -m pipeline plan experiment=<name> hardware=<preset> world_size=<ranks>"
# What decoding a damaged file raises: torch gives ValueErrors for shards, RuntimeErrors for devices.
DAMAGE = (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, RuntimeError)


def find_plan_file(path: str, command: str) -> str:
    """Search `path`, then the plans that ship.

    Raises PlanError if neither exists, with `command`, which makes a plan.
    """
    if storage.is_file(path):
        return path
    looked = [path]
    # paths.root may have moved the folder
    _, in_folder, name = f"/{path}".rpartition(f"/{FOLDER}/")
    may_ship = OF_THIS_MACHINE not in path and (in_folder or not (path.startswith("/") or "://" in path))
    if may_ship:
        looked.append(str(shipped_folder() / (name if in_folder else path)))
        if storage.is_file(looked[-1]):
            return looked[-1]
    raise PlanError(f"no plan file at {' or '.join(looked)}; make one: {command}")


def shipped_folder() -> Path:
    """Return sharding_plans/ of a checkout or of a copy of it, otherwise the folder in the
    installed package.
    """
    return (PACKAGE.parent if (PACKAGE.parent / "setup.cfg").is_file() else PACKAGE) / FOLDER


@dataclass(frozen=True)
class PlanView:
    """A plan. `shardings`: module path -> table -> its ParameterSharding as in the file."""

    description: PlanDescription
    shardings: dict[str, dict[str, dict[str, Any]]]


def read_view(path: str) -> PlanView:
    """Read the plan in `path` to show it, without checking what training needs of its shards.

    Raises:
        PlanError: the file does not exist, is not a plan file, or is damaged.
    """
    path = find_plan_file(path, COMMAND)
    content = read_content(path)
    try:
        view = PlanView(PlanDescription(**description_fields(content)), content["plan"])
        planned = {table for tables in view.shardings.values() for table in tables}
        if planned != {choice.name for choice in view.description.tables}:
            raise PlanError("its plan and its tables differ")
    except DAMAGE as error:
        raise PlanError(f"plan file {path} is damaged: {str(error)[:500]}; make it again: {COMMAND}") from error
    return view


def read_content(path: str, command: str = COMMAND) -> dict[str, Any]:
    """Return the file's JSON object.

    Raises PlanError if it is not a plan, or has a format that this release cannot read.
    """
    try:
        content: dict[str, Any] = json.loads(storage.read_text(path))
        version = content["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(f"{path} is not a plan file ({repr(error)[:500]}); make one: {command}") from None
    if version != FORMAT_VERSION:
        raise PlanError(
            f"plan file {path} has format_version {str(version)[:100]}, this release reads {FORMAT_VERSION}; make it again: {command}"
        )
    return content


def description_fields(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a PlanDescription. Raises one of DAMAGE if the file is damaged."""
    if sha256_of(content["fingerprint"]) != content["fingerprint_sha256"]:
        raise PlanError("its fingerprint was changed by hand")
    description = msgspec.convert(content, PlanDescription)  # a ValidationError is a ValueError
    return {field.name: getattr(description, field.name) for field in fields(PlanDescription)}


def to_json(value: Any, indent: int = 0) -> str:
    """Format JSON with one line for each shard, table and rank."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(item, dict) or (isinstance(item, list) and _is_nested(item)) for item in items):
        return json.dumps(value)
    pad, end = "\n" + " " * (indent + 1), "\n" + " " * indent
    if isinstance(value, dict):
        inner = f",{pad}".join(f"{json.dumps(key)}: {to_json(item, indent + 1)}" for key, item in value.items())
        return f"{{{pad}{inner}{end}}}"
    return f"[{pad}{f',{pad}'.join(to_json(item, indent + 1) for item in value)}{end}]"


def _is_nested(value: list[Any]) -> bool:
    return any(isinstance(item, (dict, list)) for item in value)
