"""Doctor names what is broken and the command that fixes it, whatever is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.extras.doctor import probes as doctor_probes
from pipeline.extras.doctor.cli import doctor
from pipeline.extras.doctor.cli.doctor import Finding
from tests.support.messages import mentions

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.long
@pytest.mark.parametrize(
    "asked", [["lookup_cpu"], pytest.param(["lookup_cpu", "all_to_all_gloo"], marks=pytest.mark.campaign)]
)
def test_this_machine_is_fit_to_run_the_tests(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    probe = doctor.probe
    monkeypatch.setattr(
        doctor, "probe", lambda name, gpu: probe(name, gpu) if name in asked else Finding(name, "not asked", "ask")
    )
    findings = {finding.name: finding for finding in doctor.diagnose()}
    for name in asked:
        assert not findings[name].fix, findings[name]
    assert not findings["tested set"].fix, findings["tested set"]
    assert {"GPU", "gpus"} & set(findings)


def test_doctor_runs_where_nothing_is_installed(tmp_path: Path) -> None:
    """-S: without site-packages; the probes, which are other processes, find a torch that is none."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    done = subprocess.run(
        [sys.executable, "-S", "-m", "pipeline", "doctor"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == ""
    assert any(line.split() == ["FAIL", "torch", "missing"] for line in lines)
    fixes = [line.strip() for line in lines[lines.index("fix it with:") + 1 :]]
    assert [doctor.stack_command(gpu=False), "pip install -e '.[cpu]'"] == fixes or (
        [doctor.stack_command(gpu=True), "pip install -e '.[gpu]'"] == fixes
    )


@pytest.fixture
def broken_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a module named torch, with the given code, before the real one."""

    def put(code: str) -> None:
        (tmp_path / "torch.py").write_text(code)
        monkeypatch.setattr(doctor, "PROBE_PATH", [str(tmp_path), *doctor.PROBE_PATH])

    return put


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (
            "raise ImportError('libfbgemm.so: undefined symbol: _ZN3c10')",
            "ImportError: libfbgemm.so: undefined symbol: _ZN3c10",
        ),
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("import os; os.kill(os.getpid(), 11)", "crashed with SIGSEGV"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_crash_of_a_shared_library_is_a_line_with_its_fix(
    broken_torch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, code: str, found: str
) -> None:
    broken_torch(code)
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 1 if "sleep" in code else 60)
    assert doctor.probe("lookup_cpu", gpu=False) == Finding("lookup_cpu", found, doctor.stack_command(gpu=False))


@pytest.mark.parametrize(
    ("installed", "name", "found", "fix"),
    [
        ({"torch": "2.14.1+cpu", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}, "tested set", "torch 2.14", ""),
        ({"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu": "1.9.0"}, "tested set", "torch 2.14", ""),
        ({"torch": "2.13.0+cu130", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}, "tested set", "tested only with torch 2.14",
         "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install torch==2.14"),
        ({"torch": "2.12.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, "tested set", "do not belong together", "pip install torch=="),
        ({"torch": "2.14.1", "torchrec": "1.9.2"}, "fbgemm", "missing", "pip install torch=="),
        ({"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu": "1.9.0", "fbgemm-gpu-cpu": "1.9.0"}, "fbgemm", "both",
         "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install"),
    ],
)  # fmt: skip
def test_versions_are_held_against_the_tested_sets(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], name: str, found: str, fix: str
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda distribution: installed.get(distribution, ""))
    finding = next(finding for finding in doctor._stack(gpu=False) if finding.name == name)
    assert found in finding.found
    assert finding.fix.startswith(fix) and bool(finding.fix) == bool(fix)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes doctor find these builds, and the distributions of FBGEMM."""

    def put(cuda: str, variant: str, *fbgemms: str) -> None:
        monkeypatch.setattr(doctor, "_torch_cuda", lambda: cuda)
        monkeypatch.setattr(doctor, "_torch_version", lambda: f"2.14.1+{f'cu{cuda}' if cuda else 'cpu'}")
        monkeypatch.setattr(doctor, "_fbgemm_variant", lambda: variant)
        monkeypatch.setattr(doctor, "_version", lambda name: "1.9.0" if name in fbgemms else "")

    return put


@pytest.mark.parametrize(
    ("cuda", "fbgemm", "has_gpu", "found", "fix"),
    [
        ("", "fbgemm-gpu-cpu", False, "for CPU, fbgemm for CPU", ""),
        ("13.0", "fbgemm-gpu", True, "CUDA 13.0, fbgemm for CUDA", ""),
        ("13.0", "fbgemm-gpu", False, "CUDA 13.0, fbgemm for CUDA", ""),
        ("13.0", "fbgemm-gpu-cpu", False, "CPU only, which works", ""),
        ("13.0", "fbgemm-gpu-cpu", True, "no lookup runs", "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install 'torch=="),
        ("", "fbgemm-gpu-cpu", True, "no lookup runs", "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install 'torch=="),
        ("", "fbgemm-gpu", False, "does not load", "pip install 'torch=="),
    ],
)  # fmt: skip
def test_builds_that_do_not_work_together_are_named(
    installed: Callable[..., None], cuda: str, fbgemm: str, has_gpu: bool, found: str, fix: str
) -> None:
    installed(cuda, "cpu" if fbgemm.endswith("cpu") else "cuda", fbgemm)
    (finding,) = doctor._builds(has_gpu)
    assert found in finding.found
    assert finding.fix.startswith(fix) and bool(finding.fix) == bool(fix)


@pytest.mark.parametrize(
    ("stack", "cuda", "variant", "fbgemms", "said"),
    [
        ("gpu", "13.0", "cuda", ["fbgemm-gpu"], ""),
        ("cpu", "13.0", "cpu", ["fbgemm-gpu-cpu"], ""),
        ("cpu", "", "cpu", ["fbgemm-gpu-cpu"], ""),
        ("gpu", "", "cuda", ["fbgemm-gpu"], "2.14.1+cpu STACK=gpu PIP_FLAGS pip config list"),
        ("gpu", "13.0", "cpu", ["fbgemm-gpu-cpu"], "cpu cuda STACK=gpu"),
        ("cpu", "13.0", "cuda", ["fbgemm-gpu"], "cuda cpu STACK=cpu"),
        ("cpu", "", "cpu", ["fbgemm-gpu", "fbgemm-gpu-cpu"], "both fbgemm-gpu fbgemm-gpu-cpu"),
    ],
)
def test_make_stops_after_it_installed_another_build_than_it_was_asked_for(
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stack: str,
    cuda: str,
    variant: str,
    fbgemms: list[str],
    said: str,
) -> None:
    installed(cuda, variant, *fbgemms)
    monkeypatch.setattr("sys.argv", ["doctor", f"stack={stack}"])
    if not said:
        doctor.main()
        return
    with pytest.raises(SystemExit) as stop:
        doctor.main()
    assert stop.value.code == 1 and mentions(capsys.readouterr().err, f"{said} pip install")


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True), ((10, 3), True), ((12, 0), False)],
)
def test_a_gpu_that_fbgemm_has_no_kernels_for_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    gpu = SimpleNamespace(name="a GPU", major=capability[0], minor=capability[1], total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(doctor, "_version", lambda name: "1.9.0")
    if runs:
        assert doctor_probes.gpus() == "a GPU 16 GiB"
        return
    with pytest.raises(RuntimeError) as error:
        doctor_probes.gpus()
    version = ".".join(map(str, capability))
    assert mentions(str(error.value), f"{version} fbgemm 1.9.0 sm_80 sm_90 sm_100")
    assert "troubleshooting.md" in doctor._probe_fix("gpus", True, str(error.value))


def test_a_driver_that_is_too_old_is_told_with_torchs_reason_and_the_driver_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "The NVIDIA driver on your system is too old (found version 12040)."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("pipeline.devices.cuda.Cuda.why_absent", lambda: reason)
    with pytest.raises(RuntimeError, match=r"too old \(found version 12040\)"):
        doctor_probes.gpus()
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: "13.0")
    assert "driver 580 or newer" in doctor._probe_fix("gpus", True, reason)


def test_what_the_installed_builds_are_is_read_from_their_files() -> None:
    import fbgemm_gpu

    assert doctor._torch_version() == torch.__version__ and doctor._torch_cuda() == (torch.version.cuda or "")
    assert doctor._fbgemm_variant() == fbgemm_gpu.__variant__


def test_a_torch_for_another_cuda_than_fbgemms_is_named(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("12.6", "cuda", "fbgemm-gpu")
    monkeypatch.setattr(doctor, "_match_in_file", lambda package, file, pattern: "13")
    (finding,) = doctor._builds(has_gpu=False)
    assert mentions(finding.found, "CUDA 12.6 CUDA 13 does not load") and finding.fix
    assert doctor.why_not_the_set("gpu") == finding.found


def test_a_command_that_fixes_two_findings_stands_once() -> None:
    text = doctor.report(
        [Finding("a", "bad", "make install"), Finding("b", "good"), Finding("c", "bad", "make install")]
    )
    assert text.count("make install") == 1 and text.count("FAIL") == 2
    assert doctor.report([Finding("b", "good")]).endswith("all is well: make train")


def test_little_shared_memory_or_disk_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_SHM_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 1 << 60)
    assert "remount,size=8G" in doctor._shared_memory().fix
    assert "larger disk" in doctor._disk().fix


def test_it_explains_itself_and_takes_no_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: pytest.fail("nothing was asked for"))
    monkeypatch.setattr("sys.argv", ["doctor", "--help"])
    doctor.main()
    assert "Check whether this machine can train" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["doctor", "run=x"])
    with pytest.raises(SystemExit) as stop:
        doctor.main()
    assert stop.value.code == 2 and "run=x" in capsys.readouterr().err


@pytest.mark.long
def test_a_compiler_that_does_not_work_is_reported_and_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no GPU, so the probe of torch.compile on one fails."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = doctor.probe("compiler", gpu=True)
    assert found.name == "compiler" and found.fix == ""
    assert found.found.startswith("trainer.compile=true would have no effect: ")
