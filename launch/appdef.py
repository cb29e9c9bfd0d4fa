"""Build a TorchX AppDef from a Workload: one role, with a replica per node.

It is not part of components.py, because TorchX treats every function there as a component.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import torchx
from torchx import specs
from torchx.specs import macros

from launch.resources import this_host
from launch.workload import RDZV_PORT, Mount, Where, Workload, make_workload

WORKLOAD = "pipeline.workload"  # the metadata of a role that our schedulers read


def app_of(workload: Workload) -> specs.AppDef:
    """Return the description of one verb: a replica per node, or per task of an array."""
    here = this_host()
    role = specs.Role(
        name=workload.verb,
        image=workload.image or torchx.IMAGE,
        env=workload.whole_env(here.cpu),
        num_replicas=workload.nodes,
        max_retries=workload.max_retries,
        resource=specs.resource(
            cpu=workload.cpu or here.cpu, gpu=workload.gpu or 0, memMB=workload.mem_mb or here.mem_mb
        ),
        mounts=[_torchx_mount(mount) for mount in workload.mounts],
        metadata={WORKLOAD: workload},
    )
    if workload.is_distributed:
        role.port_map = {"c10d": RDZV_PORT}
        # The first node's name is only known when the job runs, so a shell expands it. TorchX
        # writes `$` as `$$`.
        head = f"$${{{macros.rank0_env}:=localhost}}" if workload.nodes > 1 else "localhost"
        role.entrypoint, role.args = "bash", ["-c", f"exec {_escaped(workload, head)}"]
    else:
        role.entrypoint, *role.args = (_literally(word) for word in workload.argv())
        # a replica per task, which TorchX numbers; Slurm numbers the tasks of its arrays itself
        if workload.tasks > 1:
            role.num_replicas = workload.tasks
            role.args[-1] = f"shard={macros.replica_id}"
    return specs.AppDef(name=workload.name, roles=[role])


COMMON = ("cpu", "memMB", "h", "env", "image", "mount", "name")  # parameters of every component
OVERRIDES = "as for `python -m pipeline {verb}`; `-- --help` lists them"
CHECK_DATA = "validate the job with its data from this machine; False if this machine cannot read them"


def component(
    *names: str, verb: str = "", **values: Any
) -> Callable[[Callable[..., specs.AppDef]], Callable[..., specs.AppDef]]:
    """Make a TorchX component from a function that has a name and a docstring.

    TorchX reads a component's options from its signature and docstring. names: its parameters in
    addition to COMMON, fields of Where or check_data. values: defaults that differ from Where's.
    """

    def make(function: Callable[..., specs.AppDef]) -> Callable[..., specs.AppDef]:
        doc, known = function.__doc__ or "", verb or function.__name__

        @functools.wraps(function)
        def made(*overrides: str, check_data: bool = True, **where: Any) -> specs.AppDef:
            return app_of(make_workload(known, doc, overrides, Where(**{**values, **where}), check_data))

        hints, kind = get_type_hints(Where), inspect.Parameter.KEYWORD_ONLY
        fields = [each for each in dataclasses.fields(Where) if each.name in (*COMMON, *names)]
        parameters = [inspect.Parameter("overrides", inspect.Parameter.VAR_POSITIONAL, annotation=str)]
        texts = {"overrides": OVERRIDES.format(verb=known), **{each.name: each.metadata["help"] for each in fields}}
        texts["env"] = "environment of the job (A=1,B=2)"
        for each in fields:
            default = values.get(each.name, each.default)
            parameters.append(inspect.Parameter(each.name, kind, default=default, annotation=hints[each.name]))
        if "check_data" in names:
            parameters.append(inspect.Parameter("check_data", kind, default=True, annotation=bool))
            texts["check_data"] = CHECK_DATA
        made.__signature__ = inspect.Signature(parameters, return_annotation=specs.AppDef)  # type: ignore[attr-defined]
        made.__doc__ = f"{doc}\n\nArgs:\n" + "".join(f"    {name}: {text}\n" for name, text in texts.items())
        return made

    return make


def _escaped(workload: Workload, head: str) -> str:
    """Return the shell line, in which TorchX may substitute only the head node and the job id."""
    head_mark, job_mark = "\0head", "\0job"  # no argument can contain NUL
    line = _literally(workload.shell_line(head_mark, job_mark))
    return line.replace(head_mark, head).replace(job_mark, macros.app_id)


def _literally(word: str) -> str:
    """Double each `$`, because TorchX substitutes `${...}` in arguments."""
    return word.replace("$", "$$")


def _torchx_mount(mount: Mount) -> "specs.BindMount | specs.VolumeMount | specs.DeviceMount":
    if mount.kind == "bind":
        return specs.BindMount(mount.source, mount.target, mount.read_only)
    if mount.kind == "volume":
        return specs.VolumeMount(mount.source, mount.target, mount.read_only)
    return specs.DeviceMount(mount.source, mount.target, "rm" if mount.read_only else "rwm")
