"""Check whether this machine can train, and how to fix it if not:  python -m pipeline doctor

It needs only Python itself, because it finds what is missing or broken.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.runtime.process.stdout import write_out
from pipeline.sharding.compat import WRITTEN_FOR  # standard library only, like this file

# torch -> (torchrec, fbgemm) that were released for each other. Other pairs fail with `undefined
# symbol`, or `operator ... does not exist` (pytorch/torchrec#551, #770, #2857).
RELEASED_TOGETHER = {"2.14": ("1.9", "1.9"), "2.13": ("1.8", "1.8"), "2.12": ("1.7", "1.7"), "2.11": ("1.6", "1.6")}
TESTED = WRITTEN_FOR["torch"]  # the version that this release's tests use; training refuses others
PINS = {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm": "1.9.0"}  # as in setup.cfg and the Makefile
# fbgemm -> the sm_XY in its CUDA wheel, read from the .nv_fatbin sections of its libraries. The
# wheel has no PTX, so a GPU of another generation (T4, V100, RTX 50) fails at the first lookup: "no
# kernel image".
MACHINE_CODE = {"1.9": (80, 90, 100), "1.8": (80, 90, 100)}
MIN_DRIVER = {"12": 525, "13": 580}  # CUDA -> NVIDIA's driver for Linux (docs.nvidia.com/deploy/cuda-compatibility)
FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")
DEVICE_FILE = Path("/dev/nvidia0")
MODULES = {  # import name -> distribution
    "hydra": "hydra-core", "iopath": "iopath", "torchx": "torchx", "yaml": "PyYAML", "numpy": "numpy", "rich": "rich",
    "pyarrow": "pyarrow", "duckdb": "duckdb", "tensorboard": "tensorboard", "tensordict": "tensordict",
    "torchmetrics": "torchmetrics", "tqdm": "tqdm", "pyre_extensions": "pyre-extensions", "numba": "numba",
    "scipy": "scipy", "psutil": "psutil", "jinja2": "Jinja2",
}  # fmt: skip
MIN_SHM_BYTES = 512 << 20  # Docker's default is 64 MiB; NCCL and pinned batches need more
MIN_DISK_BYTES = 5 << 30
PROBE_TIMEOUT_S = 180  # a machine with ten times as many processes as cores takes a minute to import torch
# so that a probe imports this package from any folder
PROBE_PATH = [str(Path(__file__).parents[4])]
GPU_PROBES = ["gpus", "lookup_cuda", "all_to_all_nccl", "compiler"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix`: the command that fixes a failure; empty if all is well."""

    name: str
    found: str
    fix: str = ""


def diagnose() -> list[Finding]:
    """Return all findings in the order of the report.

    It takes seconds; the probes run at the same time.
    """
    has_gpu = bool(_nvidia_gpus()) or DEVICE_FILE.exists()
    # The CUDA set is also correct on a host without GPUs: a login node that shares its environment
    # with GPU nodes.
    gpu_set = has_gpu or set(_fbgemms()) == {"fbgemm-gpu"}
    probes = ["lookup_cpu", "all_to_all_gloo"] + (GPU_PROBES if has_gpu else [])
    with ThreadPoolExecutor(len(probes)) as pool:
        probed = [pool.submit(probe, name, gpu_set) for name in probes]
        findings = [_python(), *_stack(gpu_set), *_builds(has_gpu), _modules(gpu_set)]
        findings += [future.result() for future in probed]
    if not has_gpu:
        findings.append(Finding("GPU", "none found: trains on CPU"))
    return [*findings, _shared_memory(), _disk(), _cores()]


def stack_command(gpu: bool) -> str:
    """Return the command that installs the tested set and removes the other build of FBGEMM, which
    has the same files.
    """
    package, other = ("fbgemm-gpu", "fbgemm-gpu-cpu") if gpu else ("fbgemm-gpu-cpu", "fbgemm-gpu")
    # pip prefers 2.14.1+cpu to 2.14.1 if it sees an index of CPU builds.
    torch = f"'torch=={PINS['torch']},!={PINS['torch']}+cpu'" if gpu else f"torch=={PINS['torch']}"
    remove = f"pip uninstall -y {' '.join(FBGEMM)} && " if _version(other) else ""
    return (
        f"{remove}pip install {torch} {package}=={PINS['fbgemm']} && pip install --no-deps torchrec=={PINS['torchrec']}"
    )


def why_not_the_set(name: str) -> str:
    """Return why the installed packages are not the `cpu` or the `gpu` set; "" if they are.

    `make` calls it after installing.
    """
    both = _fbgemms()
    if len(both) > 1:
        return f"both {' and '.join(both)} are installed, and each overwrites the other's files"
    variant, wanted = _fbgemm_variant(), "cuda" if name == "gpu" else "cpu"
    if variant != wanted:
        return f"fbgemm is its {variant or 'missing'} build, and STACK={name} needs its {wanted} build"
    if name == "gpu" and not _torch_cuda():
        return (
            f"torch {_torch_version()} is a CPU build, and STACK=gpu needs the CUDA build torch {PINS['torch']}; "
            "pip uses an index or a folder of CPU builds: check `pip config list` and PIP_FLAGS"
        )
    if name == "gpu" and (why := _other_cuda()):
        return why
    return ""


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", found, "" if sys.version_info >= (3, 11) else "make PYTHON=python3.11 install")


def _stack(gpu: bool) -> list[Finding]:
    """Check that torch, torchrec and fbgemm are installed and were tested together."""
    torch, torchrec, fbgemms = _version("torch"), _version("torchrec"), _fbgemms()
    fix = stack_command(gpu)
    findings = [
        Finding(name, found or "missing", "" if found else fix)
        for name, found in (("torch", torch), ("torchrec", torchrec))
    ]
    if len(fbgemms) > 1:
        return [
            *findings,
            Finding("fbgemm", f"both {', '.join(f'{name} {found}' for name, found in fbgemms.items())}", fix),
        ]
    name, fbgemm = next(iter(fbgemms.items()), ("", ""))
    findings.append(Finding("fbgemm", f"{name} {fbgemm}" if fbgemm else "missing", "" if fbgemm else fix))
    if torch and torchrec and fbgemm:
        together = f"torch {_minor(torch)}, torchrec {_minor(torchrec)}, fbgemm {_minor(fbgemm)}"
        if RELEASED_TOGETHER.get(_minor(torch)) != (_minor(torchrec), _minor(fbgemm)):
            findings.append(Finding("tested set", f"{together} do not belong together", fix))
        elif _minor(torch) != TESTED:
            findings.append(
                Finding("tested set", f"{together}, but this release was tested only with torch {TESTED}", fix)
            )
        else:
            findings.append(Finding("tested set", together))
    return findings


def _builds(has_gpu: bool) -> list[Finding]:
    """Check that torch and fbgemm are builds that work together, and with this host's GPUs."""
    cuda, variant = _torch_cuda(), _fbgemm_variant()
    if not _torch_version() or not variant:
        return []  # one is missing, which is another finding
    torch = f"torch {_torch_version()} for {f'CUDA {cuda}' if cuda else 'CPU'}"
    found = f"{torch}, fbgemm for {'CUDA' if variant == 'cuda' else 'CPU'}"
    if variant == "cuda" and not cuda:
        return [Finding("builds", f"{found}: fbgemm does not load", stack_command(gpu=True))]
    if variant == "cuda" and (why := _other_cuda()):
        return [Finding("builds", why, stack_command(gpu=True))]
    if variant == "cpu" and has_gpu:
        return [Finding("builds", f"{found}: no lookup runs on this host's GPU", stack_command(gpu=True))]
    if variant == "cpu" and cuda:
        return [Finding("builds", f"{found}: trains on CPU only, which works")]
    return [Finding("builds", found)]


def _fbgemms() -> dict[str, str]:
    return {name: found for name in FBGEMM if (found := _version(name))}


def _torch_version() -> str:
    return _match_in_file("torch", "version.py", r"(?m)^__version__ = '(.*)'")


def _torch_cuda() -> str:
    """Return the CUDA version that torch is built for, "" for a CPU build.

    Its metadata on PyPI lack it.
    """
    return _match_in_file("torch", "version.py", r"(?m)^cuda\b.*= '(.*)'")


def _fbgemm_variant() -> str:
    """Return cpu or cuda from the installed files, because two distributions have the same
    files.
    """
    return _match_in_file("fbgemm_gpu", "docs/target.default.json.py", r'"variant": "(\w+)"')


def _other_cuda() -> str:
    """Return an error if FBGEMM links the runtime of another CUDA than torch's."""
    cuda = _torch_cuda()
    linked = _match_in_file("fbgemm_gpu", "fbgemm_gpu_embedding_inplace_ops.so", r"libcudart\.so\.(\d+)")
    if not linked or linked == cuda.split(".")[0]:
        return ""
    return f"torch {_torch_version()} is for CUDA {cuda}, but fbgemm for CUDA {linked}: fbgemm does not load"


def _match_in_file(package: str, file: str, pattern: str) -> str:
    """Search a file of a package without importing it, because an import may fail or crash."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    found = re.search(pattern, path.read_text("latin-1")) if path is not None and path.is_file() else None
    return found[1] if found else ""


def has_machine_code(capability: tuple[int, int], fbgemm: str) -> bool:
    """Return whether this fbgemm's kernels run on a GPU: sm_XY runs on X.Y and later minors of X.

    True for an unknown fbgemm.
    """
    codes = MACHINE_CODE.get(_minor(fbgemm))
    return codes is None or any(code // 10 == capability[0] and code % 10 <= capability[1] for code in codes)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _minor(found: str) -> str:
    return ".".join(found.split("+")[0].split(".")[:2])


def _modules(gpu: bool) -> Finding:
    missing = [distribution for module, distribution in MODULES.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return Finding("libraries", f"all {len(MODULES)} found")
    checkout = (Path(__file__).parents[4] / "setup.cfg").is_file()
    extra = "gpu" if gpu else "cpu"
    source = f"-e '.[{extra}]'" if checkout else f"'torchrec-pipeline[{extra}]'"
    return Finding("libraries", f"missing: {', '.join(missing)}", f"pip install {source}")


def probe(name: str, gpu: bool) -> Finding:
    """Run one of pipeline.extras.doctor.probes in a separate process.

    A crash or a hang is a finding too.
    """
    command = [sys.executable, "-m", "pipeline.extras.doctor.probes", name]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*PROBE_PATH, os.environ.get("PYTHONPATH", "")]).rstrip(":")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=environ, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Finding(name, f"no answer within {PROBE_TIMEOUT_S} s", _probe_fix(name, gpu))
    if done.returncode == 0:
        return Finding(name, _last_line(done.stdout))
    if done.returncode < 0:
        return Finding(name, f"crashed with {signal.Signals(-done.returncode).name}", _probe_fix(name, gpu))
    reason = _last_line(done.stderr) or f"exit code {done.returncode}"
    if name == "compiler":  # a job trains without it
        return Finding(name, f"trainer.compile=true would have no effect: {reason}")
    fix = stack_command(gpu) if "No module named" in reason else _probe_fix(name, gpu, reason)
    return Finding(name, reason, fix)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _probe_fix(name: str, gpu: bool, reason: str = "") -> str:
    if name == "all_to_all_gloo":
        return "GLOO_SOCKET_IFNAME=lo python -m pipeline.extras.doctor.probes all_to_all_gloo"
    if name == "all_to_all_nccl":
        return "NCCL_DEBUG=INFO python -m pipeline.extras.doctor.probes all_to_all_nccl"
    if "compute capability" in reason:
        return "hardware=cpu  (or build FBGEMM for this GPU: docs/reference/troubleshooting.md)"
    if name in ("gpus", "lookup_cuda") and "driver" in reason:
        cuda = _torch_cuda()
        return f"install NVIDIA's driver {MIN_DRIVER.get(cuda.split('.')[0], 580)} or newer: torch is for CUDA {cuda}"
    return stack_command(gpu)


def _nvidia_gpus() -> list[str]:
    """Return one line per GPU that the driver lists, without torch, which may be the broken
    part.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]


def _shared_memory() -> Finding:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding("shared memory", "no /dev/shm", "mount -t tmpfs -o size=8G tmpfs /dev/shm")
    free = shutil.disk_usage(shm).free
    fix = "" if free >= MIN_SHM_BYTES else "mount -o remount,size=8G /dev/shm  (docker run --shm-size=8g ...)"
    return Finding("shared memory", f"{free / GIB:.2f} GiB free in /dev/shm", fix)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    fix = "" if free >= MIN_DISK_BYTES else "cd <a folder on a larger disk>, or set data.path and run_dir"
    return Finding("disk", f"{free / GIB:.1f} GiB free in {os.getcwd()}", fix)


def _cores() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding("cores and memory", f"{len(os.sched_getaffinity(0))} cores, {memory / GIB:.1f} GiB")


def report(findings: list[Finding]) -> str:
    """Return a plain table, then a command for each failure. It must be readable without rich."""
    width = max(len(finding.name) for finding in findings)
    lines = [
        f"{'FAIL' if finding.fix else 'ok':<5} {finding.name:<{width}}  {finding.found[:160]}" for finding in findings
    ]
    failed = [finding for finding in findings if finding.fix]
    lines += ["", "all is well: make train" if not failed else "fix it with:"]
    # One command may fix several findings.
    lines += [f"  {command}" for command in dict.fromkeys(finding.fix for finding in failed)]
    return "\n".join(lines)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        write_out((__doc__ or "").strip())
        return
    asked = re.fullmatch("stack=(cpu|gpu)", " ".join(sys.argv[1:]))
    if asked:
        if why := why_not_the_set(asked[1]):
            print(f"error: {why}; fix it with:\n  {stack_command(asked[1] == 'gpu')}", file=sys.stderr)
            sys.exit(1)
        return
    if sys.argv[1:]:
        print(f"error: doctor takes no arguments: {' '.join(sys.argv[1:])}", file=sys.stderr)
        sys.exit(2)
    findings = diagnose()
    write_out(report(findings))
    sys.exit(1 if any(finding.fix for finding in findings) else 0)
