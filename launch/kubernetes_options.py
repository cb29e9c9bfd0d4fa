"""Define the options of a job on Kubernetes, and check them when they are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from launch.options import NetworkOptions, flag_of, option
from launch.targets import registered
from pipeline.runtime.errors import LaunchError, check_at_least, check_choice

PULL_POLICIES = ("Always", "IfNotPresent", "Never")
EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
NAMES = ("namespace", "queue", "secret", "pull_secret", "service_account", "priority_class", "runtime_class")
RESOURCE = re.compile(r"([a-z0-9.-]+/[\w.-]+|hugepages-\w+)=\d+[A-Za-z]*")
UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True)
class KubernetesOptions(NetworkOptions):
    """Options of Kubernetes in addition to the shape of the job."""

    kind: str = option(
        "job",
        "job: a plain Indexed Job; jobset: a JobSet, whose pods restart together; volcano: a Job of Volcano; "
        "trainjob: a TrainJob of Kubeflow Trainer v2; pytorchjob: a PyTorchJob of its Training Operator v1; rayjob: a "
        "RayJob of KubeRay, which prepare with engine=ray always is",
    )
    namespace: Optional[str] = option(None, "namespace; default: kubectl's")
    queue: Optional[str] = option(None, "LocalQueue of Kueue, which waits until all pods fit; queue of Volcano")
    attempt: Optional[str] = option(None, "suffix of all names, to run a finished job again; auto: a random suffix")
    owner: Optional[str] = option(
        None, "uid of the Job that owns the Service, so that both are deleted together: docs/do/cluster.md"
    )
    workdir: str = option("/workspace", "working folder of the job; relative paths, also of run folders, start here")
    secret: Optional[str] = option(None, "Secrets whose keys become environment variables, separated by commas")
    secret_mount: Optional[dict[str, str]] = option(None, "a Secret as files: NAME=/path; repeatable")
    pull_secret: Optional[str] = option(None, "Secret to pull the image with")
    service_account: Optional[str] = option(None, "service account of the pods")
    priority_class: Optional[str] = option(None, "priority class of the pods")
    node_selector: Optional[dict[str, str]] = option(None, "label that nodes must have: KEY=VALUE; repeatable")
    toleration: Optional[dict[str, str]] = option(None, "taint to tolerate: KEY=VALUE:EFFECT, or KEY=:EFFECT")
    runtime_class: Optional[str] = option(None, "RuntimeClass of the pods, if nvidia is not the nodes' default")
    read_only_root: bool = option(True, "only /tmp, volumes and the run folder are writable")
    label: Optional[dict[str, str]] = option(None, "additional label of all objects: KEY=VALUE; repeatable")
    gpu_resource: str = option("nvidia.com/gpu", "name that the device plugin gives GPUs")
    resource: Optional[dict[str, str]] = option(None, "additional resource of each pod: rdma/hca=8; repeatable")
    ephemeral_mb: int = option(0, "limit of each pod's local disk, above which it is evicted; 0: no limit")
    capability: Optional[str] = option(
        None, "Linux capabilities, separated by commas; RDMA needs IPC_LOCK for its memory"
    )
    host_network: bool = option(False, "pods use their node's network: InfiniBand without a device plugin")
    together: Optional[str] = option(None, "label of nodes that are close: pods prefer nodes with equal values")
    annotation: Optional[dict[str, str]] = option(None, "annotation of the pods: KEY=VALUE; repeatable")
    pull_policy: Optional[str] = option(None, "when to pull the image: Always, IfNotPresent or Never")
    patch: Optional[str] = option(None, "YAML file to merge into the objects of the same kind")
    shm_mb: int = option(0, "size of /dev/shm, part of the memory; 0: half of the memory")
    run_as_user: Optional[int] = option(None, "user id of the pods; default: the image's, which must not be root")
    fs_group: int = option(1000, "group that owns the volumes; -1: the cluster chooses (OpenShift)")
    grace_s: Optional[int] = option(None, "seconds from SIGTERM to SIGKILL; default: the job's grace period plus 5")
    deadline_s: int = option(0, "seconds after which the job is ended, even if it is not finished; 0: never")
    keep_s: int = option(259200, "seconds that a finished job stays visible")
    meeting_timeout_s: int = option(600, "seconds that the nodes of a job wait for each other")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("--kind", self.kind, registered("kind"))
        for name in ("shm_mb", "deadline_s", "keep_s", "ephemeral_mb"):
            check_at_least(flag_of(name), getattr(self, name), 0)
        check_at_least("--meeting-timeout-s", self.meeting_timeout_s, 1)
        check_at_least("--grace-s", self.grace_s, 1, allow_none=True)
        check_at_least("--fs-group", self.fs_group, -1)
        check_choice("--pull-policy", self.pull_policy or "Always", PULL_POLICIES)
        for name, amount in (self.resource or {}).items():
            if not RESOURCE.fullmatch(f"{name}={amount}"):
                raise LaunchError(f"--resource {name}={amount}: give DOMAIN/NAME=NUMBER, for instance rdma/hca=8")
        if unknown := [name for name in self.capabilities if not re.fullmatch("[A-Z_]+", name)]:
            raise LaunchError(
                f"--capability {unknown[0]}: names are those of Linux without CAP_, for instance IPC_LOCK"
            )
        if self.attempt is not None and not re.fullmatch("[a-z0-9]{1,20}", self.attempt):
            raise LaunchError(f"--attempt {self.attempt}: give 1 to 20 lower-case letters and digits, or auto")
        if self.owner is not None and (self.kind != "job" or not UID.fullmatch(self.owner)):
            raise LaunchError(
                f"--owner {self.owner}: give the uid of a Job as kubectl shows it (--kind "
                f"{self.kind}: its operator makes and deletes the Service)"
            )
        if self.run_as_user == 0:
            raise LaunchError("--run-as-user 0 is root; give another number, or none to use the image's user")
        if not self.workdir.startswith("/"):
            raise LaunchError(f"--workdir {self.workdir}: give a path that begins with /")
        for name in NAMES:
            _check_names(flag_of(name), getattr(self, name))
        for name, path in (self.secret_mount or {}).items():
            _check_names("--secret-mount", name)
            if not path.startswith("/"):
                raise LaunchError(f"--secret-mount {name}={path}: give NAME=/path")
        for key, rest in (self.toleration or {}).items():
            check_choice(f"--toleration {key}={rest}: the effect", rest.partition(":")[2], EFFECTS)

    @property
    def capabilities(self) -> list[str]:
        return [name for name in (self.capability or "").split(",") if name]

    @property
    def secrets(self) -> list[str]:
        return [name for name in (self.secret or "").split(",") if name]


def _check_names(flag: str, names: Optional[str]) -> None:
    for name in (names or "").split(","):
        if name and not all(DNS_LABEL.fullmatch(part) for part in name.split(".")):
            raise LaunchError(f"{flag} {name}: names in Kubernetes are lower-case letters, digits and dashes")
