"""A real kube-apiserver takes all that is printed for a cluster, of every kind, and refuses what rules in CEL or its code forbid.

KUBE_APISERVER=/path/kube-apiserver [ETCD=/path/etcd] KUBE_CRDS=/folder pytest -m campaign -s tests/launch/test_api_server_kinds.py

KUBE_CRDS is a folder with CustomResourceDefinitions as their projects publish them: JobSet's, Volcano's, Kubeflow's (TrainJob,
TrainingRuntime, PyTorchJob), KubeRay's RayJob, the Prometheus Operator's ServiceMonitor and Argo's Workflow.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.chain import render_chain
from launch.render import render
from launch.schedule import schedule
from tests.launch.api_server import ApiServer, Manifest, assert_accepted
from tests.launch.manifests import as_pod, pod_templates, read
from tests.launch.test_chain import TWO_NODES
from tests.launch.test_kubernetes import FULL, PLACE
from tests.launch.test_published_kinds import PLAIN, TRAIN
from tests.launch.test_ray import JOB

pytestmark = pytest.mark.campaign

VOLUME = ["--mount", "type=volume,src=runs,dst=/workspace"]
PATCH = """
kind: Job
spec: {template: {spec: {topologySpreadConstraints: [
  {maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {a: b}}}]}}}
"""
KINDS = ("job", "jobset", "volcano", "trainjob", "pytorchjob")
PRINTED = {
    **{f"train {kind}": ["kubernetes", "train", *PLACE, *PLAIN, "--kind", kind, *TRAIN] for kind in KINDS},
    **{f"train {kind}, all flags": ["kubernetes", "train", *PLACE, *FULL, "--kind", kind, *TRAIN] for kind in KINDS},
    "train, nodes that come and go": ["kubernetes", "train", *PLACE, *VOLUME, "-j", "1:2x1", "--no-check-data", "--", "experiment=quickstart"],
    "train, owned and again": ["kubernetes", "train", *PLACE, *PLAIN, "--attempt", "2", "--owner", "7e4a1f6c-1111-2222-3333-444444444444", *TRAIN],
    "check_nodes": ["kubernetes", "check_nodes", *PLACE, "-j", "2x1", "--gpu", "8", "--", "folder=/shared/runs"],
    "predict in shards": ["kubernetes", "predict", *PLACE, "--", "artifact=a", "source=rows/", "output=o.parquet", "num_shards=8"],
    "prepare by Ray": ["kubernetes", "prepare", *PLACE, "-j", "3x1", "--max-retries", "2", "--", *JOB],
    "serve": ["serving", "serve", *PLACE, "--replicas", "1", "--", "artifact=/registry/clicks"],
    "serve, all flags": [
        "serving", "serve", *PLACE, *VOLUME, "--replicas", "3", "--max-replicas", "9", "--latency-ms", "20", "--monitor", "--scrape-s", "5",
        "--label", "release=prom", "--", "artifact=/registry/clicks",
    ],
}  # fmt: skip


def _everything_of(text: str) -> list[Manifest]:
    """The objects, and each pod template as a pod: a template is checked less than a pod."""
    manifests = read(text)
    return [*manifests, *(as_pod(template) for each in manifests for template in _templates(each))]


def _templates(manifest: Manifest) -> list[Manifest]:
    if manifest["kind"] == "Deployment":
        return [manifest["spec"]["template"]]
    return pod_templates(manifest) if "template" in str(manifest["spec"]) else []


@pytest.fixture(scope="module")
def cluster(published: ApiServer) -> ApiServer:
    """With the namespace and the priority that the flags name."""
    namespace: Manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ads"}}
    published.create(namespace, "/api/v1/namespaces")
    strict = {"name": "strict", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    published.create({**namespace, "metadata": strict}, "/api/v1/namespaces")
    high = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1000}
    published.create(high, "/apis/scheduling.k8s.io/v1/priorityclasses")
    return published


@pytest.mark.parametrize("name", PRINTED)
def test_the_server_takes_all_that_is_printed(cluster: ApiServer, name: str) -> None:
    found = _everything_of(render(PRINTED[name][0], PRINTED[name][1:]))
    assert found
    for manifest in found:
        if not cluster.serves(manifest):
            pytest.skip(f"KUBE_CRDS has no definition of {manifest['apiVersion']} {manifest['kind']}")
        assert_accepted(cluster, manifest)


def test_the_server_takes_what_a_patch_made(cluster: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "patch.yaml").write_text(PATCH)
    words = ["train", *PLACE, *PLAIN, "--patch", str(tmp_path / "patch.yaml"), *TRAIN]
    for manifest in _everything_of(render("kubernetes", words)):
        assert_accepted(cluster, manifest)
    assert "topologySpreadConstraints" in str(manifest)


def test_the_server_takes_a_chain_of_argo_and_what_its_stages_create(cluster: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "chain.yaml").write_text(TWO_NODES)
    (workflow,) = read(render_chain(["argo", str(tmp_path / "chain.yaml"), "--queue", "ads"]))
    if not cluster.serves(workflow):
        pytest.skip("KUBE_CRDS has no definition of Argo's Workflow")
    assert_accepted(cluster, workflow)
    made = [each["resource"]["manifest"] for each in workflow["spec"]["templates"] if "resource" in each]
    assert len(made) == 4  # the JobSet; the Deployment, its Service and its PodDisruptionBudget
    for text in made:
        for manifest in _everything_of(text.replace("{{workflow.name}}", "clicks-x7k2p")):
            assert_accepted(cluster, manifest)
    assert cluster.try_out({**workflow, "spec": {**workflow["spec"], "entrypont": "dag"}})[0] == 400


def test_the_server_takes_cron_jobs(cluster: ApiServer) -> None:
    words = ["--cron", "*/15 0-6 1,15 * 1-5", "--time-zone", "Europe/Berlin", *PLACE, "-j", "2x8", "--gpu", "8"]
    text = schedule("kubernetes", [*words, "--no-check-data", "--", "experiment=criteo_kaggle_dlrm", "source=clicks"])
    kinds = [assert_accepted(cluster, manifest)["kind"] for manifest in _everything_of(text)]
    assert kinds == ["Service", "CronJob", "Pod"]


@pytest.mark.parametrize("name", ["train job", "train jobset", "check_nodes", "predict in shards", "serve"])
def test_pods_may_run_where_only_restricted_ones_may(cluster: ApiServer, name: str) -> None:
    """Pod Security's strictest level, by the server's own admission."""
    text = render(PRINTED[name][0], PRINTED[name][1:])
    pods = [as_pod(template) for manifest in read(text) for template in _templates(manifest)]
    for pod in pods:
        pod["metadata"]["namespace"] = "strict"
        assert_accepted(cluster, pod)
        pod["spec"]["containers"][0]["securityContext"]["capabilities"] = {"add": ["SYS_ADMIN"]}
        status, answer = cluster.try_out(pod)
        assert status == 403 and "restricted" in answer["message"], answer
    assert pods


MISTAKES: list[tuple[str, str, str, Any]] = [
    ("train trainjob", "TrainJob", "spec.managedBy", "somebody/else"),
    ("train trainjob", "TrainJob", "spec.suspended", True),
    ("train trainjob", "TrainingRuntime", "spec.mlPolicy.torch", {"numProcPerNode": 8, "more": 1}),
    ("train trainjob", "TrainJob", "metadata.name", "9clicks"),
    ("train jobset", "JobSet", "spec.failurePolicy.restartStrategy", "Sometimes"),
    ("train jobset", "JobSet", "spec.network.subdomane", "a"),
    ("train volcano", "Job", "spec.policies", [{"event": "PodFaild", "action": "RestartJob"}]),
    ("train pytorchjob", "PyTorchJob", "spec.pytorchReplicaSpecs.Worker.replicas", "two"),
    ("train pytorchjob", "PyTorchJob", "spec.runPolicy.cleanPod", "All"),
    ("train job", "Job", "spec.podFailurePolicy.rules.0.onExitCodes.operator", "Within"),
    ("train job", "Job", "spec.template.spec.restartPolicy", "OnFailure"),
    ("serve, all flags", "HorizontalPodAutoscaler", "spec.maxReplicas", 2),
    ("serve, all flags", "Deployment", "spec.selector.matchLabels.app", "other"),
    ("serve, all flags", "PodDisruptionBudget", "spec.minAvailable", 1),
    ("serve, all flags", "ServiceMonitor", "spec.endpoints.0.interval", "5 seconds"),
    ("serve, all flags", "Service", "spec.ports.0.targetPort", "no_port"),
    ("prepare by Ray", "RayJob", "spec.submissionMod", "K8sJobMode"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "path", "value"), MISTAKES)
def test_the_server_refuses_a_planted_mistake(cluster: ApiServer, name: str, kind: str, path: str, value: Any) -> None:
    manifest = next(each for each in read(render(PRINTED[name][0], PRINTED[name][1:])) if each["kind"] == kind)
    if not cluster.serves(manifest):
        pytest.skip(f"KUBE_CRDS has no definition of {kind}")
    assert_accepted(cluster, manifest)
    changed = copy.deepcopy(manifest)
    inner: Any = changed
    *walk, last = path.split(".")
    for key in walk:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    status, answer = cluster.try_out(changed)
    assert status in (400, 422), f"{status}: {yaml.safe_dump(changed)}"
    print(f"refused: {answer['message'][:160]}")
