"""Render a preparation with engine=ray as a RayJob of KubeRay: a head, on which the verb runs, and workers.

After ray-operator/apis/ray/v1/rayjob_types.go and raycluster_types.go of ray-project/kuberay. KubeRay itself gives the pods their
command (`ray start`), and starts a lost worker again.
"""

from __future__ import annotations

import shlex
from typing import Any

from launch.indexed_job import metadata
from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import pod_template
from launch.manifest import check_letter_first, given
from launch.workload import Workload

HEAD, WORKERS = "head", "workers"


def ray_job(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Raises LaunchError for what pods cannot have."""
    check_letter_first(workload.name, "Services, which KubeRay makes,")
    words = workload.command[workload.command.index("--") + 1 :]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(workload, options, queued=True),
        "spec": given(
            suspend=True if options.queue else None,
            entrypoint=shlex.join(["python", "-u", "-m", "pipeline.prepare", *words]),
            submissionMode="HTTPMode",  # without a further pod that submits
            backoffLimit=workload.max_retries or None,
            activeDeadlineSeconds=options.deadline_s or None,
            shutdownAfterJobFinishes=True,
            ttlSecondsAfterFinished=options.keep_s,
            rayClusterSpec=given(
                headGroupSpec={
                    "rayStartParams": {"dashboard-host": "0.0.0.0"},
                    "template": _template(workload, options, HEAD),
                },
                workerGroupSpecs=_workers(workload, options),
            ),
        ),
    }
    return [job]


def _workers(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    """All nodes but the head, which runs tasks as well."""
    count = workload.nodes - 1
    if not count:
        return []
    group = {"groupName": WORKERS, "replicas": count, "minReplicas": count, "maxReplicas": count, "rayStartParams": {}}
    return [{**group, "template": _template(workload, options, WORKERS)}]


def _template(workload: Workload, options: KubernetesOptions, name: str) -> dict[str, Any]:
    """As every pod of ours, but for what KubeRay says of it: its command, and that it starts again."""
    template = pod_template(workload, options, "localhost")
    pod = template["spec"]
    container = pod["containers"][0]
    for key in ("command", "ports"):
        container.pop(key, None)
    container["name"] = f"ray-{name.removesuffix('s')}"
    container["securityContext"]["readOnlyRootFilesystem"] = False  # what Ray writes where was not looked at
    pod.pop("restartPolicy")
    return template
