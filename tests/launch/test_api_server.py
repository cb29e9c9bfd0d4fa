"""A real kube-apiserver takes every manifest, and refuses what it should.

KUBE_APISERVER=/path/kube-apiserver [ETCD=/path/etcd] [KUBE_CRDS=/folder] pytest -m campaign tests/launch/test_api_server.py

KUBE_CRDS is a folder with the published CustomResourceDefinitions of JobSet and of Volcano's Job.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.kubernetes import render_job
from launch.kubernetes_options import KubernetesOptions
from launch.schedule import CronJobOptions, render_cronjob
from launch.workload import Where, Workload, make_workload
from tests.launch.api_server import ApiServer, assert_accepted, left_out
from tests.launch.manifests import as_pod, pod_templates, read

pytestmark = pytest.mark.campaign

ALL_OPTIONS: dict[str, Any] = {
    "namespace": "default", "queue": "team-a", "secret": "s3-keys,mlflow", "secret_mount": {"gcs": "/var/secrets/gcs"},
    "pull_secret": "registry", "service_account": "trainer", "node_selector": {"gpu": "h100"},
    "toleration": {"nvidia.com/gpu": ":NoSchedule", "team": "ads:NoExecute"}, "label": {"cost-centre": "ads"},
    "shm_mb": 4000, "run_as_user": 1234, "deadline_s": 86400, "grace_s": 90,
}  # fmt: skip


def _workload(j: str) -> Workload:
    mounts = "type=volume,src=claim,dst=/workspace,type=bind,src=/scratch,dst=/scratch,readonly"
    where = Where(
        j=j, image="ours:1", cpu=8, gpu=8, memMB=16000, env={"NCCL_DEBUG": "WARN"}, mount=mounts, max_retries=3
    )
    return make_workload("train", None, ["experiment=mlperf_dlrmv2", "data.path=/data"], where, check_data=False)


@pytest.mark.parametrize("j", ["1x8", "2x8"])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
def test_the_server_takes_jobs_cronjobs_and_their_pods(api: ApiServer, j: str, options: dict[str, Any]) -> None:
    workload = _workload(j)
    cron = {"time_zone": "Europe/Berlin", "concurrency": "Replace"} if options else {}
    manifests = [
        *read(render_job(workload, KubernetesOptions(**options))),
        *read(render_cronjob(workload, "*/15 0-6 1,15 * 1-5", CronJobOptions(**options, **cron))),
    ]
    for manifest in manifests:
        assert_accepted(api, manifest)
        for template in pod_templates(manifest):
            assert_accepted(api, as_pod(template))  # a template is checked less than a pod


@pytest.mark.parametrize("kind", ["jobset", "volcano"])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
def test_the_server_takes_kinds_of_others_by_their_published_definitions(
    published: ApiServer, kind: str, options: dict[str, Any]
) -> None:
    if kind == "volcano":
        options = {name: value for name, value in options.items() if name != "deadline_s"}
    (job,) = read(render_job(_workload("2x8"), KubernetesOptions(kind=kind, **options)))
    if published.minor < 25:  # it reads "" as null, and refuses null
        for template in pod_templates(job):
            container = template["spec"]["containers"][0]
            container["command"] = [word or "-" for word in container["command"]]
    assert_accepted(published, job)
    pod_templates(job)[0]["spec"]["contaners"] = ["sh"]
    status, answer = published.try_out(job)
    assert status != 201 or left_out(job, answer)  # an old server drops what it does not know


def test_torchx_submits_lists_describes_and_cancels(
    published: ApiServer, installed: dict[str, str], tmp_path: Path
) -> None:
    """Nobody runs the job here: no Volcano is there. What is tried is the way to the server and back."""
    (tmp_path / "config").write_text(yaml.safe_dump(published.kubeconfig()))
    environ = {**os.environ, **installed, "KUBECONFIG": str(tmp_path / "config"), "DOCKER_HOST": "unix:///no-docker"}
    environ["PYTHONWARNINGS"] = "ignore"  # the client's, of a certificate that it is told not to check

    def torchx(*argv: str) -> str:
        code = "import sys; from torchx.cli.main import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", code, "--log_level", "ERROR", *argv]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    words = ["--check_data", "False", "--", "data=criteo_kaggle", "source=/data/raw.gz"]
    place = ["--image", "ours:1", "--cpu", "2", "--memMB", "4000"]
    said = torchx("run", "-s", "kubernetes", "pipeline.prepare", *place, *words[2:])
    handle = re.search(r"kubernetes://\S+/default:prepare-criteo-kaggle-\w+", said)
    assert handle is not None, said
    assert handle[0].rpartition("/")[2] in torchx("list", "-s", "kubernetes")
    assert "UNKNOWN" in torchx("status", handle[0])  # Volcano would say more
    torchx("cancel", handle[0])
    path = "/apis/batch.volcano.sh/v1alpha1/namespaces/default/jobs"
    assert published.ask("GET", path)[1]["items"] == []
    assert "does not exist" in torchx("status", handle[0])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.schedule", "0 25 * * *"),
        ("spec.schedule", "0 0 * * 7"),
        ("spec.concurrencyPolicy", "Sometimes"),
        ("spec.jobTemplate.spec.template.spec.restartPolicy", "Always"),
        ("spec.jobTemplate.spec.backoffLimit", -1),
        ("metadata.name", "x" * 53),
        ("metadata.labels.team", "two words"),
    ],
)
def test_the_server_refuses_what_it_should(api: ApiServer, path: str, value: Any) -> None:
    (cronjob,) = read(render_cronjob(_workload("1x8"), "0 * * * *", CronJobOptions()))
    changed = copy.deepcopy(cronjob)
    inner: Any = changed
    *walk, last = path.split(".")
    for key in walk:
        inner = inner[key]
    inner[last] = value
    assert_accepted(api, cronjob)
    if api.minor < 21:
        changed["apiVersion"] = "batch/v1beta1"
    assert api.try_out(changed)[0] in (400, 422)
