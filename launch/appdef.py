"""Build a TorchX AppDef from a Workload: one role, a replica a node, and in each a shell that becomes the agent.

Kept out of components.py, where TorchX takes every function for a component.
"""

from __future__ import annotations

from typing import Optional

import torchx
from torchx import specs
from torchx.specs import macros

from launch.resources import this_host
from launch.workload import RDZV_PORT, Mount, Workload

WORKLOAD = "pipeline.workload"  # the role's metadata that our own schedulers go by


def app_of(workload: Workload) -> specs.AppDef:
    """TorchX's description of one verb on its nodes: one role, a replica a node, or a replica a task where a verb has several."""
    here = this_host()
    role = specs.Role(
        name=workload.verb,
        image=workload.image or torchx.IMAGE,
        env=dict(workload.env),
        num_replicas=workload.nodes,
        max_retries=workload.max_retries,
        resource=specs.resource(cpu=workload.cpu or here.cpu, gpu=workload.gpu, memMB=workload.mem_mb or here.mem_mb),
        mounts=[_torchx_mount(mount) for mount in workload.mounts],
        metadata={WORKLOAD: workload},
    )
    if workload.is_distributed:
        role.env = {"OMP_NUM_THREADS": str(workload.threads(here.cpu)), "LOGLEVEL": "WARNING", **role.env}
        role.port_map = {"c10d": RDZV_PORT}
        # The first node's name is known when the job runs, so a shell expands it; `$$` is TorchX's way to write `$`.
        head = f"$${{{macros.rank0_env}:=localhost}}" if workload.nodes > 1 else "localhost"
        role.entrypoint, role.args = "bash", ["-c", f"exec {_escaped(workload, head)}"]
    else:
        role.entrypoint, *role.args = (_literally(word) for word in workload.argv())
        if workload.tasks > 1:  # a replica a task, which TorchX numbers; Slurm's arrays number their own
            role.num_replicas = workload.tasks
            role.args[-1] = f"shard={macros.replica_id}"
    return specs.AppDef(name=workload.name, roles=[role])


def without_args(doc: Optional[str]) -> str:
    """A component's docstring less what TorchX reads in it."""
    return (doc or "").partition("Args:")[0]


def _escaped(workload: Workload, head: str) -> str:
    """The shell line, where only what stands for head and job id is TorchX's to substitute."""
    head_mark, job_mark = "\0head", "\0job"  # no argument can hold NUL
    line = _literally(workload.shell_line(head_mark, job_mark))
    return line.replace(head_mark, head).replace(job_mark, macros.app_id)


def _literally(word: str) -> str:
    """TorchX substitutes `${...}` in arguments: doubled, a `$` reaches the verb as it was typed and validated."""
    return word.replace("$", "$$")


def _torchx_mount(mount: Mount) -> "specs.BindMount | specs.VolumeMount | specs.DeviceMount":
    if mount.kind == "bind":
        return specs.BindMount(mount.source, mount.target, mount.read_only)
    if mount.kind == "volume":
        return specs.VolumeMount(mount.source, mount.target, mount.read_only)
    return specs.DeviceMount(mount.source, mount.target, "rm" if mount.read_only else "rwm")
