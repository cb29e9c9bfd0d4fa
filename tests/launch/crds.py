"""Schemas of the two kinds that Kubernetes itself does not know, down to their pod and job templates.

Written after the published types: Volcano's batch.volcano.sh/v1alpha1 (volcano-sh/apis, job.go, events.go, actions.go) and
JobSet's jobset.x-k8s.io/v1alpha2 (kubernetes-sigs/jobset, its CustomResourceDefinition). No key beside theirs is let through.
"""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
FLAG = {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
ANYTHING: dict[str, Any] = {}  # validated as what it is: a PodTemplateSpec or a JobTemplateSpec


def _one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _list(of: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": of, **limits}


METADATA = _object(
    "name", name=TEXT, namespace=TEXT,
    labels={"type": "object", "additionalProperties": TEXT}, annotations={"type": "object", "additionalProperties": TEXT},
)  # fmt: skip
EVENT = _one_of("*", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed")
POLICY = _object(
    action=_one_of("AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob", "ResumeJob"),
    event=EVENT, events=_list(EVENT), exitCode={"type": "integer", "not": {"const": 0}}, timeout=TEXT,
)  # fmt: skip
TASK = _object(
    "template", name={"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    replicas=COUNT, minAvailable=COUNT, template=ANYTHING, policies=_list(POLICY), maxRetry=COUNT,
    topologyPolicy=_one_of("none", "best-effort", "restricted", "single-numa-node"),
    dependsOn=_object(name=TEXTS, iteration=_one_of("any", "all")),
)  # fmt: skip
VOLCANO_JOB = _object(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion=_one_of("batch.volcano.sh/v1alpha1"), kind=_one_of("Job"), metadata=METADATA,
    spec=_object(
        schedulerName=TEXT, minAvailable=COUNT, volumes={"type": "array"}, tasks=_list(TASK, minItems=1),
        policies=_list(POLICY), plugins={"type": "object", "additionalProperties": TEXTS}, runningEstimate=TEXT,
        queue=TEXT, maxRetry=COUNT, ttlSecondsAfterFinished=COUNT, priorityClassName=TEXT, minSuccess=COUNT,
    ),
)  # fmt: skip

RULE = _object(
    "name", "action",
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action=_one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons=_list(
        _one_of("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy")
    ),
    targetReplicatedJobs=TEXTS,
)  # fmt: skip
JOB_SET = _object(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion=_one_of("jobset.x-k8s.io/v1alpha2"), kind=_one_of("JobSet"), metadata=METADATA,
    spec=_object(
        replicatedJobs=_list(_object("name", "template", name=TEXT, replicas=COUNT, groupName=TEXT, template=ANYTHING)),
        network=_object(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=TEXT),
        failurePolicy=_object(maxRestarts=COUNT, restartStrategy=_one_of("Recreate", "BlockingRecreate"), rules=_list(RULE)),
        successPolicy=_object("operator", operator=_one_of("All", "Any"), targetReplicatedJobs=TEXTS),
        startupPolicy=_object("startupPolicyOrder", startupPolicyOrder=_one_of("AnyOrder", "InOrder")),
        suspend=FLAG, ttlSecondsAfterFinished=COUNT, managedBy=TEXT,
    ),
)  # fmt: skip
