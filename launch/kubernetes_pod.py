"""Render one node of a Workload as a pod: command, resources, volumes, permissions."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from launch.kubernetes_options import KubernetesOptions
from launch.manifest import given
from launch.resources import on_cluster
from launch.workload import ENDPOINT, Mount, Workload
from pipeline.runtime.errors import LaunchError
from pipeline.runtime.process.exit_codes import FINAL, REQUEUE

CONTAINER = "main"
INSTANCE = "app.kubernetes.io/instance"
# in addition to the ranks' grace period, for the agent to end and flush its logs
GRACE_MARGIN_S = 5
SHARED_MEMORY = "/dev/shm"
# The Job controller sets it in every pod of an Indexed Job.
NODE_INDEX = "$(JOB_COMPLETION_INDEX)"
# The name of a CronJob's Job is only known when it runs. The pod gets it if `head` contains this
# variable.
JOB_NAME = "$(JOB_NAME)"
# the id of a Job whose pods leave and join, so that they never connect to a later Job of the same
# name
JOB_UID = "$(JOB_UID)"


def labels_of(workload: Workload, options: KubernetesOptions) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "torchrec-pipeline",
        INSTANCE: workload.name,
        "app.kubernetes.io/component": workload.verb,
        "app.kubernetes.io/managed-by": "launch.render",
        **(options.label or {}),
    }


def pod_template(
    workload: Workload,
    options: KubernetesOptions,
    head: str,
    subdomain: str = "",
    node: str = NODE_INDEX,
) -> dict[str, Any]:
    """Return the template of a pod. `head` and `node` may contain `$(VARIABLE)`.

    head: the name by which other nodes reach the first node. node: the number of this node. Raises
    LaunchError if the image, size or hardware is missing, or pods do not support a mount.
    """
    workload = on_cluster(workload)
    if workload.image is None:
        raise LaunchError("give --image, because a pod runs in an image; docs/do/cluster.md says how to build it")
    if not workload.cpu or not workload.mem_mb:
        raise LaunchError(
            "give --cpu and --memMB (or --h): a pod without requests may run anywhere and is evicted first"
        )
    tolerated = {options.gpu_resource: ":NoSchedule"} if workload.gpu else {}
    pod = given(
        restartPolicy="Never",  # the Job makes new pods, by its podFailurePolicy
        subdomain=subdomain,
        serviceAccountName=options.service_account,
        priorityClassName=options.priority_class,
        hostNetwork=True if options.host_network else None,
        # the nodes connect by a Service's name
        dnsPolicy="ClusterFirstWithHostNet" if options.host_network else None,
        affinity=_near(workload, options.together) if options.together else None,
        nodeSelector=options.node_selector,
        tolerations=[
            given(key=key, operator="Equal" if value else "Exists", value=value, effect=effect)
            for key, rest in (tolerated | (options.toleration or {})).items()
            for value, _, effect in [rest.partition(":")]
        ],
        runtimeClassName=options.runtime_class,
        imagePullSecrets=[{"name": options.pull_secret}] if options.pull_secret else [],
        automountServiceAccountToken=False,
        enableServiceLinks=False,
        # otherwise the process is number 1, which ignores SIGTERM by default
        shareProcessNamespace=True,
        terminationGracePeriodSeconds=grace_s(workload, options),
        securityContext=_pod_rights(options),
        containers=[_container(workload, options, head, node)],
        volumes=[volume for volume, _ in _volumes(workload, options)],
    )
    return {"metadata": given(labels=labels_of(workload, options), annotations=options.annotation), "spec": pod}


def _near(workload: Workload, label: str) -> dict[str, Any]:
    """Return an affinity that prefers nodes close to each other. If they are full, other nodes are used."""
    term = {"labelSelector": {"matchLabels": {INSTANCE: workload.name}}, "topologyKey": label}
    wish = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}


def grace_s(workload: Workload, options: KubernetesOptions) -> int:
    """Return the seconds between SIGTERM and SIGKILL. Raises LaunchError if the ranks need more time."""
    least = int(workload.grace_s) + (GRACE_MARGIN_S if workload.grace_s else 0)
    if options.grace_s is not None and options.grace_s < least:
        raise LaunchError(
            f"--grace-s {options.grace_s} is less than the {least} s that {workload.verb} needs to save "
            f"(trainer.grace_s and {GRACE_MARGIN_S} s); give more, or set trainer.grace_s"
        )
    return options.grace_s or max(30, least)


def is_kept(workload: Workload, options: KubernetesOptions) -> bool:
    """Return True if the log files, and so the run folder, are on a volume that is kept after the pod ends."""
    return is_mounted(workload, options, workload.log_dir, for_writing=True)


def is_mounted(workload: Workload, options: KubernetesOptions, path: str, for_writing: bool = False) -> bool:
    folder = PurePosixPath(options.workdir, path)
    mounts = (mount for mount in workload.mounts if not (for_writing and mount.read_only))
    return any(folder.is_relative_to(mount.target) for mount in mounts)


def warning_lines(workload: Workload, options: KubernetesOptions) -> list[str]:
    """Print on stderr and return warnings about files that the pods would not find or would lose."""
    mount = f"mount a volume at {options.workdir}"
    lines = [
        f"WARNING: {path} is read in the pod, but is not on a volume: {mount}, unless the image contains it."
        for path in workload.reads
        if path and "://" not in path and not path.startswith("/") and not is_mounted(workload, options, path)
    ]
    if workload.log_dir and not is_kept(workload, options):
        lines.append(
            f"WARNING: {workload.log_dir} is inside the pod and is lost with it, with all "
            f"checkpoints: {mount}, or at the run folder."
        )
    for line in lines:
        print(line, file=sys.stderr)
    return lines


def _container(workload: Workload, options: KubernetesOptions, head: str, node: str) -> dict[str, Any]:
    env = workload.whole_env(workload.cpu, options.network_env)
    variables: list[dict[str, Any]] = [{"name": name, "value": _literally(value)} for name, value in env.items()]
    if JOB_NAME in head:
        variables.insert(0, _of_label("JOB_NAME", "job-name"))
    if workload.is_elastic:
        variables.insert(0, _of_label("JOB_UID", "batch.kubernetes.io/controller-uid"))
    size = given(
        cpu=str(workload.cpu),
        memory=f"{workload.mem_mb}Mi",
        **{options.gpu_resource: str(workload.gpu) if workload.gpu else ""},
        **{"ephemeral-storage": f"{options.ephemeral_mb}Mi" if options.ephemeral_mb else ""},
        **(options.resource or {}),
    )
    return given(
        name=CONTAINER,
        image=workload.image,
        imagePullPolicy=options.pull_policy,
        command=_command(workload, options, head, node),  # no shell, so SIGTERM reaches the agent
        workingDir=options.workdir,
        env=variables,
        envFrom=[{"secretRef": {"name": name}} for name in options.secrets],
        ports=[{"name": "c10d", "containerPort": workload.port}] if workload.nodes > 1 else [],
        terminationMessagePolicy="FallbackToLogsOnError",  # kubectl describe shows the error
        resources={"requests": size, "limits": size},
        volumeMounts=[mount for _, mount in _volumes(workload, options)],
        securityContext={
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": options.read_only_root,
            "capabilities": given(drop=["ALL"], add=options.capabilities),
        },
    )


def _of_label(name: str, label: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def _command(workload: Workload, options: KubernetesOptions, head: str, node: str) -> list[str]:
    """Return the command's words so that the pod gets them unchanged."""
    head_mark, job_mark = "\0head", "\0job"  # no argument can contain NUL
    words = []
    job = JOB_UID if workload.is_elastic else workload.name
    for original, word in zip(workload.command, workload.argv(head_mark, job_mark), strict=True):
        words.append(_literally(word).replace(head_mark, head).replace(job_mark, job))
        if original == ENDPOINT and workload.nodes > 1:
            # Pods start one after another, and a pod's name may be unknown when the pod asks for
            # it.
            patience = f"join_timeout={options.meeting_timeout_s},read_timeout={options.meeting_timeout_s}"
            words += ["--node-rank", node, "--rdzv-conf", patience]
    return words


def check_meeting(workload: Workload, options: KubernetesOptions) -> None:
    """Raise LaunchError if pods could not find each other again after a pod leaves or joins."""
    if workload.is_elastic and not is_kept(workload, options):
        raise LaunchError(
            f"-j {workload.shape}: the pods connect through the run folder, but {workload.log_dir} is not on a volume "
            f"that they share: mount one at {options.workdir}, or at the run folder"
        )


def _literally(word: str) -> str:
    return word.replace("$", "$$")


def _volumes(workload: Workload, options: KubernetesOptions) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each volume of the pod with its path in the container."""
    # The container runtime's /dev/shm has 64 MiB; loaders, gloo and NCCL need more. It counts as
    # memory.
    shared = {"medium": "Memory", "sizeLimit": f"{options.shm_mb or workload.mem_mb // 2}Mi"}
    found = [({"name": "shm", "emptyDir": shared}, {"name": "shm", "mountPath": SHARED_MEMORY})]
    if options.read_only_root:
        # Local to the pod: compiled kernels, sockets and spilled rows, and a run folder that is
        # lost with the pod.
        written = {} if is_mounted(workload, options, "/tmp") else {"tmp": "/tmp"}
        if workload.log_dir and not is_kept(workload, options):
            written["run"] = str(PurePosixPath(options.workdir, workload.log_dir).parent)
        found += [({"name": name, "emptyDir": {}}, {"name": name, "mountPath": path}) for name, path in written.items()]
    for number, mount in enumerate(workload.mounts):
        name = f"mount-{number}"
        mounted = given(name=name, mountPath=mount.target, readOnly=mount.read_only or None)
        found.append(({"name": name, **_source(mount)}, mounted))
    for secret, path in (options.secret_mount or {}).items():
        name = f"secret-{secret.replace('.', '-')}"[:63]
        volume = {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}
        found.append((volume, given(name=name, mountPath=path, readOnly=True)))
    return found


def _source(mount: Mount) -> dict[str, Any]:
    if mount.kind == "volume":
        return {"persistentVolumeClaim": given(claimName=mount.source, readOnly=mount.read_only or None)}
    if mount.kind == "bind":
        return {"hostPath": {"path": mount.source}}
    raise LaunchError(
        f"--mount type={mount.kind},src={mount.source}: pods get devices from a device plugin: "
        "use --gpu, --gpu-resource"
    )


def _pod_rights(options: KubernetesOptions) -> dict[str, Any]:
    """Return the permissions that Kubernetes' Pod Security Standard calls "restricted".

    The pods' group may write to volumes.
    """
    group = options.fs_group if options.fs_group >= 0 else None
    return given(
        runAsNonRoot=True,
        runAsUser=options.run_as_user,
        fsGroup=group,
        fsGroupChangePolicy="OnRootMismatch" if group is not None else None,
        seccompProfile={"type": "RuntimeDefault"},
    )


STAYS_SO = sorted(FINAL - {REQUEUE})  # a restart would end the same way
QUEUE = "kueue.x-k8s.io/queue-name"
NODES = "node"  # the only replicated job of a JobSet


def metadata(workload: Workload, options: KubernetesOptions, queued: bool = False) -> dict[str, Any]:
    queue = given(**{QUEUE: options.queue}) if queued else {}
    return given(name=workload.name, namespace=options.namespace, labels={**labels_of(workload, options), **queue})


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
    """Return a JobSet. All pods restart together if one fails for good.

    subdomain: the subdomain in the pods' names; the default is the JobSet's name.
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
