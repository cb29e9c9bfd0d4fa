"""Read manifests, hold them against published schemas and against what those leave out, and run a pod's command."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import kubernetes_validate
import yaml
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from tests.launch.crds import JOB_SET, PYTORCH_JOB, RAY_JOB, SERVICE_MONITOR, TRAIN_JOB, TRAINING_RUNTIME, VOLCANO_JOB

# The schemas up to 1.28 want onPodConditions in every rule of a podFailurePolicy, which their servers do not.
RELEASES = ("1.29", kubernetes_validate.latest_version())
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
Manifest = dict[str, Any]
OTHERS = {  # (group, kind) of what is no part of Kubernetes
    ("batch.volcano.sh", "Job"): VOLCANO_JOB, ("jobset.x-k8s.io", "JobSet"): JOB_SET,
    ("trainer.kubeflow.org", "TrainingRuntime"): TRAINING_RUNTIME, ("trainer.kubeflow.org", "TrainJob"): TRAIN_JOB,
    ("kubeflow.org", "PyTorchJob"): PYTORCH_JOB, ("monitoring.coreos.com", "ServiceMonitor"): SERVICE_MONITOR,
    ("ray.io", "RayJob"): RAY_JOB,
}  # fmt: skip


def read(text: str) -> list[Manifest]:
    return list(yaml.safe_load_all(text))


def pod_templates(manifest: Manifest) -> list[Manifest]:
    """Every pod template in a manifest of any kind."""
    spec = manifest["spec"]
    if manifest["kind"] == "CronJob":
        return [spec["jobTemplate"]["spec"]["template"]]
    if manifest["kind"] in ("JobSet", "TrainingRuntime"):
        return [each["template"]["spec"]["template"] for each in _job_set(manifest)["replicatedJobs"]]
    if manifest["kind"] == "RayJob":
        cluster = spec["rayClusterSpec"]
        return [each["template"] for each in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", []))]
    if manifest["kind"] == "PyTorchJob":
        return [each["template"] for each in spec["pytorchReplicaSpecs"].values()]
    if manifest["apiVersion"].startswith("batch.volcano.sh"):
        return [task["template"] for task in spec["tasks"]]
    return [spec["template"]] if manifest["kind"] == "Job" else []


def as_pod(template: Manifest) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod", **template["metadata"]},
        "spec": template["spec"],
    }


def assert_valid(manifest: Manifest) -> None:
    """Raises for what the schemas refuse, or what only a server would."""
    key = manifest["apiVersion"].partition("/")[0], manifest["kind"]
    if key in OTHERS:
        _validator(key).validate(manifest)
    else:
        _against_releases(manifest)
    if manifest["kind"] in ("JobSet", "TrainingRuntime"):
        for each in _job_set(manifest)["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", **each["template"]}
            _against_releases({**job, "metadata": {"name": "job", **each["template"].get("metadata", {})}})
    for template in pod_templates(manifest):
        _against_releases(as_pod(template))
    _beyond_schemas(manifest)


def _job_set(manifest: Manifest) -> Manifest:
    """The spec of a JobSet, or of that in a TrainingRuntime."""
    spec: Manifest = manifest["spec"]
    return spec["template"]["spec"] if manifest["kind"] == "TrainingRuntime" else spec


@cache
def _validator(key: tuple[str, str]) -> Validator:
    """Of a kind that is no part of Kubernetes; its schema is checked once."""
    schema = OTHERS[key]
    made = validator_for(schema)
    made.check_schema(schema)
    return made(schema)


def _against_releases(manifest: Manifest) -> None:
    for release in RELEASES:
        kubernetes_validate.validate(manifest, release, strict=True)


def _beyond_schemas(manifest: Manifest) -> None:
    """What the schemas leave to the server: values of enumerations, names, references within the manifest."""
    assert NAME.fullmatch(manifest["metadata"]["name"]), manifest["metadata"]["name"]
    if manifest["kind"] == "CronJob":
        assert len(manifest["metadata"]["name"]) <= 52
        assert manifest["spec"]["concurrencyPolicy"] in ("Allow", "Forbid", "Replace")
        assert len(manifest["spec"]["schedule"].split()) == 5
        assert manifest["spec"]["startingDeadlineSeconds"] >= 10
    for template in pod_templates(manifest):
        spec = template["spec"]
        container, *_ = spec["containers"]  # a patch may add another
        if manifest["kind"] in ("PyTorchJob", "RayJob"):
            assert "restartPolicy" not in spec  # the replica's, or KubeRay's
        else:
            assert spec["restartPolicy"] == "Never"  # the only one that a podFailurePolicy is allowed with
        assert NAME.fullmatch(container["name"]) and NAME.fullmatch(spec.get("subdomain", "none"))
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert sorted(volumes) == sorted({mount["name"] for mount in container["volumeMounts"]})
        for name, amount in container["resources"]["requests"].items():
            assert name not in ("cpu", "memory") or amount != "0", name
    for rule in _failure_rules(manifest):
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["containerName"] == container["name"] and 0 not in rule["onExitCodes"]["values"]


def _failure_rules(manifest: Manifest) -> list[Manifest]:
    spec = manifest["spec"]
    if manifest["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    elif manifest["kind"] in ("JobSet", "TrainingRuntime"):
        spec = _job_set(manifest)["replicatedJobs"][0]["template"]["spec"]
    return list(spec.get("podFailurePolicy", {}).get("rules", []))


def expand(word: str, variables: dict[str, str]) -> str:
    """A word of a pod's command as the kubelet makes it: `$(NAME)` is a variable, if there is such a one; `$$` is `$`."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, word)
