"""Print a script that runs several verbs one after another, from a file that names them:

    python -m launch.render chain slurm|argo|airflow|compose CHAIN.yaml [flags]

The file has a `name`, `defaults` and `stages`. `stages` maps a verb, or a name with `verb:`, to its
`overrides` and to settings of the place that differ (j, cpu, gpu, memMB, h, env, image, mount,
max_retries, max_restarts). A stage starts when the previous stage, or the stages that `after`
names, have ended successfully. Each stage is composed here; its data are read when it starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from dataclasses import dataclass, replace
from typing import Any, Optional

import yaml

from launch.options import add_flags, from_flags
from launch.slurm import HAS_CONTAINERS, SlurmOptions, render_sbatch
from launch.targets import Target, register, registered
from launch.workload import SERVICES, WORKLOADS, Stage, Where, make_workload
from pipeline.cli.command_line import print_user_errors
from pipeline.runtime.errors import LaunchError, check_choice

OWN_KEYS = ("verb", "overrides", "after")
PLACE_KEYS = tuple(each.name for each in dataclasses.fields(Where) if each.name != "name")
NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")


@dataclass(frozen=True)
class Chain:
    """Stages in an order in which each stage comes after the stages that it waits for."""

    name: str
    stages: list[Stage]


def read_chain(path: str) -> Chain:
    """Read a chain from a file and validate each stage. Raises LaunchError if the file or a stage is invalid."""
    with print_user_errors():
        try:
            with open(path) as file:
                read = yaml.safe_load(file)
        except (OSError, yaml.YAMLError) as error:
            raise LaunchError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
        values = _mapping(path, read, ("name", "defaults", "stages"))
        name = str(values.get("name", "chain"))
        _check_name("name", name)
        defaults = _mapping("defaults", values.get("defaults") or {}, PLACE_KEYS)
        stages: list[Stage] = []
        for key, stage in _mapping("stages", values.get("stages") or {}).items():
            stages.append(_stage(name, str(key), stage or {}, defaults, stages))
        if not stages:
            raise LaunchError(f"{path} has no stages: add stages: with prepare, train, export, ...")
    return Chain(name, stages)


def _mapping(where: str, values: Any, keys: Optional[tuple[str, ...]] = None) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise LaunchError(f"{where}: must be a mapping, not {type(values).__name__}")
    for key in values:
        if keys is not None:
            check_choice(f"{where}: the key", str(key), keys)
    return values


def _check_name(where: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise LaunchError(
            f"{where}: {name!r} is not a valid name; use up to 30 lower-case "
            "letters, digits and dashes, beginning with a letter"
        )


def _stage(chain: str, name: str, stage: Any, defaults: dict[str, Any], before: list[Stage]) -> Stage:
    values = _mapping(f"stages.{name}", stage, (*OWN_KEYS, *PLACE_KEYS))
    _check_name("stages", name)
    verb = str(values.get("verb", name))
    check_choice(f"stages.{name}: the verb", verb, [*WORKLOADS, *SERVICES])
    overrides = values.get("overrides", [])
    overrides = shlex.split(overrides) if isinstance(overrides, str) else [str(word) for word in overrides]
    after = values.get("after", [before[-1].name] if before else [])
    after = [after] if isinstance(after, str) else list(after)
    for each in after:
        check_choice(f"stages.{name}.after", each, [earlier.name for earlier in before])
    place = {**defaults, **{key: value for key, value in values.items() if key in PLACE_KEYS}}
    if place.get("env"):
        place["env"] = {key: str(value) for key, value in _mapping(f"stages.{name}.env", place["env"]).items()}
    where = replace(Where(), **place, name=f"{chain}-{name}")
    return Stage(name, make_workload(verb, None, overrides, where, check_data=False), tuple(after))


def render_slurm(name: str, stages: list[Stage], options: SlurmOptions) -> str:
    """Return a script that submits all stages. If a stage fails, the stages after it are cancelled."""
    parts = [
        f"#!/bin/bash\n# {name}: {' -> '.join(stage.name for stage in stages)}. Run it with bash; it prints the job id "
        "of each stage.\nset -euo pipefail"
    ]
    if any(stage.workload.image for stage in stages):
        parts.append(HAS_CONTAINERS)
    for stage in stages:
        variable, mark = _variable(stage.name), f"END_OF_{_variable(stage.name).upper()}"
        ids = ":".join(f"${{{_variable(name)}%%;*}}" for name in stage.after)
        waits = f' --dependency="afterok:{ids}" --kill-on-invalid-dep=yes' if ids else ""
        script = render_sbatch(stage.workload, options)
        parts.append(
            f"{variable}=$(sbatch --parsable{waits} << '{mark}'\n{script}{mark}\n)\necho \"{stage.name} ${variable}\""
        )
    return "\n\n".join(parts) + "\n"


def _variable(name: str) -> str:
    return "job_" + name.replace("-", "_")


register("chain", "slurm", Target(SlurmOptions, render_slurm))


def render_chain(argv: list[str]) -> str:
    """Return the script for the command line's words after `chain`. --help and errors end the process."""
    usage = "python -m launch.render chain TARGET CHAIN.yaml [flags]"
    with print_user_errors():
        targets = registered("chain")
        if not argv or argv[0] not in targets:
            raise LaunchError(f"{usage}: TARGET is one of {', '.join(targets)}")
    target: Target = targets[argv[0]]
    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", metavar="CHAIN.yaml", help="name, defaults and stages")
    add_flags(parser, target.options, argv[0])
    typed = parser.parse_args(argv[1:])
    with print_user_errors():
        options: Any = from_flags(target.options, typed)
    chain = read_chain(typed.file)
    with print_user_errors():
        return target.render(chain.name, chain.stages, options)
