"""A chain of verbs is printed for Slurm, Argo, Airflow and Compose; each stage waits for those before it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launch.chain import read_chain, render_chain
from launch.slurm import SlurmOptions, render_sbatch
from tests.launch.crds import COMPOSE
from tests.launch.manifests import _against_releases, as_pod, assert_valid
from tests.support.messages import mentions

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "chain.yaml")
STAGES = ["prepare", "plan", "train", "export", "serve"]
TWO_NODES = """
name: clicks
defaults: {image: "ours:1", cpu: 8, gpu: 0, memMB: 16000, max_retries: 2, env: {NOTE: 'it costs $5'}}
stages:
  prepare: {overrides: [data=quickstart, source=raw.tsv]}
  train: {j: 2x4, overrides: [experiment=quickstart]}
  score-early: {verb: evaluate, j: 1x2, after: [train], overrides: [run=runs/quickstart, split=test]}
  export: {after: [train], overrides: 'run=runs/quickstart output="artifacts/a b"'}
  serve: {after: [score-early, export], overrides: artifact=artifacts/clicks}
"""


@pytest.fixture
def two_nodes(tmp_path: Path) -> str:
    (tmp_path / "chain.yaml").write_text(TWO_NODES)
    return str(tmp_path / "chain.yaml")


@pytest.mark.long
def test_slurm_gets_each_stage_once_those_before_have_ended_well(two_nodes: str, tmp_path: Path) -> None:
    script = render_chain(["slurm", two_nodes, "--partition", "gpu", "--no-requeue"])
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/bash\nnumber=$(( $(cat count 2> /dev/null || echo 0) + 1 )); echo $number > count\n"
        'echo "$@" > "$number.flags"; cat > "$number.script"; echo "$number;cluster"\n'
    )
    fake.chmod(0o755)
    srun = fake.with_name("srun")
    srun.write_text("#!/bin/bash\n[ -e pyxis ] && echo '      --container-image=IMAGE'\n")
    srun.chmod(0o755)
    env = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and mentions(done.stderr, "pyxis") and not (tmp_path / "count").exists()
    (tmp_path / "pyxis").touch()
    done = subprocess.run(["bash"], input=script, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    assert said == ["prepare", "train", "score-early", "export", "serve"]
    flags = [(tmp_path / f"{number}.flags").read_text().split() for number in range(1, 6)]
    assert [[word for word in each if "dependency" in word] for each in flags] == [
        [], ["--dependency=afterok:1"], ["--dependency=afterok:2"], ["--dependency=afterok:2"],
        ["--dependency=afterok:3:4"],
    ]  # fmt: skip
    assert all("--kill-on-invalid-dep=yes" in each for each in flags[1:])
    stages = read_chain(two_nodes).stages
    for number, stage in enumerate(stages, start=1):  # to the letter: nothing in it is expanded on the way
        options = SlurmOptions(partition="gpu", requeue=False)
        assert (tmp_path / f"{number}.script").read_text() == render_sbatch(stage.workload, options)
    assert stages[1].workload.nodes == 2 and stages[3].workload.command[-1] == "output=artifacts/a b"


def _workflow(*words: str) -> dict[str, Any]:
    return dict(yaml.safe_load(render_chain(["argo", *words])))


def test_argo_has_a_pod_a_stage_a_jobset_for_several_nodes_and_a_deployment_for_the_server(two_nodes: str) -> None:
    spec = _workflow(two_nodes, "--queue", "ads")["spec"]
    graph, *templates = spec["templates"]
    by_name = {each["name"]: each for each in templates}
    waits = {task["name"]: task.get("dependencies", []) for task in graph["dag"]["tasks"]}
    assert waits["train"] == ["prepare"] and waits["serve"] == waits["serve-service"] == ["score-early", "export"]
    assert set(waits) == set(by_name) and all(task["template"] in by_name for task in graph["dag"]["tasks"])
    pod = {**{key: by_name["prepare"][key] for key in ("volumes", "securityContext")}, "restartPolicy": "Never"}
    pod |= {**yaml.safe_load(by_name["prepare"]["podSpecPatch"]), "containers": [by_name["prepare"]["container"]]}
    _against_releases(as_pod({"metadata": {"labels": by_name["prepare"]["metadata"]["labels"]}, "spec": pod}))
    assert by_name["prepare"]["retryStrategy"]["expression"] == "asInt(lastRetry.exitCode) not in [2, 3, 130]"
    train = by_name["train"]["resource"]
    assert train["action"] == "create" and train["successCondition"] == "status.terminalState == Completed"
    text = train["manifest"]
    assert (
        "{{workflow.name}}-train-node-0-0.{{workflow.name}}-train:29500" in text
    )  # pods of another run have another name
    jobset = yaml.safe_load(text.replace("{{workflow.name}}", "clicks-x7k2p"))
    assert_valid(jobset)
    assert jobset["spec"]["suspend"] and jobset["metadata"]["name"] == "clicks-x7k2p-train"
    for name in ("serve", "serve-service", "serve-poddisruptionbudget"):
        _against_releases(yaml.safe_load(by_name[name]["resource"]["manifest"]))


@pytest.mark.long
@pytest.mark.parametrize("file", ["example", "two_nodes"])
def test_argos_own_models_know_every_key(file: str, two_nodes: str) -> None:
    """Hera's are made from Argo's published API; a key that they do not know would not come back."""
    models = pytest.importorskip("hera.workflows.models", reason="hera is not installed")
    written = _workflow(
        EXAMPLE if file == "example" else two_nodes, "--service-account", "runner", "--pull-secret", "s"
    )
    read = models.Workflow.model_validate(written)
    assert read.model_dump(by_alias=True, exclude_none=True, mode="json") == written
    written["spec"]["templates"][1]["contaner"] = {}
    assert models.Workflow.model_validate(written).model_dump(by_alias=True, exclude_none=True, mode="json") != written


def _operators(source: str) -> dict[str, dict[str, Any]]:
    """task_id -> the keywords of its operator that are plain values."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "BashOperator"]
    keywords = [
        {each.arg: each.value.value for each in call.keywords if each.arg and isinstance(each.value, ast.Constant)}
        for call in named
    ]
    return {str(values["task_id"]): values for values in keywords}


def test_airflow_submits_each_stage_and_waits_for_its_end(two_nodes: str) -> None:
    source = render_chain(["airflow", two_nodes, "--folder", "/srv/a b", "--cron", "@daily"])
    compile(source, "dag.py", "exec")
    operators = _operators(source)
    for stage in read_chain(two_nodes).stages:
        command = operators[stage.name]["bash_command"]
        assert command.startswith("{% raw %}cd '/srv/a b'\nsbatch") and command.endswith("{% endraw %}")
        assert render_sbatch(stage.workload, SlurmOptions()) in command
        assert ("--wait" in command.splitlines()[1]) == (stage.name != "serve")  # which does not end
        assert operators[stage.name]["retries"] == 0  # Slurm's
    assert "schedule='0 0 * * *'" in source and "tasks['export'] >> tasks['serve']" in source


def test_airflow_runs_stages_on_its_worker(tmp_path: Path) -> None:
    values = yaml.safe_load(Path(EXAMPLE).read_text())
    del values["stages"]["serve"]
    values["defaults"]["env"] = {"NOTE": "it's {{ braces }}"}
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    source = render_chain(["airflow", str(tmp_path / "chain.yaml"), "--by", "worker", "--folder", str(tmp_path)])
    train = _operators(source)["train"]
    assert train["retries"] == 2 and "exec python -m pipeline agent" in train["bash_command"]
    prepare = _operators(source)["prepare"]["bash_command"].removeprefix("{% raw %}").removesuffix("{% endraw %}")
    shown = prepare.replace("exec python", 'echo "$NOTE" && pwd && exec echo')
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == ["it's {{ braces }}", str(tmp_path)]
    assert done.stdout.splitlines()[2].split()[-2:] == ["data=quickstart", "source=datasets/raw/quickstart.tsv"]


@pytest.mark.campaign
def test_airflow_itself_reads_the_dag(tmp_path: Path) -> None:
    pytest.importorskip("airflow.sdk", reason="apache-airflow is not installed")
    (tmp_path / "dag.py").write_text(render_chain(["airflow", EXAMPLE, "--folder", "/srv"]))
    code = (
        "import runpy\ndag = runpy.run_path('dag.py')['dag']\n"
        "print([(task.task_id, sorted(task.downstream_task_ids)) for task in dag.topological_sort()])"
    )
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == [
        (name, [after] if after else []) for name, after in zip(STAGES, [*STAGES[1:], ""], strict=True)
    ]


def test_compose_runs_the_stages_beside_a_storage_and_keeps_the_server() -> None:
    file = yaml.safe_load(render_chain(["compose", EXAMPLE, "--port", "9090"]))
    jsonschema.validate(file, COMPOSE)
    services = file["services"]
    assert list(services) == ["storage", "bucket", *STAGES]
    ends = "service_completed_successfully"
    for name, before in zip(STAGES, ["bucket", *STAGES[:-1]], strict=True):
        assert services[name]["depends_on"] == {before: {"condition": ends}}
        assert {"workspace:/workspace", "registry:/registry"} <= set(services[name]["volumes"])
        assert services[name]["environment"]["AWS_ENDPOINT_URL"] == "http://storage:9000"
        assert services[name]["environment"]["AWS_SECRET_ACCESS_KEY"].startswith("${STORAGE_PASSWORD:?")
    assert {volume.partition(":")[0] for each in services.values() for volume in each.get("volumes", [])} == set(
        file["volumes"]
    )
    assert services["serve"]["ports"] == ["9090:8000"] and services["serve"]["restart"] == "unless-stopped"
    assert services["train"]["restart"] == "on-failure:2" and services["plan"]["restart"] == "no"
    assert services["train"]["stop_grace_period"] == "35s"


def test_a_dollar_is_none_of_composes_variables(tmp_path: Path) -> None:
    values = {"stages": {"train": {"image": "ours:1", "gpu": 2, "j": "1x2", "env": {"NOTE": "$HOME"}, "overrides": ["experiment=quickstart", "run_dir='runs/${name}'"]}}}  # fmt: skip
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump(values))
    train = yaml.safe_load(render_chain(["compose", str(tmp_path / "chain.yaml")]))["services"]["train"]
    assert train["command"][-1] == "run_dir='runs/$${name}'" and train["environment"]["NOTE"] == "$$HOME"
    assert train["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 2


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        ("slurm", "stages: {}", "stages"),
        ("slurm", "stages: {tran: {}}", "stages.tran train"),
        ("slurm", "stages: {train: {overides: a=1}}", "stages.train overrides"),
        ("slurm", "stages: {prepare: {overrides: data=quickstart source=a, after: train}}", "stages.prepare.after"),
        ("slurm", "stage: {}", "stages"),
        ("slurm", "[1]", "mapping"),
        ("slurm", "stages: {train: {overrides: experiment=quickstrat}}", "quickstart"),
        ("slurm", "stages: {Train: {verb: train}}", "Train"),
        ("argo", "stages: {train: {overrides: experiment=quickstart}}", "--image"),
        ("argo", "stages: {prepare: {image: a, cpu: 1, memMB: 9, env: {A: '{{b}}'}, overrides: data=quickstart source=a}}", "stages.prepare {{"),
        ("compose", "stages: {train: {image: a, j: 2x1, gpu: 0, overrides: experiment=quickstart}}", "stages.train 2x1"),
        ("compose", "stages: {train: {overrides: experiment=quickstart}}", "stages.train image"),
        ("airflow", "stages: {train: {overrides: experiment=quickstart}}", "--folder"),
        ("helm", "stages: {}", "slurm argo airflow compose"),
    ],
)  # fmt: skip
def test_a_chain_that_cannot_be_is_one_line(
    target: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chain.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        render_chain([target, str(tmp_path / "chain.yaml")])
    assert stop.value.code == 2 and mentions(capsys.readouterr().err, message)
