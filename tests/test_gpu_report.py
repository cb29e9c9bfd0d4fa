"""The report of a GPU machine: what its checks accept, its page, and the bundle's removal of GPU code."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from benchmarks import gpu_report
from benchmarks.gpu_bundle import CONTAINER_MAGIC, keep_architecture, requirements
from benchmarks.gpu_report import Check, CommandError, Machine, near, run_section, within
from benchmarks.gpu_report_page import render


@pytest.mark.parametrize(
    ("found", "passed"),
    [([0.5, 0.25], True), ([0.5, 0.25001], True), ([0.5, 0.26], False), ([0.5], False), ([], False)],
)
def test_losses_pass_within_the_tolerance_and_only_if_all_steps_are_there(found: list[float], passed: bool) -> None:
    assert near("losses", found, [0.5, 0.25], 1e-4).passed is passed


def test_a_prediction_passes_within_its_factor_in_both_directions() -> None:
    assert [within("step", ms, 10.0, 2.0, "ms").passed for ms in (4.0, 6.0, 19.0, 21.0)] == [False, True, True, False]
    assert within("step", 1.0, 0.0, 2.0, "ms").passed is False


def test_a_section_that_fails_keeps_its_earlier_checks_and_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(machine: Machine):
        yield Check("first", "1", "1", True)
        raise CommandError("`python -m pipeline train` ended with 1")

    monkeypatch.setitem(gpu_report.SECTIONS, "losses", ("Losses", checks))
    section = run_section("losses", Machine(tmp_path, shadow=True))
    assert [check.name for check in section.checks] == ["first"] and "ended with 1" in section.error


def test_the_page_shows_each_check_the_speeds_and_what_failed() -> None:
    speeds = {
        "quickstart": {
            "ms_a_step": {"torchrec": 4.0, "ours": 2.0},
            "spread_ms": {"torchrec": [3.9, 4.1], "ours": [1.9, 2.1]},
            "samples_per_s": {"torchrec": 512_000.0, "ours": 1_024_000.0},
        }
    }
    check = {"name": "a <check>", "found": "2.00 times", "wanted": "at least 1", "passed": True}
    failed = {"name": "resume", "title": "Resume", "checks": [], "figures": {}, "error": "it broke", "seconds": 30.0}
    report = {
        "about": {"shadow": False, "gpus": [{"name": "H100", "memory_gb": 79.1}], "torch": "2.14.1"},
        "sections": [
            {
                "name": "speed",
                "title": "Speed",
                "checks": [check],
                "figures": {"1 rank(s)": speeds},
                "error": "",
                "seconds": 30.0,
            },
            failed,
        ],
    }
    page = render(report)
    assert all(text in page for text in ("a &lt;check&gt;", "1,024,000", "it broke", "H100", "<b>1.0</b>", "2.14.1"))


def test_the_bundle_keeps_the_machine_code_of_one_architecture() -> None:
    def entry(kind: int, arch: int, code: bytes) -> bytes:
        return struct.pack("<HHIQ", kind, 0, 32, len(code)) + bytes(12) + struct.pack("<I", arch) + code

    entries = entry(1, 90, b"p" * 16) + entry(2, 80, b"a" * 16) + entry(2, 90, b"h" * 16)
    container = struct.pack("<IHHQ", CONTAINER_MAGIC, 1, 16, len(entries)) + entries
    data = bytearray(b"before--" + container + b"behind--")
    found = keep_architecture(data, [(8, len(container))], 90)
    assert found == {80: 16, 90: 32}
    assert b"h" * 16 in data and b"p" not in data[8:-8] and b"a" * 16 not in data
    assert data.startswith(b"before--") and data.endswith(b"behind--")


def test_the_bundle_holds_what_the_gpu_extra_needs_and_not_torch() -> None:
    names = [line.split("==")[0] for line in requirements()]
    assert {"numba", "llvmlite", "pyarrow", "hydra-core", "omegaconf", "tensordict"} <= set(names)
    assert not any(name.startswith(("torch=", "nvidia")) or name in ("torch", "triton") for name in names)


def test_each_card_with_a_preset_is_found_by_the_name_that_torch_gives_it(tmp_path: Path) -> None:
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 PCIe", "Tesla T4"]
    assert [Machine(tmp_path, False, gpu_name=name).preset for name in names] == ["h100_80gb", "a100_40gb", "", ""]
