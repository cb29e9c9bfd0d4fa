"""Pack the pipeline and what it needs for a GPU machine that reaches no package index:

    python -m benchmarks.gpu_bundle --output bundle.tar.xz [--python 3.12] [--arch 90] [--fbgemm 1.9.0 --torchrec 1.9.2]

torch is not packed, because GPU images bring it; fbgemm and torchrec must be the releases for that torch (docs/do/gpu.md).
On the GPU machine:

    mkdir site && tar xJf bundle.tar.xz -C site && export PYTHONPATH=$PWD/site && python -m pipeline doctor

The packages are those that the extra `gpu` of this package needs, in the versions of the environment that runs this
command. FBGEMM's libraries hold machine code for several architectures (2.6 GB); the code of one is kept, and the rest
is set to zero in place, so that the libraries still load and pack small.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "torchrec-pipeline"
BROUGHT_BY_THE_IMAGE = re.compile(r"torch|triton|nvidia-.*|cuda-.*|fbgemm-gpu.*|torchrec", re.IGNORECASE)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 34, 28, 17)] + ["manylinux2014_x86_64"]
# A fat binary is a list of containers; each holds entries of a kind, for an architecture.
# The layout is the one found in the wheels of FBGEMM; an entry of another kind is an error.
CONTAINER_MAGIC, PTX, MACHINE_CODE = 0xBA55ED50, 1, 2


def requirements(extra: str = "gpu") -> list[str]:
    """Return name==version of all that this package needs with `extra`, as installed here; torch left out."""
    found: dict[str, str] = {}
    waiting = [(PACKAGE, extra)]
    while waiting:
        name, wanted_extra = waiting.pop()
        try:
            one = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform or Python
        for line in one.requires or []:
            requirement, _, marker = line.partition(";")
            other = re.match(r"[\w.-]+", requirement.strip())
            assert other is not None, line
            if "extra" in marker and f'"{wanted_extra}"' not in marker.replace("'", '"'):
                continue
            key = other.group().lower().replace("_", "-")
            if key in found or BROUGHT_BY_THE_IMAGE.fullmatch(key):
                continue
            try:
                found[key] = distribution(key).version
            except PackageNotFoundError:
                continue
            waiting.append((key, ""))
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def download(packages: list[str], python: str, folder: Path) -> None:
    """Download wheels for `python`; packages that are published as source only are built here."""
    here = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    for package in packages:
        done = subprocess.run([*here, "download", "--no-deps", *target, "-d", folder, package], capture_output=True)
        if done.returncode:
            subprocess.run([*here, "wheel", "--no-deps", "-w", folder, package], check=True)
    subprocess.run([*here, "wheel", "--no-deps", "-w", folder, str(ROOT)], check=True)


def keep_architecture(data: bytearray, sections: list[tuple[int, int]], arch: int) -> dict[int, int]:
    """Zero all GPU code in `data` except machine code for `arch`; 0 keeps none. Returns bytes found by architecture.

    sections: (offset, size) of the fat binaries in the file.
    """
    found: Counter[int] = Counter()
    for offset, size in sections:
        position, end = offset, offset + size
        while position + 16 <= end:
            magic, _, header, payload = struct.unpack_from("<IHHQ", data, position)
            if magic != CONTAINER_MAGIC:
                position += 8  # padding between containers
                continue
            entry, position = position + header, position + header + payload
            while entry + 32 <= position:
                kind, _, entry_header, entry_payload = struct.unpack_from("<HHIQ", data, entry)
                if not entry_header:
                    break
                (entry_arch,) = struct.unpack_from("<I", data, entry + 28)
                found[entry_arch] += entry_payload
                start = entry + entry_header
                if kind not in (PTX, MACHINE_CODE):
                    raise ValueError(f"an entry of kind {kind} at byte {entry}: the layout is not the one known here")
                if kind != MACHINE_CODE or entry_arch != arch:
                    data[start : start + entry_payload] = bytes(entry_payload)
                entry = start + entry_payload
    return dict(found)


def fat_binaries(library: Path) -> list[tuple[int, int]]:
    """Return (offset, size) of the sections of an ELF library that hold GPU code."""
    listing = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    lines = [line for line in listing.splitlines() if ".nv_fatbin" in line or "__nv_relfatbin" in line]
    fields = [line.split("]", 1)[1].split() for line in lines]
    return [(int(each[3], 16), int(each[4], 16)) for each in fields]


def pack(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        own = [f"fbgemm-gpu=={options.fbgemm}", f"torchrec=={options.torchrec}"]
        download([*own, *requirements()], options.python, wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(site)
        for library in sorted((site / "fbgemm_gpu").rglob("*.so")):
            data = bytearray(library.read_bytes())
            found = keep_architecture(data, fat_binaries(library), options.arch)
            library.write_bytes(data)
            print(f"{library.name}: {', '.join(f'sm_{arch} {size >> 20} MiB' for arch, size in sorted(found.items()))}")
        with tarfile.open(options.output, "w:xz") as archive:
            archive.add(site, arcname=".")
    print(f"{options.output}: {options.output.stat().st_size / 2**20:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("bundle.tar.xz"))
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="of the machine")
    parser.add_argument("--arch", type=int, default=90, help="80 A100, 90 H100 and H200, 100 B200")
    parser.add_argument("--fbgemm", default="1.9.0")
    parser.add_argument("--torchrec", default="1.9.2")
    pack(parser.parse_args())


if __name__ == "__main__":
    main()
