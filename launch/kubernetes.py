"""Render a Workload as manifests for Kubernetes.

The kinds are an Indexed Job with a headless Service, a JobSet, or the kind of an operator
(launch.extras). Each node is a pod and connects to the pod with index 0. The exit code of a failed
pod decides what happens next (pipeline.runtime.process.exit_codes).
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import (
    INSTANCE,
    STAYS_SO,
    check_meeting,
    is_kept,
    job_spec,
    jobset_spec,
    metadata,
    pod_template,
    warning_lines,
)
from launch.manifest import check_letter_first, given, of_kind, patched, to_yaml
from launch.targets import START_AGAIN, Kind, register, registered
from launch.workload import Workload, check_one_task
from pipeline.runtime.errors import LaunchError
from pipeline.runtime.process.exit_codes import REQUEUE

LONGEST_NAME = 50  # of a workload


def render_job(workload: Workload, options: KubernetesOptions) -> str:
    """Return YAML for `kubectl create -f -`. Raises LaunchError."""
    if workload.on_ray:
        options = replace(options, kind="rayjob")
    elif options.kind == "rayjob":
        raise LaunchError("--kind rayjob runs prepare with engine=ray; give another kind, or engine=ray")
    if options.kind != "job":
        check_one_task(workload, f"--kind {options.kind}")
    check_meeting(workload, options)
    if options.attempt is not None:  # the run folder stays the same
        suffix = secrets.token_hex(3) if options.attempt == "auto" else options.attempt
        name = workload.name[: LONGEST_NAME - len(suffix) - 1].rstrip("-")
        workload = replace(workload, name=f"{name}-{suffix}")
    objects = registered("kind")[options.kind].render(workload, options)
    return to_yaml(patched(objects, options.patch), _comment(workload, options))


def headless_service(workload: Workload, options: KubernetesOptions) -> dict[str, Any]:
    """Return a Service that gives each pod a DNS name before the pod is ready: pods become ready by connecting."""
    check_letter_first(workload.name, "several nodes")
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {INSTANCE: workload.name},
        "ports": [{"name": "c10d", "port": workload.port}],
    }
    about = metadata(workload, options)
    if options.owner is not None:  # otherwise the Service outlives the Job
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": workload.name, "uid": options.owner}
        about["ownerReferences"] = [owner]
    return of_kind("v1", "Service", about, spec)


def render_indexed_job(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    many = workload.nodes > 1
    head = f"{workload.name}-0.{workload.name}" if many else "localhost"
    template = pod_template(workload, options, head, workload.name if many else "")
    spec = {**job_spec(workload, options, template), "ttlSecondsAfterFinished": options.keep_s}
    job = of_kind("batch/v1", "Job", metadata(workload, options, queued=True), spec)
    return [headless_service(workload, options), job] if many else [job]


def render_jobset(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    spec = given(
        suspend=True if options.queue else None,
        ttlSecondsAfterFinished=options.keep_s,
        **jobset_spec(workload, options, subdomain=workload.name),
    )
    return [of_kind("jobset.x-k8s.io/v1alpha2", "JobSet", metadata(workload, options, queued=True), spec)]


register("kind", "job", Kind(render_indexed_job, START_AGAIN))
register("kind", "jobset", Kind(render_jobset, START_AGAIN))


def _comment(workload: Workload, options: KubernetesOptions) -> str:
    if workload.on_ray:
        return (
            f"{workload.verb}: a Ray cluster of {workload.nodes} pods for KubeRay 1.3 or newer. It ends with the "
            "job.\nA lost pod is replaced, and its tasks run again. If the head is lost, --max-retries restarts the "
            "job, which then resumes."
        )
    again = registered("kind")[options.kind].again
    where = "." if workload.nodes == 1 else f", {workload.nodes} pods that connect to the first pod."
    if workload.is_elastic:
        where = f", {workload.min_nodes} to {workload.nodes} pods that connect through the run folder. A lost pod returns when there is a node for it."
    lines = [
        f"{workload.verb}: {workload.nodes} x {workload.ranks_per_node} rank(s){where}",
        f"Exit codes {', '.join(map(str, STAYS_SO))} (errors that a restart cannot fix) fail the "
        f"job at once; {REQUEUE} (asked to stop) and evictions {again}."
        if again
        else "A PyTorchJob ignores exit codes: every failed pod counts towards --max-retries.",
    ]
    if workload.log_dir and is_kept(workload, options):
        lines.append(f"Each rank writes a log file in {workload.log_dir}; kubectl logs shows that of rank 0.")
    lines += warning_lines(workload, options)
    return "\n".join(lines)
