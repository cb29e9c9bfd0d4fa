"""Render an Indexed Job, which a Job, a CronJob, a JobSet and Kubeflow's TrainJob contain.

Pod i of the job is node i. The exit code of a failed pod decides what happens next
(pipeline.runtime.process.exit_codes).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import CONTAINER, labels_of, pod_template
from launch.manifest import given
from launch.workload import Workload
from pipeline.runtime.process.exit_codes import FINAL, REQUEUE

STAYS_SO = sorted(FINAL - {REQUEUE})  # a restart would end the same way
QUEUE = "kueue.x-k8s.io/queue-name"
NODES = "node"  # the only replicated job of a JobSet


def metadata(workload: Workload, options: KubernetesOptions, queued: bool = False) -> dict[str, Any]:
    queue = queue_label(options) if queued else {}
    return given(name=workload.name, namespace=options.namespace, labels={**labels_of(workload, options), **queue})


def queue_label(options: KubernetesOptions) -> dict[str, str]:
    return given(**{QUEUE: options.queue})


def job_spec(workload: Workload, options: KubernetesOptions, template: dict[str, Any]) -> dict[str, Any]:
    """Return an Indexed Job: pod i of the job is node i."""
    return given(
        suspend=True if options.queue else None,  # until Kueue lets it start
        completionMode="Indexed",
        completions=workload.tasks if workload.tasks > 1 else workload.nodes,
        parallelism=workload.tasks if workload.tasks > 1 else workload.nodes,
        # If the first node ends, the other nodes end too, and each of their pods counts.
        backoffLimit=workload.max_retries * max(workload.nodes, workload.tasks),
        podFailurePolicy=_failure_policy(),
        activeDeadlineSeconds=options.deadline_s or None,
        template=template,
    )


def jobset_spec(workload: Workload, options: KubernetesOptions, subdomain: str = "") -> dict[str, Any]:
    """Return a JobSet.

    All pods restart together if one fails for good, so that no node waits for a lost node.

    subdomain: of the pods' names; default: JobSet's name.
    """
    head = f"{workload.name}-{NODES}-0-0.{workload.name}" if workload.nodes > 1 else "localhost"
    template = pod_template(workload, options, head)
    inner = {**job_spec(workload, replace(options, queue=None), template), "backoffLimit": 0}
    return {
        "network": given(enableDNSHostnames=True, subdomain=subdomain, publishNotReadyAddresses=True),
        "failurePolicy": {
            "maxRestarts": workload.max_retries,
            "rules": [{"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": inner}}],
    }


def _failure_policy() -> dict[str, Any]:
    """Return rules for the exit codes of the agent. Other exit codes count as retries."""

    def on_codes(action: str, codes: list[int]) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes}}

    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [on_codes("FailJob", STAYS_SO), on_codes("Ignore", [REQUEUE]), evicted]}
