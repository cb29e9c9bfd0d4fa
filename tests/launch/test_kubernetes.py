"""Manifests run the job that was typed, hold against Kubernetes' schemas, and tell no secret."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launch.kubernetes import render_job
from launch.kubernetes_options import KubernetesOptions
from launch.manifest import to_yaml
from launch.render import render
from launch.workload import Mount, Where, Workload, make_workload
from pipeline.runtime.errors import LaunchError
from pipeline.runtime.process.exit_codes import FINAL
from tests.launch.manifests import as_pod, assert_valid, expand, pod_templates, read
from tests.support.datasets import described_dataset
from tests.support.messages import mentions, names

PLACE = ["--image", "ours:1", "--cpu", "8", "--gpu", "0", "--memMB", "16000"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    (folder / "dataset.json").write_text(described_dataset({"cat_0": 10}, num_dense=13, num_rows=4096).to_json())
    return f"data.path={folder}"


@functools.cache
def _workload(data: str, j: str = "1x1", *words: str) -> Workload:
    where = Where(j=j, image="ours:1", cpu=8, gpu=0, memMB=16000)
    return make_workload("train", None, ["experiment=quickstart", data, *words], where)


def _manifests(workload: Workload, **options: Any) -> list[dict[str, Any]]:
    return read(render_job(workload, KubernetesOptions(**options)))


@functools.cache
def _with_all_options(data: str, kind: str) -> str:
    return render("kubernetes", ["train", *PLACE, *FULL, "--kind", kind, "--", "experiment=quickstart", data])


def _container(manifest: dict[str, Any]) -> dict[str, Any]:
    (template,) = pod_templates(manifest)
    (container,) = template["spec"]["containers"]
    return dict(container)


FULL = [
    "-j", "2x8", "--gpu", "8", "--queue", "team-a", "--namespace", "ads", "--max-retries", "3", "--env", "NCCL_DEBUG=WARN",
    "--mount", "type=volume,src=claim,dst=/workspace,type=bind,src=/scratch,dst=/scratch,readonly",
    "--secret", "s3-keys,mlflow", "--secret-mount", "gcs=/var/secrets/gcs", "--pull-secret", "registry",
    "--service-account", "trainer", "--priority-class", "high", "--node-selector", "gpu=h100",
    "--toleration", "nvidia.com/gpu=:NoSchedule", "--toleration", "team=ads:NoExecute", "--label", "cost-centre=ads",
    "--shm-mb", "4000", "--run-as-user", "1234", "--fs-group", "1234", "--grace-s", "90",
    "--resource", "rdma/hca=8", "--resource", "hugepages-2Mi=5120Mi", "--ephemeral-mb", "50000", "--capability", "IPC_LOCK",
    "--host-network", "--network", "infiniband", "--together", "example.com/rack", "--pull-policy", "Always",
    "--runtime-class", "nvidia", "--annotation", "sidecar.istio.io/inject=false", "--annotation", "k8s.v1.cni.cncf.io/networks=ib0",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["job", "jobset", "volcano", "trainjob", "pytorchjob"])
def test_manifests_hold_against_the_schemas(data: str, kind: str) -> None:
    one, two = _manifests(_workload(data), kind=kind), _manifests(_workload(data, "2x4"), kind=kind)
    for manifest in [*one, *two, *read(_with_all_options(data, kind))]:
        assert_valid(manifest)


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("prepare", ["data=criteo_kaggle", "source=/data/raw/*.gz"]),
        ("plan", ["experiment=mlperf_dlrmv2", "hardware=h200", "world_size=8"]),
        ("evaluate", ["run=/workspace/runs/quickstart", "split=validation"]),
    ],
)
def test_every_verb_has_a_manifest(verb: str, words: list[str]) -> None:
    (job,) = read(render("kubernetes", [verb, *PLACE, "--no-check-data", "--", *words]))
    assert_valid(job)
    assert _container(job)["command"][-len(words) :] == words


def test_pods_meet_at_the_first_by_a_name_that_the_service_makes_known(data: str) -> None:
    service, job = _manifests(replace(_workload(data, "2x4"), max_retries=3), meeting_timeout_s=300)
    (template,) = pod_templates(job)
    assert template["spec"]["subdomain"] == service["metadata"]["name"] == "quickstart"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 6  # three times both
    words = [expand(word, {"JOB_COMPLETION_INDEX": "1"}) for word in _container(job)["command"]]
    given = dict(zip(words[4:-6:2], words[5:-6:2], strict=True))
    assert words[:4] == ["python", "-m", "pipeline", "agent"]  # no shell
    assert given["--rdzv-endpoint"] == "quickstart-0.quickstart:29500" and given["--node-rank"] == "1"
    assert given["--nnodes"] == "2" and given["--nproc-per-node"] == "4" and given["--rdzv-id"] == "quickstart"
    assert given["--rdzv-conf"] == "join_timeout=300,read_timeout=300"
    assert given["--log-dir"] == "runs/quickstart/logs"
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in _container(job)["env"]


def test_a_jobset_restarts_its_pods_together(data: str) -> None:
    (jobset,) = _manifests(replace(_workload(data, "2x4"), max_retries=3), kind="jobset")
    spec = jobset["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert spec["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0
    command = _container(jobset)["command"]
    assert command[command.index("--rdzv-endpoint") + 1] == "quickstart-node-0-0.quickstart:29500"


def test_volcano_has_a_task_a_node_and_takes_exit_codes_for_what_they_are(data: str) -> None:
    (job,) = _manifests(_workload(data, "2x4"), kind="volcano", queue="ads")
    spec = job["spec"]
    assert (spec["queue"], spec["minAvailable"], [task["name"] for task in spec["tasks"]]) == ("ads", 2, ["train-0", "train-1"])  # fmt: skip
    for node, template in enumerate(pod_templates(job)):
        command = template["spec"]["containers"][0]["command"]
        assert command[command.index("--rdzv-endpoint") + 1] == "quickstart-train-0-0.quickstart:29500"
        assert command[command.index("--node-rank") + 1] == str(node)
    policies = [(each.get("exitCode") or each["event"], each["action"]) for each in spec["policies"]]
    assert policies[0] == (2, "TerminateJob") and (130, "TerminateJob") in policies
    assert policies[-3:] == [(75, "RestartJob"), ("PodEvicted", "RestartJob"), ("PodFailed", "TerminateJob")]
    (again,) = _manifests(replace(_workload(data, "2x4"), max_retries=5), kind="volcano")
    assert again["spec"]["maxRetry"] == 5 and again["spec"]["policies"][-1]["action"] == "RestartJob"
    with pytest.raises(LaunchError, match=names("53")):
        _manifests(replace(_workload(data, "2x4"), name="x" * 54), kind="volcano")


def test_kubeflow_trainer_runs_a_runtime_of_the_jobs_own(data: str) -> None:
    runtime, job = _manifests(
        replace(_workload(data, "2x4"), max_retries=3), kind="trainjob", queue="ads", deadline_s=99
    )
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] and runtime["spec"]["mlPolicy"] == {
        "numNodes": 2
    }
    assert job["spec"]["suspend"] and job["spec"]["activeDeadlineSeconds"] == 99
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "ads"
    (nodes,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert nodes["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    inner = nodes["template"]["spec"]
    assert "activeDeadlineSeconds" not in inner and "suspend" not in inner and inner["completions"] == 2
    container = _container(runtime)
    assert container["name"] == nodes["name"] == "node"  # where Trainer looks for it
    command = container["command"]
    assert command[command.index("--rdzv-endpoint") + 1] == "quickstart-node-0-0.quickstart:29500"
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 3


def test_a_pytorchjob_has_a_master_and_workers_that_the_operator_numbers(data: str) -> None:
    (job,) = _manifests(replace(_workload(data, "4x4"), max_retries=2), kind="pytorchjob", queue="ads")
    master, worker = (job["spec"]["pytorchReplicaSpecs"][name] for name in ("Master", "Worker"))
    assert (master["replicas"], worker["replicas"], worker["restartPolicy"]) == (1, 3, "OnFailure")
    assert job["spec"]["runPolicy"]["backoffLimit"] == 8 and job["spec"]["runPolicy"]["suspend"]
    for replica, node in ((master, "0"), (worker, "2")):
        (container,) = replica["template"]["spec"]["containers"]
        words = [expand(word, {"RANK": "2"}) for word in container["command"]]
        assert words[words.index("--rdzv-endpoint") + 1] == "quickstart-master-0:29500"
        assert words[words.index("--node-rank") + 1] == node
        assert container["name"] == "pytorch" and container["ports"][0]["name"] == "pytorchjob-port"
    (alone,) = _manifests(_workload(data), kind="pytorchjob")
    assert list(alone["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert alone["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "Never"


def test_one_pod_needs_no_service_and_no_fixed_port(data: str) -> None:
    (job,) = _manifests(_workload(data))
    container = _container(job)
    assert (
        "ports" not in container and "localhost:0" in container["command"] and "--node-rank" not in container["command"]
    )


def test_exit_codes_decide_what_becomes_of_a_failed_pod(data: str) -> None:
    (job,) = _manifests(_workload(data))
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", sorted(FINAL - {75})), ("Ignore", [75]), ("Ignore", None),
    ]  # fmt: skip
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_pods_have_the_time_that_their_ranks_need_to_save(data: str) -> None:
    patient = _workload(data, "1x1", "trainer.grace_s=120")

    def seconds(workload: Workload, **options: Any) -> int:
        (job,) = _manifests(workload, **options)
        return int(job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])

    assert (seconds(patient), seconds(replace(patient, grace_s=10.0)), seconds(patient, grace_s=300)) == (125, 30, 300)
    with pytest.raises(LaunchError, match=names("60 125")):
        seconds(patient, grace_s=60)


@pytest.mark.parametrize(
    "word", ["name=two words", "name='$HOME and $$(PATH) $(JOB_COMPLETION_INDEX)'", "tables={cat_0: {pooling: mean}}"]
)
def test_an_override_reaches_the_verb_as_it_was_typed(data: str, word: str) -> None:
    (job,) = _manifests(_workload(data, "1x1", word))
    variables = {"JOB_COMPLETION_INDEX": "0", "PATH": "/bin", "HOME": "/root"}
    assert expand(_container(job)["command"][-1], variables) == word


def test_pods_are_not_root_and_get_what_they_ask_for(data: str) -> None:
    *_, job = read(_with_all_options(data, "job"))
    (template,) = pod_templates(job)
    spec, container = template["spec"], _container(job)
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1234
    rights = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }
    assert container["securityContext"] == rights
    assert container["resources"]["limits"] == {
        "cpu": "8", "memory": "16000Mi", "nvidia.com/gpu": "8", "ephemeral-storage": "50000Mi", "rdma/hca": "8",
        "hugepages-2Mi": "5120Mi",
    }  # fmt: skip
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert {"name": "NCCL_NET", "value": "IB"} in container["env"] and container["imagePullPolicy"] == "Always"
    assert (
        spec["runtimeClassName"] == "nvidia" and spec["hostNetwork"] and spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    )
    (near,) = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["topologyKey"] == "example.com/rack"
    assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    assert spec["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "ads", "effect": "NoExecute"},
    ]
    shared = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "4000Mi"}
    assert job["spec"]["suspend"] and job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"


def test_secrets_are_named_and_never_told(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-value")
    (job,) = _manifests(_workload(data), secret="s3-keys,mlflow")
    assert _container(job)["envFrom"] == [{"secretRef": {"name": "s3-keys"}}, {"secretRef": {"name": "mlflow"}}]
    for env in ("AWS_SECRET_ACCESS_KEY=abcdefghijk", "URL=https://user:password@host/path", "X=very-secret-value"):
        with pytest.raises(SystemExit):
            render("kubernetes", ["train", *PLACE, "--env", env, "--", "experiment=quickstart", data])
        captured = capsys.readouterr()
        assert "looks like a credential" in captured.err and "Kubernetes: a Secret" in captured.err
        assert not any(value in captured.err + captured.out for value in ("abcdefghijk", "password@", "very-secret"))


def test_a_run_folder_that_goes_with_its_pod_is_pointed_out(data: str) -> None:
    lost = render_job(_workload(data), KubernetesOptions())
    assert "# WARNING: runs/quickstart/logs is inside the pod and is lost with it" in lost
    assert "# WARNING" not in _with_all_options(data, "job")


def test_nothing_can_be_written_but_tmp_and_volumes(data: str) -> None:
    def written(workload: Workload, **options: Any) -> dict[str, str]:
        (job,) = _manifests(workload, **options)
        assert_valid(job)
        return {each["name"]: each["mountPath"] for each in _container(job)["volumeMounts"] if "readOnly" not in each}

    assert written(_workload(data)) == {"shm": "/dev/shm", "tmp": "/tmp", "run": "/workspace/runs/quickstart"}
    claim = Mount("volume", "claim", "/workspace")
    assert written(replace(_workload(data), mounts=[claim])) == {
        "shm": "/dev/shm", "tmp": "/tmp", "mount-0": "/workspace",
    }  # fmt: skip
    scratch = Mount("bind", "/scratch", "/tmp")
    assert written(replace(_workload(data), mounts=[claim, scratch])).get("tmp") is None
    (job,) = _manifests(_workload(data), read_only_root=False)
    assert _container(job)["securityContext"]["readOnlyRootFilesystem"] is False
    assert written(_workload(data), read_only_root=False) == {"shm": "/dev/shm"}


UID = "0f2b9c1e-6f5b-4b7e-9a55-3c1d2e4f5a6b"


def test_another_attempt_has_names_of_its_own_and_the_same_run_folder(data: str) -> None:
    first, again = (_manifests(_workload(data, "2x4"), attempt=attempt) for attempt in (None, "b7"))
    assert [each["metadata"]["name"] for each in again] == ["quickstart-b7", "quickstart-b7"]
    (template,) = pod_templates(again[1])
    assert again[0]["spec"]["selector"].items() <= template["metadata"]["labels"].items()  # not the other's pods
    assert template["spec"]["subdomain"] == "quickstart-b7"
    words, before = _container(again[1])["command"], _container(first[1])["command"]
    assert words[words.index("--rdzv-endpoint") + 1] == "quickstart-b7-0.quickstart-b7:29500"
    assert words[words.index("--log-dir") + 1] == before[before.index("--log-dir") + 1] and words[-2:] == before[-2:]
    long = replace(_workload(data), name="x" * 50)
    made = {_manifests(long, attempt="auto")[0]["metadata"]["name"] for _ in range(5)}
    assert len(made) == 5 and {len(name) for name in made} == {50}


def test_a_service_goes_with_the_job_that_owns_it(data: str) -> None:
    service, job = _manifests(_workload(data, "2x4"), owner=UID)
    assert_valid(service)
    assert service["metadata"]["ownerReferences"] == [
        {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"], "uid": UID}
    ]
    assert "ownerReferences" not in job["metadata"]


PATCH = """
kind: Job
spec:
  backoffLimit: 9
  podFailurePolicy: null
  template:
    metadata: {annotations: {a: b}}
    spec:
      schedulerName: fast
      containers:
        - {name: main, env: [{name: OMP_NUM_THREADS, value: "3"}, {name: EXTRA, value: x}], tty: true}
        - {name: sidecar, image: "side:1"}
---
kind: Service
metadata: {annotations: {c: d}}
"""


def test_a_patch_is_merged_as_kubectl_merges_it(data: str, tmp_path: Path) -> None:
    (tmp_path / "patch.yaml").write_text(PATCH)
    plain, changed = (_manifests(_workload(data, "2x4"), patch=path) for path in (None, str(tmp_path / "patch.yaml")))
    (service, job), (_, before) = changed, plain
    for manifest in changed:
        assert_valid(manifest)
    assert service["metadata"]["annotations"] == {"c": "d"} and service["spec"] == plain[0]["spec"]
    assert job["spec"]["backoffLimit"] == 9 and "podFailurePolicy" not in job["spec"]
    pod = job["spec"]["template"]["spec"]
    main, sidecar = pod["containers"]
    assert pod["schedulerName"] == "fast" and main["tty"] and sidecar["image"] == "side:1"
    env = {each["name"]: each["value"] for each in main["env"]}
    assert env == {**{e["name"]: e["value"] for e in _container(before)["env"]}, "OMP_NUM_THREADS": "3", "EXTRA": "x"}
    assert main["command"] == _container(before)["command"]
    (tmp_path / "patch.yaml").write_text("kind: Deployment\n")
    with pytest.raises(LaunchError, match=names("patch.yaml Deployment Service, Job")):
        _manifests(_workload(data, "2x4"), patch=str(tmp_path / "patch.yaml"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image", "ours:1"], "--cpu --memMB"),
        (["--cpu", "1", "--memMB", "1"], "--image"),
        ([*PLACE, "--mount", "type=device,src=/dev/fuse,dst=/dev/fuse"], "device plugin"),
        ([*PLACE, "--kind", "jobsets"], "jobset"),
        ([*PLACE, "--kind", "volcano", "--deadline-s", "9"], "Volcano"),
        ([*PLACE, "--namespace", "My_Team"], "My_Team"),
        ([*PLACE, "--toleration", "a=b:NoScheduling"], "NoSchedule"),
        ([*PLACE, "--secret-mount", "gcs=var"], "gcs=var NAME=/path"),
        ([*PLACE, "--workdir", "workspace"], "give a path that begins with /"),
        ([*PLACE, "--run-as-user", "0"], "root"),
        ([*PLACE, "-j", "2x1", "--name", "1tb"], "must begin with a letter"),
        ([*PLACE, "--kind", "trainjob", "--name", "1tb"], "must begin with a letter"),
        ([*PLACE, "--node-selector", "gpu"], "NAME=VALUE"),
        ([*PLACE, "--resource", "rdma=8"], "rdma=8 rdma/hca=8"),
        ([*PLACE, "--resource", "rdma/hca=all"], "rdma/hca=all"),
        ([*PLACE, "--capability", "cap_ipc_lock"], "cap_ipc_lock IPC_LOCK"),
        ([*PLACE, "--network", "infinband"], "infiniband"),
        ([*PLACE, "--pull-policy", "Never!"], "Never"),
        ([*PLACE, "--attempt", "Second"], "--attempt Second"),
        ([*PLACE, "--owner", "me"], "--owner me"),
        ([*PLACE, "--owner", UID, "--kind", "jobset"], "--owner jobset"),
        ([*PLACE, "--patch", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_what_kubernetes_cannot_have_is_said_here(
    data: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        render("kubernetes", ["train", *flags, "--", "experiment=quickstart", data])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and mentions(err, message) and err.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["1e3", "0o7", "yes", "1_000", "12:30:45", "~", "null", " a", "a: b", "- a", "#", "", "a\nb", "ü"]
)
def test_text_stays_text_in_yaml(text: str) -> None:
    written = to_yaml([{"value": text, "list": [text]}])
    assert yaml.safe_load(written) == {"value": text, "list": [text]}
    if text not in ("a: b", " a", "- a", "ü"):  # readers of other versions of YAML see numbers, booleans or nothing
        assert '"' in written


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("restartPolicy",), "Sometimes"),
        (("containers", 0, "comand"), ["sh"]),
        (("volumes", 0, "name"), "other"),
        (("subdomain",), "Upper_Case"),
    ],
)
def test_the_validation_sees_mistakes(data: str, path: tuple[Any, ...], value: Any) -> None:
    (job,) = _manifests(_workload(data))
    inner: Any = pod_templates(job)[0]["spec"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises((AssertionError, jsonschema.ValidationError)):
        assert_valid(job)
    assert as_pod(pod_templates(job)[0])["spec"] is pod_templates(job)[0]["spec"]
