"""A component emits the job that was typed, or says what is wrong with it before anything is submitted."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from torchx import specs
from torchx.specs.builders import materialize_appdef
from torchx.specs.file_linter import validate

from launch import components
from launch.render import main as render_main
from launch.render import render
from launch.resources import CLOUD_HOSTS, Host, asked_host, named_host, parse_shape, this_host
from launch.workload import Workload
from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import save_job
from tests.launch.manifests import expand
from tests.support.datasets import described_dataset
from tests.support.messages import mentions, names

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "dataset.json").write_text(described_dataset({"cat_0": 10}, num_dense=13, num_rows=4096).to_json())
    return f"data.path={tmp_path}"


def _command(app: specs.AppDef) -> list[str]:
    """The words of the role's shell command, as the scheduler will write them."""
    (role,) = app.roles
    values = specs.macros.Values(img_root="", app_id="job-1", replica_id="0", rank0_env="HOST_0")
    return shlex.split(values.apply(role).args[1])


def test_train_runs_an_agent_with_logs_in_the_run_folder(data: str) -> None:
    app = components.train("experiment=quickstart", data, j="1x2", cpu=8)
    words = _command(app)
    assert words[:7] == ["exec", sys.executable, "-m", "pipeline", "agent", "--grace-s", "30"]
    torchrun = dict(zip(words[7:-5:2], words[8:-5:2], strict=True))
    assert torchrun == {
        "--rdzv-endpoint": "localhost:0", "--nnodes": "1", "--nproc-per-node": "2", "--max-restarts": "3", "--rdzv-backend": "c10d",
        "--rdzv-id": "job-1", "--tee": "3", "--local-ranks-filter": "0", "--log-dir": "runs/quickstart/logs", "--role": "",
    }  # fmt: skip
    assert words[-5:] == ["-m", "pipeline", "train", "experiment=quickstart", data]
    (role,) = app.roles
    assert (app.name, role.num_replicas, role.env["OMP_NUM_THREADS"]) == ("quickstart", 1, "4")


def test_what_is_typed_behind_torchx_run_reaches_the_component_as_numbers(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["-j", "1x2", "--cpu", "8", "--gpu", "2", "--memMB", "9000", "--max_retries", "3", "--", "experiment=quickstart", data]  # fmt: skip
    (role,) = materialize_appdef(components.train, typed).roles
    assert (role.resource.cpu, role.resource.gpu, role.resource.memMB, role.max_retries) == (8, 2, 9000, 3)
    with pytest.raises(SystemExit):
        materialize_appdef(components.train, [*typed[:2], "--cpu", "many", *typed[10:]])
    assert capsys.readouterr().err == "error: --cpu many: give a whole number of at least 1, or remove it\n"


def test_nodes_meet_at_the_first_one(data: str) -> None:
    app = components.train("experiment=quickstart", data, j="2x4", image="ours:1", env={"A": "1"}, max_retries=3)
    (role,) = app.roles
    assert "${HOST_0:=localhost}:29500" in _command(app)
    assert _command(app)[1] == "python"  # the image's own
    assert (role.num_replicas, role.max_retries, role.image, role.env["A"]) == (2, 3, "ours:1", "1")


@pytest.mark.parametrize("word", ["name=two words", "run_dir=out/${name}", "name='$HOME and $$'", "tables={cat_0: {pooling: mean}}"])  # fmt: skip
def test_an_override_reaches_the_verb_as_it_was_typed(data: str, word: str) -> None:
    app = components.train("experiment=quickstart", data, word)
    assert _command(app)[-1] == word


@pytest.mark.parametrize(
    ("overrides", "j", "message"),
    [
        (["experiment=quickstrat"], "1x2", "quickstart"),
        (["experiment=quickstart", "data.path=/nowhere"], "1x2", "python -m pipeline prepare data=quickstart"),
        (["experiment=quickstart"], "1x3", "3 ranks"),
        (["experiment=quickstart", "world_size=4"], "1x2", "world_size=4 1x2"),
        (["experiment=quickstart"], "1y2", "1y2 NODESxRANKS_PER_NODE"),
        (["experiment=quickstart"], "0x2", "0x2 NODESxRANKS_PER_NODE"),
    ],
)
def test_a_wrong_job_is_never_submitted(
    data: str, overrides: list[str], j: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        components.train(overrides[0], data, *overrides[1:], j=j)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert mentions(err, message) and err.startswith("error: ") and err.count("\n") == 1


def test_data_that_only_the_cluster_sees_are_not_asked_for() -> None:
    app = components.train("experiment=mlperf_dlrmv2", "data.path=/scratch/criteo", j="8x8", check_data=False)
    assert app.roles[0].num_replicas == 8
    assert "--log-dir" not in _command(components.evaluate("run=s3://bucket/run", check_data=False))


def test_the_other_components(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prepare,) = components.prepare("data=criteo_kaggle", "source=raw/*.gz").roles
    assert [prepare.entrypoint, *prepare.args] == [
        sys.executable, "-u", "-m", "pipeline", "prepare", "data=criteo_kaggle", "source=raw/*.gz",
    ]  # fmt: skip
    (plan,) = components.plan("experiment=quickstart", data, "world_size=8", "hardware=h200").roles
    assert plan.args[2:] == ["pipeline", "plan", "experiment=quickstart", data, "world_size=8", "hardware=h200"]
    save_job(load_config(TrainJob, ["experiment=quickstart", data]), str(tmp_path / "config.yaml"))
    evaluate = components.evaluate(f"run={tmp_path}", "split=validation", j="1x4")
    assert _command(evaluate)[-3:] == ["evaluate", f"run={tmp_path}", "split=validation"]
    with pytest.raises(SystemExit):
        components.evaluate("run=/nowhere")
    assert "is that a run folder?" in capsys.readouterr().err


def test_help_after_the_dashes_is_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        components.train("--help")
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert out.startswith("Train: torchx run") and "quickstart_deepfm" in out and "Args:" not in out


def test_torchx_accepts_every_component() -> None:
    source = str(REPOSITORY / "launch" / "components.py")
    for name in ("train", "evaluate", "prepare", "plan", "export", "retrain", "predict", "serve"):
        assert validate(source, name) == []


PREDICT = ["artifact=a", "source=rows/*.csv", "output=scores/today.parquet"]


def test_shards_of_a_prediction_are_tasks_of_an_array(capsys: pytest.CaptureFixture[str]) -> None:
    (role,) = components.predict(*PREDICT, "num_shards=8", cpu=2, memMB=1000).roles
    values = specs.macros.Values(img_root="", app_id="job-1", replica_id="3", rank0_env="HOST_0")
    assert role.num_replicas == 8 and values.apply(role).args[-2:] == ["num_shards=8", "shard=3"]
    (role,) = components.predict(*PREDICT, cpu=2, memMB=1000).roles
    assert role.num_replicas == 1 and role.args[-1] == PREDICT[-1]
    script = render("slurm", ["predict", "--", *PREDICT, "num_shards=8"])
    assert "#SBATCH --array=0-7\n" in script and "#SBATCH --job-name=predict-today\n" in script
    assert "--array=0-7%2" in render("slurm", ["predict", "--array", "0-7%2", "--", *PREDICT, "num_shards=8"])
    place = ["--image", "ours:1", "--cpu", "2", "--memMB", "1000", "--max-retries", "1"]
    job = yaml.safe_load(render("kubernetes", ["predict", *place, "--", *PREDICT, "num_shards=8"]))
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (
        "Indexed",
        8,
        8,
        8,
    )
    word = expand(spec["template"]["spec"]["containers"][0]["command"][-1], {})
    for variable in ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, "5")
            assert load_config(PredictJob, [*PREDICT, "num_shards=8", word]).shard == 5
    for target, flags in (
        ("slurm", ["--array", "0-3"]),
        ("kubernetes", [*place, "--kind", "jobset"]),
        ("torchrun", []),
    ):
        with pytest.raises(SystemExit):
            render(target, ["predict", *flags, "--", *PREDICT, "num_shards=8"])
        assert mentions(capsys.readouterr().err, "num_shards=8")
    with pytest.raises(SystemExit):
        components.predict(*PREDICT, "num_shards=8", "shard=1")
    assert mentions(capsys.readouterr().err, "shard num_shards")


def test_a_server_is_a_component() -> None:
    (role,) = components.serve("artifact=artifacts/clicks", cpu=4, memMB=1000).roles
    assert role.args[2:] == [
        "pipeline", "serve", "artifact=artifacts/clicks", "server.host=0.0.0.0", "server.shutdown_delay_s=5", "threads=4",
    ]  # fmt: skip


def test_a_named_host_with_gpus_fits_that_of_each_cloud() -> None:
    """180 cores and 1,900,000 MiB of an H100 host stayed pending for ever on two of the three."""
    for name, hosts in CLOUD_HOSTS.items():
        asked = named_host(name)
        assert len(hosts) == 3 and asked.gpu == 8
        for cores, memory_mb in hosts.values():
            assert asked.cpu < cores and 0.5 * memory_mb < asked.mem_mb < 0.93 * memory_mb
    assert named_host("h100_80gb_x8").cpu == 90 and named_host("a100_40gb_x8").mem_mb == 596_000


def test_shapes_and_threads() -> None:
    assert parse_shape("2x8") == (2, 8) and parse_shape("4") == (1, 4)
    given = asked_host(16, 2, 1000, None)
    assert (given.cpu, given.gpu, given.mem_mb) == (16, 2, 1000)
    shared = Workload("train", "shared", 1, 4, [], cpu=given.cpu)
    assert shared.threads(1) == 4 and replace(shared, ranks_per_node=100).threads(1) == 1
    assert asked_host(4, None, None, "h100_80gb_x8") == Host(cpu=4, gpu=8, mem_mb=1_642_000)
    assert asked_host(None, None, None, "gpu.small").cpu == 8  # TorchX's own
    with pytest.raises(ValueError, match=names("h100_80gb_x8")):
        asked_host(None, None, None, "h100_80gbx8")
    assert this_host().cpu >= 1 and this_host().mem_mb > 100


def test_a_typo_in_what_is_rendered_for_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["render", "slrum", "train"])
    with pytest.raises(SystemExit) as stop:
        render_main()
    assert stop.value.code == 2
    assert mentions(capsys.readouterr().err, "error: slrum 'slurm' torchrun chain")


@pytest.mark.long
def test_a_job_is_composed_and_validated_without_torch(data: str) -> None:
    code = (
        "import contextlib, io, json, os, sys\n"
        "import launch.components\n"
        "from launch.render import render\n"
        "script = render('slurm', ['train', '-j', '2x1', '--gpu', '0', '--', 'experiment=quickstart', sys.argv[1]])\n"
        "heavy = sorted({'torch', 'torchrec', 'pyarrow', 'duckdb', 'numpy'} & set(sys.modules))\n"
        "print(json.dumps({'heavy': heavy, 'cpu_s': sum(os.times()[:2]), 'lines': script.count('SBATCH')}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, data], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(f"compose, validate and render: {found['cpu_s']:.2f} s of CPU")
    assert found["heavy"] == [] and found["lines"] > 5


def test_doctor_checks_the_nodes_on_ranks_and_is_not_restarted() -> None:
    app = components.doctor("folder=/shared/runs", j="2x1", cpu=4)
    words = _command(app)
    assert words[-4:] == ["-m", "pipeline", "check_nodes", "folder=/shared/runs"]
    assert words[words.index("--max-restarts") + 1] == "0" and app.roles[0].num_replicas == 2
    assert validate(str(REPOSITORY / "launch" / "components.py"), "doctor") == []
