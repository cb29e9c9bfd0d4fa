"""Render a Workload for operators of Kubernetes: Volcano, Kubeflow (TrainJob, PyTorchJob), KubeRay.

Volcano starts all pods of a job or none. A task is a node, as in TorchX, so that TorchX's status
and log find it. A TrainJob has a separate TrainingRuntime, which describes its pods as a JobSet. A
PyTorchJob has a master and workers, which the operator numbers, and ignores exit codes. A RayJob
prepares data with engine=ray; KubeRay sets the command of the workers.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import CONTAINER, NODES, jobset_spec, metadata, pod_template
from launch.manifest import check_letter_first, given, of_kind
from launch.targets import START_AGAIN, Kind, register
from launch.workload import Workload, check_one_task
from pipeline.runtime.errors import LaunchError
from pipeline.runtime.process.exit_codes import FINAL, REQUEUE

LONGEST_HOST_NAME = 63
# For jobs without retries. Volcano reads 0 as 3, and counts evictions as retries.
MAX_EVICTIONS = 3


def volcano_job(workload: Workload, options: KubernetesOptions) -> dict[str, Any]:
    """Return a Volcano Job. Raises LaunchError for a setting that Kubernetes or Volcano does not support."""
    check_one_task(workload, "Volcano")
    if options.deadline_s:
        raise LaunchError(f"--deadline-s {options.deadline_s}: Volcano has no deadline of a job; remove it")
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": metadata(workload, options),
        "spec": {
            "schedulerName": "volcano",
            "queue": options.queue or "default",
            "minAvailable": workload.nodes,
            "maxRetry": workload.max_retries or MAX_EVICTIONS,
            "ttlSecondsAfterFinished": options.keep_s,
            **given(priorityClassName=options.priority_class),
            # Names exist before a pod is ready, because the nodes have to connect to become ready.
            "plugins": {"svc": ["--publish-not-ready-addresses"], "env": []},
            "policies": _policies(workload),
            "tasks": [_task(workload, options, node) for node in range(workload.nodes)],
        },
    }


def longest_name(verb: str, nodes: int) -> int:
    """Return the longest name that fits the last pod's host name, <name>-<verb>-<node>-0."""
    return LONGEST_HOST_NAME - len(f"-{verb}-{nodes - 1}-0")


def _task(workload: Workload, options: KubernetesOptions, node: int) -> dict[str, Any]:
    longest = longest_name(workload.verb, workload.nodes)
    if len(workload.name) > longest:
        raise LaunchError(f"--name {workload.name}: Volcano's names allow {longest} characters; give a shorter --name")
    head = f"{workload.name}-{workload.verb}-0-0.{workload.name}" if workload.nodes > 1 else "localhost"
    template = pod_template(workload, options, head, node=str(node))
    return {"name": f"{workload.verb}-{node}", "replicas": 1, "template": template}


def _policies(workload: Workload) -> list[dict[str, Any]]:
    """Return what Volcano does for each exit code of the agents. Volcano uses the first entry that matches."""
    return [
        *({"exitCode": code, "action": "TerminateJob"} for code in sorted(FINAL - {REQUEUE})),
        {"exitCode": REQUEUE, "action": "RestartJob"},
        {"event": "PodEvicted", "action": "RestartJob"},
        {"event": "PodFailed", "action": "RestartJob" if workload.max_retries else "TerminateJob"},
    ]


TRAINER_GROUP = "trainer.kubeflow.org"
STEP = f"{TRAINER_GROUP}/trainjob-ancestor-step"  # marks the job of a runtime that trains
# The names by which the Training Operator finds its container and port, and the variable with the
# number of a pod.
PYTORCH_CONTAINER, PYTORCH_PORT, NODE_RANK = "pytorch", "pytorchjob-port", "$(RANK)"


def train_job(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return a TrainingRuntime and the TrainJob that runs it once. Raises LaunchError."""
    check_letter_first(workload.name, "Kubeflow")
    template = jobset_spec(workload, replace(options, deadline_s=0))
    (nodes,) = template["replicatedJobs"]
    nodes["template"] = {"metadata": {"labels": {STEP: "trainer"}}, **nodes["template"]}
    (container,) = nodes["template"]["spec"]["template"]["spec"]["containers"]
    container["name"] = NODES  # Trainer looks for the training's container under this name
    for rule in nodes["template"]["spec"]["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            rule["onExitCodes"]["containerName"] = NODES
    version = f"{TRAINER_GROUP}/v1alpha1"
    run_by = {"mlPolicy": {"numNodes": workload.nodes}, "template": {"spec": template}}
    spec = given(
        runtimeRef={"apiGroup": TRAINER_GROUP, "kind": "TrainingRuntime", "name": workload.name},
        suspend=True if options.queue else None,
        activeDeadlineSeconds=options.deadline_s or None,
    )
    runtime = of_kind(version, "TrainingRuntime", metadata(workload, options), run_by)
    return [runtime, of_kind(version, "TrainJob", metadata(workload, options, queued=True), spec)]


def pytorch_job(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return a PyTorchJob. Raises LaunchError for a setting that Kubernetes does not support."""
    check_letter_first(workload.name, "Kubeflow")
    head = f"{workload.name}-master-0" if workload.nodes > 1 else "localhost"
    replicas = {"Master": _replica(workload, options, head, "0", 1)}
    if workload.nodes > 1:
        replicas["Worker"] = _replica(workload, options, head, NODE_RANK, workload.nodes - 1)
    policy = given(
        cleanPodPolicy="Running",
        ttlSecondsAfterFinished=options.keep_s,
        activeDeadlineSeconds=options.deadline_s or None,
        # if one pod ends, the other pods end too
        backoffLimit=workload.max_retries * workload.nodes,
        suspend=True if options.queue else None,
    )
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return [of_kind("kubeflow.org/v1", "PyTorchJob", metadata(workload, options, queued=True), spec)]


def _replica(workload: Workload, options: KubernetesOptions, head: str, node: str, number: int) -> dict[str, Any]:
    template = pod_template(workload, options, head, node=node)
    (container,) = template["spec"]["containers"]
    assert container["name"] == CONTAINER
    container["name"] = PYTORCH_CONTAINER
    for port in container.get("ports", []):
        port["name"] = PYTORCH_PORT  # of the Service that the operator makes for the master
    del template["spec"]["restartPolicy"]  # the operator replaces it with the replica's policy
    policy = "OnFailure" if workload.max_retries else "Never"
    return {"replicas": number, "restartPolicy": policy, "template": template}


HEAD, WORKERS = "head", "workers"


def ray_job(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return a RayJob. Raises LaunchError for a setting that pods do not support."""
    check_letter_first(workload.name, "Services, which KubeRay makes,")
    words = workload.command[workload.command.index("--") + 1 :]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(workload, options, queued=True),
        "spec": given(
            suspend=True if options.queue else None,
            entrypoint=shlex.join(["python", "-u", "-m", "pipeline", "prepare", *words]),
            submissionMode="HTTPMode",  # without another pod that submits
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
    """Return all nodes except the head, which also runs tasks."""
    count = workload.nodes - 1
    if not count:
        return []
    group = {"groupName": WORKERS, "replicas": count, "minReplicas": count, "maxReplicas": count, "rayStartParams": {}}
    return [{**group, "template": _template(workload, options, WORKERS)}]


def _template(workload: Workload, options: KubernetesOptions, name: str) -> dict[str, Any]:
    """Return a pod's template without the command and restart policy, which KubeRay sets."""
    template = pod_template(workload, options, "localhost")
    pod = template["spec"]
    container = pod["containers"][0]
    for key in ("command", "ports"):
        container.pop(key, None)
    container["name"] = f"ray-{name.removesuffix('s')}"
    # Ray's write paths are not known
    container["securityContext"]["readOnlyRootFilesystem"] = False
    pod.pop("restartPolicy")
    return template


register(
    "kind",
    "volcano",
    Kind(lambda workload, options: [volcano_job(workload, options)], "start all pods again, which Volcano counts"),
)
register("kind", "trainjob", Kind(train_job, START_AGAIN))
register("kind", "pytorchjob", Kind(pytorch_job))
register("kind", "rayjob", Kind(ray_job))
