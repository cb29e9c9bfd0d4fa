"""Render a Workload as a Volcano Job, which starts all of its pods or none: what `torchx run -s kubernetes` submits.

A task a node, as TorchX has it, so that its status and log find them. Volcano's plugins make the Service and the names.
"""

from __future__ import annotations

from typing import Any

from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import labels_of, pod_template
from launch.manifest import given
from launch.workload import Workload, check_one_task
from pipeline.runtime.errors import LaunchError
from pipeline.runtime.process.exit_codes import FINAL, REQUEUE

LONGEST_HOST_NAME = 63
# For jobs without retries of their own: Volcano takes 0 for 3, and counts evictions as retries.
MOST_EVICTIONS = 3


def volcano_job(workload: Workload, options: KubernetesOptions) -> dict[str, Any]:
    """Raises LaunchError for what Kubernetes, or the job, cannot have."""
    check_one_task(workload, "Volcano")
    if options.deadline_s:
        raise LaunchError(f"--deadline-s {options.deadline_s}: Volcano ends no job by the clock; leave it out")
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": given(name=workload.name, namespace=options.namespace, labels=labels_of(workload, options)),
        "spec": {
            "schedulerName": "volcano",
            "queue": options.queue or "default",
            "minAvailable": workload.nodes,
            "maxRetry": workload.max_retries or MOST_EVICTIONS,
            "ttlSecondsAfterFinished": options.keep_s,
            **given(priorityClassName=options.priority_class),
            # Names are known before a pod is ready: the nodes have to meet in order to become so.
            "plugins": {"svc": ["--publish-not-ready-addresses"], "env": []},
            "policies": _policies(workload),
            "tasks": [_task(workload, options, node) for node in range(workload.nodes)],
        },
    }


def longest_name(verb: str, nodes: int) -> int:
    """Characters that leave room for the host name of the last pod, <name>-<verb>-<node>-0."""
    return LONGEST_HOST_NAME - len(f"-{verb}-{nodes - 1}-0")


def _task(workload: Workload, options: KubernetesOptions, node: int) -> dict[str, Any]:
    longest = longest_name(workload.verb, workload.nodes)
    if len(workload.name) > longest:
        raise LaunchError(f"--name {workload.name}: Volcano's names leave {longest} characters; give a shorter --name")
    head = f"{workload.name}-{workload.verb}-0-0.{workload.name}" if workload.nodes > 1 else "localhost"
    template = pod_template(workload, options, head, node=str(node))
    return {"name": f"{workload.verb}-{node}", "replicas": 1, "template": template}


def _policies(workload: Workload) -> list[dict[str, Any]]:
    """What the agents' exit codes mean; the first that fits counts. All pods start again together."""
    return [
        *({"exitCode": code, "action": "TerminateJob"} for code in sorted(FINAL - {REQUEUE})),
        {"exitCode": REQUEUE, "action": "RestartJob"},
        {"event": "PodEvicted", "action": "RestartJob"},
        {"event": "PodFailed", "action": "RestartJob" if workload.max_retries else "TerminateJob"},
    ]
