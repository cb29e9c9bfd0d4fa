"""Render a Workload as manifests for Kubernetes: an Indexed Job with a headless Service, which needs no operator, a JobSet,
or a Job of Volcano (launch.volcano).

A pod a node. They meet at the pod with index 0, whose name the Service makes known. What becomes of a failed pod, its exit
code says (pipeline.runtime.process.exit_codes).
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import CONTAINER, INSTANCE, is_kept, labels_of, pod_template
from launch.manifest import given, patched, to_yaml
from launch.volcano import volcano_job
from launch.workload import Workload, check_gpus_asked
from pipeline.runtime.errors import LaunchError
from pipeline.runtime.process.exit_codes import FINAL, REQUEUE

AGAIN = {
    "job": "start a pod again, uncounted",
    "jobset": "start a pod again, uncounted",
    "volcano": "start all pods again, which Volcano counts",
}
STAYS_SO = sorted(FINAL - {REQUEUE})  # another start would end the same way
QUEUE = "kueue.x-k8s.io/queue-name"
LONGEST_NAME = 50  # of a workload
NODES = "node"  # the one replicated job of a JobSet


def render_job(workload: Workload, options: KubernetesOptions) -> str:
    """YAML for `kubectl create -f -`. Raises LaunchError for what Kubernetes, or the job, cannot have."""
    check_gpus_asked(workload, bool(workload.gpu), "--gpu")
    workload = named_for_attempt(workload, options)
    objects = KINDS[options.kind](workload, options)
    return to_yaml(patched(objects, options.patch), _comment(workload, options))


def named_for_attempt(workload: Workload, options: KubernetesOptions) -> Workload:
    """With the suffix of --attempt. The run folder is the job's own: another attempt goes on from its checkpoints."""
    if options.attempt is None:
        return workload
    suffix = secrets.token_hex(3) if options.attempt == "auto" else options.attempt
    return replace(workload, name=f"{workload.name[: LONGEST_NAME - len(suffix) - 1].rstrip('-')}-{suffix}")


def metadata(workload: Workload, options: KubernetesOptions, queued: bool = False) -> dict[str, Any]:
    queue = queue_label(options) if queued else {}
    return given(name=workload.name, namespace=options.namespace, labels={**labels_of(workload, options), **queue})


def queue_label(options: KubernetesOptions) -> dict[str, str]:
    return given(**{QUEUE: options.queue})


def headless_service(workload: Workload, options: KubernetesOptions) -> dict[str, Any]:
    """Gives each pod a name in DNS, before it is ready too: the nodes have to meet in order to become so.

    Raises LaunchError for a name that begins with a digit: a Service's must not.
    """
    if workload.name[0].isdigit():
        raise LaunchError(f"--name {workload.name}: for several nodes the name must begin with a letter; give --name")
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata(workload, options), **_owned(workload, options)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {INSTANCE: workload.name},
            "ports": [{"name": "c10d", "port": workload.port}],
        },
    }


def _owned(workload: Workload, options: KubernetesOptions) -> dict[str, Any]:
    """By the Job, whose uid is known once it is there: without this the Service stays when the Job goes."""
    if options.owner is None:
        return {}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": workload.name, "uid": options.owner}
    return {"ownerReferences": [owner]}


def job_spec(workload: Workload, options: KubernetesOptions, template: dict[str, Any]) -> dict[str, Any]:
    """An Indexed Job: pod i of the job is node i."""
    return given(
        suspend=True if options.queue else None,  # until Kueue lets it start
        completionMode="Indexed",
        completions=workload.nodes,
        parallelism=workload.nodes,
        # The end of the first node ends the others: each of their pods counts.
        backoffLimit=workload.max_retries * workload.nodes,
        podFailurePolicy=_failure_policy(),
        activeDeadlineSeconds=options.deadline_s or None,
        template=template,
    )


def _job(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    many = workload.nodes > 1
    head = f"{workload.name}-0.{workload.name}" if many else "localhost"
    template = pod_template(workload, options, head, labels_of(workload, options), workload.name if many else "")
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(workload, options, queued=True),
        "spec": {**job_spec(workload, options, template), "ttlSecondsAfterFinished": options.keep_s},
    }
    return [headless_service(workload, options), job] if many else [job]


def _jobset(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    """All pods start again together when one fails for good: nodes that wait for a lost one do not linger."""
    head = f"{workload.name}-{NODES}-0-0.{workload.name}" if workload.nodes > 1 else "localhost"
    template = pod_template(workload, options, head, labels_of(workload, options))
    inner = {**job_spec(workload, replace(options, queue=None), template), "backoffLimit": 0}
    spec = given(
        suspend=True if options.queue else None,
        ttlSecondsAfterFinished=options.keep_s,
        network={"enableDNSHostnames": True, "subdomain": workload.name, "publishNotReadyAddresses": True},
        failurePolicy={
            "maxRestarts": workload.max_retries,
            "rules": [{"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        replicatedJobs=[{"name": NODES, "replicas": 1, "template": {"spec": inner}}],
    )
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(workload, options, queued=True),
        "spec": spec,
    }
    return [jobset]


KINDS: dict[str, Callable[[Workload, KubernetesOptions], list[dict[str, Any]]]] = {
    "job": _job, "jobset": _jobset, "volcano": lambda workload, options: [volcano_job(workload, options)],
}  # fmt: skip


def _failure_policy() -> dict[str, Any]:
    """The exit codes of pipeline.agent; what no rule names counts towards the retries."""

    def on_codes(action: str, codes: list[int]) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes}}

    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [on_codes("FailJob", STAYS_SO), on_codes("Ignore", [REQUEUE]), evicted]}


def _comment(workload: Workload, options: KubernetesOptions) -> str:
    where = "." if workload.nodes == 1 else f", {workload.nodes} pods that meet at the first."
    lines = [
        f"{workload.verb}: {workload.nodes} x {workload.ranks_per_node} rank(s){where}",
        f"Exit codes {', '.join(map(str, STAYS_SO))} (mistakes) fail the job at once; {REQUEUE} (asked to stop) and evictions {AGAIN[options.kind]}.",
    ]
    if workload.log_dir and is_kept(workload, options):
        lines.append(f"A log file a rank lies in {workload.log_dir}; rank 0's is what kubectl logs shows.")
    elif workload.log_dir:
        warning = (
            f"WARNING: {workload.log_dir} lies in the pod and goes with it, checkpoints too: mount a volume at {options.workdir}, "
            "or at the run folder."
        )
        print(warning, file=sys.stderr)  # the manifest itself may go straight into kubectl
        lines.append(warning)
    return "\n".join(lines)
