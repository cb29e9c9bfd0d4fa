"""A cluster job of several ranks says which hardware it needs, and what it asks of a node fits its ranks."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from torchx.specs.builders import materialize_appdef

from launch import components, slurm_jobs, slurm_scheduler
from launch.chain import render_chain
from launch.render import render
from launch.resources import PRESETS
from launch.schedule import schedule
from pipeline.runtime.errors import LaunchError
from tests.support.messages import mentions, names

kubernetes_scheduler = pytest.importorskip("launch.extras.volcano_scheduler")

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = ["--no-check-data", "--", "experiment=mlperf_dlrmv2", "data.path=/cluster/alone"]
POD = ["--image", "ours:1", "--cpu", "32", "--memMB", "1000"]
H100 = "hardware=h100_80gb"


def _slurm(*flags: str, words: tuple[str, ...] = (), verb: str = "train") -> tuple[dict[str, str], str]:
    """The options of the script by name, and the script."""
    script = render("slurm", [verb, *flags, *JOB, *words])
    return dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=(.*)", script)), script


def _refused(capsys: pytest.CaptureFixture[str], target: str, *flags: str, words: tuple[str, ...] = ()) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        render(target, ["train", *flags, *JOB, *words])
    said = capsys.readouterr().err.splitlines()
    (error,) = (line for line in said if line.startswith("error: "))
    assert stop.value.code == 2 and error == said[-1]
    return error


@pytest.mark.long
def test_ranks_without_hardware_are_refused_wherever_a_cluster_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """README's own job was given to Slurm without GPUs."""
    flags = "--gpu 8 --h hardware= --gpu 0"
    assert mentions(_refused(capsys, "slurm", "-j", "2x8"), f"16 {flags}")
    for kind in ("job", "jobset", "volcano", "trainjob", "pytorchjob"):
        assert mentions(_refused(capsys, "kubernetes", "-j", "2x8", *POD, "--kind", kind), f"16 {flags}")
    for target, place in (("slurm", []), ("kubernetes", POD)):
        with pytest.raises(SystemExit):
            schedule(target, ["--cron", "@daily", "--verb", "train", "-j", "2x8", *place, *JOB])
        assert mentions(capsys.readouterr().err, flags)
    with pytest.raises(SystemExit):
        render("slurm", ["check_nodes", "-j", "2x1", "--", "folder=/shared"])
    assert mentions(capsys.readouterr().err, "--gpu 1")
    stage = {"image": "ours:1", "cpu": 8, "memMB": 99, "j": "1x2", "overrides": "experiment=quickstart"}
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump({"stages": {"train": stage}}))
    for target in ("slurm", "argo", "compose"):
        with pytest.raises(SystemExit):
            render_chain([target, str(tmp_path / "chain.yaml")])
        assert mentions(capsys.readouterr().err, "1x2 --gpu 2")
    # Nobody is asked for a machine here.
    assert components.train(*JOB[2:], j="1x8", check_data=False).roles[0].resource.gpu == 0
    assert "pipeline agent" in render("torchrun", ["train", "-j", "2x8", "--head", "n1", *JOB])


@pytest.mark.parametrize("scheduler", [slurm_scheduler, kubernetes_scheduler])
def test_torchx_refuses_ranks_without_hardware(scheduler: ModuleType) -> None:
    def submit(*flags: str) -> str:
        typed = ["-j", "2x8", *flags, *POD, "--check_data", "False", *JOB[1:]]
        app = materialize_appdef(components.train, typed)
        return str(scheduler.create_scheduler("test").submit_dryrun(app, {}))

    with pytest.raises(LaunchError, match=names("2x8 --gpu 8")):
        submit()
    assert re.search(r"gpus-per-node=8|nvidia.com/gpu: \"8\"", submit("--gpu", "8"))


@pytest.mark.long
def test_one_flag_says_the_hardware_and_the_rest_follows() -> None:
    shape, script = _slurm("-j", "2x8", "--h", "h100_80gb_x8")
    assert (shape["gpus-per-node"], shape["cpus-per-task"], shape["mem"]) == ("8", "90", "1642000M")
    assert f"pipeline train {H100} experiment=" in " ".join(script.replace("\\\n", "").split())
    shape, script = _slurm("-j", "2x8", words=(H100,))
    assert (shape["gpus-per-node"], shape["cpus-per-task"]) == ("8", "32")  # a GPU and four cores a rank
    shape, script = _slurm("-j", "2x8", "--gpu", "8")
    assert shape["gpus-per-node"] == "8" and "hardware=" not in script
    for flags in (["--gpu", "0"], ["--h", "cpu_8"]):
        shape, script = _slurm("-j", "2x8", *flags)
        assert "gpus-per-node" not in shape and shape["cpus-per-task"] == "8" and "hardware=cpu" in script
    assert "hardware=" not in _slurm("-j", "1x1")[1]  # one rank takes what its node has
    (job,) = yaml.safe_load_all(render("kubernetes", ["train", *POD, "-j", "1x4", *JOB, H100]))
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_the_cards_of_each_named_host_have_a_preset() -> None:
    for preset in PRESETS.values():
        assert (REPOSITORY / "conf" / "hardware" / f"{preset}.yaml").is_file()


@pytest.mark.parametrize(
    ("flags", "words", "message"),
    [
        (["-j", "2x8", "--gpu", "4"], (), "2x8 4 4x4"),
        (["-j", "2x8", "--gpu", "8", "--cpu", "4"], (), "--cpu 4 8 --cpu 32"),
        (["-j", "2x8", "--gres", "gpu:h100:4"], (), "8 4 4x4"),
        (["-j", "2x8", "--sbatch", "--exclusive --gres=gpu:4,nvme:1"], (), "8 4"),
        (["-j", "2x8", "--sbatch", "--gpus-per-task h100:4"], (), "8 4"),
        (["-j", "2x8", "--sbatch=-G 8"], (), "8 4"),
        (["-j", "2x8", "--gpu", "8", "--gres", "gpu:4"], (), "--gpu 8 4"),
        (["-j", "2x8", "--gpu", "8"], ("hardware=cpu",), "8 cpu --gpu 0"),
        (["-j", "2x8", "--gpu", "0"], (H100,), "h100_80gb --gpu 8"),
        (["-j", "2x8", "--h", "cpu_32"], (H100,), "h100_80gb --gpu 8"),
        (["-j", "2x8", "--h", "h100_80gb_x8"], ("hardware=a100_80gb",), "h100_80gb_x8 a100_80gb hardware=h100_80gb"),
        (["-j", "2x8", "--gres", "gpu:a100:8"], (H100,), "a100 h100_80gb"),
        (["-j", "1x16"], (H100,), "1x16 16 8 h100_80gb"),
        (["-j", "2x8", "--gpu", "8", "--sbatch=--gres"], (), "sbatch=--gres"),
        (["-j", "2x8", "--gpu", "8", "--sbatch=--comment='a"], (), "sbatch=--comment"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused_with_the_numbers(
    flags: list[str], words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mentions(_refused(capsys, "slurm", *flags, words=words), message)


@pytest.mark.parametrize(
    "flags",
    [
        ["--gres", "gpu:h100:8(S:0-1)"],
        ["--gres", "nvme:2,gpu:h100:4,gpu:h100:4"],
        ["--sbatch=--gres=gres/gpu:8 --exclusive"],
        ["--sbatch=--gpus-per-node=8"],
        ["--sbatch", "-p gpu -G h100:16"],
    ],
)
def test_gpus_that_slurms_own_options_ask_for_are_not_asked_for_twice(flags: list[str]) -> None:
    shape, script = _slurm("-j", "2x8", *flags, words=(H100,))
    assert script.count("--gpus-per-node") == " ".join(flags).count("--gpus-per-node")
    assert shape["cpus-per-task"] == "32"


def _show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str, partitions: str) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n[ $2 = config ] && echo '{config}' && exit\necho '{partitions}'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


GPU_PARTITION = "PartitionName=gpu Default=NO JobDefaults=DefCpuPerGPU=14\nPartitionName=cpu Default=YES JobDefaults=(null)"  # fmt: skip


def test_cores_are_asked_for_where_the_cluster_gives_none_by_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Eight GPU ranks had one core."""
    _show(monkeypatch, tmp_path, "JobDefaults = (null)", GPU_PARTITION)
    assert "cpus-per-task" not in _slurm("-j", "2x8", "--gpu", "8", "--partition", "gpu")[0]
    shape, script = _slurm("-j", "2x8", "--gpu", "8")
    assert shape["cpus-per-task"] == "32" and "export OMP_NUM_THREADS=4\n" in script
    assert "cpus-per-task" not in _slurm("-j", "2x8", "--gpu", "8", "--sbatch", "-c 48")[0]
    _show(monkeypatch, tmp_path, "JobDefaults = DefCpuPerGPU=2,DefMemPerGPU=100", GPU_PARTITION)
    assert slurm_jobs.gives_cores_by_gpu(None) and slurm_jobs.gives_cores_by_gpu("cpu")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert not slurm_jobs.gives_cores_by_gpu(None)


def test_the_network_of_nccl_is_chosen_on_slurm_as_on_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-j", "2x8", "--gpu", "8", "--network", "infiniband", "--interface", "ib0", "--hca", "mlx5"]
    expected = {"NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "mlx5"}
    _, script = _slurm(*flags, "--env", "NCCL_IB_TIMEOUT=22")
    exported = dict(re.findall(r"(?m)^export (\w+)=(.*)", script))
    assert {**expected, "NCCL_IB_TIMEOUT": "22"}.items() <= exported.items()
    assert "ulimit -l" in script and "ulimit" not in _slurm(*flags[:4], "--network", "tcp")[1]
    _, job = yaml.safe_load_all(render("kubernetes", ["train", *POD, *flags, *JOB]))
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert expected.items() <= {each["name"]: each.get("value") for each in container["env"]}.items()
    for flag, value in {"--network": "infinband", "--hca": "mlx5", "--interface": "ib0; rm"}.items():
        assert mentions(_refused(capsys, "slurm", *flags[:4], flag, value), f"{flag} {value.partition(';')[0]}")
