"""Memory that was freed is there for the next step without a page fault."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from pipeline.training.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    first, second = torch.ones(4 << 20), torch.ones(8 << 20)  # 16 and 32 MiB
for _ in range(20):  # until the heap has found its shape
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another C library is left alone")
@pytest.mark.campaign
def test_freed_memory_is_used_again_without_page_faults() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True).stdout)
        for how in ("kept", "given back")
    }
    assert 3 * faults["kept"] < faults["given back"], faults
