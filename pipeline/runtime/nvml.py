"""Let FBGEMM's CUDA build load on a host without NVIDIA's driver, such as a login node.

FBGEMM links libnvidia-ml.so.1, which only the driver installs. This module loads a library of that
name whose functions return the error that NVML returns without a driver.
"""

from __future__ import annotations

import os
import struct
import sys

LIBRARY = "libnvidia-ml.so.1"
# the functions that FBGEMM links; torch and pynvml look for other functions, find none, and treat
# NVML as absent
FUNCTIONS = (
    "nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo_v2",
)  # fmt: skip
# os.uname().machine -> its number in ELF, and the code of `return 12`
# (NVML_ERROR_LIBRARY_NOT_FOUND).
MACHINES = {
    "x86_64": (62, bytes.fromhex("b80c000000 c3")),  # mov eax, 12; ret
    "aarch64": (183, bytes.fromhex("80018052 c0035fd6")),  # mov w0, #12; ret
}


class BeforeFbgemm:
    """Load the stub before fbgemm_gpu is imported. It is registered as a finder of modules, but finds no module."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "fbgemm_gpu":
            sys.meta_path.remove(self)
            load_stub_without_driver()


def load_stub_without_driver() -> bool:
    """Load the stub if the driver's library is missing. Return True if the stub was loaded."""
    import ctypes

    machine = os.uname().machine
    try:
        ctypes.CDLL(LIBRARY)
        return False
    except OSError:
        if sys.platform != "linux" or machine not in MACHINES:
            return False
    # no file, because a temporary folder may be full or forbid execution
    memory = os.memfd_create(LIBRARY)
    try:
        os.write(memory, stub(machine))
        ctypes.CDLL(f"/proc/self/fd/{memory}", mode=ctypes.RTLD_GLOBAL)
    finally:
        os.close(memory)
    return True


def stub(machine: str) -> bytes:
    """Return a shared library in ELF's format (`man 5 elf`) whose FUNCTIONS all return an error.

    A host may have no compiler. One segment is read and executed, the other is the dynamic section.
    """
    elf_machine, code = MACHINES[machine]
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (LIBRARY, *FUNCTIONS))
    count = len(FUNCTIONS) + 1  # symbol 0 is the undefined symbol
    header_bytes, far = 64 + 4 * 56, 0x10000  # `far`: the largest page size of both machines
    # One bucket, whose chain has all symbols.
    hash_table = struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)
    hash_at = header_bytes
    symbols_at = _aligned(hash_at + len(hash_table))
    names_at = symbols_at + 24 * count
    code_at = _aligned(names_at + len(names))
    dynamic_at = _aligned(code_at + len(code))
    symbols = bytes(24)
    for name in FUNCTIONS:  # a global function in section 1
        symbols += struct.pack("<IBBHQQ", names.index(name.encode()), 0x12, 0, 1, code_at, len(code))
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)  # SONAME, HASH, STRTAB, SYMTAB, STRSZ, SYMENT, NULL
        for tag, value in ((14, 1), (4, hash_at), (5, names_at), (6, symbols_at), (10, len(names)), (11, 24), (0, 0))
    )
    ident = b"\x7fELF\2\1\1" + bytes(9)  # 64 bits, little-endian
    header = ident + struct.pack("<HHIQQQIHHHHHH", 3, elf_machine, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    segments = (  # type (LOAD, DYNAMIC, GNU_STACK), flags (4 read, 2 write, 1 execute), offset, address, size, alignment
        (1, 5, 0, 0, dynamic_at, far),
        (1, 6, dynamic_at, far + dynamic_at, len(dynamic), far),
        (2, 6, dynamic_at, far + dynamic_at, len(dynamic), 8),
        (0x6474E551, 6, 0, 0, 0, 16),
    )
    header += b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, offset, address, address, size, size, alignment)
        for kind, flags, offset, address, size, alignment in segments
    )
    content = bytearray(dynamic_at) + dynamic
    for at, part in ((0, header), (hash_at, hash_table), (symbols_at, symbols), (names_at, names), (code_at, code)):
        content[at : at + len(part)] = part
    return bytes(content)


def _aligned(offset: int) -> int:
    return -(-offset // 16) * 16
