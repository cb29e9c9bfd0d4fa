"""Render a Workload for Kubeflow: a TrainJob with a runtime of its own (Trainer v2), or a PyTorchJob (Training Operator v1).

A TrainJob's pods are a JobSet's, so they meet and end as those do. A PyTorchJob has a master and workers, named and numbered by
the operator, and knows no exit codes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launch.indexed_job import NODES, jobset_spec, metadata
from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_pod import CONTAINER, pod_template
from launch.manifest import check_letter_first, given
from launch.workload import Workload

TRAINER_GROUP = "trainer.kubeflow.org"
STEP = f"{TRAINER_GROUP}/trainjob-ancestor-step"  # says which job of a runtime is the training itself
# The names by which the Training Operator finds its container and its port, and the variable in which it numbers the pods.
PYTORCH_CONTAINER, PYTORCH_PORT, NODE_RANK = "pytorch", "pytorchjob-port", "$(RANK)"


def train_job(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    """A TrainingRuntime and the TrainJob that runs it once. Raises LaunchError for what Kubernetes cannot have."""
    check_letter_first(workload.name, "Kubeflow")
    template = jobset_spec(workload, replace(options, deadline_s=0))
    (nodes,) = template["replicatedJobs"]
    nodes["template"] = {"metadata": {"labels": {STEP: "trainer"}}, **nodes["template"]}
    (container,) = nodes["template"]["spec"]["template"]["spec"]["containers"]
    container["name"] = NODES  # where Trainer looks for the training's container
    for rule in nodes["template"]["spec"]["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            rule["onExitCodes"]["containerName"] = NODES
    runtime = {
        "apiVersion": f"{TRAINER_GROUP}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(workload, options),
        "spec": {"mlPolicy": {"numNodes": workload.nodes}, "template": {"spec": template}},
    }
    job = {
        "apiVersion": f"{TRAINER_GROUP}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(workload, options, queued=True),
        "spec": given(
            runtimeRef={"apiGroup": TRAINER_GROUP, "kind": "TrainingRuntime", "name": workload.name},
            suspend=True if options.queue else None,
            activeDeadlineSeconds=options.deadline_s or None,
        ),
    }
    return [runtime, job]


def pytorch_job(workload: Workload, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Raises LaunchError for what Kubernetes cannot have."""
    check_letter_first(workload.name, "Kubeflow")
    head = f"{workload.name}-master-0" if workload.nodes > 1 else "localhost"
    replicas = {"Master": _replica(workload, options, head, "0", 1)}
    if workload.nodes > 1:
        replicas["Worker"] = _replica(workload, options, head, NODE_RANK, workload.nodes - 1)
    policy = given(
        cleanPodPolicy="Running",
        ttlSecondsAfterFinished=options.keep_s,
        activeDeadlineSeconds=options.deadline_s or None,
        backoffLimit=workload.max_retries * workload.nodes,  # the end of one pod ends the others
        suspend=True if options.queue else None,
    )
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(workload, options, queued=True),
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }
    return [job]


def _replica(workload: Workload, options: KubernetesOptions, head: str, node: str, number: int) -> dict[str, Any]:
    template = pod_template(workload, options, head, node=node)
    (container,) = template["spec"]["containers"]
    assert container["name"] == CONTAINER
    container["name"] = PYTORCH_CONTAINER
    for port in container.get("ports", []):
        port["name"] = PYTORCH_PORT  # of the Service that the operator makes for the master
    del template["spec"]["restartPolicy"]  # the operator overwrites it with that of the replica
    policy = "OnFailure" if workload.max_retries else "Never"
    return {"replicas": number, "restartPolicy": policy, "template": template}
