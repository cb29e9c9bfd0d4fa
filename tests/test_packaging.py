"""A wheel built from the tree and installed elsewhere carries all that the tree has, and works from an empty folder."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from pip._vendor.packaging.requirements import Requirement

from pipeline.extras.doctor.cli import doctor
from tests.support.datasets import described_dataset
from tests.support.torchx_commands import answers_of, words_for

REPOSITORY = Path(__file__).resolve().parents[1]
SHIPPED = ("pipeline", "launch", "conf", "sharding_plans")
SUFFIXES = (".py", ".yaml", ".json", ".css")
SHIPPED_PLAN = "a_plan.h200x8.json"
OWN_PLAN = "a_plan.autox2.json"  # made by `make train`, for the machine that builds the wheel
CACHES = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, for setuptools leaves build/ behind, and takes up what an earlier build left there."""
    if find_spec("setuptools") is None:
        pytest.skip("setuptools, which builds the wheel, is not installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    for name in SHIPPED:
        shutil.copytree(REPOSITORY / name, folder / "tree" / name, ignore=CACHES)
    for name in (SHIPPED_PLAN, OWN_PLAN):
        (folder / "tree" / "sharding_plans" / name).write_text("{}")
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        if (REPOSITORY / name).is_file():
            shutil.copy(REPOSITORY / name, folder / "tree" / name)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        ".",
    ]
    subprocess.run(command, cwd=folder / "tree", check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv that holds the wheel and nothing else; third-party libraries are borrowed from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command: list[str | Path] = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps",
               "--force-reinstall", wheel]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "bin" / "python"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """An empty folder, and beside it a data set's description."""
    (tmp_path / "data").mkdir()
    dataset = described_dataset({"cat_0": 10}, num_dense=13, num_rows=4096)
    (tmp_path / "data" / "dataset.json").write_text(dataset.to_json())
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def _run(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, *words], cwd=folder, env=environ, capture_output=True, text=True)


def test_the_wheel_holds_every_module_config_and_plan_of_the_tree(wheel: Path) -> None:
    expected = {f"pipeline/sharding_plans/{SHIPPED_PLAN}"}
    for top in SHIPPED:
        for file in (REPOSITORY / top).rglob("*"):
            if file.suffix in SUFFIXES and ".autox" not in file.name:
                relative = file.relative_to(REPOSITORY)
                expected.add(str(relative if top in ("pipeline", "launch") else Path("pipeline") / relative))
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.endswith(SUFFIXES) and ".dist-info" not in name}
    assert held == expected


def test_an_installed_wheel_composes_and_validates_a_job_from_an_empty_folder(python: Path, elsewhere: Path) -> None:
    code = (
        "import sys, pipeline\n"
        "from pipeline.cli.command_line import load_config\nfrom pipeline.config.jobs.train import TrainJob\nfrom pipeline.training.preflight import validate_job\n"
        "job = load_config(TrainJob, ['experiment=quickstart', 'data.path=../data'])\n"
        "tables = validate_job(job, 2)\n"
        "assert 'torch' not in sys.modules\n"
        "print(pipeline.__file__, len(tables), job.name)\n"
    )
    done = _run(python, elsewhere, "-c", code)
    assert done.returncode == 0, done.stderr
    file, tables, name = done.stdout.split()
    assert Path(file).is_relative_to(python.parents[1]) and (tables, name) == ("1", "quickstart")


def test_an_installed_wheel_takes_a_users_own_conf_folder(python: Path, elsewhere: Path) -> None:
    (elsewhere / "my" / "experiment").mkdir(parents=True)
    (elsewhere / "my" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - quickstart\nname: mine\ntrainer:\n  global_batch_size: 512\n"
    )
    done = _run(python, elsewhere, "-m", "pipeline", "train", "--config-dir", "my", "experiment=mine", "--cfg")
    assert done.returncode == 0, done.stderr
    assert (python.parent / "pipeline").is_file()  # the console script
    assert "name: mine" in done.stdout and "global_batch_size: 512" in done.stdout


@pytest.mark.campaign
def test_an_installed_wheel_finds_the_plans_that_it_ships(python: Path, elsewhere: Path) -> None:
    code = (
        f"from pipeline.planner.plan_record import find_plan_file as f; print(f('sharding_plans/{SHIPPED_PLAN}', ''))"
    )
    done = _run(python, elsewhere, "-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(python.parents[1])


@pytest.mark.long
def test_torchx_finds_our_components_beside_its_own_and_submits_only_what_composes(
    python: Path, elsewhere: Path
) -> None:
    run = ["run", "-s", "local_cwd", "--dryrun", "pipeline.train", "-j", "1x2", "--", "experiment=quickstart",
           "data.path=../data"]  # fmt: skip
    listed, shown, refused = answers_of(_run(python, elsewhere, *words_for(["builtins"], run, [*run, "trainer.sed=1"])))
    for component in (
        "pipeline.train",
        "pipeline.prepare",
        "pipeline.plan",
        "pipeline.evaluate",
        "dist.ddp",
        "utils.sh",
    ):
        assert component in listed.out
    assert shown.code == 0, shown.err
    assert "agent" in shown.out and "train" in shown.out
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "error: unknown key 'trainer.sed'; did you mean 'trainer.seed'?\n"


@pytest.mark.long
def test_a_copied_job_folder_uses_its_own_conf(elsewhere: Path) -> None:
    """What a TorchX job directory is: under an editable install the original's conf must not win."""
    for name in ("pipeline", "conf"):
        shutil.copytree(REPOSITORY / name, elsewhere / name, ignore=CACHES)
    shutil.copy(REPOSITORY / "setup.cfg", elsewhere)
    (elsewhere / "conf" / "data" / "only_here.yaml").write_text("name: only_here\n")
    done = _run(Path(sys.executable), elsewhere, "-m", "pipeline", "train", "data=only_here", "--cfg")
    assert done.returncode == 0, done.stderr
    assert "name: only_here_dlrm" in done.stdout


def test_versions_are_pinned_to_the_newest_set_that_doctor_knows() -> None:
    extras, pins = _extras(), doctor.PINS
    minor = {name: pin.rpartition(".")[0] for name, pin in pins.items()}
    assert minor["torch"] == doctor.TESTED
    assert doctor.RELEASED_TOGETHER[doctor.TESTED] == (minor["torchrec"], minor["fbgemm"])
    assert f"torch =={pins['torch']}" in extras["cpu"] and f"fbgemm-gpu-cpu =={pins['fbgemm']}" in extras["cpu"]
    assert (
        f"torch =={pins['torch']}, !={pins['torch']}+cpu" in extras["gpu"]
        and f"fbgemm-gpu =={pins['fbgemm']}" in extras["gpu"]
    )
    makefile = (REPOSITORY / "Makefile").read_text()
    assert re.search(rf"^TORCHREC := torchrec=={re.escape(pins['torchrec'])}$", makefile, re.M)
    command = doctor.stack_command(gpu=False).rpartition("uninstall")[2]
    assert command.endswith(
        f"pip install torch=={pins['torch']} fbgemm-gpu-cpu=={pins['fbgemm']} && "
        f"pip install --no-deps torchrec=={pins['torchrec']}"
    )


def test_the_gpu_set_takes_no_cpu_build_of_torch() -> None:
    """`==2.14.1` admits 2.14.1+cpu, which pip prefers where its configuration names an index of CPU builds."""
    pinned = {
        name: next(line for line in text.split("\n") if line.startswith("torch "))
        for name, text in _extras().items()
        if name in ("cpu", "gpu")
    }
    takes = {
        name: [Requirement(line).specifier.contains(build) for build in ("2.14.1", "2.14.1+cu130", "2.14.1+cpu")]
        for name, line in pinned.items()
    }
    assert takes == {"cpu": [True, True, True], "gpu": [True, True, False]}
    assert not [text for text in _extras().values() if "===" in text]  # which pip 24.0 cannot read in an extra


def _extras() -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(REPOSITORY / "setup.cfg")
    return dict(parser["options.extras_require"])
