"""Memory that was freed is there for the next step without a page fault, and large tensors lie in huge pages."""

from __future__ import annotations

import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.devices.cpu.process import disable_huge_pages_of, kept_bytes

VARIABLE = "THP_MEM_ALLOC_ENABLE"
SCRIPT = """
import resource, sys, torch
from pipeline.devices.cpu.process import keep_blocks, kept_bytes
if sys.argv[1] == "kept":
    assert keep_blocks(*kept_bytes(int(sys.argv[2]) << 30))
def step():
    first, second = torch.ones(int(sys.argv[3]) << 18), torch.ones(int(sys.argv[3]) << 19)
for _ in range(20):  # until the heap has found its shape
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another C library is left alone")
@pytest.mark.parametrize(("gib", "mib"), [(1, 16), (16, 100)], ids=["little_memory", "room"])
@pytest.mark.campaign
def test_freed_memory_is_used_again_without_page_faults(gib: int, mib: int) -> None:
    faults = {}
    for how in ("kept", "given back"):
        command = [sys.executable, "-c", SCRIPT, how, str(gib), str(mib)]
        faults[how] = int(subprocess.run(command, check=True, capture_output=True).stdout)
    assert 3 * faults["kept"] < faults["given back"], faults


def test_large_blocks_are_kept_where_there_is_room() -> None:
    assert kept_bytes(0) == kept_bytes(4 << 30) == (64 << 20, 512 << 20)
    assert kept_bytes(8 << 30) == (256 << 20, 1 << 30)
    assert kept_bytes(1 << 40) == (256 << 20, 2 << 30)


LARGE = """
import resource, sys
from pipeline.devices.cpu.process import use_huge_pages
use_huge_pages()
import torch
from pipeline.devices.cpu.process import keep_blocks, kept_bytes
keep_blocks(*kept_bytes(0))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    large = torch.ones(32 << 20)  # 128 MiB: more than what is kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this kernel has no transparent huge pages"
)
@pytest.mark.campaign
def test_tensors_that_are_not_kept_cost_few_page_faults() -> None:
    faults = {}
    for setting in ("0", None):
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        environment |= {VARIABLE: setting} if setting else {}
        answer = subprocess.run([sys.executable, "-c", LARGE], env=environment, check=True, capture_output=True)
        faults[setting] = int(answer.stdout)
    assert faults["0"] >= 4 * (128 << 20) // (4 << 10), faults
    assert 10 * faults[None] < faults["0"], faults


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no transparent huge pages")
def test_tables_can_be_kept_out_of_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with mmap.mmap(-1, 8 << 20) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        disable_huge_pages_of(address + 100, (8 << 20) - 200)
        middle, flags = address + (4 << 20), ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                is_ours = int(found[1], 16) <= middle < int(found[2], 16)
            elif is_ours and line.startswith("VmFlags:"):
                flags = line
    assert "nh" in flags.split()
