"""Schemas of the kinds that Kubernetes itself does not know, down to their pod and job templates.

Written after the published types: Volcano's batch.volcano.sh/v1alpha1 (volcano-sh/apis, job.go, events.go, actions.go),
JobSet's jobset.x-k8s.io/v1alpha2 (kubernetes-sigs/jobset, its CustomResourceDefinition), Kubeflow's trainer.kubeflow.org/v1alpha1
(kubeflow/trainer at 8c0f5059b, trainjob_types.go, trainingruntime_types.go) and kubeflow.org/v1 (kubeflow/training-operator 1.9.0,
pytorch_types.go, common_types.go), and monitoring.coreos.com/v1 (prometheus-operator at 6adcebc50, servicemonitor_types.go,
types.go). No key beside theirs is let through. COMPOSE is of what we write in a Compose file, after compose-spec.json (compose-spec/compose-spec
at 00655e222).
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
JOB_SET_SPEC = _object(
        replicatedJobs=_list(_object("name", "template", name=TEXT, replicas=COUNT, groupName=TEXT, template=ANYTHING)),
        network=_object(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=TEXT),
        failurePolicy=_object(maxRestarts=COUNT, restartStrategy=_one_of("Recreate", "BlockingRecreate"), rules=_list(RULE)),
        successPolicy=_object("operator", operator=_one_of("All", "Any"), targetReplicatedJobs=TEXTS),
        startupPolicy=_object("startupPolicyOrder", startupPolicyOrder=_one_of("AnyOrder", "InOrder")),
        suspend=FLAG, ttlSecondsAfterFinished=COUNT, managedBy=TEXT,
)  # fmt: skip
JOB_SET = _object(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion=_one_of("jobset.x-k8s.io/v1alpha2"), kind=_one_of("JobSet"), metadata=METADATA, spec=JOB_SET_SPEC,
)  # fmt: skip

TRAINING_RUNTIME = _object(
    "apiVersion", "kind", "metadata",
    apiVersion=_one_of("trainer.kubeflow.org/v1alpha1"), kind=_one_of("TrainingRuntime"), metadata=METADATA,
    spec=_object(
        mlPolicy=_object(numNodes=COUNT, torch=ANYTHING, mpi=ANYTHING, flux=ANYTHING, jax=ANYTHING, xgboost=ANYTHING),
        podGroupPolicy=_object(coscheduling=ANYTHING, volcano=ANYTHING),
        template=_object(metadata=ANYTHING, spec=JOB_SET_SPEC),
    ),
)  # fmt: skip
MANAGERS = _one_of("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue")
TRAIN_JOB = _object(
    "apiVersion", "kind", "metadata",
    apiVersion=_one_of("trainer.kubeflow.org/v1alpha1"), kind=_one_of("TrainJob"), metadata=METADATA,
    spec=_object(
        "runtimeRef",
        runtimeRef=_object("name", name={"type": "string", "minLength": 1}, apiGroup=TEXT, kind=TEXT),
        initializer=_object(dataset=ANYTHING, model=ANYTHING),
        trainer=_object(
            image=TEXT, command=TEXTS, args=TEXTS, env={"type": "array"}, numNodes=COUNT, resourcesPerNode=ANYTHING,
            numProcPerNode=COUNT,
        ),
        runtimePatches={"type": "array"}, suspend=FLAG, activeDeadlineSeconds={"type": "integer", "minimum": 1},
        managedBy=MANAGERS,
    ),
)  # fmt: skip

REPLICA = _object(replicas=COUNT, restartPolicy=_one_of("Always", "OnFailure", "Never", "ExitCode"), template=ANYTHING)
PYTORCH_JOB = _object(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion=_one_of("kubeflow.org/v1"), kind=_one_of("PyTorchJob"), metadata=METADATA,
    spec=_object(
        "pytorchReplicaSpecs",
        runPolicy=_object(
            cleanPodPolicy=_one_of("", "All", "Running", "None"), ttlSecondsAfterFinished=COUNT, activeDeadlineSeconds=COUNT,
            backoffLimit=COUNT, suspend=FLAG, managedBy=TEXT,
            schedulingPolicy=_object(
                minAvailable=COUNT, queue=TEXT, minResources=ANYTHING, priorityClass=TEXT, scheduleTimeoutSeconds=COUNT,
            ),
        ),
        elasticPolicy=_object(
            minReplicas=COUNT, maxReplicas=COUNT, rdzvBackend=_one_of("c10d", "etcd", "etcd-v2"), rdzvPort=COUNT,
            rdzvHost=TEXT, rdzvId=TEXT, rdzvConf={"type": "array"}, standalone=FLAG, nProcPerNode=COUNT, maxRestarts=COUNT,
            metrics={"type": "array"},
        ),
        pytorchReplicaSpecs=_object(Master=REPLICA, Worker=REPLICA),
        nprocPerNode=TEXT,
    ),
)  # fmt: skip

LABELS = {"type": "object", "additionalProperties": TEXT}
DURATION = {
    "type": "string",
    "pattern": "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
}
ENDPOINT = _object(
    port=TEXT, targetPort=ANYTHING, path=TEXT, scheme=_one_of("http", "https", "HTTP", "HTTPS"), params=ANYTHING,
    interval=DURATION, scrapeTimeout=DURATION, honorLabels=FLAG, honorTimestamps=FLAG, trackTimestampsStaleness=FLAG,
    metricRelabelings={"type": "array"}, relabelings={"type": "array"}, filterRunning=FLAG, bearerTokenFile=TEXT,
    followRedirects=FLAG, enableHttp2=FLAG, tlsConfig=ANYTHING, basicAuth=ANYTHING, authorization=ANYTHING, oauth2=ANYTHING,
)  # fmt: skip
SERVICE_MONITOR = _object(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion=_one_of("monitoring.coreos.com/v1"), kind=_one_of("ServiceMonitor"), metadata=METADATA,
    spec=_object(
        "endpoints", "selector",
        jobLabel=TEXT, targetLabels=TEXTS, podTargetLabels=TEXTS, endpoints=_list(ENDPOINT),
        selector=_object(matchLabels=LABELS, matchExpressions={"type": "array"}),
        namespaceSelector=_object(any=FLAG, matchNames=TEXTS), sampleLimit=COUNT, targetLimit=COUNT, labelLimit=COUNT,
        scrapeClass=TEXT, attachMetadata=_object(node=FLAG), keepDroppedTargets=COUNT,
    ),
)  # fmt: skip

VARIABLES = {"type": "object", "additionalProperties": TEXT}
CONDITION = _object(
    "condition", condition=_one_of("service_started", "service_healthy", "service_completed_successfully")
)
SERVICE = _object(
    "image",
    image=TEXT, command=TEXTS, entrypoint=TEXTS, working_dir=TEXT, environment=VARIABLES, volumes=TEXTS,
    depends_on={"type": "object", "additionalProperties": CONDITION}, cpus={"type": ["number", "string"]}, mem_limit=TEXT,
    shm_size=TEXT, init=FLAG, stop_grace_period=TEXT, ports=TEXTS,
    restart={"type": "string", "pattern": "^(no|always|unless-stopped|on-failure(:[0-9]+)?)$"},
    healthcheck=_object(test=TEXTS, interval=TEXT, timeout=TEXT, retries={"type": ["number", "string"]}, start_period=TEXT),
    deploy=_object(
        resources=_object(reservations=_object(devices=_list(_object("capabilities", driver=TEXT, count=COUNT, capabilities=TEXTS))))
    ),
)  # fmt: skip
COMPOSE = _object(
    "services",
    name={"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
    services={"type": "object", "patternProperties": {"^[a-zA-Z0-9._-]+$": SERVICE}, "additionalProperties": False},
    volumes={"type": "object", "additionalProperties": {"type": "object"}},
)  # fmt: skip

# ray.io/v1 (ray-project/kuberay at 0057210ed, rayjob_types.go, raycluster_types.go), as far as we write it.
TEXT_MAP = {"type": "object", "additionalProperties": TEXT}
RAY_JOB = _object(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion=_one_of("ray.io/v1"), kind=_one_of("RayJob"), metadata=METADATA,
    spec=_object(
        activeDeadlineSeconds={"type": "integer", "minimum": 1}, backoffLimit=COUNT, entrypoint=TEXT, suspend=FLAG,
        submissionMode=_one_of("K8sJobMode", "HTTPMode", "InteractiveMode"), shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=_object(
            "headGroupSpec", rayVersion=TEXT,
            headGroupSpec=_object("template", rayStartParams=TEXT_MAP, template=ANYTHING, serviceType=TEXT),
            workerGroupSpecs=_list(_object(
                "groupName", "template", groupName=TEXT, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT,
                rayStartParams=TEXT_MAP, template=ANYTHING, numOfHosts=COUNT,
            )),
        ),
    ),
)  # fmt: skip
