"""The pods of a manifest meet and train: their own commands, environment and folder, as processes of this machine.

Namespaces of Linux give them a network, and an /etc/hosts in place of the Service: the name of the first pod becomes known
only after its process has started, as it may happen with DNS. No kubelet and no container runtime is in this.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.kubernetes import render_job
from launch.kubernetes_options import KubernetesOptions
from launch.workload import Where, make_workload
from tests.launch.manifests import expand, pod_templates, read

pytestmark = pytest.mark.campaign
REPOSITORY = Path(__file__).resolve().parents[2]
KNOWN_AFTER_S = 20
NAMESPACES = ["unshare", "--mount", "--net", "--uts"]


def _may_unshare() -> bool:
    return subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_unshare(), reason="namespaces of its own need root")
def test_two_pods_meet_at_the_first_before_its_name_is_known_and_train(prepared_clicks: str, tmp_path: Path) -> None:
    words = [
        "experiment=quickstart", "hardware=cpu", f"data.path={prepared_clicks}", f"run_dir={tmp_path / 'run'}",
        "trainer.max_steps=5", "trainer.global_batch_size=256",
    ]  # fmt: skip
    workload = make_workload("train", None, words, Where(j="2x1", image="ours:1", cpu=1, memMB=4000, name="pods"))
    _, job = read(render_job(workload, KubernetesOptions(workdir=str(tmp_path))))
    (container,) = pod_templates(job)[0]["spec"]["containers"]
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    lines = ["ip link set lo up", f"mount --bind {shlex.quote(str(hosts))} /etc/hosts", "hostname localhost"]
    for folder in ("run", "tmp"):  # the pod's volumes; nothing else can be written
        (tmp_path / folder).mkdir()
        lines.append(f"mount --bind {tmp_path / folder} {tmp_path / folder}")
    lines += ["mount -o remount,bind,ro /", f"! touch {tmp_path}/elsewhere 2> /dev/null || exit 99"]
    for node in (1, 0):  # the first pod is the last to start
        command = [expand(word, {"JOB_COMPLETION_INDEX": str(node)}) for word in container["command"]]
        command[0] = sys.executable  # the image's python
        lines.append(f'{shlex.join(command)} > {tmp_path}/tmp/pod-{node}.log 2>&1 & pods="$pods $!"')
    lines += [f"sleep {KNOWN_AFTER_S}", "echo 127.0.0.1 pods-0.pods >> /etc/hosts"]
    lines += ["code=0; for pod in $pods; do wait $pod || code=$?; done; exit $code"]
    environ = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": f"{tmp_path}/tmp",
        **{each["name"]: each["value"] for each in container["env"]},
    }
    done = subprocess.run(
        [*NAMESPACES, "sh", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
    )
    logs = "\n".join((tmp_path / "tmp" / f"pod-{node}.log").read_text()[-3000:] for node in (0, 1))
    assert done.returncode == 0, done.stderr + logs
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 5, logs
